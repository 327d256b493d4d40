"""One row of a plan: the step that a method would give, with an interval, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from taciturn.cost import ELEMENT_BYTES
from taciturn.link import Estimate
from taciturn.methods import parse
from taciturn.plan.candidates import Candidate
from taciturn.plan.exchange import Pricer
from taciturn.plan.model import Buffer, Model
from taciturn.plan.timeline import Piece, end_s, merged
from taciturn.plan.timing import Compute

__all__ = ["Prediction", "Predictor", "unpriced"]

STOCK_PASSES, IN_PLACE_PASSES, HOOK_PASSES = 2, 3, 4
"""Passes over all gradients beside the exchange: DDP copies them into its buckets and back; our
hook looks whether all are finite; and where its groups are not DDP's buckets, it copies as well."""

STOCK_S, HOOK_S = 0.001, 0.003
"""Processor seconds of DDP's own code and of our hook's in a step, beside passes over gradients and
what the probe measures: what the steps of ``benchmarks/plan_regret.work.jsonl`` took beyond the
rest, median over all methods. Ranks that share cores wait for each other's."""

OVERLAPPED = ("backend", "cast")
"""Methods of which the hook exchanges all groups at once, in DDP's memory where it can."""

MOST_STAGES, FEW_STAGES = 1024, 64
"""Of a timeline, and when many are made, for a crossover; neighbours are joined."""


class _Stage(NamedTuple):
    """One exchange on the timeline of a step, in seconds on the probed link."""

    ready_s: float
    """When backward has made its buffer, on all ranks that share the cores."""
    latency_s: float
    transfer_s: float
    rest_s: float
    taken_s: float
    """Of a core by the system's copies: the same whatever the link carries."""


@dataclass(frozen=True)
class Prediction:
    """What a plan says of one candidate. Seconds are per optimizer step, on the slowest rank.

    Attributes:
        name: of the candidate.
        method: for ``ddp.attach``.
        quality: the strictest demand that it meets.
        step_s: with its interval.
        exposed_s: by which exchanging makes the step longer than its compute.
        exchange_s: of all exchanges, one after the other.
        codec_s: of which coding.
        sent_bytes: by each rank; None where the backend does not say.
        memory_bytes: beside parameters, gradients and DDP's own buckets.
        notes: why it is extrapolated, or what is not known; empty where all was measured.
        known: whether the method was measured on this link.
        stock: DDP's own buckets and hook.
        local_steps: optimizer steps to one exchange.
    """

    name: str
    method: str
    quality: str
    step_s: Estimate
    exposed_s: float
    exchange_s: float
    codec_s: float
    sent_bytes: int | None
    memory_bytes: int
    notes: tuple[str, ...]
    known: bool
    stock: bool
    local_steps: int

    @property
    def extrapolated(self) -> bool:
        """Whether sizes, ranks or the method lie outside of what was measured."""
        return bool(self.notes)

    @property
    def half_s(self) -> float:
        """Half of the interval: by how much the step may be off."""
        return (self.step_s.high - self.step_s.low) / 2


class Predictor:
    """The step of one candidate, also on a faster or slower link.

    Args:
        candidate: which.
        model: what is exchanged.
        pricer: what exchanges cost.
        compute: what is beside them.
    """

    def __init__(
        self, candidate: Candidate, model: Model, pricer: Pricer, compute: Compute
    ) -> None:
        self.candidate, self.model, self.compute = candidate, model, compute
        self.link, self.ranks = pricer.link, pricer.ranks
        self.in_place = candidate.stock or parse(candidate.method).name in OVERLAPPED
        self.buffers: Sequence[Buffer] = model.buckets() if self.in_place else model.groups()
        self.parts = [pricer.seconds(candidate.method, buffer) for buffer in self.buffers]
        self.finishing = (
            pricer.finishing().total_s if candidate.quality == "mean" and self.ranks > 1 else 0.0
        )
        per_host = self.link.ranks_per_host
        # 0: a core each for backward and for coding; 1: fewer cores than ranks.
        self.sharing = min(1.0, max(0.0, (2 * per_host - self.link.cores) / per_host))
        # Of ranks that take turns on cores the last one has made no gradient while others make
        # theirs, and each buffer waits for the last.
        self.turn = 1 / self.link.crowding
        self.own_code_s = (STOCK_S if candidate.stock else HOOK_S) * self.link.crowding
        # What an exchange takes of a core though no coding is in it: the system's copies.
        self.taken = 1 - 1 / max(1.0, self.link.matmul_beside_link.value)

    @cached_property
    def _passes_s(self) -> float:
        """Seconds of copying gradients to where they are exchanged from, of a step."""
        passes = IN_PLACE_PASSES if self.in_place else HOOK_PASSES
        if self.candidate.stock:
            passes = STOCK_PASSES
        return passes * self.link.pass_s(ELEMENT_BYTES * self.model.numel)

    @cached_property
    def own_error(self) -> float:
        """Relative error of the exchanges, of this method alone: their mean, by their seconds."""
        weights = [part.total_s() for part in self.parts]
        total = sum(weights)
        if not total:
            return max(part.own_error for part in self.parts)
        return sum(w * part.own_error for w, part in zip(weights, self.parts, strict=True)) / total

    @cached_property
    def shared_error(self) -> float:
        """The same of what is alike for all methods."""
        return max(part.shared_error for part in self.parts)

    @cached_property
    def error(self) -> float:
        """Both together."""
        return math.hypot(self.own_error, self.shared_error)

    def exchange_s(self, transfer_scale: float = 1.0) -> float:
        """Seconds of all exchanges of one average, one after the other."""
        parts = (s.latency_s + s.transfer_s * transfer_scale + s.rest_s for s in self._stages)
        return sum(parts) + self.finishing

    @cached_property
    def _stages(self) -> Sequence[_Stage]:
        backward_s = self.compute.backward_s
        stages = []
        for buffer, part in zip(self.buffers, self.parts, strict=True):
            before_s = backward_s - self.compute.ready_s(buffer.ready)
            link = part.link
            ready_s, taken_s = backward_s - self.turn * before_s, self.taken * link.total_s
            stages.append(_Stage(ready_s, link.latency_s, link.transfer_s, part.rest_s, taken_s))
        return merged(stages, MOST_STAGES)

    @cached_property
    def _few_stages(self) -> Sequence[_Stage]:
        return merged(self._stages, FEW_STAGES)

    def step_s(
        self, transfer_scale: float = 1.0, factor: float = 1.0, roughly: bool = False
    ) -> float:
        """Seconds of a step.

        Args:
            transfer_scale: how much slower each byte travels than on the probed link.
            factor: of the exchanges' seconds: how far a prediction may be off.
            roughly: on a timeline of few stages, for when many are made.
        """
        compute = self.compute
        if self.candidate.local_steps > 1:
            exchange_s = factor * (
                self.exchange_s(transfer_scale) + self._passes_s + self.own_code_s
            )
            return compute.step_s + exchange_s / self.candidate.local_steps
        pieces = [
            Piece(
                ready_s,
                factor * max(0.0, latency_s + transfer_s * transfer_scale - taken_s),
                factor * (rest_s + taken_s),
            )
            for ready_s, latency_s, transfer_s, rest_s, taken_s in (
                self._few_stages if roughly else self._stages
            )
        ]
        beside_s = end_s(compute.backward_s, pieces, self.sharing)
        after_s = factor * (self.finishing + self._passes_s + self.own_code_s)
        return compute.step_s - compute.backward_s + beside_s + after_s

    def predict(self) -> Prediction:
        """The row of the table."""
        value = self.step_s()
        low, high = (self.step_s(factor=max(0.0, 1 + sign * self.error)) for sign in (-1, 1))
        once = self.candidate.local_steps
        sent = [part.sent_bytes for part in self.parts]
        notes = tuple(dict.fromkeys(note for part in self.parts for note in part.notes))
        return Prediction(
            name=self.candidate.name,
            method=self.candidate.method,
            quality=self.candidate.quality,
            step_s=Estimate(value, min(low, value), max(high, value)),
            exposed_s=value - self.compute.step_s,
            exchange_s=self.exchange_s() / once,
            codec_s=sum(part.codec_s for part in self.parts) / once,
            sent_bytes=None if None in sent else sum(s for s in sent if s is not None) // once,
            memory_bytes=self._memory_bytes(),
            notes=_shortened(notes),
            known=all(part.known for part in self.parts),
            stock=self.candidate.stock,
            local_steps=once,
        )

    def _memory_bytes(self) -> int:
        whole = ELEMENT_BYTES * self.model.numel
        held = max(part.workspace_bytes for part in self.parts)
        if not self.candidate.stock:
            held += whole  # the groups' buffers
        method = self.candidate.method
        if "feedback=true" in method or method.startswith(("powersgd", "topk")):
            held += 2 * whole  # the residual, and the next one while it is formed
        if self.candidate.local_steps > 1:
            held += 2 * whole  # the anchor, and the outer optimizer's momentum
        return held


def _shortened(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return notes with the first of each kind: buffers of many sizes say the same."""
    sizes = [note for note in notes if note.startswith("a buffer of ")]
    others = tuple(note for note in notes if note not in sizes)
    if len(sizes) > 1:
        return (*others, f"{sizes[0]}, and {len(sizes) - 1} more sizes")
    return (*others, *sizes)


def unpriced(model: Model, candidate: Candidate) -> str:
    """Return why a candidate cannot be priced for a model; empty if it can."""
    if not model.shapes_known and candidate.method.startswith("powersgd"):
        return "needs the shapes of a model, not sizes of buckets"
    return ""

"""Seconds of one buffer's average by one method on one link, and how far to trust them.

Three parts: latency of rounds and transfer of bytes come from the closed forms of
:mod:`taciturn.cost` or, for the backend's own all_reduce, from its measured curve; the *rest* is
what the method took beyond them when it was measured end to end: coding, copies, and waiting for
cores that ranks share. At the sizes and the number of ranks that were measured the three add up to
what was measured; between sizes the rest is interpolated. Beyond, it is carried on, and the seconds
say "extrapolated".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from taciturn.cost import (
    ELEMENT_BYTES,
    LinkSeconds,
    all_reduce_seconds,
    gathering,
    interpolate,
    is_backends,
    link_seconds,
    option,
    schedule,
)
from taciturn.errors import InputError, MethodError
from taciturn.grammar import Method
from taciturn.link import Fit, Link, MethodSpeed
from taciturn.methods import parse
from taciturn.plan.candidates import key_of
from taciturn.plan.model import Buffer

__all__ = ["ExchangeSeconds", "Pricer"]

LEAST_ERROR = 0.035
"""Relative error of any prediction of an exchange: the standard error of a measured step, median
over the rows of ``benchmarks/ddp_step.json``: what is measured no better is predicted no better."""
CARRIED_ON_ERROR = 0.25
"""More, where sizes or the number of ranks lie outside of what was measured. At least: of what a
method takes beside its closed form, so much for each doubling of its largest size."""
ROUNDS_ERROR = 0.10
"""More, of what rounds take beside their bytes, for each doubling of the ranks that were probed: of
many rounds, each as between few ranks, nobody has seen one."""
SHAPES_ERROR = 0.10
"""More, where coding depends on shapes and was measured with others."""
SAME_SHAPES = 0.02
"""Relative, of the bytes sent: less says that the shapes were these, as far as they matter."""
UNMEASURED_ERROR = 1.0
"""Of the rest of a method that was not measured at all."""

CAST_PASSES = 2
"""Passes over a buffer that narrowing and widening takes, where the cast was not measured."""
FEEDBACK_PASSES = 6
"""Passes that error feedback takes: two norms, adding the old residual, three of the new one."""
_BIASED = ("powersgd", "topk")


@dataclass(frozen=True)
class ExchangeSeconds:
    """Seconds of one exchange of one buffer.

    Attributes:
        link: of rounds and of bytes.
        rest_s: beyond them: coding, copies, cores that are shared.
        codec_s: of which coding, by the ledger of the ranks that measured it.
        own_error: relative, of the sum, of this method alone; about what two thirds of predictions
            err by at most.
        shared_error: the same of what is the same for all methods: a link that moved since, and
            other ranks than were probed.
        sent_bytes: by each rank; None where the backend's own all_reduce does not say.
        workspace_bytes: beside the buffer, while it runs.
        notes: why it is extrapolated, or not known; empty if it was measured.
        known: whether this method was measured on this link at all.
    """

    link: LinkSeconds
    rest_s: float
    codec_s: float
    own_error: float
    shared_error: float
    sent_bytes: int | None
    workspace_bytes: int
    notes: tuple[str, ...] = ()
    known: bool = True

    @property
    def error(self) -> float:
        """Both errors together."""
        return math.hypot(self.own_error, self.shared_error)

    def total_s(self) -> float:
        """Seconds in all."""
        return self.link.total_s + self.rest_s


class Pricer:
    """What exchanges cost between so many ranks, over a link that was measured between some.

    Args:
        link: as probed.
        ranks: that are planned for. Each further host is taken to be like the probed ones, with as
            many ranks.
    """

    def __init__(self, link: Link, ranks: int) -> None:
        self.link, self.ranks = link, ranks
        try:
            self._speeds = {key_of(speed.method): speed for speed in link.methods}
        except MethodError as error:
            raise InputError(f"the link has a method that is not known: {error}") from error
        self._rests_of: dict[str, list[float]] = {}
        self._made: dict[tuple[object, ...], ExchangeSeconds] = {}

    def seconds(self, method_text: str, buffer: Buffer) -> ExchangeSeconds:
        """Seconds of one exchange of ``buffer``."""
        depends_on_shapes = method_text.startswith("powersgd")
        key = (method_text, buffer.numel, buffer.shapes if depends_on_shapes else None)
        if key not in self._made:
            self._made[key] = self._price(parse(method_text), buffer)
        return self._made[key]

    def finishing(self) -> LinkSeconds:
        """Of the round in which replicas that differ agree whether all was finite."""
        return link_seconds(gathering(8, self.ranks), self.link)

    def _price(self, method: Method, buffer: Buffer) -> ExchangeSeconds:
        # Of biased methods it is in what was measured.
        more = method.options.get("feedback") is True and method.name not in _BIASED
        speed = self._speeds.get(key_of(method.text))
        made = self._backends(method, speed, buffer) if is_backends(method) else None
        if made is None:
            made = self._scheduled(method, speed, buffer)
        return _plus(made, FEEDBACK_PASSES * self._pass_s(buffer)) if more else made

    def _pass_s(self, buffer: Buffer) -> float:
        return self.link.pass_s(ELEMENT_BYTES * buffer.numel)

    # -- the backend's own

    def _backends(
        self, method: Method, speed: MethodSpeed | None, buffer: Buffer
    ) -> ExchangeSeconds | None:
        if method.name == "powersgd":
            return None
        wire = str(option(method, "wire") or "fp32") if method.name != "mean" else "fp32"
        item_bytes = 2 if wire in ("bf16", "fp16") else ELEMENT_BYTES
        fit, notes = self._curve(wire)
        size_bytes = item_bytes * buffer.numel
        link = all_reduce_seconds(fit, self.link.ranks, size_bytes, self.ranks)
        if not fit.covers(size_bytes):
            notes += (_beyond(size_bytes, fit.sizes_bytes[0], fit.sizes_bytes[-1]),)
        gloo = self.link.backend == "gloo"  # which sends as a ring does; others choose
        carried = CARRIED_ON_ERROR if notes else 0.0
        notes += self._ranks_note()
        rest_s = codec_s = 0.0
        error = fit.leave_one_out_error
        narrow = item_bytes != ELEMENT_BYTES
        if speed is not None:
            rests = [
                max(0.0, seconds - self._curve_s(fit, item_bytes * n))
                for n, seconds in zip(speed.elems, speed.seconds, strict=True)
            ]
            rest_s, codec_s = (
                _carried(speed.elems, values, buffer.numel) for values in (rests, speed.codec_s)
            )
        elif narrow:
            rest_s = codec_s = CAST_PASSES * self._pass_s(buffer)
        return ExchangeSeconds(
            link=link,
            rest_s=rest_s,
            codec_s=codec_s,
            own_error=self._own_error(error, carried, self._rounds_error(link, rest_s)),
            shared_error=self._shared_error,
            sent_bytes=2 * (self.ranks - 1) * size_bytes // self.ranks if gloo else None,
            workspace_bytes=item_bytes * buffer.numel if narrow else 0,
            notes=notes,
        )

    def _curve(self, wire: str) -> tuple[Fit, tuple[str, ...]]:
        """Return the curve of a dtype, or that of the nearest that was measured."""
        curves = self.link.all_reduce
        if wire in curves:
            return curves[wire], ()
        for other in ("bf16", "fp16", "fp32"):
            if other in curves:
                return curves[other], (f"the backend's {wire} taken to be as its {other}",)
        raise AssertionError("a link has one curve of all_reduce at least")

    def _curve_s(self, fit: Fit, size_bytes: int) -> float:
        return all_reduce_seconds(fit, self.link.ranks, size_bytes, self.link.ranks).total_s

    # -- ours

    def _scheduled(
        self, method: Method, speed: MethodSpeed | None, buffer: Buffer
    ) -> ExchangeSeconds:
        steps = (0, 1) if method.options.get("alternate") is True else (0,)
        plans = [
            schedule(method, buffer.numel, self.ranks, shapes=buffer.shapes, step=step)
            for step in steps
        ]
        known = [plan for plan in plans if plan is not None]
        if not known:  # PowerSGD whose factors the backend sums
            return self._unmeasured(method)
        link = LinkSeconds(0.0, 0.0)
        for plan in known:
            link += link_seconds(plan, self.link).scaled(1 / len(known))
        sent = sum(plan.sent_bytes for plan in known) // len(known)
        workspace = max(plan.workspace_bytes for plan in known)
        notes = self._ranks_note()
        if speed is None:
            return ExchangeSeconds(
                link=link,
                rest_s=self._pass_s(buffer),
                codec_s=self._pass_s(buffer),
                own_error=self._own_error(UNMEASURED_ERROR),
                shared_error=self._shared_error,
                sent_bytes=sent,
                workspace_bytes=workspace,
                notes=(*notes, "its coding was not measured on this link"),
                known=False,
            )
        rests = self._rests_of.get(speed.method)
        if rests is None:
            rests = self._rests_of[speed.method] = self._rests(method, speed)
        # A biased method codes before and after its exchange, and not beside it.
        coding = speed.codec_s[-1] / speed.elems[-1] if method.name in _BIASED else 0.0
        rest_s = _carried(speed.elems, rests, buffer.numel, coding)
        codec_s = _carried(speed.elems, speed.codec_s, buffer.numel)
        near = _distance(speed, buffer.numel)
        inside = speed.elems[0] <= buffer.numel <= speed.elems[-1]
        if not inside:
            bounds = (ELEMENT_BYTES * speed.elems[0], ELEMENT_BYTES * speed.elems[-1])
            notes += (_beyond(ELEMENT_BYTES * buffer.numel, *bounds),)
        if rest_s < 0:  # faster than its closed form: so is the link, for this method
            total_s = max(link.total_s + rest_s, 0.1 * link.total_s)
            link, rest_s = link.scaled(total_s / link.total_s), 0.0
        if self.ranks != self.link.ranks:
            rest_s = self._of_more_ranks(method, buffer, known[0].rounds, rest_s, rests, speed)
        carried = 0.0
        if not inside:
            doublings = max(0.0, math.log2(buffer.numel / speed.elems[-1]))
            share = rest_s / (rest_s + link.total_s) if rest_s else 0.0
            carried = CARRIED_ON_ERROR * max(1.0, doublings * share)
        error = near * _left_out_error(speed)
        if method.name == "powersgd" and not _of_these_shapes(speed, buffer.numel, sent):
            error = math.hypot(error, SHAPES_ERROR)
        return ExchangeSeconds(
            link=link,
            rest_s=rest_s,
            codec_s=codec_s,
            own_error=self._own_error(error, carried, self._rounds_error(link, rest_s)),
            shared_error=self._shared_error,
            sent_bytes=sent,
            workspace_bytes=workspace,
            notes=notes,
        )

    def _of_more_ranks(
        self,
        method: Method,
        buffer: Buffer,
        rounds: int,
        rest_s: float,
        rests: list[float],
        speed: MethodSpeed,
    ) -> float:
        """Return the rest with other ranks than probed.

        What the smallest buffer took beyond its coding is what rounds cost a processor: there are
        more of them. Of top-k, all unpack what all have sent.
        """
        if method.name == "topk":
            return rest_s * max(1.0, self.ranks / self.link.ranks)
        probed = schedule(method, buffer.numel, self.link.ranks, shapes=buffer.shapes)
        assert probed is not None
        per_round_s = max(0.0, rests[0] - speed.codec_s[0]) / probed.rounds
        return max(0.0, rest_s + per_round_s * (rounds - probed.rounds))

    def _rests(self, method: Method, speed: MethodSpeed) -> list[float]:
        """Return what was measured at each size beyond the closed form there; may be negative."""
        rests = []
        for numel, seconds, told_s in zip(speed.elems, speed.seconds, speed.link_s, strict=True):
            link_s = told_s  # of PowerSGD, whose shapes there only the probe knows
            if method.name != "powersgd":
                plan = schedule(method, numel, self.link.ranks)
                assert plan is not None
                link_s = link_seconds(plan, self.link).total_s
            rests.append(seconds - link_s)
        return rests

    def _unmeasured(self, method: Method) -> ExchangeSeconds:
        nothing = LinkSeconds(0.0, 0.0)
        note = f"what the backend takes for the factors of {method.text} was not measured"
        return ExchangeSeconds(
            nothing, 0.0, 0.0, UNMEASURED_ERROR, 0.0, None, 0, (note,), known=False
        )

    # -- trust

    def _ranks_note(self) -> tuple[str, ...]:
        if self.ranks == self.link.ranks:
            return ()
        return (f"{self.ranks} ranks, measured with {self.link.ranks}",)

    def _own_error(self, fitted: float, *more: float) -> float:
        return math.hypot(LEAST_ERROR, min(fitted, UNMEASURED_ERROR), *more)

    def _rounds_error(self, link: LinkSeconds, rest_s: float) -> float:
        """Return what other ranks than the probed ones add, by the share of rounds in it."""
        total_s = link.total_s + rest_s
        if not total_s:
            return 0.0
        doublings = abs(math.log2(self.ranks / self.link.ranks))
        return ROUNDS_ERROR * doublings * link.latency_s / total_s

    @property
    def _shared_error(self) -> float:
        more = CARRIED_ON_ERROR if self._ranks_note() else 0.0
        # Medians are over both sweeps: half as far from either as these are from each other.
        return math.hypot(self.link.drift / 2, more)


def _plus(made: ExchangeSeconds, more_s: float) -> ExchangeSeconds:
    return replace(made, rest_s=made.rest_s + more_s, codec_s=made.codec_s + more_s)


def _beyond(size_bytes: int, least_bytes: int, most_bytes: int) -> str:
    return (
        f"a buffer of {_size(size_bytes)}, measured from {_size(least_bytes)} to "
        f"{_size(most_bytes)}"
    )


def _size(size_bytes: int) -> str:
    """Return a size to three digits."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= factor:
            return f"{float(f'{size_bytes / factor:.3g}'):g} {unit}"
    return f"{size_bytes} B"


def _carried(
    elems: Sequence[int], values: Sequence[float], numel: int, least_per_elem: float = 0.0
) -> float:
    """Return a value at ``numel``: interpolated; below as the first one.

    Above it rises as it does between sizes, by its steepest rise to the last one; not in
    proportion, since much of it is of rounds and not of elements.
    """
    if numel <= elems[0]:
        return values[0]
    if numel <= elems[-1]:
        return interpolate(elems, values, numel)
    rises = [
        (values[-1] - value) / (elems[-1] - n)
        for n, value in zip(elems[:-1], values[:-1], strict=True)
    ]
    return values[-1] + max(least_per_elem, 0.0, *rises) * (numel - elems[-1])


def _distance(speed: MethodSpeed, numel: int) -> float:
    """Return how far the nearest measured size is: 0 at it, 1 from a factor of two on."""
    return min(1.0, *(abs(math.log2(numel / n)) for n in speed.elems))


def _of_these_shapes(speed: MethodSpeed, numel: int, sent_bytes: int) -> bool:
    """Whether what was measured at this size sent as much: a model's own group, or one like it."""
    if speed.sent_bytes is None or numel not in speed.elems:
        return False
    measured = speed.sent_bytes[speed.elems.index(numel)]
    return abs(measured - sent_bytes) <= SAME_SHAPES * sent_bytes


def _left_out_error(speed: MethodSpeed) -> float:
    """Return the median relative error of each inner size interpolated from its neighbours."""
    at, seconds = speed.elems, speed.seconds
    errors = [
        abs(
            interpolate((at[i - 1], at[i + 1]), (seconds[i - 1], seconds[i + 1]), at[i])
            / seconds[i]
            - 1
        )
        for i in range(1, len(at) - 1)
        if seconds[i] > 0
    ]
    return median(errors) if errors else 0.0

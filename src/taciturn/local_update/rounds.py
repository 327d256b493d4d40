"""Rounds of local steps: count them, exchange, and go on from where all ranks agree."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, get_args

import torch
import torch.distributed as dist

from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
from taciturn.exchange import Exchange, agree
from taciturn.local_update.companions import Buffers, Companions, OptimizerState
from taciturn.local_update.fragment import Fragment, Outcome, split, wide
from taciturn.local_update.trainee import Trainee
from taciturn.methods import as_aggregator
from taciturn.optimizers import check_optimizer, hyperparameters, parameters_of
from taciturn.ranges import check_number, check_whole
from taciturn.replicas import check_replicas
from taciturn.transport import DistributedTransport

__all__ = ["LocalUpdate", "Period", "RoundMetrics"]

Period = int | Callable[[int], int]
"""Local steps of a round; or a function of the round's number, from 0, for a growing period."""

_VERSION = 1

_COUNTS = ("steps", "round", "round_start", "exchanges", "skipped")
"""In a state, and the same on all ranks."""


@dataclass(frozen=True)
class RoundMetrics:
    """What the last finished exchange was, of one fragment or of all parameters."""

    exchanges: int
    """Finished so far; a round has one for each fragment."""
    steps: int
    """Local steps so far."""
    fragment: int
    sent_bytes: int | None
    """By this rank in this exchange; None where the backend does not say."""
    codec_s: float
    exchange_s: float
    """Seconds from its start to its end, in its thread if it overlaps local steps."""
    exposed_s: float
    """Seconds that the loop waited for it."""
    drift: float
    """Rms over ranks of the distance between a replica and their mean, relative to how far the mean
    went from the anchor in this round."""
    cosine: float
    """Mean over ranks of the cosine between a rank's pseudo-gradient and their average."""
    residual_norm: float
    skipped: int
    """Exchanges so far whose average was not finite, after which all ranks went back to the
    anchor, and a rank's optimizer state that was not finite began anew."""


class LocalUpdate:
    """Counts the optimizer's steps and exchanges when a round or a fragment's part of it is over.

    A context manager around the loop; without an exception its end is one more exchange, after
    which all replicas are equal.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Period,
        *,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        fragments: int,
        overlap_steps: int,
        mixing: float,
        warmup_steps: int,
        optimizer_state: OptimizerState,
        buffers: Buffers,
        method: str | Aggregator | Collective,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._period, self._overlap, self._mixing = steps, overlap_steps, mixing
        self._warmup, self._buffers = warmup_steps, buffers
        self._optimizer_state = optimizer_state
        self._transport: DistributedTransport | None = None
        self._steps = self._round = self._round_start = self._exchanges = self._skipped = 0
        self._metrics: RoundMetrics | None = None
        self._entered = self._active = False
        self._companions: Companions | None = None
        self._told: InputError | None = None
        self._worker: ThreadPoolExecutor | None = None
        if dist.is_available() and dist.is_initialized():
            transport = DistributedTransport(process_group, timeout_s)
            if transport.size > 1:
                self._transport = transport
                self._companions = Companions(model, optimizer, buffers, optimizer_state, transport)
            else:
                transport.close()
        problem: Exception | None = None
        items: dict[str, str] = {}
        try:
            self._trainee = Trainee(model, optimizer)
            self._check(fragments)
            self._fragments = self._cut(fragments, outer, method)
            items = {"steps": repr(steps) if isinstance(steps, int) else "a function"}
            items |= {"fragments": str(fragments), "overlap_steps": str(overlap_steps)}
            items |= {"warmup_steps": str(warmup_steps), "mixing": str(mixing)}
            items |= {"buffers": buffers, "optimizer_state": optimizer_state}
            items |= hyperparameters(self._fragments[0].outer, "the outer optimizer")
            for fragment in self._fragments:
                if fragment.exchange is not None:
                    prefix = f"fragment {fragment.index}, "
                    items |= {prefix + k: v for k, v in fragment.exchange.describe().items()}
        except Exception as error:
            problem = error
        if self._transport is not None:
            agree(self._transport, items, problem, type(self).__name__)
        elif problem is not None:
            raise problem

    def _check(self, fragments: int) -> None:
        if not callable(self._period):
            check_whole("steps", self._period, 1)
        check_whole("fragments", fragments, 1)
        check_whole("overlap_steps", self._overlap, 0)
        check_whole("warmup_steps", self._warmup, 0)
        if not callable(self._period) and self._overlap >= self._period:
            raise InputError(
                f"overlap_steps={self._overlap} with steps={self._period}: an exchange has to end "
                "before the next one of its parameters begins"
            )
        check_number("mixing", self._mixing, 0, hint="a share, below 1")
        if not self._mixing < 1:
            raise InputError(f"mixing={self._mixing!r}: give a share from 0 on and below 1")
        if self._buffers not in get_args(Buffers):
            raise InputError(f"buffers={self._buffers!r}: choose {', '.join(get_args(Buffers))}")
        if self._optimizer_state not in get_args(OptimizerState):
            raise InputError(
                f"optimizer_state={self._optimizer_state!r}: choose "
                f"{', '.join(get_args(OptimizerState))}"
            )

    def _cut(
        self,
        count: int,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        method: str | Aggregator | Collective,
    ) -> list[Fragment]:
        """Cut the parameters into fragments of about equal size, in order. Frozen ones belong."""
        named = list(self.model.named_parameters())
        if count > len(named):
            raise InputError(f"fragments={count}: this module has only {len(named)} parameters")
        fragments = []
        for index, part in enumerate(split(named, count)):
            anchor = {n: wide(p).clone() for n, p in part}
            exchange = None
            if self._transport is not None:
                own = method if count == 1 else deepcopy(method)  # state belongs to parameters
                exchange = Exchange(list(anchor.items()), as_aggregator(own), self._transport)
            optimizer = outer(list(anchor.values()))
            check_optimizer(optimizer, "outer(...)")
            if {*map(id, parameters_of(optimizer))} != {*map(id, anchor.values())}:
                raise InputError(
                    "outer(...) made an optimizer of other tensors than the list that it was "
                    "given: write it as outer=lambda anchor: torch.optim.SGD(anchor, lr=0.7)"
                )
            counted = exchange is not None and exchange.counted
            delta = {n: torch.zeros_like(a) for n, a in anchor.items()} if exchange else {}
            fragments.append(
                Fragment(index, dict(part), anchor, optimizer, exchange, counted, delta)
            )
        return fragments

    # -- around the loop

    def __enter__(self) -> Self:
        name = type(self).__name__
        if self._entered:
            raise InputError(
                f"this {name} was used already, and serves one with block: put all epochs into "
                "it, or make a new one"
            )
        problem = self._problem(begins=True)
        if self._transport is not None:
            agree(self._transport, {}, problem, f"beginning {name}")
        elif problem is not None:
            raise problem
        self._entered = True
        if self._transport is not None:
            assert self._companions is not None
            if self._steps == 0:
                check_replicas(self.model, self._transport).raise_if_different()
            self._companions.keep()
            if self._overlap:
                threads = torch.get_num_threads()
                self._worker = ThreadPoolExecutor(
                    1, "taciturn-local", lambda: torch.set_num_threads(threads)
                )
        self._handle = self.optimizer.register_step_post_hook(self._after_step)
        self._trainee.claim()
        self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.remove()
        try:
            if error is None:
                self.synchronize()
            elif self._transport is not None and not (
                isinstance(error, PeerError | MismatchError) or error is self._told
            ):
                with suppress(Exception):
                    self._transport.fail(
                        error if isinstance(error, Exception) else RuntimeError(repr(error))
                    )
        finally:
            self._active = False
            self._trainee.release()
            if self._worker is not None:
                self._worker.shutdown()
            if self._transport is not None:
                self._transport.close()

    def synchronize(self) -> None:
        """Exchange all that was not yet, so that all replicas are equal. Call it on every rank.

        The end of the ``with`` block does it.

        Raises:
            InputError: outside the ``with`` block, where no step is counted.
            MismatchError: another rank is at another step.
        """
        if not self._active:
            raise InputError(
                "synchronize() outside the with block, in which alone steps are counted: write "
                f"with taciturn.{type(self).__name__}(...): around the loop"
            )
        with torch.no_grad():
            for fragment in self._fragments:
                if fragment.pending is not None:
                    self._apply(fragment, self._mixing)
            if any(fragment.since for fragment in self._fragments):
                for fragment in self._fragments:
                    self._begin(fragment, last=True)
                    self._apply(fragment, 0.0)
                self._end_round()
            elif self._transport is not None:
                # Another rank may be in the midst of a round.
                agree(self._transport, self._where(last=True), self._problem(), "the round")

    def _problem(self, begins: bool = False) -> Exception | None:
        """Return what is wrong with model and optimizer on this rank, for all to hear of."""
        self._told = None
        try:
            if begins:
                self._trainee.check_free()
            self._trainee.check()
        except InputError as error:
            self._told = error
        return self._told

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._transport is None:
            self._steps += 1
            return
        with torch.no_grad():
            self._steps += 1
            for fragment in self._fragments:
                fragment.since += 1
                if fragment.pending is not None and self._steps >= fragment.due:
                    self._apply(fragment, self._mixing)
            steps = self._round_steps()
            place = self._steps - self._round_start
            count = len(self._fragments)
            for fragment in self._fragments:
                if place == max(1, round(steps * (fragment.index + 1) / count)):
                    self._begin(fragment, last=False)
                    if not self._overlap:
                        self._apply(fragment, 0.0)
            if place >= steps:
                self._end_round()

    def _round_steps(self) -> int:
        """Return the local steps of this round."""
        if self._round_start < self._warmup:
            return 1
        if not callable(self._period):
            return self._period
        steps = self._period(self._round)
        check_whole(f"steps({self._round})", steps, 1)
        return steps

    def _end_round(self) -> None:
        self._round += self._round_start >= self._warmup
        self._round_start = self._steps
        if self._companions is not None:
            if self._companions.exchanged:
                self._drain()
                self._companions.exchange()
            self._companions.keep()

    def _where(self, last: bool) -> dict[str, str]:
        """Return where in the loop this rank is; all exchange at the same place."""
        return {"the local steps when it exchanges": f"{self._steps}{', its last' * last}"}

    # -- one exchange

    def _begin(self, fragment: Fragment, last: bool) -> None:
        """Take the pseudo-gradient and begin to average it."""
        if self._transport is None:
            return
        if fragment.pending is not None:
            self._apply(fragment, self._mixing)
        for name, parameter in fragment.parameters.items():
            torch.sub(fragment.anchor[name], parameter, out=fragment.delta[name])
        fragment.since = 0
        fragment.due = self._steps + self._overlap
        where, problem = self._where(last), self._problem()
        fragment.hidden = self._worker is not None and not last
        if self._worker is not None and not last:
            fragment.pending = self._worker.submit(self._average, fragment, where, problem)
        else:
            outcome = self._average(fragment, where, problem)
            fragment.pending = Future()
            fragment.pending.set_result(outcome)

    def _average(
        self, fragment: Fragment, where: dict[str, str], problem: Exception | None
    ) -> Outcome:
        """Average a fragment's pseudo-gradient over ranks, and measure the drift."""
        assert fragment.exchange is not None
        transport = fragment.exchange.transport
        start, before = time.perf_counter(), transport.ledger.snapshot()
        # A rank whose scaler skipped a step, or whose data ended, is at another step.
        agree(transport, where, problem, "the round")
        own = [delta.clone() for delta in fragment.delta.values()]
        with torch.no_grad():
            finite = fragment.exchange.run(fragment.delta)
        spent = transport.ledger.snapshot() - before
        own_square, square, dot = _products(own, list(fragment.delta.values()))
        lengths = (own_square * square) ** 0.5
        cosine = dot / lengths if lengths > 0 else 1.0
        numbers = torch.tensor([own_square, cosine], dtype=torch.float64)
        numbers = numbers.to(transport.header_device)
        # In one call of the backend: rounds of our own each wait for cores that others compute on.
        transport.start_all_reduce(numbers)()
        squares, cosines = numbers.tolist()
        # mean |d_i - d|^2 = mean |d_i|^2 - |d|^2
        apart = max(squares / transport.size - square, 0.0)
        return Outcome(
            finite=finite,
            sent_bytes=spent.sent_bytes,
            codec_s=spent.codec_s,
            exchange_s=time.perf_counter() - start,
            drift=(apart / square) ** 0.5 if square > 0 else 0.0,
            cosine=cosines / transport.size,
        )

    def _apply(self, fragment: Fragment, mixing: float) -> None:
        """Wait for the average, step the anchor by it, and go there."""
        if fragment.pending is None:
            return
        start = time.perf_counter()
        pending, fragment.pending = fragment.pending, None
        outcome = pending.result()
        waited = time.perf_counter() - start
        if outcome.finite:
            for name, anchor in fragment.anchor.items():
                anchor.grad = fragment.delta[name]
            fragment.outer.step()
            for anchor in fragment.anchor.values():
                anchor.grad = None
        else:
            mixing = 0.0
            self._lose_round()
        for name, parameter in fragment.parameters.items():
            if mixing:
                parameter.lerp_(fragment.anchor[name].to(parameter.dtype), 1 - mixing)
            else:
                parameter.copy_(fragment.anchor[name])
        self._exchanges += 1
        exchange = fragment.exchange
        assert exchange is not None
        feedback = exchange.aggregator if isinstance(exchange.aggregator, ErrorFeedback) else None
        self._metrics = RoundMetrics(
            exchanges=self._exchanges,
            steps=self._steps,
            fragment=fragment.index,
            sent_bytes=outcome.sent_bytes if fragment.counted else None,
            codec_s=outcome.codec_s,
            exchange_s=outcome.exchange_s,
            exposed_s=waited if fragment.hidden else outcome.exchange_s,
            drift=outcome.drift,
            cosine=outcome.cosine,
            residual_norm=feedback.residual_norm if feedback else 0.0,
            skipped=self._skipped,
        )

    def _lose_round(self) -> None:
        """Go back to the anchor, on every rank, and with all of it."""
        assert self._companions is not None
        self._skipped += 1
        warnings.warn(
            f"after {self._steps} local steps some rank's parameters were not finite: all ranks "
            "went back to where this round began, and optimizer state that was not finite begins "
            "anew",
            stacklevel=5,
        )
        # Other fragments too: what one of them holds reaches all in the next step.
        for fragment in self._fragments:
            for name, parameter in fragment.parameters.items():
                parameter.copy_(fragment.anchor[name])
        self._companions.restart()

    def _drain(self) -> None:
        """Wait until nothing else uses the transport."""
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.pending.result()

    # -- for the loop

    def metrics(self) -> RoundMetrics | None:
        """Return what the last finished exchange was; None before the first, or with one rank."""
        return self._metrics

    def anchor_state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters as all ranks last agreed on them.

        Usable after an error: it is what the others can go on from when a rank is lost in a round.
        """
        return {
            name: anchor.to(fragment.parameters[name].dtype, copy=True)
            for fragment in self._fragments
            for name, anchor in fragment.anchor.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs in mid-round, beside model's and optimizer's states.

        Plain tensors and numbers; every rank has its own and saves its own.
        """
        return {
            "version": _VERSION,
            "kind": type(self).__name__,
            "settings": self._settings(),
            "ranks": self._transport.size if self._transport is not None else 1,
            "steps": self._steps,
            "round": self._round,
            "round_start": self._round_start,
            "exchanges": self._exchanges,
            "skipped": self._skipped,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def _settings(self) -> dict[str, Any]:
        period = self._period if isinstance(self._period, int) else "a function"
        return {
            "steps": period,
            "overlap_steps": self._overlap,
            "mixing": self._mixing,
            "warmup_steps": self._warmup,
            "fragments": len(self._fragments),
        }

    def load_state_dict(self, state: dict[str, Any], *, other_ranks: bool = False) -> None:
        """Restore what :meth:`state_dict` returned. Call it on every rank, before the loop.

        The outer optimizer's hyperparameters become those of the state.

        Args:
            state: of this rank.
            other_ranks: the number of ranks may have changed, as when one was lost: parameters go
                back to the anchor, the round begins anew, and residuals are dropped.

        Raises:
            InputError: the state is missing, damaged, or of other settings, ranks or parameters; or
                the loop has begun.
            MismatchError: another rank could not load its own, or has that of another time.
        """
        problem: Exception | None = None
        items: dict[str, str] = {}
        try:
            self._check_state(state, other_ranks)
            items = {key.replace("_", " "): str(state[key]) for key in _COUNTS}
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
                items[f"the anchor of fragment {fragment.index}"] = fragment.digest(saved)
        except Exception as error:
            problem = error
        if self._transport is not None:
            agree(self._transport, items, problem, f"loading {type(self).__name__}'s state")
        elif problem is not None:
            raise problem
        changed = state["ranks"] != (self._transport.size if self._transport is not None else 1)
        for key in _COUNTS:
            setattr(self, f"_{key}", state[key])
        if changed:
            self._round_start = self._steps
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved, anew=changed)

    def _check_state(self, state: dict[str, Any], other_ranks: bool) -> None:
        if self._entered:
            raise InputError("load the state before the with block, whose steps it goes on from")
        wanted = {"version", "kind", "settings", "ranks", "fragments", *_COUNTS}
        if not isinstance(state, dict) or wanted - set(state) or state["version"] != _VERSION:
            raise InputError(f"this is no state of a {type(self).__name__}")
        if state["kind"] != type(self).__name__:
            raise InputError(f"this state is of a {state['kind']}, not of a {type(self).__name__}")
        for key in _COUNTS:
            check_whole(key, state[key], 0, hint="this state is damaged")
        for key, value in self._settings().items():
            if state["settings"].get(key) != value:
                raise InputError(
                    f"this state is of {key}={state['settings'].get(key)!r}, and here it is "
                    f"{value!r}: resume with the settings that it was saved with"
                )
        ranks = self._transport.size if self._transport is not None else 1
        if state["ranks"] != ranks and not other_ranks:
            raise InputError(
                f"saved with {state['ranks']} ranks and resumed with {ranks}: load it with "
                "other_ranks=True to begin the round anew from where all ranks last agreed"
            )
        try:
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
                fragment.check_state(saved)
        except TaciturnError:
            raise
        except Exception as error:
            raise InputError(
                f"this state is damaged: {type(error).__name__}: {error}; take another one"
            ) from error


def _products(own: list[torch.Tensor], mean: list[torch.Tensor]) -> tuple[float, float, float]:
    """Return |own|^2, |mean|^2 and their product, in fp64."""
    sums = [0.0, 0.0, 0.0]
    for a, b in zip(own, mean, strict=True):
        x, y = a.flatten().double(), b.flatten().double()
        for place, value in enumerate((x @ x, y @ y, x @ y)):
            sums[place] += value.item()
    return sums[0], sums[1], sums[2]

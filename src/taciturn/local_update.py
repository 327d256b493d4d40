"""Fewer exchanges: several local steps, then one average - local SGD, DiLoCo, streaming DiLoCo.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD" (ICLR 2020: a phase of single steps first); Douillard et al., "DiLoCo"
(arXiv:2311.08105, algorithm 1) and "Streaming DiLoCo with overlapping communication"
(arXiv:2501.18512, algorithm 2: fragments, overlap, mixing).

All are one thing here. A copy of the parameters, the *anchor*, is the same on every rank. After a
round of local steps the ranks average how far each went from it, the *pseudo-gradient* anchor -
parameters; an outer optimizer steps the anchor by it; and the parameters become the anchor. With
outer SGD at rate 1 that is the average of the parameters: local SGD. What is averaged is the
difference and not the parameters, so that any aggregator may be used, with error feedback.

Averaging parameters is not centralised descent: the ranks drift apart within a round, and
``metrics()`` says how far.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from taciturn.aggregators import Mean
from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.collectives.ring import Ring
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.exchange import Exchange, agree
from taciturn.methods import as_aggregator
from taciturn.optimizers import check_optimizer
from taciturn.ranges import check_whole
from taciturn.replicas import check_replicas
from taciturn.transport import DistributedTransport

__all__ = ["DiLoCo", "LocalSGD", "RoundMetrics", "nesterov"]

Buffers = Literal["average", "rank 0", "keep"]
OptimizerState = Literal["keep", "average"]
Period = int | Callable[[int], int]
"""Local steps of a round; or a function of the round's number, from 0, for a growing period."""

_VERSION = 1


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
    anchor."""


@dataclass
class _Fragment:
    """Some of the parameters, which are exchanged together."""

    index: int
    parameters: dict[str, torch.Tensor]
    anchor: dict[str, torch.Tensor]
    outer: torch.optim.Optimizer
    exchange: Exchange | None
    """None with one rank."""
    counted: bool
    delta: dict[str, torch.Tensor]
    pending: Future[_Outcome] | None = None
    due: int = 0
    """The step after which the pending exchange is applied."""
    hidden: bool = False
    """The pending exchange goes on beside local steps."""
    since: int = 0
    """Local steps since its last exchange began."""


@dataclass(frozen=True)
class _Outcome:
    finite: bool
    sent_bytes: int
    codec_s: float
    exchange_s: float
    drift: float
    cosine: float


class _LocalUpdate:
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
        self._entered = False
        self._worker: ThreadPoolExecutor | None = None
        if dist.is_available() and dist.is_initialized():
            transport = DistributedTransport(process_group, timeout_s)
            if transport.size > 1:
                self._transport = transport
            else:
                transport.close()
        problem: Exception | None = None
        items: dict[str, str] = {}
        try:
            self._check(fragments)
            self._fragments = self._cut(fragments, outer, method)
            items = {"steps": repr(steps) if isinstance(steps, int) else "a function"}
            items |= {"fragments": str(fragments), "overlap_steps": str(overlap_steps)}
            items |= {"warmup_steps": str(warmup_steps), "mixing": str(mixing)}
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
        check_optimizer(self.optimizer)
        if isinstance(self.model, DistributedDataParallel):
            raise InputError(
                "a DistributedDataParallel module averages in every step already: give the module "
                "inside it"
            )
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
        if not 0 <= self._mixing < 1:
            raise InputError(f"mixing={self._mixing!r}: give a share from 0 on and below 1")
        if self._buffers not in get_args(Buffers):
            raise InputError(f"buffers={self._buffers!r}: choose {', '.join(get_args(Buffers))}")
        if self._optimizer_state not in get_args(OptimizerState):
            raise InputError(
                f"optimizer_state={self._optimizer_state!r}: choose "
                f"{', '.join(get_args(OptimizerState))}"
            )
        for name, parameter in self.model.named_parameters():
            if not parameter.dtype.is_floating_point or parameter.layout != torch.strided:
                raise InputError(
                    f"parameter {name!r} is {parameter.dtype}, {parameter.layout}: only dense real "
                    "ones can be averaged"
                )

    def _cut(
        self,
        count: int,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        method: str | Aggregator | Collective,
    ) -> list[_Fragment]:
        """Cut the parameters into fragments of about equal size, in order. Frozen ones belong."""
        named = list(self.model.named_parameters())
        if count > len(named):
            raise InputError(f"fragments={count}: this module has only {len(named)} parameters")
        fragments = []
        for index, part in enumerate(_split(named, count)):
            anchor = {n: _wide(p).clone() for n, p in part}
            exchange = None
            if self._transport is not None:
                own = method if count == 1 else deepcopy(method)  # state belongs to parameters
                exchange = Exchange(list(anchor.items()), as_aggregator(own), self._transport)
            optimizer = outer(list(anchor.values()))
            counted = exchange is not None and exchange.counted
            delta = {n: torch.zeros_like(a) for n, a in anchor.items()} if exchange else {}
            fragments.append(
                _Fragment(index, dict(part), anchor, optimizer, exchange, counted, delta)
            )
        return fragments

    # -- around the loop

    def __enter__(self) -> Self:
        if self._entered:
            raise InputError(f"this {type(self).__name__} was used already: make a new one")
        self._entered = True
        if self._transport is not None:
            if self._steps == 0:
                check_replicas(self.model, self._transport).raise_if_different()
            if self._overlap:
                threads = torch.get_num_threads()
                self._worker = ThreadPoolExecutor(
                    1, "taciturn-local", lambda: torch.set_num_threads(threads)
                )
        self._handle = self.optimizer.register_step_post_hook(self._after_step)
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
            elif self._transport is not None and not isinstance(error, PeerError | MismatchError):
                with suppress(Exception):
                    self._transport.fail(
                        error if isinstance(error, Exception) else RuntimeError(repr(error))
                    )
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            if self._transport is not None:
                self._transport.close()

    def synchronize(self) -> None:
        """Exchange all that was not yet, so that all replicas are equal. Call it on every rank.

        The end of the ``with`` block does it.
        """
        with torch.no_grad():
            for fragment in self._fragments:
                if fragment.pending is not None:
                    self._apply(fragment, self._mixing)
            if any(fragment.since for fragment in self._fragments):
                for fragment in self._fragments:
                    self._begin(fragment, last=True)
                    self._apply(fragment, 0.0)
                self._end_round()

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
        if self._transport is not None:
            self._average_buffers()
            if self._optimizer_state == "average":
                self._average_optimizer()

    # -- one exchange

    def _begin(self, fragment: _Fragment, last: bool) -> None:
        """Take the pseudo-gradient and begin to average it."""
        if self._transport is None:
            return
        if fragment.pending is not None:
            self._apply(fragment, self._mixing)
        for name, parameter in fragment.parameters.items():
            torch.sub(fragment.anchor[name], parameter, out=fragment.delta[name])
        fragment.since = 0
        fragment.due = self._steps + self._overlap
        where = {"the local steps when it exchanges": f"{self._steps}{', its last' * last}"}
        fragment.hidden = self._worker is not None and not last
        if self._worker is not None and not last:
            fragment.pending = self._worker.submit(self._average, fragment, where)
        else:
            outcome = self._average(fragment, where)
            fragment.pending = Future()
            fragment.pending.set_result(outcome)

    def _average(self, fragment: _Fragment, where: dict[str, str]) -> _Outcome:
        """Average a fragment's pseudo-gradient over ranks, and measure the drift."""
        assert fragment.exchange is not None
        transport = fragment.exchange.transport
        start, before = time.perf_counter(), transport.ledger.snapshot()
        # A rank whose scaler skipped a step, or whose data ended, is at another step.
        agree(transport, where, None, "the round")
        own = [delta.clone() for delta in fragment.delta.values()]
        with torch.no_grad():
            finite = fragment.exchange.run(fragment.delta)
        spent = transport.ledger.snapshot() - before
        own_square, square, dot = _products(own, list(fragment.delta.values()))
        lengths = (own_square * square) ** 0.5
        cosine = dot / lengths if lengths > 0 else 1.0
        numbers = torch.tensor([own_square, cosine], dtype=torch.float64)
        numbers = numbers.to(transport.header_device)
        Ring().all_reduce(numbers, transport)
        mean_square, mean_cosine = (numbers / transport.size).tolist()
        # mean |d_i - d|^2 = mean |d_i|^2 - |d|^2
        apart = max(mean_square - square, 0.0)
        return _Outcome(
            finite=finite,
            sent_bytes=spent.sent_bytes,
            codec_s=spent.codec_s,
            exchange_s=time.perf_counter() - start,
            drift=(apart / square) ** 0.5 if square > 0 else 0.0,
            cosine=mean_cosine,
        )

    def _apply(self, fragment: _Fragment, mixing: float) -> None:
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
            self._skipped += 1
            mixing = 0.0
            warnings.warn(
                f"after {self._steps} local steps some rank's parameters were not finite: all "
                "ranks went back to where this round began",
                stacklevel=4,
            )
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

    # -- what else replicas hold

    def _average_buffers(self) -> None:
        if self._buffers == "keep":
            return
        named = dict(self.model.named_buffers())
        real = {n: b for n, b in named.items() if b.dtype.is_floating_point}
        whole = {n: b for n, b in named.items() if n not in real}
        self._average_exactly(real if self._buffers == "average" else {})
        self._take_first(whole if self._buffers == "average" else named)

    def _average_exactly(self, named: dict[str, torch.Tensor]) -> None:
        assert self._transport is not None
        if named:
            self._drain()
            Exchange(list(named.items()), Mean(Ring()), self._transport).run(named)

    def _take_first(self, named: dict[str, torch.Tensor]) -> None:
        """Give every rank the first one's."""
        assert self._transport is not None
        if named:
            self._drain()
        for buffer in named.values():
            if self._transport.rank:
                buffer.zero_()
            whole = buffer.to(torch.int64) if buffer.dtype == torch.bool else buffer.contiguous()
            Ring().all_reduce(whole, self._transport)
            buffer.copy_(whole)

    def _average_optimizer(self) -> None:
        """Average the real tensors of the optimizer's state, in the parameters' order."""
        assert self._transport is not None
        named = {}
        for name, parameter in self.model.named_parameters():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    named[f"{name}: {key}"] = value
        self._drain()
        agree(self._transport, {"what the optimizer holds": repr(sorted(named))}, None, "the round")
        self._average_exactly(named)

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
            "fragments": [self._fragment_state(fragment) for fragment in self._fragments],
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

    def _fragment_state(self, fragment: _Fragment) -> dict[str, Any]:
        pending = None
        if fragment.pending is not None and fragment.pending.exception() is None:
            pending = {
                "due": fragment.due,
                "outcome": vars(fragment.pending.result()).copy(),
                "delta": {n: d.clone() for n, d in fragment.delta.items()},
            }
        return {
            "anchor": {n: a.clone() for n, a in fragment.anchor.items()},
            "outer": deepcopy(fragment.outer.state_dict()),
            "exchange": fragment.exchange.state_dict() if fragment.exchange else None,
            "since": fragment.since,
            "pending": pending,
        }

    def load_state_dict(self, state: dict[str, Any], *, other_ranks: bool = False) -> None:
        """Restore what :meth:`state_dict` returned. Call it on every rank, before the loop.

        Args:
            state: of this rank.
            other_ranks: the number of ranks may have changed, as when one was lost: parameters go
                back to the anchor, the round begins anew, and residuals are dropped.

        Raises:
            InputError: the state is missing, damaged, or of other settings, ranks or parameters.
            MismatchError: another rank could not load its own.
        """
        problem: Exception | None = None
        try:
            self._check_state(state, other_ranks)
        except Exception as error:
            problem = error
        if self._transport is not None:
            agree(self._transport, {}, problem, f"loading {type(self).__name__}'s state")
        elif problem is not None:
            raise problem
        changed = state["ranks"] != (self._transport.size if self._transport is not None else 1)
        for key in ("steps", "round", "round_start", "exchanges", "skipped"):
            setattr(self, f"_{key}", state[key])
        if changed:
            self._round_start = self._steps
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            _load_fragment(fragment, saved, changed)

    def _check_state(self, state: dict[str, Any], other_ranks: bool) -> None:
        wanted = {"version", "kind", "settings", "ranks", "steps", "round", "round_start"}
        wanted |= {"exchanges", "skipped", "fragments"}
        if not isinstance(state, dict) or wanted - set(state) or state["version"] != _VERSION:
            raise InputError(f"this is no state of a {type(self).__name__}")
        if state["kind"] != type(self).__name__:
            raise InputError(f"this state is of a {state['kind']}, not of a {type(self).__name__}")
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
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            if set(saved["anchor"]) != set(fragment.anchor):
                odd = sorted(set(saved["anchor"]) ^ set(fragment.anchor))
                raise InputError(
                    f"this state belongs to another model: {', '.join(map(repr, odd[:3]))} "
                    f"{'is' if len(odd) == 1 else 'are'} not in both"
                )
            for name, anchor in fragment.anchor.items():
                if saved["anchor"][name].shape != anchor.shape:
                    raise InputError(
                        f"{name!r} has shape {tuple(saved['anchor'][name].shape)} in this state, "
                        f"and {tuple(anchor.shape)} here: it belongs to another model"
                    )
            if fragment.exchange is not None and saved["exchange"] is not None:
                fragment.exchange.check_state(saved["exchange"])


def _load_fragment(fragment: _Fragment, saved: dict[str, Any], changed: bool) -> None:
    for name, anchor in fragment.anchor.items():
        anchor.copy_(saved["anchor"][name])
    fragment.outer.load_state_dict(saved["outer"])
    if fragment.exchange is not None and saved["exchange"] is not None:
        fragment.exchange.load_state_dict(saved["exchange"])
    fragment.since, fragment.pending = saved["since"], None
    pending = saved["pending"]
    if changed:
        fragment.since = 0
        with torch.no_grad():
            for name, parameter in fragment.parameters.items():
                parameter.copy_(fragment.anchor[name])
    elif pending is not None:
        for name, delta in fragment.delta.items():
            delta.copy_(pending["delta"][name])
        fragment.due = pending["due"]
        fragment.pending = Future()
        fragment.pending.set_result(_Outcome(**pending["outcome"]))


class LocalSGD(_LocalUpdate):
    """Average the parameters after every ``steps`` optimizer steps instead of every gradient.

    ::

        with taciturn.LocalSGD(model, optimizer, steps=8):
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    Law (``test_local_sgd_with_one_step_is_ddp``): with steps=1 and plain SGD it equals DDP.

    Args:
        model: a plain module, equal on all ranks. All its parameters are averaged, whatever their
            ``.grad`` is, frozen ones too.
        optimizer: whose steps are counted; every rank has to make as many.
        steps: H, local steps of a round, or a function of the round's number for a period that
            grows. More: fewer exchanges, more drift.
        warmup_steps: first steps, after each of which is averaged.
        optimizer_state: "keep": each rank's own; "average": its momenta too, at their bytes.
        buffers: such as running statistics, at the end of a round: "average" (whole numbers are
            rank 0's), "rank 0", or "keep" each rank's own.
        method: of the average: a name, an aggregator or a collective; the backend's exact mean.
        process_group: the ranks; the default group if None.
        timeout_s: every failure is an error on every rank within this time.

    Raises:
        InputError: values that cannot be used, on every rank alike.
        MismatchError: ranks that differ in them, in their parameters or in their steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Period = 8,
        *,
        warmup_steps: int = 0,
        optimizer_state: OptimizerState = "keep",
        buffers: Buffers = "average",
        method: str | Aggregator | Collective = "backend",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            steps,
            outer=lambda anchor: torch.optim.SGD(anchor, lr=1.0),
            fragments=1,
            overlap_steps=0,
            mixing=0.0,
            warmup_steps=warmup_steps,
            optimizer_state=optimizer_state,
            buffers=buffers,
            method=method,
            process_group=process_group,
            timeout_s=timeout_s,
        )


def nesterov(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD with Nesterov momentum 0.9 at rate 0.7 (section 3.2)."""
    return torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(_LocalUpdate):
    """Local steps, then an outer optimizer step by the averaged pseudo-gradient.

    ::

        with taciturn.DiLoCo(model, optimizer, steps=32, compress="quantized:bits=4,feedback=true"):
            for batch in loader:
                ...

    With ``fragments`` > 1 and ``overlap_steps`` it is streaming DiLoCo: each part of the parameters
    has its own time in the round, and its exchange goes on beside the next local steps.

    Law (``test_diloco_with_outer_sgd_is_averaging``): with outer SGD at rate 1 it is local SGD.

    Args:
        model, optimizer, warmup_steps, optimizer_state, buffers, process_group, timeout_s: as of
            :class:`LocalSGD`.
        steps: H, inner steps of a round.
        outer: makes the outer optimizer of a list of tensors; :func:`nesterov` if left out.
        fragments: parts of the parameters, of about equal size, exchanged one after the other
            within a round. More: smaller peaks on the link.
        overlap_steps: inner steps in which an exchange goes on; 0: the loop waits for it.
        mixing: share of its own parameters that a rank keeps when a late average comes, of
            overlapped exchanges; 0.5 if None, the paper's.
        compress: method of the outer exchange: a name, an aggregator or a collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Period = 32,
        *,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = nesterov,
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing: float | None = None,
        compress: str | Aggregator | Collective = "backend",
        warmup_steps: int = 0,
        optimizer_state: OptimizerState = "keep",
        buffers: Buffers = "average",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            steps,
            outer=outer,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mixing=(0.5 if overlap_steps else 0.0) if mixing is None else mixing,
            warmup_steps=warmup_steps,
            optimizer_state=optimizer_state,
            buffers=buffers,
            method=compress,
            process_group=process_group,
            timeout_s=timeout_s,
        )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32, or fp64 if it is: what differences are taken in."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _split(
    named: Sequence[tuple[str, torch.Tensor]], count: int
) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut a sequence of tensors into ``count`` parts of about equal size, none empty."""
    total = sum(tensor.numel() for _, tensor in named)
    parts: list[list[tuple[str, torch.Tensor]]] = [[]]
    taken = 0
    for place, (name, tensor) in enumerate(named):
        left = len(named) - place
        full = parts[-1] and taken >= total * len(parts) / count
        needed = parts[-1] and left <= count - len(parts)
        if len(parts) < count and (full or needed):
            parts.append([])
        parts[-1].append((name, tensor))
        taken += tensor.numel()
    return parts


def _products(own: list[torch.Tensor], mean: list[torch.Tensor]) -> tuple[float, float, float]:
    """Return |own|^2, |mean|^2 and their product, in fp64."""
    sums = [0.0, 0.0, 0.0]
    for a, b in zip(own, mean, strict=True):
        x, y = a.flatten().double(), b.flatten().double()
        for place, value in enumerate((x @ x, y @ y, x @ y)):
            sums[place] += value.item()
    return sums[0], sums[1], sums[2]

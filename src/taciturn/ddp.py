"""An aggregator in a DistributedDataParallel loop: nothing else in the loop changes.

DDP's buckets only announce that gradients are ready. What is exchanged are groups of our own, fixed
when the hook is attached: DDP rebuilds its buckets after the first step, a resumed run starts with
others, and a ring's order of summation follows the place in the buffer. The groups go, always in
the same order, through one thread with a process group of its own: beside backward, and never in an
order that depends on what completes first.

What the thread does, per step: for each group in order, once all its gradients are there, the
aggregator's average; after the last, agree whether all was finite, let the aggregator keep or
forget the step, and release the last gradients to DDP.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.exchange import (
    FIRST_BYTES,
    GROUP_BYTES,
    Exchange,
    agree,
    all_finite,
    backward_order,
)
from taciturn.gradients import check_gradients
from taciturn.ledger import LedgerCounts
from taciturn.methods import as_aggregator
from taciturn.plan.pick import AUTO, Picked, pick
from taciturn.ranges import check_whole
from taciturn.replicas import (
    ReplicaReport,
    Spread,
    check_replicas,
    ignored_by_ddp,
    resync,
    spread,
    suggest_resync_every,
)
from taciturn.transport import DistributedTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Communicator", "StepMetrics", "attach", "attached"]

Nonfinite = Literal["propagate", "skip"]

_FIRST_RESYNC, _LEAST_RESYNC, _MOST_RESYNC = 50, 10, 1000
"""Steps before the first spread is measured, and the bounds of what is chosen from it."""

_SPREAD_BUDGET = 0.02
"""Spread of the parameters that replicas may reach, relative to the parameters' rms."""

_TELL_S = 3.0
"""Longest wait until the others are told of an error: as long as they wait for reports."""

_attached: weakref.WeakSet[Aggregator | Collective] = weakref.WeakSet()
"""What holds state and is in use by some module."""


@dataclass(frozen=True)
class StepMetrics:
    """What the last finished step cost this rank."""

    step: int
    """Steps finished, those of the run that was resumed included."""
    sent_bytes: int | None
    """None, as the three below, where the backend's own all-reduce sends: it does not say."""
    received_bytes: int | None
    messages: int | None
    rounds: int | None
    codec_s: float
    """Seconds in encoding, adding and decoding, in the communication thread or beside it."""
    waiting_s: float
    """Seconds the communication thread waited for messages."""
    exchange_s: float
    """Seconds from the first group's start to the last one's end."""
    residual_bytes: int
    """Of error feedback, held between steps."""
    state_bytes: int
    """All that the method holds between steps: residuals, factors, spare memory of these."""
    residual_norm: float
    skipped_steps: int
    """Steps so far in which some gradient was not finite."""
    resync_every: int
    """Steps between exact averages of the replicas; 0: never."""
    spread: float | None
    """Spread of the parameters just before the last of them; None if none was measured."""
    predicted_s: float | None = None
    """Of method="auto": what ``exchange_s`` was predicted to be were all gradients there at once;
    None for a method that was given."""


class _Bucket(NamedTuple):
    """One announcement of DDP: gradients that wait for their groups."""

    future: torch.futures.Future[torch.Tensor]
    result: torch.Tensor
    """What DDP takes the averages from: a piece of a group's buffer, or else its own bucket."""
    targets: list[torch.Tensor]
    """Parts of its bucket that averages are first copied to; none if it takes them from ours."""
    sources: list[torch.Tensor]
    ready: Any
    """CUDA event after which the gradients are in the groups' buffers; None on the CPU."""


def attach(
    model: DistributedDataParallel,
    method: str | Aggregator | Collective,
    *,
    nonfinite: Nonfinite = "propagate",
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    resync_every: int | None = None,
    group_bytes: int = GROUP_BYTES,
    timeout_s: float = 60.0,
) -> Communicator:
    """Have ``model`` average its gradients by ``method``. Call it on every rank, before training.

    Args:
        model: whose process group is used; a new one with the same ranks is made from it.
        method: a name such as "powersgd:rank=4" or "quantized:bits=8" (``taciturn methods``), an
            aggregator, or a collective; or "auto": a probe of some seconds on this model's own
            ranks decides, says why, and ``metrics().predicted_s`` holds it to its word.
        nonfinite: what a NaN or infinity in any rank's gradient does. "propagate": every rank sees
            non-finite gradients, so that a GradScaler skips everywhere alike; "skip": ``optimizer``
            does nothing in this step, on every rank.
        optimizer: needed for "skip"; its ``step`` is wrapped.
        scaler: the loop's GradScaler if there is one, so that residuals are kept unscaled.
        resync_every: steps between exact averages of the replicas, for methods that let them
            differ; 0: never; None: chosen from their measured spread.
        group_bytes: gradients exchanged at once; more suits long rings, less overlaps more.
        timeout_s: every failure is an error on every rank within this time.

    Raises:
        InputError: what cannot work, with what to do.
        MismatchError: the ranks did not attach the same thing.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"attach needs a DistributedDataParallel module, got {type(model).__name__}: wrap it "
            "first, and attach before torch.compile"
        )
    transport = DistributedTransport(model.process_group, timeout_s)
    problem: Exception | None = None
    picked: Picked | None = None
    try:
        if method == AUTO:
            picked = pick(model, transport, model.process_group)
            method = picked.method
        aggregator = as_aggregator(method)
        _check_options(nonfinite, optimizer, scaler, resync_every, group_bytes)
        _check_model(model, aggregator, optimizer)
        first = FIRST_BYTES if aggregator.overlaps else None
        exchange = Exchange(_backward_order(model), aggregator, transport, group_bytes, first)
        options = {"nonfinite": repr(nonfinite), "resync_every": repr(resync_every)}
        agreed = exchange.describe() | options
    except (PeerError, MismatchError):
        raise  # of the probe: the other ranks know
    except Exception as error:
        problem, agreed = error, {}
    agree(transport, agreed, problem, "attach")
    return Communicator(model, exchange, nonfinite, optimizer, scaler, resync_every, picked)


def attached(model: torch.nn.Module) -> Communicator | None:
    """Return what :func:`attach` returned for this model; None if nothing is attached."""
    hooks = model._comm_hooks if isinstance(model, DistributedDataParallel) else []
    return next((s.communicator for _, s in hooks if isinstance(s, _Link)), None)


def _check_options(
    nonfinite: str, optimizer: Any, scaler: Any, resync_every: Any, group_bytes: Any
) -> None:
    if nonfinite not in get_args(Nonfinite):
        raise InputError(f"nonfinite={nonfinite!r}: choose 'propagate' or 'skip'")
    if nonfinite == "skip" and optimizer is None:
        raise InputError("nonfinite='skip' needs optimizer=, whose steps are to be skipped")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer={optimizer!r}: give the loop's torch.optim.Optimizer")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"scaler={scaler!r}: give the loop's torch.amp.GradScaler")
    if resync_every is not None:
        check_whole("resync_every", resync_every, 0, hint="0 for never")
    check_whole("group_bytes", group_bytes, 1)


def _check_model(
    model: DistributedDataParallel,
    aggregator: Aggregator,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    if any(not isinstance(state, _Link) or state.communicator for _, state in model._comm_hooks):
        raise InputError(
            "this module has a communication hook already, and DDP takes one, once: wrap the "
            "module in a new DistributedDataParallel"
        )
    if any(part in _attached for part in _parts(aggregator)):
        raise InputError(
            "this aggregator, or a part of it, is attached to another module: its state belongs "
            "to that one's parameters; make one for each"
        )
    trained = _trained(model)
    if optimizer is not None:
        steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(parameter) in steps for parameter in trained.values()):
            raise InputError(
                "optimizer= holds none of this module's parameters: give the one that steps them"
            )
    check_gradients(model.module, trained)


def _parts(whole: Aggregator | Collective) -> Iterator[Aggregator | Collective]:
    """Yield what holds state of its own: aggregators, and collectives that count their calls."""
    if isinstance(whole, Aggregator) or whole.state_dict():
        yield whole
    for value in vars(whole).values():
        if isinstance(value, Aggregator | Collective):
            yield from _parts(value)


def _trained(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients DDP averages, tied ones once."""
    ignored = ignored_by_ddp(model)
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _backward_order(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters with gradients, about as backward makes these."""
    parameters = _trained(model)
    return [(name, parameters[name]) for name in backward_order(model.module) if name in parameters]


class Communicator:
    """What :func:`attach` returns: the hook's state, its metrics, and what to save of it.

    Attributes:
        picked: of method="auto", what was picked and why; else None.
        gradient_scale: what the loop multiplied this step's losses by, beside the scaler; residuals
            are kept without it.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: Exchange,
        nonfinite: Nonfinite,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any,
        resync_every: int | None,
        picked: Picked | None = None,
    ) -> None:
        self.picked = picked
        # The module's reducer, where Python's garbage collector does not see it, holds this object:
        # were the module held in turn, neither would ever go.
        self._model = weakref.ref(model)
        self.nonfinite, self.scaler = nonfinite, scaler
        self.aggregator, self.transport = exchange.aggregator, exchange.transport
        self.gradient_scale = 1.0
        self._closed = False
        self._counted = exchange.counted
        self._finite_alone = True
        self._exchange = exchange
        self._chosen_resync = resync_every is None and exchange.replicas_differ
        self.resync_every = (_FIRST_RESYNC if exchange.replicas_differ else 0) if (
            resync_every is None
        ) else resync_every  # fmt: skip
        self._spread: Spread | None = None
        self._steps = self._skipped_steps = self._since_resync = 0
        self._skip = False
        self._metrics: StepMetrics | None = None
        self._error: Exception | None = None
        self._parameters = _trained(model)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        # Where each parameter, and each module with one, has to be found again.
        self._homes: list[tuple[torch.nn.Module, str, str, Any]] = []
        for prefix, module in model.module.named_modules():
            inner = [(n, m) for n, m in module._modules.items() if m is not None]
            for attribute, part in [*module._parameters.items(), *inner]:
                name = f"{prefix}.{attribute}" if prefix else attribute
                if name in self._parameters or isinstance(part, torch.nn.Module):
                    self._homes.append((module, attribute, name, part))
        self._frozen = [
            (name, p) for name, p in model.module.named_parameters() if not p.requires_grad
        ]
        self._reset()
        self._jobs: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._told = threading.Event()
        _attached.update(_parts(self.aggregator))
        if self.transport.size > 1:
            threads = torch.get_num_threads()  # a new thread would take all cores
            self._thread = threading.Thread(
                target=self._run, args=(threads,), name="taciturn-ddp", daemon=True
            )
            self._thread.start()
            weakref.finalize(model, self._jobs.put, ("stop", None)).atexit = False
        model.register_comm_hook(_Link(self), _on_bucket)
        model.register_forward_pre_hook(_on_forward)
        if nonfinite == "skip":
            assert optimizer is not None
            _wrap_step(optimizer, self._takes_skip)

    @property
    def model(self) -> DistributedDataParallel:
        """The module it was attached to.

        Raises:
            InputError: it is gone, since nothing else held it.
        """
        model = self._model()
        if model is None:
            raise InputError("the module that this was attached to is gone: keep it to train it")
        return model

    def _reset(self) -> None:
        self._left = [len(group.names) for group in self._exchange.groups]
        self._next = 0
        # Groups that are exchanged in the memory of a bucket that holds them and nothing else.
        self._in_place: dict[int, torch.Tensor] = {}

    # -- in DDP's threads

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return what DDP waits for until it takes a bucket's averages."""
        buffer = bucket.buffer()
        devices: Any = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if self.transport.size == 1:
            self._take_alone(bucket, buffer)
            future.set_result(buffer)
            return future
        if self._error is not None:
            raise self._error
        try:
            self._announce(bucket, buffer, future)
        except Exception as error:
            self._jobs.put(("error", error))
            raise
        return future

    def _take_alone(self, bucket: GradBucket, buffer: torch.Tensor) -> None:
        """Of a world of one only the policy for what is not finite, and the count, remain."""
        if bucket.index() == 0:
            self._finite_alone = True
        self._finite_alone &= all_finite(buffer)
        if bucket.is_last():
            now = time.perf_counter()
            self._count_step(self._finite_alone, now, self.transport.ledger.snapshot())

    def _announce(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        """Copy a bucket's gradients into the groups' buffers and queue what became complete."""
        if not self._in_midst():
            _after_backward(self._raise_error)
        self._idle.clear()
        targets, sources, groups = [], [], set[int]()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            g, place = self._exchange.place(self._names[id(parameter)])
            targets.append(gradient.reshape(-1))  # DDP shows it in memory order, as groups have it
            sources.append(place)
            groups.add(g)
            self._left[g] -= 1
        result = _joined(sources) if buffer.dtype == sources[0].dtype and len(groups) == 1 else None
        (first, *_) = groups
        if result is not None and result.numel() == self._exchange.buffers[first].numel():
            self._in_place[first] = result = buffer  # the bucket is the group: no copies
        else:
            torch._foreach_copy_(sources, targets)
        if result is None:
            result = buffer
        else:
            targets, sources = [], []
        ready = None
        if buffer.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._jobs.put(("bucket", _Bucket(future, result, targets, sources, ready)))
        while self._next < len(self._exchange.groups) and self._left[self._next] == 0:
            self._jobs.put(("group", (self._next, self._in_place.pop(self._next, None))))
            self._next += 1
        if self._next == len(self._exchange.groups):
            self._reset()

    def _before_forward(self) -> None:
        """Check that the model is still the one attached to, and re-synchronise when due."""
        self._check_unchanged()
        self._check_whole()
        due = self.resync_every and self._since_resync >= self.resync_every
        if due and self.model.training and torch.is_grad_enabled():
            self._resync()

    def _check_unchanged(self) -> None:
        for owner, attribute, name, part in self._homes:
            inner = isinstance(part, torch.nn.Module)
            registry: Mapping[str, Any] = owner._modules if inner else owner._parameters
            if registry.get(attribute) is not part:
                raise InputError(
                    f"{name!r} was replaced after attach: DDP and this hook still average the old "
                    "one; change parameters in place, or wrap and attach again"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(
                    f"{name!r} was frozen when the module was wrapped and is trained now: DDP does "
                    "not average it; wrap and attach again"
                )

    def _in_midst(self) -> bool:
        """Return whether some gradients of a backward pass are here and others not."""
        return self._left != [len(group.names) for group in self._exchange.groups]

    def _check_whole(self) -> None:
        """Between steps: refuse to go on from a backward pass that was left in its midst."""
        if self._in_midst() and self._error is None:
            self.fail(
                PeerError(
                    "the last backward pass was left in its midst, with some gradients exchanged "
                    "and some not; the other ranks still wait for it"
                )
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _takes_skip(self) -> bool:
        skip, self._skip = self._skip, False
        return skip

    # -- in the communication thread

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        buckets: list[_Bucket] = []
        begun: list[Callable[[], bool]] = []
        start, counts = 0.0, self.transport.ledger.snapshot()
        while True:
            kind, job = self._jobs.get()
            if kind == "stop":
                return
            try:
                if kind == "error":
                    raise job
                if kind == "bucket":
                    buckets.append(job)
                else:
                    if not begun:
                        start, counts = time.perf_counter(), self.transport.ledger.snapshot()
                        self._set_scale()
                    g, buffer = job
                    begun.append(self._begin(g, buffer, buckets))
                if len(begun) == len(self._exchange.groups):
                    finite = [finish() for finish in begun]
                    begun = []
                    self._count_step(self._exchange.finish_step(all(finite)), start, counts)
                    self._release(buckets)
                    buckets = []
                    self._idle.set()
            except Exception as error:
                self._fail(error, buckets, own=kind == "error")
                return

    def _begin(
        self, g: int, buffer: torch.Tensor | None, buckets: list[_Bucket]
    ) -> Callable[[], bool]:
        """Begin to average a group, in DDP's bucket if one is given: :meth:`Exchange.start`."""
        for bucket in buckets:
            if bucket.ready is not None:
                bucket.ready.wait(torch.cuda.current_stream(self._exchange.buffers[g].device))
        return self._exchange.start(g, buffer)

    def _set_scale(self) -> None:
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        self._exchange.set_scale(scale * self.gradient_scale)

    def _count_step(self, finite: bool, start: float, counts: LedgerCounts) -> None:
        self._skip = not finite and self.nonfinite == "skip"
        self._skipped_steps += not finite
        self._steps += 1
        self._since_resync += 1
        spent = self.transport.ledger.snapshot() - counts
        feedback = self.aggregator if isinstance(self.aggregator, ErrorFeedback) else None
        self._metrics = StepMetrics(
            step=self._steps,
            sent_bytes=spent.sent_bytes if self._counted else None,
            received_bytes=spent.received_bytes if self._counted else None,
            messages=spent.messages if self._counted else None,
            rounds=spent.rounds if self._counted else None,
            codec_s=spent.codec_s,
            waiting_s=spent.waiting_s,
            exchange_s=time.perf_counter() - start,
            residual_bytes=feedback.residual_bytes if feedback else 0,
            state_bytes=self.aggregator.memory_bytes(),
            residual_norm=feedback.residual_norm if feedback else 0.0,
            skipped_steps=self._skipped_steps,
            resync_every=self.resync_every,
            spread=self._spread.overall if self._spread else None,
            predicted_s=self.picked.exchange_s if self.picked else None,
        )

    def _release(self, buckets: list[_Bucket]) -> None:
        """Give DDP the averages."""
        for bucket in buckets:
            if bucket.targets:
                torch._foreach_copy_(bucket.targets, bucket.sources)
            bucket.future.set_result(bucket.result)

    def _fail(self, error: Exception, buckets: list[_Bucket], own: bool) -> None:
        """End this step and all later ones with ``error``, here and on the other ranks.

        ``own``: it came up outside the exchange, so that the others do not know of it yet.
        """
        if own or not isinstance(error, PeerError | MismatchError):
            with suppress(Exception):
                self.transport.fail(error)
        self._error = error
        self._told.set()
        self._idle.set()
        while True:
            for bucket in buckets:
                # An exception set here would reach the loop as a failed cast to a tensor;
                # _raise_error, at the end of backward, raises it as it is.
                bucket.future.set_result(bucket.result.fill_(float("nan")))
            kind, job = self._jobs.get()
            if kind == "stop":
                return
            buckets = [job] if kind == "bucket" else []

    # -- for the loop

    def metrics(self) -> StepMetrics | None:
        """Return what the last finished step cost; None before the first one."""
        return self._metrics

    @property
    def steps(self) -> int:
        """Return the steps finished, those of the run that was resumed included."""
        return self._steps

    def check_replicas(self) -> ReplicaReport:
        """Compare parameters and buffers over the ranks: :func:`taciturn.replicas.check_replicas`.

        Call it on every rank, between steps.
        """
        self.wait()
        return check_replicas(self.model, self.transport)

    def spread(self) -> Spread:
        """Measure how far the replicas are apart: :func:`taciturn.replicas.spread`.

        Call it on every rank, between steps.
        """
        self.wait()
        return spread(self.model, self.transport)

    def average_gradients(self) -> None:
        """Average all gradients as they are, as a step without a backward pass. On every rank.

        For loops that accumulate under ``no_sync`` and end with no backward that exchanges. Every
        parameter needs a gradient, of its own layout.
        """
        if self.transport.size == 1:
            return
        self.wait()
        start, counts = time.perf_counter(), self.transport.ledger.snapshot()
        try:
            gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
            if missing := set(self._parameters) - set(gradients):
                raise InputError(f"{min(missing)!r} has no gradient: give it one of zeros")
            self._set_scale()
            self._count_step(self._exchange.run(gradients), start, counts)
        except Exception as error:
            self._jobs.put(("error", error))
            raise

    def fail(self, error: Exception) -> NoReturn:
        """End this and all later steps with ``error``, here and on every rank that waits."""
        if self.transport.size > 1 and not self._closed:
            self._jobs.put(("error", error))
            # The process may end next, and with it the thread that is to tell the others.
            self._told.wait(min(self.transport.timeout_s, _TELL_S))
        raise error

    def consolidate(self) -> None:
        """Replace parameters and buffers by their exact average over ranks, on every rank.

        Call it on every rank, before evaluation and before a checkpoint, where replicas may differ.
        """
        self.wait()
        resync(self.model, self.transport)
        self._since_resync = 0

    def _resync(self) -> None:
        self.wait()
        if self._chosen_resync:
            self._spread = spread(self.model, self.transport)
            steps = max(self._since_resync, 1)
            per_step = self._spread.overall / steps**0.5
            chosen = _LEAST_RESYNC
            if math.isfinite(per_step):
                chosen = suggest_resync_every(per_step, _SPREAD_BUDGET)
            self.resync_every = min(max(chosen, _LEAST_RESYNC), _MOST_RESYNC)
        self.consolidate()

    def wait(self) -> None:
        """Wait until the last step's exchange has ended. Between steps, not inside backward.

        Raises:
            PeerError: it has not within the time-out; or what ended it.
        """
        self._check_whole()
        if not self._idle.wait(self.transport.timeout_s):
            raise PeerError(f"the last step has not ended within {self.transport.timeout_s:g} s")
        if self._error is not None and not self._closed:
            raise self._error

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model's and optimizer's states.

        Plain tensors and numbers; every rank has its own and saves its own.
        """
        if self.transport.size > 1:
            self.wait()
        return {
            **self._exchange.state_dict(),
            "steps": self._steps,
            "skipped_steps": self._skipped_steps,
            "since_resync": self._since_resync,
            "resync_every": self.resync_every,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what :meth:`state_dict` returned. Call it on every rank, before training.

        With another number of ranks residuals are dropped, with a warning: they add up only over
        the ranks that made them.

        Args:
            state: this rank's; None where it is missing, which is an error on every rank.

        Raises:
            InputError: the state is missing, or of another rank, method or model.
            MismatchError: another rank could not load its own.
        """
        problem: Exception | None = None
        try:
            self._check_state(state)
        except Exception as error:
            problem = error
        agree(self.transport, {}, problem, "loading the communicator's state")
        assert state is not None
        self._exchange.load_state_dict(state)
        self._steps, self._skipped_steps = state["steps"], state["skipped_steps"]
        self._since_resync, self.resync_every = state["since_resync"], state["resync_every"]
        self._reset()

    def _check_state(self, state: dict[str, Any] | None) -> None:
        self._exchange.check_state(state)
        assert state is not None
        for key in ("steps", "skipped_steps", "since_resync", "resync_every"):
            check_whole(key, state.get(key, "missing"), 0, hint="this state is damaged")

    def close(self) -> None:
        """End the thread and its process group, after the last backward. Call it on every rank.

        Its state can still be saved; the module cannot train on, but can be wrapped again.
        """
        if self.transport.size > 1 and not self._closed:
            with suppress(Exception):  # it was raised in the loop, if there was one
                self.wait()
            self._closed = True
            self._error = self._error or PeerError(
                "this communicator is closed: wrap the module in a new DistributedDataParallel to "
                "train on"
            )
            self._jobs.put(("stop", None))
            self._thread.join()
        self.transport.close()


class _Link:
    """What DDP holds of a communicator; a copy of a model, or a saved one, has none."""

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator

    @override
    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


def _on_bucket(state: _Link, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    assert state.communicator is not None
    return state.communicator._take(bucket)


_on_bucket.__annotations__ = {}  # DDP compares them with types, and here they are strings


def _on_forward(module: torch.nn.Module, _arguments: Any) -> None:
    communicator = attached(module)
    if communicator is not None:
        communicator._before_forward()


def _after_backward(function: Callable[[], None]) -> None:
    """Have ``function`` called at the end of this backward pass, after DDP's own end of it.

    A rank that only shadows the others' passes, within Join, has none of its own.
    """
    if torch._C._current_graph_task_id() == -1:
        return
    engine: Any = torch.autograd.Variable._execution_engine
    # DDP queues its own when the last bucket is ready: after this one, but before what this queues.
    engine.queue_callback(lambda: engine.queue_callback(function))


def _joined(places: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the memory that parts of a flat buffer make up in their order; None if they do not."""
    start = stop = places[0].storage_offset()
    for place in places:
        if place.storage_offset() != stop:
            return None
        stop += place.numel()
    # DDP reads a hook's result from the start of its storage, not of the tensor.
    return from_dlpack(places[0].as_strided((stop - start,), (1,), start))


def _wrap_step(optimizer: torch.optim.Optimizer, skips: Callable[[], bool]) -> None:
    """Have ``optimizer.step`` do nothing where ``skips()`` says so."""
    step = optimizer.step

    def wrapped(_optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        return None if skips() else step(*arguments, **keywords)

    # A method, since learning-rate schedulers wrap optimizer.step.__func__.
    optimizer.step = MethodType(wrapped, optimizer)  # type: ignore[method-assign]

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
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from taciturn.aggregators.base import Aggregator, Group
from taciturn.aggregators.mean import Mean
from taciturn.collectives.base import Collective
from taciturn.collectives.ring import Ring
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.ledger import LedgerCounts, labelled
from taciturn.methods import aggregator as aggregator_named
from taciturn.replicas import Spread, resync, spread, suggest_resync_every
from taciturn.transport import DistributedTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Communicator", "StepMetrics", "attach"]

Nonfinite = Literal["propagate", "skip"]

_GROUP_BYTES = 25 * 2**20
"""DDP's own default for buckets."""

_FIRST_RESYNC, _LEAST_RESYNC, _MOST_RESYNC = 50, 10, 1000
"""Steps before the first spread is measured, and the bounds of what is chosen from it."""

_SPREAD_BUDGET = 0.02
"""Spread of the parameters that replicas may reach, relative to the parameters' rms."""

_attached: WeakSet[Aggregator] = WeakSet()


@dataclass(frozen=True)
class StepMetrics:
    """What the last finished step cost this rank."""

    step: int
    """Steps finished since attach or since the run that was resumed began."""
    sent_bytes: int
    received_bytes: int
    messages: int
    rounds: int
    codec_s: float
    """Seconds in encoding, adding and decoding, in the communication thread or beside it."""
    waiting_s: float
    """Seconds the communication thread waited for messages."""
    exchange_s: float
    """Seconds from the first group's start to the last one's end."""
    residual_bytes: int
    residual_norm: float
    skipped_steps: int
    """Steps so far in which some gradient was not finite."""
    resync_every: int
    """Steps between exact averages of the replicas; 0: never."""
    spread: float | None
    """Spread of the parameters just before the last of them; None if none was measured."""


class _Bucket(NamedTuple):
    """One announcement of DDP: gradients that wait for their groups."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    groups: frozenset[int]
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
    group_bytes: int = _GROUP_BYTES,
    timeout_s: float = 60.0,
) -> Communicator:
    """Have ``model`` average its gradients by ``method``. Call it on every rank, before training.

    Args:
        model: whose process group is used; a new one with the same ranks is made from it.
        method: a name such as "powersgd:rank=4" or "quantized:bits=8" (``taciturn methods``), an
            aggregator, or a collective.
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
            f"attach needs a DistributedDataParallel module, got {type(model).__name__}: "
            "wrap it first"
        )
    transport = DistributedTransport(model.process_group, timeout_s)
    problem: Exception | None = None
    try:
        aggregator = _aggregator(method)
        _check(model, aggregator, nonfinite, optimizer, resync_every, group_bytes)
        tensors = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        groups = _groups([(n, p) for n, p in reversed(tensors)], group_bytes)
        kinds = [(group, dtype, device.type) for group, dtype, device in groups]
        agreed = repr((aggregator, nonfinite, resync_every, kinds))
    except Exception as error:
        problem, agreed = error, ""
    _agree(transport, agreed, problem, "attach")
    return Communicator(
        model, aggregator, transport, groups, nonfinite, optimizer, scaler, resync_every
    )


def _aggregator(method: str | Aggregator | Collective) -> Aggregator:
    if isinstance(method, str):
        return aggregator_named(method)
    if isinstance(method, Collective):
        return Mean(method)
    if isinstance(method, Aggregator):
        return method
    raise InputError(f"method={method!r}: give a name, an aggregator or a collective")


def _check(
    model: DistributedDataParallel,
    aggregator: Aggregator,
    nonfinite: str,
    optimizer: torch.optim.Optimizer | None,
    resync_every: int | None,
    group_bytes: int,
) -> None:
    if nonfinite not in get_args(Nonfinite):
        raise InputError(f"nonfinite={nonfinite!r}: choose 'propagate' or 'skip'")
    if nonfinite == "skip" and optimizer is None:
        raise InputError("nonfinite='skip' needs optimizer=, whose steps are to be skipped")
    if resync_every is not None and resync_every < 0:
        raise InputError(f"resync_every={resync_every}: give a number of steps, 0 for never")
    if group_bytes < 1:
        raise InputError(f"group_bytes={group_bytes}: must be positive")
    if model._comm_hooks:
        raise InputError("this module has a communication hook already: DDP takes one, once")
    if aggregator in _attached:
        raise InputError(
            "this aggregator is attached to another module: its state belongs to that one's "
            "parameters; make one for each"
        )
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and any(
            p.requires_grad for p in module.parameters(recurse=False)
        ):
            raise InputError(
                f"module {name or 'itself'!r} has sparse gradients, which no method here "
                "exchanges: build it with sparse=False"
            )
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise InputError(
                f"parameter {name!r} is {parameter.dtype}: only real floating-point gradients are "
                "exchanged; view complex parameters as real ones"
            )


def _groups(
    tensors: Sequence[tuple[str, torch.nn.Parameter]], group_bytes: int
) -> list[tuple[Group, torch.dtype, torch.device]]:
    """Cut the tensors into groups of one device and dtype, in order, of about ``group_bytes``."""
    groups: list[tuple[Group, torch.dtype, torch.device]] = []
    current: list[tuple[str, torch.Tensor]] = []
    kind: tuple[torch.dtype, torch.device] | None = None
    size = 0
    for name, parameter in tensors:
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        nbytes = parameter.numel() * dtype.itemsize
        if kind is not None and (kind != (dtype, parameter.device) or size + nbytes > group_bytes):
            groups.append((Group.of(current), *kind))
            current, size = [], 0
        current.append((name, parameter))
        kind, size = (dtype, parameter.device), size + nbytes
    if kind is not None:
        groups.append((Group.of(current), *kind))
    return groups


def _agree(
    transport: DistributedTransport, text: str, problem: Exception | None, what: str
) -> None:
    """Raise on every rank if one has a problem, or if the ranks' texts differ.

    Raises:
        MismatchError: another rank's problem, or texts that differ; ``problem`` itself on its rank.
    """
    votes = torch.zeros(transport.size, dtype=torch.int64, device=transport.header_device)
    votes[transport.rank] = -1 if problem is not None else zlib.crc32(text.encode())
    if transport.size > 1:
        Ring().all_reduce(votes, transport)
    if problem is not None:
        raise problem
    said = votes.tolist()
    bad = [rank for rank, vote in enumerate(said) if vote == -1]
    if bad:
        raise MismatchError(f"{what} failed on rank {bad[0]}; its own error says why")
    other = [rank for rank, vote in enumerate(said) if vote != said[0]]
    if other:
        raise MismatchError(
            f"the ranks do not {what} the same: rank {other[0]} differs from rank 0 in the method, "
            "its options, or the parameters' names, shapes or dtypes"
        )


class Communicator:
    """What :func:`attach` returns: the hook's state, its metrics, and what to save of it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        aggregator: Aggregator,
        transport: DistributedTransport,
        groups: list[tuple[Group, torch.dtype, torch.device]],
        nonfinite: Nonfinite,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any,
        resync_every: int | None,
    ) -> None:
        self.model, self.aggregator, self.transport = model, aggregator, transport
        self.nonfinite, self.scaler = nonfinite, scaler
        self.replicas_differ = not aggregator.bit_identical and transport.size > 1
        self._chosen_resync = resync_every is None and self.replicas_differ
        self.resync_every = (_FIRST_RESYNC if self.replicas_differ else 0) if (
            resync_every is None
        ) else resync_every  # fmt: skip
        self._spread: Spread | None = None
        self._steps = self._skipped_steps = self._since_resync = 0
        self._skip = False
        self._metrics: StepMetrics | None = None
        self._error: Exception | None = None
        self._parameters = {
            name: p for name, p in model.module.named_parameters() if p.requires_grad
        }
        self._homes = [
            (module, attribute, name, self._parameters[name])
            for prefix, module in model.module.named_modules()
            for attribute in module._parameters
            if (name := f"{prefix}.{attribute}" if prefix else attribute) in self._parameters
        ]
        self._set_groups(groups)
        self._jobs: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        _attached.add(aggregator)
        if transport.size > 1:
            threads = torch.get_num_threads()  # a new thread would take all cores
            self._thread = threading.Thread(
                target=self._run, args=(threads,), name="taciturn-ddp", daemon=True
            )
            self._thread.start()
        model.register_comm_hook(None, self._hook())
        model.register_forward_pre_hook(self._before_forward)
        if nonfinite == "skip":
            assert optimizer is not None
            _wrap_step(optimizer, self._takes_skip)

    def _set_groups(self, groups: list[tuple[Group, torch.dtype, torch.device]]) -> None:
        self._groups = [group for group, _, _ in groups]
        self._buffers = [
            torch.zeros(group.numel, dtype=dtype, device=device) for group, dtype, device in groups
        ]
        self._places = {
            id(self._parameters[name]): (g, self._buffers[g][start:stop])
            for g, group in enumerate(self._groups)
            for name, (start, stop) in zip(group.names, group.bounds, strict=True)
        }
        self._reset()

    def _reset(self) -> None:
        self._left = [len(group.names) for group in self._groups]
        self._next = 0

    # -- in DDP's threads

    def _hook(self) -> Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]:
        def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            devices: Any = [buffer.device] if buffer.is_cuda else None
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
            if self.transport.size == 1:
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

        hook.__annotations__ = {}  # DDP compares them with types, and here they are strings
        return hook

    def _announce(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        future: torch.futures.Future[torch.Tensor],
    ) -> None:
        """Copy a bucket's gradients into the groups' buffers and queue what became complete."""
        self._idle.clear()
        targets, sources, groups = [], [], set()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            g, place = self._places[id(parameter)]
            targets.append(gradient.reshape(-1))  # DDP shows it in memory order, as groups have it
            sources.append(place)
            groups.add(g)
            self._left[g] -= 1
        torch._foreach_copy_(sources, targets)
        ready = None
        if buffer.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._jobs.put(
            ("bucket", _Bucket(future, buffer, targets, sources, frozenset(groups), ready))
        )
        while self._next < len(self._groups) and self._left[self._next] == 0:
            self._jobs.put(("group", self._next))
            self._next += 1
        if self._next == len(self._groups):
            self._reset()

    def _before_forward(self, module: torch.nn.Module, _arguments: Any) -> None:
        """Check that the model is still the one attached to, and re-synchronise when due."""
        for owner, attribute, name, parameter in self._homes:
            if owner._parameters.get(attribute) is not parameter:
                raise InputError(
                    f"parameter {name!r} was replaced after attach: DDP and this hook still "
                    "average the old one; change parameters in place, or wrap and attach again"
                )
        if self._left != [len(group.names) for group in self._groups]:
            error = PeerError(
                "the last backward pass was left in its midst, with some gradients exchanged and "
                "some not; the other ranks still wait for it"
            )
            self._jobs.put(("error", error))
            raise error
        due = self.resync_every and self._since_resync >= self.resync_every
        if due and module.training and torch.is_grad_enabled():
            self._resync()

    def _takes_skip(self) -> bool:
        skip, self._skip = self._skip, False
        return skip

    # -- in the communication thread

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        buckets: list[_Bucket] = []
        done: set[int] = set()
        start, counts = 0.0, self.transport.ledger.snapshot()
        finite: list[bool] = []
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
                    if not done:
                        start, counts = time.perf_counter(), self.transport.ledger.snapshot()
                        if isinstance(self.aggregator, ErrorFeedback) and self.scaler is not None:
                            self.aggregator.scale = float(self.scaler.get_scale())
                    finite.append(self._aggregate(job, buckets))
                    done.add(job)
                    if len(done) == len(self._groups):
                        self._finish_step(all(finite), start, counts)
                        finite.clear()
                buckets = self._release(buckets, done)
                if len(done) == len(self._groups):
                    done.clear()
                    self._idle.set()
            except Exception as error:
                self._fail(error, buckets)
                return

    def _aggregate(self, g: int, buckets: list[_Bucket]) -> bool:
        """Average one group; say whether the result is finite."""
        buffer = self._buffers[g]
        for bucket in buckets:
            if bucket.ready is not None:
                bucket.ready.wait(torch.cuda.current_stream(buffer.device))
        with labelled("exchange"):
            self.aggregator.aggregate(buffer, self._groups[g], self.transport)
        if not buffer.numel():
            return True
        return bool(torch.linalg.vector_norm(buffer, float("inf")).isfinite())

    def _finish_step(self, finite: bool, start: float, counts: LedgerCounts) -> None:
        if self.replicas_differ:
            # Replicas that differ may lie on both sides of an overflow.
            flag = torch.tensor([0 if finite else 1], device=self.transport.header_device)
            with labelled("exchange"):
                Ring().all_reduce(flag, self.transport)
            agreed = not flag.item()
            if finite and not agreed:
                self._buffers[-1].fill_(float("nan"))
            finite = agreed
        self.aggregator.finish_step(keep=finite)
        self._skip = not finite and self.nonfinite == "skip"
        self._skipped_steps += not finite
        self._steps += 1
        self._since_resync += 1
        spent = self.transport.ledger.snapshot() - counts
        feedback = self.aggregator if isinstance(self.aggregator, ErrorFeedback) else None
        self._metrics = StepMetrics(
            step=self._steps,
            sent_bytes=spent.sent_bytes,
            received_bytes=spent.received_bytes,
            messages=spent.messages,
            rounds=spent.rounds,
            codec_s=spent.codec_s,
            waiting_s=spent.waiting_s,
            exchange_s=time.perf_counter() - start,
            residual_bytes=feedback.residual_bytes if feedback else 0,
            residual_norm=feedback.residual_norm if feedback else 0.0,
            skipped_steps=self._skipped_steps,
            resync_every=self.resync_every,
            spread=self._spread.overall if self._spread else None,
        )

    def _release(self, buckets: list[_Bucket], done: set[int]) -> list[_Bucket]:
        """Give DDP the buckets whose groups are done; return the others."""
        rest = []
        for bucket in buckets:
            if not bucket.groups <= done:
                rest.append(bucket)
                continue
            torch._foreach_copy_(bucket.targets, bucket.sources)
            bucket.future.set_result(bucket.buffer)
        return rest

    def _fail(self, error: Exception, buckets: list[_Bucket]) -> None:
        """End this step and all later ones with ``error``, here and on the other ranks."""
        if not isinstance(error, PeerError | MismatchError):
            with suppress(Exception):
                self.transport.fail(error)
        self._error = error
        self._idle.set()
        while True:
            for bucket in buckets:
                bucket.future.set_exception(error)  # type: ignore[arg-type]
            kind, job = self._jobs.get()
            if kind == "stop":
                return
            buckets = [job] if kind == "bucket" else []

    # -- for the loop

    def metrics(self) -> StepMetrics | None:
        """Return what the last finished step cost; None before the first one, or with one rank."""
        return self._metrics

    def consolidate(self) -> None:
        """Replace parameters and buffers by their exact average over ranks, on every rank.

        Call it on every rank, before evaluation and before a checkpoint, where replicas may differ.
        """
        self._wait_until_idle()
        resync(self.model, self.transport)
        self._since_resync = 0

    def _resync(self) -> None:
        self._wait_until_idle()
        if self._chosen_resync:
            self._spread = spread(self.model, self.transport)
            steps = max(self._since_resync, 1)
            per_step = self._spread.overall / steps**0.5
            chosen = _LEAST_RESYNC
            if math.isfinite(per_step):
                chosen = suggest_resync_every(per_step, _SPREAD_BUDGET)
            self.resync_every = min(max(chosen, _LEAST_RESYNC), _MOST_RESYNC)
        self.consolidate()

    def _wait_until_idle(self) -> None:
        if not self._idle.wait(self.transport.timeout_s):
            raise PeerError(
                "the last step's exchange has not ended: backward was left in its midst"
            )
        if self._error is not None:
            raise self._error

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model's and optimizer's states.

        Plain tensors and numbers; every rank has its own and saves its own.
        """
        if self.transport.size > 1:
            self._wait_until_idle()
        return {
            "version": 1,
            "method": repr(self.aggregator),
            "ranks": self.transport.size,
            "rank": self.transport.rank,
            "groups": [list(group.names) for group in self._groups],
            "aggregator": self.aggregator.state_dict(),
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
            self._load(state)
        except Exception as error:
            problem = error
        _agree(self.transport, "", problem, "load this state")

    def _load(self, state: dict[str, Any] | None) -> None:
        if state is None:
            raise InputError(
                f"rank {self.transport.rank} has no state to load: its file is missing"
            )
        missing = {"version", "method", "ranks", "rank", "groups", "aggregator"} - set(state)
        if missing or state["version"] != 1:
            raise InputError(
                f"this is no state of a communicator: it lacks {sorted(missing) or 'version 1'}"
            )
        if state["method"] != repr(self.aggregator):
            raise InputError(
                f"this state is of {state['method']}, and {self.aggregator!r} is attached: attach "
                "the method that it was saved from"
            )
        names = [name for group in state["groups"] for name in group]
        if sorted(names) != sorted(self._parameters):
            odd = sorted(set(names) ^ set(self._parameters))
            raise InputError(
                f"this state belongs to another model: {', '.join(map(repr, odd[:3]))} "
                f"{'is' if len(odd) == 1 else 'are'} not in both"
            )
        if state["ranks"] == self.transport.size and state["rank"] != self.transport.rank:
            raise InputError(
                f"this state is rank {state['rank']}'s, and this is rank {self.transport.rank}: "
                "every rank loads its own"
            )
        tensors = [[(name, self._parameters[name]) for name in group] for group in state["groups"]]
        self._set_groups([g for some in tensors for g in _groups(some, 1 << 62)])
        self.aggregator.load_state_dict(state["aggregator"])
        if state["ranks"] != self.transport.size and isinstance(self.aggregator, ErrorFeedback):
            self.aggregator.drop_residuals()
            warnings.warn(
                f"saved with {state['ranks']} ranks and resumed with {self.transport.size}: the "
                "residuals are dropped, since they add up only over the ranks that made them",
                stacklevel=3,
            )
        self._steps, self._skipped_steps = state["steps"], state["skipped_steps"]
        self._since_resync, self.resync_every = state["since_resync"], state["resync_every"]

    def close(self) -> None:
        """End the thread and its process group, after the last backward. Call it on every rank."""
        if self.transport.size > 1:
            if self._error is None:
                self._wait_until_idle()
                self._error = PeerError("this communicator is closed; its module cannot train on")
            self._jobs.put(("stop", None))
            self._thread.join()
        self.transport.close()


def _wrap_step(optimizer: torch.optim.Optimizer, skips: Callable[[], bool]) -> None:
    """Have ``optimizer.step`` do nothing where ``skips()`` says so."""
    step = optimizer.step

    def wrapped(_optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any) -> Any:
        return None if skips() else step(*arguments, **keywords)

    # A method, since learning-rate schedulers wrap optimizer.step.__func__.
    optimizer.step = MethodType(wrapped, optimizer)  # type: ignore[method-assign]

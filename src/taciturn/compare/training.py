"""One run on one rank: train a task by a method, judge it at fixed points, count what it cost.

The clock starts at the first batch, and stands still during an evaluation: how often a run is
judged is no trait of its method. Where replicas differ, making one model of them belongs to that,
but for the last time: whoever stops at a point has to make one there, so those seconds are the
point's. What evaluations take is kept beside. Other code of the harness between two steps is on the
clock, for all methods alike: it is a few additions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from taciturn.compare.methods import comparable
from taciturn.compare.order import ExampleHash, ids_of_step
from taciturn.compare.strategies import Share, StockDDP, Strategy, strategy_for
from taciturn.compare.task import Task
from taciturn.errors import InputError, described
from taciturn.testbed import interface_counters

__all__ = [
    "COMPUTE",
    "TimeJob",
    "TrainJob",
    "check_task",
    "fingerprint",
    "judge",
    "rate_factor",
    "shares_of",
    "time_steps",
    "train",
]

COMPUTE = "compute"
"""In the place of a method: DDP's steps without any exchange, for their seconds."""

WARM_SHARE = 0.1
"""Of the steps: the learning rate rises in them; then it falls to zero along a cosine."""
AVERAGED_SHARE = 0.1
"""Of the steps, the last: their weights are averaged, beside the model itself."""
JUDGED_AT_ONCE = 64
"""Held-out examples."""
WARMUPS = 2
CONSOLIDATIONS = 3


@dataclass(frozen=True)
class TrainJob:
    """A run.

    Attributes:
        method: in the grammar.
        seed: of weights and data.
        learning_rate: at its highest.
        steps: global batches.
        evaluate_at: after which of them the model is judged; ascending, the last one among them.
        timeout_s: a rank that is silent for longer counts as lost.
    """

    method: str
    seed: int
    learning_rate: float
    steps: int
    evaluate_at: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True)
class TimeJob:
    """Steps that are only timed.

    Attributes:
        method: in the grammar, or ``compute``.
        seconds: about how long.
        seed: as of a run.
        timeout_s: as of a run.
    """

    method: str
    seconds: float
    seed: int
    timeout_s: float


def rate_factor(step: int, steps: int) -> float:
    """What the learning rate is multiplied by in a step, counted from 0."""
    warm = max(1, round(WARM_SHARE * steps))
    falling = 0.5 + 0.5 * math.cos(math.pi * (step + 1) / (steps + 1))
    return min((step + 1) / warm, falling)


# ------------------------------------------------------------------------------------- training


def train(task: Task, job: TrainJob) -> dict[str, Any]:
    """Train once. Every rank calls it; returns plain values, the same on all.

    Raises:
        InputError: the task cannot be trained so.
        PeerError, MismatchError: a rank was lost or does something else.
    """
    strategy = strategy_for(job.method, task, job.seed, job.learning_rate, job.timeout_s)
    differ = comparable(job.method).replicas_differ
    seen, norms, points = ExampleHash(), [], []
    tail = _Tail(strategy.net, max(1, round(AVERAGED_SHARE * job.steps)), job.steps)
    found: dict[str, Any] = {}
    with strategy:
        clock = _Clock()
        learning = strategy.learn(shares_of(task, job.seed, job.steps, seen))
        for step in range(1, job.steps + 1):
            strategy.set_rate(rate_factor(step - 1, job.steps))
            next(learning)
            norms.append(strategy.gradient_norm)
            tail.add(step)
            if step not in job.evaluate_at:
                continue
            if step == job.steps:
                with clock.stopped():
                    found["single_replica_value"] = _finite(_alone(task, strategy.net))
                    found["replica_spread"] = _finite(_spread(strategy.net))
            with clock.stopped():
                point: dict[str, Any] = {"step": step, "examples": step * task.global_batch}
                point |= {"interface_bytes": clock.interface_bytes}
                point |= {"sent_bytes": strategy.costs.sent_bytes}
                point |= {"residual_norm": _finite(strategy.costs.residual_norm)}
                point |= {"gradient_norm": _finite(strategy.gradient_norm)}
                began = time.perf_counter()
                with _consolidated(strategy.net, differ):
                    made = time.perf_counter()
                    point |= {"value": _finite(judge(task, strategy.net))}
                    judged = time.perf_counter()
                point |= {"consolidate_s": _most(made - began), "judge_s": _most(judged - made)}
                points.append(point | {"seconds": clock.seconds + point["consolidate_s"]})
        for _ in learning:  # a window may have to end
            pass
    tail.load()
    finite = [n for n in norms if math.isfinite(n)]
    return found | {
        "points": points,
        "averaged_value": _finite(judge(task, strategy.net)),
        "nonfinite_steps": len(norms) - len(finite),
        "gradient_norm_last": finite[-1] if finite else None,
        "gradient_norm_most": max(finite, default=None),
        "costs": strategy.costs.as_dict(),
        "examples": int(_sum(seen.examples)),
        "tokens": int(_sum(seen.tokens)),
        "examples_hash": _joined(seen.hexdigest()),
        "parameters": sum(p.numel() for p in strategy.net.parameters()),
    }


def shares_of(
    task: Task, seed: int, steps: int | None = None, seen: ExampleHash | None = None
) -> Iterator[Share]:
    """This rank's part of each global batch.

    Args:
        task: whose examples.
        seed: of their order.
        steps: how many batches; endlessly many if None.
        seen: notes the examples whose loss is taken.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = task.global_batch // ranks
    for step in itertools.count() if steps is None else range(steps):
        ids = ids_of_step(seed, step, task.examples, task.global_batch)
        mine = ids[rank * part : (rank + 1) * part]
        batch = task.batch("train", mine)
        yield _share(task, mine, batch, seen)


def _share(task: Task, ids: torch.Tensor, batch: Any, seen: ExampleHash | None) -> Share:
    each = task.tokens_per_example

    def loss_of(module: torch.nn.Module) -> tuple[torch.Tensor, int]:
        total, tokens = task.loss(module, batch)
        if wrong := _wrong_tokens(task, len(ids), tokens):
            raise InputError(f"task {task.name}: {wrong}")
        if seen is not None:
            seen.add(ids, tokens)
        return total, tokens

    def total_tokens(own: int) -> int:
        return task.global_batch * each if each is not None else int(_sum(own))

    return Share(loss_of, None if each is None else each * len(ids), total_tokens)


def _wrong_tokens(task: Task, examples: int, tokens: int) -> str:
    """Return what is wrong with the tokens of so many examples; empty if nothing is."""
    each = task.tokens_per_example
    if each is None or tokens == each * examples:
        return ""
    return (
        f"{examples} examples had {tokens} tokens, and it says tokens_per_example={each}; None if "
        "they differ"
    )


class _Tail:
    """The mean of the weights of the last steps, over ranks too."""

    def __init__(self, net: torch.nn.Module, count: int, steps: int) -> None:
        self.parameters = list(net.parameters())
        self.count, self.first = count, steps - count + 1
        self.totals = [torch.zeros_like(p) for p in self.parameters]

    def add(self, step: int) -> None:
        if step >= self.first:
            torch._foreach_add_(self.totals, [p.detach() for p in self.parameters])

    def load(self) -> None:
        """Put it in the place of the weights."""
        with torch.no_grad():
            for parameter, total in zip(self.parameters, self.totals, strict=True):
                dist.all_reduce(total)
                parameter.copy_(total / (self.count * dist.get_world_size()))


class _Clock:
    """Seconds and bytes since it was made, less what happened while it was stopped."""

    def __init__(self) -> None:
        dist.barrier()
        self.seconds = 0.0
        self.interface_bytes: int | None = 0
        self._start()

    def _start(self) -> None:
        self._since, self._bytes = time.perf_counter(), _interface_bytes()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop when the last rank is here, and go on together."""
        dist.barrier()
        self.seconds += time.perf_counter() - self._since
        now = _interface_bytes()
        if now is None or self._bytes is None or self.interface_bytes is None:
            self.interface_bytes = None
        else:
            self.interface_bytes += now - self._bytes
        yield
        dist.barrier()
        self._start()


def _interface_bytes() -> int | None:
    try:
        return interface_counters().sent_bytes
    except (InputError, OSError):  # loopback: everybody's bytes are on it
        return None


# ------------------------------------------------------------------------------------- judging


def judge(task: Task, net: torch.nn.Module) -> float:
    """The held-out value of the model, each rank judging a part of the examples."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.arange(task.held_out).tensor_split(ranks)[rank]
    total = torch.tensor(_judged(task, net, ids), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1]) if total[1] else math.nan


def _alone(task: Task, net: torch.nn.Module) -> float:
    """Return the mean over ranks of what each replica by itself is worth."""
    total, count = _judged(task, net, torch.arange(task.held_out))
    return _sum(total / count if count else math.nan) / dist.get_world_size()


def _judged(task: Task, net: torch.nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    training = net.training
    net.eval()
    total = count = 0.0
    with torch.no_grad():
        for some in ids.split(JUDGED_AT_ONCE):
            if len(some):
                value, number = task.judged(net, task.batch("held_out", some))
                total, count = total + float(value), count + number
    net.train(training)
    return total, count


@contextmanager
def _consolidated(net: torch.nn.Module, parameters_differ: bool) -> Iterator[None]:
    """The model that all replicas together are: their mean; afterwards each is itself again."""
    with torch.no_grad():
        tensors: list[torch.Tensor] = [*net.parameters()] if parameters_differ else []
        tensors += [b for b in net.buffers() if b.dtype.is_floating_point]
        if tensors:
            own = [t.detach().clone() for t in tensors]
            flat = torch.cat([t.flatten() for t in own])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            parts = flat.split([t.numel() for t in own])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, own, strict=True)])
    yield
    with torch.no_grad():
        if tensors:
            torch._foreach_copy_(tensors, own)


def _spread(net: torch.nn.Module) -> float:
    """Return the rms over ranks of a replica's distance from their mean, relative to its norm."""
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    mean = flat.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    square = _sum(float((flat - mean).square().sum())) / dist.get_world_size()
    return math.sqrt(square) / max(float(mean.norm()), 1e-30)


# --------------------------------------------------------------------------------------- timing


def time_steps(task: Task, job: TimeJob) -> dict[str, Any]:
    """Time a method's steps: as many as fit, of whole periods. Every rank calls it.

    Returns:
        ``step_s``, mean seconds of a step on the slowest rank, ``start_s``, by how much the first
        ones took longer, ``consolidate_s``, one consolidation, and what the steps cost.
    """
    alone = job.method == COMPUTE
    method = comparable("ddp" if alone else job.method)
    strategy = strategy_for(method.text, task, job.seed, 1e-4, job.timeout_s)
    learning = strategy.learn(shares_of(task, job.seed))
    with strategy, _no_exchange(strategy, alone):
        strategy.set_rate(1.0)
        first_s = _run(learning, WARMUPS * method.period)
        per_period = first_s / WARMUPS
        if not alone:  # the first period has what happens once; guess by the second
            per_period = min(per_period, _run(learning, method.period))
        periods = max(1, round(job.seconds / max(per_period, 1e-4)))
        steps = int(_sum(periods) / dist.get_world_size()) * method.period
        before = strategy.costs.as_dict()
        bytes_before = _interface_bytes()
        seconds = _run(learning, steps)
        bytes_after = _interface_bytes()
        after = strategy.costs.as_dict()
        consolidations = []
        for _ in range(CONSOLIDATIONS):
            dist.barrier()
            start = time.perf_counter()
            with _consolidated(strategy.net, method.replicas_differ):
                consolidations.append(_most(time.perf_counter() - start))
    step_s = seconds / steps
    known = after["sent_bytes"] is not None
    counted = bytes_before is not None and bytes_after is not None
    return {
        "step_s": step_s,
        "steps": steps,
        "start_s": max(0.0, first_s - WARMUPS * method.period * step_s),
        "consolidate_s": statistics.median(consolidations),
        "codec_s": _sum(after["codec_s"] - before["codec_s"]) / dist.get_world_size() / steps,
        "waiting_s": _sum(after["waiting_s"] - before["waiting_s"]) / dist.get_world_size() / steps,
        "state_bytes": after["state_bytes"],
        "sent_bytes": (after["sent_bytes"] - before["sent_bytes"]) / steps if known else None,
        "interface_bytes": (bytes_after - bytes_before) / steps if counted else None,  # type: ignore[operator]
    }


@contextmanager
def _no_exchange(strategy: Strategy, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    assert isinstance(strategy, StockDDP)
    with strategy.model.no_sync():
        yield


def _run(learning: Iterator[None], steps: int) -> float:
    """Take steps; return the slowest rank's seconds."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        next(learning)
    return _most(time.perf_counter() - start)


# ------------------------------------------------------------------------------- between the ranks


def check_task(task: Task, seed: int) -> None:
    """Refuse a task that cannot be trained here, or is not the same on all ranks.

    Raises:
        InputError: on every rank alike.
    """
    ranks = dist.get_world_size()
    task.check_ranks(ranks)
    digest, problem = "", ""
    try:
        digest = fingerprint(task, seed)
    except InputError as error:
        problem = str(error)
    told: list[Any] = [None] * ranks
    try:
        dist.all_gather_object(told, (digest, problem))
    except RuntimeError as error:  # within the time-out of the group
        raise InputError(
            f"task {task.name}: not all ranks came to the end of its model and first batches in "
            f"time; one of them may hang in the task's own code: {described(error)}"
        ) from error
    for rank, (_, what) in enumerate(told):
        if what:
            raise InputError(f"task {task.name}, rank {rank}: {what}")
    different = [rank for rank, (other, _) in enumerate(told) if other != told[0][0]]
    if different:
        raise InputError(
            f"task {task.name} is not the same on rank {different[0]} as on rank 0 (model of seed "
            f"{seed}, optimizer, numbers, facts, or the loss of the first examples): nothing in it "
            "may depend on the rank, or on a random state that is not of the seed"
        )


def fingerprint(task: Task, seed: int) -> str:
    """A hash of what a task is: its numbers, a new model, and the loss of the first examples.

    Raises:
        InputError: it cannot be trained, or its own code fails.
    """
    try:
        return _looked_at(task, seed)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        raise InputError(described(error)) from error


def _looked_at(task: Task, seed: int) -> str:
    net = task.model(seed)
    optimizer = task.optimizer(net.parameters(), 1e-3)
    rates = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = hashlib.sha256(repr((_numbers(task), type(optimizer), rates)).encode())
    for name, tensor in net.state_dict().items():
        state.update(name.encode() + tensor.detach().double().numpy().tobytes())
    ids = torch.arange(min(4, task.examples))
    if not any(p.requires_grad for p in net.parameters()):
        raise InputError("its model has no parameters that are trained")
    total, tokens = _pair("loss", task.loss(net, task.batch("train", ids)))
    with torch.no_grad():
        judged = task.judged(net, task.batch("held_out", ids[: task.held_out]))
    value, count = _pair("judge", judged)
    if not isinstance(total, torch.Tensor) or total.ndim or not total.requires_grad:
        raise InputError("its loss is no scalar tensor with a gradient")
    if not math.isfinite(float(total.detach())):
        raise InputError("its loss is not finite on a new model")
    if not math.isfinite(float(value)):
        raise InputError("what it is judged by is not finite on a new model")
    if float(value) < 0:
        raise InputError(
            f"what it is judged by is negative ({float(value):g}): quality is compared by ratios, "
            "so give an error or a loss from 0 on"
        )
    if tokens < 1 or count < 1:
        raise InputError(f"its batch of {len(ids)} examples had {tokens} and {count} tokens")
    if wrong := _wrong_tokens(task, len(ids), tokens):
        raise InputError(wrong)
    state.update(repr((float(total.detach()), tokens, float(value), count)).encode())
    return state.hexdigest()


def _pair(what: str, given: Any) -> tuple[Any, Any]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"its {what} returns {type(given).__name__}: give a sum and its count")
    return given[0], given[1]


def _numbers(task: Task) -> dict[str, Any]:
    """All of a task that is no function."""
    values = ((f.name, getattr(task, f.name)) for f in fields(task))
    return {name: value for name, value in values if not callable(value)}


def _sum(number: float) -> float:
    value = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def _most(number: float) -> float:
    value = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def _joined(digest: str) -> str:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest)
    return hashlib.sha256("".join(told).encode()).hexdigest()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

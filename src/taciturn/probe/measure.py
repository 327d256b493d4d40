"""The probe itself: what runs inside every rank.

A first look at the pace decides on sizes; then come warm-ups and two sweeps over the same steps,
each in a random order of its own, the same on every rank.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from taciturn import methods
from taciturn.collectives.base import Cost
from taciturn.errors import InputError, TaciturnError
from taciturn.link import Link
from taciturn.probe.calls import Caller, Sample, Shapes, gradient_group
from taciturn.probe.steps import (
    METHOD_ELEMS,
    SHARE_OF_A_SWEEP,
    Pace,
    Priced,
    Step,
    Sweep,
    own_sizes,
    sweep,
)
from taciturn.probe.summary import Conditions, Taken, summarise
from taciturn.ranks import Clock, Eta, Progress, Ranks, join
from taciturn.transport import DistributedTransport

__all__ = ["METHODS", "Job", "measure", "probe_link"]

METHODS = (
    "backend",
    "cast",
    "ring",
    "coded:passes=4",
    "coded:passes=16,code=fourier",
    "coded:passes=16,code=fourier,wire=bf16",
    "coded:passes=16,code=fourier,wire=int8",
    "quantized:bits=8",
    "quantized:bits=4",
    "direct:bits=8",
    "powersgd:rank=1",
    "powersgd:rank=2",
    "powersgd:rank=4",
    "powersgd:rank=4,alternate=true",
    "powersgd:rank=8",
    "powersgd:rank=16",
    "topk:ratio=0.01",
)
"""Whose speed is measured if nothing else is said."""

FIRST_LOOK = ((4096, 7), (65536, 5), (1 << 20, 2))  # bytes of a round, and how often
WARM_BELOW_S = 0.15  # a step that takes longer is not repeated just to warm up
TRIES = 3  # each longer, before a link counts as one that cannot be told
LATE = 1.25  # times its time: a sweep that took longer is repeated without its repeats


@dataclass(frozen=True)
class Job:
    """What every rank must know; plain values, so that it travels as JSON.

    Attributes:
        seconds: the budget: about how long to measure; larger sizes and more repeats fit into more.
        methods: whose speed is measured, as they are written.
        seed: of the order of steps; equal on all ranks.
        timeout_s: a rank silent for longer ends the run.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        rate_bits_per_s: what all links are shaped to; None if they are not, or differ.
        groups: that a model exchanges at once, as shapes of their tensors: methods are timed on
            these, if the budget allows it.
    """

    seconds: float = 60.0
    methods: tuple[str, ...] = METHODS
    seed: int = 0
    timeout_s: float = 60.0
    device: str = "cpu"
    rate_bits_per_s: int | None = None
    groups: tuple[Shapes, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Law: ``Job.from_dict(job.to_dict()) == job``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The job that :meth:`to_dict` wrote, also after a trip through JSON."""
        groups = tuple(tuple(map(tuple, some)) for some in values["groups"])
        return cls(**{**values, "methods": tuple(values["methods"]), "groups": groups})

    @property
    def own(self) -> list[int]:
        """Elements of each group."""
        return [sum(map(math.prod, some)) for some in self.groups]


class _Host(NamedTuple):
    """Of one rank: ranks with the same ``name`` share cores and a monotonic clock."""

    name: str
    cores: int


def _host() -> _Host:
    """This rank's. Containers and namespaces of one machine have one kernel, and so one boot."""
    name = os.uname().nodename
    with suppress(OSError):
        name = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return _Host(name, cores)


def _first_look(caller: Caller, crowding: float, seed: int) -> Pace:
    """Pace of the link from a few rounds, in random order; the same on all ranks."""
    ranks = caller.ranks
    for _ in range(3):  # connections, and the code's own first calls
        caller.call(Step("round", FIRST_LOOK[0][0]))
    steps = [size for size, repeats in FIRST_LOOK for _ in range(repeats)]
    random.Random(seed).shuffle(steps)
    times: dict[int, list[float]] = {size: [] for size, _ in FIRST_LOOK}
    for size in steps:
        sample = caller.call(Step("round", size))
        assert sample is not None
        times[size].append(sample.seconds)
    start = time.monotonic()
    for _ in range(5):
        ranks.barrier()
    barrier_s = (time.monotonic() - start) / 5
    typical = [statistics.median(times[size]) for size, _ in FIRST_LOOK]
    seen = ranks.gather((barrier_s, *typical))
    barrier_s, small, middle, large = (max(values) for values in zip(*seen, strict=True))
    beta = max((large - middle) / (FIRST_LOOK[2][0] - FIRST_LOOK[1][0]), 1e-11)
    return Pace(small, beta, barrier_s, crowding)


def _costs(job: Job, ranks: int) -> dict[str, dict[int, Cost | None]]:
    """What a call of each method costs the busiest rank, by elements."""
    costs: dict[str, dict[int, Cost | None]] = {}
    for text in job.methods:
        aggregator = methods.aggregator(text)
        costs[text] = {}
        for elems in {*METHOD_ELEMS, *own_sizes(job.own)}:
            group = gradient_group(elems, job.groups)
            each = [aggregator.cost(group, torch.float32, ranks, rank) for rank in range(ranks)]
            known = [cost for cost in each if cost is not None]
            costs[text][elems] = max(known, key=_sent) if known else None
    return costs


def _sent(cost: Cost) -> int:
    return cost.sent_bytes


def _do(caller: Caller, steps: Sequence[Priced], clock: Clock, label: str) -> list[Sample | None]:
    taken = []
    for step, _ in steps:
        with clock.step(f"{label}: {_words(step)}"):
            taken.append(caller.call(step))
    return taken


def _words(step: Step) -> str:
    """What is under way, for whoever watches."""
    if step.kind == "method":
        return f"{step.what}, {step.size} elements"
    if step.kind == "all_reduce":
        return f"all_reduce of {step.size} bytes {step.what}"
    return {"matmul": "multiplying"}.get(step.kind, f"{step.kind} of {step.size} bytes")


def _reducible(transport: DistributedTransport) -> list[str]:
    """What the backend sums, of fp32 and bf16."""
    return ["fp32", *(["bf16"] if transport.can_reduce(torch.bfloat16) else [])]


def probe_link(ranks: Ranks, job: Job, report: Callable[[Progress], None] | None = None) -> Link:
    """Measure the link between the ranks; every rank calls it, and gets the same.

    Where no link can be told from the times, as on a machine that does something else meanwhile, it
    is tried again, twice at most and for longer.

    Raises:
        InputError: one rank alone, or times from which no link can be told.
        PeerError, MismatchError: a rank died, went silent, or does another job.
    """
    began = time.monotonic()
    if ranks.size == 1:
        raise InputError("one rank has no link: probe with two at least")
    ranks.agree(job.to_dict())
    number = 1
    while True:
        link = _tried(ranks, replace(job, seconds=number * job.seconds), report, began)
        if isinstance(link, Link):
            return link
        if number == TRIES:
            raise link
        number += 1


def _tried(
    ranks: Ranks, job: Job, report: Callable[[Progress], None] | None, began: float
) -> Link | TaciturnError:
    """Return the link, or why it cannot be told; the same on all ranks."""
    hosts = [_Host(*host) for host in ranks.gather(_host())]
    names = [host.name for host in hosts]
    cores = min(host.cores for host in hosts)
    crowding = max(1.0, max(names.count(name) for name in names) / cores)
    pace = _first_look(Caller(ranks, FIRST_LOOK[-1][0]), crowding, job.seed)
    dtypes = _reducible(ranks.transport)
    plan = sweep(ranks.size, pace, job.seconds, dtypes, _costs(job, ranks.size), job.own)
    caller = Caller(ranks, plan.largest_bytes, plan.largest_elems, job.groups)
    orders, swept = _sweeps(caller, plan, job, report)
    views = ranks.gather(swept)
    link: Link | TaciturnError | None = None
    if ranks.rank == 0:
        conditions = Conditions(
            ranks=ranks.size,
            hosts=len(set(names)),
            backend=dist.get_backend(ranks.group),
            device=job.device,
            cores=cores,
            rate_bits_per_s=job.rate_bits_per_s,
            probed_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.monotonic() - began,
        )
        try:
            link = _told(summarise(conditions, _joined(orders, views)), job, plan)
        except TaciturnError as error:  # the others must not wait for this rank
            link = error
    found: Link | TaciturnError = ranks.gather(link)[0]
    return found


def _told(link: Link, job: Job, plan: Sweep) -> Link:
    """Return the link with a warning if a model's groups take more than the budget."""
    timed = {step.size for step, _ in plan.steps if step.kind == "method"}
    if not timed or {*own_sizes(job.own)} <= timed:
        return link
    warning = (
        f"the budget of {job.seconds:g} s was too short to time methods on the model's own groups: "
        "their times there are carried on from smaller ones; give more"
    )
    return replace(link, warnings=(*link.warnings, warning))


def _sweeps(
    caller: Caller, plan: Sweep, job: Job, report: Callable[[Progress], None] | None
) -> tuple[list[list[Step]], list[list[Sample | None]]]:
    """The steps of both sweeps in their order, the same on all ranks, and this rank's samples."""
    warming = Sweep(tuple(one for one in plan.once.steps if one[1] < WARM_BELOW_S))
    first, second = (plan.shuffled(2 * job.seed + number) for number in (0, 1))
    order = [*warming.steps, *first, *second]
    clock = Clock(Eta([(f"{step.kind}:{step.size} {step.what}", s) for step, s in order]), report)
    _do(caller, warming.steps, clock, "warm-up")
    start = time.monotonic()
    taken = [_do(caller, first, clock, "first sweep")]
    took = max(caller.ranks.gather(time.monotonic() - start))
    if took > LATE * SHARE_OF_A_SWEEP * job.seconds:
        second = plan.once.shuffled(2 * job.seed + 1)
        clock.eta = Eta([(f"{step.kind}:{step.size} {step.what}", s) for step, s in second])
    taken.append(_do(caller, second, clock, "second sweep"))
    return [[step for step, _ in order] for order in (first, second)], taken


def _joined(
    orders: Sequence[Sequence[Step]], views: Sequence[Sequence[Sequence[Sample | None]]]
) -> list[list[Taken]]:
    """The sweeps as steps with all ranks' samples; ``views`` by rank, then sweep."""
    by_sweep = zip(*views, strict=True)
    return [
        [Taken(step, some) for step, some in zip(order, zip(*each, strict=True), strict=True)]
        for order, each in zip(orders, by_sweep, strict=True)
    ]


def measure(job: Job, report: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Run the job in this rank, under torchrun's environment variables; every rank calls it.

    Args:
        job: the same on every rank.
        report: told how far the probe is, before each step.

    Returns:
        The link's plain values.

    Raises:
        InputError: as :func:`probe_link`.
        PeerError, MismatchError: a rank died, went silent, or does another job.
    """
    ranks = join(job.device, job.timeout_s)
    link = probe_link(ranks, job, report)
    ranks.leave()
    return link.to_json()

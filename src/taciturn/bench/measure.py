"""The measurement itself: what runs inside every rank, and the arithmetic on what it saw.

Fair by construction: all methods reduce the same buffer in the same run, round-robin in an order
drawn afresh for each repeat, each call behind a barrier; a repeat's time is that of its slowest
rank. Copying the input, errors and counters stay outside the clock. Times, bytes and errors come
back as rows of plain values (:func:`measure`), one per size and method; nothing here prints.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from taciturn import methods
from taciturn.bench.columns import (
    Calls,
    ErrorSums,
    Row,
    Sample,
    byte_columns,
    error_columns,
    error_sums,
    quartiles,
    root_of_quotient,
    time_columns,
)
from taciturn.bench.inputs import Input, make_input
from taciturn.collectives import CodedRing, Collective, Cost
from taciturn.ranks import Clock, Eta, Progress, Ranks, join, own_interface
from taciturn.testbed import interface_counters

__all__ = ["Job", "measure", "order_of_calls"]

ITEM_BYTES = 4  # buffers are float32


@dataclass(frozen=True)
class Job:
    """What every rank must know; plain values, so that it travels as JSON.

    Attributes:
        methods: as typed, one string each; exactly those that get a row.
        reference: index of the method that ``ratio_to_backend`` divides by.
        added: the reference was not asked for but added.
        sizes_bytes: buffer sizes, multiples of 4.
        source: ``gradients``, ``random`` or a file, as for ``inputs.make_input``.
        repeats: timed calls of each method and size; more narrows the quartiles.
        warmups: untimed rounds before them; the first calls open connections.
        seed: of inputs and of the order of calls; equal on all ranks.
        timeout_s: a rank silent for longer ends the run.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        rate_bits_per_s: what the link is shaped to; None if it is not shaped.
        link: one sentence on the link.
        command: the command line, for the record.
    """

    methods: tuple[str, ...]
    reference: int
    added: bool
    sizes_bytes: tuple[int, ...]
    source: str = "gradients"
    repeats: int = 5
    warmups: int = 1
    seed: int = 0
    timeout_s: float = 60.0
    device: str = "cpu"
    rate_bits_per_s: int | None = None
    link: str = ""
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Law: ``Job.from_dict(job.to_dict()) == job``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The job that :meth:`to_dict` wrote, also after a trip through JSON."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)


def order_of_calls(methods: int, repeat: int, seed: int) -> list[int]:
    """The order in which one repeat runs the methods: shuffled, and the same on every rank."""
    order = list(range(methods))
    random.Random(f"{seed}/{repeat}").shuffle(order)
    return order


def _call(
    collective: Collective,
    work: torch.Tensor,
    source: torch.Tensor,
    ranks: Ranks,
    wire: str | None,
) -> Sample:
    """One call on the clock; everything else off it."""
    work.copy_(source)
    sent = interface_counters(wire).sent_bytes if wire else 0
    ranks.barrier()
    before = ranks.transport.ledger.snapshot()
    start = time.perf_counter()
    collective.all_reduce(work, ranks.transport)
    ranks.synchronize()
    seconds = time.perf_counter() - start
    counts = ranks.transport.ledger.snapshot() - before
    ranks.barrier()
    # All have received now, so all has been sent: the interface's count is complete. It includes
    # the two barriers, a few hundred bytes.
    return Sample(seconds, counts, interface_counters(wire).sent_bytes - sent if wire else None)


class _Truth(NamedTuple):
    """What results are compared with, at one size."""

    total: torch.Tensor  # the sum of all inputs, float64
    hetero: float  # sum over ranks and elements of (g - total / N)^2
    difference: float | None  # share of the rms of g that differs between ranks


def _truth(source: torch.Tensor, ranks: Ranks) -> _Truth:
    total = ranks.sum(source.double())
    g = source.double()
    both = torch.stack([(g - total / ranks.size).square().sum(), g.square().sum()])
    hetero, whole = ranks.sum(both).tolist()
    return _Truth(total, hetero, root_of_quotient(hetero, whole))


def _errors(result: torch.Tensor, truth: _Truth, data: Input, ranks: Ranks) -> Row:
    """Errors of one method's result, the same on every rank."""
    digest = hashlib.blake2b(result.cpu().numpy().tobytes()).digest()
    finite = bool(torch.isfinite(result).all())
    known = ranks.gather((digest, finite))
    row: Row = {
        "bit_identical": all(other == digest for other, _ in known),
        "input_difference": truth.difference,
        "notes": [],
    }
    if not all(ok for _, ok in known):
        where = [rank for rank, (_, ok) in enumerate(known) if not ok]
        everywhere = len(where) == ranks.size
        row["notes"] = [f"result not finite on {'every rank' if everywhere else f'ranks {where}'}"]
        nothing = ErrorSums(*torch.zeros(4, 1, dtype=torch.float64))
        return row | error_columns(nothing, 0.0, ranks.size, ())
    # Where all ranks hold the same bits they are the mean, and nothing needs to be exchanged.
    mean = None if row["bit_identical"] else ranks.sum(result.double()) / ranks.size
    sums = error_sums(result, mean, truth.total, data.spans)
    replica, spread = ranks.sum(torch.stack([sums.replica, sums.spread]))
    sums = sums._replace(replica=replica, spread=spread)
    row |= error_columns(sums, truth.hetero, ranks.size, data.spans)
    if row["replica_error"] is None:
        row["notes"] = ["the true sum is zero or not finite: no relative error"]
    return row


def _make(text: str) -> Collective:
    """The collective that the text names; the backend as it is by itself, unless told otherwise.

    What others are measured against must not pay for a check of ours. Here the ranks have agreed.
    """
    method = methods.parse(text)
    if method.name == "backend":
        method = replace(method, options={"check": False, **method.options})
    return methods.build(method)


def _guess_s(job: Job, ranks: int, size_bytes: int, cost: Cost | None) -> float:
    """Rough seconds of one call before any has been timed."""
    sent = cost.sent_bytes if cost else 2 * (ranks - 1) / ranks * size_bytes
    return 1e-3 + sent * 8 / (job.rate_bits_per_s or 4e9)


def _steps(job: Job, ranks: Ranks, collectives: Sequence[Collective]) -> list[tuple[str, float]]:
    """All that a run does, as keys and guessed seconds, in order."""
    steps = []
    for size in job.sizes_bytes:
        full = _guess_s(job, ranks.size, size, None)
        steps += [(f"input:{size}", 0.2 + 3e-7 * size), (f"sum:{size}", 2 * full)]
        for repeat in range(job.warmups + job.repeats):
            for i in order_of_calls(len(collectives), repeat, job.seed):
                method = collectives[i]
                cost = method.cost(size // ITEM_BYTES, torch.float32, ranks.size, ranks.rank)
                steps.append((f"call:{size}:{i}", _guess_s(job, ranks.size, size, cost)))
                if repeat == job.warmups + job.repeats - 1:
                    mean = 0 if method.bit_identical else 2 * full  # an exchange in float64
                    steps.append((f"errors:{size}:{i}", 5e-8 * size + mean))
    return steps


@dataclass
class _Measured:
    """One rank's view of one size: ``samples[method][call]`` and ``errors[method]``."""

    note: str
    samples: list[list[Sample]]
    errors: list[Row]


def _bench_size(
    job: Job, size_bytes: int, collectives: Sequence[Collective], ranks: Ranks, clock: Clock
) -> _Measured:
    """All methods on one buffer, round-robin."""
    wire = own_interface()
    numel = size_bytes // ITEM_BYTES
    with clock.step("making the input"):
        data = make_input(job.source, numel, ranks.rank, job.seed)
        source = data.buffer.to(ranks.device)
        ranks.barrier()
    with clock.step("summing the inputs exactly"):
        truth = _truth(source, ranks)
    work = torch.empty_like(source)
    measured = _Measured(data.note, [[] for _ in collectives], [{} for _ in collectives])
    for repeat in range(job.warmups + job.repeats):
        last = repeat == job.warmups + job.repeats - 1
        label = (
            f"repeat {repeat - job.warmups + 1} of {job.repeats}"
            if repeat >= job.warmups
            else "warm-up"
        )
        for i in order_of_calls(len(collectives), repeat, job.seed):
            with clock.step(f"{label}: {job.methods[i]}"):
                measured.samples[i].append(_call(collectives[i], work, source, ranks, wire))
            if last:
                with clock.step(f"errors of {job.methods[i]}"):
                    measured.errors[i] = _errors(work, truth, data, ranks)
    return measured


def _choice(collective: Collective, numel: int, ranks: int) -> str | None:
    """Which code a coded ring uses for such buffers, and why."""
    if not isinstance(collective, CodedRing) or ranks == 1:
        return None
    return collective.plan(numel, torch.float32, ranks)[1]


def _rows(
    job: Job,
    size_bytes: int,
    views: Sequence[_Measured],
    collectives: Sequence[Collective],
    conditions: Row,
) -> list[Row]:
    """The rows of one size from all ranks' views of it."""
    numel, ranks = size_bytes // ITEM_BYTES, len(views)
    calls = []
    for i, collective in enumerate(collectives):
        by_call = list(zip(*(view.samples[i] for view in views), strict=True))
        costs = [collective.cost(numel, torch.float32, ranks, rank) for rank in range(ranks)]
        calls.append(Calls(by_call[: job.warmups], by_call[job.warmups :], costs))
    reference_s = quartiles(calls[job.reference].times_s).median
    return [
        {
            "method": job.methods[i],
            "ranks": ranks,
            "rate_bits_per_s": job.rate_bits_per_s,
            "buffer_bytes": size_bytes,
            "dtype": "float32",
            "is_reference": i == job.reference,
            "added_by_bench": job.added and i == job.reference,
            "choice": _choice(collectives[i], numel, ranks),
        }
        | time_columns(call, size_bytes, reference_s)
        | byte_columns(call, job.rate_bits_per_s)
        | views[0].errors[i]
        | {"conditions": conditions | {"input": views[0].note}}
        for i, call in enumerate(calls)
    ]


def _conditions(job: Job) -> Row:
    """Under what the rows were measured; the same in all of them."""
    try:
        version = metadata.version("taciturn")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": job.command,
        "link": job.link,
        "device": job.device,
        "backend": dist.get_backend(),
        "repeats": job.repeats,
        "warmups": job.warmups,
        "seed": job.seed,
        "taciturn": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
    }


def measure(job: Job, report: Callable[[Progress], None] | None = None) -> list[Row]:
    """Run the job in this rank, under torchrun's environment variables; every rank calls it.

    Args:
        job: the same on every rank.
        report: told how far the run is, before each step.

    Returns:
        On rank 0 the rows, sizes and within them methods in the job's order; on others nothing.

    Raises:
        InputError, MethodError, CodeError: a job that cannot be done.
        PeerError, MismatchError: a rank died, went silent, or runs another job.
    """
    ranks = join(job.device, job.timeout_s)
    ranks.agree(asdict(replace(job, command="")))
    collectives = [_make(text) for text in job.methods]
    conditions = _conditions(job)
    clock = Clock(Eta(_steps(job, ranks, collectives)), report)
    rows: list[Row] = []
    for size in job.sizes_bytes:
        views = ranks.gather(_bench_size(job, size, collectives, ranks, clock))
        if ranks.rank == 0:
            rows += _rows(job, size, views, collectives, conditions)
    ranks.leave()
    return rows

"""Ranks that run a little program on a GPU, in exact microseconds: an oracle for the replay.

Each rank has one thread, a stream 7 that computes and a stream 20 for all-reduces. The rules are
those of CUDA and NCCL, with constant latencies; the files hold records of all waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trace_files import document, event, step

CALL, LATENCY, GAP = 5, 10, 5  # a runtime call; from launch to start; between works of a stream
RETURN = 8  # from the end of work to the return of the call that waits for it


class Op(NamedTuple):
    """``compute`` or ``cpu`` for so long; ``reduce``, for which stream 7 may wait; ``sync``."""

    what: str
    length: int = 0
    wait: bool = False


@dataclass
class Run:
    """What happened: events of one rank, arrivals and ends of its all-reduces, end of the step."""

    events: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    done: int = 0
    step_end: int = 0


def simulate(
    programs: Sequence[Sequence[Op]], transfers: Sequence[int], starts: Sequence[int] | None = None
) -> list[Run]:
    """Run all ranks; the number-th all-reduce of each takes ``transfers[number]`` together."""
    starts = starts or [0] * len(programs)
    last = [0] * len(transfers)
    while True:  # arrivals only grow, and each round fixes at least one more
        runs = [
            _run(one, transfers, last, start) for one, start in zip(programs, starts, strict=True)
        ]
        now = [max(run.arrivals[i] for run in runs) for i in range(len(transfers))]
        if now == last:
            return runs
        last = now


def _run(program: Sequence[Op], transfers: Sequence[int], last: Sequence[int], start: int) -> Run:
    run = Run()
    cpu, number = start + 1, 100
    free = {7: None, 20: None}
    after: dict[int, int | None] = {7: None, 20: None}

    def launch(name: str, stream: int, length: int | None) -> None:
        nonlocal cpu, number
        number += 10
        run.events.append(
            event(
                "cudaLaunchKernel", cpu, CALL, cat="cuda_runtime", pid=1, tid=1, correlation=number
            )
        )
        begin = cpu + LATENCY
        for time in (free[stream], after[stream]):
            begin = max(begin, time + GAP) if time is not None else begin
        cpu += CALL
        after[stream] = None
        if length is None:
            run.arrivals.append(begin)
            index = len(run.arrivals) - 1
            end = max(begin, last[index]) + transfers[index]
            run.ends.append(end)
        else:
            end = begin + length
        run.events.append(event(name, begin, end - begin, tid=stream, correlation=number))
        free[stream] = end

    def wait(stream: int, other: int) -> None:
        nonlocal number
        number += 10
        if free[other] is None:
            return
        after[stream] = free[other]
        run.events.append(
            event(
                "Stream Wait Event",
                cpu,
                0,
                cat="cuda_sync",
                tid=stream,
                correlation=number,
                cuda_sync_kind="Stream Wait Event",
                wait_on_stream=other,
                wait_on_cuda_event_record_corr_id=number - 1,
            )
        )

    for op in program:
        if op.what == "compute":
            launch("gemm", 7, op.length)
        elif op.what == "reduce":
            wait(20, 7)
            launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, None)
            if op.wait:
                wait(7, 20)
        elif op.what == "sync":
            ends = [time for time in free.values() if time is not None]
            back = max([cpu + CALL, *(time + RETURN for time in ends)])
            run.events.append(
                event("cudaDeviceSynchronize", cpu, back - cpu, cat="cuda_runtime", pid=1, tid=1)
            )
            cpu = back
        else:
            run.events.append(event("aten::op", cpu, op.length, cat="cpu_op", pid=1, tid=1))
            cpu += op.length
    run.step_end = cpu + 1
    run.done = max([run.step_end, *(time for time in free.values() if time is not None)])
    run.events.insert(0, step(1, start, run.step_end - start))
    for one in run.events:
        if one["pid"] == 100:
            one["pid"] = 1
    return run


def documents(runs: Sequence[Run], base: int = 1_700_000_000_000_000_000) -> list[dict[str, Any]]:
    """The files of a run."""
    return [
        document(run.events, rank=rank, world=len(runs), base=base) for rank, run in enumerate(runs)
    ]

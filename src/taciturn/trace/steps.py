"""Steps of a trace, and which step an event belongs to.

Work on a GPU belongs to the step in which it was *launched*, not in which it ran: kernels often run
on after the step's window on the CPU has ended.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.events import Trace
from taciturn.trace.kinds import Kind

__all__ = ["Step", "launch_rows", "step_of_rows", "steps_of"]

_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d+)")


class Step(NamedTuple):
    """A window on the CPU: ``number`` as the profiler counts, None for a trace without steps."""

    number: int | None
    start_ns: int
    end_ns: int
    lane: int


def steps_of(trace: Trace) -> list[Step]:
    """The ``ProfilerStep#N`` ranges by start; without one, the whole trace as one step."""
    numbers = {
        label: int(found[1])
        for label, (_, name, kind) in enumerate(trace.labels)
        if kind != Kind.GPU_ANNOTATION and (found := _STEP.match(name))
    }
    events = trace.events
    steps: dict[int, Step] = {}
    for row in np.flatnonzero(np.isin(events.label, list(numbers))).tolist():
        number = numbers[int(events.label[row])]
        if events.end_ns[row] > events.start_ns[row] and number not in steps:
            steps[number] = Step(
                number,
                int(events.start_ns[row]),
                int(events.end_ns[row]),
                int(events.lane[row]),
            )
    if steps:
        return sorted(steps.values(), key=lambda step: step.start_ns)
    rows = np.flatnonzero(~np.isin(events.kind, [Kind.OVERHEAD, Kind.PYTHON]))
    if not len(rows):
        rows = np.arange(len(events))
    return [Step(None, int(events.start_ns[rows].min()), int(events.end_ns[rows].max()), -1)]


def launch_rows(trace: Trace) -> NDArray[np.int64]:
    """For each event the row of the runtime call that put it on the GPU; -1 where none is known.

    Joined by ``correlation``, which is unique per process. Kernels of a replayed graph have none.
    """
    events = trace.events
    calls = events.of(Kind.LAUNCH, Kind.SYNC, Kind.RUNTIME, Kind.STREAM_WAIT, Kind.EVENT_RECORD)
    calls = calls[events.correlation[calls] > 0]
    found = np.full(len(events), -1, np.int64)
    work = np.flatnonzero((events.queue >= 0) & (events.correlation > 0))
    if not len(calls) or not len(work):
        return found
    order = np.argsort(events.correlation[calls], kind="stable")
    keys = events.correlation[calls][order]
    place = np.minimum(np.searchsorted(keys, events.correlation[work]), len(keys) - 1)
    matched = keys[place] == events.correlation[work]
    found[work[matched]] = calls[order][place[matched]]
    return found


def step_of_rows(
    trace: Trace, steps: list[Step], launches: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """For each event the index of its step: by launch where that is known, else by start; or -1."""
    events = trace.events
    launches = launch_rows(trace) if launches is None else launches
    known = launches >= 0
    time = events.start_ns.copy()
    time[known] = events.start_ns[launches[known]]
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    index = np.searchsorted(starts, time, side="right") - 1
    inside = (index >= 0) & (time <= ends[np.maximum(index, 0)])
    return np.where(inside, index, -1).astype(np.int64)

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
from taciturn.trace.kinds import GPU_WORK, Kind

__all__ = ["Step", "launch_rows", "left_over", "step_of_rows", "steps_of"]

_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})(?!\d)")  # 18 digits fit 64 bits


_GRAPH = re.compile(r"Graph_?Launch", re.IGNORECASE)
MAX_PER_LAUNCH = 8  # works of one launch, but for graphs; more is a number that joins nothing


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
    graphs = [label for label, one in enumerate(trace.labels) if _GRAPH.search(one.name)]
    joined = work[matched & np.isin(events.kind[work], GPU_WORK)]
    launchers, counts = np.unique(found[joined], return_counts=True)
    many = launchers[(counts > MAX_PER_LAUNCH) & ~np.isin(events.label[launchers], graphs)]
    found[np.isin(found, many)] = -1
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
    before = left_over(trace, launches)
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    index = np.searchsorted(starts, time, side="right") - 1
    inside = (index >= 0) & (time <= ends[np.maximum(index, 0)])
    inside[before] = False
    return np.where(inside, index, -1).astype(np.int64)


def left_over(trace: Trace, launches: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows of work that was launched before the recording began.

    Its launch is not in the file, and it comes before anything on its stream whose launch is. A
    file with a launch of a graph tells nothing, as the graph's kernels may have no launch either.
    """
    events = trace.events
    graphs = [label for label, one in enumerate(trace.labels) if _GRAPH.search(one.name)]
    work = np.flatnonzero((events.queue >= 0) & np.isin(events.kind, GPU_WORK))
    if not len(work) or np.isin(events.label, graphs).any():
        return np.empty(0, np.int64)
    known = work[launches[work] >= 0]
    first = np.full(int(events.queue.max()) + 1, np.iinfo(np.int64).min)
    # Rows come by start: of each stream the first stays.
    queues, places = np.unique(events.queue[known], return_index=True)
    first[queues] = events.start_ns[known[places]]
    unknown = work[launches[work] < 0]
    return unknown[events.start_ns[unknown] < first[events.queue[unknown]]].astype(np.int64)

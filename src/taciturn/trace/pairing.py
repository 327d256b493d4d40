"""Which call of torch.distributed enqueued which event of gloo."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.events import Trace
from taciturn.trace.messages import canonical, size_bytes

__all__ = ["pair_gloo"]

# gloo's own ranges carry the name of what it runs, which is not always what was called.
_GLOO_RUNS = {"reduce_scatter": "all_reduce"}

TAKE_UP_NS = 3_000_000
"""A thread of gloo that is free takes up a call in less time, if it gets a core."""

OVERTAKEN_NS = 20_000_000
"""A thread without a core takes up a call so late: 16 ms in recordings with two ranks a core."""


def pair_gloo(
    trace: Trace, rows: NDArray[np.int64], calls: NDArray[np.int64], step_index: NDArray[np.int64]
) -> dict[int, int]:
    """For each event of gloo the call that enqueued it; none where all that are left are unlikely.

    Nothing in the file joins them, and of either some may be lost. Pool threads take up the calls
    of a queue in order, and at once when they are free; two of them may swap neighbours, which
    sizes tell apart where they are recorded. So the oldest call of that size is taken, unless a
    younger one was taken up long before, or the thread was free long before and the call is of
    another step: then the event of that call is not in the file. Where there are as many events as
    calls of a name, none is lost, and a thread may have waited for a core as long as it likes.
    """
    events = trace.events
    waiting = _waiting_calls(trace, calls, step_index)
    more = Counter((name, one.step) for name, queue in waiting.items() for one in queue.calls)
    left = {name: len(queue.calls) for name, queue in waiting.items()}
    for row in rows.tolist():
        if events.queue[row] < 0 and (name := canonical(trace.name(row))) in left:
            more[name, int(step_index[row])] -= 1
            left[name] -= 1
    paired: dict[int, int] = {}
    free_ns: dict[int, int] = {}
    for row in rows.tolist():
        if events.queue[row] >= 0 or not waiting:
            continue
        start, lane = int(events.start_ns[row]), int(events.lane[row])
        name = canonical(trace.name(row))
        queue = waiting[name]
        size = size_bytes(trace.args.get(row, {}))
        if left.get(name, 1):
            queue.forget(start)
        early = [one for one in queue.calls[:64] if one.time_ns <= start]
        same = [one for one in early if size is not None and one.size_bytes == size]
        idle = free_ns.get(lane, 0)
        step = int(step_index[row])
        likely = [
            one
            for one in same or early
            if start - max(one.time_ns, idle) <= TAKE_UP_NS
            # A thread that has to wait for a core takes longer; but not into the next step.
            or one.step == step >= 0
            or not left.get(name, 1)
        ]
        if more[name, step] > 0:  # events of this step are lost: what fits before what is old
            likely.sort(key=lambda one: start - max(one.time_ns, idle) > TAKE_UP_NS)
        free_ns[lane] = max(idle, int(events.end_ns[row]))
        if likely:
            queue.take(likely[0], start)
            paired[row] = likely[0].row
    return paired


class _Call(NamedTuple):
    """A call that no event has been found for yet; ``step`` is the index of its step, or -1."""

    row: int
    time_ns: int
    step: int
    size_bytes: int | None


class _Queue:
    """Calls of one name, oldest first, and those that were taken up: by whom is seen later."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._taken: list[tuple[_Call, int]] = []  # and when it was taken up

    def take(self, call: _Call, start_ns: int) -> None:
        """An event that starts then is of that call."""
        self.calls.remove(call)
        self._taken.append((call, start_ns))

    def forget(self, now_ns: int) -> None:
        """Drop calls that a younger one has overtaken for longer than two threads race."""
        past = [call for call, start in self._taken if now_ns - start > TAKE_UP_NS]
        long_past = [call.time_ns for call, start in self._taken if now_ns - start > OVERTAKEN_NS]
        dropped = 0
        for one in self.calls:
            in_step = one.time_ns < max(long_past, default=0)
            if not in_step and not any(
                one.time_ns < call.time_ns and one.step != call.step for call in past
            ):
                break
            dropped += 1
        del self.calls[:dropped]
        # One that was settled before is remembered by what it has dropped.
        self._taken = [one for one in self._taken if now_ns - one[1] <= OVERTAKEN_NS]


def _waiting_calls(
    trace: Trace, calls: NDArray[np.int64], step_index: NDArray[np.int64]
) -> dict[str, _Queue]:
    """Calls of torch.distributed by the name of the event that they make."""
    waiting: dict[str, _Queue] = defaultdict(_Queue)
    for row in calls.tolist():
        name = trace.name(row)
        if name.startswith("c10d"):
            name = canonical(name)
            size = size_bytes(trace.args.get(row, {}))
            call = _Call(row, int(trace.events.start_ns[row]), int(step_index[row]), size)
            waiting[_GLOO_RUNS.get(name, name)].calls.append(call)
    return waiting

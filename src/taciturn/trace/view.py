"""One rank on the common clock, with the look-ups that the graph asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.clock import Correction
from taciturn.trace.collectives import Collective
from taciturn.trace.events import Events, Trace
from taciturn.trace.kinds import GPU_WORK, Kind
from taciturn.trace.steps import Step, launch_rows, left_over, step_of_rows
from taciturn.trace.timeline import Intervals, unite

__all__ = ["CPU_KINDS", "View"]

CPU_KINDS = (
    Kind.CPU,
    Kind.CALL,
    Kind.LAUNCH,
    Kind.SYNC,
    Kind.STREAM_WAIT,
    Kind.EVENT_RECORD,
    Kind.RUNTIME,
    Kind.CODEC,
)
"""What a CPU thread does; ranges round it are not doing."""

BURST_GAP_NS = 1_000_000  # a thread that paused so long was waiting for its next task
FALLBACK_LATENCY_NS = 10_000  # from launch to start on an idle stream, if a trace cannot tell
MAX_LATENCY_NS = 100_000


class View:
    """A trace, its clock's correction, its steps and its collectives.

    Attributes:
        trace: as read.
        events: its columns.
        rank: its number.
        start_ns: of each event, on the common clock.
        end_ns: the same; never before the start.
        steps: windows on the common clock.
        collectives: on the common clock, by call.
        launches: for each event the row of the call that launched it, or -1.
        left_over: rows of work that was launched before the recording began.
        step_index: for each event the index of its step, or -1.
        work: rows of all work on streams, by start.
    """

    def __init__(
        self,
        trace: Trace,
        steps: Sequence[Step],
        collectives: Sequence[Collective],
        fix: Correction | None = None,
        keep: Sequence[int | None] | None = None,
    ) -> None:
        """Make a view.

        Args:
            trace: of the rank.
            steps: all of it, on its own clock.
            collectives: already on the common clock.
            fix: of its clock; None leaves it as it is.
            keep: numbers of the steps to keep, in order; None keeps all.
        """
        self.trace = trace
        self.events: Events = trace.events
        self.rank = trace.rank or 0
        fix = fix or Correction(0, 0.0, 0, 0)
        self.start_ns = fix.apply(self.events.start_ns)
        self.end_ns = np.maximum(fix.apply(self.events.end_ns), self.start_ns)
        kept = [s for s in steps if keep is None or s.number in keep]
        self.steps = [Step(s.number, fix.at(s.start_ns), fix.at(s.end_ns), s.lane) for s in kept]
        self.launches = launch_rows(trace)
        self.left_over = left_over(trace, self.launches)
        index = step_of_rows(trace, list(steps), self.launches)
        new = np.full(len(steps) + 1, -1, np.int64)
        for place, step in enumerate(steps):
            if step in kept:
                new[place] = kept.index(step)
        self.step_index = new[index]
        self.collectives = list(collectives)
        for one in self.collectives:
            # Of a call of gloo the trace alone does not know which event it made.
            self.step_index[one.row] = new[one.step]
        self.work = self.events.of(*GPU_WORK)
        self.work = self.work[self.events.queue[self.work] >= 0]
        self.by_queue: dict[int, list[int]] = {}
        for row in self.work.tolist():
            self.by_queue.setdefault(int(self.events.queue[row]), []).append(row)

    def lane_of(self, row: int) -> int:
        """The thread of an event."""
        return int(self.events.lane[row])

    def called_ns(self, row: int) -> int:
        """When an event was launched; its start, if that is not known."""
        launch = int(self.launches[row])
        return int(self.start_ns[launch if launch >= 0 else row])

    @cached_property
    def on_gpu(self) -> bool:
        """Whether any work ran on a GPU."""
        return bool(len(self.work))

    @cached_property
    def _cpu_rows(self) -> dict[int, NDArray[np.int64]]:
        rows = self.events.of(*CPU_KINDS)
        rows = rows[self.events.queue[rows] < 0]
        lanes = self.events.lane[rows]
        return {int(lane): rows[lanes == lane] for lane in np.unique(lanes)}

    @cached_property
    def cpu_lanes(self) -> list[int]:
        """Threads that run operators or runtime calls."""
        return sorted(self._cpu_rows)

    @cached_property
    def main_lane(self) -> int:
        """The thread of the steps; without steps the one with most events."""
        if self.steps and self.steps[0].lane >= 0:
            return self.steps[0].lane
        if not self._cpu_rows:
            return -1
        return max(self._cpu_rows, key=lambda lane: len(self._cpu_rows[lane]))

    @cached_property
    def backward_lanes(self) -> set[int]:
        """Threads of autograd, other than the main one."""
        named = [
            label
            for label, (_, name, kind) in enumerate(self.trace.labels)
            if kind == Kind.CPU and name.startswith("autograd::engine")
        ]
        rows = np.flatnonzero(np.isin(self.events.label, named))
        flows = self.trace.flows
        lanes = {int(lane) for lane in np.unique(self.events.lane[rows])}
        lanes |= {int(lane) for lane in np.unique(flows.lane[~flows.starts])}
        return lanes - {self.main_lane}

    def busy(self, lane: int) -> Intervals:
        """When a thread was in an operator or a runtime call."""
        if lane not in self._busy:
            self._busy[lane] = self._busy_of(lane)
        return self._busy[lane]

    @cached_property
    def _busy(self) -> dict[int, Intervals]:
        return {}

    def _busy_of(self, lane: int) -> Intervals:
        rows = self._cpu_rows.get(lane, np.empty(0, np.int64))
        return unite(self.start_ns[rows], self.end_ns[rows])

    def coding(self, lane: int) -> Intervals:
        """When a thread encoded or decoded."""
        rows = self.events.of(Kind.CODEC)
        rows = rows[self.events.lane[rows] == lane]
        return unite(self.start_ns[rows], self.end_ns[rows])

    def gaps(self, lane: int, least_ns: int) -> list[tuple[int, int]]:
        """Pauses of a thread of at least that length, between two events."""
        busy = self.busy(lane)
        wide = np.flatnonzero(busy.start_ns[1:] - busy.end_ns[:-1] >= least_ns)
        return list(zip(busy.end_ns[wide].tolist(), busy.start_ns[wide + 1].tolist(), strict=True))

    def bursts(self, lane: int) -> list[tuple[int, int]]:
        """Stretches of a thread without a long pause."""
        busy = self.busy(lane)
        if not len(busy):
            return []
        cut = np.flatnonzero(busy.start_ns[1:] - busy.end_ns[:-1] >= BURST_GAP_NS)
        starts = busy.start_ns[np.r_[0, cut + 1]]
        ends = busy.end_ns[np.r_[cut, len(busy) - 1]]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def busy_before(self, time_ns: int) -> int:
        """The time itself if the main thread was busy then; else when it was last."""
        busy = self.busy(self.main_lane)
        place = int(np.searchsorted(busy.start_ns, time_ns, side="right")) - 1
        if place < 0:
            return min([time_ns, *(step.start_ns for step in self.steps[:1])])
        return min(time_ns, int(busy.end_ns[place]))

    @cached_property
    def launch_latency_ns(self) -> int:
        """Usual time from a launch to its start on an idle stream.

        The lower quartile over the trace: some starts waited for another stream as well.
        """
        found = []
        for rows in self.by_queue.values():
            queue = np.array(rows, np.int64)
            launch = self.launches[queue]
            known = launch >= 0
            at = np.where(known, self.start_ns[launch], 0)
            idle = known & (np.r_[0, self.end_ns[queue[:-1]]] <= at)
            found.append(self.start_ns[queue[idle]] - at[idle])
        delays = np.concatenate(found) if found else np.empty(0, np.int64)
        delays = delays[(delays >= 0) & (delays <= MAX_LATENCY_NS)]
        if not len(delays):
            return FALLBACK_LATENCY_NS
        return int(np.quantile(delays, 0.25, method="lower"))

    def same_device(self, one: int, other: int) -> bool:
        """Whether two pieces of work ran on one device."""
        queues = self.trace.queues
        a, b = self.events.queue[one], self.events.queue[other]
        return queues[int(a)].device == queues[int(b)].device

    @cached_property
    def work_by_end(self) -> NDArray[np.int64]:
        """Rows of all work on streams, by end."""
        return self.work[np.argsort(self.end_ns[self.work], kind="stable")]

    @cached_property
    def work_ends_ns(self) -> NDArray[np.int64]:
        """Their ends."""
        ends: NDArray[np.int64] = self.end_ns[self.work_by_end]
        return ends

    def last_done(self, call: int) -> list[int]:
        """On each stream the last work that was done when a call returned."""
        rows = []
        for each, ends in self._by_queue_end:
            place = int(np.searchsorted(ends, self.end_ns[call], side="right")) - 1
            if place >= 0:
                rows.append(int(each[place]))
        return rows

    @cached_property
    def _by_queue_end(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By stream, rows and ends of its work, by end."""
        found = []
        for rows in self.by_queue.values():
            each = np.array(rows, np.int64)
            each = each[np.argsort(self.end_ns[each], kind="stable")]
            found.append((each, self.end_ns[each]))
        return found

    @cached_property
    def launched_by(self) -> dict[int, int]:
        """For each launching call the last work that it put on a stream."""
        return {
            int(self.launches[row]): row for row in self.work.tolist() if self.launches[row] >= 0
        }

    @cached_property
    def _launched(self) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By thread: times of its launches, and the computing work that each started."""
        compute = self.work[
            ~np.isin(self.events.kind[self.work], [Kind.COMMUNICATION])
            & (self.launches[self.work] >= 0)
        ]
        calls = self.launches[compute]
        found = {}
        for lane in np.unique(self.events.lane[calls]).tolist():
            here = self.events.lane[calls] == lane
            order = np.argsort(self.start_ns[calls[here]], kind="stable")
            found[int(lane)] = (self.start_ns[calls[here]][order], compute[here][order])
        return found

    def launched_before(self, call: int) -> int:
        """The last work of its own that a thread launched before a call; -1 if there is none."""
        times, work = self._launched.get(self.lane_of(call), (None, None))
        if times is None or work is None:
            return -1
        place = int(np.searchsorted(times, self.start_ns[call], side="left")) - 1
        return int(work[place]) if place >= 0 else -1

    def launched_after(self, call: int) -> int:
        """The first work of its own that a thread launched after a call; -1 if there is none."""
        times, work = self._launched.get(self.lane_of(call), (None, None))
        if times is None or work is None:
            return -1
        place = int(np.searchsorted(times, self.start_ns[call], side="right"))
        return int(work[place]) if place < len(work) else -1

    @cached_property
    def _calling(self) -> dict[int, Intervals]:
        """By thread, when it was in a call that enqueues a collective."""
        rows = self.events.of(Kind.CALL)
        enqueues = [
            label
            for label, (_, name, _) in enumerate(self.trace.labels)
            if name.startswith(("c10d", "nccl:"))
        ]
        rows = rows[np.isin(self.events.label[rows], enqueues)]
        lanes = self.events.lane[rows]
        return {
            int(lane): unite(self.start_ns[rows[lanes == lane]], self.end_ns[rows[lanes == lane]])
            for lane in np.unique(lanes)
        }

    def in_collective(self, call: int) -> bool:
        """Whether a call is part of enqueueing a collective."""
        calling = self._calling.get(self.lane_of(call))
        if calling is None:
            return False
        place = int(np.searchsorted(calling.start_ns, self.start_ns[call], side="right")) - 1
        return place >= 0 and self.start_ns[call] < calling.end_ns[place]

    @cached_property
    def _collectives_by_queue(self) -> dict[int, tuple[NDArray[np.int64], list[int]]]:
        """By stream, when its collectives were called, and their rows."""
        found: dict[int, list[Collective]] = {}
        for one in self.collectives:
            queue = int(self.events.queue[one.row])
            if queue >= 0 and one.row in self._work_rows:
                found.setdefault(queue, []).append(one)
        return {
            queue: (np.array([one.call_ns for one in each]), [one.row for one in each])
            for queue, each in found.items()
        }

    @cached_property
    def _work_rows(self) -> set[int]:
        return set(self.work.tolist())

    def collectives_before(self, call: int, after: int) -> list[int]:
        """On each other stream the last collective called before a call and done before work."""
        rows = []
        for queue, (times, each) in self._collectives_by_queue.items():
            if queue == self.events.queue[after]:
                continue
            place = int(np.searchsorted(times, self.start_ns[call])) - 1
            # At most a few back: a stream that waits for none of them waits for something else.
            for one in reversed(each[max(0, place - 7) : place + 1]):
                if self.end_ns[one] <= self.start_ns[after]:
                    rows.append(one)
                    break
        return rows

    # -- records of waits ----------------------------------------------------------------------

    @cached_property
    def has_sync_records(self) -> bool:
        """Whether the profiler recorded which stream waits for which (``cuda_sync``)."""
        return bool(len(self.events.of(Kind.DEVICE_SYNC)))

    @cached_property
    def _by_stream(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By stream: correlations of its work in order, and rows."""
        found = {}
        for queue, rows in self.by_queue.items():
            each = np.array(rows, np.int64)
            numbers = self.events.correlation[each]
            order = np.argsort(numbers, kind="stable")
            found[self.trace.queues[queue].stream] = (numbers[order], each[order])
        return found

    def recorded_wait(self, row: int) -> tuple[int, int] | None:
        """What a record says: work that was waited for, and the first work that waited."""
        args: Any = self.trace.args.get(row, {})
        if "Wait" not in str(args.get("cuda_sync_kind", self.trace.name(row))):
            return None
        recorded = args.get("wait_on_cuda_event_record_corr_id")
        waiting = self._by_stream.get(str(args.get("stream")))
        waited = self._by_stream.get(str(args.get("wait_on_stream")))
        if waiting is None or waited is None or not isinstance(recorded, int):
            return None
        after = int(np.searchsorted(waiting[0], self.events.correlation[row], side="right"))
        before = int(np.searchsorted(waited[0], recorded, side="left")) - 1
        if before < 0 or after >= len(waiting[0]):
            return None
        one, other = int(waited[1][before]), int(waiting[1][after])
        return (one, other) if self.end_ns[one] <= self.start_ns[other] else None

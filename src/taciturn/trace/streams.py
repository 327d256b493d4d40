"""Edges of the GPU: launches, order on streams, waits between them, and of the CPU for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from taciturn.trace.draft import Draft, Strand, Why
from taciturn.trace.kinds import Kind
from taciturn.trace.threads import anchor

__all__ = ["host_waits", "streams"]

USUAL_GAP_NS = 20_000  # between kernels of one stream: 1 to 3 us; a wait for an event ends so soon
LEAST_GAP_NS = 5_000  # of it, what is the stream's own where the kernel was late for another reason
RETURN_NS = 200_000  # a host call returns so soon after the work it waited for
MIN_WAIT_NS = 20_000  # a copy that took less did not wait
CALL_NS = 5_000  # what such a call takes when it does not wait
# It waits for all streams of the device.
_ALL_STREAMS = re.compile(r"(?:Device|Ctx|Context)_?Synchronize", re.IGNORECASE)


class _Work(NamedTuple):
    """A piece of work on a stream, and what it certainly came after.

    Attributes:
        row: its event.
        before: row of the work before it on the stream; -1.
        start_ns: its start.
        lane: thread of the call that launched it.
        launched_ns: start of that call; None if not known.
        free_ns: end of the work before it; None for the first.
    """

    row: int
    before: int
    start_ns: int
    lane: int
    launched_ns: int | None
    free_ns: int | None

    @property
    def behind(self) -> bool:
        """Whether the stream was the last to be ready, not the launch."""
        if self.free_ns is None:
            return False
        return self.launched_ns is None or self.free_ns >= self.launched_ns

    @property
    def late_ns(self) -> int:
        """From when launch and stream were ready to the start; 0 if neither is known."""
        ready = [time for time in (self.launched_ns, self.free_ns) if time is not None]
        return self.start_ns - max(ready) if ready else 0


def streams(draft: Draft, rank: Strand) -> None:
    """Launches, order on each stream, and waits between streams."""
    view = rank.view
    if not len(view.work):
        return
    recorded = _recorded_waits(draft, rank)
    for rows in view.by_queue.values():
        for work in _queued(draft, rank, rows):
            _one(draft, rank, work, recorded)
    _habits(draft, rank)


def _queued(draft: Draft, rank: Strand, rows: Sequence[int]) -> Iterator[_Work]:
    """The works of a stream, in order."""
    view = rank.view
    calls = view.launches[rows]
    lanes = view.events.lane[calls].tolist()  # of no meaning where there is no call
    launches = view.start_ns[calls].tolist()
    before, free = -1, None
    for row, call, lane, launched, start, end in zip(
        rows,
        calls.tolist(),
        lanes,
        launches,
        view.start_ns[rows].tolist(),
        view.end_ns[rows].tolist(),
        strict=True,
    ):
        known = call >= 0
        if known and launched > start:
            draft.clamped += 1
            known = False
        ready = None if free is None else min(free, start)
        yield _Work(row, before, start, lane, launched if known else None, ready)
        before, free = row, end


def _one(draft: Draft, rank: Strand, work: _Work, recorded: set[int]) -> None:
    """All edges that lead to the start of a piece of work.

    A delay beyond what is usual has a cause: a wait on record, else the end of other work just
    before, which is a guess, else none, and then it stays.
    """
    view, head = rank.view, rank.start[work.row]
    usual = view.launch_latency_ns
    explained = head in recorded
    latency, gap = _delays(work, usual, explained)
    late = not explained and work.late_ns > max(USUAL_GAP_NS, latency, gap)
    cause = _ended_just_before(rank, work.row) if late else -1
    launch = behind = -1
    if work.launched_ns is not None:
        tail = rank.point(draft, work.lane, work.launched_ns)
        launch = draft.edge(tail, head, latency, Why.LAUNCH)
    if work.before >= 0:
        behind = _after(draft, rank, work, gap)
    binding = behind if work.behind else launch
    if cause >= 0:
        weight = work.start_ns - int(view.end_ns[cause])
        draft.edge(rank.end[cause], head, weight, Why.INFERRED)
        draft.inferred += 1
        if binding >= 0:
            draft.proven[binding] = draft.room(binding)
    elif late:
        missing = work.late_ns - max(latency, gap)
        draft.unexplained[rank.index] = draft.unexplained.get(rank.index, 0) + missing
        if binding >= 0:
            draft.fix(binding)
    elif launch >= 0 and latency > usual:
        draft.asap[launch] = usual
    alone = work.free_ns is None or work.start_ns - work.free_ns > USUAL_GAP_NS
    if work.launched_ns is None and alone and cause < 0:
        anchor(draft, rank, head)  # fall back to time


def _delays(work: _Work, usual: int, explained: bool) -> tuple[int, int]:
    """Latency of the launch and gap on the stream: measured, but no longer than is usual.

    Where a wait on record explains the start, neither does.
    """
    start, launched, free = work.start_ns, work.launched_ns, work.free_ns
    latency = 0 if launched is None else min(start - launched, usual)
    gap = 0 if free is None else min(start - free, LEAST_GAP_NS)
    if explained:
        return latency, gap
    if launched is not None and (free is None or free <= launched + usual):
        # Nothing was before it on the stream: a launch may take some time more than usual.
        if start - launched <= 3 * usual + USUAL_GAP_NS:
            latency = start - launched
    elif free is not None and start - free <= USUAL_GAP_NS:
        gap = start - free
    return latency, gap


def _after(draft: Draft, rank: Strand, work: _Work, gap: int) -> int:
    """Order on a stream. Kernels that overlap a little keep their distance from start to start."""
    view = rank.view
    head = rank.start[work.row]
    if view.end_ns[work.before] <= work.start_ns:
        return draft.edge(rank.end[work.before], head, gap, Why.STREAM)
    distance = work.start_ns - int(view.start_ns[work.before])
    return draft.edge(rank.start[work.before], head, distance, Why.STREAM)


def _ended_just_before(rank: Strand, row: int) -> int:
    """Work of another stream of the device that ended when this began; -1 if there is none."""
    view = rank.view
    start = int(view.start_ns[row])
    place = int(np.searchsorted(view.work_ends_ns, start, side="right")) - 1
    while place >= 0 and start - int(view.work_ends_ns[place]) <= USUAL_GAP_NS:
        other = int(view.work_by_end[place])
        if view.events.queue[other] != view.events.queue[row] and view.same_device(other, row):
            return other
        place -= 1
    return -1


def _recorded_waits(draft: Draft, rank: Strand) -> set[int]:
    """Edges from ``cuda_sync`` records of one stream waiting for another; returns their heads."""
    view = rank.view
    heads: set[int] = set()
    for row in view.events.of(Kind.DEVICE_SYNC).tolist():
        found = view.recorded_wait(row)
        if found is not None:
            before, after = found
            weight = int(view.start_ns[after] - view.end_ns[before])
            # Longer than usual: it waited, and then for something else as well.
            weight = weight if weight <= USUAL_GAP_NS else 0
            if draft.edge(rank.end[before], rank.start[after], weight, Why.WAIT) >= 0:
                heads.add(rank.start[after])
    return heads


def _habits(draft: Draft, rank: Strand) -> None:
    """What PyTorch makes streams wait for, where the files hold no record of it.

    A collective waits for what its thread launched last into its own stream. A call of
    ``StreamWaitEvent`` outside of a collective's call makes the thread's stream wait for the
    collectives launched so far. Where a start contradicts it, the collective before is tried.
    """
    view = rank.view
    if view.has_sync_records:
        return
    for call in view.events.of(Kind.STREAM_WAIT).tolist():
        after = -1 if view.in_collective(call) else view.launched_after(call)
        for before in view.collectives_before(call, after) if after >= 0 else ():
            draft.edge(rank.end[before], rank.start[after], 0, Why.INFERRED)
            draft.inferred += 1
    for one in view.collectives:
        if view.events.queue[one.row] < 0 or one.call_row < 0:
            continue
        before = view.launched_before(one.call_row)
        if before >= 0 and view.end_ns[before] <= view.start_ns[one.row]:
            draft.edge(rank.end[before], rank.start[one.row], 0, Why.INFERRED)
            draft.inferred += 1


def host_waits(draft: Draft, rank: Strand) -> None:
    """A call in which the CPU waited returns soon after the end of some work on the GPU."""
    view = rank.view
    if not len(view.work):
        return
    copies = view.events.of(Kind.LAUNCH)
    copies = copies[view.end_ns[copies] - view.start_ns[copies] >= MIN_WAIT_NS]
    for row in [*view.events.of(Kind.SYNC).tolist(), *copies.tolist()]:
        cause = _waited_for(rank, row)
        every = _ALL_STREAMS.search(view.trace.name(row)) is not None
        if cause < 0 and not every:
            continue
        begin, end = int(view.start_ns[row]), int(view.end_ns[row])
        lane = view.lane_of(row)
        rank.point(draft, lane, begin)
        head = rank.point(draft, lane, end)
        weight = 0
        if cause >= 0:
            weight = end - int(view.end_ns[cause])
            if draft.edge(rank.end[cause], head, weight, Why.HOST) >= 0:
                rank.short[lane, end] = min(CALL_NS, end - begin)
        # Where it did not wait it still might have to, if the work took longer.
        for other in view.last_done(row) if every else ():
            draft.edge(rank.end[other], head, weight, Why.HOST)


def _waited_for(rank: Strand, row: int) -> int:
    """The work whose end let a call return; -1 if it seems not to have waited."""
    view = rank.view
    begin, end = int(view.start_ns[row]), int(view.end_ns[row])
    if view.events.kind[row] == Kind.SYNC:
        place = int(np.searchsorted(view.work_ends_ns, end, side="right")) - 1
        if place < 0:
            return -1
        last = int(view.work_ends_ns[place])
        return int(view.work_by_end[place]) if begin < last and end - last <= RETURN_NS else -1
    # A copy to memory that is not pinned returns when it is done.
    own = view.launched_by.get(row, -1)
    copies = own >= 0 and view.events.kind[own] == Kind.COPY
    return own if copies and begin < int(view.end_ns[own]) <= end else -1

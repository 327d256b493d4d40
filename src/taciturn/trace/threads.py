"""Edges on and between CPU threads: program order, hand-overs, gloo's pool threads and waits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from taciturn.trace.collectives import Collective
from taciturn.trace.draft import Draft, Strand, Why

__all__ = ["anchor", "pool_threads", "program_order", "resumes", "threads", "whole_trace"]

MIN_GAP_NS = 30_000  # shorter pauses of a thread are Python between operators, not a wait
RESUME_NS = 3_000_000  # a thread on a busy CPU runs again so soon after it may
EARLY_NS = 2_000_000  # and so long before the range that it waited for closes
SURE_NS = 500_000  # a pause that ends so soon after a collective was a wait for it


def whole_trace(draft: Draft, rank: Strand, end_ns: int) -> None:
    """Without steps the window ends when the last thread does; its end is no event of its own."""
    main = rank.view.main_lane
    last = [
        rank.point(draft, lane, int(rank.view.busy(lane).end_ns[-1]))
        for lane in rank.view.cpu_lanes
        if len(rank.view.busy(lane))  # not so if all its events are empty
    ]
    end = rank.lanes[main][end_ns]
    for node in last:
        draft.edge(node, end, 0, Why.THREAD)
    if end not in last:
        rank.short[main, end_ns] = 0


def pool_threads(draft: Draft, rank: Strand) -> None:
    """gloo: a pool thread takes up a collective after its call, when it is done with the last."""
    view = rank.view
    last_on: dict[int, Collective] = {}
    on_cpu = [one for one in view.collectives if view.events.queue[one.row] < 0]
    for one in sorted(on_cpu, key=lambda one: one.start_ns):
        start = rank.start[one.row]
        lane = int(view.events.lane[one.row])
        before = last_on.get(lane)
        last_on[lane] = one
        queued = before is not None and before.end_ns > one.call_ns
        if before is not None:
            gap = one.start_ns - before.end_ns if queued else 0
            draft.edge(rank.end[before.row], start, gap, Why.STREAM)
        if one.call_row >= 0:
            point = rank.point(draft, view.lane_of(one.call_row), one.call_ns)
            latency = 0 if queued else one.start_ns - one.call_ns
            draft.edge(point, start, latency, Why.LAUNCH)
        else:
            anchor(draft, rank, start)


def resumes(draft: Draft, rank: Strand) -> None:
    """gloo: ``wait()`` leaves no event, only a gap of the thread that ends soon after its end."""
    view = rank.view
    on_cpu = [one for one in view.collectives if view.events.queue[one.row] < 0]
    if not on_cpu:
        return
    calls = {view.lane_of(one.call_row) if one.call_row >= 0 else view.main_lane for one in on_cpu}
    by_end = sorted(on_cpu, key=lambda one: one.end_ns)
    times = np.array([one.end_ns for one in by_end], np.int64)
    for lane in calls:
        for begin, resume in view.gaps(lane, MIN_GAP_NS):
            last = int(np.searchsorted(times, resume + EARLY_NS, side="right"))
            inside = [
                one
                for one in by_end[max(0, last - 64) : last]
                if begin < one.end_ns and one.call_ns < resume and one.start_ns < resume
            ]
            if not inside:
                continue
            waited = min(inside, key=lambda one: abs(one.end_ns - resume))
            late = resume - waited.end_ns
            if late > max(RESUME_NS, (waited.end_ns - begin) // 2):
                continue
            _wait_ends(draft, rank, lane, begin, resume, waited)
            for one in inside:  # needed before the one that was waited for
                if one.end_ns < min(waited.end_ns, resume):
                    head = rank.point(draft, lane, resume)
                    draft.edge(rank.end[one.row], head, 0, Why.INFERRED)


def _wait_ends(
    draft: Draft, rank: Strand, lane: int, begin: int, resume: int, waited: Collective
) -> None:
    """The gap of a thread up to ``resume`` was a wait for that collective."""
    end = rank.end[waited.row]
    # Its range may close after it has told the waiting thread: it was done when that went on.
    draft.time[end] = min(draft.time[end], resume)
    head = rank.point(draft, lane, resume)
    rank.point(draft, lane, begin)
    rank.short[lane, resume] = 0
    late = resume - draft.time[end]
    if late > SURE_NS:
        rank.guessed.add((lane, resume))
    draft.edge(end, head, late, Why.INFERRED if late > SURE_NS else Why.HOST)
    draft.inferred += 1


def anchor(draft: Draft, rank: Strand, node: int) -> None:
    """Tie a node of unknown cause to what the main thread does at that time."""
    time = draft.time[node]
    tail = rank.point(draft, rank.view.main_lane, rank.view.busy_before(time))
    draft.edge(tail, node, time - draft.time[tail], Why.THREAD)


def threads(draft: Draft, rank: Strand) -> None:
    """Other threads work in bursts: each begins at what the main thread had just done.

    A gap of the main thread that ends soon after a burst of autograd is a wait for it.
    """
    view = rank.view
    bursts_of_backward: list[tuple[int, int]] = []
    for lane in view.cpu_lanes:
        if lane == view.main_lane:
            continue
        for begin, end in view.bursts(lane):
            anchor(draft, rank, rank.point(draft, lane, begin))
            last = rank.point(draft, lane, end)
            # What came before the burst on its thread does not hold it up.
            rank.short[lane, begin] = 0
            if lane in view.backward_lanes:
                bursts_of_backward.append((end, last))
    bursts_of_backward.sort()
    times = [end for end, _ in bursts_of_backward]
    for begin, resume in view.gaps(view.main_lane, MIN_GAP_NS) if times else ():
        last = int(np.searchsorted(times, resume, side="right")) - 1
        if last < 0 or not begin < times[last] or resume - times[last] > RESUME_NS:
            continue
        head = rank.point(draft, view.main_lane, resume)
        rank.point(draft, view.main_lane, begin)
        rank.short[view.main_lane, resume] = 0
        end, tail = bursts_of_backward[last]
        draft.edge(tail, head, resume - end, Why.THREAD)


def program_order(draft: Draft, rank: Strand) -> dict[int, int]:
    """Chain the points of each thread; returns the edge that leaves each node."""
    leaving: dict[int, int] = {}
    for lane, points in rank.lanes.items():
        times = sorted(points)
        for before, after in pairwise(times):
            weight = rank.short.get((lane, after), after - before)
            edge = draft.edge(points[before], points[after], weight, Why.PROGRAM, lane)
            if (lane, after) in rank.guessed:
                draft.proven[edge] = after - before
            leaving[points[before]] = edge
    return leaving

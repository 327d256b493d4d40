"""The critical path of a replay, by kind and by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.graph import Graph, Why
from taciturn.trace.kinds import Kind
from taciturn.trace.replay import Segment, critical_path
from taciturn.trace.report import CriticalPath
from taciturn.trace.timeline import Intervals, intersect, subtract, unite
from taciturn.trace.view import View

__all__ = ["Stretch", "by_kind", "stretches"]

PYTHON_GAP_NS = 200_000  # between two operators: longer is not Python handing out work
LATENCY_NS = 200_000  # no launch and no return takes longer; what does is not explained


class Stretch:
    """A part of the critical path of one kind, in replayed time.

    Attributes:
        start_ns: begin.
        end_ns: end.
        kind: a field of :class:`~taciturn.trace.report.CriticalPath`, without ``_s``.
        view: index of the rank it runs on; -1 between ranks.
        row: event of that rank, or -1.
    """

    __slots__ = ("end_ns", "kind", "row", "start_ns", "view")

    def __init__(self, start_ns: int, end_ns: int, kind: str, view: int, row: int = -1) -> None:
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.kind = kind
        self.view = view
        self.row = row


def stretches(graph: Graph, times: NDArray[np.int64], views: Sequence[View]) -> list[Stretch]:
    """The whole path that leads to the end of the last step, by time.

    Args:
        graph: of the views.
        times: one column of its replay with its own weights.
        views: by index.
    """
    final = graph.ends[-1]
    last = int(final[np.argmax(times[final])])
    found: list[Stretch] = []
    windows: list[tuple[int, int]] = []
    met = _meeting_of(graph)
    closed = {
        (index, lane): _closed(view.busy(lane), PYTHON_GAP_NS)
        for index, view in enumerate(views)
        for lane in view.cpu_lanes
    }
    for segment in _chained(graph, critical_path(graph, times, last)):
        found += _of_segment(graph, views, closed, *segment)
        number = met.get(segment.edge)
        if number is not None and len(graph.arrivals[number]) > 1:
            came = np.sort(times[graph.arrivals[number]])
            # Only where the path does come from the last arrival.
            if graph.rank[graph.tail[segment.edge]] < 0 and came[-2] < came[-1]:
                windows.append((int(came[-2]), int(came[-1])))
    return _relabel(found, unite([a for a, _ in windows], [b for _, b in windows]))


def by_kind(path: Sequence[Stretch], start_ns: int, end_ns: int) -> CriticalPath:
    """Seconds of each kind in a window; what the path does not cover counts as idle."""
    totals = dict.fromkeys(("compute", "launch", "codec", "communication", "waiting", "idle"), 0)
    for one in path:
        totals[one.kind] += max(0, min(one.end_ns, end_ns) - max(one.start_ns, start_ns))
    totals["idle"] += max(0, end_ns - start_ns - sum(totals.values()))
    return CriticalPath(**{f"{kind}_s": ns / 1e9 for kind, ns in totals.items()})


def _chained(graph: Graph, path: Sequence[Segment]) -> list[Segment]:
    """The same with what a thread does between waits as one segment, of its first edge."""
    whys: list[int] = graph.why.tolist()
    rows: list[int] = graph.row.tolist()
    begins: list[int] = graph.time_ns[graph.tail].tolist()
    joined: list[Segment] = []
    for one in path:
        before = joined[-1] if joined else None
        if (
            before is not None
            and whys[one.edge] == whys[before.edge] == Why.PROGRAM
            and rows[one.edge] == rows[before.edge]
            # Both as long as measured: they move together.
            and before.start_ns - begins[before.edge] == one.start_ns - begins[one.edge]
        ):
            joined[-1] = before._replace(end_ns=one.end_ns)
        else:
            joined.append(one)
    return joined


def _meeting_of(graph: Graph) -> dict[int, int]:
    return {edge: number for number, edges in enumerate(graph.transfers) for edge in edges}


def _closed(busy: Intervals, gap_ns: int) -> Intervals:
    """The same with short gaps filled: Python between operators is part of handing out work."""
    if len(busy) < 2:
        return busy
    cut = np.flatnonzero(busy.start_ns[1:] - busy.end_ns[:-1] > gap_ns)
    return Intervals(busy.start_ns[np.r_[0, cut + 1]], busy.end_ns[np.r_[cut, len(busy) - 1]])


def _of_segment(
    graph: Graph,
    views: Sequence[View],
    closed: dict[tuple[int, int], Intervals],
    start: int,
    end: int,
    edge: int,
) -> list[Stretch]:
    why = Why(graph.why[edge])
    tail, head = int(graph.tail[edge]), _head(graph, edge)
    rank = int(graph.rank[head])
    view = views[rank] if rank >= 0 else None
    row = int(graph.row[edge])
    if view is None:
        return [Stretch(start, end, "idle", rank)]
    if why == Why.TRANSFER:
        return [Stretch(start, end, "communication", rank, row)]
    if why == Why.WORK:
        kind = "codec" if view.events.kind[row] == Kind.CODEC else "compute"
        return [Stretch(start, end, kind, rank, row)]
    working = "launch" if view.on_gpu else "compute"
    if why != Why.PROGRAM:
        # The pool thread of gloo and the thread that waits for it take time to wake up.
        short = end - start <= LATENCY_NS and view.on_gpu
        return [Stretch(start, end, "launch" if short else "idle", rank)]
    lane = row
    moved = start - int(graph.time_ns[tail])
    whole = unite([start - moved], [end - moved])
    busy = intersect(closed.get((rank, lane), whole), whole)
    coding = intersect(busy, view.coding(lane))
    parts = [
        (coding, "codec"),
        (subtract(busy, coding), working),
        (subtract(whole, busy), "idle"),
    ]
    pieces = [
        Stretch(a + moved, b + moved, kind, rank)
        for intervals, kind in parts
        for a, b in zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
    ]
    return sorted(pieces, key=lambda one: one.start_ns)


def _head(graph: Graph, edge: int) -> int:
    return int(np.searchsorted(graph.first, edge, side="right")) - 1


def _relabel(path: list[Stretch], waiting: Intervals) -> list[Stretch]:
    """Cut the stretches where a rank is waited for, and call those parts waiting."""
    if not len(waiting):
        return path
    result: list[Stretch] = []
    for one in path:
        whole = unite([one.start_ns], [one.end_ns])
        inside = intersect(whole, waiting)
        if not len(inside):
            result.append(one)
            continue
        pieces = [
            Stretch(a, b, kind, one.view, one.row)
            for intervals, kind in ((inside, "waiting"), (subtract(whole, inside), one.kind))
            for a, b in zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
        ]
        result += sorted(pieces, key=lambda piece: piece.start_ns)
    return result

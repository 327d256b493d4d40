"""One graph over all ranks: points in time, and what each had to wait for.

A node is a point: a call on a CPU thread, the start or end of work on a stream or of a collective,
the arrival of a collective's last rank. An edge says that its head is not before its tail plus a
weight. The weights are measured: durations, CPU time between calls, latencies. A wait that an edge
explains is never a weight, so that a replay can shorten it; a delay that no edge explains stays a
weight, and is taken away where the replay is checked against the measurement.

Edges, and where they come from:

- program order on each CPU thread, gaps kept as CPU time (``PROGRAM``);
- runtime call -> work on the GPU (``LAUNCH``), one after the other on each stream (``STREAM``);
- event waits between streams: from ``cuda_sync`` records where there are any (``WAIT``), else
  inferred (``INFERRED``): a kernel that nothing else explains and that starts when another stream's
  work ends; and PyTorch's habit that a collective waits for what its thread launched before;
- host synchronisation returns after work on the GPU (``HOST``);
- forward thread -> backward thread -> forward thread (``THREAD``);
- a collective's last arrival -> its end on every rank (``TRANSFER``);
- gloo: call -> pool thread -> main thread resumes, inferred from the gap that ends then.

Law: replaying the measured weights never puts a node after its measured time
(``test_trace_graph.py``): what the replay lacks to the measurement is what no edge explains.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.collectives import Meeting
from taciturn.trace.draft import Draft, Strand, Why
from taciturn.trace.streams import host_waits, streams
from taciturn.trace.threads import pool_threads, program_order, resumes, threads, whole_trace
from taciturn.trace.view import View

__all__ = ["Graph", "Why", "build"]


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which no edge points back, edges sorted by their head.

    Attributes:
        time_ns: measured, on the common clock.
        rank: index of the rank's view; -1 for the arrival of a collective.
        first: edges ``first[n]`` to ``first[n + 1]`` lead to node ``n``.
        tail: of each edge.
        weight_ns: of each edge.
        why: of each edge.
        row: event of each edge, for those of ``WORK`` and ``TRANSFER``; -1.
        asap_weight_ns: the same without delays that nothing explains: what the replay makes of
            these weights, against the measurement, is its error.
        proven_weight_ns: as ``weight_ns`` without what was inferred: inferred edges are dropped
            (-1), and the delay that they explained stays.
        ends: by index of step, all nodes that must have passed for the step to be done.
        opening: nodes that must have passed for the first step to begin.
        transfers: for each meeting, the edges from last arrival to end.
        calls: for each meeting, the edges of program order after the calls, where codecs that run
            on the calling thread would add.
        arrivals: for each meeting, the nodes of its members' starts.
        windows: by rank and index of step, the nodes of the window's start and end.
        unexplained_ns: by rank, delays for which no edge was found.
        inferred: how many edges were inferred; 0 means all waits are on record.
        clamped: work that seems to start before its launch.
    """

    time_ns: NDArray[np.int64]
    rank: NDArray[np.int32]
    first: NDArray[np.int64]
    tail: NDArray[np.int64]
    weight_ns: NDArray[np.int64]
    why: NDArray[np.uint8]
    row: NDArray[np.int64]
    asap_weight_ns: NDArray[np.int64]
    proven_weight_ns: NDArray[np.int64]
    ends: Sequence[NDArray[np.int64]]
    opening: NDArray[np.int64]
    transfers: Sequence[Sequence[int]]
    calls: Sequence[Sequence[int]]
    arrivals: Sequence[Sequence[int]]
    windows: Mapping[tuple[int, int], tuple[int, int]]
    unexplained_ns: Mapping[int, int]
    inferred: int
    clamped: int

    def __len__(self) -> int:
        return len(self.time_ns)


def build(views: Sequence[View], meetings: Sequence[Meeting]) -> Graph:
    """The joint graph.

    Args:
        views: one per rank, on one clock, with steps of the same numbers.
        meetings: which of their collectives belong together, on the same clock; each collective of
            the views is in exactly one.
    """
    draft = Draft()
    ranks = [Strand(index, view) for index, view in enumerate(views)]
    by_number = {view.rank: rank for view, rank in zip(views, ranks, strict=True)}
    windows: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in ranks:
        for number, step in enumerate(rank.view.steps):
            lane = rank.view.main_lane
            windows[rank.index, number] = (
                rank.point(draft, lane, step.start_ns),
                rank.point(draft, lane, step.end_ns),
            )
            if step.number is None:
                whole_trace(draft, rank, step.end_ns)
        _work_nodes(draft, rank)
    for rank in ranks:
        resumes(draft, rank)
    arrivals, transfers = _meet(draft, by_number, meetings)
    for rank in ranks:
        pool_threads(draft, rank)
        threads(draft, rank)
        streams(draft, rank)
        host_waits(draft, rank)
    call_points = _call_points(draft, by_number, meetings)
    program: dict[int, int] = {}
    for rank in ranks:
        program.update(program_order(draft, rank))
    calls = [[program[node] for node in nodes if node in program] for nodes in call_points]
    ends, opening = _step_nodes(ranks, windows)
    return _finish(draft, ends, opening, transfers, calls, arrivals, windows)


def _work_nodes(draft: Draft, rank: Strand) -> None:
    """Start and end of all work on streams, and of collectives; work that is none has its edge."""
    view = rank.view
    collective = {one.row for one in view.collectives}
    rows = np.union1d(view.work, np.array(sorted(collective), np.int64))
    times = zip(
        rows.tolist(), view.start_ns[rows].tolist(), view.end_ns[rows].tolist(), strict=True
    )
    for row, start, end in times:
        first, last = draft.node(start, rank.index), draft.node(end, rank.index)
        rank.start[row], rank.end[row] = first, last
        if row not in collective:
            draft.edge(first, last, end - start, Why.WORK, row)


def _meet(
    draft: Draft, ranks: Mapping[int, Strand], meetings: Sequence[Meeting]
) -> tuple[list[list[int]], list[list[int]]]:
    """Every member's end follows the last arrival, where all ends do; else its own start."""
    arrivals: list[list[int]] = []
    transfers: list[list[int]] = []
    for meeting in meetings:
        starts = [ranks[one.rank].start[one.row] for one in meeting.members]
        ends = [ranks[one.rank].end[one.row] for one in meeting.members]
        last = max(draft.time[node] for node in starts)
        arrivals.append(starts)
        edges = []
        together = len(starts) > 1 and (
            meeting.first.meets or all(draft.time[node] >= last for node in ends)
        )
        arrival = draft.node(last, -1) if together else -1
        for one, start, end in zip(meeting.members, starts, ends, strict=True):
            tail = start
            if together:
                draft.edge(start, arrival, 0, Why.ARRIVAL)
                # An end that a clock puts before the last arrival cannot depend on it.
                tail = arrival if draft.time[end] >= last else start
                if tail == arrival:
                    draft.edge(start, end, 0, Why.ARRIVAL)
            weight = draft.time[end] - draft.time[tail]
            edges.append(draft.edge(tail, end, weight, Why.TRANSFER, one.row))
        transfers.append([edge for edge in edges if edge >= 0])
    return arrivals, transfers


def _call_points(
    draft: Draft, ranks: Mapping[int, Strand], meetings: Sequence[Meeting]
) -> list[list[int]]:
    """For each meeting the points at which its members' calls were made."""
    points = []
    for meeting in meetings:
        nodes = []
        for one in meeting.members:
            rank = ranks[one.rank]
            if one.call_row >= 0:
                lane = rank.view.lane_of(one.call_row)
                nodes.append(rank.point(draft, lane, int(rank.view.start_ns[one.call_row])))
        points.append(nodes)
    return points


def _step_nodes(
    ranks: Iterable[Strand], windows: Mapping[tuple[int, int], tuple[int, int]]
) -> tuple[list[list[int]], list[int]]:
    """What must have passed for each step to be done, and for the first to begin."""
    ranks = list(ranks)
    count = min(len(rank.view.steps) for rank in ranks)
    ends: list[list[int]] = [[] for _ in range(count)]
    opening: list[int] = []
    for rank in ranks:
        opening.append(windows[rank.index, 0][0])
        for number in range(count):
            ends[number].append(windows[rank.index, number][1])
        first = rank.view.steps[0].start_ns
        before = set(rank.view.left_over.tolist())
        steps = rank.view.step_index[list(rank.end)].tolist()
        for (row, node), step in zip(rank.end.items(), steps, strict=True):
            if 0 <= step < count:
                ends[step].append(node)
            elif row in before or (step < 0 and rank.view.called_ns(row) < first):
                opening.append(node)
    return ends, opening


def _finish(
    draft: Draft,
    ends: list[list[int]],
    opening: list[int],
    transfers: list[list[int]],
    calls: list[list[int]],
    arrivals: list[list[int]],
    windows: Mapping[tuple[int, int], tuple[int, int]],
) -> Graph:
    order = _topological(draft)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    tail = place[np.array(draft.tail, np.int64)]
    head = place[np.array(draft.head, np.int64)]
    kept = np.flatnonzero(tail < head)  # drops what only ties in time made a circle
    by_head = kept[np.argsort(head[kept], kind="stable")]
    number = np.full(len(tail) + 1, -1, np.int64)
    number[by_head] = np.arange(len(by_head))
    weight = np.array(draft.weight, np.int64)
    why = np.array(draft.why, np.uint8)
    asap = weight.copy()
    for edge, value in draft.asap.items():
        asap[edge] = value
    proven = weight.copy()
    proven[why == Why.INFERRED] = -1
    for edge, value in draft.proven.items():
        proven[edge] = value

    def renumber(lists: list[list[int]]) -> list[list[int]]:
        return [[int(number[e]) for e in each if number[e] >= 0] for each in lists]

    return Graph(
        time_ns=np.array(draft.time, np.int64)[order],
        rank=np.array(draft.rank, np.int32)[order],
        first=np.searchsorted(head[by_head], np.arange(len(order) + 1)),
        tail=tail[by_head],
        weight_ns=weight[by_head],
        why=why[by_head],
        row=np.array(draft.row, np.int64)[by_head],
        asap_weight_ns=asap[by_head],
        proven_weight_ns=proven[by_head],
        ends=[place[np.array(nodes, np.int64)] for nodes in ends],
        opening=place[np.array(opening, np.int64)],
        transfers=renumber(transfers),
        calls=renumber(calls),
        arrivals=[[int(place[node]) for node in nodes] for nodes in arrivals],
        windows={key: (int(place[a]), int(place[b])) for key, (a, b) in windows.items()},
        unexplained_ns=dict(draft.unexplained),
        inferred=draft.inferred,
        clamped=draft.clamped,
    )


def _topological(draft: Draft) -> NDArray[np.int64]:
    """Nodes by measured time, those of one time by their edges."""
    time = np.array(draft.time, np.int64)
    order = np.argsort(time, kind="stable")
    sorted_time = time[order]
    same = np.flatnonzero(sorted_time[1:] == sorted_time[:-1])
    if not len(same):
        return order
    tied = set(order[same].tolist()) | set(order[same + 1].tolist())
    inside: dict[int, list[int]] = {node: [] for node in tied}
    waits = dict.fromkeys(tied, 0)
    tail, head = np.array(draft.tail, np.int64), np.array(draft.head, np.int64)
    at_once = np.flatnonzero(time[tail] == time[head])  # both ends are tied then
    for before, after in zip(tail[at_once].tolist(), head[at_once].tolist(), strict=True):
        inside[before].append(after)
        waits[after] += 1
    result = order.copy()
    breaks = np.flatnonzero(sorted_time[1:] != sorted_time[:-1]) + 1
    for begin, end in zip(
        np.r_[0, breaks].tolist(), np.r_[breaks, len(order)].tolist(), strict=True
    ):
        if end - begin > 1:
            result[begin:end] = _sort_ties(order[begin:end].tolist(), inside, waits)
    return result


def _sort_ties(
    nodes: list[int], inside: Mapping[int, list[int]], waits: dict[int, int]
) -> list[int]:
    """A topological order of nodes of one time; a circle is cut at its first node."""
    ready = [node for node in nodes if waits[node] == 0]
    heapq.heapify(ready)
    done: list[int] = []
    left = set(nodes)
    while left:
        if not ready:
            ready = [min(left)]
        node = heapq.heappop(ready)
        if node not in left:
            continue
        left.discard(node)
        done.append(node)
        for head in inside[node]:
            waits[head] -= 1
            if waits[head] == 0 and head in left:
                heapq.heappush(ready, head)
    return done

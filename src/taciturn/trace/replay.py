"""As-soon-as-possible replay of a graph, many variants at once, and its critical path.

``time[n]`` is the latest of ``time[tail] + weight`` over the edges that lead to ``n``; a node that
nothing leads to keeps its measured time. A variant gives some edges another weight. Times are whole
nanoseconds, so replays are exact and their differences are too.

Law: no smaller weight makes any node later (``test_trace_replay.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.graph import Graph, Why

__all__ = ["Segment", "Variant", "critical_path", "replay"]

MAX_BYTES = 1 << 28  # of the times that are held at once


@dataclass(frozen=True)
class Variant:
    """Other weights for some edges: exactly these, or the measured ones plus something.

    Attributes:
        weight_ns: by edge.
        added_ns: by edge, on top of the measured weight.
    """

    weight_ns: Mapping[int, int]
    added_ns: Mapping[int, int] | None = None


class Segment(NamedTuple):
    """A stretch of the critical path, in replayed time. ``edge`` is -1 for the time before it."""

    start_ns: int
    end_ns: int
    edge: int


def replay(
    graph: Graph,
    variants: Sequence[Variant] = (Variant({}),),
    weights_ns: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Times of all nodes, a column for each variant.

    Args:
        graph: of at least one node.
        variants: by default the measured weights alone.
        weights_ns: of the edges, one of the graph's three; -1 leaves an edge out. By default
            ``graph.weight_ns``.
    """
    base = graph.weight_ns if weights_ns is None else weights_ns
    room = max(1, MAX_BYTES // (8 * max(1, len(graph))))
    parts = [_replay(graph, variants[i : i + room], base) for i in range(0, len(variants), room)]
    return np.concatenate(parts, axis=1)


def _replay(
    graph: Graph, variants: Sequence[Variant], base: NDArray[np.int64]
) -> NDArray[np.int64]:
    special: dict[int, NDArray[np.int64]] = {}
    for column, variant in enumerate(variants):
        for edge, weight in variant.weight_ns.items():
            row = special.setdefault(edge, np.full(len(variants), base[edge], np.int64))
            row[column] = weight
        for edge, more in (variant.added_ns or {}).items():
            row = special.setdefault(edge, np.full(len(variants), base[edge], np.int64))
            row[column] += more
    weights: list[int] = base.tolist()
    tails: list[int] = graph.tail.tolist()
    firsts: list[int] = graph.first.tolist()
    if len(variants) == 1:
        return _replay_one(graph, {e: int(w[0]) for e, w in special.items()}, weights)
    times = np.empty((len(graph), len(variants)), np.int64)
    measured = graph.time_ns.tolist()
    for node, start in enumerate(measured):
        row = times[node]
        seen = False
        for edge in range(firsts[node], firsts[node + 1]):
            weight = weights[edge]
            if weight < 0:
                continue
            reach = times[tails[edge]] + special.get(edge, weight)
            if seen:
                np.maximum(row, reach, out=row)
            else:
                row[:] = reach
                seen = True
        if not seen:
            row[:] = start
    return times


def _replay_one(graph: Graph, special: Mapping[int, int], weights: list[int]) -> NDArray[np.int64]:
    """The same for one variant, with plain integers."""
    tails: list[int] = graph.tail.tolist()
    firsts: list[int] = graph.first.tolist()
    for edge, weight in special.items():
        weights[edge] = weight if weights[edge] >= 0 else -1
    times: list[int] = []
    for node, measured in enumerate(graph.time_ns.tolist()):
        reached = [
            times[tails[edge]] + weights[edge]
            for edge in range(firsts[node], firsts[node + 1])
            if weights[edge] >= 0
        ]
        times.append(max(reached) if reached else measured)
    return np.array(times, np.int64)[:, None]


def critical_path(graph: Graph, times: NDArray[np.int64], last: int) -> list[Segment]:
    """What a node waited for, back to where nothing was waited for; in order of time.

    The segments follow each other without a gap. Of several edges that reach a node at the same
    time, one of work or transfer is taken before others.

    Args:
        graph: as replayed.
        times: one column of a replay with the graph's own weights.
        last: the node that the path leads to.
    """
    preferred = {Why.TRANSFER: 0, Why.WORK: 1, Why.PROGRAM: 2}
    path: list[Segment] = []
    node = last
    while True:
        edges = range(int(graph.first[node]), int(graph.first[node + 1]))
        binding = [
            edge
            for edge in edges
            if graph.weight_ns[edge] >= 0
            and times[graph.tail[edge]] + graph.weight_ns[edge] == times[node]
        ]
        if not binding:
            break
        edge = min(binding, key=lambda one: preferred.get(Why(int(graph.why[one])), 3))
        tail = int(graph.tail[edge])
        if times[tail] < times[node]:
            path.append(Segment(int(times[tail]), int(times[node]), edge))
        node = tail
    return path[::-1]

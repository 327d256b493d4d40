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
FEW = 8  # variants: one by one is faster than rows of so short arrays


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
    changed = [_changed(variant, base) for variant in variants]
    short = _shorten(graph, base, {edge for one in changed for edge in one})
    if len(variants) <= FEW:
        joins = np.stack([_replay_one(short, one) for one in changed], axis=1)
        return joins[short.anchor] + short.offset_ns[:, None]
    room = max(1, MAX_BYTES // (8 * max(1, len(short.measured))))
    parts = [
        _replay_many(short, changed[i : i + room])[short.anchor] + short.offset_ns[:, None]
        for i in range(0, len(changed), room)
    ]
    return np.concatenate(parts, axis=1)


def _changed(variant: Variant, base: NDArray[np.int64]) -> dict[int, int]:
    """The new weights of a variant; an edge that is left out stays out."""
    changed = dict(variant.weight_ns)
    for edge, more in (variant.added_ns or {}).items():
        changed[edge] = changed.get(edge, int(base[edge])) + more
    return {edge: weight for edge, weight in changed.items() if base[edge] >= 0}


class _Short(NamedTuple):
    """The graph without nodes that only follow another: two of three.

    Attributes:
        anchor: of each node of the graph, the place of the node here that it follows.
        offset_ns: and how much later it is.
        measured: of the nodes here.
        first: edges ``first[n]`` to ``first[n + 1]`` lead to the node in place ``n``.
        tail: of each edge, a place.
        weight_ns: of each edge.
        edge: number in the graph of those edges that some variant changes, and their place here.
        before_ns: by place of an edge, what its tail's offset adds to its weight.
    """

    anchor: NDArray[np.int64]
    offset_ns: NDArray[np.int64]
    measured: list[int]
    first: list[int]
    tail: list[int]
    weight_ns: list[int]
    edge: dict[int, int]
    before_ns: NDArray[np.int64]


def _shorten(graph: Graph, base: NDArray[np.int64], special: set[int]) -> _Short:
    count = len(graph)
    kept = np.flatnonzero(base >= 0)
    head = np.searchsorted(graph.first, kept, side="right") - 1
    ways = np.bincount(head, minlength=count)
    fixed = np.ones(len(base), np.bool_)
    fixed[list(special)] = False
    # A node to which one edge leads, that no variant changes, follows its tail.
    alone = kept[(ways[head] == 1) & fixed[kept]]
    follower = np.searchsorted(graph.first, alone, side="right") - 1
    anchor = np.arange(count)
    anchor[follower] = graph.tail[alone]
    offset = np.zeros(count, np.int64)
    offset[follower] = base[alone]
    while True:  # each round doubles the distance
        further = anchor[anchor]
        if (further == anchor).all():
            break
        offset = offset + offset[anchor]
        anchor = further
    joins = np.flatnonzero(anchor == np.arange(count))
    place = np.empty(count, np.int64)
    place[joins] = np.arange(len(joins))
    follows = np.ones(count, np.bool_)
    follows[joins] = False
    edges = kept[~follows[head]]
    tail = graph.tail[edges]
    return _Short(
        anchor=place[anchor],
        offset_ns=offset,
        measured=graph.time_ns[joins].tolist(),
        first=np.searchsorted(
            place[np.searchsorted(graph.first, edges, side="right") - 1], np.arange(len(joins) + 1)
        ).tolist(),
        tail=place[anchor[tail]].tolist(),
        weight_ns=(base[edges] + offset[tail]).tolist(),
        edge={int(one): at for at, one in enumerate(edges.tolist()) if one in special},
        before_ns=offset[tail],
    )


def _replay_one(short: _Short, changed: Mapping[int, int]) -> NDArray[np.int64]:
    """Times of the joins for one variant, with plain integers."""
    weights = short.weight_ns.copy()
    for edge, weight in changed.items():
        at = short.edge[edge]
        weights[at] = weight + int(short.before_ns[at])
    tails = short.tail
    times: list[int] = []
    begin = 0
    for measured, end in zip(short.measured, short.first[1:], strict=True):
        if begin == end:
            times.append(measured)
            continue
        latest = times[tails[begin]] + weights[begin]
        for at in range(begin + 1, end):
            reach = times[tails[at]] + weights[at]
            if reach > latest:
                latest = reach
        begin = end
        times.append(latest)
    return np.array(times, np.int64)


def _replay_many(short: _Short, changed: Sequence[Mapping[int, int]]) -> NDArray[np.int64]:
    """The same for many variants: a row of times for each join."""
    special: dict[int, NDArray[np.int64]] = {}
    for column, one in enumerate(changed):
        for edge, weight in one.items():
            at = short.edge[edge]
            usual = np.full(len(changed), short.weight_ns[at], np.int64)
            special.setdefault(at, usual)[column] = weight + int(short.before_ns[at])
    times = np.empty((len(short.measured), len(changed)), np.int64)
    begin = 0
    for node, end in enumerate(short.first[1:]):
        row = times[node]
        if begin == end:
            row[:] = short.measured[node]
            continue
        row[:] = times[short.tail[begin]] + special.get(begin, short.weight_ns[begin])
        for at in range(begin + 1, end):
            reach = times[short.tail[at]] + special.get(at, short.weight_ns[at])
            np.maximum(row, reach, out=row)
        begin = end
    return times


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
    rank_of = [preferred.get(Why(why), 3) for why in range(len(Why))]
    tails: list[int] = graph.tail.tolist()
    firsts: list[int] = graph.first.tolist()
    weights: list[int] = graph.weight_ns.tolist()
    whys: list[int] = graph.why.tolist()
    when: list[int] = times.tolist()
    path: list[Segment] = []
    node = last
    while True:
        binding = [
            edge
            for edge in range(firsts[node], firsts[node + 1])
            if weights[edge] >= 0 and when[tails[edge]] + weights[edge] == when[node]
        ]
        if not binding:
            break
        edge = min(binding, key=lambda one: rank_of[whys[one]])
        tail = tails[edge]
        if when[tail] < when[node]:
            path.append(Segment(when[tail], when[node], edge))
        node = tail
    return path[::-1]

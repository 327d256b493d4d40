"""The graph while it grows: nodes, edges, and one rank's points by thread and by event."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from taciturn.trace.view import View

__all__ = ["Draft", "Strand", "Why"]

_column = partial(array, "q")  # 64 bits a number, and nothing for the garbage collector to visit


class Why(IntEnum):
    """What an edge stands for."""

    PROGRAM = 0
    LAUNCH = 1
    STREAM = 2
    WORK = 3
    WAIT = 4
    INFERRED = 5
    HOST = 6
    THREAD = 7
    ARRIVAL = 8
    TRANSFER = 9


@dataclass
class Draft:
    """The graph while it grows. Edges that would point back in measured time are left out.

    Attributes:
        time: of each node, measured, in ns.
        rank: of each node, as an index; -1 for none.
        tail: of each edge: ``time[head] >= time[tail] + weight``.
        head: of each edge.
        weight: of each edge, in ns.
        why: of each edge.
        row: of each edge, the event that lasts as long, or -1.
        proven: by edge, its weight without what was inferred, where that is another.
        asap: by edge, its weight without delays that nothing explains, where that is another.
        inferred: how many edges were.
        clamped: work that seems to start before its launch.
        unexplained: by rank, delays in ns for which no edge was found.
    """

    time: array[int] = field(default_factory=_column)
    rank: array[int] = field(default_factory=_column)
    tail: array[int] = field(default_factory=_column)
    head: array[int] = field(default_factory=_column)
    weight: array[int] = field(default_factory=_column)
    why: array[int] = field(default_factory=_column)
    row: array[int] = field(default_factory=_column)
    proven: dict[int, int] = field(default_factory=dict)
    asap: dict[int, int] = field(default_factory=dict)
    inferred: int = 0
    clamped: int = 0
    unexplained: dict[int, int] = field(default_factory=dict)

    def node(self, time: int, rank: int) -> int:
        """Add a node at a measured time; ``rank`` is an index, or -1."""
        self.time.append(int(time))
        self.rank.append(rank)
        return len(self.time) - 1

    def edge(self, tail: int, head: int, weight: int, why: Why, row: int = -1) -> int:
        """Add an edge, with a weight that the measured times allow; returns its number, or -1."""
        room = self.time[head] - self.time[tail]
        if room < 0 or tail == head:
            return -1
        self.tail.append(tail)
        self.head.append(head)
        self.weight.append(min(max(int(weight), 0), room))
        self.why.append(why)
        self.row.append(row)
        return len(self.tail) - 1

    def room(self, edge: int) -> int:
        """The measured time between an edge's ends."""
        return self.time[self.head[edge]] - self.time[self.tail[edge]]

    def fix(self, edge: int) -> None:
        """Keep a delay that nothing explains as the edge's weight, but not as soon as possible."""
        self.asap[edge] = self.weight[edge]
        self.weight[edge] = self.room(edge)


@dataclass
class Strand:
    """Nodes of one rank: threads as sorted points, and start and end of work by row."""

    index: int
    view: View
    lanes: dict[int, dict[int, int]] = field(default_factory=dict)
    start: dict[int, int] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)
    # (lane, time) -> weight of the program edge that ends there, where it is not the time between
    short: dict[tuple[int, int], int] = field(default_factory=dict)
    # (lane, time) of those whose wait is a guess
    guessed: set[tuple[int, int]] = field(default_factory=set)

    def point(self, draft: Draft, lane: int, time: int) -> int:
        """The node of a thread at a time; made if it is not there."""
        points = self.lanes.setdefault(lane, {})
        node = points.get(time)
        if node is None:
            node = points[time] = draft.node(time, self.index)
        return node

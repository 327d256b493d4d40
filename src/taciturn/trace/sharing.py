"""Transfers that are under way at once on a rank share its link.

Two all-reduces of gloo, or of two NCCL streams, that overlap take longer than each would alone, and
how long depends on when the other begins. So what is kept of a transfer is not its duration but its
*work*: how long it would take alone, if those that overlap share the link equally at every moment.
Replayed with other works, the durations follow from who overlaps whom then.

Law (``test_trace_sharing.py``): works and starts as measured give the measured ends again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.collectives import Meeting
from taciturn.trace.graph import Graph
from taciturn.trace.replay import Variant, replay
from taciturn.trace.timeline import fair_share_ns

__all__ = ["Links", "durations_ns"]

MOST_ROUNDS = 50
SAME_NS = 1000  # durations that change by no more have settled


def durations_ns(start_ns: Sequence[int], work_ns: Sequence[int]) -> list[int]:
    """How long each transfer takes beside the others, all sharing one link equally.

    Args:
        start_ns: of each, in any order.
        work_ns: how long it would take alone.
    """
    result = [0] * len(start_ns)
    order = sorted(range(len(start_ns)), key=lambda one: start_ns[one])
    moving: list[tuple[float, int]] = []  # what each of those moving has got when it ends, and who
    now, got = 0.0, 0.0  # got: by one that has been moving all the time

    def advance(until: float) -> None:
        nonlocal now, got
        while moving:
            end = now + (moving[0][0] - got) * len(moving)
            if end > until:
                got += (until - now) / len(moving)
                break
            now, (got, one) = end, heapq.heappop(moving)
            result[one] = max(0, round(end) - start_ns[one])
        now = until

    for one in order:
        advance(start_ns[one])
        heapq.heappush(moving, (got + work_ns[one], one))
    advance(float("inf"))
    return result


class Links:
    """The works of all transfers of a graph, and replays with others.

    Attributes:
        work_ns: by edge. Of a rank that is alone in the trace it is the duration, since the wait
            for the other ranks, which shares nothing, cannot be told from it.
    """

    def __init__(self, graph: Graph, meetings: Sequence[Meeting]) -> None:
        self._graph = graph
        self.work_ns: dict[int, int] = {}
        self._by_rank: dict[int, list[int]] = defaultdict(list)
        for meeting, edges in zip(meetings, graph.transfers, strict=True):
            for edge in edges:
                self.work_ns[edge] = int(graph.weight_ns[edge])
                if not meeting.alone:
                    self._by_rank[int(graph.rank[self._head(edge)])].append(edge)
        for edges in self._by_rank.values():
            start = graph.time_ns[graph.tail[edges]]
            shares = fair_share_ns(start, start + graph.weight_ns[edges])
            self.work_ns.update(zip(edges, np.rint(shares).astype(int).tolist(), strict=True))

    def _head(self, edge: int) -> int:
        return int(np.searchsorted(self._graph.first, edge, side="right")) - 1

    def replay(
        self,
        work_ns: Mapping[int, int],
        added_ns: Mapping[int, int] | None = None,
        weights_ns: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Times of all nodes if transfers have other works, as one column.

        Durations depend on starts and these on durations: replayed until they agree, at most 50
        times.

        Args:
            work_ns: by edge of a transfer; others keep theirs.
            added_ns: by any edge, on top of its weight.
            weights_ns: as of :func:`taciturn.trace.replay.replay`.
        """
        works = self.work_ns | dict(work_ns)
        weights = dict(works)
        for _ in range(MOST_ROUNDS):
            times = replay(self._graph, [Variant(weights, added_ns)], weights_ns)
            changed = 0
            for edges in self._by_rank.values():
                starts = times[self._graph.tail[edges], 0].tolist()
                lasts = durations_ns(starts, [works[edge] for edge in edges])
                for edge, lasting in zip(edges, lasts, strict=True):
                    changed = max(changed, abs(lasting - weights[edge]))
                    weights[edge] = lasting
            if changed <= SAME_NS:
                break
        return times

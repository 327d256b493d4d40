"""What steps would save if transfers were instant: likely, certainly, at most.

Each is a difference of two replays, of the joint graph with three sets of weights: as it is, with
proven edges only, and with every delay gone that might be a wait without a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.collectives import Collective, Meeting
from taciturn.trace.graph import Graph
from taciturn.trace.replay import Variant, replay
from taciturn.trace.view import View

__all__ = ["Class", "Exposures", "Saved", "bounds_of", "class_of", "classes_of", "step_ends"]

Class = tuple[str, str, int | None]
"""Name, group and size of a collective: a row of the report."""


def classes_of(meetings: Sequence[Meeting]) -> list[Class]:
    """Rows of the report, in order of their first call."""
    return list(dict.fromkeys(class_of(meeting.first) for meeting in meetings))


def class_of(one: Collective) -> Class:
    """The row of the report that a collective belongs to."""
    return one.name, one.group, one.size_bytes


class Exposures:
    """Replays with transfers instant: all at once, and those of each class.

    Attributes:
        times_ns: of all nodes, as measured.
        bounds_ns: by step, replayed begin and end.
        saved: by step: column -> nanoseconds saved; column 0 is all transfers, then classes.
        certain: the same with proven edges only.
        most: the same with all gone that might be a wait.
    """

    def __init__(self, graph: Graph, meetings: Sequence[Meeting], classes: Sequence[Class]) -> None:
        by_class: dict[Class, dict[int, int]] = {one: {} for one in classes}
        least = _least(meetings)
        sure: dict[Class, dict[int, int]] = {one: {} for one in classes}
        for meeting, edges in zip(meetings, graph.transfers, strict=True):
            what = class_of(meeting.first)
            # Those outside of all steps too: had they been instant, no GPU would be so far behind.
            for edge in edges:
                by_class[what][edge] = 0
                # One rank cannot tell its transfer from its wait: no less than the shortest is
                # transfer, for all it knows.
                alone = meeting.alone
                weight = int(graph.weight_ns[edge])
                sure[what][edge] = max(0, weight - least[what]) if alone else 0
        columns = [
            Variant({}),
            Variant({e: w for one in by_class.values() for e, w in one.items()}),
        ]
        columns += [Variant(by_class[one]) for one in classes]
        certain = [Variant({}), Variant({e: w for one in sure.values() for e, w in one.items()})]
        certain += [Variant(sure[one]) for one in classes]
        likely = replay(graph, columns)
        self.times_ns = likely[:, 0].copy()
        ends = step_ends(graph, likely)
        self.bounds_ns = tuple(zip(ends[:-1, 0].tolist(), ends[1:, 0].tolist(), strict=True))
        self.saved = _saved(ends)
        proven = step_ends(graph, replay(graph, certain, graph.proven_weight_ns))
        self.certain = _saved(proven)
        soonest = replay(graph, columns, graph.asap_weight_ns)
        self.soonest = soonest[:, 0].copy()
        self._measure(graph, step_ends(graph, soonest))

    def _measure(self, graph: Graph, soonest: NDArray[np.int64]) -> None:
        """Windows and completions, measured and replayed, and the relative error of each step."""
        lengths = np.diff(soonest, axis=0)
        real = np.diff(step_ends(graph, graph.time_ns[:, None]), axis=0)
        self.completed_ns = real[:, 0]
        self.completed_replayed_ns = lengths[:, 0]
        # With every delay gone that might be a wait without a record, and the transfers as well.
        self.most = np.maximum(real - lengths[:, 1:], 0)
        count = len(graph.ends)
        self.window_ns, self.window_replayed_ns = [0] * count, [0] * count
        for (_, step), (begin, end) in graph.windows.items():
            if step < count:
                length = int(graph.time_ns[end] - graph.time_ns[begin])
                self.window_ns[step] = max(self.window_ns[step], length)
                length = int(self.soonest[end] - self.soonest[begin])
                self.window_replayed_ns[step] = max(self.window_replayed_ns[step], length)
        self.errors = [
            max(
                _relative(int(self.completed_replayed_ns[i]), int(self.completed_ns[i])),
                _relative(self.window_replayed_ns[i], self.window_ns[i]),
            )
            for i in range(count)
        ]
        self.worst_error = max(self.errors)

    def of(self, step: int, column: int) -> Saved:
        """What instant transfers would save of a step; all of them, or those of a class."""
        return Saved(*(int(each[step, column]) / 1e9 for each in
                        (self.saved, self.certain, self.most)))  # fmt: skip


class Saved(NamedTuple):
    """Seconds of a step that instant transfers save: likely, certainly, and at most."""

    likely_s: float
    certain_s: float
    most_s: float


def _relative(value: int, real: int) -> float:
    return abs(value - real) / real if real > 0 else 0.0


def _least(meetings: Sequence[Meeting]) -> dict[Class, int]:
    least: dict[Class, int] = {}
    for meeting in meetings:
        what = class_of(meeting.first)
        for one in meeting.members:
            length = one.end_ns - one.start_ns
            least[what] = min(least.get(what, length), length)
    return least


def step_ends(graph: Graph, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the first step began and when each was done, one row each; never going back."""
    rows = [times[graph.opening].max(axis=0)]
    rows += [times[nodes].max(axis=0) for nodes in graph.ends]
    return np.maximum.accumulate(np.array(rows), axis=0)


def _saved(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """By step and variant, how much shorter its completion is than in the first column."""
    lengths = np.diff(ends, axis=0)
    saved: NDArray[np.int64] = np.maximum(lengths[:, :1] - lengths[:, 1:], 0)
    return saved


def bounds_of(
    saved: Saved, alone_s: float, views: Sequence[View], bounded: bool
) -> tuple[float, float]:
    """Not less than what is certain; not more than the transfer that is not overlapped.

    On a GPU also not more than what would be saved if every delay were a wait: fixed is only what
    the CPU takes. On the CPU that is not fixed either, as transfers take its cores.
    """
    if not bounded:
        return saved.likely_s, saved.likely_s
    most = alone_s
    if all(view.on_gpu for view in views):
        most = min(most, saved.most_s)
    return min(saved.likely_s, saved.certain_s), max(saved.likely_s, most)

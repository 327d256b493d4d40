"""Arithmetic of intervals on whole nanoseconds.

An :class:`Intervals` is a set of points in time: half-open intervals that are sorted, not empty,
and do not touch. Law: union, intersection and difference are those of the sets of nanoseconds;
``total_ns`` is their size (``test_trace_timeline.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Intervals", "fair_share_ns", "intersect", "subtract", "unite"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """Sorted, disjoint, not empty: ``start_ns[i] < end_ns[i] < start_ns[i + 1]``."""

    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """How many nanoseconds are inside."""
        return int((self.end_ns - self.start_ns).sum())

    def clip(self, start_ns: int, end_ns: int) -> Intervals:
        """The part in ``[start_ns, end_ns)``."""
        first = np.maximum(self.start_ns, start_ns)
        last = np.minimum(self.end_ns, end_ns)
        kept = first < last
        return Intervals(first[kept], last[kept])


def unite(start_ns: Any, end_ns: Any) -> Intervals:
    """All points that lie in any of the given intervals, which may overlap and be empty.

    Args:
        start_ns: whole nanoseconds, in any order.
        end_ns: as many.
    """
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    real = start < end
    start, end = start[real], end[real]
    if not len(start):
        return Intervals(start, end)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    # A new interval begins where everything before has ended.
    begins = np.flatnonzero(np.r_[True, start[1:] > reach[:-1]])
    return Intervals(start[begins], reach[np.r_[begins[1:] - 1, len(reach) - 1]])


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The points in both."""
    return _where_depth(one, other, 1, 2)


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """The points in ``one`` that are not in ``other``."""
    return _where_depth(one, other, -1, 1)


def fair_share_ns(start_ns: Any, end_ns: Any) -> NDArray[np.float64]:
    """How long each interval would last alone, if those that overlap share one resource equally.

    Law: the sum is the size of the union (``test_fair_shares_add_up``).

    Args:
        start_ns: whole nanoseconds, in any order.
        end_ns: as many.
    """
    start, end = np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64)
    end = np.maximum(start, end)
    time = np.unique(np.concatenate([start, end]))
    active = np.searchsorted(np.sort(start), time, side="right")
    active = active - np.searchsorted(np.sort(end), time, side="right")
    # What one interval has got by each of the times, had it been there from the beginning.
    got = np.r_[0.0, np.cumsum(np.diff(time) / np.maximum(active[:-1], 1))]
    first, last = np.searchsorted(time, start), np.searchsorted(time, end)
    shares: NDArray[np.float64] = got[last] - got[first]
    return shares


def _where_depth(one: Intervals, other: Intervals, weight: int, depth: int) -> Intervals:
    """Where the number of covers, the other's times ``weight``, is ``depth``."""
    time = np.concatenate([one.start_ns, one.end_ns, other.start_ns, other.end_ns])
    step = np.repeat([1, -1, weight, -weight], [len(one), len(one), len(other), len(other)])
    order = np.argsort(time, kind="stable")
    time, covers = time[order], np.cumsum(step[order])
    # Several boundaries at one time count together: only the last one's sum is a stretch.
    inside = np.flatnonzero((covers[:-1] == depth) & (time[:-1] < time[1:]))
    return unite(time[inside], time[inside + 1])

"""When a rank computes and when it communicates, and what of the one hides the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from taciturn.trace.collectives import Collective, Meeting
from taciturn.trace.kinds import Kind
from taciturn.trace.timeline import Intervals, intersect, subtract, unite
from taciturn.trace.view import View

__all__ = ["Occupation", "mean_s", "united"]


class Occupation:
    """What one rank does when, on the common clock.

    Attributes:
        view: of the rank.
        compute: with a kernel on any stream that is neither communication nor a copy; without a
            GPU, with the main thread in an operator.
        by_step: its collectives by index of step; -1 outside of all.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        rows = view.events.of(Kind.COMPUTE, Kind.UNKNOWN)
        rows = rows[view.events.queue[rows] >= 0]
        self._rows = rows
        if view.on_gpu:
            self.compute = unite(view.start_ns[rows], view.end_ns[rows])
        else:
            self.compute = view.busy(view.main_lane)
        self.by_step: dict[int, list[Collective]] = defaultdict(list)
        for one in view.collectives:
            self.by_step[int(view.step_index[one.row])].append(one)

    def of(self, index: int) -> Intervals:
        """With any collective of that step under way."""
        return united(self.by_step[index])

    def computing(self, index: int) -> Intervals:
        """With compute of that step under way: on a GPU what it launched, whenever that ran."""
        if not self.view.on_gpu:
            step = self.view.steps[index]
            return self.compute.clip(step.start_ns, step.end_ns)
        rows = self._rows[self.view.step_index[self._rows] == index]
        return unite(self.view.start_ns[rows], self.view.end_ns[rows])

    def moving(self, meetings: Sequence[Meeting]) -> Intervals:
        """With one of them under way after all ranks have come, and nothing computed."""
        return subtract(self.transfers(meetings), self.compute)

    def computing_beside(self, meetings: Sequence[Meeting]) -> Intervals:
        """With one of them under way after all ranks have come, and something computed."""
        return intersect(self.transfers(meetings), self.compute)

    def waiting(self, meetings: Sequence[Meeting]) -> Intervals:
        """In one of them before its last rank has come."""
        spans = [
            (one.start_ns, min(one.end_ns, max(each.start_ns for each in meeting.members)))
            for meeting in meetings
            for one in meeting.members
            if one.rank == self.view.rank
        ]
        return unite([a for a, _ in spans], [b for _, b in spans])

    def transfers(self, meetings: Sequence[Meeting]) -> Intervals:
        """With one of them under way after all ranks have come."""
        spans = [
            (max(max(each.start_ns for each in meeting.members), one.start_ns), one.end_ns)
            for meeting in meetings
            for one in meeting.members
            if one.rank == self.view.rank
        ]
        return unite([a for a, _ in spans], [b for _, b in spans])


def united(collectives: Sequence[Collective]) -> Intervals:
    """With any of the collectives of a rank under way."""
    return unite([one.start_ns for one in collectives], [one.end_ns for one in collectives])


def mean_s(each: Sequence[Intervals]) -> float:
    """Mean length over ranks, in seconds."""
    return fmean(one.total_ns for one in each) / 1e9 if each else 0.0

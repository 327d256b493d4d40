"""Which rank comes late, and what it does meanwhile that the others do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from taciturn.trace.collectives import Meeting
from taciturn.trace.kinds import Kind
from taciturn.trace.report import Straggler
from taciturn.trace.timeline import subtract, unite
from taciturn.trace.view import CPU_KINDS, View

__all__ = ["Lateness", "find_straggler", "lateness"]

LEAST_SHARE = 0.02  # of the step: less is not worth a name
LEAST_NS = 100_000  # nor is less than the error of clocks
EXPLAINS = 1 / 3  # of its lateness: less is not the cause
MOSTLY = 0.75  # of the steps: two of three happen by chance


@dataclass(frozen=True)
class Lateness:
    """How late ranks came, by index of step.

    Attributes:
        late_ns: by step and rank: at its latest, where it came last; after the median of the other
            ranks in the same collective.
        partly: steps with collectives of which only one rank's part was found: in these a rank may
            have come later than is known.
    """

    late_ns: Mapping[int, Mapping[int, int]]
    partly: frozenset[int]

    def of(self, step: int, rank: int) -> int | None:
        """How late a rank came, in ns; None where it cannot be told."""
        return None if step in self.partly else self.late_ns.get(step, {}).get(rank, 0)


def lateness(meetings: Sequence[Meeting]) -> Lateness:
    """What the meetings in steps tell."""
    late: dict[int, dict[int, int]] = defaultdict(dict)
    for meeting in meetings:
        if len(meeting.members) < 2 or meeting.first.step < 0:
            continue
        last = max(meeting.members, key=lambda one: one.start_ns)
        others = [one.start_ns for one in meeting.members if one is not last]
        by = last.start_ns - round(median(others))
        step = late[meeting.first.step]
        step[last.rank] = max(step.get(last.rank, 0), by)
    return Lateness(late, frozenset(one.first.step for one in meetings if one.alone))


def find_straggler(views: Sequence[View], lateness: Lateness, step_ns: float) -> Straggler | None:
    """The rank that is latest in most steps, by a time worth a name; else None.

    Steps that are known in part count only where no other is, and then for a least lateness.

    Args:
        views: of the ranks that have met.
        lateness: of their collectives.
        step_ns: a usual step.
    """
    whole = {step: by for step, by in lateness.late_ns.items() if step not in lateness.partly}
    late = whole or lateness.late_ns
    least = max(LEAST_NS, LEAST_SHARE * step_ns)
    latest = [
        (max(ranks, key=lambda rank: ranks[rank]), max(ranks.values()))
        for ranks in late.values()
        if ranks and max(ranks.values()) >= least
    ]
    if not latest:
        return None
    by_rank: dict[int, list[int]] = defaultdict(list)
    for rank, by in latest:
        by_rank[rank].append(by)
    rank = max(by_rank, key=lambda one: (len(by_rank[one]), sum(by_rank[one])))
    if len(by_rank[rank]) < MOSTLY * len(late):
        return None
    # In steps without any meeting nobody is late, but they count in the mean of the table.
    others = set(range(min(len(view.steps) for view in views))) - set(lateness.late_ns)
    count = len(late) + len(others - lateness.partly)
    late_ns = sum(ranks.get(rank, 0) for ranks in late.values()) / count
    name, more, unrecorded = _cause(views, rank, EXPLAINS * late_ns)
    return Straggler(
        rank=rank,
        late_s=late_ns / 1e9,
        steps=len(by_rank[rank]),
        of_steps=len(late),
        at_least=not whole,
        excess=name,
        excess_s=more / 1e9,
        unrecorded=unrecorded,
    )


def _cause(views: Sequence[View], rank: int, least_ns: float) -> tuple[str, float, bool]:
    """The range, else the pause, that is longer there by so much; by how much; is it a pause?"""
    name, more = _excess(views, rank, _own_times)
    if more >= max(least_ns, LEAST_NS):
        return name, more, False
    name, more = _excess(views, rank, _pauses)
    if more >= max(least_ns, LEAST_NS):
        return name, more, True
    return "", 0.0, False


def _excess(
    views: Sequence[View], rank: int, times_of: Callable[[View, int], dict[str, int]]
) -> tuple[str, float]:
    """The name whose time exceeds that of the others most, and by how much in the mean, in ns."""
    count = min(len(view.steps) for view in views)
    own: list[dict[str, int]] = []
    others: list[list[dict[str, int]]] = [[] for _ in range(count)]
    for view in views:
        for index in range(count):
            times = times_of(view, index)
            if view.rank == rank:
                own.append(times)
            else:
                others[index].append(times)
    names = {name for times in own for name in times}
    more = {
        name: fmean(
            own[index].get(name, 0) - median([times.get(name, 0) for times in others[index]] or [0])
            for index in range(count)
        )
        for name in names
    }
    if not more:
        return "", 0.0
    name = max(more, key=lambda one: more[one])
    return name, float(more[name])


def _pauses(view: View, index: int) -> dict[str, int]:
    """Time of the main thread in which nothing was recorded, by the events round it; one step."""
    step = view.steps[index]
    events = view.events
    rows = np.flatnonzero((events.lane == view.main_lane) & np.isin(events.kind, CPU_KINDS))
    inside = (view.start_ns[rows] < step.end_ns) & (view.end_ns[rows] > step.start_ns)
    rows = rows[inside]
    if not len(rows):
        return {}
    reach = np.maximum.accumulate(view.end_ns[rows])
    times: dict[str, int] = defaultdict(int)
    for place in np.flatnonzero(view.start_ns[rows[1:]] - reach[:-1] >= LEAST_NS).tolist():
        # The outermost event before the pause: what it holds ended earlier, or with it.
        before = rows[: place + 1][view.end_ns[rows[: place + 1]] == reach[place]][0]
        words = f"{view.trace.name(int(before))!r} and {view.trace.name(int(rows[place + 1]))!r}"
        times[words] += int(view.start_ns[rows[place + 1]] - reach[place])
    return times


def _own_times(view: View, index: int) -> dict[str, int]:
    """Time in each range of the main thread that is in no range inside it, by name; one step."""
    events, step = view.events, view.steps[index]
    rows = events.of(Kind.ANNOTATION)
    inside = (
        (events.lane[rows] == view.main_lane)
        & (view.start_ns[rows] >= step.start_ns)
        & (view.end_ns[rows] <= step.end_ns)
    )
    rows = rows[inside]
    times: dict[str, int] = defaultdict(int)
    # Rows come by start, longer first: what follows inside a range is its content.
    for place, row in enumerate(rows.tolist()):
        name = view.trace.name(row)
        if name.startswith("ProfilerStep"):
            continue
        content = []
        for other in rows[place + 1 :].tolist():
            if view.start_ns[other] >= view.end_ns[row]:
                break
            content.append(other)
        children = unite(view.start_ns[content], view.end_ns[content])
        alone = subtract(unite([view.start_ns[row]], [view.end_ns[row]]), children)
        times[name] += alone.total_ns
    return times

"""Which rank comes late, and what it does meanwhile that the others do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from taciturn.trace.collectives import Meeting
from taciturn.trace.kinds import Kind
from taciturn.trace.report import Straggler
from taciturn.trace.timeline import subtract, unite
from taciturn.trace.view import View

__all__ = ["find_straggler", "lateness"]

LEAST_SHARE = 0.02  # of the step: less is not worth a name
LEAST_NS = 100_000  # nor is less than the error of clocks
MOSTLY = 0.75  # of the steps: two of three happen by chance


def lateness(meetings: Sequence[Meeting]) -> dict[int, dict[int, int]]:
    """By index of step and rank: how late it came, at its latest, where it came last; in ns.

    Late is after the median of the other ranks in the same collective.
    """
    late: dict[int, dict[int, int]] = defaultdict(dict)
    for meeting in meetings:
        if len(meeting.members) < 2 or meeting.first.step < 0:
            continue
        last = max(meeting.members, key=lambda one: one.start_ns)
        others = [one.start_ns for one in meeting.members if one is not last]
        by = last.start_ns - round(median(others))
        step = late[meeting.first.step]
        step[last.rank] = max(step.get(last.rank, 0), by)
    return late


def find_straggler(
    views: Sequence[View], late: Mapping[int, Mapping[int, int]], step_ns: float
) -> Straggler | None:
    """The rank that is latest in most steps, by a time worth a name; else None.

    Args:
        views: of the ranks that have met.
        late: from :func:`lateness`.
        step_ns: a usual step.
    """
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
    name, more = _excess(views, rank)
    return Straggler(
        rank=rank,
        late_s=median(by_rank[rank]) / 1e9,
        steps=len(by_rank[rank]),
        of_steps=len(late),
        excess=name,
        excess_s=more / 1e9,
    )


def _excess(views: Sequence[View], rank: int) -> tuple[str, float]:
    """The range whose own time exceeds that of the others most, and by how much, in ns."""
    count = min(len(view.steps) for view in views)
    own: list[dict[str, int]] = []
    others: list[list[dict[str, int]]] = [[] for _ in range(count)]
    for view in views:
        for index in range(count):
            times = _own_times(view, index)
            if view.rank == rank:
                own.append(times)
            else:
                others[index].append(times)
    names = {name for times in own for name in times}
    more = {
        name: median(
            own[index].get(name, 0) - median([times.get(name, 0) for times in others[index]] or [0])
            for index in range(count)
        )
        for name in names
    }
    if not more:
        return "", 0.0
    name = max(more, key=lambda one: more[one])
    return (name, float(more[name])) if more[name] >= LEAST_NS else ("", 0.0)


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

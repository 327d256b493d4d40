"""From files to a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.clock import Clocks, Correction, align
from taciturn.trace.collectives import Collective, Meeting, collectives_of, match
from taciturn.trace.diagnosis import diagnose
from taciturn.trace.events import Trace
from taciturn.trace.exposure import Class, Exposures, Saved, bounds_of, class_of, classes_of
from taciturn.trace.graph import Graph, build
from taciturn.trace.job import check_one_job
from taciturn.trace.kinds import KindRule
from taciturn.trace.notes import (
    alone_share,
    doubt_about_none,
    reasons_for_bounds,
    unknown_names,
    what_is_missing,
)
from taciturn.trace.occupation import Occupation, mean_s, united
from taciturn.trace.path import Stretch, by_kind, stretches
from taciturn.trace.reader import no_collection, read_all
from taciturn.trace.report import (
    CollectiveRow,
    CriticalPath,
    RankRow,
    Report,
    StepReport,
)
from taciturn.trace.steps import Step, steps_of
from taciturn.trace.straggler import Lateness, find_straggler, lateness
from taciturn.trace.timeline import intersect, subtract
from taciturn.trace.view import View

__all__ = ["Analysis", "analyse", "analyse_traces"]

Row = TypeVar("Row", StepReport, CriticalPath, CollectiveRow, RankRow)


@dataclass(frozen=True)
class Analysis:
    """The report and what it was made from: what a picture or a what-if needs.

    Attributes:
        report: the answer.
        traces: as read, by rank.
        occupations: what each rank does when, in the order of ``views``.
        views: the ranks on one clock; one that could not be aligned begins with the lowest rank.
        meetings: collectives over ranks, on that clock.
        clocks: how the ranks were aligned.
        graph: over all ranks.
        times_ns: of its nodes, replayed as measured.
        bounds_ns: by index of step, replayed begin and end of its completion.
        path: the critical path, by time.
    """

    report: Report
    traces: tuple[Trace, ...]
    views: tuple[View, ...]
    occupations: tuple[Occupation, ...]
    meetings: tuple[Meeting, ...]
    clocks: Clocks
    graph: Graph
    times_ns: NDArray[np.int64]
    bounds_ns: tuple[tuple[int, int], ...]
    path: tuple[Stretch, ...]


def analyse(
    paths: Sequence[Path],
    *,
    ranks: Sequence[int] = (),
    rules: Sequence[KindRule] = (),
    strict: bool = False,
) -> Analysis:
    """Read files, or folders of files, of one job and say what its steps wait for.

    Args:
        paths: one file per rank, or a folder of them; some ranks of many will do.
        ranks: of the files, in order; by default what they say.
        rules: kinds of the user, see :func:`taciturn.trace.kinds.parse_kind`.
        strict: refuse files that are not whole.

    Raises:
        InputError: nothing to read, files that are no traces, or not of one job.
    """
    traces, notes = read_all(paths, ranks=ranks, rules=rules, strict=strict)
    names = [label.name for trace in traces for label in trace.labels]
    notes += [f"--kind {rule.text!r} matches no event" for rule in rules if not rule.matches(names)]
    return analyse_traces(traces, notes)


def analyse_traces(traces: Sequence[Trace], notes: Sequence[str] = ()) -> Analysis:
    """The same for traces in memory, sorted by rank; ``notes`` go into the report."""
    said = [*notes, *(f"{trace}: {note}" for trace in traces for note in trace.notes)]
    traces, steps, numbers = _with_common_steps(traces, [*map(steps_of, traces)], said)
    found = [collectives_of(trace, one) for trace, one in zip(traces, steps, strict=True)]
    matching = match(found, [[step.number for step in one] for one in steps])
    check_one_job(found, [[step.number for step in one] for one in steps])
    said += matching.notes
    begins = {
        trace.rank or 0: next(step.start_ns for step in one if step.number in numbers)
        for trace, one in zip(traces, steps, strict=True)
    }
    clocks, meetings = _one_clock(traces, matching.meetings, begins)
    said += clocks.notes
    views = []
    for trace, one, collectives in zip(traces, steps, found, strict=True):
        fixed = [clocks.correct(each) for each in collectives]
        fix = clocks.corrections.get(trace.rank or 0)
        views.append(View(trace, one, fixed, fix, numbers))
    meetings = [_in_kept_steps(meeting, views) for meeting in meetings]
    with no_collection():
        graph = build(views, meetings)
    return _conclude(traces, views, meetings, clocks, graph, said)


def _with_common_steps(
    traces: Sequence[Trace], steps: Sequence[list[Step]], notes: list[str]
) -> tuple[list[Trace], list[list[Step]], list[int | None]]:
    """The ranks that have steps of the same numbers, their steps, and those numbers in order.

    A rank without a step that the others have is left out, and so is a step that not all have.
    """
    numbers = [{step.number for step in one} for one in steps]
    # With whom most ranks share a step; of equals the lowest.
    shared = [sum(bool(one & other) for other in numbers) for one in numbers]
    lead = shared.index(max(shared))
    common, kept = set(numbers[lead]), []
    for place, one in enumerate(numbers):
        if one & common:
            common &= one
            kept.append(place)
    out = [str(traces[place]) for place in range(len(traces)) if place not in kept]
    if out:
        notes.append(f"left out, as they have no step that the others have: {', '.join(out)}")
    missing = set().union(*(numbers[place] for place in kept)) - common
    if missing:
        shown = ", ".join(sorted(map(str, missing)))
        notes.append(f"steps that not all ranks have are left out: {shown}")
    return (
        [traces[place] for place in kept],
        [steps[place] for place in kept],
        [step.number for step in steps[lead] if step.number in common],
    )


def _one_clock(
    traces: Sequence[Trace], meetings: Sequence[Meeting], begins: Mapping[int, int]
) -> tuple[Clocks, list[Meeting]]:
    """Align clocks; members of ranks that could not be are taken out into meetings of their own.

    Such a rank is set to begin its first step with the lowest rank: nothing is told across it.
    """
    ranks = [trace.rank or 0 for trace in traces]
    hosts = {trace.host for trace in traces}
    one_host = len(hosts) == 1 and "" not in hosts
    on_cpu = any(trace.events.queue[m.first.row] < 0 for trace in traces[:1] for m in meetings
                 if m.first.rank == trace.rank)  # fmt: skip
    clocks = align(ranks, meetings, bracketed=on_cpu, one_host=one_host)
    first = begins[min(ranks)]
    set_so = {
        rank: Correction(first - begins[rank], 0.0, 0, abs(first - begins[rank]))
        for rank in clocks.refused
    }
    clocks = replace(clocks, corrections={**clocks.corrections, **set_so})
    apart: list[Meeting] = []
    for meeting in meetings:
        fixed = [clocks.correct(one) for one in meeting.members]
        together = tuple(one for one in fixed if one.rank not in clocks.refused)
        alone = [one for one in fixed if one.rank in clocks.refused]
        if together:
            apart.append(Meeting(together, meeting.complete and not alone))
        apart += [Meeting((one,), False) for one in alone]
    return clocks, apart


def _in_kept_steps(meeting: Meeting, views: Sequence[View]) -> Meeting:
    """Steps of members as the views count them."""
    by_rank = {view.rank: view for view in views}
    members = tuple(
        replace(one, step=int(by_rank[one.rank].step_index[one.row])) for one in meeting.members
    )
    return Meeting(members, meeting.complete)


# -- figures -----------------------------------------------------------------------------------


def _conclude(
    traces: Sequence[Trace],
    views: Sequence[View],
    meetings: Sequence[Meeting],
    clocks: Clocks,
    graph: Graph,
    notes: list[str],
) -> Analysis:
    classes = classes_of(meetings)
    exposures = Exposures(graph, meetings, classes)
    path = stretches(graph, exposures.times_ns, views)
    late = lateness(meetings)
    inside = [Occupation(view) for view in views]
    reasons = reasons_for_bounds(views, meetings, graph, exposures.worst_error)
    steps = tuple(
        _step(index, views, inside, meetings, classes, exposures, path, late, bool(reasons))
        for index in range(len(graph.ends))
    )
    notes += what_is_missing(traces, views, meetings, graph, reasons)
    mean = _mean(steps)
    straggler = find_straggler(views, late, mean.completed_s * 1e9) if len(views) > 1 else None
    sizes = {trace.world_size for trace in traces} - {None}
    report = Report(
        ranks=tuple(view.rank for view in views),
        world_size=next(iter(sizes), None),
        backend=next((trace.backend for trace in traces if trace.backend), ""),
        steps=steps,
        mean=mean,
        straggler=straggler,
        diagnosis=diagnose(
            mean,
            straggler,
            alone=alone_share(meetings),
            exact=not reasons,
            doubt=doubt_about_none(traces),
        ),
        exact=not reasons,
        unknown=unknown_names(traces),
        notes=tuple(dict.fromkeys(notes)),
        lost=any(not trace.loss.complete for trace in traces),
    )
    return Analysis(
        report=report,
        traces=tuple(traces),
        views=tuple(views),
        occupations=tuple(inside),
        meetings=tuple(meetings),
        clocks=clocks,
        graph=graph,
        times_ns=exposures.times_ns,
        bounds_ns=exposures.bounds_ns,
        path=tuple(path),
    )


def _step(
    index: int,
    views: Sequence[View],
    inside: Sequence[Occupation],
    meetings: Sequence[Meeting],
    classes: Sequence[Class],
    exposures: Exposures,
    path: Sequence[Stretch],
    late: Lateness,
    bounded: bool,
) -> StepReport:
    here = [meeting for meeting in meetings if meeting.first.step == index]
    rows = []
    for column, what in enumerate(classes, start=1):
        mine = [meeting for meeting in here if class_of(meeting.first) == what]
        if mine:
            rows.append(_row(what, mine, inside, exposures.of(index, column), bounded))
    busy = [one.of(index) for one in inside]
    alone = [subtract(each, one.compute) for each, one in zip(busy, inside, strict=True)]
    busy_s, alone_s = mean_s(busy), mean_s(alone)
    moving = [one.moving(here) for one in inside]
    exposed = exposures.of(index, 0)
    low, high = bounds_of(exposed, mean_s(moving), views, bounded)
    return StepReport(
        step=views[0].steps[index].number,
        measured_s=exposures.window_ns[index] / 1e9,
        replayed_s=exposures.window_replayed_ns[index] / 1e9,
        completed_s=int(exposures.completed_ns[index]) / 1e9,
        completed_replayed_s=int(exposures.completed_replayed_ns[index]) / 1e9,
        replay_error=exposures.errors[index],
        busy_s=busy_s,
        not_overlapped_s=alone_s,
        overlap=1 - alone_s / busy_s if busy_s > 0 else None,
        exposed_s=exposed.likely_s,
        exposed_low_s=low,
        exposed_high_s=high,
        critical_path=by_kind(path, *exposures.bounds_ns[index]),
        collectives=tuple(rows),
        ranks=tuple(_rank_row(index, one, here, late) for one in inside),
    )


def _row(
    what: Class,
    meetings: Sequence[Meeting],
    inside: Sequence[Occupation],
    saved: Saved,
    bounded: bool,
) -> CollectiveRow:
    by_rank: dict[int, list[Collective]] = defaultdict(list)
    for meeting in meetings:
        for one in meeting.members:
            by_rank[one.rank].append(one)
    known = not any(meeting.alone for meeting in meetings)
    own = {each.view.rank: each for each in inside if each.view.rank in by_rank}
    waits = [each.waiting(meetings) for each in own.values()]
    moves = [each.transfers(meetings) for each in own.values()]
    busy = {rank: united(list_) for rank, list_ in by_rank.items()}
    alone = [subtract(each, own[rank].compute) for rank, each in busy.items()]
    moving = [one.moving(meetings) for one in inside]
    low, high = bounds_of(saved, mean_s(moving), [one.view for one in inside], bounded)
    return CollectiveRow(
        name=what[0],
        group=what[1],
        count=max(len(list_) for list_ in by_rank.values()),
        bytes=what[2],
        busy_s=mean_s(list(busy.values())),
        not_overlapped_s=mean_s(alone),
        waiting_s=mean_s(waits) if known else None,
        transfer_s=mean_s(moves) if known else None,
        exposed_s=saved.likely_s,
        exposed_low_s=low,
        exposed_high_s=high,
        min_s=min(one.end_ns - one.start_ns for list_ in by_rank.values() for one in list_) / 1e9,
    )


def _rank_row(
    index: int, inside: Occupation, meetings: Sequence[Meeting], late: Lateness
) -> RankRow:
    view = inside.view
    busy = inside.of(index)
    step = view.steps[index]
    mine = [one for one in meetings if any(each.rank == view.rank for each in one.members)]
    known = not any(meeting.alone for meeting in mine)
    late_ns = late.of(index, view.rank)
    return RankRow(
        rank=view.rank,
        measured_s=(step.end_ns - step.start_ns) / 1e9,
        busy_s=busy.total_ns / 1e9,
        overlapped_s=intersect(busy, inside.compute).total_ns / 1e9,
        waiting_s=inside.waiting(mine).total_ns / 1e9 if known else None,
        compute_s=inside.computing(index).total_ns / 1e9,
        late_s=late_ns / 1e9 if late_ns is not None else None,
    )


def _mean(steps: Sequence[StepReport]) -> StepReport:
    """Each number's mean over steps; rows of collectives and ranks by what they are of."""
    rows: dict[Any, list[CollectiveRow]] = defaultdict(list)
    ranks: dict[int, list[RankRow]] = defaultdict(list)
    for step in steps:
        for row in step.collectives:
            rows[row.name, row.group, row.bytes].append(row)
        for one in step.ranks:
            ranks[one.rank].append(one)
    count = len(steps)
    return replace(
        _average(steps, count),
        step=None,
        replay_error=max(step.replay_error for step in steps),
        critical_path=_average([step.critical_path for step in steps], count),
        collectives=tuple(
            replace(_average(each, count), min_s=min(row.min_s for row in each))
            for each in rows.values()
        ),
        ranks=tuple(_average(each, count) for each in ranks.values()),
    )


_WHERE_KNOWN = ("overlap", "late_s")
"""Means of these are over the steps that have one."""


def _average(rows: Sequence[Row], count: int) -> Row:
    """The first row with its seconds averaged over ``count`` steps; what is missing counts as 0."""
    changes: dict[str, Any] = {}
    for field in fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if field.name.endswith("_s") or field.name == "overlap":
            known = [value for value in values if value is not None]
            if field.name in _WHERE_KNOWN:
                changes[field.name] = sum(known) / len(known) if known else None
            else:
                whole = len(known) == len(values)
                changes[field.name] = sum(known) / count if whole and count else None
    return replace(rows[0], **changes)

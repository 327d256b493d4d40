"""What a reader of a report must know, as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from taciturn.trace.collectives import Meeting
from taciturn.trace.events import Trace
from taciturn.trace.graph import Graph
from taciturn.trace.kinds import Kind
from taciturn.trace.view import View

__all__ = [
    "alone_share",
    "doubt_about_none",
    "reasons_for_bounds",
    "unknown_names",
    "what_is_missing",
]

MAX_ERROR = 0.05
"""A replay that is further from the measurement gives bounds instead of a number."""

SLOWS = ("profile_memory", "with_stack")
"""Options of the profiler that slow the CPU; shapes are needed, and cost little."""


def alone_share(meetings: Sequence[Meeting]) -> float:
    """Of the collectives in steps the share of which one rank of several is known."""
    inside = [meeting for meeting in meetings if meeting.first.step >= 0]
    return sum(meeting.alone for meeting in inside) / len(inside) if inside else 0.0


def doubt_about_none(traces: Sequence[Trace]) -> str:
    """Why there may be collectives although none was found; empty where there is no reason."""
    doubts = []
    if any(not trace.loss.complete for trace in traces):
        doubts.append("a file is not whole, and the profiler writes what ran on GPUs last")
    if odd := sum(trace.loss.events_odd for trace in traces):
        doubts.append(f"{odd} events have no usable time")
    if names := unknown_names(traces):
        doubts.append(f"{names[0][0]} sounds like one (--kind 'PATTERN=comm')")
    if size := max((trace.world_size or 1 for trace in traces), default=1) - 1:
        doubts.append(f"the files are of a job of {size + 1} ranks")
    return "; ".join(doubts)


def reasons_for_bounds(
    views: Sequence[View], meetings: Sequence[Meeting], graph: Graph, error: float
) -> list[str]:
    """Why exposures are given as bounds; empty if they need not be."""
    reasons: list[str] = []
    if not meetings:
        return reasons
    if error > MAX_ERROR:
        reasons.append(
            f"the replay is up to {error:.1%} off the measured steps: delays of "
            f"{sum(graph.unexplained_ns.values()) / 1e6:.3g} ms are explained by nothing in the "
            "files (a busy GPU, work that was not recorded, waits without a record)"
        )
    if any(view.on_gpu and not view.has_sync_records for view in views):
        reasons.append(
            "waits between streams are inferred, as the files hold no record of them: record with "
            "torch.profiler._ExperimentalConfig(enable_cuda_sync_events=True)"
        )
    if any(not view.on_gpu for view in views):
        reasons.append(
            "gloo leaves no event for a wait: gaps that end with a collective are taken for it; "
            "and it shares its cores with compute, so that less to send may save more, or less"
        )
    if share := alone_share(meetings):
        which = (
            "of one rank alone,"
            if len(views) == 1
            else f"of {share:.0%} of the collectives only one rank is known (others were not "
            "given, not matched, or have no common clock):"
        )
        reasons.append(
            f"{which} waiting for others cannot be told from transfer: exposed holds both"
        )
    return reasons


def what_is_missing(
    traces: Sequence[Trace],
    views: Sequence[View],
    meetings: Sequence[Meeting],
    graph: Graph,
    reasons: Sequence[str],
) -> list[str]:
    """All that limits what the report says."""
    notes = [f"exposed is given with bounds: {reason}" for reason in reasons]
    if not meetings:
        doubt = doubt_about_none(traces)
        notes.append(
            f"no collective was found in these files, but there may have been some: {doubt}"
            if doubt
            else "there is no collective in these files: nothing is exposed"
        )
    if len(views) > 1 and _ranks_missing(views, meetings):
        notes.append(
            "not all ranks of all groups were given: a rank that is missing may be the last, so "
            "waiting is at least what is shown"
        )
    notes += _about_work(views, graph)
    if any(step.number is None for view in views for step in view.steps):
        notes.append("no ProfilerStep was recorded: the whole trace counts as one step")
    slowed = sorted({word for trace in traces for word in trace.slowed_by if word in SLOWS})
    if slowed:
        notes.append(
            f"recorded with {', '.join(slowed)}, which slows the CPU: compare with the time of a "
            "step without the profiler before believing that the CPU bounds it"
        )
    if any(meeting.first.group == "unknown" for meeting in meetings):
        notes.append("some collectives do not say their process group: listed as unknown")
    if meetings:
        notes.append("exposures of single collectives do not add up: hiding one may expose another")
    return notes


def _ranks_missing(views: Sequence[View], meetings: Sequence[Meeting]) -> bool:
    """Whether a group of any collective has a rank that was not given."""
    given = {view.rank for view in views}
    world = max((view.trace.world_size or 0 for view in views), default=0)
    firsts = [meeting.first for meeting in meetings]
    return any(
        not set(one.ranks) <= given or (one.group_size or len(one.ranks) or world) > len(given)
        for one in firsts
    )


def _about_work(views: Sequence[View], graph: Graph) -> list[str]:
    """What is odd about work on GPUs."""
    notes = []
    if graph.clamped:
        notes.append(
            f"{graph.clamped} kernels seem to start before their launch: taken as started with it"
        )
    if before := sum(len(view.left_over) for view in views):
        notes.append(
            f"{before} kernels and copies were launched before the recording began: they are of no "
            "step in it"
        )
    left_over = {(view.rank, row) for view in views for row in view.left_over.tolist()}
    unjoined = sum(
        int(view.launches[row]) < 0 and (view.rank, row) not in left_over
        for view in views
        for row in view.work.tolist()
    )
    if unjoined:
        notes.append(
            f"of {unjoined} kernels and copies no launch is known: they count to the step in which "
            "they ran"
        )
    return notes


def unknown_names(traces: Sequence[Trace]) -> tuple[tuple[str, int], ...]:
    """Names of unknown kind with their counts, most frequent first."""
    counts: Counter[str] = Counter()
    for trace in traces:
        rows = trace.events.of(Kind.UNKNOWN)
        found = np.unique(trace.events.label[rows], return_counts=True)
        for label, count in zip(found[0].tolist(), found[1].tolist(), strict=True):
            counts[trace.labels[label].name or trace.labels[label].category] += count
    return tuple(counts.most_common())

"""One step over all ranks as shapes: when each computes, transfers, waits, and what that costs.

The picture has a fixed number of cells from left to right, so that it does not grow with the trace:
a cell is as dark as the share of its time that is covered, and never blank if any of it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.analysis import Analysis
from taciturn.trace.occupation import Occupation
from taciturn.trace.report import StepReport
from taciturn.trace.timeline import Intervals, intersect, subtract, unite

__all__ = ["CELLS", "LEVELS", "Hint", "Layer", "Picture", "Row", "Run", "Strip", "draw", "paint"]

CELLS = 1000  # a cell is a pixel or two of a wide screen
LEVELS = 4  # shades between blank and covered; more cannot be told apart in a thin strip
MAX_RANKS = 32  # drawn: the page stays a page
MAX_HINTS = 40  # collectives of a rank that say what they are
MAX_TICKS = 5  # labels of the axis, which fit a narrow screen
_NICE = (1.0, 2.0, 5.0)


class Run(NamedTuple):
    """Cells side by side of one shade, from 1 to ``LEVELS``."""

    first: int
    width: int
    level: int


class Layer(NamedTuple):
    """Shapes of one meaning: ``kind`` is that of the legend."""

    kind: str
    runs: tuple[Run, ...]


class Hint(NamedTuple):
    """A collective: its cells, and what it is in words."""

    first: float
    width: float
    text: str


@dataclass(frozen=True)
class Strip:
    """A line of the picture. Later layers cover earlier ones."""

    name: str
    layers: tuple[Layer, ...]
    hints: tuple[Hint, ...] = ()


@dataclass(frozen=True)
class Row:
    """A rank."""

    rank: int
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Picture:
    """A step.

    Attributes:
        step: the one that took longest.
        rows: ranks, at most ``MAX_RANKS``.
        hidden_ranks: not drawn.
        start_ns: of the left edge, on the common clock.
        end_ns: of the right edge.
        ticks: cell and seconds from the left edge.
    """

    step: StepReport
    rows: tuple[Row, ...]
    hidden_ranks: int
    start_ns: int
    end_ns: int
    ticks: tuple[tuple[float, float], ...]


def paint(intervals: Intervals, start_ns: int, end_ns: int, cells: int = CELLS) -> tuple[Run, ...]:
    """The shades of cells of equal width from ``start_ns`` to ``end_ns``, blank ones left out.

    Law: a cell is blank exactly if nothing of it is covered, and of the darkest shade if all of it
    is (``test_trace_page.py``).
    """
    edges = np.linspace(0, max(end_ns - start_ns, 1), cells + 1)
    begin, end = intervals.start_ns - start_ns, intervals.end_ns - start_ns
    total = np.concatenate([[0], np.cumsum(end - begin)])
    place = np.searchsorted(begin, edges, side="right")
    before = np.maximum(place - 1, 0)
    part = np.zeros(len(edges))
    if len(intervals):
        part = np.where(place > 0, np.clip(edges - begin[before], 0, (end - begin)[before]), 0.0)
    covered = total[before] + part
    share = np.diff(covered) / np.diff(edges)
    # A share of 1 minus rounding is 1; next to nothing is not nothing.
    level = np.ceil(np.clip(share, 0, 1) * LEVELS - 1e-6).astype(np.int64)
    level = np.where(_touched(begin, end, edges), np.maximum(level, 1), 0)
    cuts = np.flatnonzero(np.diff(level)) + 1
    firsts, lasts = np.r_[0, cuts], np.r_[cuts, cells]
    return tuple(
        Run(int(a), int(b - a), int(level[a]))
        for a, b in zip(firsts, lasts, strict=True)
        if level[a]
    )


def _touched(
    begin: NDArray[np.int64], end: NDArray[np.int64], edges: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether any interval shares a point with each cell."""
    started = np.searchsorted(begin, edges[1:], side="left")
    ended = np.searchsorted(end, edges[:-1], side="right")
    touched: NDArray[np.bool_] = started > ended
    return touched


def draw(analysis: Analysis) -> Picture:
    """The step that took longest, over all ranks."""
    steps = analysis.report.steps
    index = max(range(len(steps)), key=lambda i: steps[i].completed_s)
    windows = [view.steps[index] for view in analysis.views]
    start = min([step.start_ns for step in windows] + [analysis.bounds_ns[index][0]])
    end = max([step.end_ns for step in windows] + [analysis.bounds_ns[index][1]])
    shown = _shown(analysis, start, end)
    rows = [_row(analysis, place, start, end, analysis.bounds_ns[index]) for place in shown]
    return Picture(
        step=steps[index],
        rows=tuple(rows),
        hidden_ranks=len(analysis.views) - len(rows),
        start_ns=start,
        end_ns=end,
        ticks=_ticks((end - start) / 1e9),
    )


def _shown(analysis: Analysis, start: int, end: int) -> list[int]:
    """Views to draw: those that the critical path runs on longest, then the lowest."""
    on_path = dict.fromkeys(range(len(analysis.views)), 0)
    for one in analysis.path:
        if one.view >= 0:
            on_path[one.view] += max(0, min(one.end_ns, end) - max(one.start_ns, start))
    return sorted(sorted(on_path, key=lambda view: -on_path[view])[:MAX_RANKS])


def _row(analysis: Analysis, place: int, start: int, end: int, bounds: tuple[int, int]) -> Row:
    """A rank's strips from ``start`` to ``end``, and of the path what lies in the step's bounds."""
    occupation = analysis.occupations[place]
    view = occupation.view

    def layer(kind: str, intervals: Intervals) -> Layer:
        return Layer(kind, paint(intervals.clip(start, end), start, end))

    strips = [Strip("compute", (layer("compute", occupation.compute),))]
    if view.on_gpu:
        strips.insert(0, Strip("CPU", (layer("launch", view.busy(view.main_lane)),)))
    waiting, moving, lone, hints = _communication(analysis, occupation, start, end)
    critical = _on_path(analysis, place, "communication").clip(*bounds)
    strips.append(
        Strip(
            "communication",
            (
                layer("waiting", waiting),
                layer("lone", lone),
                layer("alone", subtract(moving, occupation.compute)),
                layer("overlapped", intersect(moving, occupation.compute)),
                layer("critical", critical),
            ),
            hints,
        )
    )
    kinds = ("compute", "launch", "codec", "communication", "waiting", "idle")
    # The path runs on the rank that is waited for.
    shades = {"communication": "critical", "waiting": "late"}
    path = [
        layer(shades.get(kind, kind), _on_path(analysis, place, kind).clip(*bounds))
        for kind in kinds
    ]
    strips.append(Strip("critical path", tuple(path)))
    return Row(view.rank, tuple(strips))


def _on_path(analysis: Analysis, place: int, kind: str) -> Intervals:
    found = [one for one in analysis.path if one.view == place and one.kind == kind]
    return unite([one.start_ns for one in found], [one.end_ns for one in found])


def _communication(
    analysis: Analysis, occupation: Occupation, start: int, end: int
) -> tuple[Intervals, Intervals, Intervals, tuple[Hint, ...]]:
    """When a rank waits and transfers, what of one rank alone is either, and the longest of them.

    Two collectives at once, one waiting and one moving, count as moving.
    """
    waits: list[tuple[int, int]] = []
    moves: list[tuple[int, int]] = []
    lone: list[tuple[int, int]] = []
    said: list[tuple[int, Hint]] = []
    for meeting in analysis.meetings:
        last = max(one.start_ns for one in meeting.members)
        for one in meeting.members:
            if one.rank != occupation.view.rank or one.end_ns <= start or one.start_ns >= end:
                continue
            waited = max(0, min(last, one.end_ns) - one.start_ns)
            if len(meeting.members) == 1:
                lone.append((one.start_ns, one.end_ns))
                words = f"{_ms(one.end_ns - one.start_ns)}, waiting included"
            else:
                waits.append((one.start_ns, one.start_ns + waited))
                moves.append((one.start_ns + waited, one.end_ns))
                moved = one.end_ns - one.start_ns - waited
                words = f"waits {_ms(waited)}, moves {_ms(moved)}"
            size = "" if one.size_bytes is None else f" of {one.size_bytes} bytes"
            first = max(0.0, (one.start_ns - start) / (end - start) * CELLS)
            to = min(float(CELLS), (one.end_ns - start) / (end - start) * CELLS)
            # Not so narrow that nobody can point at it.
            width = max(to - first, 3.0)
            hint = Hint(round(first, 2), round(width, 2), f"{one.name}{size}: {words}")
            said.append((one.end_ns - one.start_ns, hint))
    longest = sorted(said, key=lambda pair: -pair[0])[:MAX_HINTS]
    moving = _united(moves)
    hints = tuple(hint for _, hint in sorted(longest, key=lambda pair: pair[1].first))
    return subtract(_united(waits), moving), moving, _united(lone), hints


def _united(spans: Sequence[tuple[int, int]]) -> Intervals:
    return unite([a for a, _ in spans], [b for _, b in spans])


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms"


def _ticks(length_s: float) -> tuple[tuple[float, float], ...]:
    """Round times, at most ``MAX_TICKS`` of them, none so far right that its label sticks out."""
    if length_s <= 0:
        return ((0.0, 0.0),)
    power = 10.0 ** np.floor(np.log10(length_s / MAX_TICKS))
    for nice in (*_NICE, 10.0):
        gap = float(nice * power)
        count = int(0.93 * length_s / gap) + 1
        if count <= MAX_TICKS:
            break
    return tuple((round(i * gap / length_s * CELLS, 2), i * gap) for i in range(count))

"""The answer as one self-contained HTML page: sentence, tables, and a picture of the worst step.

The page runs no script and a content policy forbids it to load anything: it works offline and tells
nobody that it was opened. Its size is bounded, whatever the trace's: the picture has a fixed number
of cells, and long tables end with how much more there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from taciturn.trace.analysis import Analysis
from taciturn.trace.picture import CELLS, LEVELS, Layer, Picture, draw
from taciturn.trace.report import (
    CollectiveRow,
    CriticalPath,
    Prediction,
    Report,
    StepReport,
    effect_text,
    size_text,
    title,
)
from taciturn.units import format_seconds

__all__ = ["html"]

MAX_STEPS = 200  # rows of each table; the JSON has all
MAX_COLLECTIVES = 100
MAX_RANKS = 200
MAX_NOTES = 60

KINDS = {
    "compute": "compute",
    "launch": "CPU issuing work",
    "codec": "encoding and decoding",
    "communication": "communication",
    "waiting": "waiting for the last rank",
    "idle": "idle, or nothing recorded",
}
"""Kinds of the critical path as people read them."""

LEGEND = {
    "launch": "CPU issuing work",
    "compute": "computing",
    "overlapped": "transfer beside compute",
    "alone": "transfer without compute",
    "critical": "communication on the critical path",
    "waiting": "waiting for the last rank",
    "late": "all others wait for what this rank does",
    "lone": "waiting or transfer: when other ranks came is not known",
    "codec": "encoding and decoding",
    "idle": "idle, or nothing recorded",
}
"""What the shades of the picture mean, in the order of the legend."""


class _Table(NamedTuple):
    """Texts; ``more`` is what was left out, in words, and the first ``left`` columns are words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: str = ""
    left: int = 1


class _Bar(NamedTuple):
    """A kind of the critical path: mean over steps, and in the step of the picture."""

    kind: str
    name: str
    percent: float
    mean: str
    share: str
    worst: str


def html(analysis: Analysis, report: Report | None = None) -> str:
    """The page.

    Args:
        analysis: of the traces.
        report: with predictions; by default the analysis's own, without.
    """
    report = report or analysis.report
    picture = draw(analysis)
    used = [
        kind
        for kind in LEGEND
        if any(
            layer.kind == kind and layer.runs
            for row in picture.rows
            for strip in row.strips
            for layer in strip.layers
        )
    ]
    tables = [_steps(report.steps, report.mean), _collectives(report.mean.collectives)]
    tables += [_ranks(report.mean), _predictions(report.predictions)]
    return _template().render(
        title=title(report),
        report=report,
        picture=picture,
        cells=CELLS,
        levels=LEVELS,
        done=format_seconds(picture.step.completed_s),
        length=format_seconds((picture.end_ns - picture.start_ns) / 1e9),
        named="the whole trace" if picture.step.step is None else f"step {picture.step.step}",
        ticks=[
            (100 * cell / CELLS, "0" if not time else format_seconds(time))
            for cell, time in picture.ticks
        ],
        legend=[(kind, LEGEND[kind]) for kind in used],
        bars=_bars(report.mean.critical_path, picture),
        tables=[table for table in tables if table.rows],
        notes=[*report.notes, *_asked(report.predictions)][:MAX_NOTES],
        unknown=report.unknown[:MAX_NOTES],
    )


def _text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "0" if abs(seconds) < 5e-10 else format_seconds(seconds)


def _bounded(low: float, value: float, high: float) -> str:
    if low == high:
        return _text(value)
    return f"{_text(value)} ({_text(low)} to {_text(high)})"


def _more(all_: int, most: int) -> str:
    return f"{all_ - most} more are in the JSON." if all_ > most else ""


def _steps(steps: Sequence[StepReport], mean: StepReport) -> _Table:
    head = ["step", "window on the CPU", "done in", "replay error", "communication busy"]
    head += ["not overlapped", "overlap", "exposed"]

    def row(name: str, one: StepReport, worst: str = "") -> tuple[str, ...]:
        return (
            name,
            _text(one.measured_s),
            _text(one.completed_s),
            f"{worst}{one.replay_error:.1%}",
            _text(one.busy_s),
            _text(one.not_overlapped_s),
            "n/a" if one.overlap is None else f"{one.overlap:.0%}",
            _bounded(one.exposed_low_s, one.exposed_s, one.exposed_high_s),
        )

    shown = steps[:MAX_STEPS]
    rows = [row("whole" if one.step is None else str(one.step), one) for one in shown]
    if len(steps) > 1:
        rows.append(row("mean", mean, "worst "))
    return _Table("Steps", head, rows, _more(len(steps), MAX_STEPS))


def _collectives(all_: Sequence[CollectiveRow]) -> _Table:
    head = ["collective", "group", "count", "size", "busy", "not overlapped", "waiting"]
    head += ["transfer", "exposed"]
    rows = sorted(all_, key=lambda one: (-one.exposed_s, -one.busy_s))
    return _Table(
        "Collectives, mean step and rank",
        head,
        [
            (
                one.name,
                one.group,
                str(one.count),
                size_text(one.bytes),
                _text(one.busy_s),
                _text(one.not_overlapped_s),
                _text(one.waiting_s),
                _text(one.transfer_s),
                _bounded(one.exposed_low_s, one.exposed_s, one.exposed_high_s),
            )
            for one in rows[:MAX_COLLECTIVES]
        ],
        _more(len(rows), MAX_COLLECTIVES),
        left=2,
    )


def _ranks(mean: StepReport) -> _Table:
    head = ("rank", "window on the CPU", "compute", "communication busy", "waiting", "late")
    rows = [
        (
            str(one.rank),
            _text(one.measured_s),
            _text(one.compute_s),
            _text(one.busy_s),
            _text(one.waiting_s),
            _text(one.late_s),
        )
        for one in mean.ranks[:MAX_RANKS]
    ]
    shown = rows if len(mean.ranks) > 1 else []
    return _Table("Ranks, mean step", head, shown, _more(len(mean.ranks), MAX_RANKS))


def _predictions(all_: Sequence[Prediction]) -> _Table:
    head = ("what if", "step now", "then", "at least", "at most", "effect")
    rows = [
        (
            one.what,
            _text(one.base_s),
            _text(one.step_s),
            _text(one.low_s),
            _text(one.high_s),
            effect_text(one),
        )
        for one in all_
    ]
    return _Table("What if", head, rows)


def _asked(all_: Sequence[Prediction]) -> list[str]:
    return list(dict.fromkeys(note for one in all_ for note in one.notes))


def _bars(mean: CriticalPath, picture: Picture) -> list[_Bar]:
    """Kinds of the critical path that take any time, the longest first."""
    times: dict[str, float] = {kind: getattr(mean, f"{kind}_s") for kind in KINDS}
    total = sum(times.values()) or 1.0
    longest = max(times.values()) or 1.0
    worst = picture.step.critical_path
    return [
        _Bar(
            kind,
            KINDS[kind],
            round(100 * seconds / longest, 2),
            _text(seconds),
            f"{seconds / total:.1%}",
            _text(getattr(worst, f"{kind}_s")),
        )
        for kind, seconds in sorted(times.items(), key=lambda item: -item[1])
        if seconds > 0 or getattr(worst, f"{kind}_s") > 0
    ]


def _shapes(layer: Layer) -> list[tuple[float, str]]:
    """For each shade its opacity, and all its cells as one SVG path, one unit high."""
    paths: dict[int, list[str]] = {}
    for first, width, level in layer.runs:
        paths.setdefault(level, []).append(f"M{first} 0h{width}v1h-{width}z")
    return [(level / LEVELS, "".join(parts)) for level, parts in sorted(paths.items())]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("taciturn.trace", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["shapes"] = _shapes
    return environment.get_template("page.html.jinja")

"""The report as text for people, in tables that fit a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taciturn.trace.report import CollectiveRow, Report, StepReport, size_text, title
from taciturn.units import format_seconds

__all__ = ["render"]

MAX_STEPS = 12  # rows of each table; all are in the JSON
MAX_COLLECTIVES = 16
MAX_RANKS = 16
MAX_UNKNOWN = 8


def render(report: Report) -> RenderableType:
    """Everything, one table below the other; 80 columns are enough."""
    parts: list[RenderableType] = [
        Text(title(report), style="bold"),
        Text(report.diagnosis),
        Text(),
        _steps(report),
        Text(),
        _path(report.mean),
        Text(),
    ]
    if report.mean.collectives:
        parts += [_collectives(report), Text()]
    if len(report.ranks) > 1:
        parts += [_ranks(report), Text()]
    if report.predictions:
        parts += [_predictions(report), Text()]
    parts += [Text(line, style="dim") for line in _notes(report)]
    return Group(*parts)


def _table(title: str, *headers: str, left: int = 1) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < left else "right", no_wrap=True)
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return "0" if abs(value) < 5e-10 else format_seconds(value).replace(" ", "\u00a0")


def _range(low: float, value: float, high: float) -> str:
    if low == high:
        return _seconds(value)
    return f"{_seconds(value)} ({_seconds(low)}..{_seconds(high)})"


def _steps(report: Report) -> Table:
    table = _table(
        "Steps", "step", "window", "done in", "replay\nerror", "busy", "overlap", "exposed"
    )

    def add(name: str, step: StepReport) -> None:
        table.add_row(
            name,
            _seconds(step.measured_s),
            _seconds(step.completed_s),
            f"{step.replay_error:.1%}",
            _seconds(step.busy_s),
            "n/a" if step.overlap is None else f"{step.overlap:.0%}",
            _range(step.exposed_low_s, step.exposed_s, step.exposed_high_s),
        )

    for step in report.steps[:MAX_STEPS]:
        add("whole" if step.step is None else str(step.step), step)
    if len(report.steps) > MAX_STEPS:
        table.add_row(f"({len(report.steps) - MAX_STEPS} more)")
    if len(report.steps) > 1:
        add("mean", report.mean)
    return table


def _path(mean: StepReport) -> Table:
    table = _table("Critical path, mean step", "kind", "time", "share")
    parts = vars(mean.critical_path)
    total = sum(parts.values()) or 1.0
    words = {"launch_s": "CPU issuing work"}
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            label = words.get(name, name.removesuffix("_s"))
            table.add_row(label, _seconds(seconds), f"{seconds / total:.1%}")
    return table


def _collectives(report: Report) -> Table:
    groups = {row.group for row in report.mean.collectives}
    headers = ["collective", "count", "size", "busy", "alone", "waiting", "transfer", "exposed"]
    title = "Collectives, mean step and rank"
    if len(groups) == 1:
        title += f"; group {next(iter(groups))}"
    else:
        headers.insert(1, "group")
    table = _table(title, *headers, left=len(headers) - 7)
    rows = sorted(report.mean.collectives, key=lambda row: (-row.exposed_s, -row.busy_s))
    for row in rows[:MAX_COLLECTIVES]:
        cells = _cells(row)
        table.add_row(*(cells[:1] + cells[2:] if len(groups) == 1 else cells))
    if len(rows) > MAX_COLLECTIVES:
        table.add_row(f"({len(rows) - MAX_COLLECTIVES} more)")
    return table


def _cells(row: CollectiveRow) -> tuple[str, ...]:
    return (
        row.name,
        row.group,
        str(row.count),
        size_text(row.bytes),
        _seconds(row.busy_s),
        _seconds(row.not_overlapped_s),
        _seconds(row.waiting_s),
        _seconds(row.transfer_s),
        _seconds(row.exposed_s),
    )


def _ranks(report: Report) -> Table:
    table = _table("Ranks, mean step", "rank", "window", "compute", "busy", "waiting", "late")
    for row in report.mean.ranks[:MAX_RANKS]:
        table.add_row(
            str(row.rank),
            _seconds(row.measured_s),
            _seconds(row.compute_s),
            _seconds(row.busy_s),
            _seconds(row.waiting_s),
            _seconds(row.late_s),
        )
    if len(report.mean.ranks) > MAX_RANKS:
        table.add_row(f"({len(report.mean.ranks) - MAX_RANKS} more)")
    return table


def _predictions(report: Report) -> Table:
    table = _table("What if", "change", "step now", "then", "at least", "at most", "saves")
    for one in report.predictions:
        saves = 1 - one.step_s / one.base_s if one.base_s > 0 else 0.0
        table.add_row(
            one.what,
            _seconds(one.base_s),
            _seconds(one.step_s),
            _seconds(one.low_s),
            _seconds(one.high_s),
            f"{saves:.1%}",
        )
    return table


def _notes(report: Report) -> list[str]:
    lines = []
    if report.unknown:
        shown = ", ".join(f"{name} ({count})" for name, count in report.unknown[:MAX_UNKNOWN])
        more = len(report.unknown) - MAX_UNKNOWN
        lines.append(
            f"Of unknown kind: {shown}{f' and {more} more names' if more > 0 else ''}; say what "
            "one is with --kind 'PATTERN=comm'."
        )
    lines += [f"Note: {note}." for note in report.notes]
    asked = {note: None for one in report.predictions for note in one.notes}
    lines += [f"What if: {note}." for note in asked]
    return lines

"""The report as text for people, in tables that fit a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from taciturn.trace.report import CollectiveRow, Report, StepReport, effect_text, size_text, title
from taciturn.units import format_seconds

__all__ = ["render"]

MAX_STEPS = 12  # rows of each table; all are in the JSON
MAX_COLLECTIVES = 16
MAX_RANKS = 16
MAX_UNKNOWN = 8
GAP = 2  # between columns

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def render(report: Report) -> RenderableType:
    """Everything, one table below the other, at any width."""
    parts: list[RenderableType] = [
        Text(_plain(title(report)), style="bold"),
        Text(_plain(report.diagnosis)),
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
    parts += [Text(_plain(line), style="dim") for line in _notes(report)]
    return Group(*parts)


class _Table:
    """Rows of texts; where they are wider than the console, tables of some columns each.

    The first ``keys`` columns stand in each of them. The first ``left`` are words, and break where
    they are too wide; no other cell is ever cut.
    """

    def __init__(self, title: str, *headers: str, left: int = 1, keys: int = 1) -> None:
        self.title, self.left, self.keys = _plain(title), left, keys
        self.columns = [[header] for header in headers]

    def add_row(self, *cells: str) -> None:
        """Add a row; columns that it does not reach stay empty."""
        for place, column in enumerate(self.columns):
            column.append(_plain(cells[place]) if place < len(cells) else "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        widths = [
            max(cell_len(line) for cell in column for line in cell.split("\n"))
            for column in self.columns
        ]
        words = min(sum(widths[: self.left]) + GAP * self.left, options.max_width // 3)
        used = words + sum(widths[self.left : self.keys]) + GAP * (self.keys - self.left)
        title = self.title
        for number, part in enumerate(_parts(widths[self.keys :], options.max_width - used)):
            if number:
                yield Text()
            yield self._part(title, [*range(self.keys), *(self.keys + one for one in part)])
            title = ""

    def _part(self, title: str, places: Sequence[int]) -> Table:
        table = Table(
            title=title or None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        for place in places:
            word = place < self.left
            table.add_column(
                self.columns[place][0],
                justify="left" if word else "right",
                no_wrap=not word,
                overflow="fold",
            )
        for row in zip(*(self.columns[place][1:] for place in places), strict=True):
            table.add_row(*row)
        return table


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns side by side, as many as fit each time, and never none."""
    parts: list[list[int]] = [[]]
    used = 0
    for place, width in enumerate(widths):
        if parts[-1] and used + width > room:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += width + GAP
    return parts


def _plain(text: str) -> str:
    """Text without what would steer the terminal: names come from files."""
    return _CONTROL.sub("\ufffd", text)


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return "0" if abs(value) < 5e-10 else format_seconds(value).replace(" ", "\u00a0")


def _range(low: float, value: float, high: float) -> str:
    if low == high:
        return _seconds(value)
    return f"{_seconds(value)} ({_seconds(low)}..{_seconds(high)})"


def _steps(report: Report) -> _Table:
    table = _Table(
        "Steps", "step", "window", "done in", "replay\nerror", "busy", "overlap", "exposed"
    )

    def add(name: str, step: StepReport, worst: str = "") -> None:
        table.add_row(
            name,
            _seconds(step.measured_s),
            _seconds(step.completed_s),
            worst + f"{step.replay_error:.1%}",
            _seconds(step.busy_s),
            "n/a" if step.overlap is None else f"{step.overlap:.0%}",
            _range(step.exposed_low_s, step.exposed_s, step.exposed_high_s),
        )

    for step in report.steps[:MAX_STEPS]:
        add("whole" if step.step is None else str(step.step), step)
    if len(report.steps) > MAX_STEPS:
        table.add_row(f"({len(report.steps) - MAX_STEPS} more)")
    if len(report.steps) > 1:
        add("mean", report.mean, "\u2264")
    return table


def _path(mean: StepReport) -> _Table:
    table = _Table("Critical path, mean step", "kind", "time", "share")
    parts = vars(mean.critical_path)
    total = sum(parts.values()) or 1.0
    words = {"launch_s": "CPU issuing work"}
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds > 0:
            label = words.get(name, name.removesuffix("_s"))
            table.add_row(label, _seconds(seconds), f"{seconds / total:.1%}")
    return table


def _collectives(report: Report) -> _Table:
    groups = {row.group for row in report.mean.collectives}
    headers = [
        "collective",
        "count",
        "size",
        "busy",
        "not over-\nlapped",
        "waiting",
        "transfer",
        "exposed",
    ]
    title = "Collectives, mean step and rank"
    if len(groups) == 1:
        title += f"; group {next(iter(groups))}"
    else:
        headers.insert(1, "group")
    table = _Table(title, *headers, left=len(headers) - 7, keys=len(headers) - 5)
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


def _ranks(report: Report) -> _Table:
    table = _Table("Ranks, mean step", "rank", "window", "compute", "busy", "waiting", "late")
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


def _predictions(report: Report) -> _Table:
    table = _Table("What if", "change", "step now", "then", "at least", "at most", "effect")
    for one in report.predictions:
        table.add_row(
            one.what,
            _seconds(one.base_s),
            _seconds(one.step_s),
            _seconds(one.low_s),
            _seconds(one.high_s),
            effect_text(one),
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

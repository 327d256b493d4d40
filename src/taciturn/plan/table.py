"""A plan as text for people, in a table that fits a terminal."""

from __future__ import annotations

import re

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taciturn.plan.candidates import MOST_LOSS, QUALITIES
from taciturn.plan.choice import Plan, rate_text
from taciturn.plan.prediction import Prediction
from taciturn.plan.quality import Losses
from taciturn.units import format_seconds

__all__ = ["render"]

NAME_WIDTH = 21
"""Columns of a method's name, so that the table fits a terminal of 80."""


def render(plan: Plan) -> RenderableType:
    """The recommendation, the table, and what a reader must know."""
    compute = (
        f"{format_seconds(plan.compute.step_s)} of compute a step"
        if plan.compute.step_s
        else "compute not known"
    )
    head = (
        f"{plan.model}, {plan.elements:,} parameters; {plan.ranks} ranks at "
        f"{rate_text(plan.rate_bits_per_s)}; {compute}, gradients {plan.compute.source}"
    )
    return Group(
        Text(head, style="bold"),
        Text(),
        Text(plan.recommendation.sentence),
        Text(),
        _table(plan),
        Text(),
        *(Text(line, style="dim") for line in _lines(plan)),
    )


def _table(plan: Plan) -> Table:
    table = Table(
        title=f"Predicted, fastest first: what --quality {plan.quality} allows, then the others",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    headers = ("method", "step", "+-", "exposed", "codec", "sent", "memory", "loss")
    for place, header in enumerate(headers):
        table.add_column(
            header,
            justify="right" if place else "left",
            no_wrap=place > 0,
            overflow="fold",
        )
    rank = QUALITIES.index(plan.quality)

    def below(row: Prediction) -> bool:
        return QUALITIES.index(row.quality) > rank

    def others(row: Prediction) -> bool:
        return below(row) or row.local_steps > 1 or not row.known

    rows = sorted(plan.predictions, key=others)  # each still fastest first
    for place, row in enumerate(rows):
        if place and others(row) > others(rows[place - 1]):
            table.add_section()
        chosen = row.name == plan.recommendation.name
        table.add_row(
            _name(row, chosen, below(row)),
            _seconds(row.step_s.value),
            f"{row.half_s / row.step_s.value:.0%}" if row.step_s.value else "0%",
            _seconds(row.exposed_s),
            _seconds(row.codec_s),
            "?" if row.sent_bytes is None else _bytes(row.sent_bytes),
            _bytes(row.memory_bytes),
            _loss(plan.losses.get(row.name)),
            style="bold" if chosen else "dim" if others(row) else "",
        )
    return table


def _name(row: Prediction, chosen: bool, below: bool) -> str:
    """Return the name with the row's warnings; the lines below the table say what they mean."""
    said = []
    if not row.known:
        said.append("unmeasured")
    elif row.extrapolated:
        said.append("extrapolated")
    if below:
        said.append(f"needs {row.quality}")
    if row.local_steps > 1:
        said.append("other algorithm")
    marks = f"\n({', '.join(said)})" if said else ""
    return _broken(f"{'> ' if chosen else ''}{row.name}") + marks


def _broken(name: str) -> str:
    """Return a method in lines of some width, broken behind commas."""
    lines = [""]
    for part in re.split(r"(?<=,)", name):
        if lines[-1] and len(lines[-1]) + len(part) > NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _loss(losses: Losses | None) -> str:
    if losses is None:
        return "?"
    return f"{losses.ratio - 1:+.1%}{'!' if losses.ratio > MOST_LOSS else ''}"


def _lines(plan: Plan) -> list[str]:
    words = (
        "step: of the slowest rank, +- by how much it may be off; exposed: what exchanging adds to "
        "compute; codec: coding, in part hidden; sent: by each rank, of gloo's own a ring's "
        "bytes, ? where another backend does not say; memory: beside DDP's own."
    )
    lines = [words]
    sources = sorted({losses.source for losses in plan.losses.values()})
    lines += [f"loss: held-out, {source}." for source in sources]
    if any(losses.ratio > MOST_LOSS for losses in plan.losses.values()):
        lines.append(f"! a loss more than {MOST_LOSS - 1:.0%} above; try it on your model first.")
    reasons = dict.fromkeys(note for row in plan.predictions for note in row.notes)
    if reasons:
        lines.append(f"extrapolated: {'; '.join(reasons)}.")
    if any(row.local_steps > 1 for row in plan.predictions):
        lines.append(
            "other algorithm: ranks take local steps (docs/local-updates.md); seconds are per "
            "step, spread over the steps between exchanges, and never recommended here."
        )
    lines += [f"{name} is left out: {reason}." for name, reason in plan.left_out]
    return [*lines, *plan.notes]


def _seconds(value: float) -> str:
    return "0" if abs(value) < 5e-7 else format_seconds(value).replace(" ", "\u00a0")


def _bytes(size_bytes: int) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g}\u00a0{unit}"
    return f"{size_bytes}\u00a0B" if size_bytes else "0"

"""An outcome as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taciturn.compare.methods import AUTO
from taciturn.compare.outcome import Outcome, Regime
from taciturn.compare.verdict import NOT_SHOWN, Row
from taciturn.units import format_seconds

__all__ = ["heading", "render", "sentence", "shown_name"]


def shown_name(method: str, stands_for: str | None) -> str:
    """What was run; of ``auto`` what it stands for in parentheses."""
    if stands_for is None:
        return method
    return f"{method} ({stands_for})" if method.partition(":")[0] == AUTO else stands_for


def sentence(row: Row, stands_for: Mapping[str, str]) -> str:
    """The verdict in words."""
    name = shown_name(row.method, stands_for.get(row.method))
    baseline = shown_name(row.baseline, stands_for.get(row.baseline))
    if row.verdict == NOT_SHOWN:
        return f"at {row.regime} {name}: not shown. {row.why}"
    assert row.time_ratio is not None
    assert row.time_ratio_low is not None
    assert row.time_ratio_high is not None
    return (
        f"at {row.regime} {name} reaches the target in {row.time_ratio:.2f} x the time of the best "
        f"baseline ({baseline}), 95 % {row.time_ratio_low:.2f}-{row.time_ratio_high:.2f}, "
        f"{row.reached} of {row.runs} runs"
    )


def render(outcome: Outcome) -> RenderableType:
    """Tables, one for each regime, and below them the verdicts."""
    return Group(*_parts(outcome))


def _parts(outcome: Outcome) -> Iterator[RenderableType]:
    e = outcome.experiment
    yield Text(
        f"{outcome.about['task']}, {e.ranks} ranks, {e.steps} steps, {e.mode}; target "
        f"{outcome.about['metric']} <= {outcome.target:.4g}, fixed by the tuned baseline"
    )
    for regime in outcome.regimes:
        yield _table(regime)
        for row in regime.rows:
            yield Text(sentence(row, regime.stands_for))
            for text in (*row.broken[1:], *row.notes):
                yield Text(f"  {text}")
        for text in regime.notes:
            yield Text(text)


def heading(regime: Regime) -> str:
    """The regime's name, what the probes found there, and how far it moved."""
    rate = "" if regime.rate is None else f", {regime.rate.bits_per_s / 1e6:.0f} Mbit/s"
    drift = "" if regime.drift is None else f", drift {regime.drift:+.1%}"
    return f"{regime.name}{rate}{drift}"


def _table(regime: Regime) -> Table:
    table = Table(title=heading(regime), title_justify="left", box=None, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=22)
    for name in ("step", "exposed", "time ratio", "95 %", "reached", "final"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {row.method: row for row in regime.rows}
    for name in regime.settings:
        share = regime.shares.get(name)
        times = ["-", "-"] if share is None else [share.step_s, share.exposed_s]
        cells = [format_seconds(t) if isinstance(t, float) else t for t in times]
        table.add_row(
            shown_name(name, regime.stands_for.get(name)), *cells, *_verdict_cells(rows.get(name))
        )
    return table


def _verdict_cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", "", ""]
    ratio = "-" if row.time_ratio is None else f"{row.time_ratio:.2f}"
    interval = "-"
    if row.time_ratio_low is not None and row.time_ratio_high is not None:
        interval = f"{row.time_ratio_low:.2f}-{row.time_ratio_high:.2f}"
    final = "-" if row.final_quality_ratio is None else f"{row.final_quality_ratio:.3f}"
    return [ratio, interval, f"{row.reached}/{row.runs}", final]

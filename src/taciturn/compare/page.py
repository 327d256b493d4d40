"""An outcome as one self-contained HTML page. Every number in a figure is also in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from taciturn.compare import page_figures as figures
from taciturn.compare.crossover import crossovers
from taciturn.compare.outcome import Outcome, Regime
from taciturn.compare.page_tables import tables
from taciturn.compare.table import heading, sentence
from taciturn.compare.verdict import NOT_SHOWN
from taciturn.pages import render_page
from taciturn.plan.choice import rate_text

__all__ = ["html"]

SMALL_PRINT = (
    "Wall-clock times are of ranks on this machine and networks that were emulated where a rate is "
    "named. Ranks that share cores overstate what coding costs, and understate what overlaps. "
    "In the mode composed a method's losses are measured once for each seed, as they do not "
    "depend on the network, and its steps are timed in each network; in the mode direct every "
    "network is run in full. Not shown means: these runs do not show it."
)


def html(outcome: Outcome, rerun: str) -> str:
    """The page.

    Args:
        outcome: what the records say.
        rerun: the command that does the experiment anew.
    """
    e = outcome.experiment
    styles = figures.styles_of(e)
    with_runs = [r for r in outcome.regimes if any(r.runs.values())]
    ratios = [figures.ratios(r, styles) for r in with_runs if r.rows]
    losses = list(figures.losses(outcome, with_runs, styles))
    bars = [figures.bars(r) for r in outcome.regimes if r.shares]
    foretold = figures.foretold(outcome, styles)
    residuals = figures.residuals(with_runs[:1], styles, outcome.about["global_batch"])
    return render_page(
        "taciturn.compare",
        "page.html.jinja",
        [*ratios, *losses, *bars, *foretold, *residuals],
        title=(
            f"{outcome.about['task']}: {len(e.methods)} methods against tuned DDP, {e.ranks} ranks"
        ),
        lead=(
            f"{e.steps} steps of {outcome.about['global_batch']} examples, {e.seeds} fresh seeds, "
            f"mode {e.mode}. The target, {outcome.about['metric']} <= {outcome.target:.4g}, was "
            "fixed by the tuned baseline on seeds of its own."
        ),
        regimes=[_regime(r) for r in outcome.regimes],
        key=[(s.name, s.color, s.glyph) for s in styles.values()],
        ratios=ratios,
        crossovers=_crossovers(outcome),
        losses=losses,
        parts=figures.PARTS,
        bars=bars,
        foretold=foretold,
        residuals=residuals,
        tables=[t for t in tables(outcome) if t.rows],
        about=_about(outcome.about),
        rerun=rerun,
        experiment=e.to_toml(),
        small_print=SMALL_PRINT,
    )


def _regime(regime: Regime) -> dict[str, Any]:
    """Return what the template says of a regime in words."""
    findings = [
        {
            "text": sentence(row, regime.stands_for),
            "verdict": "none" if row.verdict == NOT_SHOWN else row.verdict,
            "notes": [*row.broken[1:], *row.notes],
        }
        for row in regime.rows
    ]
    return {
        "heading": f"At {heading(regime)}",
        "findings": findings,
        "warnings": [
            *(f"Broken: {text}." for text in regime.broken),
            *(f"{text[:1].upper()}{text[1:]}." for text in regime.notes),
        ],
    }


def _crossovers(outcome: Outcome) -> Iterator[str]:
    rows = [row for regime in outcome.regimes for row in regime.rows]
    rates = {r.name: r.rate.bits_per_s for r in outcome.regimes if r.rate is not None}
    for one in crossovers(rows, rates):
        if one.low is None and one.high is None:
            continue  # nothing is known of where it is
        low = "below the slowest network" if one.low is None else rate_text(one.low)
        high = "beyond the fastest network" if one.high is None else rate_text(one.high)
        yield (
            f"{one.method} takes as long as the best baseline at about {rate_text(one.bits_per_s)} "
            f"(95 %: {low} to {high}), interpolated between the networks that were measured."
        )


def _about(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the records were made with, as far as a line holds it."""
    plain = {k: v for k, v in about.items() if k not in ("settings", "facts", "began_s")}
    return [(key, str(value)) for key, value in {**plain, **about["facts"]}.items() if value != ""]

"""The tables of a comparison's page, each from an outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from taciturn.bench.table import error_text, mib_text, seconds_text
from taciturn.compare.outcome import Outcome, Share
from taciturn.compare.rules import rules_kept
from taciturn.compare.verdict import crossing

__all__ = ["Table", "tables"]


class Table(NamedTuple):
    """Texts; the first ``left`` columns are words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    wrap: bool = False
    note: str = ""


def tables(outcome: Outcome) -> Iterator[Table]:
    """All of them; one may have no rows."""
    yield _verdicts(outcome)
    yield _whole_runs(outcome)
    yield _steps(outcome)
    yield _replicas(outcome)
    yield _rules(outcome)
    yield _settings(outcome)
    yield _runs(outcome)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None else f"{low:.3f} to {_number(high)}"


def _verdicts(outcome: Outcome) -> Table:
    head = ["network", "method", "run as", "verdict", "time ratio", "95 %", "P(faster)", "reached"]
    head += [
        "baseline reached",
        "baseline",
        "looser target",
        "stricter target",
        "examples",
        "final",
        "at most",
    ]
    head += ["foretold"]
    rows = []
    for regime in outcome.regimes:
        others = zip(regime.rows, regime.looser, regime.stricter, strict=True)
        for row, looser, stricter in others:
            rows.append(
                (
                    regime.name,
                    row.method,
                    regime.stands_for.get(row.method, row.method),
                    row.verdict,
                    _number(row.time_ratio),
                    _interval(row.time_ratio_low, row.time_ratio_high),
                    _number(row.p_faster, 2),
                    f"{row.reached} of {row.runs}",
                    str(row.baseline_reached),
                    regime.stands_for.get(row.baseline, row.baseline),
                    _number(looser.time_ratio),
                    _number(stricter.time_ratio),
                    _number(row.examples_ratio),
                    _number(row.final_quality_ratio),
                    _number(row.final_quality_high),
                    _number(regime.predicted_ratio(row)),
                )
            )
    return Table(
        "Verdicts in numbers",
        head,
        rows,
        4,
        note=f"Targets: {outcome.looser_target:.4g} looser, {outcome.target:.4g}, "
        f"{outcome.stricter_target:.4g} stricter. Ratios are to the best baseline in the same "
        "network; of final values, above 1 is worse, and the next column is the end of the "
        "one-sided 95 % interval.",
    )


def _whole_runs(outcome: Outcome) -> Table:
    head = ["network", "method", "whole run", "95 %", "to the target, evaluations on the clock"]
    rows = [
        (
            regime.name,
            row.method,
            _number(row.run_ratio),
            _interval(row.run_ratio_low, row.run_ratio_high),
            _number(row.evaluated_ratio),
        )
        for regime in outcome.regimes
        for row in regime.rows
    ]
    return Table(
        "Other clocks",
        head,
        rows,
        2,
        note="Seconds over the best baseline's: of a whole run, which is of as many steps, and to "
        "the target with all evaluations, and what makes one model of the replicas for each, on "
        "the clock.",
    )


def _steps(outcome: Outcome) -> Table:
    head = ["network", "method", "step", "computing", "exposed", "coding", "waiting", "sent"]
    head += ["held memory", "foretold"]
    rows = [
        (
            regime.name,
            name,
            seconds_text(share.step_s),
            seconds_text(share.compute_s),
            seconds_text(share.exposed_s),
            *_told(share),
            mib_text(share.sent_bytes),
            mib_text(share.state_bytes),
            seconds_text(share.predicted_s),
        )
        for regime in outcome.regimes
        for name, share in regime.shares.items()
    ]
    return Table("Steps", head, rows, 2, note="Means over seeds, of the slowest rank.")


def _told(share: Share) -> tuple[str, str]:
    """Seconds in coding and waiting; of the backend's own exchange nothing is told."""
    if not share.codec_s and not share.waiting_s:
        return "-", "-"
    return seconds_text(share.codec_s), seconds_text(share.waiting_s)


def _replicas(outcome: Outcome) -> Table:
    head = ["network", "method", "replica error", "mean error", "spread", "spread at the end"]
    head += ["one replica", "averaged weights", "steps not finite", "most held back"]
    rows = []
    for regime in outcome.regimes:
        verdicts = {row.method: row for row in regime.rows}
        for name, runs in regime.runs.items():
            errors, row = regime.errors.get(name, {}), verdicts.get(name)
            alive = [run for run in runs if run.failure is None]
            spreads = [r.replica_spread for r in alive if r.replica_spread is not None]
            rows.append(
                (
                    regime.name,
                    name,
                    error_text(errors.get("replica_error")),
                    error_text(errors.get("mean_error")),
                    error_text(errors.get("spread")),
                    error_text(max(spreads, default=None)),
                    _number(None if row is None else row.single_replica_ratio),
                    _number(None if row is None else row.averaged_ratio),
                    str(sum(r.nonfinite_steps for r in alive)),
                    _number(max((r.residual_growth for r in alive), default=None), 2),
                )
            )
    return Table(
        "Replicas and averages",
        head,
        rows,
        2,
        note="Errors are of one average of the task's gradients, relative to the true one: of a "
        "replica, of the mean of all replicas, and between replicas. The spread at the end is of "
        "the weights. Final values of one replica by itself, and of the weights averaged over the "
        "last tenth of the steps, are over the baseline's. The residual is over the greatest "
        "gradient.",
    )


def _rules(outcome: Outcome) -> Table:
    rows = [
        (f"{rule.number}. {rule.text}", rule.state, "; ".join(rule.details) or "-")
        for rule in rules_kept(outcome)
    ]
    return Table("Rules of evidence", ["rule", "", "where not"], rows, 3, wrap=True)


def _settings(outcome: Outcome) -> Table:
    rows = []
    for regime in outcome.regimes:
        for name, setting in regime.settings.items():
            line = (
                name,
                setting.method,
                f"{setting.learning_rate:.3g}",
                str(setting.trials),
                _number(setting.value, 4),
            )
            if line not in rows:
                rows.append(line)
    head = ["method", "tuned", "learning rate", "tuning runs", "best final value"]
    return Table("Settings", head, rows, 2)


def _runs(outcome: Outcome) -> Table:
    head = ["network", "method", "seed", "reached after", "examples", "final", "best", "failure"]
    rows = []
    for regime in outcome.regimes:
        for name, runs in regime.runs.items():
            for run in runs:
                at = crossing(run.points, outcome.target)
                rows.append(
                    (
                        regime.name,
                        name,
                        str(run.seed),
                        "-" if at is None else seconds_text(at.seconds),
                        "-" if at is None else str(at.examples),
                        _number(run.final, 4),
                        _number(run.best, 4),
                        run.failure or "-",
                    )
                )
    return Table("Runs", head, rows, 2)

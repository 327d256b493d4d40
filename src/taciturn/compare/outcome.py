"""All that the records of an experiment say, regime by regime; no measuring, no drawing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taciturn.compare.compose import runs_of, times_of
from taciturn.compare.experiment import Contender, Experiment
from taciturn.compare.jobs import (
    Setting,
    best_setting,
    compute_job,
    errors_job,
    plan_job,
    probe_job,
    standing_for,
    target_value,
    timed_method,
)
from taciturn.compare.records import MissingRecordError, Records
from taciturn.compare.verdict import Row, Run, judge_runs
from taciturn.link import Link

__all__ = ["MOST_DRIFT", "Outcome", "Rate", "Regime", "Share", "drift_of", "outcome_of"]

MOST_DRIFT = 0.10
"""Rule 10: more between the probes before and after voids the regime."""


@dataclass(frozen=True)
class Share:
    """Where a step of a method goes in a regime; means over seeds, in seconds of the slowest rank.

    Attributes:
        step_s: of a step.
        compute_s: of it, without any exchange.
        exposed_s: the rest.
        codec_s: seconds in coding, beside the rest or within it.
        waiting_s: seconds in which the exchange waited for messages, likewise.
        sent_bytes: by a rank; None if unknown.
        state_bytes: held between steps.
        predicted_s: what the plan said before; None if it could not.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    codec_s: float
    waiting_s: float
    sent_bytes: float | None
    state_bytes: int
    predicted_s: float | None


@dataclass(frozen=True)
class Rate:
    """Bandwidth of a regime's links, both ways at once, as a probe found it.

    Attributes:
        bits_per_s: what arrives.
        low, high: its 95 % interval.
    """

    bits_per_s: float
    low: float
    high: float


@dataclass(frozen=True)
class Regime:
    """One network.

    Attributes:
        name: as in the experiment.
        rows: verdicts at the target.
        looser, stricter: the same at the two other targets.
        runs: by contender.
        shares: where a step goes, by contender.
        settings: how each contender was run, by contender.
        stands_for: of ``auto`` and of contenders with knobs, what was run here.
        errors: of each contender's average, on gradients of the task: ``replica_error``,
            ``mean_error`` and ``spread``, relative; only of those that average gradients.
        rate: measured before; None if the probe is not there.
        drift: of the rate, after against before; None likewise.
        broken: rules that the whole regime breaks.
        notes: what a reader should know beside.
    """

    name: str
    rows: tuple[Row, ...]
    looser: tuple[Row, ...]
    stricter: tuple[Row, ...]
    runs: Mapping[str, Sequence[Run]]
    shares: Mapping[str, Share]
    settings: Mapping[str, Setting]
    stands_for: Mapping[str, str]
    errors: Mapping[str, Mapping[str, float | None]]
    rate: Rate | None
    drift: float | None
    broken: tuple[str, ...]
    notes: tuple[str, ...]

    def predicted_ratio(self, row: Row) -> float | None:
        """What was foretold of a step of a method, over its baseline's; None if it was not."""
        mine, base = self.shares.get(row.method), self.shares.get(row.baseline)
        if mine is None or base is None or not mine.predicted_s or not base.predicted_s:
            return None
        return mine.predicted_s / base.predicted_s


@dataclass(frozen=True)
class Outcome:
    """All of it.

    Attributes:
        experiment: what was decided before.
        about: what the records were made with.
        target: value to reach; the looser and the stricter one beside it.
        regimes: in the experiment's order; those that are not measured yet are left out.
    """

    experiment: Experiment
    about: Mapping[str, Any]
    target: float
    looser_target: float
    stricter_target: float
    regimes: tuple[Regime, ...]

    def rows_json(self) -> list[dict[str, Any]]:
        """One plain row for each regime and method."""
        made = []
        for regime in self.regimes:
            for row in regime.rows:
                share = regime.shares.get(row.method)
                made.append(
                    asdict(row)
                    | {
                        "mode": self.experiment.mode,
                        "baseline_stands_for": regime.stands_for.get(row.baseline),
                        "predicted_ratio": regime.predicted_ratio(row),
                        "stands_for": regime.stands_for.get(row.method),
                        "setting": asdict(regime.settings[row.method]),
                        "errors": regime.errors.get(row.method),
                        "step": None if share is None else asdict(share),
                        "target": self.target,
                    }
                )
        return made


def outcome_of(experiment: Experiment, records: Records) -> Outcome:
    """What the records say.

    Raises:
        MissingRecordError: there is no target yet.
    """
    median = target_value(experiment, records)
    slack = experiment.target_slack
    targets = [median * (1 + factor * slack) for factor in (1, 3, 0)]
    measured = [r for r in experiment.regimes if records.find(plan_job(r)) is not None]
    return Outcome(
        experiment,
        records.about,
        target=targets[0],
        looser_target=targets[1],
        stricter_target=targets[2],
        regimes=tuple(_regime(experiment, records, name, targets) for name in measured),
    )


def _regime(
    experiment: Experiment, records: Records, name: str, targets: Sequence[float]
) -> Regime:
    before, after = (_rate(experiment, records, name, when) for when in ("before", "after"))
    drift, drifted, unsure = drift_of(before, after, name)
    broken = [drifted] if drifted else []
    try:
        runs = runs_of(experiment, records, name)
        settings = {
            c.method: best_setting(experiment, records, standing_for(experiment, records, c, name))
            for c in experiment.contenders
        }
    except MissingRecordError:  # not tuned yet
        runs, settings = {}, {}
    rows = [tuple(judge_runs(experiment, name, runs, t, broken)) for t in targets]
    stands_for = {}
    for contender in experiment.contenders if settings else ():
        actual = standing_for(experiment, records, contender, name)
        text = timed_method(experiment, records, actual, name)
        if text != contender.method:
            stands_for[contender.method] = text
    shares = {}
    for contender in experiment.contenders if settings else ():
        share = _share(experiment, records, contender, name)
        if share is not None:
            shares[contender.method] = share
    return Regime(
        name,
        rows=rows[0],
        looser=rows[1],
        stricter=rows[2],
        runs=runs,
        shares=shares,
        settings=settings,
        stands_for=stands_for,
        errors=_errors(experiment, records, name) if settings else {},
        rate=before,
        drift=drift,
        broken=tuple(broken),
        notes=(unsure,) if unsure else (),
    )


def _rate(experiment: Experiment, records: Records, regime: str, when: str) -> Rate | None:
    record = records.find(probe_job(experiment, regime, when))
    if record is None or record.result is None:
        return None
    beta = Link.from_json(record.result["link"]).both_ways.beta_s_per_byte
    return Rate(8 / beta.value, 8 / beta.high, 8 / beta.low if beta.low else math.inf)


def drift_of(before: Rate | None, after: Rate | None, name: str) -> tuple[float | None, str, str]:
    """The change of the rate, what rule it breaks, and what a reader should know; or ""."""
    if before is None or after is None:
        return None, f"rule 10, {name} was not probed before and after the runs", ""
    change = after.bits_per_s / before.bits_per_s
    unsure = math.hypot(*(math.log(rate.high / rate.low) / 2 for rate in (before, after)))
    if abs(change - 1) <= MOST_DRIFT:
        return change - 1, "", ""
    if abs(math.log(change)) > unsure:
        told = f"rule 10, the rate of {name} changed by {change - 1:+.0%} during the runs"
        return change - 1, told, ""
    told = (
        f"the two probes of {name} differ by {change - 1:+.0%}, and tell its rate no better than "
        f"within a factor of {math.exp(unsure):.2f}: that it held still is not shown; give a "
        "longer probe_s"
    )
    return change - 1, "", told


def _errors(
    experiment: Experiment, records: Records, regime: str
) -> dict[str, Mapping[str, float | None]]:
    found = {}
    for contender in experiment.contenders:
        actual = standing_for(experiment, records, contender, regime)
        job = errors_job(experiment, records, actual)
        record = None if job is None else records.find(job)
        if record is not None and record.result is not None:
            found[contender.method] = record.result
    return found


def _share(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> Share | None:
    times = times_of(experiment, records, contender, regime)
    seeds = experiment.run_seeds()
    beside = [records.find(compute_job(experiment, regime, seed)) for seed in seeds]
    computed = [r.result["step_s"] for r in beside if r is not None and r.result is not None]
    if not times or not computed:
        return None
    actual = standing_for(experiment, records, contender, regime)
    method = timed_method(experiment, records, actual, regime)
    plan = records.find(plan_job(regime))
    told = None if plan is None or plan.result is None else plan.result["steps"].get(method)
    mean = {
        key: statistics.fmean(t[key] for t in times) for key in ("step_s", "codec_s", "waiting_s")
    }
    sent = [t["sent_bytes"] if t["sent_bytes"] is not None else t["interface_bytes"] for t in times]
    compute_s = statistics.fmean(computed)
    return Share(
        step_s=mean["step_s"],
        compute_s=compute_s,
        exposed_s=max(0.0, mean["step_s"] - compute_s),
        codec_s=mean["codec_s"],
        waiting_s=mean["waiting_s"],
        sent_bytes=None if None in sent else statistics.fmean(sent),
        state_bytes=max(t["state_bytes"] for t in times),
        predicted_s=told["step_s"] if told is not None and math.isfinite(told["step_s"]) else None,
    )

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
    plan_job,
    probe_job,
    standing_for,
    target_value,
    timed_method,
)
from taciturn.compare.records import Records
from taciturn.compare.verdict import Row, Run, judge_runs
from taciturn.errors import InputError
from taciturn.link import Link

__all__ = ["Outcome", "Regime", "Share", "outcome_of"]

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
        rate_bits_per_s: measured before; None if the probe is not there.
        drift: of the rate, after against before; None likewise.
        broken: rules that the whole regime breaks.
    """

    name: str
    rows: tuple[Row, ...]
    looser: tuple[Row, ...]
    stricter: tuple[Row, ...]
    runs: Mapping[str, Sequence[Run]]
    shares: Mapping[str, Share]
    settings: Mapping[str, Setting]
    stands_for: Mapping[str, str]
    rate_bits_per_s: float | None
    drift: float | None
    broken: tuple[str, ...]


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
                share, base = regime.shares.get(row.method), regime.shares.get(row.baseline)
                predicted = None
                if share and base and share.predicted_s and base.predicted_s:
                    predicted = share.predicted_s / base.predicted_s
                made.append(
                    asdict(row)
                    | {
                        "mode": self.experiment.mode,
                        "predicted_ratio": predicted,
                        "stands_for": regime.stands_for.get(row.method),
                        "setting": asdict(regime.settings[row.method]),
                        "step": None if share is None else asdict(share),
                        "target": self.target,
                    }
                )
        return made


def outcome_of(experiment: Experiment, records: Records) -> Outcome:
    """What the records say.

    Raises:
        InputError: there is no target yet.
    """
    try:
        median = target_value(experiment, records)
    except AssertionError as error:
        raise InputError(
            f"{records.path}: the baseline is not tuned yet, so there is no target; run taciturn "
            "compare again, it goes on where it stopped"
        ) from error
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
    drift, rate = _drift(experiment, records, name)
    broken = []
    if drift is None:
        broken.append(f"rule 10, {name} was not probed after the runs")
    elif abs(drift) > MOST_DRIFT:
        broken.append(f"rule 10, the rate of {name} changed by {drift:+.0%} during the runs")
    try:
        runs = runs_of(experiment, records, name)
        settings = {
            c.method: best_setting(experiment, records, standing_for(experiment, records, c, name))
            for c in experiment.contenders
        }
    except AssertionError:  # not tuned yet
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
        rate_bits_per_s=rate,
        drift=drift,
        broken=tuple(broken),
    )


def _drift(
    experiment: Experiment, records: Records, regime: str
) -> tuple[float | None, float | None]:
    """Return the change of the rate that arrives, and the rate before."""
    rates = []
    for when in ("before", "after"):
        record = records.find(probe_job(experiment, regime, when))
        if record is not None and record.result is not None:
            rates.append(8 * Link.from_json(record.result["link"]).both_ways.bytes_per_s)
    if not rates:
        return None, None
    return (rates[1] / rates[0] - 1 if len(rates) == 2 else None), rates[0]


def _share(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> Share | None:
    times = times_of(experiment, records, contender, regime)
    compute = records.find(compute_job(experiment, regime))
    if not times or compute is None or compute.result is None:
        return None
    actual = standing_for(experiment, records, contender, regime)
    method = timed_method(experiment, records, actual, regime)
    plan = records.find(plan_job(regime))
    told = None if plan is None or plan.result is None else plan.result["steps"].get(method)
    mean = {
        key: statistics.fmean(t[key] for t in times) for key in ("step_s", "codec_s", "waiting_s")
    }
    sent = [t["sent_bytes"] if t["sent_bytes"] is not None else t["interface_bytes"] for t in times]
    compute_s = float(compute.result["step_s"])
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

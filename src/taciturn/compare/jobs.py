"""What has to be measured, as jobs: pure functions of the experiment and of what is there already.

A job is plain values, and its own name: two methods that need the same run share it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from scipy.stats import qmc

from taciturn.compare.experiment import (
    TARGET_SEED,
    TUNING_SEED,
    Contender,
    Experiment,
)
from taciturn.compare.methods import comparable, parse
from taciturn.compare.predictions import probed_methods
from taciturn.compare.records import Records
from taciturn.compare.training import COMPUTE
from taciturn.compare.work import Job

__all__ = [
    "Setting",
    "auto_stands_for",
    "best_setting",
    "compute_job",
    "contenders_to_tune",
    "errors_job",
    "fastest_variant",
    "plan_job",
    "probe_job",
    "run_job",
    "standing_for",
    "target_jobs",
    "target_value",
    "time_job",
    "timed_method",
    "trial_jobs",
    "tuned_baseline",
    "variant_jobs",
]


@dataclass(frozen=True)
class Setting:
    """How a contender is run, after tuning.

    Attributes:
        method: with its knobs filled in.
        learning_rate: at its highest.
        trials: how many runs decided on it.
        value: final value of the best of them; infinite if all failed.
    """

    method: str
    learning_rate: float
    trials: int
    value: float


def _train(experiment: Experiment, kind: str, method: str, rate: float, seed: int) -> Job:
    return {
        "kind": kind,
        "method": method,
        "learning_rate": rate,
        "seed": seed,
        "steps": experiment.steps,
        "evaluate_at": list(experiment.evaluate_at()),
        "regime": experiment.home,
    }


@cache
def _points(dimensions: int, count: int) -> list[list[float]]:
    """Return points of the unit cube, alike each time."""
    # Scrambled, as unscrambled the sequence begins with a corner.
    sequence = qmc.Sobol(dimensions, scramble=True, rng=0)
    points: list[list[float]] = sequence.random_base2(max(1, math.ceil(math.log2(count)))).tolist()
    return points[:count]


def trial_jobs(experiment: Experiment, contender: Contender) -> list[Job]:
    """Tuning runs of a contender: its knobs and the learning rate by a Sobol sequence.

    Knobs of a baseline are how DDP sends, and change no loss: they are tuned by time, per regime.
    """
    count = experiment.baseline_trials if contender.is_baseline else experiment.trials
    knobs = {} if contender.is_baseline else contender.space
    low, high = (math.log(x) for x in experiment.learning_rates)
    jobs = []
    for first, *others in _points(1 + len(knobs), count):
        rate = float(f"{math.exp(low + first * (high - low)):.4g}")
        chosen = {
            name: values[min(len(values) - 1, int(at * len(values)))]
            for (name, values), at in zip(knobs.items(), others, strict=True)
        }
        method = contender.variants()[0] if contender.is_baseline else contender.filled(chosen)
        jobs.append(_train(experiment, "trial", method, rate, TUNING_SEED))
    return jobs


def best_setting(experiment: Experiment, records: Records, contender: Contender) -> Setting:
    """The setting whose tuning run ended best.

    Raises:
        MissingRecordError: it is not tuned yet.
    """
    jobs = trial_jobs(experiment, contender)
    values = []
    for job in jobs:
        record = records.get(job)
        points = record.result["points"] if record.result is not None else []
        value = points[-1]["value"] if points else None
        values.append(math.inf if value is None else value)
    best = min(range(len(jobs)), key=values.__getitem__)
    job = jobs[best]
    ended = sum(records.get(job).failure is None for job in jobs)
    return Setting(job["method"], job["learning_rate"], ended, values[best])


def tuned_baseline(experiment: Experiment, records: Records) -> Setting:
    """The baseline that fixes the target: the one whose tuning ended best."""
    settings = [best_setting(experiment, records, c) for c in experiment.baselines]
    return min(settings, key=lambda setting: setting.value)


def target_jobs(experiment: Experiment, records: Records) -> list[Job]:
    """Runs of the tuned baseline on seeds of their own, which fix the target (rule 2)."""
    setting = tuned_baseline(experiment, records)
    return [
        _train(experiment, "target", setting.method, setting.learning_rate, TARGET_SEED + number)
        for number in range(experiment.target_seeds)
    ]


def target_value(experiment: Experiment, records: Records) -> float:
    """The median over these runs of their best values; infinite if half of them failed."""
    best = []
    for job in target_jobs(experiment, records):
        record = records.get(job)
        values = [p["value"] for p in (record.result or {"points": []})["points"]]
        best.append(min((v for v in values if v is not None), default=math.inf))
    return statistics.median(best)


def run_job(
    experiment: Experiment, records: Records, contender: Contender, regime: str, seed: int
) -> Job:
    """A run that is reported: on a network of its own in direct mode, else on loopback."""
    setting = best_setting(experiment, records, contender)
    job = _train(experiment, "run", setting.method, setting.learning_rate, seed)
    if experiment.mode == "direct":
        method = fastest_variant(experiment, records, contender, regime)
        return {**job, "regime": regime, "method": method or setting.method}
    return job


def errors_job(experiment: Experiment, records: Records, contender: Contender) -> Job | None:
    """How exact its average is on gradients of the task; None if it averages no gradients."""
    setting = best_setting(experiment, records, contender)
    if not comparable(setting.method).averages_gradients:
        return None
    return {
        "kind": "errors",
        "method": setting.method,
        "learning_rate": setting.learning_rate,
        "seed": TUNING_SEED,
        "regime": experiment.home,
    }


def time_job(experiment: Experiment, regime: str, method: str, seed: int) -> Job:
    """Steps of a method in a regime, timed."""
    return {
        "kind": "time",
        "regime": regime,
        "method": method,
        "seconds": experiment.time_s,
        "seed": seed,
    }


def compute_job(experiment: Experiment, regime: str, seed: int = TUNING_SEED) -> Job:
    """Steps without any exchange, with all ranks at work, timed.

    With a run's seed among the timings of its methods; without, before anything is foretold.
    """
    return time_job(experiment, regime, COMPUTE, seed)


def variant_jobs(experiment: Experiment, regime: str) -> list[Job]:
    """All ways in which the baselines may send, timed: the fastest is the baseline's."""
    return [
        time_job(experiment, regime, text, TUNING_SEED)
        for contender in experiment.baselines
        for text in contender.variants()
    ]


def fastest_variant(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> str | None:
    """The way of a baseline that is fastest in a regime; None for a method, or if none is known."""
    if not contender.is_baseline:
        return None
    known = {}
    for text in contender.variants():
        record = records.find(time_job(experiment, regime, text, TUNING_SEED))
        if record is not None and record.result is not None:
            known[text] = record.result["step_s"]
    return min(known, key=known.__getitem__) if known else None


def timed_method(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> str:
    """What is timed of a contender in a regime."""
    fastest = fastest_variant(experiment, records, contender, regime)
    return fastest or best_setting(experiment, records, contender).method


def probe_job(experiment: Experiment, regime: str, when: str) -> Job:
    """A probe of a regime, ``before`` or ``after`` what is timed there."""
    texts = [text for c in experiment.contenders for text in c.variants()]
    return {
        "kind": "probe",
        "regime": regime,
        "when": when,
        "seconds": experiment.probe_s,
        "methods": list(probed_methods(texts)) if when == "before" else [],
    }


def plan_job(regime: str) -> Job:
    """What is foretold of a regime; computed, not run."""
    return {"kind": "plan", "regime": regime}


def auto_stands_for(records: Records, contender: Contender, regime: str) -> str:
    """The method that ``auto`` is in a regime."""
    record = records.get(plan_job(regime))
    assert record.result is not None
    text: str = record.result["auto"][contender.method]["method"]
    return text


def standing_for(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> Contender:
    """The contender itself; for ``auto`` the one that it is in this regime."""
    if not contender.is_auto:
        return contender
    text = auto_stands_for(records, contender, regime)
    method = parse(text)
    for baseline in experiment.baselines:  # "none would pay": it is that baseline, as it is tuned
        wires = {parse(t).options.get("wire", "fp32") for t in baseline.variants()}
        if method.name == "ddp" and method.options.get("wire", "fp32") in wires:
            return baseline
    return Contender(text)


def contenders_to_tune(
    experiment: Experiment, records: Records, regimes: Sequence[str]
) -> list[Contender]:
    """Methods, with ``auto`` replaced by what it stands for in each regime; each once."""
    found = [
        standing_for(experiment, records, contender, regime)
        for contender in experiment.methods
        for regime in regimes
    ]
    return list({c.method: c for c in found if not c.is_baseline}.values())

"""From records to runs: losses of one network with the step times of another, or runs as they were.

Time to a step in a regime is what the first steps took longer, plus the step's number times the
mean seconds of a step there, plus one consolidation. Each seed has a measurement of its own of all
three. With evaluations on the clock it is one consolidation for each of them so far, and what
judging took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from taciturn.compare.experiment import Contender, Experiment
from taciturn.compare.jobs import (
    best_setting,
    run_job,
    standing_for,
    time_job,
    timed_method,
)
from taciturn.compare.records import Record, Records
from taciturn.compare.verdict import Point, Run

__all__ = ["runs_of", "times_of"]


def runs_of(experiment: Experiment, records: Records, regime: str) -> dict[str, list[Run]]:
    """The runs of all contenders in a regime, by what the experiment calls them.

    A run that has no record yet is left out; one that failed is there, as a failure.
    """
    found: dict[str, list[Run]] = {}
    for contender in experiment.contenders:
        actual = standing_for(experiment, records, contender, regime)
        trials = best_setting(experiment, records, actual).trials
        some = []
        for seed in experiment.run_seeds():
            record = records.find(run_job(experiment, records, actual, regime, seed))
            if record is None:
                continue
            timing = None
            if experiment.mode == "composed":
                timing = _timing(experiment, records, actual, regime, seed)
                if timing is None:
                    continue
            some.append(_run(contender.method, seed, trials, record, timing))
        found[contender.method] = some
    return found


def times_of(
    experiment: Experiment, records: Records, contender: Contender, regime: str
) -> list[Mapping[str, Any]]:
    """What was timed of a contender in a regime, a measurement for each seed."""
    actual = standing_for(experiment, records, contender, regime)
    timings = (
        _timing(experiment, records, actual, regime, seed) for seed in experiment.run_seeds()
    )
    return [t.result for t in timings if t is not None and t.result is not None]


def _timing(
    experiment: Experiment, records: Records, actual: Contender, regime: str, seed: int
) -> Record | None:
    method = timed_method(experiment, records, actual, regime)
    return records.find(time_job(experiment, regime, method, seed))


def _run(method: str, seed: int, trials: int, record: Record, timing: Record | None) -> Run:
    failure = record.failure or (timing.failure if timing is not None else None)
    rate = float(record.job["learning_rate"])
    if failure is not None or record.result is None:
        return Run(method, seed, (), failure or "no result", learning_rate=rate, trials=trials)
    result = record.result
    costs, greatest = result["costs"], result["gradient_norm_most"]
    peak = math.inf if costs["residual_peak"] is None else costs["residual_peak"]
    growth = peak / greatest if greatest else 0.0
    return Run(
        method=method,
        seed=seed,
        points=_points(result["points"], None if timing is None else timing.result),
        examples=result["examples"],
        tokens=result["tokens"],
        examples_hash=result["examples_hash"],
        learning_rate=rate,
        trials=trials,
        nonfinite_steps=result["nonfinite_steps"],
        replica_spread=result["replica_spread"],
        residual_growth=growth,
        single_replica=result["single_replica_value"],
        averaged=result["averaged_value"],
    )


def _points(points: list[dict[str, Any]], timing: Mapping[str, Any] | None) -> tuple[Point, ...]:
    made = []
    before_s = 0.0  # evaluations before this one
    for point in points:
        seconds, sent, consolidate_s = point["seconds"], point["sent_bytes"], point["consolidate_s"]
        if timing is not None:
            consolidate_s = timing["consolidate_s"]
            seconds = timing["start_s"] + point["step"] * timing["step_s"] + consolidate_s
            each = timing["sent_bytes"]
            each = timing["interface_bytes"] if each is None else each
            sent = None if each is None else each * point["step"]
        elif sent is None:
            sent = point["interface_bytes"]
        made.append(
            Point(
                point["examples"],
                seconds,
                point["value"],
                sent,
                evaluated_s=before_s + seconds + point["judge_s"],
                residual_norm=point["residual_norm"],
                gradient_norm=point["gradient_norm"],
            )
        )
        before_s += consolidate_s + point["judge_s"]
    return tuple(made)

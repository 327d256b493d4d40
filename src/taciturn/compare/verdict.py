"""What the records show: a pure function of them, whose default answer is "not shown".

The rules that it keeps are numbered as in ``docs/evidence.md``. Nothing here measures, tunes or
chooses: the same records give the same verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from taciturn.compare.experiment import Experiment
from taciturn.compare.intervals import RatioInterval, holm, runs_needed, variation

__all__ = [
    "FASTER",
    "NOT_SHOWN",
    "SLOWER",
    "Point",
    "Row",
    "Run",
    "Verdict",
    "crossing",
    "judge_runs",
    "time_ratio",
]

Verdict = Literal["faster", "slower", "not shown"]
FASTER: Verdict = "faster"
SLOWER: Verdict = "slower"
NOT_SHOWN: Verdict = "not shown"

LEAST_RUNS, LEAST_VARIED_RUNS, MOST_VARIATION = 5, 10, 0.05
"""Rule 6: seeds needed, and those where the times vary by more than this."""
TOO_FEW_STEPS = 0.9
"""Rule 14: a method that shows it needs fewer than this share of the baseline's examples to the
target has a bug, or does another task."""
LEAST_QUALITY_RATIO = 1e-3
"""A final value of zero, or a baseline that failed, is taken to be a thousand times better, not
more: the logarithm would have no bound."""
MOST_RESIDUAL_GROWTH = 10.0
"""Norm of what error feedback holds back, over that of the greatest gradient."""


@dataclass(frozen=True)
class Point:
    """One evaluation.

    Attributes:
        examples: seen so far, by all ranks.
        seconds: on the clock so far, making one model of the replicas here included.
        value: what is to become small; None if it was not finite.
        sent_bytes: by a rank so far; None if unknown.
        evaluated_s: seconds with this and all evaluations before on the clock; None if unknown.
        residual_norm: of what error feedback holds back; 0 without.
        gradient_norm: before it was clipped, of the last step.
    """

    examples: int
    seconds: float
    value: float | None
    sent_bytes: float | None = None
    evaluated_s: float | None = None
    residual_norm: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Run:
    """One independent run.

    Attributes:
        method: as compared.
        seed: that pairs it with the baseline's.
        points: its evaluations, in order; empty if it failed before the first.
        failure: why it ended early; None if it did not.
        examples: whose loss was taken in all.
        tokens: likewise.
        examples_hash: of which those were, in order.
        learning_rate: it was run with.
        trials: tuning runs of the method.
        nonfinite_steps: whose gradient was not finite.
        replica_spread: of the replicas at the end, relative to their norm; None if unknown.
        residual_growth: greatest residual over greatest gradient; 0 without error feedback.
        single_replica: mean over ranks of the value of each replica by itself at the end.
        averaged: value of the mean of the weights of the last steps, over ranks too.
    """

    method: str
    seed: int
    points: tuple[Point, ...]
    failure: str | None = None
    examples: int = 0
    tokens: int = 0
    examples_hash: str = ""
    learning_rate: float = math.nan
    trials: int = 0
    nonfinite_steps: int = 0
    replica_spread: float | None = None
    residual_growth: float = 0.0
    single_replica: float | None = None
    averaged: float | None = None

    @property
    def final(self) -> float:
        """The last value; infinite for one that failed or was not finite."""
        if self.failure is not None or not self.points:
            return math.inf
        value = self.points[-1].value
        return math.inf if value is None else value

    @property
    def best(self) -> float:
        """The least value."""
        return min((p.value for p in self.points if p.value is not None), default=math.inf)


def crossing(points: Sequence[Point], target: float) -> Point | None:
    """The first evaluation at the target that also holds at the next (rule 9); None is a miss.

    The last evaluation has no next: it confirms another and is none itself.
    """
    at = [p.value is not None and p.value <= target for p in points]
    for point, here, there in zip(points, at, at[1:], strict=False):
        if here and there:
            return point
    return None


def time_ratio(
    run: Run, baseline: Run, target: float, clock: Callable[[Point], float] | None = None
) -> float | None:
    """Time to target, on a clock, over the baseline's of the same seed.

    Infinite where only the method misses. Where only the baseline does, its whole run stands for
    its time, which is too little: the ratio is an upper bound. None where both do.
    """
    clock = clock or _off
    mine, theirs = crossing(run.points, target), crossing(baseline.points, target)
    if mine is None:
        return None if theirs is None else math.inf
    if theirs is not None:
        return clock(mine) / clock(theirs)
    return clock(mine) / clock(baseline.points[-1]) if baseline.points else None


def _off(point: Point) -> float:
    """The clock that stands still during evaluations."""
    return point.seconds


def _on(point: Point) -> float:
    """The one that does not; NaN if it was not looked at."""
    return math.nan if point.evaluated_s is None else point.evaluated_s


@dataclass(frozen=True)
class Row:
    """A method in a regime, against the best baseline there.

    Attributes:
        regime, method, baseline: names.
        verdict: "faster", "slower" or "not shown".
        why: whole sentences: what it rests on, or what is missing.
        time_ratio, time_ratio_low, time_ratio_high: time to target over the baseline's, with its
            interval; None if there is none.
        evaluated_ratio: the same with evaluations on the clock; None likewise.
        run_ratio, run_ratio_low, run_ratio_high: seconds of whole runs, which are of as many steps,
            over the baseline's, with the interval; None if there is none.
        p_faster: share of the resamples in which it is below 1.
        p_value: of the paired test that it is 1; what Holm's procedure looks at.
        reached, runs: how many of how many runs reached the target; failures among them.
        baseline_reached: of the baseline's.
        examples_ratio: examples to the target over the baseline's, geometric mean; None likewise.
        final_quality_ratio: final value over the baseline's, geometric mean; above 1 is worse.
        final_quality_high: end of its one-sided 95 % interval.
        single_replica_ratio: the same of single replicas, against the baseline's model.
        averaged_ratio: the same of averaged weights, against the baseline's averaged ones.
        good_enough: the quality guard holds: that end is within the margin.
        runs_needed: pairs that would show a ratio like this one; None if that cannot be told.
        broken: rules that are broken, with what is wrong; such a row shows nothing.
        notes: what a reader should know beside.
    """

    regime: str
    method: str
    baseline: str
    verdict: Verdict
    why: str
    time_ratio: float | None
    time_ratio_low: float | None
    time_ratio_high: float | None
    evaluated_ratio: float | None
    run_ratio: float | None
    run_ratio_low: float | None
    run_ratio_high: float | None
    p_faster: float | None
    p_value: float
    reached: int
    runs: int
    baseline_reached: int
    examples_ratio: float | None
    final_quality_ratio: float | None
    final_quality_high: float | None
    single_replica_ratio: float | None
    averaged_ratio: float | None
    good_enough: bool
    runs_needed: int | None
    broken: tuple[str, ...]
    notes: tuple[str, ...]


def judge_runs(
    experiment: Experiment,
    regime: str,
    runs: Mapping[str, Sequence[Run]],
    target: float,
    broken: Sequence[str] = (),
) -> list[Row]:
    """Judge every method of a regime against the best baseline there.

    Args:
        experiment: what was decided before.
        regime: its name.
        runs: of each contender, baselines included, by what the experiment calls it; a failed one
            is among them.
        target: value to reach.
        broken: rules that the regime itself breaks, such as a link that drifted.

    Returns:
        One row for each method, in the experiment's order; none where no baseline has runs.
    """
    baselines = [c.method for c in experiment.baselines if runs.get(c.method)]
    if not baselines:
        return []
    best = min(baselines, key=lambda name: _median_time(runs[name], target))
    broken = [*broken, *_lacking(experiment, runs)]
    fewest = min(run.trials for name in baselines for run in runs[name])
    rows = []
    for contender in experiment.methods:
        some = runs.get(contender.method, ())
        most = max((run.trials for run in some), default=0)
        wrong = list(broken)
        if fewest < most:
            wrong.append(
                f"rule 5, the baseline was tuned in {fewest} runs and {contender.method} in {most}"
            )
        rows.append(
            _row(experiment, regime, contender.method, some, best, runs[best], target, wrong)
        )
    return _with_holm(rows)


def _lacking(experiment: Experiment, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return rule 7 for each baseline without some run: the best may be another one."""
    found = []
    for contender in experiment.baselines:
        there = {run.seed for run in runs.get(contender.method, ())}
        missing = sorted(set(experiment.run_seeds()) - there)
        if missing:
            found.append(f"rule 7, the baseline {contender.method} lacks seeds {missing}")
    return found


def _median_time(runs: Sequence[Run], target: float) -> tuple[float, float]:
    """Return the median time to target, and that of a whole run where most miss it."""
    times = [p.seconds if (p := crossing(r.points, target)) else math.inf for r in runs]
    whole = [r.points[-1].seconds if r.points else math.inf for r in runs]
    return statistics.median(times), statistics.median(whole)


def _row(
    experiment: Experiment,
    regime: str,
    method: str,
    runs: Sequence[Run],
    baseline: str,
    base_runs: Sequence[Run],
    target: float,
    broken: Sequence[str],
) -> Row:
    base = {r.seed: r for r in base_runs}
    pairs = [(r, base[r.seed]) for r in runs if r.seed in base]
    ratios = [x for pair in pairs if (x := time_ratio(*pair, target)) is not None]
    undecided = len(pairs) - len(ratios)
    interval = RatioInterval.of(ratios)
    evaluated = [x for pair in pairs if (x := time_ratio(*pair, target, _on)) is not None]
    whole = RatioInterval.of([_run_ratio(*pair) for pair in pairs])
    quality = RatioInterval.of([_quality_ratio(*p) for p in pairs], level=0.9)  # one-sided 95 %
    examples = _examples_ratio(pairs, target)
    reached = sum(crossing(r.points, target) is not None for r in runs)
    wrong = [*broken, *_broken(experiment, runs, base_runs, examples)]
    least = _least_runs(base_runs, runs, target)
    good = quality.pairs > 1 and quality.high <= 1 + experiment.margin
    row = Row(
        regime=regime,
        method=method,
        baseline=baseline,
        verdict=NOT_SHOWN,
        why="",
        time_ratio=_known(interval.ratio),
        time_ratio_low=interval.low if interval.pairs > 1 else None,
        time_ratio_high=_known(interval.high),
        evaluated_ratio=_known(RatioInterval.of(evaluated).ratio),
        run_ratio=_known(whole.ratio),
        run_ratio_low=whole.low if whole.pairs > 1 else None,
        run_ratio_high=_known(whole.high),
        p_faster=_known(interval.p_below),
        p_value=interval.p_value,
        reached=reached,
        runs=len(runs),
        baseline_reached=sum(crossing(r.points, target) is not None for r in base_runs),
        examples_ratio=None if examples is None else _known(examples.ratio),
        final_quality_ratio=_known(quality.ratio),
        final_quality_high=_known(quality.high),
        single_replica_ratio=_mean_ratio([(r.single_replica, b.final) for r, b in pairs]),
        averaged_ratio=_mean_ratio([(r.averaged, b.averaged) for r, b in pairs]),
        good_enough=good,
        runs_needed=runs_needed(ratios, least),
        broken=tuple(wrong),
        notes=tuple(_notes(runs, base_runs, target)),
    )
    verdict, why = _verdict(row, interval, undecided, least)
    return replace(row, verdict=verdict, why=why)


def _run_ratio(run: Run, baseline: Run) -> float:
    """Return the seconds of a whole run over the baseline's; infinite where one failed."""
    if math.isinf(run.final) or math.isinf(baseline.final):
        return math.inf
    return run.points[-1].seconds / baseline.points[-1].seconds


def _quality_ratio(run: Run, baseline: Run) -> float:
    """Return the final value over the baseline's; what cannot be told counts against the method."""
    if math.isinf(run.final):
        return math.inf
    if baseline.final <= 0:
        return 1.0 if run.final <= 0 else math.inf
    return max(LEAST_QUALITY_RATIO, run.final / baseline.final)


def _mean_ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return the geometric mean of ratios; None if one of them cannot be told."""
    ratios = []
    for value, base in pairs:
        if value is None or base is None or not 0 < base < math.inf:
            return None
        ratios.append(max(LEAST_QUALITY_RATIO, value / base))
    return _known(RatioInterval.of(ratios).ratio) if ratios else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _least_runs(base_runs: Sequence[Run], runs: Sequence[Run], target: float) -> int:
    """Return how many seeds rule 6 wants."""
    for some in (base_runs, runs):
        times = [p.seconds for r in some if (p := crossing(r.points, target))]
        if len(times) > 1 and variation(times) > MOST_VARIATION:
            return LEAST_VARIED_RUNS
    return LEAST_RUNS


def _verdict(row: Row, interval: RatioInterval, undecided: int, least: int) -> tuple[Verdict, str]:
    """Return what is shown before Holm's procedure, and why."""
    if row.broken:
        return NOT_SHOWN, f"A rule is broken: {row.broken[0]}."
    if row.runs == 0:
        return NOT_SHOWN, "It has no runs."
    if row.reached == 0 and row.baseline_reached == 0:
        return NOT_SHOWN, "Neither it nor the baseline reached the target."
    missed = row.runs - row.reached
    if undecided:
        return NOT_SHOWN, f"In {undecided} of {row.runs} pairs neither reached the target."
    if interval.pairs < least:
        more = "" if row.runs_needed is None else _more(row.runs_needed - interval.pairs)
        why = f"{interval.pairs} pairs are too few: it takes {least}"
        varied = " as times vary by more than 5 %" if least == LEAST_VARIED_RUNS else ""
        return NOT_SHOWN, f"{why}{varied}{more}."
    if missed:
        theirs = f"{row.baseline_reached} of the baseline's reached it"
        return NOT_SHOWN, f"{missed} of {row.runs} runs missed the target; {theirs}."
    if interval.high < 1:
        if not row.good_enough:
            return NOT_SHOWN, (
                "It reaches the target sooner, but its final quality is not shown to be within the "
                "margin."
            )
        return FASTER, ""
    if interval.low > 1:
        return SLOWER, ""
    more = "" if row.runs_needed is None else _more(row.runs_needed - interval.pairs)
    return NOT_SHOWN, f"The interval of the ratio contains 1{more}."


def _more(count: int) -> str:
    if count < 1:
        return ""
    return f"; about {count} more {'run' if count == 1 else 'runs'} would settle it"


def _with_holm(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; what does not survive that all of them are looked at is taken back."""
    survives = holm([row.p_value for row in rows])
    return [
        row
        if row.verdict == NOT_SHOWN or kept
        else replace(
            row,
            verdict=NOT_SHOWN,
            why=f"Its interval by itself excludes 1, but not with {len(rows)} methods looked at.",
        )
        for row, kept in zip(rows, survives, strict=True)
    ]


def _examples_ratio(pairs: Sequence[tuple[Run, Run]], target: float) -> RatioInterval | None:
    found = []
    for run, base in pairs:
        mine, theirs = crossing(run.points, target), crossing(base.points, target)
        if mine is not None and theirs is not None:
            found.append(mine.examples / theirs.examples)
    return RatioInterval.of(found) if found else None


def _broken(
    experiment: Experiment,
    runs: Sequence[Run],
    base_runs: Sequence[Run],
    examples: RatioInterval | None,
) -> list[str]:
    """Return which rules these runs break."""
    wrong = []
    base = {r.seed: r for r in base_runs}
    planned = set(experiment.run_seeds())
    missing = sorted(planned - {r.seed for r in runs})
    if missing:
        wrong.append(f"rule 7, seeds {missing} were planned and have no record")
    extra = sorted({r.seed for r in runs} - planned)
    if extra:
        wrong.append(f"rule 6, seeds {extra} were not planned")
    for run in runs:
        other = base.get(run.seed)
        if run.failure is not None or other is None or other.failure is not None:
            continue
        if (run.examples, run.tokens) != (other.examples, other.tokens):
            wrong.append(
                f"rule 4, in seed {run.seed} it took the loss of {run.examples} examples, "
                f"{run.tokens} tokens, and the baseline of {other.examples}, {other.tokens}"
            )
        elif run.examples_hash != other.examples_hash:
            wrong.append(f"rule 4, in seed {run.seed} it saw other examples, or in another order")
        elif [p.examples for p in run.points] != [p.examples for p in other.points]:
            wrong.append(f"rule 4, in seed {run.seed} it was judged at other points")
    if examples is not None and examples.pairs >= LEAST_RUNS and examples.high < TOO_FEW_STEPS:
        wrong.append(
            f"rule 14, it needs {examples.ratio:.2f} of the baseline's examples to the target: too "
            "good to be the same task; look for a bug"
        )
    return wrong


def _notes(runs: Sequence[Run], base_runs: Sequence[Run], target: float) -> list[str]:
    notes = []
    met = [(r.points, crossing(r.points, target)) for r in (*runs, *base_runs)]
    if all(points and at is points[0] for points, at in met):
        notes.append(
            "all met the target at their first evaluation: the times to it say nothing; give more "
            "evaluations, or another value to judge by"
        )
    failed = [r for r in runs if r.failure is not None]
    if failed:
        notes.append(f"{len(failed)} of {len(runs)} runs failed; the first: {failed[0].failure}")
    skipped = sum(r.nonfinite_steps for r in runs)
    if skipped:
        notes.append(f"{skipped} steps had a gradient that was not finite")
    grown = max((r.residual_growth for r in runs), default=0.0)
    if grown > MOST_RESIDUAL_GROWTH:
        notes.append(f"error feedback held back {grown:.0f} times the greatest gradient")
    return notes

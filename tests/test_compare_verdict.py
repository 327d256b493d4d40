"""A verdict is "not shown" unless the runs show it, and no planted fault gets past it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from taciturn.compare import Contender, Experiment, Point, Run, judge_runs
from taciturn.compare.verdict import Row, crossing, time_ratio

TARGET = 1.0
METHOD, BASE = "quantized:bits=8", "ddp:wire=bf16"


def experiment(seeds: int = 6) -> Experiment:
    return Experiment(
        task="digits",
        methods=(Contender(METHOD),),
        regimes=("100mbit",),
        seeds=seeds,
        baselines=(Contender("ddp:wire=fp32"), Contender(BASE)),
    )


def run(
    seed: int,
    step_s: float,
    *,
    method: str = METHOD,
    reached_at: int = 6,
    final: float = 0.9,
    batch: int = 10,
    points: int = 10,
) -> Run:
    """A run whose value falls to the target at one of its evaluations and stays there."""
    values = [2.0 if n < reached_at else final for n in range(1, points + 1)]
    made = tuple(
        Point(examples=n * batch, seconds=n * step_s, value=v) for n, v in enumerate(values, 1)
    )
    seen = points * batch
    return Run(method, seed, made, examples=seen, tokens=seen, examples_hash=f"h{seed}", trials=4)


def rows(
    change: Callable[[Run], Run] = lambda r: r,
    *,
    seeds: int = 6,
    ratio: float = 0.5,
    base: Callable[[Run], Run] = lambda r: r,
) -> Row:
    """The verdict on a method of this ratio, with one thing changed in its runs or baseline's."""
    noise = random.Random(0)
    made = experiment(seeds)
    runs = {
        BASE: [base(run(s, 1 + noise.gauss(0, 0.01), method=BASE)) for s in range(seeds)],
        "ddp:wire=fp32": [run(s, 2.0, method="ddp:wire=fp32") for s in range(seeds)],
    }
    runs[METHOD] = [change(run(s, ratio * (1 + noise.gauss(0, 0.01)))) for s in range(seeds)]
    (row,) = judge_runs(made, "100mbit", runs, TARGET)
    return row


def test_a_clear_win_is_shown() -> None:
    """Half the time in all six runs, at the same quality."""
    row = rows()
    assert row.verdict == "faster"
    assert row.time_ratio == pytest.approx(0.5, rel=0.03)
    assert row.time_ratio_low is not None
    assert row.time_ratio_high is not None
    assert row.time_ratio_low < 0.5 < row.time_ratio_high < 0.55
    assert (row.reached, row.runs, row.baseline) == (6, 6, BASE)


def test_other_clocks_stand_beside() -> None:
    """Whole runs are of as many steps; evaluations may cost a method more than its steps gain."""

    def judged(each_s: float) -> Callable[[Run], Run]:
        return lambda r: replace(
            r,
            points=tuple(
                replace(p, evaluated_s=p.seconds + n * each_s) for n, p in enumerate(r.points, 1)
            ),
        )

    row = rows(judged(1.5), base=judged(0.0))
    assert row.verdict == "faster"
    assert row.run_ratio == pytest.approx(0.5, rel=0.03)
    assert row.run_ratio_low is not None
    assert row.run_ratio_high is not None
    assert row.run_ratio_low < 0.5 < row.run_ratio_high
    assert row.evaluated_ratio == pytest.approx(2.0, rel=0.03)
    assert rows().evaluated_ratio is None


def test_a_clear_loss_is_shown_as_plainly() -> None:
    """Twice the time is a verdict too."""
    row = rows(ratio=1.5)
    assert row.verdict == "slower"


def test_the_faster_baseline_counts() -> None:
    """A win against fp32 that is none against bf16 is not one."""
    row = rows(ratio=1.2)
    assert row.baseline == BASE
    assert row.verdict == "slower"


def test_few_runs_show_nothing_and_say_how_many_would() -> None:
    """Two clear wins are not evidence; three more would be."""
    row = rows(seeds=2)
    assert row.verdict == "not shown"
    assert "2 pairs are too few: it takes 5; about 3 more runs would settle it" in row.why


def test_a_target_that_all_meet_at_once_says_nothing() -> None:
    """As of a value that never changes."""

    def at_once(r: Run) -> Run:
        return replace(r, points=tuple(replace(p, value=0.9) for p in r.points))

    assert "the times to it say nothing" in rows(at_once, base=at_once).notes[0]
    assert rows(at_once).notes == ()


def test_the_runs_that_are_needed_are_those_that_it_says() -> None:
    """As a number and in words, also where times vary and ten are needed."""
    noise = random.Random(1)

    def varied(r: Run) -> Run:
        factor = 1 + noise.gauss(0, 0.3)
        return replace(r, points=tuple(replace(p, seconds=factor * p.seconds) for p in r.points))

    row = rows(varied, seeds=3, ratio=0.3)
    assert row.runs_needed is not None
    assert row.runs_needed >= 10
    assert f"about {row.runs_needed - 3} more runs would settle it" in row.why


def test_times_that_vary_need_ten_seeds() -> None:
    """Rule 6: a variation above 5 % asks for ten."""
    noise = random.Random(3)

    def shaken(one: Run) -> Run:
        factor = 1 + noise.uniform(-0.2, 0.2)
        return replace(
            one, points=tuple(replace(p, seconds=p.seconds * factor) for p in one.points)
        )

    row = rows(shaken)
    assert row.verdict == "not shown"
    assert "it takes 10 as times vary" in row.why


def test_a_lucky_crossing_is_none() -> None:
    """Rule 9: below the target once and back is a miss; the last evaluation confirms nothing."""

    def lucky(one: Run) -> Run:
        values = [2.0, 0.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.9]
        return replace(
            one,
            points=tuple(replace(p, value=v) for p, v in zip(one.points, values, strict=True)),
        )

    assert crossing(lucky(run(0, 1.0)).points, TARGET) is None
    row = rows(lucky)
    assert (row.reached, row.verdict, row.time_ratio) == (0, "not shown", None)


def test_a_value_that_is_not_finite_is_a_miss() -> None:
    """NaN is recorded as None, and neither reaches a target nor confirms one."""
    points = run(0, 1.0).points
    broken = tuple(replace(p, value=None if n == 6 else p.value) for n, p in enumerate(points))
    at = crossing(broken, TARGET)
    assert at is not None
    assert at.seconds == 8.0


def test_a_miss_is_counted() -> None:
    """Rule 7: one run of six that never gets there takes the verdict away."""
    row = rows(lambda r: replace(r, points=(), failure="NaN") if r.seed == 3 else r)
    assert (row.reached, row.runs, row.verdict) == (5, 6, "not shown")
    assert "1 of 6 runs failed; the first: NaN" in row.notes


def test_a_dropped_seed_is_seen() -> None:
    """Rule 7: a planned seed without a record breaks it, however good the others."""
    made = experiment()
    other = "ddp:wire=fp32"
    runs = {name: [run(s, 1.0, method=name) for s in range(6)] for name in (BASE, other)}
    runs[METHOD] = [run(s, 0.5) for s in range(5)]
    (row,) = judge_runs(made, "100mbit", runs, TARGET)
    assert row.verdict == "not shown"
    assert "rule 7, seeds [5]" in row.broken[0]


def test_a_baseline_without_all_its_seeds_is_seen() -> None:
    """Rule 7: the faster one may be that which is not whole."""
    other = "ddp:wire=fp32"
    runs = {name: [run(s, 1.0, method=name) for s in range(6)] for name in (BASE, other)}
    runs[METHOD] = [run(s, 0.5) for s in range(6)]
    for lacking, seeds in ((runs[other][:5], "[5]"), ([], "[0, 1, 2, 3, 4, 5]")):
        (row,) = judge_runs(experiment(), "100mbit", runs | {other: lacking}, TARGET)
        assert row.verdict == "not shown"
        assert row.broken == (f"rule 7, the baseline {other} lacks seeds {seeds}",)


FAULTS: dict[str, tuple[Callable[[Run], Run], str]] = {
    "skipped examples": (lambda r: replace(r, examples=90, tokens=90), "rule 4"),
    "a larger batch": (lambda r: replace(r, examples=200, tokens=200), "rule 4"),
    "other data": (lambda r: replace(r, examples_hash="x"), "rule 4"),
    "judged elsewhere": (
        lambda r: replace(r, points=tuple(replace(p, examples=p.examples + 1) for p in r.points)),
        "rule 4",
    ),
    "tuned more than the baseline": (lambda r: replace(r, trials=40), "rule 5"),
    "too good": (
        lambda r: replace(run(r.seed, 0.5, reached_at=2), examples_hash=r.examples_hash),
        "rule 14",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    """The same clear win, with one thing wrong: the rule is named and nothing is shown."""
    change, rule = FAULTS[fault]
    row = rows(change)
    assert row.verdict == "not shown"
    assert any(text.startswith(rule) for text in row.broken), row.broken


def test_an_untuned_baseline_is_caught() -> None:
    """Rule 5 the other way round: the baseline had fewer trials."""
    row = rows(base=lambda r: replace(r, trials=1))
    assert row.verdict == "not shown"
    assert "the baseline was tuned in 1 runs" in row.broken[0]


def test_a_faster_but_worse_model_is_not_a_win() -> None:
    """Rule 13: sooner at the target, and 5 % worse in the end."""
    row = rows(
        lambda r: replace(
            r, points=tuple(replace(p, value=p.value and p.value * 1.05) for p in r.points)
        )
    )
    assert not row.good_enough
    assert (row.verdict, row.final_quality_ratio) == ("not shown", pytest.approx(1.05))
    assert "final quality" in row.why


def test_a_regime_that_drifted_shows_nothing() -> None:
    """Rule 10 voids all its rows."""
    made = experiment()
    runs = {BASE: [run(s, 1.0, method=BASE) for s in range(6)]}
    runs[METHOD] = [run(s, 0.5) for s in range(6)]
    (row,) = judge_runs(made, "100mbit", runs, TARGET, broken=["rule 10, it drifted"])
    assert (row.verdict, row.why) == ("not shown", "A rule is broken: rule 10, it drifted.")


def test_where_only_the_baseline_misses_the_ratio_is_an_upper_bound() -> None:
    """Its whole run stands for its time, which is too little."""
    mine, theirs = run(0, 0.5), run(0, 1.0, reached_at=99)
    assert time_ratio(mine, theirs, TARGET) == pytest.approx(0.3)
    assert time_ratio(theirs, theirs, TARGET) is None
    assert time_ratio(theirs, mine, TARGET) == float("inf")


@pytest.mark.parametrize(
    ("mine", "theirs", "good"),
    [(0.0, 0.0, True), (0.1, 0.0, False), (0.0, 0.1, True), (float("inf"), 0.1, False)],
)
def test_final_values_of_zero_are_compared(mine: float, theirs: float, good: bool) -> None:
    """No error at all is as good as none and better than some; a run that failed is never good."""

    def ending(value: float) -> Callable[[Run], Run]:
        def change(one: Run) -> Run:
            last = value if value < float("inf") else None
            return replace(one, points=(*one.points[:-1], replace(one.points[-1], value=last)))

        return change

    row = rows(ending(mine), base=ending(theirs))
    assert row.good_enough == good

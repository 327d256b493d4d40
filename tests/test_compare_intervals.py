"""Ratios of paired runs: intervals that hold what they promise, and nothing from nothing."""

from __future__ import annotations

import math
import random

import pytest

from taciturn.compare.intervals import RatioInterval, holm, runs_needed, variation


def test_the_interval_covers_as_promised_with_few_runs() -> None:
    """Of 95 % intervals of five noisy pairs 91 % at least hold the truth; bare percentiles 82."""
    draw = random.Random(1)
    truth, hits, tries = 0.8, 0, 600
    for _ in range(tries):
        interval = RatioInterval.of([truth * math.exp(draw.gauss(0, 0.2)) for _ in range(5)])
        hits += interval.low <= truth <= interval.high
    assert hits / tries > 0.91


def test_one_pair_says_nothing_of_its_spread() -> None:
    """The interval of a single ratio is everything, and so is that of none."""
    one = RatioInterval.of([0.5])
    assert (one.ratio, one.low, one.high, one.p_value) == (0.5, 0.0, math.inf, 1.0)
    none = RatioInterval.of([])
    assert (none.low, none.high, none.pairs) == (0.0, math.inf, 0)


def test_a_miss_is_never_averaged_away() -> None:
    """One infinite ratio among good ones leaves nothing shown to be faster."""
    interval = RatioInterval.of([0.3, 0.31, 0.29, 0.3, math.inf])
    assert math.isinf(interval.high)
    assert interval.p_below == 0
    assert runs_needed([0.3, math.inf], 5) is None


def test_equal_ratios_are_no_evidence_of_more_than_they_say() -> None:
    """Pairs without any spread: the interval is a point, at 1 nothing is shown."""
    same = RatioInterval.of([1.0] * 5)
    assert (same.low, same.high, same.p_value) == (1.0, 1.0, 1.0)
    less = RatioInterval.of([0.9] * 5)
    assert less.low == pytest.approx(0.9)
    assert less.p_value < 1e-9


def test_holm_by_hand() -> None:
    """0.01, 0.02, 0.03, 0.5: the first is held against 0.0125, the second against 0.0167."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == [False, True, False, False]
    assert holm([0.01, 0.011, 0.5]) == [True, True, False]
    assert holm([]) == []


def test_runs_needed_are_enough() -> None:
    """With so many pairs of the same spread Student's interval excludes 1."""
    ratios = [0.9, 1.05, 0.85, 1.0, 0.8]
    count = runs_needed(ratios, 5)
    assert count is not None
    assert 5 < count < 30
    assert runs_needed([0.5, 0.51, 0.49, 0.5, 0.5], 5) == 5


def test_variation() -> None:
    """Deviation over mean; misses make it infinite, one run tells none."""
    assert variation([9.0, 11.0]) == pytest.approx(math.sqrt(2) / 10)
    assert math.isinf(variation([1.0, math.inf]))
    assert math.isnan(variation([1.0]))

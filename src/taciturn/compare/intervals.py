"""Ratios of paired runs: their mean, its interval, and how many more would settle it.

The unit is the independent run. The interval is a bootstrap of the mean of the log ratios, over
pairs, with the expansion that small samples need: the percentiles are those that make an interval
of a normal sample as wide as Student's t (Hesterberg, What teachers should know about the
bootstrap, The American Statistician 69, 2015, section 5.2, "expanded percentile interval").
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import norm, t

__all__ = ["RatioInterval", "holm", "runs_needed", "variation"]

RESAMPLES = 20_000
EXACT = 6
"""Up to so many pairs all resamples are taken instead of drawn ones: at most 46 656."""
MOST_RUNS = 1000


@dataclass(frozen=True)
class RatioInterval:
    """The geometric mean of paired ratios.

    Attributes:
        ratio: below 1 is better; infinite if some run never got there.
        low: end of the interval.
        high: likewise.
        p_below: share of the resamples in which the mean is below 1.
        p_value: of Student's paired test of the log ratios, two-sided; for Holm's procedure.
        pairs: how many.
    """

    ratio: float
    low: float
    high: float
    p_below: float
    p_value: float
    pairs: int

    @classmethod
    def of(cls, ratios: Sequence[float], level: float = 0.95) -> RatioInterval:
        """The interval of ratios, one for each pair; infinite ones are misses.

        With fewer than two pairs nothing is known of their spread: the interval is everything.
        """
        n = len(ratios)
        if not n:
            return cls(math.nan, 0.0, math.inf, math.nan, 1.0, 0)
        if any(math.isinf(r) for r in ratios):
            finite = [math.log(r) for r in ratios if math.isfinite(r)]
            low = 0.0 if n < 2 or not finite else math.exp(min(finite))
            return cls(math.inf, low, math.inf, 0.0, 1.0, n)
        logs = [math.log(r) for r in ratios]
        mean = math.fsum(logs) / n
        if n < 2:
            return cls(math.exp(mean), 0.0, math.inf, float(mean < 0), 1.0, n)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (n - 1))
        # alpha' = Phi(-sqrt(n / (n - 1)) t)
        tail = float(norm.cdf(-math.sqrt(n / (n - 1)) * t.ppf(0.5 + level / 2, n - 1)))
        means = sorted(_means(logs))
        return cls(
            ratio=math.exp(mean),
            low=math.exp(_quantile(means, tail)),
            high=math.exp(_quantile(means, 1 - tail)),
            p_below=sum(m < 0 for m in means) / len(means),
            p_value=_p_value(mean, deviation, n),
            pairs=n,
        )


def _means(logs: Sequence[float]) -> list[float]:
    n = len(logs)
    if n <= EXACT:
        return [math.fsum(some) / n for some in itertools.product(logs, repeat=n)]
    draw = random.Random(0)
    return [math.fsum(draw.choices(logs, k=n)) / n for _ in range(RESAMPLES)]


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _p_value(mean: float, deviation: float, n: int) -> float:
    if deviation == 0:  # such as times that were composed of the same steps
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / (deviation / math.sqrt(n)), n - 1))


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several hypotheses are shown when all are looked at (Holm's procedure)."""
    shown = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for place, index in enumerate(order):
        if p_values[index] > level / (len(p_values) - place):
            break
        shown[index] = True
    return shown


def variation(times: Sequence[float]) -> float:
    """Coefficient of variation: deviation over mean; infinite with misses, NaN of one run."""
    if len(times) < 2:
        return math.nan
    if any(math.isinf(x) for x in times):
        return math.inf
    mean = math.fsum(times) / len(times)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in times) / (len(times) - 1)) / mean


def runs_needed(ratios: Sequence[float], least: int, level: float = 0.95) -> int | None:
    """How many pairs in all would show a mean like this one, at least ``least``.

    None if that cannot be told: with misses, of fewer than two pairs, or beyond a thousand.
    """
    if len(ratios) < 2 or any(math.isinf(r) for r in ratios):
        return None
    logs = [math.log(r) for r in ratios]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    for n in range(max(2, least), MOST_RUNS + 1):
        if t.ppf(0.5 + level / 2, n - 1) * deviation / math.sqrt(n) < abs(mean):
            return n
    return None

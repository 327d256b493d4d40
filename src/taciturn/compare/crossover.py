"""At which bandwidth a method begins to pay, between the regimes that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from taciturn.compare.verdict import Row

__all__ = ["Crossover", "crossovers"]


@dataclass(frozen=True)
class Crossover:
    """Where a method's time to the target is the baseline's: below it is faster, above slower.

    Attributes:
        method: as compared.
        bits_per_s: the bandwidth.
        low, high: where the ends of the ratio's interval are 1; None where that is beyond the
            regimes that were measured.
    """

    method: str
    bits_per_s: float
    low: float | None
    high: float | None


def crossovers(rows: Sequence[Row], bits_per_s: Mapping[str, float]) -> list[Crossover]:
    """The crossover of each method that has one between two regimes.

    Args:
        rows: of all regimes.
        bits_per_s: of each regime; those without are left out.
    """
    found = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = [r for r in rows if r.method == method and r.regime in bits_per_s]
        some = sorted(((bits_per_s[r.regime], r) for r in mine), key=_bits_per_s)
        middle = _at_one([(rate, r.time_ratio) for rate, r in some])
        if middle is None:
            continue
        found.append(
            Crossover(
                method,
                middle,
                low=_at_one([(rate, r.time_ratio_high) for rate, r in some]),
                high=_at_one([(rate, r.time_ratio_low) for rate, r in some]),
            )
        )
    return found


def _bits_per_s(one: tuple[float, Row]) -> float:
    return one[0]


def _at_one(points: Sequence[tuple[float, float | None]]) -> float | None:
    """Return where ratios pass 1 upwards: straight in logarithms between two bandwidths."""
    known = [(rate, ratio) for rate, ratio in points if ratio is not None and ratio > 0]
    for (slow, below), (fast, above) in pairwise(known):
        if below < 1 <= above:
            share = -math.log(below) / math.log(above / below)
            return slow * math.pow(fast / slow, share)
    return None

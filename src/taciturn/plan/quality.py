"""What methods did to losses, from the tables of measurements that the project holds.

``quality.json`` beside this file is made from them (``benchmarks/plan_quality.py``), so that an
installed package has it too. Such figures are of one small model: they say which methods to be
careful with, not what another model's loss will be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from taciturn.plan.candidates import Candidate

__all__ = ["Losses", "losses_of"]


@dataclass(frozen=True)
class Losses:
    """Held-out loss of a method, over that of a baseline in the same runs.

    Attributes:
        ratio: mean over the runs.
        low: least.
        high: greatest.
        runs: how many.
        error: of the average gradient, relative to its norm; None if it was not measured.
        spread: of the replicas' gradients, likewise.
        source: which table, and of what.
    """

    ratio: float
    low: float
    high: float
    runs: int
    error: float | None
    spread: float | None
    source: str


@cache
def _table() -> dict[str, Losses]:
    text = resources.files("taciturn.plan").joinpath("quality.json").read_text("utf-8")
    return {name: Losses(**row) for name, row in json.loads(text).items()}


def losses_of(candidate: Candidate) -> Losses | None:
    """What the tables say of a candidate; None if it is in none."""
    return _table().get(candidate.losses or candidate.method)

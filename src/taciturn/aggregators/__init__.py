"""This rank's gradients in, their average over ranks out: exact, rounded, low-rank or sparse.

Each obeys the contract in ``base``. Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn.lazy import lazily

if TYPE_CHECKING:
    from taciturn.aggregators.base import Aggregator, Group
    from taciturn.aggregators.cast import Cast
    from taciturn.aggregators.mean import Mean
    from taciturn.aggregators.powersgd import PowerSGD
    from taciturn.aggregators.topk import TopK

__all__ = ["Aggregator", "Cast", "Group", "Mean", "PowerSGD", "TopK"]

__getattr__ = lazily(
    __name__,
    {
        "Aggregator": "base",
        "Cast": "cast",
        "Group": "base",
        "Mean": "mean",
        "PowerSGD": "powersgd",
        "TopK": "topk",
    },
)

"""This rank's gradients in, their average over ranks out: exact, rounded, low-rank or sparse.

Each obeys the contract in ``base``. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taciturn.aggregators.base import Aggregator, Group
    from taciturn.aggregators.cast import Cast
    from taciturn.aggregators.mean import Mean
    from taciturn.aggregators.powersgd import PowerSGD
    from taciturn.aggregators.topk import TopK

__all__ = ["Aggregator", "Cast", "Group", "Mean", "PowerSGD", "TopK"]

_HOMES = {
    "Aggregator": "base",
    "Cast": "cast",
    "Group": "base",
    "Mean": "mean",
    "PowerSGD": "powersgd",
    "TopK": "topk",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

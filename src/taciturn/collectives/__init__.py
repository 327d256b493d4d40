"""All-reduce in several ways: exact, coded, quantized. Each obeys the contract in ``base``.

Importing this package imports nothing until a name is used, so that ``collectives.codes``, which
needs no torch, can be used without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taciturn.collectives.backend import Backend
    from taciturn.collectives.base import Collective, Cost
    from taciturn.collectives.coded_ring import CodedRing
    from taciturn.collectives.direct import Direct
    from taciturn.collectives.quantized_ring import QuantizedRing
    from taciturn.collectives.ring import Ring, all_gather, reduce_scatter

__all__ = [
    "Backend",
    "CodedRing",
    "Collective",
    "Cost",
    "Direct",
    "QuantizedRing",
    "Ring",
    "all_gather",
    "reduce_scatter",
]

_HOMES = {
    "Backend": "backend",
    "CodedRing": "coded_ring",
    "Collective": "base",
    "Cost": "base",
    "Direct": "direct",
    "QuantizedRing": "quantized_ring",
    "Ring": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

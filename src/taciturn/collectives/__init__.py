"""All-reduce in several ways: exact, coded, quantized. Each obeys the contract in ``base``.

Importing this package imports nothing until a name is used, so that ``collectives.codes``, which
needs no torch, can be used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn.lazy import lazily

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

__getattr__ = lazily(
    __name__,
    {
        "Backend": "backend",
        "CodedRing": "coded_ring",
        "Collective": "base",
        "Cost": "base",
        "Direct": "direct",
        "QuantizedRing": "quantized_ring",
        "Ring": "ring",
        "all_gather": "ring",
        "reduce_scatter": "ring",
    },
)

"""The design of codes for the coded ring: numpy and scipy only, no torch.

:func:`design` makes a :class:`Code`, which knows its table, decoders and expected errors;
:func:`choose` finds the one that sends the fewest bytes within given errors. Names are loaded when
they are first used: how far parameters may go (``limits``) can be told without numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn.lazy import lazily

if TYPE_CHECKING:
    from taciturn.collectives.codes.choice import Choice, choose
    from taciturn.collectives.codes.constructions import CODES, CodeSpec, design
    from taciturn.collectives.codes.errors import CodeErrors, rounding_of
    from taciturn.collectives.codes.model import Code, Own

__all__ = [
    "CODES",
    "Choice",
    "Code",
    "CodeErrors",
    "CodeSpec",
    "Own",
    "choose",
    "design",
    "rounding_of",
]

__getattr__ = lazily(
    __name__,
    {
        "CODES": "constructions",
        "Choice": "choice",
        "Code": "model",
        "CodeErrors": "errors",
        "CodeSpec": "constructions",
        "Own": "model",
        "choose": "choice",
        "design": "constructions",
        "rounding_of": "errors",
    },
)

"""Ranges in which the numbers of a configuration must lie, checked when it is made.

``True`` is no number here, nor is ``4.0`` a whole one: such values come by mistake, and checksums
that ranks compare would tell them apart from 1 and 4.
"""

from __future__ import annotations

import math

from taciturn.errors import CodeError, InputError

__all__ = ["LARGEST_WHOLE", "check_number", "check_whole"]

LARGEST_WHOLE = 10**18 - 1
"""The largest whole number that a method string can hold; far above any use."""


def check_whole(
    name: str,
    value: object,
    least: int,
    most: int = LARGEST_WHOLE,
    *,
    hint: str = "",
    error: type[InputError | CodeError] = InputError,
) -> None:
    """Raise ``error`` unless ``value`` is a whole number from ``least`` to ``most``.

    Args:
        name: of the field, as it is written.
        value: what it was given.
        least: least value possible.
        most: greatest value possible.
        hint: why so, or what is usual; follows the range in the message.
        error: InputError, or CodeError for what only concerns codes.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole and least <= value <= most):  # type: ignore[operator]
        unlimited = most == LARGEST_WHOLE and not (whole and value > most)  # type: ignore[operator]
        reach = f"from {least} on" if unlimited else f"from {least} to {most}"
        raise error(f"{name}={_shown(value)}: give a whole number {reach}{hint and f'; {hint}'}")


def check_number(
    name: str,
    value: object,
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
    hint: str = "",
    error: type[InputError | CodeError] = InputError,
) -> None:
    """Raise ``error`` unless ``value`` is a finite number from ``least`` to ``most``.

    Args:
        name: of the field, as it is written.
        value: what it was given.
        least: least value possible.
        most: greatest value possible; infinite for any finite one.
        above: ``least`` itself is not possible.
        hint: why so, or what is usual; follows the range in the message.
        error: InputError, or CodeError for what only concerns codes.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number:
        inside = value > least if above else value >= least  # type: ignore[operator]
        if inside and value <= most and value < math.inf:  # type: ignore[operator]
            return
    reach = f"above {least:g}" if above else f"from {least:g} on"
    if most < math.inf:
        reach = f"above {least:g} and at most {most:g}" if above else f"from {least:g} to {most:g}"
    raise error(f"{name}={_shown(value)}: give a finite number {reach}{hint and f'; {hint}'}")


def _shown(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

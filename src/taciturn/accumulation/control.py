"""What ranks tell each other at the end of a window: one small vector, summed over ranks."""

from __future__ import annotations

import zlib

__all__ = [
    "FIXED", "LOSS", "MICROBATCHES", "MORE", "SETTINGS", "SQUARES", "TOKENS", "alike", "moments",
]  # fmt: skip

TOKENS, LOSS, SQUARES, MORE, MICROBATCHES, SETTINGS, *_, FIXED = range(10)
"""Places in the vector: valid tokens, losses, squares of gradients, having another batch,
microbatches, four for the settings of the step; from FIXED on, one for each parameter that this
rank has used."""


def moments(text: str) -> list[float]:
    """Return numbers whose sums over ranks tell whether all ranks gave the same text."""
    checksum = zlib.crc32(text.encode())
    halves = (checksum >> 16, checksum & 0xFFFF)  # their squares' sums are exact in fp64
    return [float(number) for half in halves for number in (half, half * half)]


def alike(sums: list[float], ranks: int) -> bool:
    """Say from the sums of :func:`moments` over ranks whether all are equal."""
    # N sum x^2 >= (sum x)^2, and equal only if all x are.
    first, first_squares, second, second_squares = map(int, sums)
    return ranks * first_squares == first**2 and ranks * second_squares == second**2

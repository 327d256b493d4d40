"""Search for the optimized code: the generator whose code has the smallest replica error.

Every rank searches for itself and must find the same code. So the candidates lie on a fixed grid,
and the search moves only for a gain of one part in a thousand, far above what rounding on another
processor could change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from taciturn.collectives.codes import decoding
from taciturn.collectives.codes.errors import gain_of_errors, rounded_energy
from taciturn.collectives.codes.tables import Shape, generator
from taciturn.errors import CodeError

__all__ = ["search_shape"]

Array: TypeAlias = NDArray[np.float64]
Point: TypeAlias = tuple[int, int, int, int, int]

# Starts, and the step sizes to go on with: far from any good code towards polynomials (down is 1/32
# of up); near one at Fourier codes, of stretch 0.98 and 0.64.
_SEARCHES: tuple[tuple[Point, tuple[int, ...]], ...] = (
    ((-16, 0, -40, 0, 0), (16, 8, 4, 2, 1)),
    ((5, 0, 0, 0, 8), (2, 1)),
    ((0, 0, 0, 0, 8), (4, 2, 1)),
)
_SCALES = (0, 2)  # axes of a point that are scales; exponents move in small steps only
_EXPONENT_STEP = 4
_LEAST_GAIN = 1e-3
_SAMPLED_RESIDUES = 4
# Codes that float64 decodes only in exact arithmetic are of use on fp64 wires alone, and beyond so
# many passes the search among them would take minutes.
_EXACT_BELOW = 1e-12
_MOST_PASSES_EXACT = 16


def _shape(point: Point) -> Shape:
    """The grid: eighths of an octave for up and down / up, sixteenths and eighths for exponents."""
    up, rise, down, fall, taper = point
    return Shape(2 ** (up / 8), rise / 16, 2 ** ((up + down) / 8), fall / 16, taper / 8)


@lru_cache(maxsize=256)
def search_shape(ranks: int, passes: int, rounding: float, condition_bound: float) -> Shape | None:
    """Return the shape with the smallest expected replica error, or None if none meets the bound.

    Args:
        ranks: N >= 2.
        passes: p >= 2.
        rounding: rms relative error of one rounding on the wire.
        condition_bound: largest condition number allowed.
    """

    @cache  # the steps come back to where they were
    def objective(point: Point) -> float:
        return _replica_error(ranks, passes, _shape(point), rounding, condition_bound)

    best: Point | None = None
    lowest = math.inf
    for start, steps in _SEARCHES:
        point, error = _descend(objective, start, steps)
        if error < lowest * (1 - _LEAST_GAIN):
            best, lowest = point, error
    return None if best is None else _shape(best)


def _descend(
    objective: Callable[[Point], float], start: Point, steps: tuple[int, ...]
) -> tuple[Point, float]:
    """Pattern search: along each axis as far as it leads down, at ever smaller steps."""
    point, error = start, objective(start)
    for step in steps:
        settled = False
        while not settled:
            settled = True
            for axis in range(len(start)):
                size = step if axis in _SCALES else min(step, _EXPONENT_STEP)
                for move in (size, -size):
                    while (found := objective(moved := _moved(point, axis, move))) < error * (
                        1 - _LEAST_GAIN
                    ):
                        point, error, settled = moved, found, False
    return point, error


def _moved(point: Point, axis: int, move: int) -> Point:
    """The point with one coordinate changed."""
    up, rise, down, fall, taper = (x + move if i == axis else x for i, x in enumerate(point))
    return up, rise, down, fall, taper


def _replica_error(
    ranks: int, passes: int, shape: Shape, rounding: float, condition_bound: float
) -> float:
    """``Code.expected(...).replica_error`` under centred decoding, from some of the residues.

    W_h is the same for all residues of a shift-invariant code, and the noise varies little.
    Infinite where the code cannot be decoded or its condition number exceeds the bound.
    """
    with np.errstate(all="ignore"):
        table = _table(generator(ranks, passes, shape), passes * ranks + ranks - 1)
    if not np.abs(table).max() < 1e12:
        return math.inf
    energy = rounding**2 * rounded_energy(table, ranks)
    hops = np.arange(1, ranks)
    exact = rounding < _EXACT_BELOW and passes <= _MOST_PASSES_EXACT
    bias, noise = 0.0, 0.0
    residues = sorted({round(w) for w in np.linspace(0, ranks - 1, _SAMPLED_RESIDUES)})
    for w in residues:
        rounds = tuple(range(w if w == ranks - 1 else w + ranks, len(table), ranks))[:passes]
        contributions = table[np.asarray(rounds)[None, :] - hops[:, None]]
        try:
            decoder, condition = decoding.centred(contributions, exact)
        except CodeError:
            return math.inf
        if not condition <= condition_bound:
            return math.inf
        bias += float(((decoder @ contributions - np.eye(passes)) ** 2).sum())
        noise += float((energy * gain_of_errors(decoder, rounds, len(table), False) ** 2).sum())
    return math.sqrt((bias + noise) / (passes * ranks * len(residues)))


def _table(step: Array, rows: int) -> Array:
    """Rows exp(tau B)[0] by doubling: exact enough to compare by, much faster than one by one."""
    power = expm(step)
    table: Array = expm(-(rows - 1) / 2 * step)[:1]
    while len(table) < rows:
        table = np.concatenate([table, table @ power])
        power = power @ power
    return table[:rows]

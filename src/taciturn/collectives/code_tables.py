"""The tables of the coded ring's codes, as plain arrays: one function per construction.

A table has a row V[t] for each t = 0..L. Every family here is *shift-invariant*: there is a
matrix A with ``V[t+1] = V[t] A``, so the span of the columns is the same whenever a rank joins
in, and the errors of centred decoding cancel over ranks (see ``codes``). Times are centred,
``tau = t - mean t``, which changes no span and keeps the numbers small.

A table depends on its arguments alone; two machines may differ in the last bits of a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from taciturn.errors import CodeError

__all__ = [
    "clustered",
    "fourier",
    "near_one",
    "near_roots",
    "polynomial",
    "search_shape",
    "tridiagonal",
]

Array: TypeAlias = NDArray[np.float64]


def _centred_times(rows: int) -> Array:
    """t - mean t, for t = 0..rows-1."""
    return np.arange(rows) - (rows - 1) / 2


def _chain_times(ranks: int, passes: int) -> Array:
    """tau for the L + 1 = pN + N - 1 rows of a code in chains."""
    return _centred_times(passes * ranks + ranks - 1)


def _orthonormal(table: Array) -> Array:
    """QR of the columns, times sqrt(rows), each column's sign kept."""
    q, r = np.linalg.qr(table)
    scaled: Array = q * np.sign(np.diag(r)) * math.sqrt(len(table))
    return scaled


def polynomial(ranks: int, passes: int, eps: float, orthonormal: bool) -> Array:
    """V[t, q] = x_t^q with x_t = eps tau / N; shape (L + 1, p)."""
    tau = _chain_times(ranks, passes)
    if orthonormal:  # the span is the same for every eps: start from a basis that is nearly there
        return _orthonormal(np.polynomial.legendre.legvander(tau / max(tau[-1], 1), passes - 1))
    return np.vander(eps * tau / ranks, passes, increasing=True)


def _cluster(size: int, eps: float, ranks: int) -> Array:
    """d_q of ``size`` nodes 1 + d_q, evenly spread over +-eps / N; 0 for one node."""
    if size > 1 and eps >= ranks:
        raise CodeError(f"eps {eps} puts nodes of {ranks} ranks at 0 or below: give eps < {ranks}")
    return np.linspace(-1, 1, size) * eps / ranks if size > 1 else np.zeros(1)


def clustered(ranks: int, passes: int, eps: float, orthonormal: bool) -> Array:
    """V[t, q] = (1 + d_q)^tau, d_q evenly spread over +-eps / N; shape (L + 1, p)."""
    tau = _chain_times(ranks, passes)
    slopes = np.log1p(_cluster(passes, eps, ranks))
    if not orthonormal:
        return np.exp(np.outer(tau, slopes))
    # The same span, well scaled: divided differences of exp(tau x) at the slopes, which are the
    # first row of exp(tau B), B bidiagonal with the slopes on its diagonal (Opitz).
    step = np.diag(slopes) + np.diag(np.full(passes - 1, 2.0 / len(tau)), 1)
    return _orthonormal(expm(tau[:, None, None] * step)[:, 0, :])


def fourier(ranks: int, passes: int, stretch: float, orthonormal: bool) -> Array:
    """V[t] = sqrt(2) cos and sin of w_k tau, w_k = 2 pi k s / (p N); and a 1 if p is odd.

    k = 1/2, 3/2, ... for even p and 1, 2, ... for odd p, up to (p - 1)/2; shape (L + 1, p). With
    s = 1 the p messages that a rank gets of a chain are a discrete Fourier transform.
    """
    tau = _chain_times(ranks, passes)
    columns = [np.ones_like(tau)] if passes % 2 else []
    for k in np.arange(0.5 if passes % 2 == 0 else 1.0, passes / 2):
        angle = 2 * math.pi * k * stretch / (passes * ranks) * tau
        columns += [math.sqrt(2) * np.cos(angle), math.sqrt(2) * np.sin(angle)]
    table = np.stack(columns, axis=1)
    return _orthonormal(table) if orthonormal else table


Shape: TypeAlias = tuple[float, float, float, float]


def tridiagonal(ranks: int, passes: int, shape: Shape) -> Array:
    """V[t] = first row of exp(tau B / N), B tridiagonal with zero diagonal; shape (L + 1, p).

    Above the diagonal B holds ``up k^rise``, below it ``-down k^fall``, k = 1..p-1, for
    ``shape = (up, rise, down, fall)``. ``down = 0, rise = 0`` gives the polynomials ``(up tau/N)^q / q!``,
    ``up = down`` a rotation, like the Fourier code: the family joins the two.
    """
    up, rise, down, fall = shape
    k = np.arange(1.0, passes)
    generator = np.diag(up * k**rise, 1) - np.diag(down * k**fall, -1)
    tau = _chain_times(ranks, passes)
    table: Array = expm(tau[:, None, None] * (generator / ranks))[:, 0, :]
    return table


# Grid of the search below, so coarse that no two machines take different decisions: octaves / 8 for
# up and down, sixteenths for rise and fall.
def _shape(point: tuple[int, ...]) -> Shape:
    """The grid point as a shape."""
    up, rise, down, fall = point
    return 2 ** (up / 8), rise / 16, 2 ** (down / 8), fall / 16


# From where to search: towards polynomials (down is nearly 0) and towards rotations.
_STARTS = ((-16, 0, -56, 0), (0, 0, -8, 0))
_STEPS = (16, 8, 4, 2, 1)
_LEAST_GAIN = 1e-3


def search_shape(objective: Callable[[Shape], float]) -> Shape:
    """Return the shape with the smallest objective, by pattern search on a fixed grid.

    Every rank searches for itself and must find the same: points lie on a grid, and a move is
    made only for a gain of more than one in a thousand, far above what rounding can change. Costs
    100 to 300 evaluations.
    """
    known: dict[tuple[int, ...], float] = {}

    def value(point: tuple[int, ...]) -> float:
        if point not in known:
            known[point] = objective(_shape(point))
        return known[point]

    def descend(point: tuple[int, ...]) -> tuple[int, ...]:
        for step in _STEPS:
            moved = True
            while moved:
                moved = False
                for axis in range(len(point)):
                    for sign in (1, -1):
                        near = (*point[:axis], point[axis] + sign * step, *point[axis + 1 :])
                        if value(near) < value(point) * (1 - _LEAST_GAIN):
                            point, moved = near, True
        return point

    ends = [descend(start) for start in _STARTS]
    first, second = ends
    better = value(second) < value(first) * (1 - _LEAST_GAIN)
    return _shape(second if better else first)


def near_one(ranks: int, components: int, delta: float) -> Array:
    """Vandermonde, shape (L + 1, c): V[t, j] = x_j^t with x_j = 1 + delta (j - (c - 1)/2) / c."""
    nodes = 1 + delta * _centred_times(components) / components
    if nodes[0] <= 0:
        raise CodeError(f"eps {delta} puts nodes at 0 or below: give eps <= 1")
    table: Array = nodes[None, :] ** np.arange(components + ranks - 1)[:, None]
    return table


def near_roots(ranks: int, components: int, eps: float) -> tuple[Array, tuple[int, ...]]:
    """Nodes clustered at the N-th roots of unity, real form, shape (L + 1, c); and ``Code.turns``.

    Root w^j gets floor(c/N) or ceil(c/N) nodes w^j (1 + d), the longer clusters at a set of roots
    closed under conjugation, so that conjugate pairs make real columns
    ``sqrt(2) (1 + d)^tau`` times cos and sin of ``2 pi j t / N``. The largest cluster holds
    ceil(c/N) nodes, hence a condition number O(eps^-r), r = ceil(c/N) - 1.
    """
    t = np.arange(components + ranks - 1)
    tau = _centred_times(len(t))
    columns: list[Array] = []
    turns: list[int] = []
    for j, size in enumerate(_cluster_sizes(ranks, components)):
        for d in _cluster(size, eps, ranks) if size else ():
            growth = np.exp(tau * math.log1p(d))
            phase = 2 * math.pi * ((j * t) % ranks) / ranks
            if 2 * j % ranks == 0:  # 1 and -1: real by themselves
                columns.append(growth * np.cos(phase).round())
                turns.append(j)
            else:
                columns += [math.sqrt(2) * growth * f(phase) for f in (np.cos, np.sin)]
                turns += [j, -j]
    return np.stack(columns, axis=1), tuple(turns)


def _cluster_sizes(ranks: int, components: int) -> list[int]:
    """Nodes at each root w^j, j = 0..N/2; w^-j gets as many as w^j, and they add up to c."""
    base, extra = divmod(components, ranks)
    pairs = range(1, (ranks + 1) // 2)
    # as many whole pairs as fit; one that remains goes to the root 1
    whole = min(extra // 2, len(pairs))
    longer = {*pairs[:whole], *([0] if extra > 2 * whole else [])}
    return [base + (j in longer) for j in range(ranks // 2 + 1)]

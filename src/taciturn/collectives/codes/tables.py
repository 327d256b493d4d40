"""The tables of the coded ring's codes, as plain arrays: one function per construction.

A table has a row V[t] for each t = 0..L. Every family here is *shift-invariant*: there is a
matrix A with ``V[t+1] = V[t] A``, so the span of the columns is the same whenever a rank joins
in, and the errors of centred decoding cancel over ranks (see ``codes``). Times are centred,
``tau = t - mean t``, which changes no span and keeps the numbers small.

A table depends on its arguments alone; two machines may differ in the last bits of a cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from taciturn.errors import CodeError

__all__ = [
    "Shape",
    "clustered",
    "fourier",
    "generator",
    "near_one",
    "near_roots",
    "polynomial",
    "tridiagonal",
]

Array: TypeAlias = NDArray[np.float64]


def _centred_times(rows: int) -> Array:
    """Return t - mean t, for t = 0..rows-1."""
    return np.arange(float(rows)) - (rows - 1) / 2


def _chain_times(ranks: int, passes: int) -> Array:
    """Return tau for the L + 1 = pN + N - 1 rows of a code in chains."""
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
    with np.errstate(over="ignore"):  # an infinite table is refused where codes are made
        table: Array = np.vander(eps * tau / ranks, passes, increasing=True)
    return table


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
        powers: Array = np.exp(np.outer(tau, slopes))
        return powers
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
    table: Array = np.stack(columns, axis=1)
    return _orthonormal(table) if orthonormal else table


@dataclass(frozen=True)
class Shape:
    """Entries of the optimized code's generator, off its diagonal, k = 1..p-1.

    Above the diagonal ``up (k/m)^rise g_k^taper``, below ``-down (k/m)^fall g_k^taper``, where m is
    the geometric mean of 1..p-1 and ``g_k = sqrt((1 - k^2/p^2) / (1 - 1/(4 k^2)))``.
    """

    up: float
    rise: float
    down: float
    fall: float
    taper: float


def generator(ranks: int, passes: int, shape: Shape) -> Array:
    """Return B with V[t] = first row of exp(tau B): tridiagonal, zero diagonal, shape (p, p).

    The family joins two others. ``down = rise = taper = 0`` gives the polynomials
    ``(up tau / N)^q / q!``; ``up = down = pi s / 2, rise = fall = 0, taper = 1`` gives the Fourier
    code of stretch s in another orthogonal basis, since the numbers g_k make up the Jacobi matrix
    of p evenly spaced frequencies.
    """
    k = np.arange(1.0, passes)
    scaled = k / np.exp(np.log(k).mean())
    profile = np.sqrt((1 - (k / passes) ** 2) / (1 - 1 / (4 * k**2))) ** shape.taper
    above = shape.up * scaled**shape.rise * profile
    below = shape.down * scaled**shape.fall * profile
    result: Array = (np.diag(above, 1) - np.diag(below, -1)) / ranks
    return result


def tridiagonal(ranks: int, passes: int, shape: Shape) -> Array:
    """V[t] = first row of exp(tau B), B of ``generator``; shape (L + 1, p)."""
    tau = _chain_times(ranks, passes)
    table: Array = expm(tau[:, None, None] * generator(ranks, passes, shape))[:, 0, :]
    return table


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

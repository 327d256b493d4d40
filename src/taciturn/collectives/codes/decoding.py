"""Decoders of one chain.

From ``V_h``, the coefficients with which the sender h hops away enters the received messages, to a
matrix D with ``D V_h`` near the identity for every h. The tables of accurate codes are
ill-conditioned, so D is computed with care: by LAPACK while it has digits left, in exact integers
beyond.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from taciturn.errors import CodeError

__all__ = ["centred", "least_squares"]

Array: TypeAlias = NDArray[np.float64]

# Condition number above which the inverse is formed in exact arithmetic: float64's has few of its
# 16 digits left there.
_EXACT_ABOVE = 1e12
# Size^4 times the bits of an entry: up to here exact elimination takes at most 0.15 s. That is 20
# passes of polynomials, 31 of clusters, 32 components of nodes near one. Polynomials of 32 passes
# would take 2 to 6 s, for each rank and each eps that is tried, only to decode noise on any wire.
_MOST_EXACT_WORK = 6e7
_ILL_CONDITIONED = (
    f"a decoding matrix of size {{}} with a condition number above {_EXACT_ABOVE:.0e}: "
    "larger eps or stretch, fewer passes or components"
)


def centred(contributions: Array, exact: bool = True) -> tuple[Array, float]:
    """Return the inverse of the mean over h of V_h, and the mean's condition number (2-norm).

    What all senders have in common is then decoded exactly, but for rounding.

    Args:
        contributions: V_h, shape (H, k, k).
        exact: invert an ill-conditioned mean in exact integers, which is slow; else refuse it.

    Raises:
        CodeError: the mean is singular, or too ill-conditioned.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
        mean = contributions.mean(axis=0)
    try:
        # Transposed: LAPACK keeps |A X - I| small and decoding needs |D M - I| small.
        inverse = np.linalg.inv(mean.T).T
        condition = _condition(mean, inverse)
    except np.linalg.LinAlgError:
        condition = math.inf
    if not condition < _EXACT_ABOVE:
        if not exact:
            raise CodeError(_ILL_CONDITIONED.format(len(mean)))
        inverse = _exact_inverse_of_mean(contributions)
        condition = _condition(mean, inverse)
    return np.ascontiguousarray(inverse), condition


def least_squares(contributions: Array) -> Array:
    """Return D minimising ``sum over h of |D V_h - I|^2``: close replicas, a biased mean.

    Args:
        contributions: V_h, shape (H, k, k).
    """
    order = contributions.shape[-1]
    rows = contributions.transpose(0, 2, 1).reshape(-1, order)  # V_h^T D^T = I, stacked over h
    target = np.tile(np.eye(order), (len(contributions), 1))
    if order == 1:
        return (rows.T @ target) / (rows.T @ rows)  # exactly 1 where V is
    solution = np.linalg.lstsq(rows, target, rcond=1e-15)[0]
    return np.ascontiguousarray(solution.T)


def _condition(matrix: Array, inverse: Array) -> float:
    """|A| |A^-1| in the 2-norm: right also where the small singular values of A are not."""
    if not (np.isfinite(matrix).all() and np.isfinite(inverse).all()):
        return math.inf
    return float(np.linalg.norm(matrix, 2) * np.linalg.norm(inverse, 2))


def _exact_inverse_of_mean(contributions: Array) -> Array:
    """``centred``'s inverse, each entry correctly rounded.

    Floats are dyadic, so all entries times one power of two are integers, and elimination that
    divides only where it goes (Bareiss) keeps them so.
    """
    count, order, _ = contributions.shape
    # Columns are brought to one size first, exactly: powers of a small eps would make long numbers.
    sizes = np.frexp(np.abs(contributions).max(axis=(0, 1)))[1]
    contributions = np.ldexp(contributions, -sizes)
    exponents = np.frexp(contributions[contributions != 0])[1]
    bits = max(0, 53 - int(exponents.min(initial=53)))
    if order**4 * bits > _MOST_EXACT_WORK:
        raise CodeError(_ILL_CONDITIONED.format(order))
    scale = 1 << bits
    total = [
        [sum(_scaled(float(v), scale) for v in contributions[:, i, j]) for j in range(order)]
        for i in range(order)
    ]
    rows = [row + [int(i == j) for j in range(order)] for i, row in enumerate(total)]
    previous = 1
    for k in range(order):
        pivot = max(range(k, order), key=lambda i: abs(rows[i][k]))
        if rows[pivot][k] == 0:
            raise CodeError(
                "the decoding matrix is singular in float64: "
                "larger eps or stretch, fewer passes or components"
            )
        rows[k], rows[pivot] = rows[pivot], rows[k]
        head = rows[k]
        for i in range(order):
            if i != k:
                lead = rows[i][k]
                rows[i] = [
                    (head[k] * x - lead * y) // previous for x, y in zip(rows[i], head, strict=True)
                ]
        previous = head[k]
    # rows = det [I | inverse of total], and the mean is total / (count scale)
    try:
        inverse = np.array(
            [[x * count * scale / row[i] for x in row[order:]] for i, row in enumerate(rows)]
        )
    except OverflowError:
        inverse = np.array(math.inf)
    with np.errstate(over="ignore"):
        inverse = np.ldexp(inverse, -sizes[:, None])
    if not np.isfinite(inverse).all():
        raise CodeError(
            "the decoder exceeds float64: larger eps or stretch, fewer passes or components"
        )
    result: Array = inverse
    return result


def _scaled(value: float, scale: int) -> int:
    """Value times scale, an integer by choice of scale."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * scale // denominator

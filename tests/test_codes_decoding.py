from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from taciturn.collectives.codes.decoding import centred, least_squares
from taciturn.errors import CodeError


def hilbert(order: int) -> np.ndarray:
    return np.array([[1 / (i + j + 1) for j in range(order)] for i in range(order)])


@pytest.mark.parametrize("order", [2, 5, 10, 14])
def test_the_inverse_is_left_inverse_to_the_last_digits(order: int) -> None:
    """|D M - I| <= 1e-15 x condition number, in exact arithmetic, for Hilbert matrices."""
    matrix = hilbert(order)
    inverse, condition = centred(matrix[None])
    exact = [
        [
            sum(Fraction(inverse[i, k]) * Fraction(matrix[k, j]) for k in range(order)) - (i == j)
            for j in range(order)
        ]
        for i in range(order)
    ]
    assert max(abs(float(x)) for row in exact for x in row) <= 1e-15 * condition


def test_the_condition_number_is_right_beyond_float64() -> None:
    """Hilbert's of order 12 is 1.76e16 in exact arithmetic; its floats' is within a factor of 2."""
    assert centred(hilbert(12)[None])[1] == pytest.approx(1.76e16, rel=0.5)


def test_the_size_of_columns_changes_no_digit() -> None:
    """Columns times powers of two give rows of the inverse over them, bit for bit."""
    powers = 2.0 ** np.array([0, -60, 10, -3, -200, 0, 7, -1, 30, -90])
    inverse = centred(hilbert(10)[None])[0]
    assert np.array_equal(centred((hilbert(10) * powers)[None])[0], inverse / powers[:, None])


def test_the_mean_over_hops_is_inverted() -> None:
    rng = np.random.default_rng(0)
    contributions = np.eye(4) + 0.1 * rng.standard_normal((7, 4, 4))
    inverse, condition = centred(contributions)
    assert np.allclose(inverse @ contributions.mean(axis=0), np.eye(4))
    assert condition == pytest.approx(np.linalg.cond(contributions.mean(axis=0)))


def test_least_squares_leaves_the_smallest_residual() -> None:
    """No change of D in any direction lowers the sum of squares."""
    rng = np.random.default_rng(0)
    contributions = np.eye(3) + 0.3 * rng.standard_normal((5, 3, 3))

    def residual(decoder: np.ndarray) -> float:
        return float(((decoder @ contributions - np.eye(3)) ** 2).sum())

    best = least_squares(contributions)
    for _ in range(20):
        assert residual(best + 1e-4 * rng.standard_normal((3, 3))) > residual(best)


def test_singular_codes_are_refused() -> None:
    """Exactly singular, beyond float64's range, or hopeless and too large to treat exactly."""
    with pytest.raises(CodeError, match="singular in float64"):
        centred(np.ones((3, 2, 2)))
    with pytest.raises(CodeError, match="exceeds float64"):
        centred(np.diag([1.0, 5e-324])[None])
    with pytest.raises(CodeError, match="of size 40"):
        centred(np.ones((1, 40, 40)))

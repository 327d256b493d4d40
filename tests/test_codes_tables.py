from __future__ import annotations

import math

import numpy as np
import pytest

from taciturn.collectives.codes import tables
from taciturn.collectives.codes.tables import Shape

SHIFTED = {
    "polynomial": tables.polynomial(5, 3, 0.3, False),
    "polynomial orthonormal": tables.polynomial(5, 3, 1.0, True),
    "clustered": tables.clustered(5, 3, 0.3, False),
    "clustered orthonormal": tables.clustered(5, 3, 0.3, True),
    "fourier": tables.fourier(5, 4, 0.8, False),
    "fourier odd": tables.fourier(5, 5, 1.0, False),
    "tridiagonal": tables.tridiagonal(5, 4, Shape(0.8, 0.25, 0.3, -0.5, 0.5)),
    "near one": tables.near_one(3, 4, 0.5),
    "near roots": tables.near_roots(4, 7, 0.3)[0],
}


@pytest.mark.parametrize("name", SHIFTED)
def test_every_table_is_shift_invariant(name: str) -> None:
    """There is one A with V[t+1] = V[t] A for all t."""
    table = SHIFTED[name]
    step, *_ = np.linalg.lstsq(table[:-1], table[1:], rcond=None)
    assert np.allclose(table[:-1] @ step, table[1:], atol=1e-9 * np.abs(table).max())


def test_tridiagonal_joins_polynomials_and_rotations() -> None:
    """No down: (up tau / N)^q / q!; up = down = pi s / 2, tapered: the Fourier code, turned."""
    ranks, passes = 6, 4
    tau = np.arange(passes * ranks + ranks - 1.0)
    tau -= tau.mean()
    taylor = np.stack([(0.4 * tau / ranks) ** q / math.factorial(q) for q in range(passes)], axis=1)
    assert np.allclose(tables.tridiagonal(ranks, passes, Shape(0.4, 0, 0, 0, 0)), taylor)
    for p in (4, 5):
        half_turn = math.pi * 0.7 / 2
        turned = tables.tridiagonal(ranks, p, Shape(half_turn, 0, half_turn, 0, 1))
        fourier = tables.fourier(ranks, p, 0.7, False) / math.sqrt(p)
        # the same up to an orthogonal change of basis: the same scalar products between rows
        assert np.allclose(turned @ turned.T, fourier @ fourier.T, atol=1e-12)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_clusters_at_the_roots_hold_all_components(ranks: int) -> None:
    """C columns, closed under conjugation, none with more than ceil(c/N) nodes."""
    for components in range(1, 4 * ranks + 1):
        table, turns = tables.near_roots(ranks, components, 0.01)
        assert table.shape == (components + ranks - 1, components)
        assert len(turns) == components
        turned = [j % ranks for j in turns]
        counts = [turned.count(j) for j in range(ranks)]
        assert counts == [counts[-j % ranks] for j in range(ranks)]
        assert max(counts) == math.ceil(components / ranks)

"""Products of small matrices with long rows, summed in fp64 where the rows are fp32.

Compiled, since the alternative, fp64 copies of the rows and of the result in memory, takes twice
the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from taciturn.collectives.compiled import contracted, run_without_cache_if_need_be

__all__ = ["add_wide_product", "prepare", "wide_product"]

_SPAN = 1024
"""Columns at a time: 16 rows of them in fp64 are 128 KiB, within a second-level cache."""


@contracted
def _copy(source: Any, target: Any) -> None:
    for j in range(source.size):
        target[j] = source[j]


@contracted
def _increase(source: Any, target: Any) -> None:
    for j in range(source.size):
        target[j] = source[j] + target[j]


@contracted
def _add_row(sums: Any, factor: float, row: Any) -> None:
    for j in range(sums.size):
        sums[j] += factor * row[j]


@contracted
def _add_four_rows_twice(
    first: Any, second: Any, f: Any, s: Any, a: Any, b: Any, c: Any, d: Any
) -> None:
    """Add to two rows of sums: each of four rows is read once for both, the sums once for four."""
    f0, f1, f2, f3 = f[0], f[1], f[2], f[3]
    s0, s1, s2, s3 = s[0], s[1], s[2], s[3]
    for j in range(first.size):
        a0, b0, c0, d0 = a[j], b[j], c[j], d[j]
        first[j] += f0 * a0 + f1 * b0 + f2 * c0 + f3 * d0
        second[j] += s0 * a0 + s1 * b0 + s2 * c0 + s3 * d0


@contracted
def _product(
    matrix: Any, rows: Any, start: int, out: Any, out_start: int, width: int, add: bool
) -> None:
    count, inner = matrix.shape
    wide = np.empty((inner, _SPAN), np.float64)
    sums = np.empty((2, _SPAN), np.float64)
    for offset in range(0, width, _SPAN):
        stop = min(offset + _SPAN, width)
        size = stop - offset
        for k in range(inner):
            _copy(rows[k, start + offset : start + stop], wide[k, :size])
        for i in range(0, count, 2):
            other = min(i + 1, count - 1)  # of an odd number the last is formed twice
            first, second = sums[0, :size], sums[1, :size]
            first[:] = 0
            second[:] = 0
            k = 0
            while k + 4 <= inner:
                _add_four_rows_twice(
                    first, second, matrix[i, k : k + 4], matrix[other, k : k + 4],
                    wide[k, :size], wide[k + 1, :size], wide[k + 2, :size], wide[k + 3, :size],
                )  # fmt: skip
                k += 4
            while k < inner:
                _add_row(first, matrix[i, k], wide[k, :size])
                _add_row(second, matrix[other, k], wide[k, :size])
                k += 1
            place = slice(out_start + offset, out_start + stop)
            if add:
                _increase(first, out[i, place])
                if other > i:
                    _increase(second, out[other, place])
            else:
                _copy(first, out[i, place])
                if other > i:
                    _copy(second, out[other, place])


@contracted
def wide_product(matrix: Any, rows: Any, start: int, out: Any, out_start: int, width: int) -> None:
    """Write ``matrix @ rows[:, start:]`` into ``out[:, out_start:]``, ``width`` columns of each.

    Args:
        matrix: shape (m, k), fp64.
        rows: shape (k, n), fp32, contiguous.
        start: first column of ``rows`` that counts.
        out: shape (m, n'), fp32, contiguous; changed in place.
        out_start: first column of ``out`` that is written.
        width: number of columns.
    """
    _product(matrix, rows, start, out, out_start, width, False)


@contracted
def add_wide_product(
    matrix: Any, rows: Any, start: int, out: Any, out_start: int, width: int
) -> None:
    """The same, added to what ``out`` holds; the sum too is formed in fp64."""
    _product(matrix, rows, start, out, out_start, width, True)


@cache
def prepare() -> None:
    """Compile both, or load them from the cache: before ranks wait for each other."""
    run_without_cache_if_need_be(_run_all)


def _run_all() -> None:
    rows = np.ones((1, 1), np.float32)
    for run in (wide_product, add_wide_product):
        run(rows.astype(np.float64), rows, 0, rows.copy(), 0, 1)

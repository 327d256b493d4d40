from __future__ import annotations

import math
from dataclasses import replace

import pytest

from taciturn.collectives.codes import Code, design, tables
from taciturn.collectives.codes.errors import rounding_of
from taciturn.collectives.codes.search import search_shape


def error(ranks: int, passes: int, shape: tables.Shape, rounding: float) -> float:
    code = Code(
        name="optimized", ranks=ranks, passes=passes, components=ranks * passes, shared=False,
        table=tables.tridiagonal(ranks, passes, shape),
    )  # fmt: skip
    return code.expected(rounding).replica_error


@pytest.mark.parametrize(("wire", "passes"), [("fp32", 3), ("bf16", 4), ("int8", 8)])
def test_the_found_shape_is_a_local_minimum(wire: str, passes: int) -> None:
    """A change of up or down by a tenth gains less than half a percent."""
    rounding = rounding_of(wire)
    shape = search_shape(8, passes, rounding, math.inf)
    assert shape is not None
    found = error(8, passes, shape, rounding)
    for factor in (0.9, 1.1):
        for near in (
            replace(shape, up=factor * shape.up),
            replace(shape, down=factor * shape.down),
            replace(shape, up=factor * shape.up, down=factor * shape.down),
        ):
            assert found <= 1.005 * error(8, passes, near, rounding)


def test_the_shape_does_not_depend_on_the_last_digits() -> None:
    """Machines that round differently find the same: a rounding off by 1e-9 changes nothing."""
    rounding = rounding_of("bf16")
    reference = search_shape(8, 4, rounding, math.inf)
    for change in (1 + 1e-9, 1 - 1e-9, 1 + 1e-12):
        assert search_shape(8, 4, rounding * change, math.inf) == reference


def test_the_design_uses_the_found_shape() -> None:
    rounding = rounding_of("bf16")
    assert design("optimized", 8, 3, rounding=rounding).shape == search_shape(
        8, 3, rounding, math.inf
    )


def test_no_shape_meets_an_impossible_bound() -> None:
    assert search_shape(8, 4, rounding_of("bf16"), 1.0) is None

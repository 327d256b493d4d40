"""The two checks of numbers, and every number of every configuration held against them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest

from taciturn import aggregators, collectives
from taciturn.aggregators import Aggregator, Mean
from taciturn.collectives import Collective
from taciturn.collectives.codes import choose, design, rounding_of
from taciturn.collectives.wires import make_wire
from taciturn.collectives.wires.base import BlockLayout
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import CodeError, InputError
from taciturn.ranges import LARGEST_WHOLE, check_number, check_whole
from taciturn.transport import Transport, run_threads


def nothing(transport: Transport) -> None:
    """What the ranks do where only their number matters."""


# What is called, and what it needs beside the number in question.
CONFIGS: dict[Callable[..., Any], dict[str, Any]] = {
    **{
        found: {}
        for package, contract in ((collectives, Collective), (aggregators, Aggregator))
        for name in package.__all__
        if is_dataclass(found := getattr(package, name)) and issubclass(found, contract)  # type: ignore[arg-type]
    },
    ErrorFeedback: {"inner": Mean()},
    BlockLayout: {"bits": 8},
    make_wire: {"name": "bf16", "dtype": None},
    design: {"code": "fourier", "ranks": 8, "passes": 4},
    choose: {"ranks": 8, "wire_rounding": 1e-3, "numel": 1 << 20, "wire_itemsize": 2},
    rounding_of: {"wire": "int8"},
    run_threads: {"size": 2, "function": nothing},
}
# Seeds of wires are made from a collective's and the number of the call, bits are 8 or 4.
MADE_BY_US = {(make_wire, "seed"), (BlockLayout, "bits")}
NUMBERS = [
    pytest.param(config, name, "int" in annotation, id=f"{config.__name__}-{name}")
    for config in CONFIGS
    for name, parameter in inspect.signature(config).parameters.items()
    for annotation in [str(parameter.annotation)]
    if annotation.split(" | ")[0] in ("int", "float") and (config, name) not in MADE_BY_US
]
FROM_ZERO = {"seed", "numel", "wire_rounding", "rounding", "min_saving"}
"""Zero means something here."""
NO_WHOLE: list[Any] = [-1, -(10**30), 10**30, True, 4.0, 2.5, math.nan, math.inf, "4"]
NO_NUMBER: list[Any] = [-1, -1e-300, True, math.nan, math.inf, -math.inf, "0.1", 1j]


def test_the_table_holds_every_number() -> None:
    """What is looked through is what there is: no configuration escapes by its annotation."""
    found = {param.id for param in NUMBERS}
    assert {"Ring-segments", "CodedRing-seed", "CodedRing-spread_budget", "PowerSGD-rank"} <= found
    assert {"TopK-ratio", "ErrorFeedback-growth_limit", "design-eps", "choose-numel"} <= found
    assert {config.__name__ for config in CONFIGS} >= set(collectives.__all__) - {
        "Collective", "Cost", "all_gather", "reduce_scatter",
    }  # fmt: skip


@pytest.mark.parametrize(("config", "name", "whole"), NUMBERS)
def test_impossible_numbers_are_refused_at_construction(
    config: Callable[..., Any], name: str, whole: bool
) -> None:
    """Nothing below, beyond, between, infinite or of another type is taken; the error tells it."""
    needed = CONFIGS[config]
    zero = 0 if whole else 0.0
    for value in (*(NO_WHOLE if whole else NO_NUMBER), *(() if name in FROM_ZERO else (zero,))):
        with pytest.raises((InputError, CodeError)) as caught:
            config(**{**needed, name: value})
        assert str(caught.value).startswith(f"{name}={value!r}: give a "), value


@pytest.mark.parametrize(("least", "most"), [(0, 9), (1, 1), (-3, LARGEST_WHOLE)])
def test_whole_numbers_reach_from_least_to_most(least: int, most: int) -> None:
    """Both ends are possible, and what lies beyond them is not."""
    check_whole("n", least, least, most)
    check_whole("n", most, least, most)
    for value in (least - 1, most + 1):
        with pytest.raises(InputError, match=f"n={value}: give a whole number from {least} "):
            check_whole("n", value, least, most)


def test_numbers_reach_from_least_to_most() -> None:
    """Ends are possible unless open; whole numbers are numbers; the hint ends the message."""
    for value in (0, 0.5, 1, 1.0):
        check_number("x", value, 0, 1)
    check_number("x", 5e-324, 0, above=True)
    check_number("x", 1e308, 0)
    with pytest.raises(CodeError, match=r"^x=0: give a finite number above 0; or nothing$"):
        check_number("x", 0, 0, above=True, hint="or nothing", error=CodeError)
    with pytest.raises(InputError, match=r"^x=1\.5: give a finite number from 0 to 1$"):
        check_number("x", 1.5, 0, 1)


def test_long_values_are_cut() -> None:
    """A message stays readable whatever was given."""
    with pytest.raises(InputError) as caught:
        check_whole("n", "x" * 10_000, 0)
    assert len(str(caught.value)) < 120

"""Errors of the user's own code, in words."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from taciturn.errors import described
from taciturn.units import parse_rate


def said_of(call: Callable[[], Any]) -> str:
    """What is said of the error of a call."""
    try:
        call()
    except Exception as error:
        return described(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    "call",
    [
        lambda: 1 / 0,
        lambda: json.loads("{"),
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: torch.nn.Linear(2, 2)(torch.ones(3)),
        lambda: parse_rate("fast"),
    ],
    ids=["its own", "in Python's library", "in torch", "below a module", "in this package"],
)
def test_the_place_is_in_the_users_code(call: Callable[[], Any]) -> None:
    """Wherever an error arises, the line named is the user's that led there."""
    line = call.__code__.co_firstlineno
    assert said_of(call).endswith(f"({__file__}, line {line})")


def test_an_error_without_the_users_code_has_no_place() -> None:
    """Nothing is made up."""
    assert described(ValueError("none")) == "ValueError: none"


def test_a_syntax_error_says_its_own_place() -> None:
    """Which is where the text is wrong, and not where it was read."""
    said = said_of(lambda: ast.parse("a b", "theirs.py"))
    assert "theirs.py, line 1" in said
    assert __file__ not in said

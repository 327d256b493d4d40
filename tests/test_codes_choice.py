from __future__ import annotations

import math

import pytest

from taciturn.collectives.codes import design
from taciturn.collectives.codes.choice import Choice, choose
from taciturn.collectives.codes.errors import rounding_of
from taciturn.errors import CodeError


def pick(ranks: int = 8, wire: str = "bf16", **options: object) -> Choice:
    sizes = {"fp32": 4, "bf16": 2, "int8": 1 + 2 / 128}
    arguments = {
        "wire_rounding": rounding_of(wire), "numel": 1 << 23, "wire_itemsize": sizes[wire],
        "spread_budget": None, "mean_error_budget": None, **options,
    }  # fmt: skip
    return choose(ranks, **arguments)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("spread", "mean"), [(0.35, 0.05), (0.2, 0.05), (0.1, None), (None, 0.03)])
def test_the_choice_meets_the_budgets(wire: str, spread: float | None, mean: float | None) -> None:
    """Both errors within their budgets, fewer bytes than the ring, and a reason that says so."""
    choice = pick(wire=wire, spread_budget=spread, mean_error_budget=mean)
    assert choice.code is not None
    assert choice.expected is not None
    errors = choice.code.expected(rounding_of(wire))
    assert errors == choice.expected
    assert errors.spread <= (spread or math.inf)
    assert errors.mean_error <= (mean or math.inf)
    assert choice.code.sent_buffers < 1.75
    assert choice.reason.startswith(choice.code.describe())
    assert f"sends {choice.code.sent_buffers:.3f} buffers (ring 1.750)" in choice.reason


def test_a_looser_budget_never_sends_more() -> None:
    sent = [
        choice.code.sent_buffers
        for choice in (pick(spread_budget=s) for s in (0.05, 0.1, 0.2, 0.3, 0.5))
        if choice.code is not None
    ]
    assert len(sent) == 5
    assert sent == sorted(sent, reverse=True)


def test_nothing_on_the_grid_with_fewer_bytes_would_have_met_the_budgets() -> None:
    """More passes than chosen fail for the Fourier code at every stretch."""
    rounding = rounding_of("bf16")
    choice = pick(spread_budget=0.3, mean_error_budget=0.02)
    assert choice.code is not None
    for passes in (p for p in (8, 10, 12, 16, 24) if p > choice.code.passes):
        for stretch in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75):
            errors = design("fourier", 8, passes, stretch=stretch).expected(rounding)
            assert errors.spread > 0.3 or errors.mean_error > 0.02


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_than_three_ranks_keep_the_ring(ranks: int) -> None:
    choice = pick(ranks, spread_budget=0.5)
    assert choice.code is None
    assert "already sends the least possible" in choice.reason


def test_impossible_budgets_keep_the_ring() -> None:
    """And say which budgets, on which ladder of passes."""
    choice = pick(spread_budget=1e-6, mean_error_budget=1e-3)
    assert choice == Choice(
        None,
        "plain ring: no code of 2 to 64 passes on 8 ranks keeps within spread 1e-06 and mean error "
        "0.001 on this wire",
    )


def test_messages_stay_above_the_least_size() -> None:
    """More passes than the buffer bears are not tried; a small buffer keeps the ring."""
    for numel in (1 << 23, 1 << 20, 1 << 18):
        code = pick(numel=numel, spread_budget=0.5).code
        assert code is not None
        assert numel * 2 / code.components >= 16384
    choice = pick(numel=1 << 15, spread_budget=0.5)
    assert choice.code is None
    assert "messages of less than 16384 bytes" in choice.reason
    finer = pick(numel=1 << 15, spread_budget=0.5, min_message_bytes=1024).code
    assert finer is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spread_budget": 0.0}, "spread_budget=0.0: give"),
        ({"spread_budget": math.nan}, "spread_budget=nan: give"),
        ({"mean_error_budget": -1.0}, "mean_error_budget=-1.0: give"),
        ({"numel": -1}, "numel=-1"),
        ({"min_message_bytes": 0}, "min_message_bytes=0"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(CodeError, match=message):
        pick(**options)

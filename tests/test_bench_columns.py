"""The arithmetic of the columns, against definitions written out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_rows import make_calls
from taciturn.bench.columns import (
    Calls,
    Sample,
    bandwidth,
    byte_columns,
    error_columns,
    error_sums,
    limit_fraction,
    quartiles,
    time_columns,
)
from taciturn.bench.inputs import Span
from taciturn.collectives import Cost
from taciturn.errors import InputError
from taciturn.ledger import LedgerCounts
from taciturn.units import format_rate


@pytest.mark.parametrize(
    ("operation", "ranks", "busbw"),
    [
        ("all_reduce", 1, 0.0),
        ("all_reduce", 2, 10e9),
        ("all_reduce", 4, 15e9),
        ("all_reduce", 8, 17.5e9),
        ("all_gather", 1, 0.0),
        ("all_gather", 4, 7.5e9),
        ("reduce_scatter", 8, 8.75e9),
        ("broadcast", 1, 10e9),
        ("broadcast", 8, 10e9),
        ("reduce", 8, 10e9),
    ],
)
def test_bandwidths_are_nccl_tests(operation: str, ranks: int, busbw: float) -> None:
    """1e9 bytes in 0.1 s are an algbw of 10 GB/s; busbw multiplies by a ring's share."""
    assert bandwidth(operation, 10**9, 0.1, ranks) == pytest.approx((10e9, busbw), rel=1e-15)


def test_units_are_base_10() -> None:
    """1 GiB in 1 s is 1.0737 GB/s, which is 8.590 Gbit/s."""
    algbw = bandwidth("all_reduce", 1 << 30, 1.0, 2).algbw_bytes_per_s
    assert f"{algbw / 1e9:.4f}" == "1.0737"
    assert format_rate(round(algbw * 8 / 1e6) * 10**6) == "8.59 Gbit/s"


@pytest.mark.parametrize(
    ("operation", "seconds", "ranks"),
    [
        ("gather", 1.0, 2),
        ("all_reduce", 0.0, 2),
        ("all_reduce", -1.0, 2),
        ("all_reduce", math.nan, 2),
        ("all_reduce", 1.0, 0),
    ],
)
def test_meaningless_bandwidths_are_refused(operation: str, seconds: float, ranks: int) -> None:
    """No time, no rank or an operation without a definition has no bandwidth."""
    with pytest.raises(InputError):
        bandwidth(operation, 1000, seconds, ranks)


def test_limit_fraction() -> None:
    """A link that carries 1448 payload bytes in the time of 1514 is at its limit."""
    seconds = 1514e3 * 8 / 200e6
    assert limit_fraction(1_448_000, seconds, 200_000_000) == pytest.approx(1, rel=1e-12)
    assert limit_fraction(1_448_000, 2 * seconds, 200_000_000) == pytest.approx(0.5, rel=1e-12)
    assert limit_fraction(1_448_000, seconds, None) is None


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quartiles_are_numpy_s(values: list[float]) -> None:
    """Quartiles interpolate linearly, whatever the number of values."""
    assert quartiles(values) == pytest.approx(np.quantile(values, [0.25, 0.5, 0.75]), rel=1e-12)


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    """Times are maxima over ranks; ratios divide the median by the reference's."""
    samples = [[Sample(t, LedgerCounts(), None) for t in call] for call in ([3, 1], [2, 5], [4, 4])]
    row = time_columns(Calls(samples[:1], samples, [None, None]), 1000, reference_s=8.0)
    assert row["times_s"] == [3, 5, 4]
    assert row["warmup_times_s"] == [3]
    assert row["times_by_rank_s"] == [[3, 1], [2, 5], [4, 4]]
    assert (row["q1_s"], row["median_s"], row["q3_s"]) == (3.5, 4, 4.5)
    assert row["ratio_to_backend"] == 0.5
    assert row["algbw_bytes_per_s"] == row["busbw_bytes_per_s"] == 250


def test_counts_are_checked_against_the_formula() -> None:
    """One byte, message or round that differs from the formula, on one rank once, is found."""
    calls = make_calls([1.0, 2.0], sent=700)
    row = byte_columns(calls, 200_000_000)
    assert row["counts_equal_formula"] is True
    assert row["sent_bytes_per_rank"] == row["formula_bytes_per_rank"] == 700
    for change in ({"sent_bytes": 701}, {"messages": 8}, {"rounds": 5}):
        counts = LedgerCounts(**({"sent_bytes": 700, "messages": 7, "rounds": 6} | change))
        one = [*calls.timed[1][:3], Sample(1.0, counts, None)]
        changed = Calls(calls.warm, [calls.timed[0], one], calls.costs)
        assert byte_columns(changed, None)["counts_equal_formula"] is False


def test_the_rank_that_sends_most_is_shown() -> None:
    """Where ranks send different amounts, the largest is shown, of formula and count alike."""
    sent = [100, 300, 200]
    call = [Sample(1.0, LedgerCounts(sent_bytes=s), s + 10) for s in sent]
    row = byte_columns(Calls([], [call], [Cost(0, 0, s, 0) for s in sent]), None)
    assert row["counts_equal_formula"] is True
    assert row["sent_bytes_per_rank"] == row["formula_bytes_per_rank"] == 300
    assert row["wire_bytes_counted_by_interface"] == 310


def test_the_backend_s_bytes_are_null() -> None:
    """What cannot be counted is null; what its interface saw is there."""
    row = byte_columns(make_calls([1.0], sent=None, wire=1234), 200_000_000)
    assert row.pop("wire_bytes_counted_by_interface") == 1234
    assert set(row.values()) == {None}


def errors(inputs: np.ndarray, results: np.ndarray, spans: tuple[Span, ...]) -> dict[str, Any]:
    """The columns by way of the ranks' shares, as in a run."""
    ranks = len(inputs)
    true = torch.tensor(inputs.sum(0))
    mean = torch.tensor(results.mean(0))
    shares = [error_sums(torch.tensor(result), mean, true, spans) for result in results]
    whole = shares[0]._replace(
        replica=sum(share.replica for share in shares), spread=sum(share.spread for share in shares)
    )
    hetero = ((inputs - inputs.mean(0)) ** 2).sum()
    return error_columns(whole, float(hetero), ranks, spans)


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt((values**2).mean()))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_errors_are_the_design_s_definitions(ranks: int) -> None:
    """Every error equals its definition, written out with numpy, whole and per parameter."""
    random = np.random.default_rng(ranks)
    inputs = random.normal(size=(ranks, 50)) + 0.5
    results = inputs.sum(0) + 0.01 * random.normal(size=(ranks, 50))
    spans = (Span("a", 0, 20), Span("b", 20, 21), Span("c", 21, 50))
    row = errors(inputs, results, spans)
    s, m = inputs.sum(0), results.mean(0)
    assert row["replica_error"] == pytest.approx(rms(results - s) / rms(s), rel=1e-12)
    assert row["mean_error"] == pytest.approx(rms(m - s) / rms(s), rel=1e-12)
    assert row["spread"] == pytest.approx(rms(results - m) / rms(s), rel=1e-12, abs=1e-15)
    differing = np.sqrt(ranks) * rms(inputs - inputs.mean(0))
    if ranks == 1:
        assert row["spread_hetero"] is None  # nothing differs between ranks
    else:
        assert row["spread_hetero"] == pytest.approx(rms(results - m) / differing, rel=1e-12)
    for kind, wrong in (("replica", results - s), ("mean", (m - s)[None])):
        each = {n: rms(wrong[:, i:j]) / rms(s[i:j]) for n, i, j in spans}
        worst = max(each, key=lambda name: each[name])
        assert row[f"worst_parameter_{kind}"] == worst
        assert row[f"worst_parameter_{kind}_error"] == pytest.approx(each[worst], rel=1e-12)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_replica_error_is_mean_error_and_spread(seed: int, ranks: int) -> None:
    """Law: replica_error^2 = mean_error^2 + spread^2."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(ranks, 9))
    row = errors(inputs, inputs.sum(0) + random.normal(size=(ranks, 9)), ())
    both = math.hypot(row["mean_error"], row["spread"])
    assert row["replica_error"] == pytest.approx(both, rel=1e-9)
    assert row["worst_parameter_mean"] is None  # there are no parameters


def test_identical_results_need_no_mean() -> None:
    """Results that are the same on all ranks have no spread, exactly."""
    true = torch.arange(5, dtype=torch.float64)
    result = true.float() + 0.25
    sums = error_sums(result, None, true, ())
    assert sums.spread.tolist() == [0]
    assert sums.mean.tolist() == sums.replica.tolist() == [5 / 16]


def test_large_buffers_are_summed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces lose no element and count none twice."""
    true = torch.arange(100, dtype=torch.float64)
    spans = (Span("a", 0, 37), Span("b", 37, 100))
    whole = error_sums(true + 1, true, true, spans)
    monkeypatch.setattr("taciturn.bench.columns.PIECE_ELEMS", 7)
    for pieces, at_once in zip(error_sums(true + 1, true, true, spans), whole, strict=True):
        assert torch.equal(pieces, at_once)


def test_nothing_to_divide_by_is_null() -> None:
    """A sum of zeros has no relative error, and a parameter of zeros is not the worst."""
    nothing = errors(np.zeros((2, 4)), np.ones((2, 4)), (Span("a", 0, 4),))
    assert set(nothing.values()) == {None}
    inputs = np.array([[0.0, 0.0, 1.0, 2.0]] * 2)
    row = errors(inputs, inputs.sum(0) + np.ones((2, 4)), (Span("zero", 0, 2), Span("b", 2, 4)))
    assert row["worst_parameter_replica"] == "b"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_errors_are_null(value: float) -> None:
    """Non-finite sums become null: JSON has neither NaN nor infinity."""
    true = torch.tensor([1.0, value], dtype=torch.float64)
    sums = error_sums(true, None, true, ())
    assert set(error_columns(sums, value, 2, ()).values()) == {None}

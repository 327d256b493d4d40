"""Fits recover what data were made from, in noise and beside wild values, or refuse."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taciturn.errors import InputError
from taciturn.probe.fit import estimate_of, fit_curve, fit_line

SIZES = [4096 << k for k in range(15)]  # 4 KiB to 64 MiB
LINKS = [(1e-3, 4.2e-8), (5e-5, 1e-10), (1e-2, 2e-7)]  # 200 Mbit/s, 80 Gbit/s, 40 Mbit/s
Truth = Callable[[int], float]


def noisy(truth: Truth, seed: int, calls: int = 5, noise: float = 0.1) -> list[list[float]]:
    """Times of some calls of each size, each off by a normal relative error."""
    normal = np.random.default_rng(seed).standard_normal((len(SIZES), calls))
    return [
        [truth(size) * math.exp(noise * x) for x in row]
        for size, row in zip(SIZES, normal, strict=True)
    ]


def line(alpha: float, beta: float) -> Truth:
    return lambda size: alpha + beta * size


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("alpha", "beta"), LINKS)
def test_recovers(alpha: float, beta: float, seed: int) -> None:
    """Law: under 10 % noise and one call in which 20 times as long was waited, within 15 %."""
    samples = noisy(line(alpha, beta), seed)
    samples[seed % len(SIZES)][0] *= 20
    fit = fit_curve(SIZES, samples)
    assert fit.alpha_s.value == pytest.approx(alpha, rel=0.15)
    assert fit.beta_s_per_byte.value == pytest.approx(beta, rel=0.15)
    assert len(fit.pieces) == 1
    assert fit.leave_one_out_error < 0.15


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
@pytest.mark.parametrize("place", [0, 1, 7, 13, 14])
@pytest.mark.parametrize(("alpha", "beta"), LINKS)
def test_outlier(alpha: float, beta: float, place: int, factor: float) -> None:
    """Law: a size all of whose calls are 20 times off, either way, moves neither number by 15 %."""
    samples = noisy(line(alpha, beta), place, noise=0.05)
    samples[place] = [factor * one for one in samples[place]]
    fit = fit_curve(SIZES, samples)
    assert fit.alpha_s.value == pytest.approx(alpha, rel=0.15)
    assert fit.beta_s_per_byte.value == pytest.approx(beta, rel=0.15)


@settings(max_examples=25)
@given(st.floats(1e-6, 1.0), st.floats(1e-12, 1e-6), st.integers(0, 10**6))
def test_exact_lines_come_back(alpha: float, beta: float, seed: int) -> None:
    """Without noise the fit is the line, its interval is a point, and nothing is bent."""
    sizes = sorted(random.Random(seed).sample(range(1, 1 << 26), 7))
    if beta * (sizes[-1] - sizes[0]) < 1e-3 * alpha:  # not to be told from a constant
        return
    fit = fit_curve(sizes, [[alpha + beta * size] for size in sizes])
    assert fit.alpha_s.value == pytest.approx(alpha, rel=1e-6)
    assert fit.beta_s_per_byte.value == pytest.approx(beta, rel=1e-6)
    assert fit.beta_s_per_byte.low == pytest.approx(fit.beta_s_per_byte.high, rel=1e-6)
    assert len(fit.pieces) == 1
    assert fit.leave_one_out_error < 1e-6


def test_intervals_hold_the_truth() -> None:
    """A 95 % interval holds the slope in most of 16 experiments."""
    alpha, beta = LINKS[0]
    held = 0
    for seed in range(16):
        fit = fit_curve(SIZES, noisy(line(alpha, beta), seed))
        held += fit.beta_s_per_byte.low <= beta <= fit.beta_s_per_byte.high
    assert held >= 12  # of binomials with 16 and 0.95, one in a thousand is less


@pytest.mark.parametrize("seed", range(5))
def test_bends(seed: int) -> None:
    """Law: a slope that grows fourfold at 1 MiB becomes a second piece that begins near there."""
    samples = noisy(lambda n: 1e-4 + 1e-10 * n + 3e-10 * max(0, n - (1 << 20)), seed, noise=0.02)
    fit = fit_curve(SIZES, samples)
    assert len(fit.pieces) == 2
    assert 2**19 <= fit.pieces[1].from_bytes <= 2**21
    assert fit.beta_s_per_byte.value == pytest.approx(4e-10, rel=0.1)
    assert fit.leave_one_out_error < 0.05


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_bent(seed: int) -> None:
    """A line with as much noise as there may be stays one piece."""
    assert len(fit_curve(SIZES, noisy(line(*LINKS[0]), seed, calls=1)).pieces) == 1


@pytest.mark.parametrize(
    ("sizes", "samples", "says"),
    [
        ([], [], "0 size"),
        ([4096], [[1.0]], "1 size was measured"),
        ([4096, 4096], [[1.0], [1.0]], "1 size was measured"),
        ([8192, 4096], [[1.0], [1.0]], "ascending"),
        ([4096, 8192], [[1.0]], "1 samples"),
        ([4096, 8192], [[1.0], []], "8192 bytes have no measured time"),
        ([4096, 8192], [[1.0], [0.0]], "seconds of 8192 bytes=0.0"),
        ([4096, 8192], [[1.0], [-1.0]], "seconds of 8192 bytes=-1.0"),
        ([4096, 8192], [[1.0], [float("nan")]], "seconds of 8192 bytes=nan"),
        ([4096, 8192], [[1.0], [float("inf")]], "seconds of 8192 bytes=inf"),
        ([-1, 8192], [[1.0], [1.0]], "size_bytes=-1"),
        ([4096, 8192], [[1.0], [1.0]], "do not grow with size"),
        ([4096, 8192], [[2.0], [1.0]], "do not grow with size"),
        (SIZES, [[1e-3]] * 15, "do not grow with size"),
        (SIZES, [[1e-3 * (15 - k)] for k in range(15)], "do not grow with size"),
    ],
)
def test_refuses(sizes: list[int], samples: list[list[float]], says: str) -> None:
    """Law: one size, constant or falling times, and numbers that are no times are refused."""
    with pytest.raises(InputError) as caught:
        fit_curve(sizes, samples)
    assert says in str(caught.value)


@pytest.mark.parametrize("last", [1, 2])
def test_a_flat_end_is_no_reason_to_refuse_what_rises(last: int) -> None:
    """Of times that grow a hundredfold the last ones may not: a busy machine is enough for that."""
    seconds = [line(1e-4, 1e-9)(size) for size in SIZES]
    seconds[-last:] = [max(seconds[:-last])] * last
    fit = fit_curve(SIZES, [[s] * 3 for s in seconds])
    assert fit.beta_s_per_byte.value > 0


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_is_no_bandwidth(seed: int) -> None:
    """Constant times in noise are refused: a slope that could be zero is no bandwidth."""
    with pytest.raises(InputError, match="of one message do not grow with size"):
        fit_curve(SIZES, noisy(line(1e-3, 0.0), seed, calls=3), "one message")


def test_two_sizes_are_a_line() -> None:
    """The least that can be fitted is; nothing can be left out, so the error is taken as whole."""
    fit = fit_curve([1000, 2000], [[1e-3], [1.5e-3]])
    assert fit.alpha_s.value == pytest.approx(5e-4)
    assert fit.beta_s_per_byte.value == pytest.approx(5e-7)
    assert fit.leave_one_out_error == 1


def test_a_line_beside_a_known_part() -> None:
    """Fixed part and slope are what is left over the known part, and never below zero."""
    known = [0.1, 0.2, 0.4]
    seconds = [[k + 0.01 + 1e-6 * n] for k, n in zip(known, (10**3, 10**4, 10**5), strict=True)]
    fixed, slope = fit_line((10**3, 10**4, 10**5), seconds, known)
    assert fixed.value == pytest.approx(0.01)
    assert slope.value == pytest.approx(1e-6)
    assert [one.value for one in fit_line((10, 20), [[1.0], [1.0]], (2.0, 2.0))] == [0, 0]
    fixed, slope = fit_line([1000], [[3.0]], [1.0])
    assert (fixed.value, slope.value) == (0, pytest.approx(2e-3))


def test_an_estimate_is_a_median() -> None:
    """Of one value, the value; of several their median within its interval; of none, refused."""
    assert estimate_of([2.0]).high == 2
    one = estimate_of([1.0, 2.0, 3.0, 100.0, 2.5])
    assert one.value == 2.5
    assert one.low >= 1
    with pytest.raises(InputError, match="nothing to take a median of"):
        estimate_of([])

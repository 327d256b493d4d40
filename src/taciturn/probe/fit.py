"""A line, or a bent one, through measured times: seconds against bytes.

On relative error, since a microsecond is much at 4 KiB and nothing at 64 MiB, and with each median
weighted by its own noise, since calls of small sizes scatter and those of large ones do not; with
coefficients from 0 on, since no message takes negative time; and so that a few wild values change
nothing.

The curve is ``alpha + sum over pieces of slope * bytes within the piece``: with all of these from 0
on it is continuous and never falls (scipy's non-negative least squares, reweighted by Tukey's
biweight). A second or third piece is there only where the residual, in units of the noise, asks for
it.

Laws, tests of the same name in ``test_probe_fit.py``: *recovers*, *outlier*, *refuses*, *bends*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from taciturn.errors import InputError
from taciturn.link import Estimate, Fit, Piece
from taciturn.ranges import check_number

__all__ = ["estimate_of", "fit_curve", "fit_line"]

Array = NDArray[np.float64]

REPLICATES = 200  # of the bootstrap; its interval's ends then rest on five values each
SEED = 0  # of the bootstrap: the same data give the same interval
FLOOR = 0.02  # relative; a curve that is as near to each median is near enough
NEAR = 2  # sizes on either side whose noise counts: that of one, from few calls, is itself noisy
TUKEY = 4.685  # times the scale: 95 % as efficient as least squares on normal errors
WILD = 10.0  # times its noise: a residual counts as no more than that
GAIN = 14.0  # by which a bend must lower BIC; 10 is called very strong, and places are searched
BEYOND = 3.0  # times the scatter, a rise is one
ITERATIONS = 12  # of reweighting; fewer where the curve no longer moves
ENOUGH = 1e-4  # relative, of the curve: less than that is no move
LEAST_PER_PIECE = 3  # sizes
MOST_PIECES = 3


class _Data(NamedTuple):
    """What is fitted: one value of each for each size."""

    sizes: Array
    seconds: Array
    """Medians."""
    noise: Array
    """Relative standard error of the medians of this size and those near it, and ``FLOOR``."""

    def without(self, place: int) -> _Data:
        """All sizes but one."""
        kept = np.arange(len(self.sizes)) != place
        return _Data(self.sizes[kept], self.seconds[kept], self.noise[kept])


class _Curve(NamedTuple):
    """Coefficients: alpha, then a slope for each piece; ``breaks`` are where pieces end."""

    coefficients: Array
    breaks: tuple[float, ...]

    def at(self, sizes: Array) -> Array:
        return _columns(sizes, self.breaks) @ self.coefficients


def _columns(sizes: Array, breaks: Sequence[float]) -> Array:
    """One column for alpha, and for each piece the bytes of a message that lie within it."""
    edges = [0.0, *breaks, np.inf]
    pieces = [np.clip(sizes, low, high) - low for low, high in pairwise(edges)]
    return np.stack([np.ones_like(sizes), *pieces], axis=1)


def _residuals(curve: _Curve, data: _Data) -> Array:
    """In units of the noise; as large for a value 20 times too high as for one 20 times too low."""
    return np.log(np.maximum(curve.at(data.sizes) / data.seconds, 1e-12)) / data.noise


def _solve(data: _Data, breaks: Sequence[float]) -> _Curve:
    """The curve with these breaks: least absolute residuals first, then Tukey's biweight."""
    relative = _columns(data.sizes, breaks) / (data.seconds * data.noise)[:, None]
    norms = np.maximum(np.sqrt((relative**2).sum(axis=0)), 1e-300)
    design = relative / norms  # columns of bytes and of ones become alike
    target = 1 / data.noise

    def again(roots: Array) -> tuple[Array, Array]:
        """Coefficients with these roots of weights; ratios of the curve to what was measured."""
        found, _ = nnls(design * roots[:, None], target * roots)
        return found, np.maximum(design @ found * data.noise, 1e-12)

    # Where the neighbours are, the curve is: a start that no wild value draws to itself.
    ratios = np.array(_smooth(data.seconds.tolist(), 1)) / data.seconds
    for _ in range(ITERATIONS):  # minimises the sum of |log(ratio)| / noise
        before = ratios
        off = np.maximum(np.abs(ratios - 1) / data.noise, 1e-2)
        found, ratios = again(1 / np.sqrt(off * ratios))
        if np.abs(ratios - before).max() < ENOUGH:
            break
    logs = np.log(ratios) / data.noise
    scale = max(1.0, 1.4826 * float(median(np.abs(logs).tolist())))
    for _ in range(ITERATIONS):
        before = ratios
        roots = np.maximum(1 - (logs / (TUKEY * scale)) ** 2, 0)
        if np.count_nonzero(roots) < design.shape[1]:
            break
        found, ratios = again(roots)
        if np.abs(ratios - before).max() < ENOUGH:
            break
        logs = np.log(ratios) / data.noise
    return _Curve(found / norms, tuple(breaks))


def _misfit(curve: _Curve, data: _Data) -> float:
    """Mean square of the residuals, none counted as more than ``WILD``; 1 is noise."""
    squares = np.minimum(np.abs(_residuals(curve, data)), WILD) ** 2
    return max(1.0, float(np.mean(squares)))


def _search(data: _Data) -> _Curve:
    """The curve with as many pieces as the residual asks for, by BIC."""
    best = _solve(data, ())
    count = len(data.sizes)
    for _ in range(MOST_PIECES - 1):
        misfit = _misfit(best, data)
        if misfit == 1:
            break
        tries = [
            _solve(data, breaks)
            for place in data.sizes[LEAST_PER_PIECE - 1 : count - LEAST_PER_PIECE + 1]
            if _spaced(breaks := tuple(sorted({*best.breaks, float(place)})), data.sizes)
            and breaks != best.breaks
        ]
        if not tries:
            break
        misfits = [_misfit(curve, data) for curve in tries]
        # A bend costs two numbers, its place and its slope.
        if count * math.log(misfit / min(misfits)) < 2 * math.log(count) + GAIN:
            break
        best = tries[misfits.index(min(misfits))]
    return best


def _spaced(breaks: Sequence[float], sizes: Array) -> bool:
    """Whether each piece has its least number of sizes, those at its ends included."""
    edges = [0.0, *breaks, np.inf]
    return all(
        np.count_nonzero((sizes >= low) & (sizes <= high)) >= LEAST_PER_PIECE
        for low, high in pairwise(edges)
    )


def _checked(sizes: Sequence[int], samples: Sequence[Sequence[float]]) -> _Data:
    """What is fitted; raises InputError."""
    if len(set(sizes)) < 2:
        given = ", ".join(map(str, sorted(set(sizes)))) or "none"
        raise InputError(
            f"{len(set(sizes))} size was measured ({given}), where a line takes two: latency "
            "and bandwidth cannot be told apart; measure sizes that are far apart"
        )
    if list(sizes) != sorted(set(sizes)) or len(samples) != len(sizes):
        raise InputError(
            f"{len(samples)} samples for the sizes {list(sizes)}: give each size once, ascending, "
            "with its times"
        )
    for size, some in zip(sizes, samples, strict=True):
        check_number("size_bytes", size, 0)
        if not some:
            raise InputError(f"{size} bytes have no measured time: leave the size out")
        for one in some:
            check_number(f"seconds of {size} bytes", one, 0, above=True)
    medians = np.array([np.median(some) for some in samples])
    errors = [_error(np.array(some, float) / m) for some, m in zip(samples, medians, strict=True)]
    noise = [math.hypot(FLOOR, one) for one in _smooth(errors, NEAR)]
    return _Data(np.array(sizes, float), medians, np.array(noise))


def _error(relative: Array) -> float:
    """Standard error of the median of values whose median is 1, by their median deviation."""
    deviation = 1.4826 * float(np.median(np.abs(relative - 1)))
    # sqrt(pi / 2) is what a median loses to a mean of normal values.
    return math.sqrt(math.pi / 2 / len(relative)) * deviation


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Running median over so many neighbours on either side, fewer at the ends."""
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def fit_curve(sizes: Sequence[int], samples: Sequence[Sequence[float]], what: str = "") -> Fit:
    """Fit seconds against bytes.

    Args:
        sizes: bytes, ascending, two at least.
        samples: for each size the measured seconds; their median is fitted.
        what: was measured, for messages.

    Raises:
        InputError: one size only; times that are not positive and finite; times that do not grow
            with size, which would be a bandwidth that is infinite or negative.
    """
    data = _checked(sizes, samples)
    y = data.seconds
    # A last piece through one wild value may be flat where all sizes together rise.
    curves = (find(data) for find in (_search, lambda some: _solve(some, ())))
    curve = next((one for one in curves if _grows(one, data)), None)
    if curve is None:
        raise InputError(
            f"the times{what and f' of {what}'} do not grow with size beyond their noise "
            f"({y[0]:.3g} s for {sizes[0]} bytes, {y[-1]:.3g} s for {sizes[-1]}): no bandwidth can "
            "be told; measure larger sizes"
        )
    drawn = _bootstrap(data, samples, curve)
    alpha, beta = float(curve.coefficients[0]), float(curve.coefficients[-1])
    betas = drawn[:, -1]
    errors = _left_out(data)
    return Fit(
        alpha_s=_interval(alpha, drawn[:, 0]),
        beta_s_per_byte=_interval(beta, betas),
        pieces=_pieces(curve),
        sizes_bytes=tuple(map(int, sizes)),
        seconds=tuple(map(float, y)),
        leave_one_out_error=float(np.median(errors)),
        leave_one_out_p90=float(np.quantile(errors, 0.9)),
    )


def _grows(curve: _Curve, data: _Data) -> bool:
    """Whether the curve rises, to its end, by more than the medians scatter about it."""
    ends = curve.at(data.sizes[[0, -1]])
    scatter = 1.4826 * float(np.median(np.abs(_residuals(curve, data) * data.noise)))
    rise = math.log(max(ends[1], 1e-12) / max(ends[0], 1e-12))
    return curve.coefficients[-1] > 0 and rise > BEYOND * max(scatter, FLOOR)


def _pieces(curve: _Curve) -> tuple[Piece, ...]:
    pieces = [Piece(0.0, float(curve.coefficients[0]), float(curve.coefficients[1]))]
    for place, slope in zip(curve.breaks, curve.coefficients[2:], strict=True):
        last = pieces[-1]
        start = last.start_s + last.beta_s_per_byte * (place - last.from_bytes)
        pieces.append(Piece(float(place), start, float(slope)))
    return tuple(pieces)


def _bootstrap(data: _Data, samples: Sequence[Sequence[float]], curve: _Curve) -> Array:
    """Coefficients of fits to data drawn anew, one row each; the breaks stay.

    Both kinds of noise are drawn: between calls of one size, and of the medians about the curve.
    With fewer than four sizes there is none of the second kind to draw from.
    """
    random = np.random.default_rng(SEED)
    again = _medians(random, samples)
    if len(data.sizes) >= 4:
        fitted = np.maximum(curve.at(data.sizes), 1e-12)
        residuals = random.choice(_residuals(curve, data), again.shape)
        again *= fitted / data.seconds * np.exp(-residuals * data.noise)
    drawn = (data._replace(seconds=one) for one in again)
    return np.array([_solve(one, curve.breaks).coefficients for one in drawn])


def _medians(random: np.random.Generator, samples: Sequence[Sequence[float]]) -> Array:
    """Medians of samples drawn anew, shape (REPLICATES, number of samples)."""
    drawn = [
        np.median(random.choice(np.array(some, float), (REPLICATES, len(some))), axis=1)
        for some in samples
    ]
    return np.stack(drawn, axis=1)


def _interval(value: float, drawn: Array) -> Estimate:
    low, high = (float(q) for q in np.quantile(drawn, (0.025, 0.975)))
    return Estimate(value, min(low, value), max(high, value))


def _left_out(data: _Data) -> Array:
    """Relative error of predicting each size from a fit to all others.

    Of two sizes nothing can be left out: the error is then taken as 1.
    """
    if len(data.sizes) < 3:
        return np.ones(1)
    errors = []
    for place, (size, seconds) in enumerate(zip(data.sizes, data.seconds, strict=True)):
        predicted = _search(data.without(place)).at(np.array([size]))
        errors.append(abs(float(predicted[0]) / seconds - 1))
    return np.array(errors)


def fit_line(
    places: Sequence[float], samples: Sequence[Sequence[float]], taken_off: Sequence[float]
) -> tuple[Estimate, Estimate]:
    """Fixed part and slope of what is left of times when a known part is taken off; from 0 on.

    Args:
        places: where, such as numbers of elements; one is enough, for a slope without fixed part.
        samples: for each place the measured times; weights are relative to their medians.
        taken_off: for each place the known part; where it is more, nothing is left.
    """
    x = np.array(places, float)
    columns = np.stack([np.ones_like(x), x], axis=1) if len(x) > 1 else x[:, None]
    random = np.random.default_rng(SEED)

    def solved(seconds: Array) -> Array:
        rest = np.maximum(seconds - np.array(taken_off), 0)
        scale = np.abs(columns).max(axis=0)
        found, _ = nnls(columns / seconds[:, None] / scale, rest / seconds)
        both = found / scale
        return np.array(both if len(x) > 1 else [0.0, *both], float)

    value = solved(np.array([np.median(some) for some in samples]))
    drawn = np.array([solved(one) for one in _medians(random, samples)])
    return _interval(float(value[0]), drawn[:, 0]), _interval(float(value[1]), drawn[:, 1])


def estimate_of(values: Sequence[float]) -> Estimate:
    """The median of some numbers from 0 on, with the bootstrap interval of that median.

    Raises:
        InputError: no numbers.
    """
    if not values:
        raise InputError("there is nothing to take a median of: measure it once at least")
    random = np.random.default_rng(SEED)
    return _interval(float(np.median(values)), _medians(random, [values])[:, 0])

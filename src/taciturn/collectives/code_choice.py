"""Choice of a code from budgets: the fewest bytes whose expected errors are small enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from taciturn.collectives.codes import EPS_GRID, Code, CodeErrors, design
from taciturn.errors import CodeError

__all__ = ["Choice", "choose"]

# Passes that are tried: above 64 another doubling saves less than a percent of the bytes.
_PASSES = (64, 48, 32, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
_STRETCHES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
# Clustered and polynomial codes with more passes amplify rounding beyond any use.
_MOST_PASSES_NEAR_ONE = 8
_MOST_PASSES_SEARCHED = 16
# The optimized code is searched as if the wire rounded so much more or less: the errors that it
# trades, spread against mean error, move along.
_EMPHASES = (1.0, 4.0, 0.25)


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        code: None for the plain ring.
        reason: one sentence for people.
        expected: of ``code``; None with it.
    """

    code: Code | None
    reason: str
    expected: CodeErrors | None = None


def choose(
    ranks: int,
    *,
    wire_rounding: float,
    numel: int,
    wire_itemsize: float,
    spread_budget: float | None = None,
    mean_error_budget: float | None = None,
    min_message_bytes: int = 16384,
) -> Choice:
    """Return the code that sends the fewest bytes within the budgets, or None for the plain ring.

    Fewer bytes means more passes, so the largest number of passes comes first for which any of the
    clustered, polynomial, Fourier or optimized codes meets both budgets. Of several the one that
    keeps the largest share of its budgets in hand is taken. Messages stay above a least size, since
    more passes are more rounds, each with its latency.

    The errors are those of ``Code.expected``: relative to the rms of the true sum, for gradients
    that are independent between ranks. What real gradients have in common adds no spread.

    Args:
        ranks: N.
        wire_rounding: rms relative error of one rounding on the wire, see ``rounding_of``.
        numel: elements of the buffer.
        wire_itemsize: bytes of one element on the wire.
        spread_budget: largest spread allowed; None for any.
        mean_error_budget: largest mean error allowed; None for any.
        min_message_bytes: least size of a message.

    Raises:
        CodeError: a budget that is not positive, or sizes that make no sense.
    """
    for name, budget in (
        ("spread_budget", spread_budget),
        ("mean_error_budget", mean_error_budget),
    ):
        if budget is not None and not budget > 0:
            raise CodeError(f"{name} {budget} is impossible: give a number > 0, or None for any")
    if ranks < 1 or numel < 0 or not wire_itemsize > 0 or min_message_bytes < 1:
        raise CodeError(
            f"ranks {ranks}, numel {numel}, wire_itemsize {wire_itemsize}, min_message_bytes "
            f"{min_message_bytes}: give ranks >= 1, numel >= 0 and positive sizes"
        )
    if ranks < 3:
        return Choice(None, f"plain ring: with {ranks} ranks it already sends the least possible")
    most = int(numel * wire_itemsize / (ranks * min_message_bytes))
    if most < 2:
        return Choice(
            None,
            f"plain ring: {numel} elements make messages of less than {min_message_bytes} bytes "
            "with two passes",
        )
    return _choose(
        ranks,
        wire_rounding,
        max(p for p in _PASSES if p <= most),
        math.inf if spread_budget is None else spread_budget,
        math.inf if mean_error_budget is None else mean_error_budget,
    )


@lru_cache(maxsize=64)
def _choose(
    ranks: int, rounding: float, most_passes: int, spread_budget: float, mean_budget: float
) -> Choice:
    """``choose`` for three ranks and more."""

    def used(errors: CodeErrors) -> float:
        """The larger share of a budget that is used; without budgets, the replica error."""
        if math.isinf(spread_budget) and math.isinf(mean_budget):
            return errors.replica_error
        return max(errors.spread / spread_budget, errors.mean_error / mean_budget)

    unlimited = math.isinf(spread_budget) and math.isinf(mean_budget)
    for passes in (p for p in _PASSES if p <= most_passes):
        best: tuple[float, Code, CodeErrors] | None = None
        for code in _candidates(ranks, passes, rounding):
            errors = code.expected(rounding)
            share = used(errors)
            if (unlimited or share <= 1) and (best is None or share < best[0] * (1 - 1e-6)):
                best = share, code, errors
        if best is not None:
            _, code, errors = best
            return Choice(code, _reason(code, errors, spread_budget, mean_budget), errors)
    limits = [
        f"{name} {budget:.2g}"
        for name, budget in (("spread", spread_budget), ("mean error", mean_budget))
        if budget < math.inf
    ]
    return Choice(
        None,
        f"plain ring: no code of 2 to {most_passes} passes on {ranks} ranks keeps within "
        f"{' and '.join(limits)} on this wire",
    )


def _candidates(ranks: int, passes: int, rounding: float) -> Iterator[Code]:
    """Codes to try at this number of passes, the quickest to evaluate first."""
    for stretch in _STRETCHES:
        for code in _try("fourier", ranks, passes, stretch=stretch):
            if code.condition_number * rounding > 1:
                break
            yield code
        else:
            continue
        break
    if passes <= _MOST_PASSES_NEAR_ONE:
        yield from _try("polynomial", ranks, passes, orthonormal=True)
        for eps in EPS_GRID:
            yield from _try("polynomial", ranks, passes, eps=eps)
            yield from _try("clustered", ranks, passes, eps=eps)
    if passes <= _MOST_PASSES_SEARCHED:
        for emphasis in _EMPHASES:
            yield from _try("optimized", ranks, passes, rounding=emphasis * rounding)


def _try(
    name: str,
    ranks: int,
    passes: int,
    *,
    eps: float | None = None,
    stretch: float = 1.0,
    orthonormal: bool | None = None,
    rounding: float | None = None,
) -> Iterator[Code]:
    """The code, or nothing where float64 cannot decode it."""
    try:
        code = design(
            name,
            ranks,
            passes,
            eps=eps,
            stretch=stretch,
            orthonormal=orthonormal,
            rounding=rounding,
        )
        code.decoders()
    except CodeError:
        return
    yield code


def _reason(code: Code, errors: CodeErrors, spread_budget: float, mean_budget: float) -> str:
    """Why this one, in a sentence."""

    def within(value: float, budget: float) -> str:
        return f"{value:.2g}" + (f" <= {budget:.2g}" if budget < math.inf else "")

    ring = 2 * (code.ranks - 1) / code.ranks
    return (
        f"{code.describe()}: spread {within(errors.spread, spread_budget)}, mean error "
        f"{within(errors.mean_error, mean_budget)}, sends {code.sent_buffers:.3f} buffers "
        f"(ring {ring:.3f})"
    )

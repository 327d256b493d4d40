"""Choice of a code from budgets: the fewest bytes whose expected errors are small enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from taciturn.collectives.codes.constructions import EPS_GRID, design
from taciturn.collectives.codes.errors import CodeErrors
from taciturn.collectives.codes.model import Code, Own
from taciturn.errors import CodeError
from taciturn.ranges import check_number, check_whole

__all__ = ["Choice", "choose"]

# Passes that are tried: above 64 another doubling saves less than a percent of the bytes.
_PASSES = (64, 48, 32, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2)
_STRETCHES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
# Clustered and polynomial codes of more passes amplify rounding beyond any use.
_MOST_PASSES_NEAR_ONE = 8
_MOST_PASSES_SEARCHED = 16
# Searched as if the wire rounded so much more or less, the optimized code trades spread for mean
# error.
_EMPHASIS = 4.0


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
    own: Own = "exact",
) -> Choice:
    """Return the code that sends the fewest bytes within the budgets, or None for the plain ring.

    Fewer bytes means more passes, so the largest number of passes is taken for which a code meets
    the budgets: Fourier, polynomial or clustered, else the optimized one. Of several, the one that
    uses the smallest share of both budgets; where only one is given, the one with the smallest
    other error; without any, with the smallest mean error. Messages stay above a least size,
    since more passes are more rounds, each with its latency.

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
        own: which decoding the errors are those of, see ``Code.decoders``: "fresh" in place.

    Raises:
        CodeError: a budget that is not positive, or sizes that make no sense.
    """
    for name, budget in (
        ("spread_budget", spread_budget),
        ("mean_error_budget", mean_error_budget),
    ):
        if budget is not None:
            check_number(name, budget, 0, above=True, hint="None for any", error=CodeError)
    check_whole("ranks", ranks, 1, error=CodeError)
    check_number("wire_rounding", wire_rounding, 0, error=CodeError)
    check_whole("numel", numel, 0, error=CodeError)
    check_number("wire_itemsize", wire_itemsize, 0, above=True, error=CodeError)
    check_whole("min_message_bytes", min_message_bytes, 1, error=CodeError)
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
        _Budgets(
            math.inf if spread_budget is None else spread_budget,
            math.inf if mean_error_budget is None else mean_error_budget,
            own,
        ),
    )


@dataclass(frozen=True)
class _Budgets:
    """Largest errors allowed, infinite where any is, and of which decoding."""

    spread: float
    mean: float
    own: Own

    def met_by(self, errors: CodeErrors) -> bool:
        return errors.spread <= self.spread and errors.mean_error <= self.mean

    def cost(self, errors: CodeErrors) -> float:
        """By which codes within the budgets are ranked, the smallest first."""
        if math.isinf(self.mean):
            return errors.mean_error
        if math.isinf(self.spread):
            return errors.spread
        return max(errors.spread / self.spread, errors.mean_error / self.mean)

    def __str__(self) -> str:
        limits = (("spread", self.spread), ("mean error", self.mean))
        return " and ".join(f"{name} {limit:.2g}" for name, limit in limits if limit < math.inf)


@lru_cache(maxsize=256)
def _choose(ranks: int, rounding: float, most_passes: int, budgets: _Budgets) -> Choice:
    """``choose`` for three ranks and more."""
    ladder = [p for p in _PASSES if p <= most_passes]
    chosen: tuple[Code, CodeErrors] | None = None
    reached = 0
    for passes in ladder:
        chosen = _best(_simple(ranks, passes, rounding), budgets, rounding)
        if chosen is not None:
            reached = passes
            break
    # The optimized code takes seconds to find: ask only for more passes than that, up to the first
    # that fail.
    for passes in reversed([p for p in ladder if reached < p <= _MOST_PASSES_SEARCHED]):
        better = _searched(ranks, passes, rounding, budgets)
        if better is None:
            break
        chosen = better
    if chosen is not None:
        code, errors = chosen
        return Choice(code, _reason(code, errors, budgets), errors)
    return Choice(
        None,
        f"plain ring: no code of 2 to {ladder[0]} passes on {ranks} ranks keeps within {budgets} "
        "on this wire",
    )


def _best(
    codes: Iterator[Code], budgets: _Budgets, rounding: float
) -> tuple[Code, CodeErrors] | None:
    """The cheapest that meets the budgets; the first of equals, up to a millionth."""
    best: tuple[Code, CodeErrors] | None = None
    for code in codes:
        errors = code.expected(rounding, budgets.own)
        if budgets.met_by(errors) and (
            best is None or budgets.cost(errors) < budgets.cost(best[1]) * (1 - 1e-6)
        ):
            best = code, errors
    return best


def _simple(ranks: int, passes: int, rounding: float) -> Iterator[Code]:
    """The codes that need no search, over a grid of their parameter.

    Each family ends where noise exceeds the sum: smaller parameters only amplify it more.
    """
    yield from _while_usable(
        rounding, (_try("fourier", ranks, passes, stretch=stretch) for stretch in _STRETCHES)
    )
    if passes <= _MOST_PASSES_NEAR_ONE:
        for name in ("polynomial", "clustered"):
            yield from _while_usable(
                rounding, (_try(name, ranks, passes, eps=eps) for eps in EPS_GRID[::2])
            )


def _while_usable(rounding: float, codes: Iterator[Code | None]) -> Iterator[Code]:
    """The codes up to the first whose condition number times the rounding exceeds one."""
    for code in codes:
        if code is None or code.condition_number * rounding > 1:
            return
        yield code


def _searched(
    ranks: int, passes: int, rounding: float, budgets: _Budgets
) -> tuple[Code, CodeErrors] | None:
    """The optimized code, with the error emphasised that is over budget."""
    code = _try("optimized", ranks, passes, rounding=rounding)
    if code is None:
        return None
    errors = code.expected(rounding, budgets.own)
    if budgets.met_by(errors):
        return code, errors
    if errors.replica_error > math.hypot(budgets.spread, budgets.mean):
        return None  # it has the smallest replica error there is
    emphasis = 1 / _EMPHASIS if errors.spread > budgets.spread else _EMPHASIS
    code = _try("optimized", ranks, passes, rounding=emphasis * rounding)
    if code is None:
        return None
    errors = code.expected(rounding, budgets.own)
    return (code, errors) if budgets.met_by(errors) else None


def _try(
    name: str,
    ranks: int,
    passes: int,
    *,
    eps: float | None = None,
    stretch: float = 1.0,
    rounding: float | None = None,
) -> Code | None:
    """The code, or None where float64 cannot decode it."""
    try:
        code = design(name, ranks, passes, eps=eps, stretch=stretch, rounding=rounding)
        code.decoders()
    except CodeError:
        return None
    return code


def _reason(code: Code, errors: CodeErrors, budgets: _Budgets) -> str:
    """Why this one, in a sentence."""

    def within(value: float, budget: float) -> str:
        return f"{value:.2g}" + (f" <= {budget:.2g}" if budget < math.inf else "")

    ring = 2 * (code.ranks - 1) / code.ranks
    return (
        f"{code.describe()}: spread {within(errors.spread, budgets.spread)}, mean error "
        f"{within(errors.mean_error, budgets.mean)}, sends {code.sent_buffers:.3f} buffers "
        f"(ring {ring:.3f})"
    )

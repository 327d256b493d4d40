"""From what the ranks saw to rows of plain values: times, bandwidths, bytes and errors.

Pure functions; the equations of the columns stand here and nowhere else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from taciturn.bench.inputs import Span
from taciturn.collectives import Cost
from taciturn.errors import InputError
from taciturn.ledger import LedgerCounts
from taciturn.testbed import TCP_GOODPUT

__all__ = [
    "Bandwidth",
    "Calls",
    "ErrorSums",
    "Quartiles",
    "Row",
    "Sample",
    "bandwidth",
    "byte_columns",
    "error_columns",
    "error_sums",
    "limit_fraction",
    "quartiles",
    "root_of_quotient",
    "time_columns",
]

Row = dict[str, Any]
"""One line of the results: plain values, units in the names."""


class Bandwidth(NamedTuple):
    """Bytes per second, base 10, as nccl-tests defines them."""

    algbw_bytes_per_s: float
    busbw_bytes_per_s: float


_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda _: 1.0,
    "reduce": lambda _: 1.0,
}


def bandwidth(operation: str, size_bytes: int, seconds: float, ranks: int) -> Bandwidth:
    """Algorithm and bus bandwidth of a collective.

    ``algbw = size / time`` and ``busbw = algbw x factor``, where the factor is the share of the
    buffer that a *ring* moves over each link. For another algorithm busbw is an equivalent ring
    bandwidth and may exceed the link's rate: it says nothing about the wire. One rank alone moves
    nothing; its busbw is 0 where the factor counts ranks.

    Args:
        operation: all_reduce, all_gather, reduce_scatter, broadcast or reduce.
        size_bytes: the whole buffer; of all_gather and reduce_scatter the gathered one.
        seconds: duration of one call.
        ranks: size of the group.

    Raises:
        InputError: an operation without a factor, no rank, or a time that is not positive.
    """
    if operation not in _BUS_FACTORS:
        known = ", ".join(_BUS_FACTORS)
        raise InputError(f"no bus bandwidth is defined for {operation!r}; use one of {known}")
    if ranks < 1 or not seconds > 0:
        raise InputError(
            f"{ranks} ranks in {seconds} s have no bandwidth; give at least one rank "
            "and a positive time"
        )
    algbw = size_bytes / seconds
    return Bandwidth(algbw, algbw * _BUS_FACTORS[operation](ranks))


def limit_fraction(sent_bytes: int, seconds: float, rate_bits_per_s: int | None) -> float | None:
    """Share of the link's byte limit that was reached: 1 is a wire that never rests.

    The limit is TCP goodput, 1448 of the 1514 bytes of a full frame at MTU 1500: 0.956 of the set
    rate. None if the link is not shaped.
    """
    if rate_bits_per_s is None:
        return None
    return sent_bytes * 8 / (TCP_GOODPUT * rate_bits_per_s) / seconds


class Quartiles(NamedTuple):
    """The middle of some values, and the range of their middle half."""

    q1: float
    median: float
    q3: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Quartiles with linear interpolation; of one value, that value three times."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


# ------------------------------------------------------------------------------- times and bytes


class Sample(NamedTuple):
    """One call on one rank."""

    seconds: float
    counts: LedgerCounts
    wire_bytes: int | None  # what the interface sent, if this rank has one of its own


@dataclass(frozen=True)
class Calls:
    """All calls of one method at one size: ``warm[call][rank]`` and ``timed[call][rank]``."""

    warm: Sequence[Sequence[Sample]]
    timed: Sequence[Sequence[Sample]]
    costs: Sequence[Cost | None]  # by rank; None for what the backend does on its own

    @property
    def times_s(self) -> list[float]:
        """Seconds of each timed call: those of its slowest rank."""
        return [max(sample.seconds for sample in call) for call in self.timed]


def time_columns(calls: Calls, size_bytes: int, reference_s: float) -> Row:
    """Times, and what follows from them.

    Args:
        calls: of this method, at least one of them timed.
        size_bytes: of the buffer.
        reference_s: median time of the backend's fp32 all_reduce in the same run.
    """
    q1, median, q3 = quartiles(calls.times_s)
    algbw, busbw = bandwidth("all_reduce", size_bytes, median, len(calls.costs))
    return {
        "median_s": median,
        "q1_s": q1,
        "q3_s": q3,
        "ratio_to_backend": median / reference_s,
        "ratio_q1": q1 / reference_s,
        "ratio_q3": q3 / reference_s,
        "algbw_bytes_per_s": algbw,
        "busbw_bytes_per_s": busbw,  # equivalent ring bandwidth, see bandwidth()
        "times_s": calls.times_s,
        "times_by_rank_s": [[sample.seconds for sample in call] for call in calls.timed],
        "warmup_times_s": [max(sample.seconds for sample in call) for call in calls.warm],
    }


def byte_columns(calls: Calls, rate_bits_per_s: int | None) -> Row:
    """Bytes, rounds and messages as counted, as claimed, and as the interface saw them.

    Where ranks differ, the one that sends most is shown. Seconds of the codec and of waiting are
    means over ranks, medians over calls. What the backend sends on its own is null.
    """
    wire = [[sample.wire_bytes for sample in call] for call in calls.timed]
    seen = [max(b for b in call if b is not None) for call in wire if None not in call]
    row: Row = {
        "sent_bytes_per_rank": None,
        "formula_bytes_per_rank": None,
        "counts_equal_formula": None,
        "limit_fraction": None,
        "rounds": None,
        "messages": None,
        "workspace_bytes": None,
        "codec_s": None,
        "waiting_s": None,
        "wire_bytes_counted_by_interface": round(statistics.median(seen)) if seen else None,
    }
    costs = [cost for cost in calls.costs if cost is not None]
    if len(costs) != len(calls.costs):
        return row

    def average(pick: Callable[[LedgerCounts], float]) -> float:
        return statistics.median(statistics.fmean(pick(s.counts) for s in c) for c in calls.timed)

    counted = [
        [(s.counts.rounds, s.counts.messages, s.counts.sent_bytes) for s in call]
        for call in (*calls.warm, *calls.timed)
    ]
    claimed = [(cost.rounds, cost.messages, cost.sent_bytes) for cost in costs]
    sent = max(bytes_ for call in counted for _, _, bytes_ in call)
    median = quartiles(calls.times_s).median
    row |= {
        "sent_bytes_per_rank": sent,
        "formula_bytes_per_rank": max(cost.sent_bytes for cost in costs),
        "counts_equal_formula": all(call == claimed for call in counted),
        "limit_fraction": limit_fraction(sent, median, rate_bits_per_s),
        "rounds": max(rounds for call in counted for rounds, _, _ in call),
        "messages": max(messages for call in counted for _, messages, _ in call),
        "workspace_bytes": max(cost.workspace_bytes for cost in costs),
        "codec_s": average(lambda counts: counts.codec_s),
        "waiting_s": average(lambda counts: counts.waiting_s),
    }
    return row


# ---------------------------------------------------------------------------------------- errors


class ErrorSums(NamedTuple):
    """Sums of squares per parameter, float64, each of shape ``(spans,)``.

    With d this rank's result, s the true sum and m the mean of the results over ranks.
    """

    replica: torch.Tensor  # of d - s
    spread: torch.Tensor  # of d - m
    mean: torch.Tensor  # of m - s
    true: torch.Tensor  # of s


PIECE_ELEMS = 1 << 20  # float64 scratch of a few times 8 MiB


def error_sums(
    result: torch.Tensor, mean: torch.Tensor | None, true: torch.Tensor, spans: Sequence[Span]
) -> ErrorSums:
    """One rank's share of the errors.

    Args:
        result: what the method left on this rank, any float dtype, shape ``(numel,)``.
        mean: mean of the results over ranks, float64; None if all ranks hold ``result``.
        true: the sum of all inputs, float64.
        spans: the parameters; empty for the whole buffer as one.
    """
    spans = spans or (Span("", 0, true.numel()),)
    sums = torch.zeros(4, len(spans), dtype=torch.float64, device=true.device)
    for i, span in enumerate(spans):
        for start in range(span.start, span.stop, PIECE_ELEMS):
            piece = slice(start, min(start + PIECE_ELEMS, span.stop))
            d, s = result[piece].double(), true[piece]
            m = d if mean is None else mean[piece]
            sums[:, i] += torch.stack([x.square().sum() for x in (d - s, d - m, m - s, s)])
    return ErrorSums(*sums)


def root_of_quotient(squares: float, reference: float) -> float | None:
    """Root of a quotient of sums of squares; None (JSON has no NaN) if it is not a number."""
    if not (reference > 0 and math.isfinite(squares) and math.isfinite(reference)):
        return None
    return math.sqrt(squares / reference)


def error_columns(sums: ErrorSums, hetero: float, ranks: int, spans: Sequence[Span]) -> Row:
    """The errors, relative to the true sum s.

    ``replica_error = rms(d_i - s) / rms(s)``, ``mean_error = rms(m - s) / rms(s)`` and
    ``spread = rms(d_i - m) / rms(s)``, rms over elements and, for the results d_i, over ranks;
    m is their mean. ``spread_hetero`` divides by the rms of ``sqrt(N) (g_k - s / N)`` instead, the
    part of the inputs that differs between ranks. The worst parameters are those of the largest
    error relative to their own rms(s). Null where there is nothing to divide by.

    Args:
        sums: ``replica`` and ``spread`` summed over ranks, ``mean`` and ``true`` of any rank.
        hetero: sum over elements and ranks of ``(g_k - s / N)^2``.
        ranks: N.
        spans: the parameters, or empty.
    """
    replica, spread, mean, true = (column.tolist() for column in sums)
    row: Row = {
        "replica_error": root_of_quotient(sum(replica) / ranks, sum(true)),
        "mean_error": root_of_quotient(sum(mean), sum(true)),
        "spread": root_of_quotient(sum(spread) / ranks, sum(true)),
        # Mean over ranks of (d - m)^2, over N times the mean over ranks of (g - s / N)^2.
        "spread_hetero": root_of_quotient(sum(spread) / ranks, hetero),
    }
    for kind, squares, count in (("replica", replica, ranks), ("mean", mean, 1)):
        name, worst = None, None
        for span, square, reference in zip(spans, squares, true, strict=False):
            error = root_of_quotient(square / count, reference)
            if error is not None and (worst is None or error > worst):
                name, worst = span.name, error
        row |= {f"worst_parameter_{kind}": name, f"worst_parameter_{kind}_error": worst}
    return row

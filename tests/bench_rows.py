"""Rows as ``taciturn bench`` makes them, from made-up calls: for the tests of what shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from taciturn.bench.columns import (
    Calls,
    ErrorSums,
    Sample,
    byte_columns,
    error_columns,
    time_columns,
)
from taciturn.bench.inputs import Span
from taciturn.collectives import Cost
from taciturn.ledger import LedgerCounts

SPANS = (Span("tokens.weight", 0, 60), Span("norm.bias", 60, 100))
CONDITIONS = {
    "started_at": "2026-01-02T03:04:05+00:00",
    "command": "taciturn bench --ranks 4",
    "link": "4 ranks in network namespaces, 200 Mbit/s up and 200 Mbit/s down",
    "input": "independent standard normal elements on each rank",
    "repeats": 3,
    "torch": "2.13.0",
}


def make_calls(
    times_s: Sequence[float], sent: int | None, ranks: int = 4, wire: int | None = None
) -> Calls:
    """Calls whose slowest rank is the last one; it takes ``times_s``."""
    counts = LedgerCounts(messages=7, sent_bytes=sent or 0, rounds=6, codec_s=0.002, waiting_s=0.03)
    timed = [
        [Sample(t * (1 + rank) / ranks, counts, wire) for rank in range(ranks)] for t in times_s
    ]
    cost = None if sent is None else Cost(6, 7, sent, 4096)
    return Calls(timed[:1], timed, [cost] * ranks)


def make_row(
    method: str,
    times_s: Sequence[float] = (0.9, 1.0, 1.1),
    sent: int | None = 700,
    replica: float = 1e-3,
    mean: float = 1e-4,
    *,
    wire: int | None = None,
    buffer_bytes: int = 400,
    rate: int | None = 200_000_000,
    reference: bool = False,
    ranks: int = 4,
    **changes: Any,
) -> dict[str, Any]:
    """One row; ``replica`` and ``mean`` are the errors it has."""
    calls = make_calls(times_s, sent, ranks, wire)
    true = torch.tensor([30.0, 10.0], dtype=torch.float64)
    sums = ErrorSums(
        true * replica**2 * ranks, true * (replica**2 - mean**2) * ranks, true * mean**2, true
    )
    return (
        {
            "method": method,
            "ranks": ranks,
            "rate_bits_per_s": rate,
            "buffer_bytes": buffer_bytes,
            "dtype": "float32",
            "is_reference": reference,
            "added_by_bench": False,
            "choice": "polynomial, passes 4" if method.startswith("coded") else None,
        }
        | time_columns(calls, buffer_bytes, 1.0)
        | byte_columns(calls, rate)
        | {"bit_identical": replica == mean, "input_difference": 0.5, "notes": []}
        | error_columns(sums, 20.0, ranks, SPANS)
        | {"conditions": dict(CONDITIONS)}
        | changes
    )


def make_run(buffer_bytes: int = 400) -> list[dict[str, Any]]:
    """A run in which a quantized ring beats one of two coded rings, and none in the mean."""
    size = {"buffer_bytes": buffer_bytes}
    return [
        make_row("backend", (0.99, 1.0, 1.01), None, 4e-8, 4e-8, wire=720, reference=True, **size),
        make_row("backend:wire=bf16", (0.48, 0.5, 0.52), None, 3e-3, 3e-3, wire=360, **size),
        make_row("ring", (1.0, 1.02, 1.04), 700, 4e-8, 4e-8, **size),
        make_row("coded:passes=2", (0.7, 0.71, 0.72), 550, 2e-4, 1e-6, **size),
        make_row(
            "coded:passes=16,code=fourier,wire=bf16", (0.3, 0.31, 0.32), 210, 0.3, 2e-3, **size
        ),
        make_row("quantized:bits=8", (0.26, 0.27, 0.28), 180, 8e-3, 8e-3, **size),
        make_row("direct:bits=8", (0.28, 0.29, 0.3), 181, 5e-3, 5e-3, **size),
    ]

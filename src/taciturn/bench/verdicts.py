"""What the rows say, in sentences: who beats the backend, and where a coded ring is beaten itself.

A verdict on time needs quartiles that do not touch; without enough repeats it is "not shown".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from taciturn.bench.columns import Row
from taciturn.bench.table import error_text, percent_text, ratio_text

__all__ = [
    "CodedVerdict",
    "bytes_per_elem",
    "coded_verdicts",
    "dominated",
    "family",
    "headlines",
    "is_faster",
]

LEAST_REPEATS = 3  # below, quartiles say nothing
RIVALS = ("quantized", "direct")


def family(method: str) -> str:
    """The name of a method, without its keys: ``coded`` of ``coded:passes=4``."""
    return method.partition(":")[0].strip()


def bytes_per_elem(row: Row) -> float | None:
    """Bytes that a rank sends per element: as counted; of the backend, as its interface saw it."""
    sent = row["sent_bytes_per_rank"]
    if sent is None:
        sent = row["wire_bytes_counted_by_interface"]
    return None if sent is None else sent / (row["buffer_bytes"] / 4)


def dominated(row: Row, others: Iterable[Row], error: str) -> list[Row]:
    """The others that send no more bytes with no more ``error``, and are better in one of both."""
    sent, wrong = bytes_per_elem(row), row[error]
    if sent is None or wrong is None:
        return []
    better = []
    for other in others:
        theirs, their_error = bytes_per_elem(other), other[error]
        if other is row or theirs is None or their_error is None:
            continue
        if theirs <= sent and their_error <= wrong and (theirs, their_error) != (sent, wrong):
            better.append(other)
    return better


def is_faster(row: Row, other: Row) -> bool:
    """Whether the middle halves of the times do not touch, ``row`` below ``other``."""
    return min(len(row["times_s"]), len(other["times_s"])) >= LEAST_REPEATS and bool(
        row["q3_s"] < other["q1_s"]
    )


class CodedVerdict(NamedTuple):
    """Which quantized or direct methods send no more than a coded ring and err no more."""

    row: Row
    replica: list[Row]  # when every replica must be accurate
    mean: list[Row]  # when only the mean over replicas counts


def coded_verdicts(rows: Sequence[Row]) -> list[CodedVerdict]:
    """One verdict for each coded ring among the rows of one size."""
    rivals = [row for row in rows if family(row["method"]) in RIVALS]
    return [
        CodedVerdict(
            row, dominated(row, rivals, "replica_error"), dominated(row, rivals, "mean_error")
        )
        for row in rows
        if family(row["method"]) == "coded" and row["replica_error"] is not None
    ]


def _names(rows: Sequence[Row], value: Callable[[Row], str]) -> str:
    return ", ".join(f"{row['method']} ({value(row)})" for row in rows)


def _against_backend(rows: Sequence[Row]) -> list[str]:
    """Sentences on time: the fastest, and who beats the backend's 16-bit all_reduce fairly."""
    reference = next(row for row in rows if row["is_reference"])
    if len(reference["times_s"]) < LEAST_REPEATS:
        return [f"Who is faster is not shown: it takes at least {LEAST_REPEATS} repeats."]
    said = []
    faster = sorted(
        (r for r in rows if is_faster(r, reference)), key=lambda r: r["ratio_to_backend"]
    )
    if faster:
        best = faster[0]
        said.append(
            f"{len(faster)} of {len(rows) - 1} methods are faster than the backend's fp32 "
            f"all_reduce; the fastest, {best['method']}, takes "
            f"{ratio_text(best['ratio_to_backend'])} of its time at a replica error of "
            f"{error_text(best['replica_error'])}, {error_text(best['mean_error'])} in the mean "
            "over replicas."
        )
    else:
        said.append("No method is faster than the backend's fp32 all_reduce here.")
    half = next((r for r in rows if r["method"].replace(" ", "") == "backend:wire=bf16"), None)
    if half is None:
        return [*said, "The backend's bf16 all_reduce, the usual alternative, was not in this run."]
    for error, what in (
        ("replica_error", "on every replica"),
        ("mean_error", "in the mean over replicas"),
    ):
        beaten_by = [
            row
            for row in rows
            if row is not half
            and row[error] is not None
            and half[error] is not None
            and row[error] <= half[error]
            and is_faster(row, half)
        ]
        beaten_by.sort(key=lambda row: row["ratio_to_backend"])
        limit = f"error {what} of at most its {error_text(half[error])}"
        took = (
            f"the backend's bf16 all_reduce ({ratio_text(half['ratio_to_backend'])} of fp32's time)"
        )
        if beaten_by:
            names = _names(beaten_by, lambda row: ratio_text(row["ratio_to_backend"]))
            said.append(f"Faster than {took}, with an {limit}: {names}.")
        else:
            said.append(f"No method is shown to be faster than {took} with an {limit}.")
    return said


def _coded(rows: Sequence[Row]) -> list[str]:
    """Sentences on bytes: where a coded ring is beaten by a quantized one, and where not."""
    verdicts = coded_verdicts(rows)
    if not verdicts:
        return []
    if not any(family(row["method"]) in RIVALS for row in rows):
        return [
            "No quantized ring or direct exchange was in this run to compare the coded rings with."
        ]
    said = []
    for kind, when in (
        ("replica", "When every replica must be accurate"),
        ("mean", "When the mean over replicas is what counts"),
    ):
        beaten = [v.row for v in verdicts if getattr(v, kind)]
        free = [v.row for v in verdicts if not getattr(v, kind)]

        def value(row: Row, key: str = f"{kind}_error") -> str:
            return f"{bytes_per_elem(row):.2f} bytes per element, error {error_text(row[key])}"

        text = (
            f"{when}, a quantized ring or direct exchange beats {len(beaten)} of {len(verdicts)} "
            "coded rings, with no more bytes and no more error"
        )
        if free:
            text += f"; none beats {_names(free, value)}"
        said.append(f"{text}.")
    return said


def headlines(rows: Sequence[Row]) -> list[str]:
    """The findings of the largest size, most important first; whole sentences.

    Args:
        rows: of one run, at least one.
    """
    size = max(row["buffer_bytes"] for row in rows)
    chosen = [row for row in rows if row["buffer_bytes"] == size]
    said = _against_backend(chosen) + _coded(chosen)
    reached = [row for row in chosen if row["limit_fraction"] is not None]
    if reached:
        least = min(reached, key=lambda row: row["limit_fraction"])
        most = max(reached, key=lambda row: row["limit_fraction"])
        said.append(
            f"Of the link's byte limit, {percent_text(least['limit_fraction'])} "
            f"({least['method']}) to {percent_text(most['limit_fraction'])} ({most['method']}) "
            "were reached."
        )
    return said

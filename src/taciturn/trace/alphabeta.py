"""A collective's time as latency and bandwidth: given, or fitted from the trace's transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from taciturn.errors import InputError
from taciturn.trace.analysis import Analysis
from taciturn.trace.collectives import Collective
from taciturn.trace.report import size_text
from taciturn.trace.timeline import unite
from taciturn.units import format_seconds

__all__ = ["MAX_ALPHA_NS", "AlphaBeta", "disagreement", "fit_alpha_beta"]

MAX_ALPHA_NS = 10_000_000
"""More latency than any network within a data centre gives one call; say --alpha where it is."""


FAR = 3
"""Between what a link is said to take and what it took: more is hardly the same link."""


@dataclass(frozen=True)
class AlphaBeta:
    """A collective's time as ``alpha_s + beta_s_per_byte * bytes``; None where not known.

    Attributes:
        alpha_s: what no byte causes.
        beta_s_per_byte: what each causes; without it the measured time is scaled.
        given: by the user, who knows; what was fitted only bounds it.
    """

    alpha_s: float | None = None
    beta_s_per_byte: float | None = None
    given: bool = True

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e6:
                raise InputError(f"{name} is {value!r}; give seconds from 0 on and below 1e6")
        if self.given and self.alpha_s == self.beta_s_per_byte == 0:
            raise InputError("alpha_s and beta_s_per_byte are both 0: give one that is not")


def fit_alpha_beta(analysis: Analysis, name: str) -> AlphaBeta:
    """``alpha`` and ``beta`` of one kind of collective, from its own transfers in the trace.

    Transfers of a rank that overlap share its link and count as one, of all their bytes. Least
    squares of the relative error over the median of each size, neither below zero, ``alpha`` not
    above the shortest or what any network has. Sizes that differ by less than a factor of two, or
    fewer than three, give no ``alpha``.
    """
    by_size = _seconds_by_size(analysis, name)
    sizes = sorted(size for size in by_size if median(by_size[size]) > 0)
    if len(sizes) < 3 or sizes[-1] < 2 * sizes[0]:
        return AlphaBeta(given=False)
    n = np.array(sizes, float)
    t = np.array([median(by_size[size]) for size in sizes])
    # minimise sum ((alpha + beta n - t) / t)^2
    rows = np.stack([1 / t, n / t], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)[0].tolist()
    bounded = min(max(alpha, 0.0), float(t.min()), MAX_ALPHA_NS / 1e9)
    if bounded != alpha:  # one unknown is left: minimise over beta alone
        alpha, beta = bounded, float((n / t * (1 - bounded / t)).sum() / ((n / t) ** 2).sum())
    elif beta < 0:
        alpha, beta = float((1 / t).sum() / ((1 / t) ** 2).sum()), 0.0
    return AlphaBeta(alpha, beta, given=False)


def disagreement(line: AlphaBeta, analysis: Analysis, name: str) -> str:
    """A sentence where a line that was given is far from what the trace has; else empty."""
    by_size = _seconds_by_size(analysis, name)
    if not by_size or line.beta_s_per_byte is None:
        return ""
    size = max(by_size)
    told_s, took_s = (line.alpha_s or 0.0) + line.beta_s_per_byte * size, median(by_size[size])
    if max(told_s, took_s) <= FAR * min(told_s, took_s):
        return ""
    return (
        f"{name} of {size_text(size)} takes {format_seconds(told_s)} on the link that was given, "
        f"and took {format_seconds(took_s)} in the trace, as if on another link"
    )


def _seconds_by_size(analysis: Analysis, name: str) -> dict[int, list[float]]:
    """Lengths of bursts, by their bytes."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, ns in _bursts(analysis, name):
        by_size[size].append(ns / 1e9)
    return by_size


def _bursts(analysis: Analysis, name: str) -> Iterator[tuple[int, int]]:
    """Bytes and length of each stretch of time with transfers on a rank; those of known size."""
    by_rank: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for meeting in analysis.meetings:
        if meeting.first.name == name:
            for one, ns in _transfers(meeting.members):
                by_rank[one.rank].append((one.end_ns - ns, one.end_ns, one.size_bytes or 0))
    for transfers in by_rank.values():
        start, end, size = np.array(sorted(transfers), np.int64).T
        spans = unite(start, end)
        of = np.searchsorted(spans.start_ns, start, side="right") - 1
        moves = end > start
        total = np.zeros(len(spans), np.int64)
        np.add.at(total, of[moves], size[moves])
        unknown = np.zeros(len(spans), np.bool_)
        unknown[of[moves & (size == 0)]] = True
        length = spans.end_ns - spans.start_ns
        yield from zip(total[~unknown].tolist(), length[~unknown].tolist(), strict=True)


def _transfers(members: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Each member's time from the last arrival to its end; of one alone its whole time, in ns."""
    last = max(one.start_ns for one in members)
    return [(one, max(0, one.end_ns - max(last, one.start_ns))) for one in members]

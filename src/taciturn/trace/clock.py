"""One clock for all ranks, from collectives that they share.

NCCL: an all-reduce ends on all ranks within microseconds, so the difference of two ranks' clocks is
that of the ends; a line through these differences gives offset and drift. gloo: ends differ by
milliseconds, but no rank can be done before every rank has come, so each meeting *brackets* the
offset. Starts say nothing: ranks come when they are ready.

A correction is refused, with a reason, if the ranks share no such collective, if ends do not agree
after it, or if the brackets contradict each other or are too wide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.collectives import Collective, Meeting

__all__ = ["Clocks", "Correction", "align"]

MAX_RESIDUAL_NS = 500_000  # ends of one all-reduce that still differ by more: clocks do not agree
MAX_BRACKET_NS = 2_000_000  # half a bracket; a wait of a millisecond must still be seen
END_NOISE_NS = 20_000  # ends of one all-reduce differ by as much between ranks of one clock
QUARTZ_DRIFT = 1e-4  # what two crystals differ by at most
MAX_DRIFT = 1e-3  # of a clock that is being set right


@dataclass(frozen=True)
class Correction:
    """What to add to a rank's time: ``offset_ns + drift * (time - origin_ns)``.

    Attributes:
        offset_ns: at the origin.
        drift: nanoseconds per nanosecond.
        origin_ns: where the drift is zero.
        uncertainty_ns: half the range in which the truth lies; of the ends that were fitted, their
            median deviation.
    """

    offset_ns: int
    drift: float
    origin_ns: int
    uncertainty_ns: int

    def apply(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times on the common clock."""
        moved = np.rint(self.drift * (time_ns - self.origin_ns)).astype(np.int64)
        fixed: NDArray[np.int64] = time_ns + self.offset_ns + moved
        return fixed

    def at(self, time_ns: int) -> int:
        """One time on the common clock."""
        return time_ns + self.offset_ns + round(self.drift * (time_ns - self.origin_ns))


@dataclass(frozen=True)
class Clocks:
    """Corrections to the clock of the lowest rank.

    Attributes:
        corrections: by rank; one that could not be aligned is missing, or a stopgap.
        refused: by rank, why it could not be aligned.
        notes: what was found, as sentences.
    """

    corrections: Mapping[int, Correction]
    refused: Mapping[int, str]
    notes: tuple[str, ...] = ()

    def correct(self, one: Collective) -> Collective:
        """The same collective on the common clock; as it is, if its rank is not aligned."""
        fix = self.corrections.get(one.rank)
        if fix is None:
            return one
        return replace(
            one,
            call_ns=fix.at(one.call_ns),
            start_ns=fix.at(one.start_ns),
            end_ns=max(fix.at(one.end_ns), fix.at(one.start_ns)),
        )


def align(
    ranks: Sequence[int], meetings: Sequence[Meeting], *, bracketed: bool, one_host: bool = False
) -> Clocks:
    """Align every rank with the lowest, over other ranks where they share no collective.

    Args:
        ranks: all of them.
        meetings: with the members' own times.
        bracketed: ends do not coincide (gloo), so only brackets count.
        one_host: the files say that all ranks ran on one host, so that no offset is the best guess
            where the brackets allow it.
    """
    shared: dict[tuple[int, int], list[tuple[Collective, Collective]]] = defaultdict(list)
    for meeting in meetings:
        if not meeting.first.meets:
            continue
        for i, one in enumerate(meeting.members):
            for other in meeting.members[i + 1 :]:
                shared[one.rank, other.rank].append((one, other))
                shared[other.rank, one.rank].append((other, one))
    first = min(ranks)
    corrections = {first: Correction(0, 0.0, 0, 0)}
    refused: dict[int, str] = {}
    waiting = [rank for rank in ranks if rank != first]
    while waiting:
        rank, base = max(
            ((rank, base) for rank in waiting for base in corrections),
            key=lambda pair: (len(shared.get(pair, ())), -pair[1]),
        )
        waiting.remove(rank)
        pairs = shared.get((rank, base), [])
        if not pairs:
            refused[rank] = f"rank {rank} shares no matched collective with another rank"
            continue
        fix = corrections[base]
        on_base = [(own, replace(at, start_ns=fix.at(at.start_ns), end_ns=fix.at(at.end_ns)))
                   for own, at in pairs]  # fmt: skip
        found = _from_brackets(on_base, one_host) if bracketed else _from_ends(on_base)
        if isinstance(found, str):
            refused[rank] = f"rank {rank}: {found}"
        else:
            corrections[rank] = replace(
                found, uncertainty_ns=found.uncertainty_ns + fix.uncertainty_ns
            )
    return Clocks(corrections, refused, _describe(corrections, refused))


def _from_ends(pairs: Sequence[tuple[Collective, Collective]]) -> Correction | str:
    """Offset and drift from a robust line through the differences of ends."""
    time = np.array([own.end_ns for own, _ in pairs], np.int64)
    gap = np.array([at.end_ns - own.end_ns for own, at in pairs], np.int64)
    origin = int(np.median(time))
    offset = int(np.median(gap))
    drift = 0.0
    deviation = gap - offset
    spread = float(np.median(np.abs(deviation)))
    if len(pairs) >= 3 and int(np.ptp(time)) > 0:
        slope = _slope(time - origin, deviation)
        line = deviation - slope * (time - origin)
        middle = float(np.median(line))
        after = float(np.median(np.abs(line - middle)))
        # A drift that halves what is left is one; noise of microseconds over a step is not.
        moves = abs(slope) * float(np.ptp(time))
        likely = abs(slope) <= QUARTZ_DRIFT or END_NOISE_NS < moves <= MAX_DRIFT * np.ptp(time)
        if likely and after <= spread / 2:
            drift, spread = slope, after
            offset += round(middle)
    if spread > MAX_RESIDUAL_NS:
        return (
            f"ends of its {len(pairs)} shared collectives differ by {spread / 1e6:.3g} ms after "
            "every correction: these are not the same collectives, or not of one run"
        )
    return Correction(offset, drift, origin, math.ceil(spread))


def _slope(x: NDArray[np.int64], y: NDArray[np.int64]) -> float:
    """Theil-Sen: the median of the slopes between points; of at most 200 of them."""
    pick = np.linspace(0, len(x) - 1, min(len(x), 200)).astype(np.int64)
    x, y = x[pick], y[pick]
    i, j = np.triu_indices(len(x), 1)
    run = (x[j] - x[i]).astype(np.float64)
    apart = run != 0
    return float(np.median((y[j] - y[i])[apart] / run[apart])) if apart.any() else 0.0


def _from_brackets(
    pairs: Sequence[tuple[Collective, Collective]], one_host: bool
) -> Correction | str:
    """The offsets for which nobody is done before the other has come."""
    # own.end + offset >= at.start, and at.end >= own.start + offset
    low = max(at.start_ns - own.end_ns for own, at in pairs)
    high = min(at.end_ns - own.start_ns for own, at in pairs)
    if low > high:
        return (
            f"no offset explains its {len(pairs)} shared collectives: one rank would be done "
            f"{(low - high) / 1e6:.3g} ms before the other came; the clocks drift, or these are "
            "not the same collectives"
        )
    if one_host and low <= 0 <= high:
        return Correction(0, 0.0, 0, 0)
    half = (high - low) // 2
    if half > MAX_BRACKET_NS:
        return (
            f"its {len(pairs)} shared collectives leave {half / 1e6:.3g} ms either way open, more "
            f"than {MAX_BRACKET_NS / 1e6:g} ms, and the files do not name one host"
        )
    return Correction((low + high) // 2, 0.0, 0, half)


def _describe(corrections: Mapping[int, Correction], refused: Mapping[int, str]) -> tuple[str, ...]:
    notes = []
    moved = {rank: fix for rank, fix in corrections.items() if fix.offset_ns or fix.drift}
    if moved:
        rank, fix = max(moved.items(), key=lambda item: abs(item[1].offset_ns))
        drift = f", drift {fix.drift * 1e6:.3g} ppm" if fix.drift else ""
        ranks = f"{len(moved)} rank{'s' * (len(moved) > 1)}"
        notes.append(
            f"clocks aligned on {ranks}; largest offset {fix.offset_ns / 1e6:.8g} ms"
            f"{drift} (rank {rank}), good to {fix.uncertainty_ns / 1e3:.3g} us"
        )
    notes += [f"clock not aligned: {why}" for why in refused.values()]
    return tuple(notes)

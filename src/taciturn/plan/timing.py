"""When a step computes what: its compute, the share of backward in it, when gradients are there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from taciturn.errors import InputError
from taciturn.ranges import check_number

if TYPE_CHECKING:
    from taciturn.trace.view import View

__all__ = ["BACKWARD_SHARE", "Compute", "read_timing"]

FORWARD_SHARE, BACKWARD_SHARE = 0.3, 0.6
"""Of a step's compute, where no trace tells: backward takes twice as long as forward (it has two
products where forward has one), and the optimizer the rest."""


@dataclass(frozen=True)
class Compute:
    """A step without any exchange, all ranks at work.

    Attributes:
        step_s: seconds of forward, backward and optimizer.
        backward_share: of these, of backward; an exchange can run beside it and nothing else.
        made: shares of the elements, ascending from 0 to 1; with ``at`` the curve of how much of
            the gradient is there when.
        at: shares of backward's time.
        source: in words, for the table.
    """

    step_s: float
    backward_share: float = BACKWARD_SHARE
    made: tuple[float, ...] = (0.0, 1.0)
    at: tuple[float, ...] = (0.0, 1.0)
    source: str = "in proportion to bytes"

    def __post_init__(self) -> None:
        check_number("step_s", self.step_s, 0, hint="of compute, in seconds")
        check_number("backward_share", self.backward_share, 0, 1)
        for name in ("made", "at"):
            shares = getattr(self, name)
            if list(shares) != sorted(shares) or shares[0] != 0 or shares[-1] != 1:
                raise InputError(f"{name}={shares}: give shares that ascend from 0 to 1")
        if len(self.made) != len(self.at):
            raise InputError(f"{len(self.made)} shares made at {len(self.at)} times: one each")

    @property
    def backward_s(self) -> float:
        """Seconds of backward."""
        return self.step_s * self.backward_share

    def ready_s(self, share: float) -> float:
        """Seconds of backward after which this share of the gradient's elements is there."""
        place = bisect_left(self.made, share)
        if place == 0:
            return 0.0
        low, high = self.made[place - 1], self.made[min(place, len(self.made) - 1)]
        start, stop = self.at[place - 1], self.at[min(place, len(self.at) - 1)]
        part = (share - low) / (high - low) if high > low else 1.0
        return self.backward_s * (start + min(1.0, part) * (stop - start))


def read_timing(folder: Path, step_s: float | None = None) -> Compute:
    """What the profiler's files of a DDP run say: ``taciturn.trace`` reads them.

    A collective is called when the gradients of its bucket are there, so the calls of a step's
    all_reduces, against their bytes, are the curve of backward. Backward begins with the first
    operator of autograd, and is over when the last bucket is there. Seconds of compute are those of
    the rank that computes longest; profiled steps are slower than others, so a measured
    ``step_s`` is better.

    Args:
        folder: with one file per rank.
        step_s: seconds of compute where they were measured.

    Raises:
        InputError: no such files, or no step with all_reduces and a backward in them.
    """
    from taciturn.trace import analyse

    analysis = analyse([folder])
    found = [one for view in analysis.views for one in _curves(view)]
    if not found:
        raise InputError(
            f"--trace {folder}: no step in it has a backward with all_reduces of known sizes; "
            "record a DDP run (taciturn.trace.record)"
        )
    rows = [row for step in analysis.report.steps for row in step.ranks]
    computed = max(
        median(row.compute_s for row in rows if row.rank == rank) for rank in analysis.report.ranks
    )
    chosen = sorted(found, key=lambda one: one.backward_s)[len(found) // 2]
    total_s = computed if step_s is None else step_s
    share = min(1.0, chosen.backward_s / max(computed, chosen.backward_s))
    return replace(
        Compute(total_s, share),
        made=chosen.made,
        at=chosen.at,
        source=f"as in the trace of {folder}",
    )


@dataclass(frozen=True)
class _Curve:
    backward_s: float
    made: tuple[float, ...]
    at: tuple[float, ...]


def _curves(view: View) -> list[_Curve]:
    """Return the curve of each step of a rank that has one."""
    curves = []
    names = [name for _, name, _ in view.trace.labels]
    labels = {i for i, name in enumerate(names) if name.startswith("autograd::engine")}
    rows = [i for i, label in enumerate(view.events.label.tolist()) if label in labels]
    for number in range(len(view.steps)):
        reduces = [
            (one.call_ns, one.size_bytes)
            for one in view.collectives
            if one.name == "all_reduce" and one.size_bytes and one.step == number
        ]
        starts = [int(view.start_ns[row]) for row in rows if view.step_index[row] == number]
        if not reduces or not starts:
            continue
        begun, last = min(starts), max(start for start, _ in reduces)
        if last > begun:
            curves.append(_curve(begun, last, sorted(reduces)))
    return curves


def _curve(begun_ns: int, last_ns: int, reduces: Sequence[tuple[int, int]]) -> _Curve:
    total, done = sum(nbytes for _, nbytes in reduces), 0
    made, at = [0.0], [0.0]
    for start_ns, nbytes in reduces:
        done += nbytes
        made.append(done / total)
        at.append(min(1.0, max(at[-1], (start_ns - begun_ns) / (last_ns - begun_ns))))
    at[-1] = 1.0
    return _Curve((last_ns - begun_ns) / 1e9, tuple(made), tuple(at))

"""What an analysis found, as plain values: seconds, bytes, counts and sentences.

``to_json`` gives the same as nested dictionaries. A number that cannot be told is None, never NaN;
``notes`` says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "CollectiveRow",
    "CriticalPath",
    "Prediction",
    "RankRow",
    "Report",
    "StepReport",
    "Straggler",
    "effect_text",
    "size_text",
    "title",
]


@dataclass(frozen=True)
class CriticalPath:
    """Where the time of a step goes, along the one chain of waits that it is as long as.

    Attributes:
        compute_s: kernels and copies; without a GPU, operators on the CPU.
        launch_s: the CPU issuing work, Python between operators included, and its latencies.
        codec_s: encoding and decoding.
        communication_s: transfer. Of one rank among many it holds the wait for the others.
        waiting_s: all other ranks of a collective have come, and the path runs on the last.
        idle_s: nothing was recorded on the thread, or a delay that nothing explains.
    """

    compute_s: float = 0.0
    launch_s: float = 0.0
    codec_s: float = 0.0
    communication_s: float = 0.0
    waiting_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one name, group and size in a step; times are means over ranks.

    Attributes:
        name: ``all_reduce`` and so on.
        group: of the process group, or ``unknown``.
        count: on each rank.
        bytes: of each one's buffer; None if the files do not say.
        busy_s: the time in which at least one of them was under way.
        not_overlapped_s: the part of it in which the rank computed nothing.
        waiting_s: in at least one of them before its last rank has come; None for one rank alone.
        transfer_s: with one under way after its last rank has come; None for one rank alone.
        exposed_s: what the step would be shorter by, were their transfers instant.
        exposed_low_s: with only those waits that are certain.
        exposed_high_s: not more than this.
        min_s: the shortest of them on any rank, from start to end.
    """

    name: str
    group: str
    count: int
    bytes: int | None
    busy_s: float
    not_overlapped_s: float
    waiting_s: float | None
    transfer_s: float | None
    exposed_s: float
    exposed_low_s: float
    exposed_high_s: float
    min_s: float


@dataclass(frozen=True)
class RankRow:
    """One rank's part of a step.

    Attributes:
        rank: its number.
        measured_s: length of the step's window on the CPU.
        busy_s: with a collective under way.
        overlapped_s: the part of it in which the rank computed.
        waiting_s: in at least one collective before its last rank has come; None if alone.
        compute_s: with compute of the step under way; on a GPU, what was launched in it.
        late_s: how long after the median of the others it came, where it was last and latest; None
            where it cannot be told. A mean is over the steps in which it can.
    """

    rank: int
    measured_s: float
    busy_s: float
    overlapped_s: float
    waiting_s: float | None
    compute_s: float
    late_s: float | None


@dataclass(frozen=True)
class StepReport:
    """One step, over all ranks.

    Attributes:
        step: as the profiler counts; None for a trace without steps.
        measured_s: the longest window on the CPU.
        replayed_s: the same in the replay.
        completed_s: from when all was done that the step before had begun, on all ranks and
            streams, to when all of this one was. Exposures are differences of it.
        completed_replayed_s: the same in the replay.
        replay_error: the larger relative error of the two; of the mean, the largest of all steps.
        busy_s: mean over ranks of the time with any collective under way.
        not_overlapped_s: the part of it without compute.
        overlap: the share of it with compute; None without collectives.
        exposed_s: with all transfers instant at once; single ones do not add up to it.
        exposed_low_s: with only those waits that are certain.
        exposed_high_s: not more than this.
        critical_path: of ``completed_replayed_s``.
        collectives: by name, group and size.
        ranks: by rank.
    """

    step: int | None
    measured_s: float
    replayed_s: float
    completed_s: float
    completed_replayed_s: float
    replay_error: float
    busy_s: float
    not_overlapped_s: float
    overlap: float | None
    exposed_s: float
    exposed_low_s: float
    exposed_high_s: float
    critical_path: CriticalPath
    collectives: tuple[CollectiveRow, ...]
    ranks: tuple[RankRow, ...]


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for, again and again.

    Attributes:
        rank: which.
        late_s: mean over those steps of :attr:`RankRow.late_s`: its arrival after the median of the
            others, in the collective to which it came latest; 0 in a step where others came last.
        steps: in so many steps it was the latest.
        of_steps: of so many.
        excess: the range that takes more time there than on the others, or the two events between
            which nothing was recorded for longer; empty if neither explains a third of it.
        excess_s: how much more, mean over steps.
        unrecorded: it is a pause.
        at_least: of no step all collectives could be matched: it may come later than is known.
    """

    rank: int
    late_s: float
    steps: int
    of_steps: int
    excess: str
    excess_s: float
    unrecorded: bool = False
    at_least: bool = False


@dataclass(frozen=True)
class Prediction:
    """What a change would do to the mean step.

    Attributes:
        what: as asked.
        step_s: mean over steps, replayed with the change.
        low_s: not less than this.
        high_s: not more than this.
        base_s: mean over steps without the change.
        notes: what it rests on, as sentences.
    """

    what: str
    step_s: float
    low_s: float
    high_s: float
    base_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The answer.

    Attributes:
        ranks: that were read.
        world_size: of the job; None if no file says it.
        backend: as the files say.
        steps: by number.
        mean: over steps; its ``step`` is None.
        straggler: None if there is none.
        diagnosis: one sentence.
        exact: no bound was needed: low, value and high agree.
        unknown: names of events that sound like communication or are of no known kind, with counts.
        notes: what a reader must know, as sentences.
        predictions: for what was asked.
        lost: something of the files could not be read.
    """

    ranks: tuple[int, ...]
    world_size: int | None
    backend: str
    steps: tuple[StepReport, ...]
    mean: StepReport
    straggler: Straggler | None
    diagnosis: str
    exact: bool
    unknown: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    predictions: tuple[Prediction, ...] = ()
    lost: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, text, numbers and None."""
        plain: dict[str, Any] = asdict(self)
        return plain


def title(report: Report) -> str:
    """Return what was read: ranks, backend and steps."""
    count = len(report.ranks)
    of = f" of {report.world_size}" if report.world_size else ""
    who = f"rank {report.ranks[0]}{of}" if count == 1 else f"{count}{of} ranks"
    steps = len(report.steps)
    backend = f", {report.backend}" if report.backend else ""
    return f"{who}{backend}, {steps} step{'s' if steps != 1 else ''}"


def effect_text(one: Prediction) -> str:
    """Return what a change saves or costs, as a share of the step."""
    if not one.base_s > 0:
        return "n/a"
    share = 1 - one.step_s / one.base_s
    return f"saves {max(share, 0.0):.1%}" if share > -0.0005 else f"costs {-share:.1%}"


def size_text(value: int | None) -> str:
    """Return bytes in the base-2 unit that suits; a question mark where they are not known."""
    if value is None:
        return "?"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B"

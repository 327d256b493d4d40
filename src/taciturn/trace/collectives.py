"""Which collectives a trace holds, and which of them belong together over ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.events import Trace
from taciturn.trace.identity import MAX_RANKS, parse_ranks
from taciturn.trace.kinds import Kind
from taciturn.trace.messages import canonical, input_type, size_bytes
from taciturn.trace.pairing import pair_gloo
from taciturn.trace.steps import Step, launch_rows, step_of_rows

__all__ = [
    "UNKNOWN_GROUP",
    "Collective",
    "Matching",
    "Meeting",
    "collectives_of",
    "match",
]

UNKNOWN_GROUP = "unknown"
"""Group of a collective whose file does not say which it is."""

# Every rank leaves only after every rank has come.
MEETS = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier", "exchange"}
)


@dataclass(frozen=True)
class Collective:
    """One rank's part in one collective.

    Attributes:
        rank: of the trace.
        row: of the event, a kernel or a range of gloo.
        name: ``all_reduce``, ``all_gather`` and so on; ``exchange`` for what a method of this
            package sends and codes at once; ``unknown`` if nothing says it.
        group: of the process group; ``unknown`` if nothing says it.
        ranks: of the group's members; empty if not known.
        group_size: 0 if not known.
        seq: number within the group, from the process group; -1 if the file does not say.
        comm_id: of the communicator; empty if the file does not say.
        size_bytes: of the whole buffer: an all-gather's output, a reduce-scatter's input. None if
            not known.
        dtype: as the file writes it.
        step: index of the step it belongs to, by its call; -1 outside of all.
        call_row: of the event that enqueued it, a runtime call or ``c10d::*``; -1 if not known.
        call_ns: when that began; the start if not known.
        start_ns: when this rank arrived.
        end_ns: when it was done here.
    """

    rank: int
    row: int
    name: str
    group: str
    ranks: tuple[int, ...]
    group_size: int
    seq: int
    comm_id: str
    size_bytes: int | None
    dtype: str
    step: int
    call_row: int
    call_ns: int
    start_ns: int
    end_ns: int

    @property
    def meets(self) -> bool:
        """Nobody leaves before all have come; not so for a broadcast, or a send."""
        return self.name in MEETS


@dataclass(frozen=True)
class Meeting:
    """The parts of all traced ranks in one collective, by rank."""

    members: tuple[Collective, ...]
    complete: bool

    @property
    def first(self) -> Collective:
        """The part of the lowest rank: name, group and size are the same in all."""
        return self.members[0]

    @property
    def alone(self) -> bool:
        """One member of several: when the others came is not known."""
        return len(self.members) == 1 and self.first.group_size != 1


class Matching(NamedTuple):
    """Meetings by their first call, and what could not be matched, as sentences."""

    meetings: tuple[Meeting, ...]
    notes: tuple[str, ...]


def collectives_of(
    trace: Trace, steps: list[Step], launches: NDArray[np.int64] | None = None
) -> list[Collective]:
    """All collectives of one rank, by the time of their call.

    A kernel's own metadata counts most; what it lacks comes from ``record_param_comms`` with its
    number, then from the call that its launch lies in, then from its name. An event of gloo is
    paired with the first call of ``c10d`` of that name and size that it can be of.
    """
    launches = launch_rows(trace) if launches is None else launches
    step_index = step_of_rows(trace, steps, launches)
    events = trace.events
    rows = events.of(Kind.COMMUNICATION)
    if not len(rows):
        rows = _annotations_alone(trace)
    rows = _without_parts(trace, rows)
    calls = _Calls(trace)
    paired = pair_gloo(trace, rows, calls.rows, step_index)
    found = []
    for row in rows.tolist():
        call = paired.get(row, int(launches[row]))
        info, words = calls.describe(row, call)
        call_ns = int(events.start_ns[call]) if call >= 0 else int(events.start_ns[row])
        inside = int(step_index[call]) if row in paired and call >= 0 else int(step_index[row])
        found.append(_collective(trace, row, call, call_ns, inside, info, words))
    return sorted(found, key=lambda one: (one.call_ns, one.start_ns))


def _without_parts(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without what an exchange of our own methods is made of: it counts as one collective."""
    events = trace.events
    own = [row for row in rows.tolist() if canonical(trace.name(row)) == "exchange"]
    if not own:
        return rows
    inside = np.zeros(len(rows), np.bool_)
    for lane in {int(events.lane[row]) for row in own}:
        whole = np.array([row for row in own if events.lane[row] == lane], np.int64)
        place = np.searchsorted(events.start_ns[whole], events.start_ns[rows], side="right") - 1
        within = (place >= 0) & (events.end_ns[rows] <= events.end_ns[whole[np.maximum(place, 0)]])
        inside |= within & (events.lane[rows] == lane) & ~np.isin(rows, own)
    return rows[~inside]


def _annotations_alone(trace: Trace) -> NDArray[np.int64]:
    """Ranges ``nccl:*`` on a stream, for files in which no kernel is known as communication."""
    labels = [
        label
        for label, (_, name, kind) in enumerate(trace.labels)
        if kind == Kind.GPU_ANNOTATION and name.lower().startswith("nccl:")
    ]
    return np.flatnonzero(np.isin(trace.events.label, labels)).astype(np.int64)


class _Calls:
    """The calls of torch.distributed in one trace, found by number and by the time they cover."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        events = trace.events
        self.rows = events.of(Kind.CALL)
        self.by_external: dict[int, int] = {}
        self.by_lane: dict[int, NDArray[np.int64]] = {}
        for row in self.rows.tolist():
            if trace.name(row) == "record_param_comms":
                self.by_external.setdefault(int(events.external[row]), row)
        lanes = events.lane[self.rows]
        for lane in np.unique(lanes).tolist():
            self.by_lane[lane] = self.rows[lanes == lane]

    def around(self, row: int) -> list[int]:
        """Calls in which an event of the CPU lies, the innermost last."""
        events = self.trace.events
        rows = self.by_lane.get(int(events.lane[row]))
        if rows is None:
            return []
        last = int(np.searchsorted(events.start_ns[rows], events.start_ns[row], side="right"))
        near = rows[max(0, last - 12) : last]
        return [int(one) for one in near if events.end_ns[one] >= events.start_ns[row]]

    def describe(self, row: int, call: int) -> tuple[dict[str, Any], list[str]]:
        """Metadata from all sources, the best winning, and texts that may hold the name."""
        events, args = self.trace.events, self.trace.args
        near = self.around(call) if call >= 0 else []
        if call in args:
            near.append(call)
        external = int(events.external[row])
        if external > 0 and external in self.by_external:
            near.append(self.by_external[external])
        info: dict[str, Any] = {}
        words = []
        for one in near:
            info.update({key: value for key, value in args.get(one, {}).items() if value != ""})
            words.append(self.trace.name(one))
        info.update(args.get(row, {}))
        own = self.trace.name(row)
        said = str(info.get("Collective name", ""))
        # A SendRecv kernel is an all-to-all when the call says so; else names agree.
        generic = canonical(own) in ("send_recv", "unknown")
        return info, [said, *(reversed(words) if generic else []), own, *reversed(words)]


def _collective(
    trace: Trace,
    row: int,
    call: int,
    call_ns: int,
    step: int,
    info: Mapping[str, Any],
    words: Sequence[str],
) -> Collective:
    name = next((found for word in words if (found := canonical(word)) != "unknown"), "unknown")
    group, ranks, size = _group(trace, info)
    seq = info.get("Seq", info.get("seq", -1))
    return Collective(
        rank=trace.rank or 0,
        row=row,
        name=name,
        group=group,
        ranks=ranks,
        group_size=size,
        seq=seq if isinstance(seq, int) and seq >= 0 else -1,
        comm_id=str(info.get("Comms Id", info.get("comms_id", ""))),
        size_bytes=size_bytes(info),
        dtype=str(info.get("dtype", input_type(info))),
        step=step,
        call_row=call,
        call_ns=call_ns,
        start_ns=int(trace.events.start_ns[row]),
        end_ns=int(trace.events.end_ns[row]),
    )


def _group(trace: Trace, info: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    """Name, ranks and size. The only group of a file is the group of its gloo events."""
    name = str(info.get("Process Group Name", ""))
    if not name and trace.backend.endswith("gloo") and len(trace.groups) == 1:
        name = next(iter(trace.groups))
    known = trace.groups.get(name)
    ranks = parse_ranks(info.get("Process Group Ranks"))
    if not ranks and known is not None:
        ranks = known.ranks
    said = info.get("Group size", 0)
    size = said if isinstance(said, int) and 0 < said <= MAX_RANKS else 0
    size = size or len(ranks) or (known.size if known else 0)
    return name or UNKNOWN_GROUP, ranks, size


def match(
    parts: Sequence[Sequence[Collective]], step_numbers: Sequence[Sequence[int | None]]
) -> Matching:
    """Which collectives of different ranks are one.

    By group and sequence number where all know it, else by communicator, else by order: the
    number-th call of a group within a step of the same number. Where the counts differ, or the
    names and sizes of what would be one, they are not matched and that is said.

    Args:
        parts: the collectives of each rank, by call.
        step_numbers: of each rank, the number of each step, which ``Collective.step`` indexes.
    """
    keyed: dict[tuple[Any, ...], dict[int, Collective]] = defaultdict(dict)
    notes: list[str] = []
    streams = _sequences(parts, step_numbers)
    for (group, number), by_rank in streams.items():
        _match_stream(group, number, by_rank, keyed, notes)
    meetings = []
    traced = {one.rank for rank in parts for one in rank}
    for members in keyed.values():
        ordered = tuple(members[rank] for rank in sorted(members))
        first = ordered[0]
        expected = set(first.ranks) if first.ranks else set(range(first.group_size)) or traced
        meetings.append(Meeting(ordered, expected <= set(members) and len(members) > 0))
    meetings.sort(key=lambda meeting: meeting.first.call_ns)
    return Matching(tuple(meetings), tuple(dict.fromkeys(notes)))


def _sequences(
    parts: Sequence[Sequence[Collective]], step_numbers: Sequence[Sequence[int | None]]
) -> dict[tuple[Any, Any], dict[int, list[Collective]]]:
    """Collectives by group and step number, then by rank."""
    streams: dict[tuple[Any, Any], dict[int, list[Collective]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, (collectives, numbers) in enumerate(zip(parts, step_numbers, strict=True)):
        del rank
        for one in collectives:
            number: Any = numbers[one.step] if one.step >= 0 else "outside"
            streams[(one.group, one.ranks), number][one.rank].append(one)
    return streams


def _match_stream(
    group: Any,
    number: Any,
    by_rank: Mapping[int, list[Collective]],
    keyed: dict[tuple[Any, ...], dict[int, Collective]],
    notes: list[str],
) -> None:
    everything = [one for list_ in by_rank.values() for one in list_]
    numbered = all(one.seq >= 0 for one in everything)
    if numbered and _distinct(by_rank, lambda one: one.seq):
        for one in everything:
            keyed[group, "seq", one.seq][one.rank] = one
        return
    where = "outside of all steps" if number == "outside" else f"in step {number}"
    # Without a group's name, one order over all communicators: NCCL itself demands it.
    signatures = {rank: [_signature(one) for one in list_] for rank, list_ in by_rank.items()}
    reference = next(iter(signatures.values()))
    if all(signature == reference for signature in signatures.values()):
        for rank, list_ in by_rank.items():
            for place, one in enumerate(list_):
                keyed[group, number, place][rank] = one
        return
    _match_unique(group, number, by_rank, keyed)
    counts = {rank: len(list_) for rank, list_ in by_rank.items()}
    same = len(set(counts.values())) == 1
    notes.append(
        f"group {group[0]}: {'names or sizes' if same else 'numbers'} of collectives {where} "
        f"differ over ranks ({_counts(counts)}), and nothing numbers them: only those are "
        "matched whose name and size every rank has once"
    )


def _match_unique(
    group: Any,
    number: Any,
    by_rank: Mapping[int, list[Collective]],
    keyed: dict[tuple[Any, ...], dict[int, Collective]],
) -> None:
    """Match what occurs once on each rank by name and known size; the rest stays alone."""
    counts = {
        rank: Counter((one.name, one.size_bytes) for one in list_)
        for rank, list_ in by_rank.items()
    }
    for rank, list_ in by_rank.items():
        for place, one in enumerate(list_):
            what = (one.name, one.size_bytes)
            once = one.size_bytes is not None and all(count[what] == 1 for count in counts.values())
            key = (group, number, what) if once else (group, number, place, rank)
            keyed[key][rank] = one


def _distinct(by_rank: Mapping[int, list[Collective]], key: Any) -> bool:
    return all(len({key(one) for one in list_}) == len(list_) for list_ in by_rank.values())


def _signature(one: Collective) -> tuple[str, int | None]:
    """What must agree over ranks; sizes of a sharded all-to-all need not."""
    return one.name, one.size_bytes if one.name in ("all_reduce", "broadcast") else None


def _counts(counts: Mapping[int, int]) -> str:
    shown = [f"rank {rank}: {count}" for rank, count in sorted(counts.items())]
    return ", ".join(shown[:4]) + (" ..." if len(shown) > 4 else "")

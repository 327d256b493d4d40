"""A trace in memory: one array per field, times in whole nanoseconds.

Rows are sorted by start, then longer first, so that a range comes before what it contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from taciturn.trace.kinds import Kind

__all__ = ["Events", "Flows", "Group", "Label", "Lane", "Loss", "Queue", "Trace"]

Ints = NDArray[np.int64]


class Label(NamedTuple):
    """What events of one category and name have in common."""

    category: str
    name: str
    kind: Kind


class Lane(NamedTuple):
    """A row of the picture: a thread, or a stream. Old files write a stream as "stream 7"."""

    process: str
    thread: str


class Queue(NamedTuple):
    """A stream of a device. The device's number is not the rank."""

    device: str
    stream: str


@dataclass(frozen=True)
class Events:
    """All complete events ("ph": "X") but those of Python functions, as columns of equal length.

    Attributes:
        start_ns: absolute, with the file's base time added.
        end_ns: never before the start.
        kind: a :class:`~taciturn.trace.kinds.Kind`.
        label: row of ``Trace.labels``.
        lane: row of ``Trace.lanes``.
        queue: row of ``Trace.queues``; -1 where the event is not on a GPU.
        correlation: joins a runtime call and what it launched; -1 if there is none.
        external: the record function's number, which a kernel shares with its operator; or -1.
    """

    start_ns: Ints
    end_ns: Ints
    kind: NDArray[np.uint8]
    label: NDArray[np.int32]
    lane: NDArray[np.int32]
    queue: NDArray[np.int32]
    correlation: Ints
    external: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    def of(self, *kinds: Kind) -> Ints:
        """Rows of these kinds, in order."""
        return np.flatnonzero(np.isin(self.kind, [int(kind) for kind in kinds])).astype(np.int64)


@dataclass(frozen=True)
class Flows:
    """Both ends of the arrows from a forward operator to its backward, as columns.

    Attributes:
        number: joins the two ends.
        time_ns: absolute.
        lane: row of ``Trace.lanes``.
        starts: True at the forward end.
    """

    number: Ints
    time_ns: Ints
    lane: NDArray[np.int32]
    starts: NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """A process group. ``ranks`` is empty where the file does not list them all."""

    name: str
    description: str = ""
    size: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loss:
    """What could not be read, or only after repair.

    Attributes:
        bytes_lost: of the text, decompressed.
        events_lost: at least so many; a cut file does not say how many are missing.
        events_odd: read but not used: no usable time, or not an object.
        repaired: pieces of text that were valid only after repair.
        reasons: sentences, one for each thing that happened.
    """

    bytes_lost: int = 0
    events_lost: int = 0
    events_odd: int = 0
    repaired: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Nothing was lost and nothing repaired."""
        return not (self.bytes_lost or self.events_lost or self.repaired or self.reasons)


@dataclass(frozen=True)
class Trace:
    """One rank's file.

    Attributes:
        path: where it came from.
        rank: None if neither the file nor its name says.
        world_size: None if the file does not say.
        backend: "nccl", "gloo" or what the file says; empty if it does not.
        host: the machine's name; empty if the file does not say.
        groups: by name, from ``pg_config``.
        events: the columns.
        labels: what ``events.label`` numbers.
        lanes: what ``events.lane`` numbers.
        lane_names: the last name each thread was given; empty where it has none.
        queues: what ``events.queue`` numbers.
        args: the arguments of rows that need them: collectives, calls of torch.distributed,
            records of GPU waits.
        flows: forward to backward.
        python_events: Python functions that were skipped.
        slowed_by: options of the profiler that slow the CPU: "record_shapes", "with_stack", ...
        loss: what could not be read.
        notes: what a reader must know, as sentences.
        size_bytes: of the text, decompressed.
    """

    path: Path
    rank: int | None
    world_size: int | None
    backend: str
    host: str
    groups: Mapping[str, Group]
    events: Events
    labels: tuple[Label, ...]
    lanes: tuple[Lane, ...]
    lane_names: tuple[str, ...]
    queues: tuple[Queue, ...]
    args: Mapping[int, Mapping[str, Any]]
    flows: Flows
    python_events: int = 0
    slowed_by: tuple[str, ...] = ()
    loss: Loss = field(default_factory=Loss)
    notes: tuple[str, ...] = ()
    size_bytes: int = 0

    def name(self, row: int) -> str:
        """Name of the event in that row."""
        return self.labels[int(self.events.label[row])].name

    def __str__(self) -> str:
        return f"{self.path.name} (rank {'unknown' if self.rank is None else self.rank})"

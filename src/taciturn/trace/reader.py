"""A trace file, of whatever age and shape, as a :class:`~taciturn.trace.events.Trace`."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from taciturn.errors import InputError
from taciturn.ranges import check_whole
from taciturn.trace.columns import Columns, column, nanoseconds
from taciturn.trace.events import Events, Flows, Loss, Trace
from taciturn.trace.identity import check_described_alike, groups_of, numbered, positive, rank_of
from taciturn.trace.kinds import Kind, KindRule
from taciturn.trace.scan import Scan
from taciturn.units import format_seconds

__all__ = ["base_ns", "find_files", "read", "read_all"]

MAX_NS = 4 * 10**18  # the year 2096; sums of two stay below 2^63
MAX_SPAN_NS = 86_400 * 10**9  # no profile is a day long: what lies further off has a broken clock
# An event that alone, or with few others of its thread, makes a recording so many times longer is
# one whose time is broken. A kernel may well wait for seconds; but then others end with it, or soon
# after.
FAR_TIMES = 100
FAR_NS = 10**9
FEW_OF = 100  # few: one of so many
_TRACE_FILE = re.compile(r"\.json(?:\.gz|\.zip)?$|\.zip$", re.IGNORECASE)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The trace files among files and folders, folders searched by the ending of names.

    Raises:
        InputError: a path that is not there, or a folder without such a file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            try:
                within = sorted(path.iterdir())
                inside = [p for p in within if _TRACE_FILE.search(p.name) and p.is_file()]
            except OSError as error:
                raise InputError(
                    f"cannot read the folder {path}: {error.strerror}; name the files, or a folder "
                    "that you may read"
                ) from error
            if not inside:
                raise InputError(
                    f"{path} holds no file that ends in .json, .json.gz or .zip; name a folder of "
                    "traces, or the files"
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"there is no file {path}; name trace files, or a folder of them")
    if not found:
        raise InputError("no trace files given; name them, or the folder they are in")
    return list(dict.fromkeys(found))


def read(
    path: Path,
    *,
    rank: int | None = None,
    rules: Sequence[KindRule] = (),
    strict: bool = False,
) -> Trace:
    """One file.

    Time is ``baseTimeNanoseconds`` plus ``ts`` in microseconds, rounded to the nanosecond. What is
    broken is left out and counted in ``loss``; negative durations become zero.

    Args:
        path: JSON, plain, gzipped or zipped; an object with ``traceEvents``, or a list of events.
        rank: which it is; by default what the file says, then what its name says.
        rules: kinds of the user, see :func:`taciturn.trace.kinds.parse_kind`.
        strict: refuse a file that is not whole.

    Raises:
        InputError: no such file, not a trace, no event in it, or ``strict`` and not whole.
    """
    scan = Scan(path)
    columns = Columns(rules)
    with no_collection():
        for batch in scan.batches():
            columns.add(batch)
    loss = Loss(scan.bytes_lost, scan.events_lost, columns.odd, scan.repaired, tuple(scan.reasons))
    if strict and not (loss.complete and not loss.events_odd):
        why = "; ".join(loss.reasons) or f"{loss.events_odd} events without a usable time"
        raise InputError(f"{path} is not whole: {why}; record it again, or read without strict")
    return _finish(path, scan, columns, loss, rank)


def read_all(
    paths: Sequence[Path],
    *,
    ranks: Sequence[int] = (),
    rules: Sequence[KindRule] = (),
    strict: bool = False,
) -> tuple[list[Trace], list[str]]:
    """All ranks' files, by rank, and notes.

    A file of a folder that is no trace is left out, with a note; a named one is an error.

    Args:
        paths: files, and folders of files.
        ranks: of the files, in their order; by default what they say.
        rules: kinds of the user.
        strict: refuse what is not whole.

    Raises:
        InputError: nothing to read, two files of one rank, or ranks of different jobs.
    """
    files = find_files(paths)
    if ranks and len(ranks) != len(files):
        raise InputError(
            f"{len(ranks)} ranks for {len(files)} different files; give one --rank for each file, "
            "in order"
        )
    for one in ranks:
        check_whole("--rank", one, 0)
    traces: list[Trace] = []
    notes: list[str] = []
    named = {path for path in paths if not path.is_dir()}
    for index, path in enumerate(files):
        try:
            rank = ranks[index] if ranks else None
            traces.append(read(path, rank=rank, rules=rules, strict=strict))
        except InputError as error:
            if path in named or strict or len(files) == 1:
                raise
            notes.append(f"left out: {error}")
    if not traces:
        raise InputError(f"none of the {len(files)} files is a trace; first: {notes[0]}")
    traces = numbered(traces, notes)
    check_described_alike(traces)
    return sorted(traces, key=lambda trace: trace.rank or 0), notes


@contextmanager
def no_collection() -> Iterator[None]:
    """Parsing makes no cycles, and looking for them in millions of objects takes most time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _finish(path: Path, scan: Scan, columns: Columns, loss: Loss, rank: int | None) -> Trace:
    metadata = scan.metadata
    said = metadata.get("distributedInfo")
    info: dict[str, Any] = said if isinstance(said, dict) else {}
    base = base_ns(metadata)
    start, duration = nanoseconds(columns.start_us), nanoseconds(columns.duration_us)
    notes: list[str] = []
    written = metadata.get("baseTimeNanoseconds", 0)
    if not base and str(written).strip() != "0":
        notes.append(
            f"baseTimeNanoseconds is {str(written)[:40]!r}, which is no time: times count from 0"
        )
    kinds = np.array([label.kind for label in columns.label_list] or [Kind.UNKNOWN], np.uint8)
    label = np.frombuffer(columns.label, np.int32) if columns.label else np.empty(0, np.int32)
    keep = _plausible(start, duration)
    if dropped := int(len(keep) - keep.sum()):
        loss = replace(loss, events_odd=loss.events_odd + dropped)
    if loss.events_odd:
        notes.append(f"{loss.events_odd} events have no usable time, or one a day off: not used")
    far, reach_ns = _far_off(start, start + duration, column(columns.lane, np.int32), keep)
    if len(far):
        names = dict.fromkeys(columns.label_list[label[row]].name for row in far.tolist())
        notes.append(
            f"{len(far)} events reach {format_seconds(reach_ns / 1e9)} away from all others, which "
            f"no thread or stream beside theirs does: not used ({', '.join([*names][:3])})"
        )
        loss = replace(loss, events_odd=loss.events_odd + len(far))
        keep[far] = False
    if negative := int((duration[keep] < 0).sum()):
        notes.append(f"{negative} events have a negative duration: taken as zero")
    duration = np.maximum(duration, 0)
    rows = np.flatnonzero(keep)
    rows = rows[np.lexsort((-duration[rows], start[rows]))]
    events = Events(
        start_ns=start[rows] + base,
        end_ns=start[rows] + duration[rows] + base,
        kind=kinds[label[rows]],
        label=label[rows],
        lane=column(columns.lane, np.int32)[rows],
        queue=column(columns.queue, np.int32)[rows],
        correlation=column(columns.correlation, np.int64)[rows],
        external=column(columns.external, np.int64)[rows],
    )
    if not len(events):
        raise InputError(
            f"{path} holds no event with a duration; the profiler writes them at the end of its "
            "active steps: record at least one"
        )
    new_row = np.full(len(keep), -1, np.int64)
    new_row[rows] = np.arange(len(rows))
    if not loss.complete:
        notes.append(_loss_note(loss))
    return Trace(
        path=path,
        rank=rank_of(path, info, rank, notes),
        world_size=positive(info.get("world_size")),
        backend=str(info.get("backend", "")),
        host=str(metadata.get("host_name", "")),
        groups=groups_of(info),
        events=events,
        labels=tuple(columns.label_list),
        lanes=tuple(columns.lane_list),
        lane_names=tuple(columns.lane_names.get(i, "") for i in range(len(columns.lane_list))),
        queues=tuple(columns.queue_list),
        args={int(new_row[row]): args for row, args in columns.args.items() if new_row[row] >= 0},
        flows=Flows(
            column(columns.flow_number, np.int64),
            nanoseconds(columns.flow_us) + base,
            column(columns.flow_lane, np.int32),
            column(columns.flow_starts, np.int8).astype(np.bool_),
        ),
        python_events=columns.python_events,
        slowed_by=tuple(
            word
            for word in ("record_shapes", "profile_memory", "with_stack")
            if metadata.get(word) or (word == "with_stack" and columns.python_events)
        ),
        loss=loss,
        notes=tuple(notes),
        size_bytes=scan.size_bytes,
    )


def _plausible(start: Any, duration: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which events lie within a day of the middle one, and last no longer."""
    if not len(start):
        return np.empty(0, np.bool_)
    middle = np.median(start)
    kept: np.ndarray[Any, np.dtype[np.bool_]] = (np.abs(start - middle) <= MAX_SPAN_NS) & (
        np.abs(duration) <= MAX_SPAN_NS
    )
    return kept


def _far_off(
    start: Any, end: Any, lane: Any, keep: Any
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Rows of few events, all of one thread or stream, that reach far beyond all others.

    Returns:
        The rows, and how far the nearest of them reaches from the middle of the recording, in ns.
    """
    none: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, np.int64)
    rows = np.flatnonzero(keep)
    if len(rows) < 2:
        return none, 0
    middle = np.median(start[rows])
    reach = np.maximum(np.abs(start[rows] - middle), np.abs(end[rows] - middle))
    few = max(1, len(rows) // FEW_OF)
    last = np.argpartition(reach, -few - 1)[-few - 1 :]
    last = last[np.argsort(reach[last])[::-1]]
    furthest = reach[last]
    jumps = np.flatnonzero(furthest[:-1] > np.maximum(FAR_NS, FAR_TIMES * furthest[1:]))
    if not len(jumps):
        return none, 0
    far = rows[last[: int(jumps[-1]) + 1]]
    if len(np.unique(lane[far])) > 1:
        return none, 0
    return far, int(furthest[jumps[-1]])


def _loss_note(loss: Loss) -> str:
    counted = (
        f" ({loss.events_lost} events and {loss.bytes_lost} bytes at least)"
        if loss.events_lost or loss.bytes_lost
        else ""
    )
    return f"the file is not whole{counted}: {'; '.join(loss.reasons)}"


def base_ns(metadata: Mapping[str, Any]) -> int:
    """What a file's times are relative to; 0 where it does not say so."""
    value = metadata.get("baseTimeNanoseconds", 0)
    try:
        base = int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return base if 0 <= base < MAX_NS else 0

"""A trace file, of whatever age and shape, as a :class:`~taciturn.trace.events.Trace`."""

from __future__ import annotations

import gc
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from taciturn.errors import InputError
from taciturn.trace.events import Events, Flows, Group, Label, Lane, Loss, Queue, Trace
from taciturn.trace.kinds import GPU_WORK, Kind, KindRule, classify
from taciturn.trace.scan import Scan
from taciturn.units import format_seconds

__all__ = ["base_ns", "find_files", "read", "read_all"]

MAX_NS = 4 * 10**18  # the year 2096; sums of two stay below 2^63
MAX_SPAN_NS = 86_400 * 10**9  # no profile is a day long: what lies further off has a broken clock
MAX_RANKS = 10**6  # of a group; more is a broken number
# An event that alone, or with few others of its thread, makes a recording so many times longer is
# one whose time is broken. A kernel may well wait for seconds; but then others end with it, or soon
# after.
FAR_TIMES = 100
FAR_NS = 10**9
FEW_OF = 100  # few: one of so many
_RANK_IN_NAME = re.compile(r"(?:rank|worker|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)
_TRACE_FILE = re.compile(r"\.json(?:\.gz|\.zip)?$|\.zip$", re.IGNORECASE)
# Rows whose arguments are kept: what says which collective it is, and who waits for whom.
_WITH_ARGS = frozenset({Kind.COMMUNICATION, Kind.CALL, Kind.DEVICE_SYNC})
_ON_GPU = frozenset({*GPU_WORK, Kind.DEVICE_SYNC, Kind.GPU_ANNOTATION})


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The trace files among files and folders, folders searched by the ending of names.

    Raises:
        InputError: a path that is not there, or a folder without such a file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if _TRACE_FILE.search(p.name) and p.is_file())
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
    columns = _Columns(rules)
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
            f"{len(ranks)} ranks for {len(files)} files; give one --rank for each file, in order"
        )
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
    traces = _number(traces, notes)
    _check_one_job(traces)
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


class _Columns:
    """Grows column by column while batches of parsed events come in."""

    def __init__(self, rules: Sequence[KindRule]) -> None:
        self.rules = rules
        self.start_us = array("d")
        self.duration_us = array("d")
        self.label = array("i")
        self.lane = array("i")
        self.queue = array("i")
        self.correlation = array("q")
        self.external = array("q")
        self.labels: dict[tuple[Any, Any], int] = {}
        self.label_list: list[Label] = []
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.lane_list: list[Lane] = []
        self.lane_names: dict[int, str] = {}
        self.queues: dict[tuple[Any, Any], int] = {}
        self.queue_list: list[Queue] = []
        self.args: dict[int, Mapping[str, Any]] = {}
        self.flow_number = array("q")
        self.flow_us = array("d")
        self.flow_lane = array("i")
        self.flow_starts = array("b")
        self.python_events = 0
        self.odd = 0

    def add(self, batch: Sequence[Any]) -> None:
        """Take the events of a batch that count; those without a usable time are counted as odd."""
        for event in batch:
            try:
                phase = event["ph"]
                if phase == "X":
                    if event.get("cat") == "python_function":
                        self.python_events += 1
                    else:
                        self._complete(event)
                elif phase in ("s", "f") and event.get("cat") == "fwdbwd":
                    self._flow(event)
                elif phase == "M" and event.get("name") == "thread_name":
                    lane = self._lane(event.get("pid"), event.get("tid"))
                    self.lane_names[lane] = str(event["args"]["name"])
            except (TypeError, KeyError, ValueError, AttributeError, OverflowError):
                self.odd += 1

    def _complete(self, event: dict[str, Any]) -> None:
        start = event["ts"]
        duration = event.get("dur", 0.0)
        if type(start) is str or type(duration) is str:
            start, duration = float(start), float(duration)
        if not (abs(start) < 4e15 and abs(duration) < 4e15):  # also False for NaN
            raise ValueError
        category, name = event.get("cat"), event.get("name")
        label = self.labels.get((category, name))
        if label is None:
            label = self._new_label(category, name)
        args = event.get("args")
        if type(args) is not dict:
            args = {}
        kind = self.label_list[label].kind
        correlation, external = args.get("correlation", -1), args.get("External id", -1)
        if type(correlation) is not int:
            correlation = _whole(correlation)
        if type(external) is not int:
            external = _whole(external)
        lane = self._lane(event.get("pid"), event.get("tid"))
        queue = -1
        if kind in _ON_GPU and (self.label_list[label].category not in _CPU_CATEGORIES):
            queue = self._queue(args, event)
        if not (abs(correlation) < 2**62 and abs(external) < 2**62):
            raise ValueError
        if kind in _WITH_ARGS:
            self.args[len(self.start_us)] = args
        self.correlation.append(correlation)
        self.external.append(external)
        self.start_us.append(start)
        self.duration_us.append(duration)
        self.label.append(label)
        self.lane.append(lane)
        self.queue.append(queue)

    def _new_label(self, category: Any, name: Any) -> int:
        words = ("" if category is None else str(category), "" if name is None else str(name))
        label = self.labels[category, name] = len(self.label_list)
        self.label_list.append(Label(*words, classify(*words, self.rules)))
        return label

    def _lane(self, process: Any, thread: Any) -> int:
        lane = self.lanes.get((process, thread))
        if lane is None:
            lane = self.lanes[process, thread] = len(self.lane_list)
            self.lane_list.append(Lane(str(process), str(thread)))
        return lane

    def _queue(self, args: dict[str, Any], event: dict[str, Any]) -> int:
        """The stream from the arguments; where they lack it, a thread called "7" or "stream 7"."""
        device, stream = args.get("device", event.get("pid")), args.get("stream")
        if stream is None:
            stream = str(event.get("tid")).removeprefix("stream ")
        queue = self.queues.get((device, stream))
        if queue is None:
            queue = len(self.queue_list)
            written = Queue(str(device), str(stream))
            if written in self.queue_list:  # 7 and "7"
                queue = self.queue_list.index(written)
            else:
                self.queue_list.append(written)
            self.queues[device, stream] = queue
        return queue

    def _flow(self, event: dict[str, Any]) -> None:
        number, time = int(event["id"]), float(event["ts"])
        if not (abs(time) < 4e15 and abs(number) < 2**62):
            raise ValueError
        self.flow_number.append(number)
        self.flow_us.append(time)
        self.flow_lane.append(self._lane(event.get("pid"), event.get("tid")))
        self.flow_starts.append(event["ph"] == "s")


_CPU_CATEGORIES = frozenset({"user_annotation", "cpu_op", "Operator", "hpu_op"})


def _whole(value: Any) -> int:
    """A number that joins events; -1 if it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 2**62 else -1


def _ns(us: array[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Microseconds as whole nanoseconds; integer and fraction apart, so that none is lost."""
    values = np.frombuffer(us, np.float64) if us else np.empty(0)
    whole = np.floor(values)
    # ns = 1000 floor(us) + round(1000 (us - floor(us)))
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def _finish(path: Path, scan: Scan, columns: _Columns, loss: Loss, rank: int | None) -> Trace:
    metadata = scan.metadata
    said = metadata.get("distributedInfo")
    info: dict[str, Any] = said if isinstance(said, dict) else {}
    base = base_ns(metadata)
    start, duration = _ns(columns.start_us), _ns(columns.duration_us)
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
    far, reach_ns = _far_off(start, start + duration, _column(columns.lane, np.int32), keep)
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
        lane=_column(columns.lane, np.int32)[rows],
        queue=_column(columns.queue, np.int32)[rows],
        correlation=_column(columns.correlation, np.int64)[rows],
        external=_column(columns.external, np.int64)[rows],
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
        rank=_rank(path, info, rank, notes),
        world_size=_positive(info.get("world_size")),
        backend=str(info.get("backend", "")),
        host=str(metadata.get("host_name", "")),
        groups=_groups(info),
        events=events,
        labels=tuple(columns.label_list),
        lanes=tuple(columns.lane_list),
        lane_names=tuple(columns.lane_names.get(i, "") for i in range(len(columns.lane_list))),
        queues=tuple(columns.queue_list),
        args={int(new_row[row]): args for row, args in columns.args.items() if new_row[row] >= 0},
        flows=Flows(
            _column(columns.flow_number, np.int64),
            _ns(columns.flow_us) + base,
            _column(columns.flow_lane, np.int32),
            _column(columns.flow_starts, np.int8).astype(np.bool_),
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


def _column(values: array[Any], dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


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


def _positive(value: Any) -> int | None:
    number = _whole(value)
    return number if number > 0 else None


def _rank(path: Path, info: Mapping[str, Any], given: int | None, notes: list[str]) -> int | None:
    said = _whole(info.get("rank", -1))
    if given is not None:
        if said not in (-1, given):
            notes.append(f"the file says that it is of rank {said}: taken as {given}, as was asked")
        return given
    if said >= 0:
        return said
    if named := _RANK_IN_NAME.search(path.name):
        notes.append(f"the file does not say its rank: taken as {int(named[1])} from its name")
        return int(named[1])
    return None


def _groups(info: Mapping[str, Any]) -> dict[str, Group]:
    """From ``pg_config``, which on-demand traces write as text."""
    config = info.get("pg_config")
    if not isinstance(config, list):
        return {}
    groups: dict[str, Group] = {}
    for one in config:
        if isinstance(one, dict) and "pg_name" in one:
            name = str(one["pg_name"])
            ranks = parse_ranks(one.get("ranks"))
            size = min(_positive(one.get("pg_size")) or len(ranks), MAX_RANKS)
            groups[name] = Group(name, str(one.get("pg_desc", "")), size, ranks)
    return groups


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Ranks from a list or its text; empty if they are not there or the text is cut by "..."."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        return tuple(int(number) for number in re.findall(r"\d{1,9}", value))
    if isinstance(value, list):
        return tuple(rank for rank in value if isinstance(rank, int) and rank >= 0)
    return ()


def _number(traces: list[Trace], notes: list[str]) -> list[Trace]:
    """Give files of unknown rank a free number; refuse two of one rank."""
    taken: dict[int, Path] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in taken:
            raise InputError(
                f"{taken[trace.rank]} and {trace.path} are both of rank {trace.rank}; name the "
                "files of one job only, or give --rank for each file"
            )
        taken[trace.rank] = trace.path
    numbered = []
    for trace in traces:
        if trace.rank is None:
            free = next(number for number in range(len(traces) + 1) if number not in taken)
            taken[free] = trace.path
            notes.append(
                f"{trace.path.name}: neither the file nor its name says a rank: taken as {free}"
            )
            numbered.append(replace(trace, rank=free))
        else:
            numbered.append(trace)
    return numbered


def _check_one_job(traces: Sequence[Trace]) -> None:
    for what in ("world_size", "backend"):
        seen = {getattr(trace, what): trace for trace in traces if getattr(trace, what)}
        if len(seen) > 1:
            (one, first), (other, second) = list(seen.items())[:2]
            raise InputError(
                f"{first} and {second} are of different jobs: their {what} is {one!r} and "
                f"{other!r}; name the files of one job"
            )
    size = next((trace.world_size for trace in traces if trace.world_size), None)
    for trace in traces:
        if size is not None and trace.rank is not None and trace.rank >= size:
            raise InputError(
                f"{trace} says it is rank {trace.rank} of {size}; ranks count from 0: give the "
                "right --rank"
            )

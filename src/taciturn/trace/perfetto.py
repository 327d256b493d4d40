"""All ranks' traces in one file on one clock, with what was found, for the Perfetto viewer.

A rank is a process, with its threads and streams as they were; two more tracks show the critical
path and what of it is communication. The format is Chrome's trace JSON, gzipped if the name of the
file ends in ``.gz``.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import orjson

from taciturn.errors import InputError
from taciturn.trace.analysis import Analysis
from taciturn.trace.clock import Correction
from taciturn.trace.reader import base_ns
from taciturn.trace.scan import Scan
from taciturn.trace.view import View

__all__ = ["Written", "write_perfetto"]

DAY_NS = 86_400 * 10**9  # what lies further off has a broken clock, and would stretch the picture
CRITICAL, COMMUNICATION = 1, 2  # threads of the process that shows what was found


@dataclass(frozen=True)
class Written:
    """What became of the events of the input.

    Attributes:
        events: written, names of processes and threads not counted.
        left_out: without a usable time, or one more than a day off.
    """

    events: int
    left_out: int


def write_perfetto(analysis: Analysis, path: Path) -> Written:
    """Join the files that an analysis was made from.

    Times are whole nanoseconds after the earliest event; ``baseTimeNanoseconds`` says when that
    was. A rank whose clock could not be aligned keeps its own. Arguments are as in the input.

    Law: every event with a usable time is written exactly once, at its corrected time to the
    nanosecond (``test_trace_perfetto.py``).

    Args:
        analysis: from :func:`taciturn.trace.analyse`; its files must still be there.
        path: is replaced; gzipped if it ends in ``.gz``.

    Raises:
        InputError: a file cannot be read any more, or ``path`` not be written.
    """
    base = min(int(view.start_ns.min()) for view in analysis.views)
    part = path.with_name(path.name + ".part")
    try:
        with _open(part, packed=path.suffix == ".gz") as file:
            written = _write(analysis, base, file)
        part.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that is there and in "
            "which you may write"
        ) from error
    finally:
        if part.parent.is_dir():
            part.unlink(missing_ok=True)
    return written


def _open(path: Path, *, packed: bool) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=3)) if packed else path.open("wb")


def _write(analysis: Analysis, base: int, file: IO[bytes]) -> Written:
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    file.write(orjson.dumps(head)[:-1] + b',"traceEvents":[\n')
    found = list(_found(analysis, base))
    file.write(b",\n".join(orjson.dumps(event) for event in found))
    flows: dict[tuple[int, str], int] = {}
    events = left_out = 0
    for place, view in enumerate(analysis.views):
        rank = _Rank(place, view, analysis.clocks.corrections.get(view.rank), base, flows)
        for batch in rank.batches():
            lines = [orjson.dumps(one, option=orjson.OPT_NON_STR_KEYS) for one in batch]
            file.write(b"".join(b",\n" + line for line in lines))
        events += rank.events
        left_out += rank.left_out
    file.write(b"\n]}\n")
    return Written(events, left_out)


def _name(what: str, process: int, thread: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {key: value}}


def _found(analysis: Analysis, base: int) -> Iterator[dict[str, Any]]:
    """The tracks of the analysis, above those of the ranks."""
    process = max(view.rank for view in analysis.views) + 1
    yield _name("process_name", process, 0, "taciturn: what the steps wait for")
    yield _name("process_sort_index", process, 0, -1)
    yield _name("thread_name", process, CRITICAL, "critical path")
    yield _name("thread_name", process, COMMUNICATION, "communication on the critical path")
    for one in analysis.path:
        view = analysis.views[one.view] if one.view >= 0 else None
        arguments: dict[str, Any] = {"kind": one.kind}
        if view is not None:
            arguments["rank"] = view.rank
        name = one.kind
        if view is not None and one.row >= 0 and one.kind not in ("launch", "idle"):
            arguments["event"] = view.trace.name(one.row)
            name = f"{one.kind}: {arguments['event']}"
        for thread in (CRITICAL, COMMUNICATION) if one.kind == "communication" else (CRITICAL,):
            yield {
                "ph": "X",
                "cat": "taciturn",
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": (one.start_ns - base) / 1000,
                "dur": (one.end_ns - one.start_ns) / 1000,
                "args": arguments,
            }


class _Rank:
    """The events of one rank's file, moved to the common clock and to a process of its own.

    Attributes:
        events: yielded so far, names not counted.
        left_out: not yielded.
    """

    def __init__(
        self,
        place: int,
        view: View,
        fix: Correction | None,
        base: int,
        flows: dict[tuple[int, str], int],
    ) -> None:
        self.place, self.view, self.base, self.flows = place, view, base, flows
        self.fix = fix or Correction(0, 0.0, 0, 0)
        self.threads: dict[tuple[str, str], int] = {}
        self.processes: dict[str, str] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.events = self.left_out = 0
        # The metadata, and with it the base of all times, may stand behind the events.
        scan = Scan(view.trace.path)
        for _ in scan.batches():
            pass
        self.zero = base_ns(scan.metadata)
        own = view.trace.events
        self.earliest, self.latest = (
            int(own.start_ns.min()) - DAY_NS,
            int(own.end_ns.max()) + DAY_NS,
        )

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """All events, and at the end the names of process and threads."""
        for batch in Scan(self.view.trace.path).batches():
            yield [moved for event in batch if (moved := self._moved(event)) is not None]
        yield list(self._labels())

    def _moved(self, event: Any) -> dict[str, Any] | None:
        if not isinstance(event, dict):
            self.left_out += 1
            return None
        if event.get("ph") == "M":
            self._learn(event)
            return None
        try:
            start = self.zero + _ns(event["ts"])
            end = start + max(0, _ns(event["dur"])) if "dur" in event else None
        except (KeyError, TypeError, ValueError, OverflowError):
            self.left_out += 1
            return None
        if not (self.earliest <= start <= self.latest and (end is None or end <= self.latest)):
            self.left_out += 1
            return None
        moved = {**event, "pid": self.view.rank, "tid": self._thread(event)}
        at = self.fix.at(start)
        moved["ts"] = (at - self.base) / 1000
        if end is not None:
            moved["dur"] = max(0, self.fix.at(end) - at) / 1000
        if "id" in event:
            # Numbers of arrows are each rank's own.
            moved["id"] = self.flows.setdefault((self.place, str(event["id"])), len(self.flows) + 1)
        self.events += 1
        return moved

    def _thread(self, event: dict[str, Any]) -> int:
        key = (str(event.get("pid")), str(event.get("tid")))
        return self.threads.setdefault(key, len(self.threads) + 1)

    def _learn(self, event: dict[str, Any]) -> None:
        """Remember what a process or thread is called; that its order was given does not matter."""
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            return
        process = str(event.get("pid"))
        if event.get("name") == "thread_name":
            self.names[process, str(event.get("tid"))] = str(arguments.get("name", ""))
        elif event.get("name") == "process_labels":
            self.processes[process] = str(arguments.get("labels", ""))

    def _labels(self) -> Iterator[dict[str, Any]]:
        rank = self.view.rank
        yield _name("process_name", rank, 0, f"rank {rank}")
        yield _name("process_sort_index", rank, 0, rank)
        for (process, thread), number in self.threads.items():
            name = self.names.get((process, thread), "").strip() or f"thread {thread}"
            label = self.processes.get(process, "")
            yield _name("thread_name", rank, number, f"{name} ({label or process})")
            yield _name("thread_sort_index", rank, number, number)


def _ns(us: Any) -> int:
    """Microseconds as whole nanoseconds, rounded as the reader does: no part is lost."""
    if type(us) is int:
        return us * 1000
    value = float(us)
    whole = int(value // 1)
    return whole * 1000 + round((value - whole) * 1000)

"""What was measured, line by line: a file that is only ever appended to.

One JSON object a line. The first is of kind ``about``: what the records belong to and were made
with. All others have a ``job``, what was asked for, and a ``result`` or a ``failure``. A job is
done once: a run that was cut is gone on with by doing those that are not there.

Law: a line that was cut, by a crash or a full disk, is left out and its job done again; no other
line is ever lost (``test_a_cut_line_costs_its_own_job_only``).
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taciturn.errors import InputError

__all__ = ["FORMAT", "VERSION", "MissingRecordError", "Record", "Records"]

FORMAT, VERSION = "taciturn.compare", 3

Values = Mapping[str, Any]

POOLED = (
    "taciturn",
    "torch",
    "python",
    "system",
    "processor",
    "cores",
    "host",
    "threads",
    "task",
    "facts",
    "settings",
)
"""What has to agree for records to be put together. The commit may differ within a version: it is
in each record, and the report says so."""


class MissingRecordError(InputError):
    """An answer needs something that is not measured yet."""


@dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
        job: what was asked for; its ``kind`` among it.
        result: what came out; None if it failed.
        failure: why; None if it did not.
        at_s: when it ended, in seconds since 1970.
        took_s: how long it took, the start of its ranks included where they were started for it.
        commit: of the code that made it; "" if unknown.
    """

    job: Values
    result: Values | None
    failure: str | None
    at_s: float
    took_s: float
    commit: str


class Records:
    """The records of one experiment, read once and appended to.

    ``damaged`` has the numbers of lines that were cut.

    Args:
        path: of the file; made with the first line.
        about: what the records belong to and are made with; None only to read.

    Raises:
        InputError: a file of another kind or a newer version, one that was made with something
            else, two records that contradict each other, or a file that cannot be read.
    """

    def __init__(self, path: Path, about: Values | None = None) -> None:
        self.path = path
        self.damaged: list[int] = []
        self._records: dict[str, Record] = {}
        self._commit = str(about.get("commit", "")) if about is not None else ""
        rows = list(self._rows())
        if not rows:
            if about is None:
                raise InputError(f"{path}: no records there; run taciturn compare first")
            self.about: dict[str, Any] = json.loads(json.dumps(dict(about)))
            self._append({"format": FORMAT, "version": VERSION, "about": self.about})
            return
        self.about = self._checked(rows[0])
        if about is not None:
            self._check_pooled(json.loads(json.dumps(dict(about))))
        for number, row in rows:
            self._unchanged(number, row)
        for number, row in rows[1:]:
            self._take(number, row)

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            data = self.path.read_bytes() if self.path.is_file() else b""
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut in its midst; its job is done again
                row = None
            if not isinstance(row, dict):
                if line.strip():
                    self.damaged.append(number)
                continue
            yield number, row

    def _unchanged(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        """Return a line without its check."""
        if row.pop("check", None) != _check(row):
            raise InputError(
                f"{self.path}, line {number}: it was changed since it was written; records are "
                "only ever added to: bring the old file back, or name another folder"
            )
        return row

    def _checked(self, first: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        _, row = first
        if row.get("format") != FORMAT or not isinstance(row.get("about"), dict):
            raise InputError(
                f"{self.path} holds no records of taciturn compare; name another folder"
            )
        if row.get("version") != VERSION:
            raise InputError(
                f"{self.path} is of version {row.get('version')!r}, and this Taciturn reads "
                f"{VERSION}: install the one that wrote it, or name another folder"
            )
        about: dict[str, Any] = row["about"]
        return about

    def _check_pooled(self, about: dict[str, Any]) -> None:
        for key in POOLED:
            old, new = self.about.get(key), about.get(key)
            if old != new:
                raise InputError(
                    f"{self.path} was made with {key} {_short(old)}, and now it is {_short(new)}: "
                    "such records are not put together; name another folder, or go back"
                )

    def _take(self, number: int, row: dict[str, Any]) -> None:
        job, result, failure = row.get("job"), row.get("result"), row.get("failure")
        if not isinstance(job, dict) or (result is None) == (failure is None):
            raise InputError(
                f"{self.path}, line {number}: a record without a job, or with no or two outcomes; "
                "this file was changed by something else"
            )
        at_s, took_s = float(row.get("at_s", 0)), float(row.get("took_s", 0))
        record = Record(job, result, failure, at_s, took_s, str(row.get("commit", "")))
        known = self._records.get(_key(job))
        if known is not None and (known.result, known.failure) != (result, failure):
            raise InputError(
                f"{self.path}, line {number}: a second record of the same job with another outcome "
                f"({_short(job)}); which of them counts is not for us to choose"
            )
        self._records[_key(job)] = record

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def of_kind(self, kind: str) -> list[Record]:
        """All records whose job is of a kind, in the order in which they were made."""
        return [r for r in self if r.job.get("kind") == kind]

    def find(self, job: Values) -> Record | None:
        """The record of a job, if it was done."""
        return self._records.get(_key(job))

    def get(self, job: Values) -> Record:
        """The record of a job.

        Raises:
            MissingRecordError: it was not done yet.
        """
        found = self.find(job)
        if found is None:
            named = " ".join(str(job[k]) for k in ("regime", "method", "when") if k in job)
            raise MissingRecordError(
                f"{self.path}: not all is measured yet ({job['kind']} {named} is missing): the "
                "same command goes on where it stopped"
            )
        return found

    def add(
        self,
        job: Values,
        result: Values | None,
        failure: str | None = None,
        took_s: float = 0.0,
    ) -> Record:
        """Append what came of a job; it is on the disk when this returns.

        Raises:
            InputError: the disk is full, or the folder gone; what was finished before is kept.
        """
        at_s, took_s = round(time.time(), 3), round(took_s, 3)
        row = {"job": job, "result": result, "failure": failure, "at_s": at_s, "took_s": took_s}
        self._append(row | {"commit": self._commit})
        record = Record(job, result, failure, at_s, took_s, self._commit)
        self._records[_key(job)] = record
        return record

    def _append(self, row: Values) -> None:
        plain = json.loads(json.dumps(row, allow_nan=False))
        line = json.dumps(plain | {"check": _check(plain)}) + "\n"
        try:
            with self.path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                if size:
                    file.seek(size - 1)
                    if file.read(1) != b"\n":  # after a line that was cut
                        line = "\n" + line
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}; what was finished is in it, and "
                "the same command goes on from there"
            ) from error


def _check(row: Values) -> str:
    """Return what a line that was changed by accident does not have."""
    return f"{zlib.crc32(json.dumps(row, sort_keys=True).encode()):08x}"


def _key(job: Values) -> str:
    return json.dumps(job, sort_keys=True)


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 200 else f"{text[:197]}..."

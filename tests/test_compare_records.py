"""Records: nothing finished is lost, nothing of another kind is put together."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from taciturn.compare import Records
from taciturn.compare.records import VERSION
from taciturn.errors import InputError

ABOUT: dict[str, Any] = {"torch": "2", "settings": {"steps": 10}, "commit": "abc"}


def test_what_is_added_is_there_again(tmp_path: Path) -> None:
    """Results and failures, found by their jobs, in order; the commit is in each."""
    path = tmp_path / "r.jsonl"
    records = Records(path, ABOUT)
    records.add({"kind": "run", "seed": 1}, {"value": 2})
    records.add({"kind": "run", "seed": 2}, None, "NaN")
    again = Records(path, ABOUT)
    assert [r.job["seed"] for r in again.of_kind("run")] == [1, 2]
    found = again.find({"seed": 2, "kind": "run"})
    assert found is not None
    assert (found.result, found.failure, found.commit) == (None, "NaN", "abc")


@pytest.mark.parametrize("lost", [1, 10, 40])
def test_a_cut_line_costs_its_own_job_only(tmp_path: Path, lost: int) -> None:
    """A crash in the midst of a line: the others are there, and the next line is whole."""
    path = tmp_path / "r.jsonl"
    records = Records(path, ABOUT)
    for seed in (1, 2):
        records.add({"kind": "run", "seed": seed}, {"value": seed})
    path.write_bytes(path.read_bytes()[:-lost])
    again = Records(path, ABOUT)
    whole = lost == 1  # only the end of the line is missing
    assert len(list(again)) == 1 + whole
    again.add({"kind": "run", "seed": 3}, {"value": 3})
    assert [r.job["seed"] for r in Records(path)] == [1, *([2] if whole else []), 3]


def test_only_what_agrees_is_put_together(tmp_path: Path) -> None:
    """Another torch or other settings are refused; another commit is not."""
    path = tmp_path / "r.jsonl"
    Records(path, ABOUT)
    Records(path, ABOUT | {"commit": "def"})
    with pytest.raises(InputError, match="made with torch"):
        Records(path, ABOUT | {"torch": "3"})
    with pytest.raises(InputError, match="made with settings"):
        Records(path, ABOUT | {"settings": {"steps": 11}})


def test_two_outcomes_of_one_job_are_refused(tmp_path: Path) -> None:
    """Nobody chooses between them."""
    path = tmp_path / "r.jsonl"
    records = Records(path, ABOUT)
    records.add({"kind": "run"}, {"value": 1})
    records.add({"kind": "run"}, {"value": 2})
    with pytest.raises(InputError, match="line 3: a second record of the same job"):
        Records(path)


BROKEN = {
    "a newer version": {"format": "taciturn.compare", "version": VERSION + 1, "about": {}},
    "an older version": {"format": "taciturn.compare", "version": VERSION - 1, "about": {}},
    "another kind": {"rows": []},
}


@pytest.mark.parametrize("what", BROKEN)
def test_other_files_are_refused(tmp_path: Path, what: str) -> None:
    """A file of another version or of something else says so."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(BROKEN[what]) + "\n")
    with pytest.raises(InputError, match=r"version \d+, and this|no records of taciturn compare"):
        Records(path)


def test_a_line_without_outcome_is_refused(tmp_path: Path) -> None:
    """A record that somebody changed by hand is no record."""
    path = tmp_path / "r.jsonl"
    Records(path, ABOUT)
    with path.open("a") as file:
        file.write(json.dumps({"job": {"kind": "run"}}) + "\n")
    with pytest.raises(InputError, match="line 2: it was changed"):
        Records(path)


def test_a_changed_number_is_seen(tmp_path: Path) -> None:
    """A line is what it was when it was written, or the file is refused."""
    path = tmp_path / "r.jsonl"
    records = Records(path, ABOUT)
    records.add({"kind": "run"}, {"value": 0.25})
    text = path.read_text()
    assert next(iter(Records(path))).result == {"value": 0.25}
    path.write_text(text.replace("0.25", "0.24"))
    with pytest.raises(InputError, match="line 2: it was changed"):
        Records(path)


@pytest.mark.parametrize("garbage", [b'{"job": {"ki', b"\xff\xfe\x00", b"[1]"])
def test_lines_that_are_none_are_counted(tmp_path: Path, garbage: bytes) -> None:
    """What was cut, or is no text, is left out and told of; other lines stay."""
    path = tmp_path / "r.jsonl"
    Records(path, ABOUT).add({"kind": "run"}, {"value": 1})
    with path.open("ab") as file:
        file.write(garbage + b"\n")
    records = Records(path, ABOUT)
    assert records.damaged == [3]
    records.add({"kind": "time"}, {"value": 2})
    assert [r.result for r in Records(path)] == [{"value": 1}, {"value": 2}]


def test_no_records_and_no_place_for_them(tmp_path: Path) -> None:
    """Nothing to read, and nowhere to write, say what to do."""
    with pytest.raises(InputError, match="no records there"):
        Records(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="cannot be written: No such file"):
        Records(tmp_path / "folder" / "none.jsonl", ABOUT)


def test_a_full_disk_keeps_what_was_finished(tmp_path: Path) -> None:
    """A line that finds no room is an error, and the lines before it are there."""
    path = tmp_path / "r.jsonl"
    records = Records(path, ABOUT)
    records.add({"kind": "run", "seed": 1}, {"value": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(InputError, match="what was finished is in it"):
            records.add({"kind": "run", "seed": 2}, {"value": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    again = Records(path, ABOUT)
    assert [r.job["seed"] for r in again] == [1]
    again.add({"kind": "run", "seed": 2}, {"value": 2})
    assert [r.job["seed"] for r in Records(path)] == [1, 2]

"""Files that a command is to write are tried before the work."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from taciturn.errors import InputError
from taciturn.files import check_file, write_whole


@pytest.mark.parametrize("kind", ["new", "file", "read-only folder", "device", "pipe"])
def test_trying_a_file_leaves_it_as_it_is(tmp_path: Path, kind: str) -> None:
    """A new file is not there afterwards, an old one is unchanged, and a pipe does not block."""
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("kept")
    elif kind == "device":
        path = Path(os.devnull)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "read-only folder":
        if os.geteuid() == 0:
            path = Path("/proc/x")  # not even root may
        else:
            tmp_path.chmod(0o500)
        with pytest.raises(InputError, match=f"--json: cannot write {path}: "):
            check_file("--json", path)
        return
    check_file("--json", path)
    assert path.exists() == (kind != "new")
    if kind == "file":
        assert path.read_text() == "kept"


@pytest.mark.parametrize("name", [".", "no/such/folder", "x" * 300])
def test_a_file_that_cannot_be_is_refused_with_its_cause(tmp_path: Path, name: str) -> None:
    """Whatever the system says is said, in one line."""
    with pytest.raises(InputError, match=r"--html: cannot write .*: ") as caught:
        check_file("--html", tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    """The old text stays until the new one is there, and nothing is left beside it."""
    path = tmp_path / "a.json"
    write_whole(path, "old")
    write_whole(path, "new \N{EM DASH}")
    assert path.read_text("utf-8") == "new \N{EM DASH}"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written whole changes nothing, and leaves nothing beside it."""
    path = tmp_path / "a.html"
    write_whole(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(OSError):  # noqa: PT011 - the system's own words
            write_whole(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text("utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]

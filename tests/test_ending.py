"""A process that was a rank ends at once, whatever it did and however that went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ORDERLY = "an orderly end"
WATCHED = f"import atexit, runpy, sys; atexit.register(print, {ORDERLY!r}); sys.argv = sys.argv[1:]"
AS_MAIN = f"{WATCHED}; run = runpy.run_path if sys.argv[0].endswith('.py') else runpy.run_module"
AS_MAIN += "; run(sys.argv[0], run_name='__main__')"


def run_module(module: str, *arguments: str, rank: str | None) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENTS``, which prints a line if the interpreter ends in order."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    if rank is not None:
        environment |= {"RANK": rank, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", AS_MAIN, module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["methods"], 0), (["methods", "--nonsense"], 2), (["trace", "report", "none.json"], 2)],
)
def test_a_command_under_torchrun_ends_at_once(arguments: list[str], status: int) -> None:
    """With all that it printed, and its own status; elsewhere the interpreter ends it."""
    usual = run_module("taciturn", *arguments, rank=None)
    ended = run_module("taciturn", *arguments, rank="0")
    assert (usual.returncode, ended.returncode) == (status, status)
    assert ended.stdout == usual.stdout.replace(f"{ORDERLY}\n", "")
    assert ORDERLY in usual.stdout
    assert bool(ended.stderr) == bool(usual.stderr) == (status != 0)


@pytest.mark.parametrize("module", ["taciturn.bench", "taciturn.compare", "taciturn.probe"])
def test_a_started_rank_ends_at_once(module: str, tmp_path: Path) -> None:
    """Here after a failure: there is no job in its folder."""
    ended = run_module(module, str(tmp_path), rank="0")
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr
    assert ORDERLY not in ended.stdout


def test_a_fault_of_ours_ends_a_rank_at_once_too(tmp_path: Path) -> None:
    """With its traceback, which nobody expects."""
    (tmp_path / "broken.py").write_text(
        "from taciturn import cli, methods\nmethods.table = None\ncli.main(['methods'])\n"
    )
    ended = run_module(str(tmp_path / "broken.py"), rank="0")
    assert ended.returncode == 1
    assert "TypeError" in ended.stderr
    assert ORDERLY not in ended.stdout

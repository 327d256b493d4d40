"""``taciturn plan``: what it prints, its statuses, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from link_files import make_link
from taciturn.plan import CANDIDATES

Run = Callable[..., tuple[int, str, str]]
MODEL = ("--model", "gpt-5m", "--step-compute", "300ms")


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A file of a link between 4 ranks at 200 Mbit/s."""
    path = tmp_path / "link.json"
    make_link(4, 200e6, local_s_per_elem=3e-9).write(path)
    return path


@pytest.fixture
def run(command: Run) -> Run:
    """Runs ``taciturn plan ARGUMENTS`` on a terminal of 80 columns."""
    return partial(command, "plan")


def test_the_table_for_people(run: Run, link: Path) -> None:
    """The sentence, all rows and what they mean, within 80 columns."""
    status, out, err = run("--link", link, *MODEL, "--quality", "any")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    plain = " ".join(out.split())
    assert "a gain of" in plain
    assert "this link carries 200 Mbit/s; " in plain
    for word in ("DDP, fp32", "DDP, bf16", "loss: held-out", "> "):
        assert word in plain
    status, out, _ = run("--link", link, "--model", "25MiB,3MiB", "--step-compute", "1s")
    assert status == 0
    assert "powersgd:rank=4 is left out" in " ".join(out.split())


def test_the_plan_as_json(run: Run, link: Path) -> None:
    """``--json`` has every row with its units in the names, and what was decided."""
    status, out, err = run("--link", link, *MODEL, "--ranks", 4096, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert (found["format"], found["version"]) == ("taciturn.plan", 1)
    assert {row["name"] for row in found["predictions"]} == {c.name for c in CANDIDATES}
    assert all(row["extrapolated"] for row in found["predictions"])
    assert (found["ranks"], found["probed_ranks"]) == (4096, 4)
    assert found["recommendation"]["sentence"]
    for row in found["predictions"]:
        assert 0 < row["step_s"]["low"] <= row["step_s"]["value"] <= row["step_s"]["high"]


def test_a_trace_gives_the_compute(run: Run, link: Path, tmp_path: Path) -> None:
    """With ``--trace`` the compute and the curve of gradients are those of the recorded run."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for path in (Path(__file__).parent / "traces").glob("ddp_bucketed_rank*"):
        (folder / path.name).write_bytes(path.read_bytes())
    options = ("--link", link, "--model", "gpt-05m", "--trace", folder, "--json")
    status, out, err = run(*options)
    assert (status, err) == (0, "")
    compute = json.loads(out)["compute"]
    assert len(compute["made"]) > 2
    assert compute["step_s"] > 0
    assert str(folder) in compute["source"]
    status, out, _ = run(*options, "--step-compute", "2s")
    assert json.loads(out)["compute"]["step_s"] == 2


def changed(link: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(link.read_text())
    change(values)
    link.write_text(json.dumps(values))


def in_other_units(values: dict[str, Any]) -> None:
    values["gamma_us_per_byte"] = values.pop("gamma_s_per_byte")


def newer(values: dict[str, Any]) -> None:
    values["version"] = 99


def negative(values: dict[str, Any]) -> None:
    values["both_ways"]["pieces"][0]["beta_s_per_byte"] = -1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [(in_other_units, "gamma_s_per_byte"), (newer, "version 99"), (negative, "-1e-09")],
)
def test_a_link_that_cannot_be_read(
    run: Run, link: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    """Other units, a newer version and negative fits are refused in one line that names them."""
    changed(link, change)
    status, out, err = run("--link", link, *MODEL)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-5m"], "--step-compute or --trace is needed"),
        (["--model", "gpt-5m", "--step-compute", "0ms"], "is zero"),
        (["--model", "gpt-5m", "--step-compute", "300"], "has no unit"),
        ([*MODEL, "--trace", ".", "--backward-share", "0.5"], "drop one of them"),
        ([*MODEL, "--backward-share", "1.5"], "backward_share=1.5"),
        ([*MODEL, "--ranks", "1"], "ranks=1"),
        ([*MODEL, "--quality", "good"], "every-replica, mean, loss, any"),
        ([*MODEL, "--methods", "topk"], "none of them meets that"),
        ([*MODEL, "--methods", "rign"], "ring"),
        (["--model", "25MiB,0", "--step-compute", "1s"], "is zero"),
        (["--model", "gpt-6m", "--step-compute", "1s"], "gpt-5m"),
        ([*MODEL, "--trace", "no-such-folder"], "no-such-folder"),
    ],
)
def test_bad_input(run: Run, link: Path, arguments: list[str], words: str) -> None:
    """Wrong and contradictory options exit with 2 and one message that says what to do."""
    status, out, err = run("--link", link, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_no_link(run: Run, tmp_path: Path) -> None:
    """A file that is missing, or something else, is told from a link."""
    status, _, err = run("--link", tmp_path / "none.json", *MODEL)
    assert status == 2
    assert "none.json" in err
    (tmp_path / "bench.json").write_text("[]")
    status, _, err = run("--link", tmp_path / "bench.json", *MODEL)
    assert status == 2
    assert "no link" in err


def test_a_plan_needs_no_torch(link: Path) -> None:
    """A plan for 4096 ranks is made without torch."""
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = sys.argv[2:]\n"
        "runpy.run_module('taciturn', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, "-", "plan", "--link", str(link), *MODEL]
    done = subprocess.run([*command, "--ranks", "4096"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "extrapolated" in done.stdout

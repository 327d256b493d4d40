"""``taciturn compare`` on the ranks of a torchrun, as on a cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from taciturn.compare import Records, read_experiment
from taciturn.compare.run import compare
from taciturn.errors import InputError

OWN = Path(__file__).resolve().parent.parent / "examples" / "own_task"
SMALL = {
    'regimes = ["unshaped"]': 'regimes = ["cluster"]',
    "steps = 40": 'steps = 12\nmode = "direct"',
    "evaluations = 10": "evaluations = 4",
    "seeds = 2": "seeds = 1",
    "baseline_trials = 2": "baseline_trials = 1",
    "trials = 2": "trials = 1",
    "target_seeds = 2": "target_seeds = 1",
}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def written(tmp_path: Path, **changes: str) -> Path:
    """The example's experiment, made small and for torchrun."""
    shutil.copytree(OWN, tmp_path / "task")
    path = tmp_path / "task" / "experiment.toml"
    text = path.read_text()
    for old, new in (SMALL | changes).items():
        assert old in text
        text = text.replace(f"\n{old}", f"\n{new}")
    path.write_text(text)
    return path


def torchrun(path: Path, ranks: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "taciturn", "compare", path.name, *more]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=180)


def test_torchruns_ranks_are_compared(tmp_path: Path) -> None:
    """All that is done on networks of our own is done there, once; rank 0 reports."""
    path = written(tmp_path)
    out = tmp_path / "out"
    done = torchrun(path, 2, "--out", str(out), "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["regime"] for row in rows] == ["cluster", "cluster"]
    assert all(row["mode"] == "direct" for row in rows)
    records = Records(out / "records.jsonl")
    assert {r.job["regime"] for r in records} == {"cluster"}
    assert [r.job["kind"] for r in records if r.failure is not None] == []
    before = (out / "records.jsonl").read_bytes()
    again = torchrun(path, 2, "--out", str(out))
    assert again.returncode == 0, again.stderr
    assert (out / "records.jsonl").read_bytes() == before


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """On all of them, in the same words."""
    done = torchrun(written(tmp_path), 3)
    assert done.returncode != 0
    assert done.stderr.count("is of 2 ranks, and torchrun has started 3") == 3
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


def test_a_cluster_needs_torchrun_and_torchrun_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each without the other is refused, before anything runs."""
    quiet = Console(quiet=True)
    path = written(tmp_path)
    with pytest.raises(InputError, match="torchrun"):
        compare(read_experiment(path), tmp_path / "out", quiet, quiet)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="they have no other"):
        compare(read_experiment(OWN / "experiment.toml"), tmp_path / "out", quiet, quiet)


def test_a_cluster_stands_alone(tmp_path: Path) -> None:
    """Links of a cluster cannot be shaped beside it."""
    with pytest.raises(InputError, match="stands alone"):
        read_experiment(
            written(tmp_path, **{'regimes = ["unshaped"]': 'regimes = ["cluster", "1gbit"]'})
        )


def test_what_all_ranks_fail_in_ends_nothing(tmp_path: Path) -> None:
    """A method that the model is too small for is a recorded failure; all else is done."""
    path = written(
        tmp_path, **{'method = "local_sgd:steps=4"': 'method = "diloco:steps=4,fragments=99"'}
    )
    done = torchrun(path, 2, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    failed = [r for r in Records(tmp_path / "out" / "records.jsonl") if r.failure is not None]
    assert {r.job["method"] for r in failed} == {"diloco:steps=4,fragments=99"}
    assert all("only 6 parameters" in str(r.failure) for r in failed)
    assert "report: " in done.stdout

"""``taciturn compare``, whole: real ranks, a task of one's own, cut and gone on with."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from taciturn.compare import Experiment, Records, outcome_of, read_experiment, sessions
from taciturn.compare.conduct import about_here
from taciturn.compare.experiment import LOOPBACK
from taciturn.compare.run import add_seeds, compare, report, status
from taciturn.compare.sessions import Networks
from taciturn.errors import InputError, TaciturnError, TestbedError

OWN = Path(__file__).resolve().parent.parent / "examples" / "own_task"
QUIET = Console(quiet=True)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("compare"),
    pytest.mark.timeout(300),  # the first of them does the whole comparison
]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the comparison of the example, done once."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(OWN, folder / "task")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "task")
        compare(read_experiment(Path("experiment.toml")), folder / "out", QUIET, QUIET)
    return folder


def text_of(run: Callable[[Console], object]) -> str:
    written = io.StringIO()
    run(Console(width=100, file=written))
    return written.getvalue()


def test_a_task_of_ones_own_is_compared(done: Path) -> None:
    """Every method has a row with all that is promised; two seeds show nothing."""
    path = done / "rows.json"
    text = text_of(lambda console: report(done / "out", console, path))
    rows = json.loads(path.read_text())
    assert [row["method"] for row in rows] == ["quantized:bits={bits}", "local_sgd:steps=4"]
    for row in rows:
        assert row["verdict"] == "not shown"
        assert row["runs"] == 2
        assert row["broken"] == [] or all("rule 10" in b or "rule 14" in b for b in row["broken"])
        for key in ("regime", "time_ratio", "time_ratio_low", "time_ratio_high", "reached"):
            assert key in row
        assert row["final_quality_ratio"] is None or row["final_quality_ratio"] > 0
        assert row["predicted_ratio"] > 0
        assert row["step"]["step_s"] > 0
    assert "not shown" in text
    assert "quantized" in text


def test_all_saw_the_same_examples(done: Path) -> None:
    """Rule 4: of a seed every run has one hash, and as many examples as its steps have."""
    experiment: Experiment = read_experiment(OWN / "experiment.toml")
    records = Records(done / "out" / "records.jsonl")
    runs = [r for r in records.of_kind("run") if r.result is not None]
    assert len(runs) == 4 * experiment.seeds
    for seed in experiment.run_seeds():
        some = [r.result for r in runs if r.job["seed"] == seed]
        assert len({r["examples_hash"] for r in some if r}) == 1
        assert {r["examples"] for r in some if r} == {40 * 64}
    spreads = {r.job["method"]: r.result["replica_spread"] for r in runs if r.result}
    assert spreads["local_sgd:steps=4"] == 0  # 40 steps are whole rounds


def test_nothing_is_done_twice(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command again changes no byte of the records: at most a probe is made up for."""
    monkeypatch.chdir(done / "task")
    path = done / "out" / "records.jsonl"
    before = path.read_bytes()
    compare(read_experiment(Path("experiment.toml")), done / "out", QUIET, QUIET)
    after = path.read_bytes()
    assert after.startswith(before)
    new = [json.loads(line)["job"] for line in after[len(before) :].splitlines()]
    assert all(job["kind"] == "probe" and job["when"] == "after" for job in new)
    text = text_of(lambda console: status(done / "out", console))
    assert "0 of them failed" in text


def test_what_was_cut_is_gone_on_with(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its last five lines, and half of the one before, the rest is done again; no more."""
    folder = done / "cut"
    shutil.copytree(done / "out", folder)
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-6]) + lines[-6][:50])
    monkeypatch.chdir(done / "task")
    experiment = read_experiment(Path("experiment.toml"))
    compare(experiment, folder, QUIET, QUIET)
    again = Records(path)
    assert len(list(again)) == len(lines) - 1
    assert path.read_text().startswith("".join(lines[:-6]))
    outcome_of(experiment, again)


def test_the_page_is_there_and_says_how_to_run_it_again(done: Path) -> None:
    """One file; the command in it names the experiment that the folder keeps, which is equal."""
    page = (done / "out" / "report.html").read_text()
    assert f"taciturn compare {done}/out/experiment.toml --out {done}/out-again" in page
    assert read_experiment(done / "out" / "experiment.toml") == read_experiment(
        OWN / "experiment.toml"
    )


def test_two_commands_in_one_folder_are_refused(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second says that the folder is in use, and does nothing."""
    monkeypatch.chdir(done / "task")
    with (done / "out" / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use by another"):
            compare(read_experiment(Path("experiment.toml")), done / "out", QUIET, QUIET)


def test_another_experiment_is_refused(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder holds one experiment; fewer or as many seeds are none to add."""
    monkeypatch.chdir(done / "task")
    text = Path("experiment.toml").read_text().replace("steps = 40", "steps = 50")
    other = done / "other.toml"
    other.write_text(text)
    with pytest.raises(InputError, match="holds another experiment"):
        compare(read_experiment(other), done / "out", QUIET, QUIET)
    with pytest.raises(InputError, match="has 2 already"):
        add_seeds(done / "out", 2, QUIET, QUIET)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("steps = 40", "steps = 80", "steps is 40 there and 80 here"),
        ("target_slack = 0.02", "target_slack = 0.2", "target_slack is 0.02 there and 0.2 here"),
        ("seeds = 2", "seeds = 1", r"runs of the seeds \[1\] too: no run is dropped"),
    ],
)
def test_what_was_decided_before_stays(
    done: Path, tmp_path: Path, before: str, after: str, says: str
) -> None:
    """An experiment that is edited when there are records of it gives no other answer."""
    shutil.copytree(done / "out", tmp_path / "out")
    path = tmp_path / "out" / "experiment.toml"
    assert f"\n{before}\n" in path.read_text()
    path.write_text(path.read_text().replace(f"\n{before}\n", f"\n{after}\n"))
    for asked in (report, status):
        with pytest.raises(InputError, match=says):
            asked(tmp_path / "out", QUIET)
    with pytest.raises(InputError, match=says):
        add_seeds(tmp_path / "out", 5, QUIET, QUIET)


def test_a_batch_that_ranks_cannot_share_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known before anything is started."""
    monkeypatch.chdir(OWN)
    odd = replace(read_experiment(Path("experiment.toml")), ranks=3)
    with pytest.raises(InputError, match="a global batch of 64 for 3 ranks; give a multiple"):
        compare(odd, tmp_path / "out", QUIET, QUIET)
    assert not (tmp_path / "out").exists()


def test_folders_without_an_experiment(tmp_path: Path) -> None:
    """Nothing to report says how to begin."""
    for run in (report, status):
        with pytest.raises(InputError, match="holds no experiment"):
            run(tmp_path, QUIET)


BAD_TASKS = {
    "it fails": ("raise RuntimeError('no data')", r"RuntimeError: no data .*bad_0\.py, line 21\)"),
    "it is none": ("return 3", "returned int"),
    "its batch fails": (
        "return task(batch=lambda split, ids: torch.ones(2) @ torch.ones(3))",
        r"RuntimeError: .*bad_2\.py, line 21\)",
    ),
    "its loss is NaN": ("return task(loss=lambda m, b: (m(b).sum() * float('nan'), 4))", "finite"),
    "it differs between ranks": (
        "import os; return task(facts={'rank': os.environ.get('RANK', '0')})",
        "not the same on rank 1",
    ),
    "its loss has no count": (
        "return task(loss=lambda m, b: m(b).sum())",
        "its loss returns Tensor",
    ),
    "its judge has no count": ("return task(judge=lambda m, b: 1.0)", "its judge returns float"),
    "its loss is a number": ("return task(loss=lambda m, b: (1.0, 4))", "no scalar tensor"),
    "its judge is NaN": (
        "return task(judge=lambda m, b: (torch.tensor(float('nan')), 4))",
        "what it is judged by is not finite",
    ),
    "its tokens are others": ("return task(tokens_per_example=7)", "says tokens_per_example=7"),
    "it has other numbers on each rank": (
        "import os; return task(examples=64 + int(os.environ.get('RANK', '0')))",
        "not the same on rank 1",
    ),
    "it learns at another rate on each rank": (
        (
            "from os import environ as e; return task("
            "optimizer=lambda p, lr: torch.optim.SGD(p, lr * (1 + int(e.get('RANK', 0)))))"
        ),
        "not the same on rank 1",
    ),
    "its optimizer is none": ("return task(optimizer=lambda p, lr: None)", "NoneType"),
    "it ends the program": ("raise SystemExit(3)", "SystemExit: 3"),
    "its model ends the program": (
        "return task(model=lambda seed: exit(4))",
        "task bad: SystemExit: 4",
    ),
    "it is judged by less than nothing": (
        "return task(judge=lambda m, b: (torch.tensor(-1.0), 4))",
        "is negative",
    ),
    "its batch cannot be split": ("return task(global_batch=5)", "give a multiple"),
}
TASK = """
import torch
from taciturn.compare import Task

def task(**changes):
    values = dict(
        name="bad", model=lambda seed: torch.nn.Linear(3, 1), examples=64, held_out=8,
        batch=lambda split, ids: torch.ones(len(ids), 3),
        loss=lambda m, b: (m(b).square().sum() + sum(p.sum() for p in m.parameters()) * 0, len(b)),
        global_batch=4,
        model_seeded=None,
    )
    del values["model_seeded"]
    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Linear(3, 1)
    values["model"] = model
    return Task(**(values | changes))

def make():
    BODY
"""


@pytest.mark.parametrize("what", BAD_TASKS)
def test_a_bad_task_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's code does wrong is said in its words, at once, on all ranks alike."""
    body, message = BAD_TASKS[what]
    name = f"bad_{list(BAD_TASKS).index(what)}"
    (tmp_path / f"{name}.py").write_text(TASK.replace("BODY", body))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = (OWN / "experiment.toml").read_text().replace("fractions_task:make_task", f"{name}:make")
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(TaciturnError, match=message):
        compare(read_experiment(tmp_path / "e.toml"), tmp_path / "out", QUIET, QUIET)
    told_by_ranks = message == "not the same on rank 1"
    assert (tmp_path / "out").exists() == told_by_ranks, "a folder of no experiment"


def test_a_task_that_changed_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a task of the same name that is another by now are not pooled."""
    told = []
    for number, body in enumerate(("return task()", "return task(clip_norm=3.0)", "return task()")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "mine.py").write_text(TASK.replace("BODY", body))
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(folder)
            patch.delitem(sys.modules, "mine", raising=False)
            made = replace(read_experiment(OWN / "experiment.toml"), task="mine:make")
            told.append(about_here(made))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    path = tmp_path / "records.jsonl"
    Records(path, told[0])
    Records(path, told[2])
    with pytest.raises(InputError, match="was made with facts"):
        Records(path, told[1])


def test_a_task_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks at once, where none is missed by another."""
    body = "import time; return task(batch=lambda split, ids: time.sleep(3600))"
    (tmp_path / "hangs.py").write_text(TASK.replace("BODY", body))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sessions, "START_S", 12.0)
    with (
        Networks("hangs:make", 2, 3.0) as networks,
        pytest.raises(TestbedError, match="15 s; does"),
    ):
        networks.do(LOOPBACK, {"kind": "trial"})


METHODS = (
    "ddp:wire=fp32",
    "ddp:wire=bf16,bucket=4KiB",
    "coded:passes=2,code=fourier,shuffle=true",
    "quantized:bits=4,feedback=true",
    "powersgd:rank=1",
    "topk:ratio=0.1",
    "accumulate:windows=2,over=(quantized:bits=8)",
    "local_sgd:steps=4",
    "diloco:steps=4,fragments=2,overlap_steps=1,compress=(quantized:bits=4)",
    "diloco:steps=4,fragments=99",
    "ring",
)


def test_every_kind_of_method_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All see the same examples, are judged at the same points and learn.

    One that cannot be is a recorded failure with its reason, and those after it are done.
    """
    monkeypatch.chdir(OWN)
    jobs = [
        {
            "kind": "run",
            "method": method,
            "learning_rate": 5e-3,
            "seed": 1,
            "steps": 8,
            "evaluate_at": [2, 4, 8],
        }
        for method in METHODS
    ]
    found: dict[str, dict[str, Any] | str | None] = {}
    with Networks("fractions_task:make_task", 2, 60.0) as networks:
        for job in jobs:
            result, failure = networks.do(LOOPBACK, job)
            found[job["method"]] = result or failure
    failure = found.pop("diloco:steps=4,fragments=99")
    assert isinstance(failure, str)
    assert "only 6 parameters" in failure
    results = {name: r for name, r in found.items() if isinstance(r, dict)}
    assert len(results) == len(METHODS) - 1
    assert len({r["examples_hash"] for r in results.values()}) == 1
    assert {r["examples"] for r in results.values()} == {8 * 64}
    for name, result in results.items():
        assert [p["examples"] for p in result["points"]] == [128, 256, 512], name
        assert all(0 < p["value"] < 0.6 for p in result["points"]), name
        assert result["nonfinite_steps"] == 0, name
    exact = [results[name]["points"][-1]["value"] for name in ("ddp:wire=fp32", "ring")]
    assert exact[0] == exact[1]
    assert results["accumulate:windows=2,over=(quantized:bits=8)"]["costs"]["exchanges"] == 4
    assert (
        results["diloco:steps=4,fragments=2,overlap_steps=1,compress=(quantized:bits=4)"][
            "replica_spread"
        ]
        > 0
    )


LONG: dict[str, Any] = {
    "kind": "run",
    "method": "quantized:bits=8",
    "learning_rate": 1e-3,
    "seed": 1,
    "steps": 1_000_000,
    "evaluate_at": [1_000_000],
}


def test_a_killed_rank_is_a_recorded_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job fails and names the rank; the next one is done, by new ranks."""
    monkeypatch.chdir(OWN)
    with Networks("fractions_task:make_task", 2, 60.0) as networks:
        short = LONG | {"steps": 4, "evaluate_at": [4]}
        first, _ = networks.do(LOOPBACK, short)
        (session,) = networks._open.values()
        timer = threading.Timer(1.0, session._running.kill, [1])
        timer.start()
        result, failure = networks.do(LOOPBACK, LONG)
        timer.join()
        again, _ = networks.do(LOOPBACK, short)
    assert result is None
    assert failure is not None
    assert "rank 1 was killed by SIGKILL" in failure
    assert first is not None
    assert again is not None
    assert again["points"][0]["value"] == first["points"][0]["value"]


def test_networks_that_are_not_in_use_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait on few networks at a time; nothing of them is left at the end."""
    monkeypatch.chdir(OWN)
    monkeypatch.setattr("taciturn.compare.sessions.MOST_RANKS", 4)
    short = LONG | {"steps": 2, "evaluate_at": [2]}
    with Networks("fractions_task:make_task", 2, 60.0) as networks:
        folders = []
        for regime in (LOOPBACK, "unshaped", LOOPBACK, "1gbit"):
            result, failure = networks.do(regime, short)
            assert failure is None
            assert result is not None
            folders.append(networks._open[regime].folder)
        assert list(networks._open) == [LOOPBACK, "1gbit"]
        assert folders[0] == folders[2]
        assert [f.exists() for f in folders] == [True, False, True, True]
    assert not any(f.exists() for f in folders)


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    """Stopped amid its jobs it leaves no process; the same command goes on from there."""
    shutil.copytree(OWN, tmp_path / "task")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "taciturn", "compare", "experiment.toml", "--out", str(out)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path / "task",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    records = out / "records.jsonl"
    until = time.monotonic() + 100
    while time.monotonic() < until:
        if records.exists() and len(records.read_text().splitlines()) > 3:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"Traceback" not in said
    left = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True)
    assert left.stdout == ""
    lines = records.read_text().splitlines()
    assert len(lines) > 3
    assert all(json.loads(line) for line in lines)
    text = text_of(lambda console: status(out, console))
    assert f"{len(lines) - 1} of about" in text


def test_errors_of_averages_are_those_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, rounded alike on all ranks, and different on each with the right mean."""
    monkeypatch.chdir(OWN)
    job = {"kind": "errors", "learning_rate": 1e-3, "seed": 1}
    found = {}
    with Networks("fractions_task:make_task", 4, 60.0) as networks:
        for method in ("ddp:wire=fp32", "ddp:wire=bf16", "quantized:bits=8", "coded:passes=2"):
            result, failure = networks.do(LOOPBACK, job | {"method": method})
            assert failure is None
            assert result is not None
            found[method] = result
    exact, bf16, int8, coded = found.values()
    assert exact["replica_error"] < 1e-5
    assert exact["spread"] < 1e-7
    for rounded in (bf16, int8):
        assert 1e-4 < rounded["replica_error"] < 5e-2
        assert rounded["spread"] < 1e-7
        assert rounded["mean_error"] == pytest.approx(rounded["replica_error"])
    assert coded["spread"] > 1e-6
    assert coded["replica_error"] ** 2 == pytest.approx(
        coded["mean_error"] ** 2 + coded["spread"] ** 2, rel=0.05
    )

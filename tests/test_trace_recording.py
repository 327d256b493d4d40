"""Recording a training loop: what it writes is what ``taciturn trace`` reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks
from taciturn import ddp
from taciturn.errors import InputError
from taciturn.ledger import Ledger, labelled
from taciturn.trace.analysis import analyse
from taciturn.trace.kinds import Kind
from taciturn.trace.reader import read
from taciturn.trace.recording import record


def step_of(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).pow(2).mean().backward()
        optimizer.step()

    return step


def network() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def numbers(path: Path) -> list[int | None]:
    return [step.step for step in analyse([path]).report.steps]


def recorded_by_ranks(folder: str, method: str) -> str:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.03)
    communicator = ddp.attach(model, method, timeout_s=20) if method else None
    step = step_of(model)
    with record(folder, steps=3, skip=2) as recording:
        for _ in range(7):
            step()
            recording.step()
    if communicator is not None:
        communicator.close()
    return str(recording.path)


@pytest.mark.processes
def test_real_ranks(pool: Ranks, tmp_path: Path) -> None:
    """Four gloo ranks: steps, sizes, ranks and groups are in the files, and they form one job."""
    paths = pool.run(recorded_by_ranks, str(tmp_path / "new" / "folder"), "")
    assert [Path(path).name for path in paths] == [f"rank{i}.pt.trace.json.gz" for i in range(4)]
    analysis = analyse([tmp_path / "new" / "folder"])
    report = analysis.report
    assert (report.ranks, report.world_size) == ((0, 1, 2, 3), 4)
    assert report.backend.endswith("gloo")
    assert [step.step for step in report.steps] == [2, 3, 4]
    assert not report.lost
    for step in report.steps:
        rows = [row for row in step.collectives if row.name == "all_reduce"]
        # 4 layers of 64 x 64 weights and 64 biases, in float32
        assert sum(row.count * (row.bytes or 0) for row in rows) == 4 * (64 * 64 + 64) * 4
        assert all(row.waiting_s is not None for row in rows)
    for trace in analysis.traces:
        assert (0, 1, 2, 3) in [group.ranks for group in trace.groups.values()]


@pytest.mark.processes
@pytest.mark.parametrize("method", ["quantized:bits=8", "coded:passes=2", "powersgd:rank=2"])
def test_phases_are_labelled(pool: Ranks, tmp_path: Path, method: str) -> None:
    """Codec and exchange of our own methods show, in the thread that runs them."""
    pool.run(recorded_by_ranks, str(tmp_path), method)
    for rank in range(4):
        trace = read(tmp_path / f"rank{rank}.pt.trace.json.gz")
        names = [label.name for label in trace.labels]
        assert {"taciturn::codec", "taciturn::exchange"} <= set(names)
        codec = trace.events.of(Kind.CODEC)
        assert len(codec) >= 3
        steps = [row for row, label in enumerate(trace.events.label) if "Step#" in names[label]]
        assert not set(trace.events.lane[codec]) & set(trace.events.lane[steps])
    report = analyse([tmp_path]).report
    assert [step.step for step in report.steps] == [2, 3, 4]
    assert {row.name for row in report.mean.collectives} == {"exchange"}  # and not its messages
    assert all(row.waiting_s is not None for row in report.mean.collectives)


def test_labels_are_free_without_a_profile() -> None:
    """Outside of a profile a label is a context that does nothing, always the same."""
    assert labelled("codec") is labelled("exchange")
    with Ledger().codec(), torch.profiler.profile() as profile, Ledger().codec():
        pass
    found = [event.name for event in profile.events() if event.name.startswith("taciturn")]
    assert found == ["taciturn::codec"]


@pytest.mark.parametrize(("steps", "skip"), [(1, 1), (3, 2), (2, 3)])
def test_exactly_these_steps(tmp_path: Path, steps: int, skip: int) -> None:
    """After ``skip`` steps come ``steps`` recorded ones; the file is there before the loop ends."""
    step = step_of(network())
    with record(tmp_path, steps=steps, skip=skip) as recording:
        for number in range(8):
            step()
            assert (recording.path is not None) == (number >= steps + skip)
            recording.step()
    assert recording.path == tmp_path / "rank0.pt.trace.json.gz"
    assert numbers(recording.path) == list(range(skip, skip + steps))
    assert [path.name for path in tmp_path.iterdir()] == [recording.path.name]
    trace = read(recording.path)
    assert (trace.rank, trace.world_size) == (0, 1)


def test_a_loop_that_ends_early(tmp_path: Path) -> None:
    """The steps that there were are written, with a warning; nothing after them is a step."""
    step = step_of(network())

    def loop() -> None:
        with record(tmp_path, steps=5, skip=1) as recording:
            for _ in range(3):
                step()
                recording.step()

    with pytest.warns(UserWarning, match="after 2 of the 5 steps"):
        loop()
    assert numbers(tmp_path / "rank0.pt.trace.json.gz") == [1, 2]


def raises(folder: Path, at: int) -> None:
    step = step_of(network())
    with record(folder, steps=3, skip=1) as recording:
        for number in range(9):
            step()
            if number == at:
                raise KeyError("out of data")
            recording.step()


@pytest.mark.parametrize(("at", "found"), [(3, [1, 2]), (2, [1]), (1, [1])])
def test_a_loop_that_raises(tmp_path: Path, at: int, found: list[int]) -> None:
    """Its own error comes out, and what was recorded is written; a step in its midst counts only
    where there is no other.
    """
    with pytest.raises(KeyError, match="out of data"):
        raises(tmp_path, at)
    assert numbers(tmp_path / "rank0.pt.trace.json.gz") == found
    with record(tmp_path / "next", steps=1, skip=1) as again:  # the profiler was ended
        again.step()
        again.step()


def test_a_loop_that_raises_before(tmp_path: Path) -> None:
    """Its own error, not one about steps."""
    with pytest.raises(KeyError, match="out of data"), record(tmp_path):
        raise KeyError("out of data")


def test_an_error_while_writing_does_not_hide_the_loops_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note says that the recording could not be written, and why."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("taciturn.trace.recording.shutil.copyfileobj", full)
    with pytest.raises(KeyError) as error:
        raises(tmp_path, 2)
    assert "could not be written: [Errno 28]" in error.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_numbers_of_steps(tmp_path: Path, value: Any) -> None:
    """Whole numbers from 1, for both."""
    with pytest.raises(InputError, match=r"steps=.*whole number from 1"):
        record(tmp_path, steps=value)
    with pytest.raises(InputError, match=r"skip=.*whole number from 1"):
        record(tmp_path, skip=value)


def test_step_was_never_called(tmp_path: Path) -> None:
    """That is an error at the end, which says what to do."""
    with pytest.raises(InputError, match=r"step\(\) was never called"), record(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def ends_after(folder: Path, steps: int) -> None:
    with record(folder, skip=3) as recording:
        for _ in range(steps):
            recording.step()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_too_few_steps(tmp_path: Path, steps: int) -> None:
    """A loop that ended before anything was recorded is told so."""
    with pytest.raises(InputError, match=rf"took {steps} steps, and the recording skips 3"):
        ends_after(tmp_path, steps)


def test_used_once(tmp_path: Path) -> None:
    """A second ``with`` on one recording is refused, as is ``step()`` outside of it."""
    recording = record(tmp_path, steps=1, skip=1)
    with pytest.raises(InputError, match="outside of its with block"):
        recording.step()
    with recording:
        recording.step()
        recording.step()
    with pytest.raises(InputError, match="used already"), recording:
        pass
    with pytest.raises(InputError, match="outside of its with block"):
        recording.step()


def test_one_at_a_time(tmp_path: Path) -> None:
    """A recording inside another, or inside another profile, is refused on entry."""
    with record(tmp_path / "a", steps=1, skip=1) as outer:
        with pytest.raises(InputError, match="another profiler"), record(tmp_path / "b"):
            pass
        outer.step()
        outer.step()
    assert numbers(tmp_path / "a") == [1]


@pytest.mark.parametrize("name", ["rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"])
def test_a_folder_with_a_recording(tmp_path: Path, name: str) -> None:
    """It is not overwritten, nor mixed with what a larger job left."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match="holds a recording already"), record(tmp_path):
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """That is an error before training begins."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot record into"), record(tmp_path / "file" / "x"):
        pass
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="cannot record into"), record(tmp_path):
            pass


def test_importing_needs_no_torch() -> None:
    """Reading traces does not: torch is loaded when a recording begins."""
    code = "import sys; sys.modules['torch'] = None; from taciturn.trace.recording import record"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

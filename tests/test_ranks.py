"""Ranks that measure together: starting, joining, failing by name, and telling how far they are."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ranks import Ranks as Pool
from taciturn.errors import MismatchError, PeerError
from taciturn.ranks import (
    Eta,
    Progress,
    Ranks,
    compile_loops,
    group,
    join,
    launch,
    progress,
    run_rank,
    show_progress,
    under_torchrun,
)
from taciturn.testbed import RankResult, RunResult
from taciturn.transport import DistributedTransport


@pytest.mark.parametrize(("seconds", "says"), [(0.0, ""), (0.3, "compiling loops")])
def test_compiling_is_told_when_it_takes_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, says: str
) -> None:
    """A first start says that loops are compiled; later ones, which load them, say nothing."""
    monkeypatch.setattr(launch, "COMPILING_AFTER_S", 0.1)
    monkeypatch.setattr(launch.kernels, "prepare", lambda: time.sleep(seconds))
    monkeypatch.setattr(launch.products, "prepare", lambda: None)
    console = Console(file=io.StringIO(), width=80)
    compile_loops(console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith(says)
    assert bool(console.file.getvalue()) == bool(says)


def result(first: RankResult | None) -> RunResult:
    """A failed run of two ranks."""
    return RunResult((RankResult(0, 1, 1.0, False), RankResult(1, 1, 1.0, False)), first, False, 1)


def failure(folder: Path, rank: int, kind: str, text: str, ranks: list[int]) -> None:
    """What a rank leaves behind."""
    values = {"kind": kind, "text": text, "ranks": ranks, "round": 2}
    (folder / f"failure-{rank}.json").write_text(json.dumps(values))


def test_a_rank_s_own_mistake_comes_before_its_peers_loss(tmp_path: Path) -> None:
    """Of the ranks' errors the one that explains the others is raised, in its own class."""
    failure(tmp_path, 0, "PeerError", "rank 1 failed", [1])
    failure(tmp_path, 1, "MismatchError", "we differ", [])
    error = launch._failure(tmp_path, result(None))
    assert (type(error).__name__, str(error)) == ("MismatchError", "we differ")


def test_a_guess_about_a_killed_rank_is_left_out(tmp_path: Path) -> None:
    """The launcher knows who was killed; a survivor's other guess is not repeated."""
    killed = RankResult(1, -signal.SIGKILL, 2.0, False)
    failure(tmp_path, 0, "PeerError", "ranks 1, 2 died", [1, 2])
    error = launch._failure(tmp_path, result(killed))
    assert str(error) == "rank 1 was killed by SIGKILL after 2.0 s"
    failure(tmp_path, 2, "PeerError", "rank 1 died (seen by rank 2)", [1])
    assert "rank 1 died" in str(launch._failure(tmp_path, result(killed)))


def test_a_crash_shows_its_traceback(tmp_path: Path) -> None:
    """An error that is not ours is shown as the rank wrote it."""
    crashed = RankResult(1, 1, 2.0, False, "", "Traceback\nKeyError: 'x'\n")
    error = launch._failure(tmp_path, result(crashed))
    assert "rank 1 ended with status 1" in str(error)
    assert "Traceback\nKeyError: 'x'" in str(error)


def test_progress_without_a_terminal_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, progress is a line now and then, and never the same twice."""
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with show_progress(console, "starting") as show:
        for label in ("a", "a", "b"):
            show(Progress(0.5, 12.2, label))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines == [" 50 %, about 12 s left: a", " 50 %, about 12 s left: b"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    """On a terminal a bar shows share, time left and what is under way."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with show_progress(console, "starting") as show:
        show(Progress(0.25, 90.0, "repeat 1 of 5: ring"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "25%" in text
    assert "about 90 s left" in text
    assert "repeat 1 of 5: ring" in text


def test_torchrun_is_seen_by_its_variables() -> None:
    """Both variables of torchrun, and nothing less, make this process a rank."""
    assert under_torchrun({"RANK": "0", "WORLD_SIZE": "1"})
    assert not under_torchrun({"RANK": "0"})
    assert not under_torchrun(os.environ)


def test_eta_without_knowledge_is_the_guess() -> None:
    """Before anything is done, what is left is the sum of the guesses."""
    eta = Eta([("call:a", 1.0), ("errors:a", 2.0)])
    assert (eta.fraction, eta.remaining_s) == (0, 3)


def test_eta_repeats_what_was_seen() -> None:
    """A step done before is expected to take as long again; a wrong guess corrects its kind."""
    eta = Eta([("call:a", 1.0), ("call:a", 1.0), ("call:b", 2.0), ("errors:a", 5.0)])
    eta.advance(3.0)
    assert eta.remaining_s == 3 + 3 * 2 + 5
    assert eta.fraction == 3 / (3 + 3 + 6 + 5)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.01, 10)), min_size=1, max_size=9))
def test_eta_ends_at_the_end(done: list[tuple[str, float]]) -> None:
    """Fractions lie between 0 and 1; when all is done, all is done."""
    eta = Eta([(f"call:{key}", 1.0) for key, _ in done])
    for _, seconds in done:
        assert 0 <= eta.fraction < 1
        assert eta.remaining_s > 0
        eta.advance(seconds)
    assert (eta.fraction, eta.remaining_s) == (1, 0)


def other_job() -> str:
    """What a rank says whose job differs from the others'."""
    transport = DistributedTransport(timeout_s=20)
    ranks = Ranks(transport, torch.device("cpu"))
    ranks.agree({"methods": "ring"})
    job = {"methods": "ring", "sizes": 4 + 4 * (ranks.rank == 2), "seed": ranks.rank // 2}
    with pytest.raises(MismatchError) as caught:
        ranks.agree(job)
    transport.close()
    return str(caught.value)


@pytest.mark.processes
def test_ranks_with_different_jobs_are_told_so(pool: Pool) -> None:
    """Before anything is measured, alike on every rank: the backend would be aborted instead."""
    said = pool.run(other_job)
    assert len(set(said)) == 1
    assert "ranks 0 and 2" in said[0]
    assert "sizes 4 and 8; seed 0 and 1" in said[0]


def test_a_rank_leaves_its_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that cannot be done has the status 1, and leaves the reason in a file."""
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.setenv("RANK", "5")
    assert run_rank(tmp_path, _cannot) == 1
    failure = json.loads((tmp_path / "failure-5.json").read_text())
    assert failure == {"kind": "PeerError", "text": "rank 2 died", "ranks": [2], "round": 3}
    assert capsys.readouterr().err == "taciturn: error: rank 2 died\n"


def _cannot(*_: object) -> None:
    raise PeerError("rank 2 died", [2], 3)


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        ("wait timeout after 8000ms, keys: /default_pg/0//cpu//0/2", (2,), "rank 2 did not join"),
        ("Connection reset by peer\nat frame 1\nat frame 2", (), "Connection reset by peer"),
        ("", (), "RuntimeError"),
    ],
)
def test_ranks_that_do_not_meet_are_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: tuple[int, ...], says: str
) -> None:
    """What torch raises while ranks join becomes a PeerError that names the rank, if torch does."""

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(group.dist, "init_process_group", failing)
    with pytest.raises(PeerError, match=says) as caught:
        join("cpu", 8.0)
    assert caught.value.ranks == ranks
    assert "8 s" in str(caught.value)
    assert "\n" not in str(caught.value)

"""Ranks that wait for jobs: started on a network when it is first needed, and kept for the next.

A session's ranks and the launcher meet in a folder: ``asked.json``, ``ready``, then for each number
``job-0.json`` and ``done-0.json``, and at the end ``end``. A job that fails ends its ranks; the
next one gets new ones.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from taciturn.compare.bundled import load_task
from taciturn.compare.experiment import LOOPBACK
from taciturn.compare.training import check_task
from taciturn.compare.work import Job, do_job
from taciturn.errors import TestbedError, described
from taciturn.files import write_whole
from taciturn.testbed import Testbed, capability
from taciturn.units import parse_rate

__all__ = ["Done", "Networks", "run_rank"]

SESSION_S = 30 * 86_400.0
START_S = 300.0
"""In which ranks can be started on a machine that is busy, beside what a task may be silent for."""
GRACE_S = 6.0
MOST_RANKS = 16
"""That wait at the same time, on all networks but the one in use: each is a process with torch."""
SHORTEST_S, LONGEST_S, SLOWER = 0.005, 0.25, 1.2
"""Of a look at whether something has come; each wait is longer than the one before."""


class Done(NamedTuple):
    """What came of a job: one of the two.

    Attributes:
        result: plain values; None if it failed.
        failure: why; None if it did not.
    """

    result: dict[str, Any] | None
    failure: str | None


# ------------------------------------------------------------------------------ on the launcher


class Networks:
    """The networks of an experiment, with ranks on those in use. A context manager.

    Args:
        task: as in the experiment.
        ranks: how many.
        timeout_s: a rank that is silent for longer counts as lost.
    """

    def __init__(self, task: str, ranks: int, timeout_s: float) -> None:
        self.task, self.ranks, self.timeout_s = task, ranks, timeout_s
        self._open: dict[str, _Session] = {}  # that was used last is last

    def do(self, regime: str, job: Job) -> Done:
        """Do a job, and wait for it.

        Args:
            regime: rate of every link, or ``loopback``.
            job: with its ``kind``.

        Raises:
            TestbedError: the network cannot be made, or its ranks could not begin.
        """
        try:
            session = self._open.pop(regime, None) or self._new(regime)
            self._open[regime] = session
            done = session.do(job)
            if done.failure is not None:
                self._open.pop(regime).close()
            return done
        except OSError as error:  # a full disk, most likely
            raise TestbedError(
                f"the folder in which ranks get their jobs ({tempfile.gettempdir()}) cannot be "
                f"used: {error.strerror or error}; what was finished is kept"
            ) from error

    def _new(self, regime: str) -> _Session:
        """Start ranks, after those that wait longest have made room for them."""
        while self._open and (1 + len(self._open)) * self.ranks > MOST_RANKS:
            self._open.pop(next(iter(self._open))).close()
        return _Session(self.task, self.ranks, regime, self.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self._open.values():
            session.close()
        self._open.clear()


class _Session:
    """Ranks on one network, and the folder in which they find their jobs."""

    def __init__(self, task: str, ranks: int, regime: str, timeout_s: float) -> None:
        rate = None if regime == LOOPBACK else parse_rate(regime)
        # Interfaces of their own count the bytes of an unshaped regime too, where they can be had.
        inside = regime != LOOPBACK and (rate is not None or capability().shaped)
        self._jobs, self._busy = 0, False
        with ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="taciturn-"))
            self.folder = Path(name)
            asked = {"task": task, "timeout_s": timeout_s}
            (self.folder / "asked.json").write_text(json.dumps(asked))
            testbed = stack.enter_context(Testbed(ranks, rate, namespaces=inside))
            self._running = testbed.start(
                [sys.executable, "-P", "-m", "taciturn.compare", name],
                timeout_s=SESSION_S,
                grace_s=GRACE_S,
                output="capture",
            )
            if not self._wait_for("ready", within_s=START_S + timeout_s):
                raise TestbedError(f"the ranks could not begin: {self._why_not(timeout_s)}")
            self._stack = stack.pop_all()

    def do(self, job: Job) -> Done:
        """Do a job; after one that failed no rank is left."""
        number, self._jobs = self._jobs, self._jobs + 1
        self._busy = True
        write_whole(self.folder / f"job-{number}.json", json.dumps(job))
        name = f"done-{number}.json"
        came = self._wait_for(name)
        self._busy = False
        if not came:
            return Done(None, self._why())
        return Done(json.loads((self.folder / name).read_text()), None)

    def _wait_for(self, name: str, within_s: float = math.inf) -> bool:
        """Wait until a file is there; False if the ranks ended without it, or it takes too long."""
        path, until = self.folder / name, time.monotonic() + within_s
        for _ in _looks():
            ended = self._running.done  # looked at first: what they wrote last is there then
            if path.exists():
                return True
            if ended or time.monotonic() > until:
                return False
        raise AssertionError("looks never end")

    def close(self) -> None:
        """End the ranks, amid a job too, and take the network down."""
        if not self._busy:
            write_whole(self.folder / "end", "")
            self._wait_for("nothing more", within_s=GRACE_S)
        self._stack.close()

    def _why_not(self, timeout_s: float) -> str:
        """Return why ranks are not ready; if they are still at it, that is the task's own code."""
        if self._running.done:
            return self._why()
        return (
            f"they were silent for {START_S + timeout_s:g} s; does the task's own code wait for "
            "something? Give a longer timeout_s if it needs more to begin"
        )

    def _why(self) -> str:
        """Return why a session failed: the first rank's own words, or how it ended."""
        result = self._running.wait()
        first = result.first_failure
        if first is not None and first.returncode < 0:
            return f"{first} after {first.seconds:.1f} s"
        paths = sorted(self.folder.glob("failure-*.json"), key=_rank_of)
        said = [json.loads(path.read_text()) for path in paths]
        if said:  # one rank's own mistake explains the rest better than those who lost it
            told = min(said, key=lambda one: one["kind"] == "PeerError")
            return f"{told['kind']} on rank {told['rank']}: {told['text']}"
        return str(result)


def _rank_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _looks() -> Iterator[None]:
    """Yield for ever, with a sleep before each but the first; ever longer ones."""
    sleep_s = SHORTEST_S
    while True:
        yield
        time.sleep(sleep_s)
        sleep_s = min(LONGEST_S, SLOWER * sleep_s)


# ------------------------------------------------------------------------------------ on a rank


def run_rank(folder: Path) -> int:
    """Be a rank that :class:`Networks` has started: the status to end with."""
    rank = int(os.environ["RANK"])
    try:
        asked = json.loads((folder / "asked.json").read_text())
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=asked["timeout_s"]))
        task = load_task(asked["task"])
        check_task(task, 0)
        if rank == 0:
            write_whole(folder / "ready", "")
        for number, job in enumerate(_jobs(folder)):
            result = do_job(task, job, asked["timeout_s"])
            if rank == 0:
                text = json.dumps(result, allow_nan=False)
                write_whole(folder / f"done-{number}.json", text)
        dist.destroy_process_group()
    except Exception as error:
        kind = type(error).__name__
        text = described(error).removeprefix(f"{kind}: ")
        failure = {"kind": kind, "rank": rank, "text": text}
        write_whole(folder / f"failure-{rank}.json", json.dumps(failure))
        traceback.print_exc()
        return 1
    return 0


def _jobs(folder: Path) -> Iterator[Job]:
    """Yield one job after the other, as they come, until the end."""
    for number in itertools.count():
        path = folder / f"job-{number}.json"
        for _ in _looks():  # each rank looks for itself: to wait for another is to time out
            if path.exists():
                break
            if (folder / "end").exists():
                return
        yield json.loads(path.read_text())

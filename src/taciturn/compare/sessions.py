"""Jobs on ranks: start them on a network, hand them one job after the other, take what comes back.

The ranks and the launcher meet in a folder: ``jobs.json``, ``begun`` (the number of the job under
way) and ``done.jsonl``. A job that fails ends the ranks; the others then go on with new ones.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from taciturn.compare.bundled import load_task
from taciturn.compare.task import Task
from taciturn.compare.training import TimeJob, TrainJob, check_task, time_steps, train
from taciturn.errors import InputError, TestbedError
from taciturn.files import write_whole
from taciturn.probe import Job as ProbeJob
from taciturn.probe import probe_link
from taciturn.ranks import Ranks
from taciturn.testbed import Testbed, capability
from taciturn.transport import DistributedTransport
from taciturn.units import parse_rate

__all__ = ["LOOPBACK", "Job", "OnDone", "run_jobs", "run_rank"]

Job = dict[str, Any]
OnDone = Callable[[Job, dict[str, Any] | None, str | None], object]
"""Given a job and its result, or why it failed."""

LOOPBACK = "loopback"
"""The network of runs whose losses are composed with other networks' step times."""

SESSION_S = 7 * 86_400.0
GRACE_S = 6.0
PROBES = 3
"""Tries, each longer, before a link counts as one that cannot be told."""
LOOK_EVERY_S = 0.1


# ------------------------------------------------------------------------------ on the launcher


def run_jobs(
    task: str,
    ranks: int,
    regime: str,
    jobs: Sequence[Job],
    timeout_s: float,
    on_done: OnDone,
    on_begun: Callable[[Job], None] | None = None,
) -> None:
    """Do jobs one after the other, on ranks of our own on one network.

    Args:
        task: as in the experiment.
        ranks: how many.
        regime: rate of every link, or ``loopback``.
        jobs: each with its ``kind``.
        timeout_s: a rank that is silent for longer counts as lost.
        on_done: told of each as soon as it is done; jobs that were done are kept, whatever follows.
        on_begun: told of each that begins.

    Raises:
        TestbedError: the network cannot be made, or the ranks could not begin.
    """
    left = list(jobs)
    while left:
        done = _one_session(task, ranks, regime, left, timeout_s, on_done, on_begun)
        left = left[done:]


def _one_session(
    task: str,
    ranks: int,
    regime: str,
    jobs: Sequence[Job],
    timeout_s: float,
    on_done: OnDone,
    on_begun: Callable[[Job], None] | None,
) -> int:
    """Return how many jobs are done with, a failed one among them."""
    rate = None if regime == LOOPBACK else parse_rate(regime)
    # Interfaces of their own count the bytes of an unshaped regime too, where they can be had.
    inside = regime != LOOPBACK and (rate is not None or capability().shaped)
    with (
        tempfile.TemporaryDirectory(prefix="taciturn-") as name,
        Testbed(ranks, rate, namespaces=inside) as testbed,
    ):
        folder = Path(name)
        asked = {"task": task, "jobs": list(jobs), "timeout_s": timeout_s}
        (folder / "jobs.json").write_text(json.dumps(asked))
        mailbox = _Mailbox(folder, jobs, on_done, on_begun)
        running = testbed.start(
            [sys.executable, "-P", "-m", "taciturn.compare", name],
            timeout_s=SESSION_S,
            grace_s=GRACE_S,
            output="capture",
        )
        try:
            while not running.done:
                time.sleep(LOOK_EVERY_S)
                mailbox.look()
            result = running.wait()
        finally:  # Ctrl-C too: what was done is kept
            mailbox.look()
        if result.ok:
            return len(jobs)
        why = _why(folder, result)
        if mailbox.begun is None:
            raise TestbedError(f"the ranks could not begin: {why}")
        on_done(jobs[mailbox.begun], None, why)
        return mailbox.begun + 1


class _Mailbox:
    """What the ranks have written so far."""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        on_done: OnDone,
        on_begun: Callable[[Job], None] | None,
    ) -> None:
        self.folder, self.jobs = folder, jobs
        self.on_done, self.on_begun = on_done, on_begun
        self.begun: int | None = None
        self._read = 0

    def look(self) -> None:
        """Hand on what is new."""
        path = self.folder / "done.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        for line in lines[self._read :]:
            row = json.loads(line)
            self.on_done(self.jobs[row["number"]], row["result"], None)
        self._read = len(lines)
        with suppress(FileNotFoundError, ValueError):
            begun = int((self.folder / "begun").read_text())
            if begun != self.begun:
                self.begun = begun
                if self.on_begun is not None:
                    self.on_begun(self.jobs[begun])


def _why(folder: Path, result: Any) -> str:
    """Return why a session failed: the first rank's own words, or how it ended."""
    first = result.first_failure
    if first is not None and first.returncode < 0:
        return f"{first} after {first.seconds:.1f} s"
    paths = sorted(folder.glob("failure-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    said = [json.loads(path.read_text()) for path in paths]
    if said:  # one rank's own mistake explains the rest better than those who lost it
        told = min(said, key=lambda one: one["kind"] == "PeerError")
        return f"{told['kind']} on rank {told['rank']}: {told['text']}"
    return str(result)


# ------------------------------------------------------------------------------------ on a rank


def run_rank(folder: Path) -> int:
    """Be a rank that :func:`run_jobs` has started: the exit status."""
    rank = int(os.environ["RANK"])
    try:
        asked = json.loads((folder / "jobs.json").read_text())
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=asked["timeout_s"]))
        task = load_task(asked["task"])
        check_task(task, 0)
        for number, job in enumerate(asked["jobs"]):
            if rank == 0:
                write_whole(folder / "begun", str(number))
            result = _do(task, job, asked["timeout_s"])
            if rank == 0:
                line = json.dumps({"number": number, "result": result}, allow_nan=False)
                with (folder / "done.jsonl").open("a") as file:
                    file.write(line + "\n")
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        failure = {"kind": type(error).__name__, "rank": rank, "text": str(error)}
        write_whole(folder / f"failure-{rank}.json", json.dumps(failure))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit might wait for ranks that are lost
    return 0


def _do(task: Task, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    match job["kind"]:
        case "trial" | "target" | "run":
            return train(
                task,
                TrainJob(
                    method=job["method"],
                    seed=job["seed"],
                    learning_rate=job["learning_rate"],
                    steps=job["steps"],
                    evaluate_at=tuple(job["evaluate_at"]),
                    timeout_s=timeout_s,
                ),
            )
        case "time":
            return time_steps(
                task,
                TimeJob(
                    method=job["method"],
                    seconds=job["seconds"],
                    seed=job["seed"],
                    timeout_s=timeout_s,
                ),
            )
        case "probe":
            return _probe(job, timeout_s)
        case kind:
            raise AssertionError(f"a job of kind {kind!r}")


def _probe(job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    transport = DistributedTransport(timeout_s=timeout_s)
    try:
        ranks = Ranks(transport, torch.device("cpu"))
        for number in range(1, PROBES + 1):
            asked = ProbeJob(
                seconds=number * job["seconds"],
                methods=tuple(job["methods"]),
                timeout_s=timeout_s,
                rate_bits_per_s=parse_rate(job["regime"]),
            )
            try:
                return {"link": probe_link(ranks, asked).to_json(), "tries": number}
            except InputError:  # disturbed by something else: no link can be told, on any rank
                if number == PROBES:
                    raise
        raise AssertionError("the last try returns or raises")
    finally:
        transport.close()

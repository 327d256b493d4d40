"""Ranks of our own for a measurement: start them, watch them, hand on what they found.

The launcher's side is :func:`on_testbed`, the ranks' :func:`run_rank`; they meet in a folder.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from taciturn import errors
from taciturn.collectives import products
from taciturn.collectives.wires import kernels
from taciturn.errors import InputError, PeerError, TaciturnError, TestbedError
from taciturn.files import write_whole
from taciturn.ranks.progress import Progress, show_progress, tell
from taciturn.testbed import Description, RunResult, Testbed, capability
from taciturn.units import format_rate

__all__ = [
    "Work",
    "check_torchrun",
    "compile_loops",
    "on_testbed",
    "run_rank",
    "under_torchrun",
    "world_size",
]

RUN_WITHIN_S = 86400.0  # the ranks' own time-outs end a run that hangs long before
GRACE_S = 6.0  # for the other ranks to say what they saw; they settle it within three seconds
COMPILING_AFTER_S = 1.0  # loading compiled loops from the cache takes a third of that

Work = Callable[[dict[str, Any], Callable[[Progress], None] | None], Any]
"""What a rank does with a job; see :func:`run_rank`."""


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def world_size(asked: int | None, usual: int) -> int:
    """Number of ranks, whoever starts them: ``usual`` where no number was asked for."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return usual if asked is None else asked


def check_torchrun(asked: int | None, rate: object, device: str) -> None:
    """Refuse what cannot be had under torchrun, whose ranks and links are there already.

    Args:
        asked: number of ranks.
        rate: of the links.
        device: of this rank.

    Raises:
        InputError: ranks or a rate were asked for, or a GPU that is not there.
    """
    if asked is not None or rate is not None:
        raise InputError(
            f"under torchrun the {os.environ['WORLD_SIZE']} ranks and their links are there "
            "already; leave --ranks and --rate out"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not there: torch sees no GPU; use --device cpu")


def run_rank(folder: Path, work: Work) -> int:
    """Do what ``folder/job.json`` asks for; leave result, progress or the error in the folder.

    Args:
        folder: made by :func:`on_testbed`.
        work: given the job's values and, on rank 0, whom to tell how far it is; what it returns
            there is the result.

    Returns:
        The status to end with (:func:`~taciturn.ending.end_rank`): 0, or 1 after an error.
    """
    rank = int(os.environ["RANK"])
    try:

        def report(progress: Progress) -> None:
            write_whole(folder / "progress.json", json.dumps(progress))

        job = json.loads((folder / "job.json").read_text())
        result = work(job, report if rank == 0 else None)
        if rank == 0:
            write_whole(folder / "result.json", json.dumps(result, allow_nan=False))
    except TaciturnError as error:
        failure = {
            "kind": type(error).__name__,
            "text": str(error),
            "ranks": list(getattr(error, "ranks", ())),
            "round": getattr(error, "round", 0),
        }
        write_whole(folder / f"failure-{rank}.json", json.dumps(failure))
        print(f"taciturn: error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _failure(folder: Path, result: RunResult) -> TaciturnError:
    """The error to raise for a run that failed: what killed a rank, and what others say of it."""
    said = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("failure-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    ]
    first = result.first_failure
    if first is not None and first.returncode < 0:
        # What the others made of it is a guess; shown where it is the right one.
        texts = [failure["text"] for failure in said if failure["ranks"] == [first.rank]]
        others = f"; the others: {texts[0]}" if texts else ""
        return PeerError(f"{first} after {first.seconds:.1f} s{others}", [first.rank])
    if not said:
        tail = (first.stderr or "").strip() if first is not None else ""
        return TestbedError(f"{result}" + (f"\n{tail}" if "\n" in tail else ""))
    # One rank's own mistake explains the rest better than those who lost it.
    told = min(said, key=lambda failure: failure["kind"] == "PeerError")
    kind: type[TaciturnError] = getattr(errors, told["kind"], TaciturnError)
    if kind is PeerError:
        return PeerError(told["text"], told["ranks"], told["round"])
    return kind(told["text"])


def on_testbed(
    module: str,
    ranks: int,
    rate: int | Sequence[int | None] | None,
    job: Callable[[Description], dict[str, Any]],
    console: Console,
) -> Any:
    """Start ranks, each ``python -m MODULE FOLDER``, and return rank 0's result.

    On an emulated network where a rate is asked for and one can be made, else on loopback; says
    which. However this ends, the ranks' folder goes with it, unless this process is killed by
    SIGKILL.

    Args:
        module: whose ``__main__`` calls :func:`run_rank` with its first argument.
        ranks: how many.
        rate: of every link in bits per second, or one per rank; None leaves loopback as it is.
        job: the job's plain values, given what network was made.
        console: where progress and remarks go.

    Raises:
        PeerError, MismatchError: a rank died, went silent or failed; the message names it.
        TestbedError: the ranks could not be run.
    """
    shaped = any(rate) if isinstance(rate, Sequence) else rate is not None
    if not shaped:
        tell(console, "The ranks talk over loopback: the link is not shaped.")
    elif not (able := capability()).shaped:
        rates = rate if isinstance(rate, Sequence) else [rate]
        tell(
            console,
            f"The link is NOT shaped to {', '.join(map(format_rate, rates))}, the ranks talk over "
            f"loopback: {able.reason}",
        )
        shaped = False
    with (
        tempfile.TemporaryDirectory(prefix="taciturn-") as name,
        Testbed(ranks, rate if shaped else None, namespaces=shaped) as testbed,
        show_progress(console, f"starting {ranks} ranks") as show,
    ):
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job(testbed.description)))
        command = [sys.executable, "-P", "-m", module, name]
        running = testbed.start(command, timeout_s=RUN_WITHIN_S, grace_s=GRACE_S, output="capture")
        while not running.done:
            time.sleep(0.1)
            with suppress(FileNotFoundError):  # the ranks are still starting
                show(Progress(*json.loads((folder / "progress.json").read_text())))
        result = running.wait()
        if not result.ok:
            raise _failure(folder, result)
        return json.loads((folder / "result.json").read_text())


def compile_loops(console: Console) -> None:
    """Compile the loops once, before the ranks all do the same; says so if they are not cached."""
    told = threading.Timer(
        COMPILING_AFTER_S,
        tell,
        (console, "compiling loops (first start only; it can take a minute)"),
    )
    told.daemon = True
    told.start()
    try:
        with suppress(Exception):  # the ranks compile too, and report what goes wrong
            kernels.prepare()
            products.prepare()
    finally:
        told.cancel()

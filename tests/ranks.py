"""Real gloo ranks for the tests: a pool that lives for the whole run, and throw-away ones.

All are forked from one process that has imported torch, with its compiler (which DDP and optimizers
load), and has done nothing else: they start in no time.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

TIMEOUT_S = 60.0
"""How long a test's function may take on the ranks."""


@dataclass
class Outcome:
    """What became of one rank: a result, an error, or neither if it was killed or stopped."""

    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    ended: bool = False


def forking() -> Any:
    """Return how processes are made."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.nn.parallel", "taciturn.collectives.coded_ring"]
    )
    return context


class Ranks:
    """Some processes with a gloo group; the store is held here, by the launcher."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forking()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self.store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = TIMEOUT_S,
        lost: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run ``function(*args)``, importable, on every rank, and see what becomes of each.

        Does not wait for the ``lost`` ranks when all others have ended.
        """
        outcomes = [Outcome() for _ in self.pipes]
        for pipe in self.pipes:
            pipe.send((function, args))
        waiting = dict(zip(self.pipes, range(self.size), strict=True))
        deadline = time.monotonic() + timeout_s
        while set(waiting.values()) - set(lost) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                outcome = outcomes[waiting.pop(pipe)]
                try:
                    outcome.result, outcome.error, outcome.seconds = pipe.recv()
                    outcome.ended = True
                except (EOFError, ConnectionError):
                    pass  # it died
        return outcomes

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the results by rank; raise the first rank's error."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise outcome.error
            assert outcome.ended, f"rank {rank} died or did not end within {timeout_s} s"
        return [outcome.result for outcome in outcomes]

    def close(self) -> None:
        """End the processes, whatever their state."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


@dataclass
class Ended:
    """How a script ended on one rank."""

    status: int
    """Of the process; negative for a signal."""
    out: str
    err: str


def run_script(
    script: Path, arguments: Sequence[str], folder: Path, ranks: int, timeout_s: float = TIMEOUT_S
) -> list[Ended]:
    """Run a script as torchrun would, on some ranks, and return how each ended.

    As soon as one rank has failed, the others are ended too.

    Args:
        script: its ``__main__`` runs.
        arguments: after the script's name.
        folder: where what the ranks print is kept.
        ranks: how many.
        timeout_s: ranks that take longer are killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forking()
    processes = [
        context.Process(
            target=_play, args=(str(script), list(arguments), folder, rank, ranks, store.port)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    running = list(processes)
    while running and all(p.exitcode in (None, 0) for p in processes):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([process.sentinel for process in running], left)
        running = [process for process in processes if process.is_alive()]
    for process in running:
        process.kill()
    for process in processes:
        process.join()
    return [
        Ended(
            process.exitcode, *((folder / f"{rank}.{name}").read_text() for name in ("out", "err"))
        )
        for rank, process in enumerate(processes)
    ]


def _play(
    script: str, arguments: list[str], folder: Path, rank: int, ranks: int, port: int
) -> None:
    """Be one rank of a script: torchrun's environment, the launcher's store, files to print in."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        start = time.monotonic()
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:
            raised.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            error = raised
        try:
            pipe.send((result, error, time.monotonic() - start))
        except (BrokenPipeError, ConnectionError):
            return

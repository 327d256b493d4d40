"""The process that owns a testbed: it starts the ranks, watches them and ends them.

The launcher (``launcher.py``) starts it with one end of a socket pair. With namespaces it is
two processes: a *guard* that stays outside and kills the inside when the launcher is gone, however
it went, and the supervisor proper, process 1 inside, with whose end the kernel removes all.

Lines of JSON in both directions. Launcher: ``start`` (a run), ``rank`` (carries the two descriptors
for a rank's output), ``kill``, ``stop``. Supervisor: ``ready`` or ``error`` once, then for each
run ``exit`` per rank and ``done``. End of file from the launcher ends everything.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from taciturn.errors import TaciturnError
from taciturn.testbed import namespaces
from taciturn.testbed.namespaces import Network, Plan

__all__ = ["EXITED_KEY", "Supervisor", "hold_store", "main"]

EXITED_KEY = "taciturn/exited/{rank}"
"""In the store: the exit status of each rank that ended with an error, or minus its signal."""
LONGEST_WAIT_S = 3600.0
"""At a time: the system counts milliseconds, and no more than 25 days of them."""
_HOLD_STORE = "from taciturn.testbed.supervisor import hold_store; hold_store()"


def main() -> None:
    """Entry of the process; arguments: control socket, launcher's pid, plan, number of ranks."""
    descriptor, launcher, plan = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    control = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    try:
        if plan is None:
            Supervisor(control, None, int(sys.argv[4])).serve({"privileged": os.geteuid() == 0})
            return
        gone = _watch(launcher)
        privileged = namespaces.isolate()
        inside = os.fork()
        if inside:
            control.close()
            _guard(gone, inside)
        namespaces.kill_with_parent()
        network = namespaces.build(Plan(**plan))
    except TaciturnError as error:
        _send(control, event="error", message=str(error))
        return
    facts = {
        "privileged": privileged,
        "congestion_control": network.congestion_control,
        "netem": network.netem,
    }
    Supervisor(control, network, len(network.namespaces)).serve(facts)


def hold_store() -> None:
    """Hold the ranks' TCPStore on a listening socket; set what ``key value`` lines on stdin say.

    A process of its own: it outlives any rank, and it imports torch while the ranks do the same.
    """
    from torch._C._distributed_c10d import TCPStore  # where its annotations are

    descriptor = int(sys.argv[1])
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        host, port = listening.getsockname()
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=True,
    )
    for line in sys.stdin:
        key, _, value = line.rstrip("\n").partition(" ")
        store.set(key, value)


@dataclass
class _Run:
    """One command on all ranks. ``phase`` goes running -> failing -> ending -> killed."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    grace_s: float
    stop_s: float
    began: float
    deadline: float
    listening: socket.socket | None = None
    store: subprocess.Popen[str] | None = None
    ranks: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    phase: str = "running"
    timed_out: bool = False


class Supervisor:
    """Starts, watches and ends the ranks of one testbed, one run at a time."""

    def __init__(self, control: socket.socket, network: Network | None, size: int) -> None:
        self.control = control
        self.network = network  # None on loopback
        self.size = size
        self.interface = "eth0" if network else "lo" if sys.platform == "linux" else "lo0"
        self.run: _Run | None = None
        self.descriptors: list[int] = []
        self.pending = b""

    def serve(self, facts: dict[str, object]) -> None:
        """Answer the launcher until it closes the socket."""
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            try:
                _send(self.control, event="ready", **facts)
                while True:
                    for key, _ in selector.select(self._patience()):
                        if key.fileobj is woken:
                            with suppress(BlockingIOError):
                                woken.recv(4096)
                        elif not self._listen():
                            return
                    self._reap()
                    self._advance()
            except (BrokenPipeError, ConnectionResetError):
                return  # the launcher is gone
            finally:
                self._clear()

    # --- the launcher's side -------------------------------------------------------------------

    def _listen(self) -> bool:
        """Take what the launcher sent; False at its end."""
        data, descriptors, _, _ = socket.recv_fds(self.control, 65536, 64)
        if not data:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self.descriptors += descriptors
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return True

    def _obey(self, request: dict[str, Any]) -> None:
        action = request["do"]
        if action == "start":
            self._prepare(request)
        elif action == "rank":
            out, err, *self.descriptors = self.descriptors
            try:
                self._spawn(request["rank"], out, err)
            finally:
                os.close(out)
                os.close(err)
        elif action == "kill":
            self._signal(request["signal"], {request["rank"]})
        elif action == "stop":
            self._end()

    def _prepare(self, request: dict[str, Any]) -> None:
        began = time.monotonic()
        timeout_s = request.pop("timeout_s")
        store = request.pop("store")
        del request["do"]
        run = self.run = _Run(**request, began=began, deadline=began + timeout_s)
        run.running = set(range(self.size))
        host = "127.0.0.1" if self.network is None else namespaces.address(None)
        run.env |= {"MASTER_ADDR": host, "MASTER_PORT": "0"}
        if store:
            # Listening from now on: ranks that come before the store has imported torch just wait.
            run.listening = socket.create_server((host, 0), backlog=4 * self.size + 16)
            run.env["MASTER_PORT"] = str(run.listening.getsockname()[1])
            descriptor = run.listening.fileno()
            run.store = subprocess.Popen(
                [sys.executable, "-P", "-c", _HOLD_STORE, str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[descriptor],
                text=True,
                preexec_fn=self._bind_to_me(),
            )

    def _spawn(self, rank: int, out: int, err: int) -> None:
        run = self.run
        assert run is not None
        try:
            if self.network is not None:
                namespaces.join(self.network.namespaces[rank])
            run.ranks[rank] = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=run.cwd,
                env=run.env | self._variables(rank),
                start_new_session=True,
                preexec_fn=self._bind_to_me(),
            )
        except OSError as error:
            status = 126 if isinstance(error, PermissionError) else 127  # as shells have it
            os.write(err, f"taciturn: cannot start {run.command[0]!r}: {error.strerror}\n".encode())
            self._ended(rank, status)
        finally:
            if self.network is not None:
                namespaces.join(self.network.outside)

    def _variables(self, rank: int) -> dict[str, str]:
        """What torchrun sets: N hosts of one rank each, or one host of N ranks on loopback."""
        hosts = self.network is not None
        values = {
            "RANK": rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": 0 if hosts else rank,
            "LOCAL_WORLD_SIZE": 1 if hosts else self.size,
            "GROUP_RANK": rank if hosts else 0,
            "GROUP_WORLD_SIZE": self.size if hosts else 1,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "taciturn",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
        }
        return {name: str(value) for name, value in values.items()}

    # --- the ranks' side -----------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect every child that ended: ranks, the store, and orphans that process 1 inherits."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            run = self.run
            ranks = {} if run is None else {each.pid: rank for rank, each in run.ranks.items()}
            if run is not None and found.si_pid in ranks:
                rank = ranks[found.si_pid]
                status = run.ranks[rank].wait()
                if rank in run.running:
                    self._ended(rank, status)
            elif run is not None and run.store is not None and found.si_pid == run.store.pid:
                run.store.wait()
                _send(self.control, event="store_lost", status=run.store.returncode)
                self._end()
            else:
                os.waitpid(found.si_pid, 0)

    def _ended(self, rank: int, status: int) -> None:
        run = self.run
        assert run is not None
        run.running.discard(rank)
        stopped = run.phase in ("ending", "killed")
        seconds = time.monotonic() - run.began
        _send(
            self.control, event="exit", rank=rank, status=status, seconds=seconds, stopped=stopped
        )
        if status == 0 or stopped:
            return
        if run.store is not None and run.store.stdin is not None:
            with suppress(OSError):
                run.store.stdin.write(f"{EXITED_KEY.format(rank=rank)} {status}\n")
                run.store.stdin.flush()
        if run.phase == "running":
            run.phase = "failing"
            run.deadline = min(run.deadline, time.monotonic() + run.grace_s)

    def _patience(self) -> float | None:
        if self.run is None:
            return None
        return min(LONGEST_WAIT_S, max(0.0, self.run.deadline - time.monotonic()))

    def _advance(self) -> None:
        """Move the run on when its time is over or its ranks have all ended."""
        run = self.run
        if run is None:
            return
        if not run.running:
            self._finish(run)
        elif time.monotonic() >= run.deadline:
            if run.phase in ("running", "failing"):
                run.timed_out = run.phase == "running"
                self._end()
            else:
                run.phase = "killed"
                self._signal(signal.SIGKILL, run.running)
                run.deadline = time.monotonic() + 1.0

    def _end(self) -> None:
        """Ask the ranks to end; ``_advance`` insists."""
        run = self.run
        if run is None or run.phase in ("ending", "killed"):
            return
        run.phase = "ending"
        run.deadline = time.monotonic() + run.stop_s
        self._signal(signal.SIGTERM, run.running)
        self._signal(signal.SIGCONT, run.running)  # one that is stopped gets it only then

    def _signal(self, number: int, ranks: set[int]) -> None:
        """To the ranks and what they started (each rank leads a process group)."""
        if self.run is not None:
            for rank in ranks & self.run.running & self.run.ranks.keys():
                with suppress(ProcessLookupError):
                    os.killpg(self.run.ranks[rank].pid, number)

    def _finish(self, run: _Run) -> None:
        self._clear()
        _send(self.control, event="done", timed_out=run.timed_out)

    def _clear(self) -> None:
        """End whatever a run started: process groups, the store, inside namespaces all the rest."""
        run, self.run = self.run, None
        if run is None:
            return
        for process in run.ranks.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if self.network is not None:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all but process 1, which is this one
        if run.store is not None:
            with suppress(ProcessLookupError):
                run.store.kill()
            run.store.wait()
            if run.store.stdin is not None:
                with suppress(OSError):
                    run.store.stdin.close()
        for process in run.ranks.values():
            process.wait()
        if run.listening is not None:
            run.listening.close()

    def _bind_to_me(self) -> Callable[[], None] | None:
        """On loopback no namespace ends with this process, so Linux is asked to kill each child."""
        if self.network is not None or sys.platform != "linux":
            return None
        return namespaces.kill_with_parent


def _send(control: socket.socket, **message: object) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


def _watch(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None if the kernel has none."""
    try:
        watched = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    if os.getppid() != pid:  # it ended before we looked: the pid may be another's by now
        os._exit(1)
    return watched


def _guard(launcher: int | None, inside: int) -> None:
    """Outside: end with the inside, and kill it when the launcher is gone."""
    if launcher is not None:
        watched = os.pidfd_open(inside)
        ready, _, _ = select.select([launcher, watched], [], [])
        if launcher in ready:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched, signal.SIGKILL)
    _, status = os.waitpid(inside, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0x7F)

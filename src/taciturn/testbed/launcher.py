"""The launcher's side: makes the testbed, starts commands on its ranks, takes it down."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, Required, Self, TypedDict, Unpack

from taciturn.errors import InputError, TestbedError
from taciturn.testbed.namespaces import MAX_RATE, Plan
from taciturn.testbed.results import Capability, Description, RunResult
from taciturn.testbed.running import Output, Running
from taciturn.units import format_rate

__all__ = ["MAX_RANKS", "RunOptions", "Testbed", "capability", "run_command", "run_local"]

Rates = int | None | Sequence[int | None]

MAX_RANKS = 512  # a bridge has 1024 ports at most
MIN_RATE = 8_000  # bits per second; a packet then takes a second and a half
_READY_WITHIN_S = 60.0
_OUTPUTS = ("prefix", "plain", "capture", "inherit")
_START = "from taciturn.testbed.supervisor import main; main()"
_WITHOUT = "run without --rate: the ranks then talk over loopback, and the link is not shaped"


class RunOptions(TypedDict, total=False):
    """How to run a command; each key is explained at ``Testbed.start``."""

    timeout_s: Required[float]
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str] | None
    output: Output
    grace_s: float
    stop_s: float
    store: bool


class Testbed:
    """N ranks on a switch, each on a link with a set rate. A context manager.

    Args:
        ranks: how many, from 1.
        rate: of every link in bits per second, None for no limit, or one such value per rank (a
            smaller one makes a straggler). The bucket counts Ethernet frames: TCP gets
            ``TCP_GOODPUT`` of it.
        rate_down: of what a rank receives, in the same forms; by default the same as ``rate``.
        mtu: bytes of an IP packet, 576 to 9000.
        delay_s: one-way delay between two ranks, 0 for none; needs the kernel's netem.
        loss: share of the packets lost between two ranks, 0 for none; needs netem.
        namespaces: False runs the ranks on loopback: nothing is shaped, nothing is needed.

    Raises:
        InputError: at construction, for a number that cannot be used.
        TestbedError: on entry, where no such network can be made; the message says why.
    """

    __test__ = False  # pytest: not a test class, in spite of its name

    def __init__(
        self,
        ranks: int,
        rate: Rates,
        *,
        rate_down: Rates | Literal["same"] = "same",
        mtu: int = 1500,
        delay_s: float = 0.0,
        loss: float = 0.0,
        namespaces: bool = True,
    ) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MAX_RANKS:
            raise InputError(f"{ranks!r} ranks: give a whole number from 1 to {MAX_RANKS}")
        if isinstance(mtu, bool) or not isinstance(mtu, int) or not 576 <= mtu <= 9000:
            raise InputError(f"MTU {mtu!r}: give a whole number from 576 to 9000 bytes")
        if not 0 <= delay_s <= 10:
            raise InputError(f"delay of {delay_s} s: give 0 to 10 seconds")
        if not 0 <= loss < 1:
            raise InputError(f"loss of {loss}: give a share from 0 to below 1")
        up = _per_rank(rate, ranks)
        down = up if rate_down == "same" else _per_rank(rate_down, ranks)
        self.ranks = ranks
        self.plan = Plan(up, down, mtu, delay_s, loss)
        self._namespaces = namespaces
        if not namespaces and (any(up) or any(down) or delay_s or loss):
            raise InputError("links on loopback cannot be shaped: leave rates, delay and loss out")
        self._owner: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._running: Running | None = None
        self._description: Description | None = None

    @property
    def description(self) -> Description:
        """What was made; once entered."""
        if self._description is None:
            raise TestbedError("the testbed is not open: use it in a with statement")
        return self._description

    def __enter__(self) -> Self:
        if self._owner is not None:
            raise TestbedError("the testbed is open already: make another one")
        if self._namespaces and sys.platform != "linux":
            raise TestbedError(f"{sys.platform} has no network namespaces; {_WITHOUT}")
        self._control, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        try:
            with theirs:
                self._owner = self._start_owner(theirs.fileno(), self._errors)
            facts = self._greeting(self._control)
        except BaseException:
            self.close()
            raise
        plan, inside = self.plan, self._namespaces
        self._description = Description(
            ranks=self.ranks,
            shaped=inside and any(rate is not None for rate in plan.up + plan.down),
            namespaces=inside,
            up=plan.up,
            down=plan.down,
            mtu=plan.mtu if inside else 65536,
            delay_s=plan.delay_s,
            loss=plan.loss,
            congestion_control=facts.get("congestion_control", ""),
            privileged=facts["privileged"],
            netem=facts.get("netem", False),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks and remove the network; nothing is left when it returns."""
        running, self._running = self._running, None
        owner, self._owner = self._owner, None
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        if owner is not None:
            try:
                owner.wait(10)
            except subprocess.TimeoutExpired:
                owner.kill()
                owner.wait()
        if running is not None:
            running.join()
        if self._control is not None:
            self._control.close()
        if self._errors is not None:
            self._errors.close()
        self._control = self._errors = self._description = None

    def run(self, command: Sequence[str], **options: Unpack[RunOptions]) -> RunResult:
        """``start`` a command on all ranks and wait for them; arguments and errors as there.

        A failing rank raises nothing here: see ``RunResult.check``.
        """
        return self.start(command, **options).wait()

    def start(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        output: Output = "prefix",
        grace_s: float = 5.0,
        stop_s: float = 3.0,
        store: bool = True,
    ) -> Running:
        """Start a command on all ranks, one command at a time.

        When a rank ends with an error or is killed, the others have ``grace_s`` seconds to raise
        errors of their own, then SIGTERM, then after ``stop_s`` more SIGKILL. Whatever the ranks
        started ends with them. The status of a rank that failed is in the store at once, under
        ``EXITED_KEY``.

        Args:
            command: program and arguments, no shell.
            timeout_s: the ranks are ended after this many seconds.
            env: variables beside this process's own and torchrun's; OMP_NUM_THREADS is 1 if unset.
            cwd: working directory; by default this one.
            output: ``prefix`` relays lines as they come, with the rank in front; ``plain``
                without; ``capture`` keeps them in the results; ``inherit`` gives the ranks this
                process's own stdout and stderr, terminal included.
            grace_s: see above.
            stop_s: see above.
            store: hold a TCPStore for ``torch.distributed`` at MASTER_ADDR and MASTER_PORT; False
                saves its start for programs that do without.

        Raises:
            InputError: an empty command, a program that is not found, a time that is not positive.
            TestbedError: the testbed is not open, is busy, or its owner was killed.
        """
        if self._control is None:
            raise TestbedError("the testbed is not open: use it in a with statement")
        if self._running is not None and not self._running.done:
            raise TestbedError("the testbed is running a command: wait for it first")
        if output not in _OUTPUTS:
            raise InputError(f"output {output!r}: use one of {', '.join(_OUTPUTS)}")
        for name, value in (("timeout_s", timeout_s), ("grace_s", grace_s), ("stop_s", stop_s)):
            if not 0 <= value < 1e9 or (name == "timeout_s" and value == 0):
                raise InputError(f"{name}={value}: give a positive number of seconds")
        variables = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | dict(env or {})
        folder = os.fspath(cwd or Path.cwd())
        request = {
            "command": _checked(command, variables, folder),
            "env": variables,
            "cwd": folder,
            "timeout_s": timeout_s,
            "grace_s": grace_s,
            "stop_s": stop_s,
            "store": store,
        }
        self._running = Running(self._control, self.ranks, output, self._obituary)
        self._running.begin(request)
        return self._running

    def _start_owner(self, control: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        plan = json.dumps(asdict(self.plan) if self._namespaces else None)
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        arguments = [str(control), str(os.getpid()), plan, str(self.ranks)]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[control],
            start_new_session=True,  # Ctrl-C is for the launcher, which then ends the rest
        )

    def _greeting(self, control: socket.socket) -> dict[str, Any]:
        """The owner's first line."""
        control.settimeout(_READY_WITHIN_S)
        received = b""
        try:
            while not received.endswith(b"\n"):
                data = control.recv(65536)
                if not data:
                    raise TestbedError(f"the testbed's owner ended: {self._obituary()}")
                received += data
        except TimeoutError:
            raise TestbedError(f"no testbed within {_READY_WITHIN_S:.0f} s; {_WITHOUT}") from None
        control.settimeout(None)
        message: dict[str, Any] = json.loads(received)
        if message["event"] == "error":
            raise TestbedError(f"{message['message']}; {_WITHOUT}")
        return message

    def _obituary(self) -> str:
        """Why the owner or the store's holder ended, as far as they could say."""
        last = ""
        if self._errors is not None:
            with suppress(OSError, ValueError):
                self._errors.seek(0)
                last = self._errors.read().decode(errors="replace").strip()[-2000:]
        return f"its last words were:\n{last}" if last else "it said nothing; was it killed?"


@cache
def capability() -> Capability:
    """What this machine allows this user: tried for real with one small testbed, remembered."""
    try:
        with Testbed(1, 10**7) as testbed:
            made = testbed.description
    except TestbedError as error:
        return Capability(False, str(error), os.geteuid() == 0, False)
    how = "as a privileged user" if made.privileged else "through a user namespace"
    netem = "" if made.netem else "; no delay or loss: this kernel has no netem (sch_netem)"
    reason = f"network namespaces work {how}{netem}"
    return Capability(True, reason, made.privileged, made.netem)


def run_local(command: Sequence[str], *, ranks: int, **options: Unpack[RunOptions]) -> RunResult:
    """``Testbed.run`` without namespaces: N ranks on loopback, where no link is shaped.

    Works wherever gloo does. Ranks see one host (LOCAL_RANK is RANK). A program that a rank
    started in a session of its own is not found and not ended.
    """
    with Testbed(ranks, None, namespaces=False) as testbed:
        return testbed.run(command, **options)


def run_command(
    ranks: int,
    rate: Rates,
    command: Sequence[str],
    *,
    local: bool = False,
    rate_down: Rates | Literal["same"] = "same",
    delay_s: float = 0.0,
    loss: float = 0.0,
    timeout_s: float = 86400.0,
    output: Output = "prefix",
    store: bool = True,
    say: Callable[[str], object] | None = None,
) -> int:
    """What ``taciturn testbed`` does; the exit status for the shell (``RunResult.exit_code``).

    Args:
        ranks: see ``Testbed``, as for ``rate``, ``rate_down``, ``delay_s`` and ``loss``.
        rate: of each link.
        command: see ``Testbed.start``, as for ``timeout_s``, ``output`` and ``store``.
        local: loopback instead of namespaces; ``rate`` must be None then.
        rate_down: of what a rank receives.
        delay_s: between two ranks.
        loss: between two ranks.
        timeout_s: for the whole run.
        output: where the ranks' output goes.
        store: hold a TCPStore.
        say: is given the description of the network and, at the end, what failed; by default
            they go to stderr.
    """
    tell = say or _to_stderr
    with Testbed(
        ranks, rate, rate_down=rate_down, delay_s=delay_s, loss=loss, namespaces=not local
    ) as testbed:
        tell(str(testbed.description))
        result = testbed.run(command, timeout_s=timeout_s, output=output, store=store)
    if not result.ok:
        tell(str(result))
    return result.exit_code


def _to_stderr(text: str) -> None:
    print(f"taciturn: {text}", file=sys.stderr, flush=True)


def _checked(command: Sequence[str], env: Mapping[str, str], folder: str) -> list[str]:
    """The command, after a look whether it can be started."""
    words = [] if isinstance(command, str) else list(command)
    if not words or not all(isinstance(word, str) for word in words):
        raise InputError(f"command {command!r}: give a list of a program and its arguments")
    if not Path(folder).is_dir():
        raise InputError(f"cwd {folder!r}: there is no such folder")
    program = str(Path(folder, words[0])) if os.sep in words[0] else words[0]
    if shutil.which(program, path=env.get("PATH")) is None:
        raise InputError(
            f"command {words[0]!r} is not found or cannot be executed: check its name and PATH"
        )
    return words


def _per_rank(rate: Rates, ranks: int) -> tuple[int | None, ...]:
    """One rate per rank."""
    rates = tuple(rate) if isinstance(rate, Sequence) else (rate,) * ranks
    if len(rates) != ranks:
        raise InputError(f"{len(rates)} rates for {ranks} ranks: give one rate, or one per rank")
    for one in rates:
        whole = isinstance(one, int) and not isinstance(one, bool)
        if one is not None and not (whole and MIN_RATE <= one <= MAX_RATE):
            raise InputError(
                f"rate {one!r}: give whole bits per second from {format_rate(MIN_RATE)} to "
                f"{format_rate(MAX_RATE // 10**9 * 10**9)}, or None for no limit"
            )
    return rates

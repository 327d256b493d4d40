"""What a testbed says: what is possible, what was made, how the ranks ended, what they sent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

from taciturn.errors import InputError, TestbedError
from taciturn.units import format_rate

__all__ = [
    "TCP_GOODPUT",
    "Capability",
    "Counters",
    "Description",
    "RankResult",
    "RunResult",
    "interface_counters",
]

TCP_GOODPUT = 1448 / 1514
"""Share of a link's rate left for payload at MTU 1500: 20 bytes of IP, 20 of TCP and 12 of its
timestamps are in the 1500, and the token bucket also counts 14 of Ethernet."""


@dataclass(frozen=True)
class Capability:
    """What this machine allows this user.

    Attributes:
        shaped: links with a set rate can be made.
        reason: why not, or how.
        privileged: no user namespace was needed.
        delay: links can be given a delay and a loss (the kernel has netem).
    """

    shaped: bool
    reason: str
    privileged: bool
    delay: bool


@dataclass(frozen=True)
class Description:
    """The network that a testbed made, for the record beside a result.

    Attributes:
        ranks: number of ranks.
        shaped: some link has a limit.
        namespaces: each rank has a namespace; False on loopback.
        up: rate of each rank's uplink in bits per second; None is not limited.
        down: the same for the downlinks.
        mtu: bytes of an IP packet; 65536 on loopback.
        delay_s: one-way delay between two ranks.
        loss: share of packets lost between two ranks.
        congestion_control: TCP's algorithm between the ranks; "" if unknown.
        privileged: no user namespace was needed.
        netem: the kernel could have given a delay.
    """

    ranks: int
    shaped: bool
    namespaces: bool
    up: tuple[int | None, ...]
    down: tuple[int | None, ...]
    mtu: int
    delay_s: float
    loss: float
    congestion_control: str
    privileged: bool
    netem: bool

    def __str__(self) -> str:
        if not self.namespaces:
            return f"{self.ranks} ranks on loopback; the link is not shaped"
        parts = [
            f"{self.ranks} ranks in network namespaces",
            f"{_rates(self.up)} up and {_rates(self.down)} down",
        ]
        if self.delay_s:
            parts.append(f"{self.delay_s * 1e3:g} ms delay")
        if self.loss:
            parts.append(f"{self.loss:.3g} of the packets lost")
        parts.append(f"MTU {self.mtu}")
        parts.append(f"TCP {self.congestion_control or 'unknown'}")
        if not self.netem:
            parts.append("no delay or loss (this kernel has no netem)")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        rank: which.
        returncode: its exit status; minus the number of the signal that killed it.
        seconds: from the start of the run.
        stopped: the testbed ended it: another rank had failed, time was up, or Ctrl-C.
        stdout: what it wrote, with ``output="capture"``; otherwise None.
        stderr: the same for its errors.
    """

    rank: int
    returncode: int
    seconds: float
    stopped: bool
    stdout: str | None = None
    stderr: str | None = None

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"rank {self.rank} ended with status {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"rank {self.rank} was killed by {name}"


@dataclass(frozen=True)
class RunResult(Sequence[RankResult]):
    """How a run ended: a sequence of one result per rank, in the ranks' order.

    Attributes:
        ranks: the results.
        first_failure: the rank that failed first by itself; None if none did.
        timed_out: the run's time was over before the ranks were done.
        seconds: duration of the run.
    """

    ranks: tuple[RankResult, ...]
    first_failure: RankResult | None
    timed_out: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Every rank ended by itself with status 0."""
        return not self.timed_out and all(
            one.returncode == 0 and not one.stopped for one in self.ranks
        )

    @property
    def exit_code(self) -> int:
        """For a shell: the first failing rank's status or 128 + its signal, 124 for time over."""
        failed = self.first_failure
        if failed is None:
            return 124 if self.timed_out else 0 if self.ok else 1
        return failed.returncode if failed.returncode > 0 else 128 - failed.returncode

    def check(self) -> Self:
        """Return self if all is well.

        Raises:
            TestbedError: a rank failed or time was up; the message names the rank and how it ended.
        """
        if self.ok:
            return self
        raise TestbedError(str(self))

    def __str__(self) -> str:
        failed = self.first_failure
        if failed is not None:
            tail = (failed.stderr or "").strip().splitlines()[-1:]
            stopped = sum(one.stopped for one in self.ranks)
            others = f"; {stopped} other ranks were stopped" if stopped else ""
            return f"{failed} after {failed.seconds:.1f} s{others}" + "".join(
                f": {line}" for line in tail
            )
        if self.timed_out:
            late = [one.rank for one in self.ranks if one.stopped]
            return f"time was up after {self.seconds:.1f} s; still running: ranks {late}"
        return f"{len(self.ranks)} ranks ended after {self.seconds:.1f} s"

    @overload
    def __getitem__(self, index: int) -> RankResult: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankResult, ...]: ...
    def __getitem__(self, index: int | slice) -> RankResult | tuple[RankResult, ...]:
        return self.ranks[index]

    def __len__(self) -> int:
        return len(self.ranks)


class Counters(NamedTuple):
    """Totals of a network interface since it was made.

    A packet that TCP hands down whole and the link cuts later counts once, so that the bytes lie
    between the payload and the payload / TCP_GOODPUT.
    """

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


def interface_counters(name: str = "eth0") -> Counters:
    """The counters of this process's own interface; call it inside a rank.

    An independent check of what a program believes to have sent: everything is in it, the store's
    traffic and acknowledgements included.

    Raises:
        InputError: this process sees no such interface.
    """
    names = []
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        interface, _, values = line.partition(":")
        names.append(interface.strip())
        if names[-1] == name:
            fields = [int(value) for value in values.split()]
            return Counters(fields[8], fields[0], fields[9], fields[1])
    raise InputError(f"no network interface {name!r} here; there are {', '.join(names)}")


def _rates(rates: tuple[int | None, ...]) -> str:
    if len(set(rates)) == 1:
        return format_rate(rates[0])
    return "/".join(format_rate(rate) for rate in rates)

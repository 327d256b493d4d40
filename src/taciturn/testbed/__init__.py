"""Ranks on an emulated network: every rank has a link of its own with a set rate.

::

    with Testbed(ranks=8, rate=parse_rate("200mbit")) as testbed:
        result = testbed.run(["python", "train.py"], timeout_s=600)
    result.check()

Each rank is a host of its own: a network namespace with loopback, an ``eth0``, a token bucket on
what it sends and another on what it receives, all on one switch. The ranks get torchrun's
environment variables, and the launcher's side holds the TCPStore, so that it outlives any rank.
Works on Linux for root and, where unprivileged user namespaces are allowed, for everybody; nothing
of it is visible outside, and the kernel removes it with the process that owns it, also after
SIGKILL. ``run_local`` is the same on plain loopback, where the link is not shaped.

Limits: delay and loss need the kernel's netem, which is not always there (``capability().delay``).
All ranks share this machine's cores, and what they spend on the network comes out of them: at 1
Gbit/s and 8 ranks two cores are the limit, not the link. ``/sys`` shows the machine's interfaces,
not the rank's, and an ordinary user's ranks take themselves for root.
"""

from __future__ import annotations

from taciturn.testbed.launcher import (
    Testbed,
    capability,
    run_command,
    run_local,
)
from taciturn.testbed.results import (
    TCP_GOODPUT,
    Capability,
    Counters,
    Description,
    RankResult,
    RunResult,
    interface_counters,
)
from taciturn.testbed.running import Output, Running
from taciturn.testbed.supervisor import EXITED_KEY

__all__ = [
    "EXITED_KEY",
    "TCP_GOODPUT",
    "Capability",
    "Counters",
    "Description",
    "Output",
    "RankResult",
    "RunResult",
    "Running",
    "Testbed",
    "capability",
    "interface_counters",
    "run_command",
    "run_local",
]

"""Network namespaces and shaped links, on Linux; imported only by the process that owns them.

``isolate()`` moves the calling process out of the machine's network, as root or, through a user
namespace, as anybody. ``build(plan)`` then makes this picture, all of it invisible outside and
removed by the kernel when the last process inside ends::

        rank 0              rank 1                      one namespace per rank, loopback up
     eth0 10.77.0.2      eth0 10.77.0.3
       | tbf: uplink       | tbf: uplink
       |                   |
       | tbf: downlink     | tbf: downlink
      port0              port1
    ------- bridge 10.77.0.1 ---------                  the store is held here

Links and queues are set through pyroute2 (rtnetlink), so neither ``ip`` nor ``tc`` is needed.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taciturn.errors import TestbedError

__all__ = [
    "MAX_RATE",
    "NETWORK",
    "Network",
    "Plan",
    "address",
    "build",
    "isolate",
    "join",
    "kill_with_parent",
]

NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
MAX_RATE = 8 * (2**32 - 1)  # bits per second; the token bucket's rate is a 32-bit number of bytes

# From linux/sched.h, linux/mount.h and linux/prctl.h: the standard library of 3.11 has none.
_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Plan:
    """What to build.

    Attributes:
        up: rate of each rank's uplink in bits per second; None is not limited.
        down: the same for the downlinks.
        mtu: bytes of an IP packet.
        delay_s: one-way delay between two ranks, by netem.
        loss: share of the packets lost on the way, by netem.
        packet_s: seconds of a link's rate that TCP hands down as one packet, to be cut later; by
            default what Linux aims at. More is cheaper (8 ranks at 1 Gbit/s fit on two cores) and
            coarser.
        burst_s: seconds of a link's rate that its bucket holds; more forgives a late timer, and
            lets more of a message through at once.
        queue_s: seconds of a link's rate that wait in its queue before packets are dropped.
    """

    up: tuple[int | None, ...]
    down: tuple[int | None, ...]
    mtu: int = 1500
    delay_s: float = 0.0
    loss: float = 0.0
    packet_s: float = 0.001
    burst_s: float = 0.0005
    queue_s: float = 0.05

    def packet_bytes(self, rate: int | None) -> int:
        """What TCP hands down at once: ``packet_s`` of the rate, from six segments to 32 kB.

        Below six the cores are the limit (measured: at one segment, 8 ranks fall to a half of 200
        Mbit/s); above 32 kB a message of 64 KiB would pass on the bucket's credit alone.
        """
        if rate is None:
            return 65536
        return max(self.mtu, min(32_000, max(9_000, round(rate / 8 * self.packet_s))))

    def burst_bytes(self, rate: int, down: bool = False) -> int:
        """What the bucket holds: ``burst_s`` of the rate up to 32 kB, at least one whole packet.

        Downlinks hold twice that: a flow that its uplink has paced then passes without a timer of
        its own, which saves the machine a third of its interrupts.
        """
        packet = self.packet_bytes(rate)
        headers = 66 * (packet // (self.mtu - 52) + 1)  # a segment's Ethernet, IP and TCP
        least = max(packet + headers, min(32_000, round(rate / 8 * self.burst_s)))
        return 2 * least if down else least

    def queue_bytes(self, rate: int) -> int:
        """Room for ``queue_s`` of traffic, and for a first window from every other rank."""
        return max(len(self.up) * 10 * (self.mtu + 14) + 2**18, round(rate / 8 * self.queue_s))


@dataclass(frozen=True)
class Network:
    """What was built: one namespace per rank and what the kernel allowed.

    Attributes:
        namespaces: open descriptors of the ranks' namespaces.
        outside: descriptor of the namespace that holds the bridge.
        congestion_control: TCP's algorithm inside; "" if it cannot be read.
        netem: the kernel can delay and drop packets.
    """

    namespaces: tuple[int, ...]
    outside: int
    congestion_control: str
    netem: bool


def address(rank: int | None) -> str:
    """The rank's address; None is the bridge, where the store listens."""
    return str(NETWORK[1 if rank is None else rank + 2])


def isolate() -> bool:
    """Leave the machine's network, mounts and process table; True if no user namespace was needed.

    The caller must have one thread and must fork: its child is process 1 of the new table, and
    the kernel kills everything inside when that child ends.

    Raises:
        TestbedError: the kernel or the container refuses; the message gives the reason.
    """
    spaces = _NEWNET | _NEWNS | _NEWPID
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call(_libc.unshare, spaces)
        return True
    except PermissionError:
        pass
    except OSError as error:
        raise TestbedError(_refusal(error)) from error
    try:
        _call(_libc.unshare, _NEWUSER | spaces)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise TestbedError(_refusal(error)) from error
    return False


def build(plan: Plan) -> Network:
    """Make the bridge, a namespace and a shaped link per rank. After ``isolate()``, in its child.

    Raises:
        TestbedError: the kernel refuses a part of it; the message says which and why.
    """
    _mount_proc()
    _name_hosts(len(plan.up))
    try:
        from pyroute2 import IPRoute, NetlinkError
    except ImportError as error:
        raise TestbedError(f"pyroute2 is missing ({error}); pip install pyroute2") from error
    try:
        return _build(plan, IPRoute)
    except NetlinkError as error:
        raise TestbedError(f"the kernel refuses to make the emulated links: {error}") from error
    except OSError as error:
        raise TestbedError(_refusal(error)) from error


def join(namespace: int) -> None:
    """Move this thread, and the processes that it starts from now on, into a network namespace."""
    _call(_libc.setns, namespace, _NEWNET)


def kill_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)


def _build(plan: Plan, route: Callable[[], Any]) -> Network:
    outside = _namespace()
    inside = tuple(_new_namespace() for _ in plan.up)
    join(outside)
    congestion_control = _settle()
    with route() as links:
        _up(links, "lo")
        links.link("add", ifname="bridge", kind="bridge", br_stp_state=0, br_mcast_snooping=0)
        bridge = _up(links, "bridge", mtu=plan.mtu)
        links.addr("add", index=bridge, address=address(None), prefixlen=NETWORK.prefixlen)
        for rank, namespace in enumerate(inside):
            peer = {"ifname": "eth0", "net_ns_fd": namespace}
            links.link("add", ifname=f"port{rank}", kind="veth", peer=peer)
            port = _up(links, f"port{rank}", mtu=plan.mtu, master=bridge)
            # The delay comes first: a packet waits, then takes its turn on the link.
            delayed = _delay(links, port, plan.delay_s, plan.loss)
            _shape(links, port, plan, plan.down[rank], parent=delayed, down=True)
        netem = bool(plan.delay_s or plan.loss) or _has_netem(links, bridge)
    for rank, namespace in enumerate(inside):
        join(namespace)
        _settle()
        with route() as links:
            _up(links, "lo")
            eth0 = _up(links, "eth0", mtu=plan.mtu, gso_max_size=plan.packet_bytes(plan.up[rank]))
            links.addr("add", index=eth0, address=address(rank), prefixlen=NETWORK.prefixlen)
            _shape(links, eth0, plan, plan.up[rank])
    join(outside)
    return Network(inside, outside, congestion_control, netem)


def _up(links: Any, name: str, **settings: int) -> int:
    index: int = links.link_lookup(ifname=name)[0]
    links.link("set", index=index, state="up", **settings)
    return index


def _shape(
    links: Any,
    index: int,
    plan: Plan,
    rate: int | None,
    parent: int | None = None,
    down: bool = False,
) -> None:
    """Token bucket of ``rate`` bits per second on what leaves the interface."""
    if rate is None:
        return
    bucket = {
        "rate": max(1, rate // 8),
        "burst": plan.burst_bytes(rate, down),
        "limit": plan.queue_bytes(rate),
    }
    where = {} if parent is None else {"parent": parent}
    links.tc("add", "tbf", index, handle=0x20000, **bucket, **where)


def _delay(links: Any, index: int, delay_s: float, loss: float) -> int | None:
    """Delay and loss on what leaves the interface; the class below it, None without either."""
    from pyroute2 import NetlinkError

    if not delay_s and not loss:
        return None
    try:
        links.tc(
            "add",
            "netem",
            index,
            handle=0x10000,
            delay=round(delay_s * 1e6),
            loss=loss * 100,
            limit=10**5,
        )
    except NetlinkError as error:
        if error.code == errno.ENOENT:
            raise TestbedError(
                "this kernel has no netem (module sch_netem), so a link can have no delay and no "
                "loss: leave them out"
            ) from error
        raise
    return 0x10001


def _has_netem(links: Any, index: int) -> bool:
    """Try it for real, on an interface that carries nothing yet."""
    from pyroute2 import NetlinkError

    try:
        links.tc("add", "netem", index, handle=0x10000, delay=1000)
        links.tc("del", index=index, handle=0x10000)
    except NetlinkError:
        return False
    return True


def _settle() -> str:
    """Defined TCP behaviour in this namespace, as far as the kernel permits; the algorithm in use.

    Without it the namespace has the host's algorithm (perhaps bbr, which paces by itself) or the
    memory of earlier connections' windows, and IPv6 sends packets of its own that the counters see.
    """
    sysctl = Path("/proc/sys/net")
    for name in (
        "ipv6/conf/all/disable_ipv6",
        "ipv6/conf/default/disable_ipv6",
        "ipv4/tcp_no_metrics_save",
    ):
        with suppress(OSError):
            (sysctl / name).write_text("1")
    algorithm = sysctl / "ipv4/tcp_congestion_control"
    for name in ("cubic", "reno"):
        with suppress(OSError):
            algorithm.write_text(name)
            break
    try:
        return algorithm.read_text().strip()
    except OSError:
        return ""


def _mount_proc() -> None:
    """A /proc that fits the new process table; containers that hide parts of /proc forbid it."""
    _call(_libc.mount, b"none", b"/", None, _REC | _PRIVATE, None)
    with suppress(OSError):
        _call(_libc.mount, b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)


def _name_hosts(ranks: int) -> None:
    """Give addresses names: c10d looks up its peers', and without one it waits and warns.

    Each also as IPv6 writes it, since c10d's sockets are of that family, but under another name:
    looking the name up gives the plain address.
    """
    named = {"switch": address(None)} | {f"rank{rank}": address(rank) for rank in range(ranks)}
    hosts = Path("/etc/hosts")
    with suppress(OSError), tempfile.NamedTemporaryFile("w") as names:
        names.write(hosts.read_text() + "\n")
        names.writelines(f"{at} {name}\n::ffff:{at} {name}.v6\n" for name, at in named.items())
        names.flush()
        os.fchmod(names.fileno(), 0o644)
        _call(_libc.mount, names.name.encode(), bytes(hosts), None, _BIND, None)


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _new_namespace() -> int:
    _call(_libc.unshare, _NEWNET)
    return _namespace()


def _call(function: Any, *arguments: object) -> None:
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), function.__name__)


def _refusal(error: OSError) -> str:
    """Why the kernel says no, with the switch that decides it where there is one."""
    switches = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "user namespaces are for root only"),
        "/proc/sys/user/max_user_namespaces": ("0", "user namespaces are switched off"),
        "/proc/sys/user/max_net_namespaces": ("0", "network namespaces are switched off"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "AppArmor restricts user namespaces",
        ),
    }
    causes = []
    for path, (value, meaning) in switches.items():
        with suppress(OSError):
            if Path(path).read_text().strip() == value:
                causes.append(f"{meaning} ({path} is {value})")
    if not causes and error.errno in (errno.ENOSYS, errno.EINVAL):
        causes.append("the kernel has no namespaces")
    if not causes:
        causes.append("a container's or the kernel's policy forbids them")
    where = f"{error.filename}: " if error.filename else ""
    return f"no network namespace for this user: {where}{error.strerror}; {'; '.join(causes)}"

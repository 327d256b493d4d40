"""Send and receive between ranks: over ``torch.distributed``, or between threads of one process.

Both transports obey the same laws, tested over one table (``tests/test_transport.py``):

- Messages from one rank to another with one tag arrive in the order they were sent.
- A request is waited for exactly once; until then its tensor belongs to the transport.
- A dead, silent or failing rank becomes an error on every other rank within ``timeout_s``, and all
  ranks name the same culprit. In a ring only the successor notices, so each rank that fails posts a
  report to the store that the launcher holds and then closes its connections, which wakes its
  neighbours; the reports decide who is named.
- A transport that failed is finished: later calls raise at once. Make a new one.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
from taciturn.ledger import Ledger

__all__ = [
    "HEADER_BYTES",
    "DistributedTransport",
    "Header",
    "Request",
    "ThreadTransport",
    "Transport",
    "run_threads",
]

T = TypeVar("T")

HEADER_BYTES = 40
"""Size of the header that precedes the data of every collective: five 64-bit integers."""

_HEADER_TAG = 1 << 20  # far above any segment number
_BREAK_TAG = _HEADER_TAG + 1

# Shares of ``timeout_s``. A wait gives up early so that the reports of all ranks can be read and
# the error raised before the time-out that the caller was promised.
_WAIT_SHARE = 0.8
_REPORT_SHARE = 0.15
_REPORT_MAX_S = 3.0


@dataclass(frozen=True)
class Header:
    """What the ranks must agree on before data moves."""

    method: str
    """The collective with its parameters; compared by checksum."""
    numel: int
    dtype: str
    layout: int = 0
    """0 for contiguous memory, else a checksum of shape and strides: memory order must agree."""
    call: int = 0
    """Number of the call on this transport."""

    def encode(self) -> torch.Tensor:
        """Return the header as an int64 tensor, shape (5,)."""
        return torch.tensor(
            [
                zlib.crc32(self.method.encode()),
                self.numel,
                zlib.crc32(self.dtype.encode()),
                self.layout,
                self.call,
            ],
            dtype=torch.int64,
        )

    def difference(self, other: torch.Tensor, rank: int, peer: int) -> str | None:
        """Say how ``peer``'s encoded header differs from this rank's; None where they agree."""
        theirs: list[int] = other.tolist()
        mine: list[int] = self.encode().tolist()
        if mine == theirs:
            return None
        if mine[1] != theirs[1]:
            what = f"rank {rank} brings {mine[1]} elements, rank {peer} brings {theirs[1]}"
        elif mine[2] != theirs[2]:
            names = {zlib.crc32(str(d).encode()): str(d) for d in _DTYPES}
            their_dtype = names.get(theirs[2], "another dtype")
            what = f"rank {rank} brings {self.dtype}, rank {peer} brings {their_dtype}"
        elif mine[3] != theirs[3]:
            what = f"ranks {rank} and {peer} hold their elements in different memory order"
        elif mine[0] != theirs[0]:
            what = f"rank {rank} runs {self.method!r}, rank {peer} runs another method"
        else:
            what = f"rank {rank} is at call {mine[4]}, rank {peer} at call {theirs[4]}"
        return (
            f"the ranks do not agree on this all-reduce: {what}. No data passed between them. "
            "Every rank must bring the same buffers to the same calls in the same order"
        )


_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


class Request(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Block until the message has left (send) or arrived (receive).

        Must be called exactly once: waiting twice on a gloo send hangs for ever.

        Raises:
            PeerError: a rank died, went silent or failed.
        """


class Transport(ABC):
    """What collectives are written against. ``rank`` counts within the group of ``size`` ranks.

    Attributes:
        rank: this rank's number in the group.
        size: number of ranks in the group.
        ledger: counts of everything sent through this transport.
        round: round of the collective under way, for error messages; set by the collectives.
        calls: collectives begun on this transport; the same on every rank.
        batched: every round's sends and receives should be posted together (NCCL).
        header_device: where headers must live.
    """

    rank: int
    size: int
    batched: bool = False
    header_device: torch.device = torch.device("cpu")

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.round = 0
        self.calls = 0

    @abstractmethod
    def post(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        """Start sends and receives; each is (contiguous tensor, peer rank, tag).

        Returns the requests of the sends and of the receives. On a batched transport they are one
        batch; give it a round's sends and receives together.
        """

    @abstractmethod
    def fail(self, error: Exception) -> NoReturn:
        """Tell every rank that this one cannot go on, then raise ``error`` here.

        The transport is finished on all ranks afterwards.
        """

    def agree(self, header: Header, successors: Sequence[int], predecessors: Sequence[int]) -> None:
        """Exchange headers with the peers of the coming collective before any of its data.

        A send without its receive moves nothing, and the receive of the data is posted only after
        this returns: a disagreement is found before data moves.

        Raises:
            MismatchError: on every rank, if any two of them disagree.
        """
        mine = header.encode().to(self.header_device)
        theirs = [torch.empty_like(mine) for _ in predecessors]
        sends, receives = self.post(
            [(mine, peer, _HEADER_TAG) for peer in successors],
            [(t, peer, _HEADER_TAG) for t, peer in zip(theirs, predecessors, strict=True)],
        )
        for request in receives:
            request.wait()
        for peer, other in zip(predecessors, theirs, strict=True):
            difference = header.difference(other, self.rank, peer)
            if difference is not None:
                self.fail(MismatchError(difference))
        for request in sends:
            request.wait()


# ---------------------------------------------------------------------------------------------
# over torch.distributed


class _DistributedRequest:
    """One ``Work`` of torch.distributed, waited for exactly once."""

    def __init__(
        self, transport: DistributedTransport, work: Any, peer: int, received_bytes: int
    ) -> None:
        self._transport = transport
        self._work = work
        self._peer = peer
        self._received_bytes = received_bytes

    def wait(self) -> None:
        work, self._work = self._work, None
        assert work is not None, "a request is waited for exactly once"
        transport = self._transport
        try:
            with transport.ledger.waiting():
                work.wait(transport.wait_timeout)
        except RuntimeError as error:  # gloo and NCCL raise nothing more precise
            transport.lost(self._peer, error)
        transport.ledger.received(self._received_bytes)


class DistributedTransport(Transport):
    """Point-to-point messages of ``torch.distributed`` (gloo, NCCL, whatever registers).

    Uses a process group of its own with the members of ``group``, so that its messages never mix
    with the caller's and the caller's group survives a failure. Creating it is a collective call
    of all members of ``group``.

    Args:
        group: the ranks that take part; the default group if None. Ranks are counted within it.
        timeout_s: every failure is an error on every rank within this many seconds.

    Raises:
        InputError: torch.distributed is not initialised, this rank is not in ``group``, or the
            time-out is not positive.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: call init_process_group first, "
                "or start the program with torchrun"
            )
        if not timeout_s > 0:
            raise InputError(f"timeout_s={timeout_s!r} must be positive")
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        if dist.get_rank() not in members:
            raise InputError(
                f"rank {dist.get_rank()} is not a member of this group of ranks {members}"
            )
        backend = dist.get_backend(group)
        self.timeout_s = timeout_s
        self.wait_timeout = timedelta(seconds=timeout_s * _WAIT_SHARE)
        self.members = members
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self.batched = backend == "nccl"
        # Members number their transports themselves, so that other ranks need not know of them.
        key = tuple(members)
        number = DistributedTransport._made[key]
        DistributedTransport._made[key] += 1
        prefix = f"taciturn/{'-'.join(map(str, members))}/{number}"
        self._store = dist.PrefixStore(f"{prefix}/reports", _launcher_store())
        timeout = timedelta(seconds=timeout_s)
        if backend == "gloo":
            # Made directly: new_group names groups by what each rank has made and destroyed
            # before, so ranks with different pasts wait for each other for ever.
            store = dist.PrefixStore(f"{prefix}/gloo", _launcher_store())
            self.group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        else:
            self.group = dist.new_group(
                members, timeout=timeout, backend=backend, use_local_synchronization=True
            )
        if self.batched:
            self.header_device = torch.device("cuda", torch.cuda.current_device())
        self._failure: TaciturnError | None = None

    def post(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        if self._failure is not None:
            raise self._failure
        works: list[Any] = []
        try:
            if self.batched:
                operations = [
                    dist.P2POp(dist.irecv, t, self.members[peer], self.group)
                    for t, peer, _ in receives
                ] + [
                    dist.P2POp(dist.isend, t, self.members[peer], self.group)
                    for t, peer, _ in sends
                ]
                works = dist.batch_isend_irecv(operations) if operations else []
                # NCCL coalesces a batch into one work, and its wait may be repeated.
                if works and len(works) < len(operations):
                    works = [works[0]] * len(operations)
            else:
                # Through the group's own method: dist.isend checks and translates per call, which
                # costs as much as a short message.
                works = [self.group.recv([t], peer, tag) for t, peer, tag in receives]
                for t, peer, tag in sends:
                    works.append(self.group.send([t], peer, tag))
        except RuntimeError as error:
            done = len(works)
            peers = [peer for _, peer, _ in [*receives, *sends]]
            self.lost(peers[min(done, len(peers) - 1)], error)
        for t, _, _ in sends:
            self.ledger.sent(t.nbytes)
        split = len(receives)
        received: list[Request] = [
            _DistributedRequest(self, work, peer, t.nbytes)
            for work, (t, peer, _) in zip(works[:split], receives, strict=True)
        ]
        sent: list[Request] = [
            _DistributedRequest(self, work, peer, 0)
            for work, (_, peer, _) in zip(works[split:], sends, strict=True)
        ]
        return sent, received

    def backend_all_reduce(self, flat: torch.Tensor) -> None:
        """Sum ``flat`` over the ranks in place with the backend's own algorithm, uncounted.

        Raises:
            PeerError: a rank died, went silent or failed.
        """
        if self._failure is not None:
            raise self._failure
        try:
            with self.ledger.waiting():
                self.group.allreduce([flat]).wait()
        except RuntimeError as error:
            self.lost((self.rank - 1) % self.size, error)

    def close(self) -> None:
        """End this transport and its connections. Call it on every rank, after its last use."""
        if self._failure is None:
            self._failure = PeerError("this transport is closed; make a new one")
        self.group = None

    # -- failure

    def fail(self, error: Exception) -> NoReturn:
        if self._failure is not None:
            raise error
        kind = "mismatch" if isinstance(error, MismatchError) else "error"
        self._report(kind, str(error), suspect=None)
        if isinstance(error, MismatchError):
            raise self._settle() from None
        self._failure = PeerError(f"this transport failed: {error}. Make a new one")
        raise error

    def lost(self, peer: int, cause: Exception) -> NoReturn:
        """Raise the error for a ``peer`` that did not answer, agreed with the other ranks."""
        if self._failure is not None:
            raise self._failure
        silent = "Timed out" in str(cause) or "timeout" in str(cause).lower()
        self._report("silent" if silent else "closed", str(cause), suspect=peer)
        raise self._settle() from cause

    def _report(self, kind: str, text: str, suspect: int | None) -> None:
        """Post this rank's report, then close its connections, which wakes its neighbours."""
        report = {
            "kind": kind,
            "text": text,
            "suspect": suspect,
            "call": self.calls,
            "round": self.round,
        }
        try:
            self._store.set(f"report/{self.rank}", json.dumps(report))
        except RuntimeError:
            pass  # the store died with its holder; _settle says so
        if isinstance(self.group, dist.ProcessGroupGloo) and self.size > 1:
            # Gloo closes every connection of a group in which a wait timed out. That is the one way
            # to wake ranks that wait for this one.
            peer = (self.rank + 1) % self.size
            try:
                work = self.group.recv([torch.empty(1)], peer, _BREAK_TAG)
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass

    def _settle(self) -> TaciturnError:
        """Read the reports until they tell who is to blame; the first verdict is everyone's."""
        deadline = time.monotonic() + min(self.timeout_s * _REPORT_SHARE, _REPORT_MAX_S)
        try:
            reports: dict[int, dict[str, Any]] = {}
            while True:
                for rank in range(self.size):
                    key = f"report/{rank}"
                    if rank not in reports and self._store.check([key]):
                        reports[rank] = json.loads(self._store.get(key))
                if self._store.check(["verdict"]):
                    break
                stated = any(r["kind"] in ("error", "mismatch") for r in reports.values())
                if stated or len(reports) == self.size or time.monotonic() > deadline:
                    verdict = json.dumps(_verdict(reports, self.size, self.timeout_s))
                    self._store.compare_set("verdict", "", verdict)
                    break
                time.sleep(0.01)
            verdict_ = json.loads(self._store.get("verdict"))
        except RuntimeError:
            verdict_ = {
                "kind": "peer",
                "ranks": [],
                "text": "a rank was lost, and with it the store that the ranks report to; "
                "the process that held it (usually rank 0) has probably died",
            }
        if verdict_["kind"] == "mismatch":
            self._failure = MismatchError(verdict_["text"])
        else:
            text = f"{verdict_['text']} (seen by rank {self.rank} in round {self.round})"
            self._failure = PeerError(text, verdict_["ranks"], self.round)
        return self._failure


def _launcher_store() -> dist.Store:
    """Return the store that the ranks met at; under torchrun the launcher holds it."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def _verdict(reports: dict[int, dict[str, Any]], size: int, timeout_s: float) -> dict[str, Any]:
    """Decide from the ranks' reports who is to blame. Pure, so that it can be tested."""
    for kind in ("mismatch", "error"):
        for rank in sorted(reports):
            if reports[rank]["kind"] == kind:
                text = reports[rank]["text"]
                if kind == "mismatch":
                    return {"kind": kind, "ranks": [rank], "text": text}
                return {"kind": "peer", "ranks": [rank], "text": f"rank {rank} failed: {text}"}
    missing = [rank for rank in range(size) if rank not in reports]
    closed = sorted(
        {r["suspect"] for r in reports.values() if r["kind"] == "closed"} & set(missing)
    )
    if closed:
        return {"kind": "peer", "ranks": closed, "text": f"{_ranks(closed)} died"}
    if missing:
        text = f"{_ranks(missing)} did not answer within {timeout_s:g} s: dead, stopped or far behind"
        return {"kind": "peer", "ranks": missing, "text": text}
    # Everyone reported: the one that got least far held up the others.
    least = min((r["call"], r["round"]) for r in reports.values())
    behind = [rank for rank, r in sorted(reports.items()) if (r["call"], r["round"]) == least]
    if len(behind) == size:
        return {
            "kind": "peer",
            "ranks": [],
            "text": f"no message arrived for {timeout_s:g} s, on any rank: the network is down, "
            "or timeout_s is too short for this size and rate",
        }
    text = f"{_ranks(behind)} held up the others for {timeout_s:g} s"
    return {"kind": "peer", "ranks": behind, "text": text}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ---------------------------------------------------------------------------------------------
# between threads


class _World:
    """What the threads of one run share: letters in flight and the first failure."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], list[_Letter]] = {}
        self.awaited: dict[tuple[int, int, int], list[_Letter]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.progress = [(0, 0)] * size
        self.done = [False] * size


class _Letter:
    """One side of a message between threads."""

    def __init__(self, transport: ThreadTransport, tensor: torch.Tensor, receives: bool) -> None:
        self._transport = transport
        self._receives = receives
        self.tensor = tensor
        self.delivered = False
        self.waited = False

    def wait(self) -> None:
        assert not self.waited, "a request is waited for exactly once"
        self.waited = True
        transport, world = self._transport, self._transport.world
        with transport.ledger.waiting(), world.changed:
            world.progress[transport.rank] = (transport.calls, transport.round)
            world.changed.wait_for(
                lambda: self.delivered or world.failure is not None, world.timeout_s * _WAIT_SHARE
            )
            if not self.delivered:
                transport.raise_failure()
        if self._receives:
            transport.ledger.received(self.tensor.nbytes)


class ThreadTransport(Transport):
    """Messages between the threads of :func:`run_threads`. Proves logic, not speed.

    A message is copied when both sides have posted it, as a network card would: changing a
    tensor before its send was waited for is seen by the receiver, so such mistakes fail tests.
    """

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__()
        self.world = world
        self.rank = rank
        self.size = world.size

    def post(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        world = self.world
        sent: list[Request] = []
        received: list[Request] = []
        with world.changed:
            if world.failure is not None:
                self.raise_failure()
            for tensor, peer, tag in receives:
                letter = _Letter(self, tensor, receives=True)
                world.awaited.setdefault((peer, self.rank, tag), []).append(letter)
                received.append(letter)
                self._match((peer, self.rank, tag))
            for tensor, peer, tag in sends:
                letter = _Letter(self, tensor, receives=False)
                self.ledger.sent(tensor.nbytes)
                world.sent.setdefault((self.rank, peer, tag), []).append(letter)
                sent.append(letter)
                self._match((self.rank, peer, tag))
        return sent, received

    def _match(self, key: tuple[int, int, int]) -> None:
        world = self.world
        sent, awaited = world.sent.get(key), world.awaited.get(key)
        while sent and awaited:
            letter, place = sent.pop(0), awaited.pop(0)
            assert letter.tensor.nbytes == place.tensor.nbytes, (
                f"rank {key[0]} sends {letter.tensor.nbytes} bytes, rank {key[1]} expects "
                f"{place.tensor.nbytes}"
            )
            place.tensor.view(-1).view(torch.uint8).copy_(letter.tensor.view(-1).view(torch.uint8))
            letter.delivered = place.delivered = True
            world.changed.notify_all()

    def fail(self, error: Exception) -> NoReturn:
        with self.world.changed:
            if self.world.failure is None:
                self.world.failure = (self.rank, error)
            self.world.changed.notify_all()
        raise error

    def raise_failure(self) -> NoReturn:
        """Raise the world's first failure; a time-out becomes one. Call it with the lock held."""
        world = self.world
        if world.failure is None:
            behind = min(
                (rank for rank in range(world.size) if rank != self.rank),
                key=lambda rank: world.progress[rank],
            )
            text = f"rank {behind} did not answer within {world.timeout_s:g} s"
            world.failure = (behind, PeerError(text, [behind], self.round))
            world.changed.notify_all()
        rank, cause = world.failure
        if isinstance(cause, MismatchError):
            raise MismatchError(str(cause)) from None
        if isinstance(cause, PeerError):
            raise PeerError(str(cause), cause.ranks, self.round) from None
        raise PeerError(f"rank {rank} failed: {cause}", [rank], self.round) from None


def run_threads(
    size: int, function: Callable[[Transport], T], timeout_s: float = 60.0
) -> list[T]:
    """Run ``function(transport)`` on ``size`` threads, one rank each; return results by rank.

    Fails fast: the first exception of a rank ends the waits of all others and is raised here.

    Args:
        size: number of ranks, 1 to 64.
        function: what each rank does.
        timeout_s: a rank that waits longer than this for another raises PeerError.
    """
    if not 1 <= size <= 64:
        raise InputError(f"size={size}: between 1 and 64 threads can play ranks")
    world = _World(size, timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def play(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(world, rank))
        except BaseException as error:
            errors[rank] = error
            with world.changed:
                if world.failure is None:
                    world.failure = (rank, error)
                world.changed.notify_all()

    threads = [
        threading.Thread(target=play, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and world.failure is None:
            thread.join(0.05)
    for thread in threads:  # after a failure, one that never answers is left behind
        thread.join(timeout_s * _REPORT_SHARE if world.failure is not None else None)
    if world.failure is not None:
        first, cause = world.failure
        own = errors[first]
        raise own if own is not None else cause
    return results

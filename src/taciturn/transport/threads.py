"""Messages between threads of one process: many ranks, no network. Proves logic, not speed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from typing_extensions import override

from taciturn.ranges import check_number, check_whole
from taciturn.transport.base import LONGEST_TIMEOUT_S, Request, Transport
from taciturn.transport.reports import (
    REPORT_SHARE,
    WAIT_SHARE,
    Verdict,
    decide,
    error_of,
    report_of,
)

__all__ = ["ThreadTransport", "run_threads"]

T = TypeVar("T")


class _World:
    """What the threads of one run share: letters in flight and the first failure."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], list[_Letter]] = {}
        self.awaited: dict[tuple[int, int, int], list[_Letter]] = {}
        self.failure: Verdict | None = None
        self.cause: BaseException | None = None
        self.progress = [(0, 0)] * size

    def fail(self, rank: int, error: BaseException) -> None:
        """Note that ``rank`` cannot go on, unless another could not before it, and wake all."""
        with self.changed:
            if self.failure is None:
                reports = {rank: report_of(error, *self.progress[rank])}
                self.failure = decide(reports, self.size, self.timeout_s)
                self.cause = error
            self.changed.notify_all()


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
                lambda: self.delivered or world.failure is not None, world.timeout_s * WAIT_SHARE
            )
            if not self.delivered:
                transport.raise_failure()
        if self._receives:
            transport.ledger.received_bytes += self.tensor.nbytes


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

    @override
    def send(self, message: torch.Tensor, peer: int, tag: int) -> Request:
        return self._put(self.world.sent, (self.rank, peer, tag), message)

    @override
    def receive(self, place: torch.Tensor, peer: int, tag: int) -> Request:
        return self._put(self.world.awaited, (peer, self.rank, tag), place)

    @override
    def _post_batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        raise AssertionError("threads post one by one")

    def _put(
        self,
        letters: dict[tuple[int, int, int], list[_Letter]],
        key: tuple[int, int, int],
        tensor: torch.Tensor,
    ) -> Request:
        world = self.world
        receives = letters is world.awaited
        letter = _Letter(self, tensor, receives)
        with world.changed:
            if world.failure is not None:
                self.raise_failure()
            letters.setdefault(key, []).append(letter)
            if not receives:
                self.ledger.sent(tensor.nbytes)
            self._match(key)
        return letter

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

    @override
    def fail(self, error: Exception) -> NoReturn:
        self.world.fail(self.rank, error)
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
            world.failure = {"kind": "peer", "ranks": [behind], "text": text}
            world.cause = error_of(world.failure, self.rank, self.round)
            world.changed.notify_all()
        raise error_of(world.failure, self.rank, self.round) from None


def run_threads(size: int, function: Callable[[Transport], T], timeout_s: float = 60.0) -> list[T]:
    """Run ``function(transport)`` on ``size`` threads, one rank each; return results by rank.

    Fails fast: the first exception of a rank ends the waits of all others and is raised here.

    Args:
        size: number of ranks, 1 to 64.
        function: what each rank does.
        timeout_s: a rank that waits longer than this for another raises PeerError.
    """
    check_whole("size", size, 1, 64, hint="threads that play ranks")
    check_number("timeout_s", timeout_s, 0, LONGEST_TIMEOUT_S, above=True)
    world = _World(size, timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def play(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(world, rank))
        except BaseException as error:
            errors[rank] = error
            world.fail(rank, error)

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
        thread.join(timeout_s * REPORT_SHARE if world.failure is not None else None)
    if world.failure is not None:
        own = errors[world.failure["ranks"][0]]
        assert world.cause is not None
        raise own if own is not None else world.cause
    return results

"""What collectives are written against: messages between ranks, and the header they agree on."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch

from taciturn.errors import MismatchError
from taciturn.ledger import Ledger

__all__ = ["HEADER_BYTES", "HEADER_TAG", "LONGEST_TIMEOUT_S", "Header", "Request", "Transport"]

HEADER_BYTES = 40
"""Size of the header that precedes the data of every collective: five 64-bit integers."""

HEADER_TAG = 1 << 20
"""Tag of headers, far above any segment's number."""


LONGEST_TIMEOUT_S = 1e6
"""Eleven days. Backends count time-outs in whole nanoseconds, of which there are not many more."""


@dataclass(frozen=True)
class Header:
    """What the ranks must agree on before data moves."""

    method: str
    """The collective with its parameters, as a method is written; compared by checksum."""
    numel: int
    dtype: str
    layout: int = 0
    """0 for contiguous memory, else a checksum of shape and strides: memory order must agree."""
    call: int = 0
    """Number of the call on this transport."""
    state: str = ""
    """What else the method must agree on, in words; compared together with it."""

    def encode(self) -> torch.Tensor:
        """Return the header as an int64 tensor, shape (5,)."""
        return torch.tensor(
            [
                zlib.crc32(f"{self.method} {self.state}".encode()),
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
            what = f"rank {rank} runs {self.method!r}, rank {peer} another method"
            if self.state:
                what = f"{what}, or the same with another state than {self.state!r}"
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
    def send(self, message: torch.Tensor, peer: int, tag: int) -> Request:
        """Start sending a contiguous tensor to rank ``peer``."""

    @abstractmethod
    def receive(self, place: torch.Tensor, peer: int, tag: int) -> Request:
        """Start receiving into a contiguous tensor from rank ``peer``."""

    def post(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        """Start sends and receives; each is (contiguous tensor, peer rank, tag).

        Returns the requests of the sends and of the receives. On a batched transport they are one
        batch: give it a round's sends and receives together.
        """
        if self.batched:
            return self._post_batch(sends, receives)
        received = [self.receive(*receive) for receive in receives]
        return [self.send(*send) for send in sends], received

    @abstractmethod
    def _post_batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        """Post as one batch. Called only where ``batched`` is true."""

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
            [(mine, peer, HEADER_TAG) for peer in successors],
            [(t, peer, HEADER_TAG) for t, peer in zip(theirs, predecessors, strict=True)],
        )
        for request in receives:
            request.wait()
        for peer, other in zip(predecessors, theirs, strict=True):
            difference = header.difference(other, self.rank, peer)
            if difference is not None:
                self.fail(MismatchError(difference))
        for request in sends:
            request.wait()

"""The ring all-reduce, segment-pipelined, and the two halves it consists of.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
N ranks, buffer of n elements cut into N chunks: 2(N-1) rounds, 2(N-1)/N n elements sent by each
rank. Rank i ends the first half (reduce-scatter, N-1 rounds) as owner of the finished chunk i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from taciturn.collectives.base import (
    Collective,
    Cost,
    bounds,
    ceil_div,
    header_cost,
    real_numel,
)
from taciturn.collectives.pipeline import Chain, run_rounds, segments_for
from taciturn.errors import InputError
from taciturn.ranges import check_whole
from taciturn.transport import Header, Transport

__all__ = ["Ring", "all_gather", "reduce_scatter"]


@dataclass(eq=False)
class Ring(Collective):
    """Exact all-reduce in the buffer's own dtype: 2(N-1) rounds, 2(N-1)/N of the buffer sent.

    Args:
        segments: pieces of each message, pipelined; chosen from the message size if None.
    """

    segments: int | None = None

    name: ClassVar[str] = "ring"
    exact: ClassVar[bool] = True
    bit_identical: ClassVar[bool] = True
    mean_exact: ClassVar[bool] = True
    integers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_segments(self.segments)

    def _sum(
        self,
        flat: torch.Tensor,
        transport: Transport,
        header: Header,
        residual: torch.Tensor | None,  # noqa: ARG002 - nothing is rounded away
    ) -> None:
        size = transport.size
        neighbours = ring_neighbours(transport)
        transport.agree(header, *([n] for n in neighbours))
        segments = ring_segments(flat.numel(), flat.element_size(), size, self.segments)
        chain = _RingChain(flat, transport.rank, size, segments)
        run_rounds(chain, transport, 2 * (size - 1), segments, *neighbours)

    @override
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        numel, dtype = real_numel(numel, dtype)
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        segments = ring_segments(numel, dtype.itemsize, ranks, self.segments)
        lengths = ring_message_lengths(numel, ranks, rank, segments)
        messages, nbytes = header_cost()
        return Cost(
            rounds=2 * (ranks - 1),
            messages=messages + sum(1 for length in lengths if length),
            sent_bytes=nbytes + dtype.itemsize * sum(lengths),
            workspace_bytes=2 * ceil_div(numel, ranks) * dtype.itemsize,
        )


class _RingChain(Chain):
    """Chunks in place: a rank adds into its own chunk and sends from there."""

    def __init__(self, flat: torch.Tensor, rank: int, size: int, segments: int) -> None:
        self.rank, self.size = rank, size
        self.chunks = ring_chunks(flat, size, segments)
        longest = max(piece.numel() for piece in self.chunks[-1])
        # What arrives while the first half is under way; the receive of the next round is posted
        # while this round's message is added, hence two of each.
        self.arrivals = [[flat.new_empty(longest) for _ in range(segments)] for _ in range(2)]

    def piece(self, round: int, segment: int) -> torch.Tensor:
        """Return the piece that is received in ``round``: chunk i - t - 1 of rank i."""
        return self.chunks[(self.rank - round - 1) % self.size][segment]

    def first(self, segment: int) -> torch.Tensor:
        return self.piece(0, segment)

    def place(self, round: int, segment: int) -> torch.Tensor:
        piece = self.piece(round, segment)
        if round < self.size:
            return self.arrivals[round % 2][segment][: piece.numel()]
        return piece  # finished: it replaces ours

    def handle(self, round: int, segment: int) -> torch.Tensor:
        piece = self.piece(round, segment)
        if round < self.size:
            piece.add_(self.place(round, segment))
        return piece

    def settle(self, round: int, segment: int) -> None:
        pass  # all done in place


def reduce_scatter(flat: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Sum over ranks; this rank ends with chunk ``rank`` of the sum, returned as a view.

    N-1 rounds, (N-1)/N of the buffer sent. The rest of ``flat`` is left with partial sums.

    Args:
        flat: 1-D and contiguous, changed in place; chunks are :func:`bounds` of it.
        transport: the ranks that take part.
    """
    return _half(flat, transport, reduce=True)


def all_gather(flat: torch.Tensor, transport: Transport) -> None:
    """Copy chunk i of rank i into chunk i of every rank's ``flat``, in place.

    N-1 rounds, (N-1)/N of the buffer sent.
    """
    _half(flat, transport, reduce=False)


def _half(flat: torch.Tensor, transport: Transport, reduce: bool) -> torch.Tensor:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise InputError(f"a 1-D contiguous tensor is needed, got shape {tuple(flat.shape)}")
    size, rank = transport.size, transport.rank
    start, stop = bounds(flat.numel(), size)[rank]
    if size > 1:
        transport.calls += 1
        neighbours = ring_neighbours(transport)
        name = "reduce_scatter" if reduce else "all_gather"
        header = Header(name, flat.numel(), str(flat.dtype), call=transport.calls)
        transport.agree(header, *([n] for n in neighbours))
        segments = ring_segments(flat.numel(), flat.element_size(), size, None)
        chain = _RingChain(flat, rank, size, segments)
        first = 0 if reduce else size - 1
        run_rounds(_Shifted(chain, first), transport, size - 1, segments, *neighbours)
    return flat[start:stop]


class _Shifted(Chain):
    """A ring chain that begins after some of its rounds."""

    def __init__(self, chain: _RingChain, rounds: int) -> None:
        self.chain, self.rounds = chain, rounds

    def first(self, segment: int) -> torch.Tensor:
        return self.chain.piece(self.rounds, segment)

    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.chain.place(round + self.rounds, segment)

    def handle(self, round: int, segment: int) -> torch.Tensor:
        return self.chain.handle(round + self.rounds, segment)

    def settle(self, round: int, segment: int) -> None:
        self.chain.settle(round + self.rounds, segment)


def check_segments(segments: int | None) -> None:
    """Raise InputError unless ``segments`` is None or a usable number."""
    if segments is not None:
        check_whole("segments", segments, 1, 1024)


def ring_neighbours(transport: Transport) -> tuple[int, int]:
    """Return successor and predecessor in the plain ring order."""
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def ring_segments(numel: int, element_bytes: float, ranks: int, segments: int | None) -> int:
    """Return the number of segments of a ring over ``numel`` elements."""
    return segments_for(int(ceil_div(numel, ranks) * element_bytes), segments)


def ring_chunks(flat: torch.Tensor, ranks: int, segments: int) -> list[list[torch.Tensor]]:
    """Return the views [chunk][segment] of a buffer."""
    return [
        [flat[start + a : start + b] for a, b in bounds(stop - start, segments)]
        for start, stop in bounds(flat.numel(), ranks)
    ]


def ring_message_lengths(numel: int, ranks: int, rank: int, segments: int) -> list[int]:
    """Return the elements of every message that ``rank`` sends in the 2(N-1) rounds."""
    chunks = bounds(numel, ranks)
    lengths = []
    for step in range(2 * (ranks - 1)):
        start, stop = chunks[(rank - step - 1) % ranks]
        lengths += [b - a for a, b in bounds(stop - start, segments)]
    return lengths

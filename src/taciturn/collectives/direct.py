"""All-reduce by direct exchange: every rank sends every other its chunk, quantized once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from taciturn.collectives.pipeline import segments_for
from taciturn.collectives.quantized_ring import call_seed, counter_from
from taciturn.collectives.ring import check_segments, ring_chunks
from taciturn.collectives.wires import WIRES, Message, Rounding, Wire, make_wire
from taciturn.errors import InputError
from taciturn.ranges import check_whole
from taciturn.transport import Header, Request, Transport

__all__ = ["Direct"]


@dataclass(eq=False)
class Direct(Collective):
    """Reduce-scatter and all-gather in one hop each: two roundings in all, whatever the ranks.

    As many bytes as the ring on the same wire, over N - 1 connections at once: right on a switch
    whose ports are not oversubscribed. Its 2(N-1) rounds are in flight together, so that the
    latency is that of two messages. The owner of a chunk keeps the decoded copy of what it sends,
    so all ranks end with the same bits.

    Args:
        wire: format of the messages; fewer bits, fewer bytes, more error.
        block: elements that share a scale; larger saves bytes and adds error.
        rounding: "stochastic" is unbiased, with more variance than "nearest".
        segments: pieces of each chunk, so that one is gathered while others are summed; chosen
            from the message size if None.
        seed: of the stochastic rounding; each rank draws its own numbers.
    """

    wire: str = "int8"
    block: int = 128
    rounding: Rounding = "nearest"
    segments: int | None = None
    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    name: ClassVar[str] = "direct"
    bit_identical: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_segments(self.segments)
        check_whole("seed", self.seed, 0)
        if self.wire not in WIRES:
            raise InputError(f"wire={self.wire!r}: choose one of {', '.join(WIRES)}")
        make_wire(self.wire, torch.float32, block=self.block, rounding=self.rounding)

    def _wire(self, dtype: torch.dtype, device: torch.device | None, seed: int) -> Wire:
        return make_wire(
            self.wire, dtype, block=self.block, rounding=self.rounding, device=device, seed=seed
        )

    def _segments(self, numel: int, dtype: torch.dtype, ranks: int) -> int:
        message = self._wire(dtype, None, 0).nbytes(ceil_div(numel, ranks))
        return segments_for(message, self.segments)

    def _sum(
        self,
        flat: torch.Tensor,
        transport: Transport,
        header: Header,
        residual: torch.Tensor | None,
    ) -> None:
        size, rank = transport.size, transport.rank
        # Staggered, so that not all ranks send to the same one first.
        to = [(rank + step) % size for step in range(1, size)]
        from_ = [(rank - step) % size for step in range(1, size)]
        transport.agree(header, to, from_)
        wire = self._wire(flat.dtype, flat.device, call_seed(self.seed, rank, self._calls))
        self._calls += 1
        segments = self._segments(flat.numel(), flat.dtype, size)
        _DirectExchange(flat, wire, transport, to, from_, segments, residual).run()

    @override
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        numel, dtype = real_numel(numel, dtype)
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        wire = self._wire(dtype, None, 0)
        segments = self._segments(numel, dtype, ranks)
        chunks = bounds(numel, ranks)
        own = chunks[rank][1] - chunks[rank][0]
        lengths = [
            b - a
            for peer in range(ranks)
            if peer != rank
            for chunk in (chunks[peer][1] - chunks[peer][0], own)
            for a, b in bounds(chunk, segments)
        ]
        messages, nbytes = header_cost(ranks - 1)
        piece = ceil_div(ceil_div(numel, ranks), segments)
        chunk_bytes = segments * wire.nbytes(piece)
        return Cost(
            rounds=2 * (ranks - 1),
            messages=messages + sum(1 for length in lengths if length),
            sent_bytes=nbytes + sum(wire.nbytes(length) for length in lengths),
            workspace_bytes=(3 * (ranks - 1) + 1) * chunk_bytes,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = counter_from(state)


class _DirectExchange:
    """One call. Messages are tagged by segment, twice: sums to be formed, and finished."""

    def __init__(
        self,
        flat: torch.Tensor,
        wire: Wire,
        transport: Transport,
        to: list[int],
        from_: list[int],
        segments: int,
        residual: torch.Tensor | None,
    ) -> None:
        self.wire, self.transport, self.to, self.from_ = wire, transport, to, from_
        self.segments = segments
        self.chunks = ring_chunks(flat, transport.size, segments)
        self.own = self.chunks[transport.rank]
        self.errors = None if residual is None else ring_chunks(residual, transport.size, segments)
        self.sending: list[Request] = []

    def post(
        self,
        sends: list[tuple[torch.Tensor, int, int]],
        receives: list[tuple[torch.Tensor, int, int]],
    ) -> list[Request]:
        sent, received = self.transport.post(
            [s for s in sends if s[0].numel()], [r for r in receives if r[0].numel()]
        )
        self.sending += sent
        return received

    def run(self) -> None:
        transport, ledger, segments = self.transport, self.transport.ledger, self.segments
        transport.round = 1
        parts = [[self.wire.message(p.numel()) for _ in self.from_] for p in self.own]
        finished = [
            [self.wire.message(self.chunks[peer][k].numel()) for peer in self.from_]
            for k in range(segments)
        ]
        incoming = []
        for k in range(segments):
            receives = [(m.data, peer, k) for m, peer in zip(parts[k], self.from_, strict=True)]
            if not transport.batched:
                incoming.append(self.post([], receives))
            sends = []
            for peer in self.to:
                piece = self.chunks[peer][k]
                with ledger.codec():
                    message = self.wire.message(piece.numel())
                    self.encode(piece, message, peer, k)
                sends.append((message.data, peer, k))
                if not transport.batched:
                    self.post([sends.pop()], [])
            if transport.batched:
                incoming.append(self.post(sends, receives))
        gathering = []
        for k in range(segments):
            receives = [
                (m.data, peer, segments + k)
                for m, peer in zip(finished[k], self.from_, strict=True)
            ]
            if not transport.batched:
                gathering.append(self.post([], receives))
            total = self.sum_of(k, parts[k], incoming[k])
            sends = [(total.data, peer, segments + k) for peer in self.to]
            received = self.post(sends, receives if transport.batched else [])
            if transport.batched:
                gathering.append(received)
        ledger.rounds += len(self.to)
        transport.round = transport.size
        for k in range(segments):
            for request in gathering[k]:
                request.wait()
            with ledger.codec():
                for message, peer in zip(finished[k], self.from_, strict=True):
                    self.wire.decode(message, self.chunks[peer][k])
        ledger.rounds += len(self.to)
        for request in self.sending:
            request.wait()

    def encode(self, values: torch.Tensor, message: Message, chunk: int, segment: int) -> None:
        """Encode a piece of a chunk; each is rounded once here: on its way, or when finished."""
        if self.errors is None:
            self.wire.encode(values, message)
        else:
            self.wire.encode_with_error(values, message, self.errors[chunk][segment])

    def sum_of(self, segment: int, parts: list[Message], incoming: list[Request]) -> Message:
        """Return the message of the finished piece; the own piece becomes its decoded copy."""
        piece = self.own[segment]
        total = piece.to(self.wire.compute, copy=True)
        for index, part in enumerate(parts):
            if incoming:
                incoming[index].wait()
            with self.transport.ledger.codec():
                self.wire.accumulate(part, total)
        with self.transport.ledger.codec():
            message = self.wire.message(piece.numel())
            self.encode(total, message, self.transport.rank, segment)
            self.wire.decode(message, piece)
        return message

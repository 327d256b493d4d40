"""The ring all-reduce with narrow messages and bit-identical results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from typing_extensions import override

from taciturn.collectives.base import Collective, Cost, ceil_div, header_cost, real_numel
from taciturn.collectives.pipeline import Chain, run_rounds
from taciturn.collectives.ring import (
    check_segments,
    ring_chunks,
    ring_message_lengths,
    ring_neighbours,
    ring_segments,
)
from taciturn.collectives.wires import WIRES, Message, Rounding, Wire, make_wire
from taciturn.errors import InputError
from taciturn.ranges import check_whole
from taciturn.transport import Header, Transport

__all__ = ["QuantizedRing"]


@dataclass(eq=False)
class QuantizedRing(Collective):
    """Ring all-reduce whose messages are bf16, fp16, or block-scaled int8 or int4.

    Each hop decodes, adds its own chunk in fp32 and encodes again: N - 1 roundings of partial sums.
    The owner of a finished chunk keeps the decoded copy of what it sends, never its own exact sum,
    so all ranks end with the same bits.

    Args:
        wire: format of the messages; fewer bits, fewer bytes, more error.
        block: elements that share a scale; larger saves bytes and adds error.
        rounding: "stochastic" is unbiased, with more variance than "nearest".
        segments: pieces of each message, pipelined; chosen from the message size if None.
        seed: of the stochastic rounding; each rank draws its own numbers.
    """

    wire: str = "int8"
    block: int = 128
    rounding: Rounding = "nearest"
    segments: int | None = None
    seed: int = 0
    _calls: int = field(default=0, init=False, repr=False)

    name: ClassVar[str] = "quantized"
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

    def _sum(
        self,
        flat: torch.Tensor,
        transport: Transport,
        header: Header,
        residual: torch.Tensor | None,
    ) -> None:
        size, rank = transport.size, transport.rank
        neighbours = ring_neighbours(transport)
        transport.agree(header, *([n] for n in neighbours))
        seed = call_seed(self.seed, rank, self._calls)
        self._calls += 1
        wire = self._wire(flat.dtype, flat.device, seed)
        segments = self._segments(flat.numel(), flat.dtype, size)
        chain = _QuantizedChain(flat, wire, rank, size, segments, residual)
        run_rounds(chain, transport, 2 * (size - 1), segments, *neighbours)

    def _segments(self, numel: int, dtype: torch.dtype, ranks: int) -> int:
        wire = self._wire(dtype, None, 0)
        return ring_segments(numel, wire.nbytes(1024) / 1024, ranks, self.segments)

    @override
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        numel, dtype = real_numel(numel, dtype)
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        wire = self._wire(dtype, None, 0)
        segments = self._segments(numel, dtype, ranks)
        lengths = ring_message_lengths(numel, ranks, rank, segments)
        messages, nbytes = header_cost()
        longest = ceil_div(ceil_div(numel, ranks), segments)
        return Cost(
            rounds=2 * (ranks - 1),
            messages=messages + sum(1 for length in lengths if length),
            sent_bytes=nbytes + sum(wire.nbytes(length) for length in lengths),
            workspace_bytes=5 * segments * wire.nbytes(longest),
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = counter_from(state)


class _QuantizedChain(Chain):
    """Messages in buffers of their own; the chunks of ``flat`` are read once and written once."""

    def __init__(
        self,
        flat: torch.Tensor,
        wire: Wire,
        rank: int,
        size: int,
        segments: int,
        residual: torch.Tensor | None,
    ) -> None:
        self.rank, self.size, self.wire = rank, size, wire
        self.chunks = ring_chunks(flat, size, segments)
        # Every rank rounds every chunk once: as it sends its own first one, and as it passes on
        # the others.
        self.errors = None if residual is None else ring_chunks(residual, size, segments)
        longest = wire.nbytes(max(piece.numel() for piece in self.chunks[-1]))
        # Three to receive into, since a finished chunk is passed on from where it arrived, and two
        # to send from.
        self.memory = [
            [torch.empty(longest, dtype=torch.uint8, device=flat.device) for _ in range(segments)]
            for _ in range(5)
        ]
        self.made: dict[tuple[int, int, int], Message] = {}

    def piece(self, round: int, segment: int) -> torch.Tensor:
        """Return the piece that is received in ``round``."""
        return self.chunks[(self.rank - round - 1) % self.size][segment]

    def error(self, round: int, segment: int) -> torch.Tensor:
        """Return the part of the residual that belongs to that piece."""
        assert self.errors is not None
        return self.errors[(self.rank - round - 1) % self.size][segment]

    def message(self, buffer: int, segment: int, numel: int) -> Message:
        """Return the message in a buffer; chunks differ in length by one element at most."""
        key = (buffer, segment, numel)
        if key not in self.made:
            self.made[key] = self.wire.message(numel, self.memory[buffer][segment])
        return self.made[key]

    def arrival(self, round: int, segment: int) -> Message:
        """Return the message that is received in ``round``."""
        return self.message(round % 3, segment, self.piece(round, segment).numel())

    @override
    def first(self, segment: int) -> torch.Tensor:
        piece = self.piece(0, segment)
        message = self.message(4, segment, piece.numel())
        if self.errors is None:
            self.wire.encode(piece, message)
        else:
            self.wire.encode_with_error(piece, message, self.error(0, segment))
        return message.data

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.arrival(round, segment).data

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        arrival = self.arrival(round, segment)
        if round >= self.size:
            return arrival.data
        piece = self.piece(round, segment)
        message = self.message(3 + (round + 1) % 2, segment, piece.numel())
        keep = round == self.size - 1
        if self.errors is None:
            self.wire.relay(arrival, piece, message, keep)
        else:
            error = self.error(round, segment)
            self.wire.relay_with_error(arrival, piece, message, keep, error)
        return message.data

    @override
    def settle(self, round: int, segment: int) -> None:
        if round >= self.size:
            self.wire.decode(self.arrival(round, segment), self.piece(round, segment))


def call_seed(seed: int, rank: int, call: int) -> int:
    """Return a seed that differs for every rank and call (splitmix64's multipliers)."""
    mixed = seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + call * 0x94D049BB133111EB
    return mixed % (1 << 63)


def counter_from(state: dict[str, Any]) -> int:
    """Return the call counter of a saved state.

    Raises:
        InputError: the state is not one of these.
    """
    if set(state) != {"calls"} or not isinstance(state["calls"], int) or state["calls"] < 0:
        raise InputError(
            f"a saved state with one count, 'calls', is needed, got {state!r}: "
            "this checkpoint belongs to another method"
        )
    return int(state["calls"])

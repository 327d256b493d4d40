"""What one rank does with the messages of a coded ring: encode, pass on, decode.

Layout: chain b is one stretch of memory, cut into tiles of at most 131072 elements, and the tile
into p rows: its part of the p components. So a message mixes neighbours and not distant layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from taciturn.collectives.base import bounds
from taciturn.collectives.codes import Code, Own
from taciturn.collectives.pipeline import Chain
from taciturn.collectives.wires import Wire

__all__ = ["TILE_ELEMS", "CodedChain", "InPlaceChain", "Layout", "is_native"]

TILE_ELEMS = 1 << 17
"""Elements of a tile, part of the layout that ranks must share: 512 KiB of fp32. Matrix products of
such tiles run at twice the time of a memcpy; smaller ones pay for the calls (measured)."""

_HARMLESS_CONDITION = 10.0
"""Decoders with a condition number up to this lose less in fp32 than one rounding on the wire."""


def is_native(wire: Wire) -> bool:
    """Say whether messages are the values themselves, sent from where they lie."""
    return wire.name in ("fp32", "fp64") and wire.nbytes(1) == wire.compute.itemsize


class Layout:
    """Where the components lie: families of components that are encoded and decoded together.

    In chains a family is one chain, p components; in the shared layout (Vandermonde) there is one
    family of all c. A family of q components of ``length`` elements each is one stretch of memory.
    It is cut into pieces, the pipeline's segments, and each piece into tiles of shape (q, w), so
    that element j of a message mixes elements that are w apart, within one tile.
    """

    def __init__(self, code: Code, numel: int, inplace: bool = False) -> None:
        self.families = 1 if code.shared else code.ranks
        self.width: int = code.table.shape[1]
        self.numel = numel
        self.length: int = -(-numel // (self.families * self.width))
        stretch = self.length * self.width
        self.whole = numel // stretch if stretch else self.families
        self.padding = (self.families - self.whole) * stretch
        # In place, what a tile is multiplied into (fp64 in and out) must stay below one slot.
        most = min(TILE_ELEMS, self.length // 4) if inplace else TILE_ELEMS
        self.tile_length = max(1, most // self.width)

    def stretches(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the families, 1-D, and the padded copy of those that the end cuts short."""
        stretch = self.length * self.width
        rest = flat.new_zeros(self.padding)
        rest[: self.numel - self.whole * stretch] = flat[self.whole * stretch :]
        if not stretch:
            return [flat] * self.families, rest
        shape = (-1, stretch)
        return [*flat[: self.whole * stretch].view(shape), *rest.view(shape)], rest

    def tiles(self, stretch: torch.Tensor, piece: tuple[int, int]) -> list[Tile]:
        """Return the tiles of one piece of a family's stretch of memory."""
        start, stop = piece
        step = self.tile_length
        return [
            Tile(
                slice(a - start, min(a + step, stop) - start),
                stretch[a * self.width : min(a + step, stop) * self.width].view(self.width, -1),
            )
            for a in range(start, stop, step)
        ]

    def write_back(self, flat: torch.Tensor, rest: torch.Tensor) -> None:
        """Copy the padded families back into the end of ``flat``."""
        end = self.numel - self.whole * self.length * self.width
        if end > 0:
            flat[self.numel - end :] = rest[:end]


class Tile(NamedTuple):
    """Some elements of all q components of a family."""

    where: slice
    """Their place in the messages of the piece."""
    block: torch.Tensor
    """The elements, shape (q, w), a view of the buffer."""


class Encoder:
    """What rank ``position`` of the ring multiplies with, as tensors.

    On a wire as precise as the buffer the local arithmetic would add more error than the wire: each
    rounding of a contribution stays in its chain until the end, and an ill-conditioned decoder
    amplifies those of its products. ``precise`` then asks for products in fp64.
    """

    def __init__(
        self, code: Code, position: int, like: torch.Tensor, own: Own, precise: bool
    ) -> None:
        self.code, self.position = code, position
        table = code.rank_table(position)
        late = np.zeros_like(table)
        late[code.ranks :] = table[: len(table) - code.ranks]
        change = table - late  # V[t] - V[t-N]
        decoders = code.rank_decoders(position, own)

        encoding = torch.float64 if precise else like.dtype
        harmless = code.condition_number <= _HARMLESS_CONDITION
        decoding = torch.float64 if precise and not harmless else like.dtype

        def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=like.device)

        self.rounds: list[list[int]] = []  # [family] rounds in which it passes here
        self.complete: list[list[int]] = []  # those that are decoded
        self.change: list[torch.Tensor] = []  # (rounds, q): added on the way
        self.decoder: list[torch.Tensor] = []  # (q, q)
        self.correction: list[torch.Tensor] = []  # (q, q): I - D V, for the own exact term
        for family in range(1 if code.shared else code.ranks):
            residue = (position - family) % code.ranks
            first, step = (0, 1) if code.shared else (residue, code.ranks)
            rounds = list(range(first, code.rounds + 1, step))
            complete = list(code.receive_rounds(residue))
            decoder = decoders[0 if code.shared else residue]
            self.rounds.append(rounds)
            self.complete.append(complete)
            self.change.append(tensor(change[rounds], encoding))
            self.decoder.append(tensor(decoder, decoding))
            correction = np.eye(len(decoder)) - decoder @ table[complete]
            self.correction.append(tensor(correction, decoding))

    def family(self, round: int) -> int:
        """Return the family of the message that passes here in ``round``."""
        return 0 if self.code.shared else (self.position - round) % self.code.ranks

    def row(self, round: int) -> int:
        """Return the number of ``round`` among those of its family."""
        return round if self.code.shared else round // self.code.ranks

    def early(self, family: int) -> int:
        """Return how many messages of a family pass before the first complete one."""
        return len(self.rounds[family]) - len(self.complete[family])


class Messages:
    """The buffers in which messages travel, by segment."""

    def __init__(self, wire: Wire, lengths: list[int], like: torch.Tensor) -> None:
        self.wire = wire
        self.native = is_native(wire)
        sizes = lengths if self.native else [wire.nbytes(length) for length in lengths]
        dtype = like.dtype if self.native else torch.uint8

        def buffers(count: int) -> list[list[torch.Tensor]]:
            return [[like.new_empty(n, dtype=dtype) for n in sizes] for _ in range(count)]

        self.arrivals = buffers(2)
        self.encoded = buffers(0 if self.native else 2)

    def outgoing(self, round: int, segment: int, values: torch.Tensor) -> torch.Tensor:
        """Return the message of ``round`` with these values: themselves on a native wire."""
        if self.native:
            return values
        message = self.encoded[round % 2][segment]
        self.wire.encode(values, message)
        return message

    def add(self, received: torch.Tensor, values: torch.Tensor) -> None:
        """Add a received message to ``values`` in place."""
        if self.native:
            values.add_(received)
        else:
            self.wire.accumulate(received, values)


class CodedChain(Chain):
    """All contributions of a family are encoded by one matrix product when it first passes.

    The contribution of a round becomes the message forwarded after it, M_t = R_t + (V[t] - V[t-N])
    g, by adding what was received: L + 1 slots. Decoding takes the own term out of it again and
    adds the own components exactly: D M + (I - D V) g.
    """

    def __init__(
        self,
        code: Code,
        layout: Layout,
        flat: torch.Tensor,
        wire: Wire,
        position: int,
        segments: int,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = Encoder(code, position, flat, "exact", precise=is_native(wire))
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        self.messages = Messages(wire, [b - a for a, b in self.pieces], flat)
        self.slots: dict[tuple[int, int], torch.Tensor] = {}

    def slot(self, round: int, segment: int) -> torch.Tensor:
        """Return the contribution of ``round``, which becomes its forwarded message."""
        family = self.encoder.family(round)
        key = (family, segment)
        if key not in self.slots:
            piece = self.pieces[segment]
            change = self.encoder.change[family]
            slots = self.flat.new_empty(change.shape[0], piece[1] - piece[0])
            for where, block in self.layout.tiles(self.families[family], piece):
                slots[:, where] = change @ block.to(change.dtype)
            self.slots[key] = slots
        return self.slots[key][self.encoder.row(round)]

    @override
    def first(self, segment: int) -> torch.Tensor:
        return self.messages.outgoing(1, segment, self.slot(0, segment))

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.arrivals[round % 2][segment]

    @override
    def handle(self, round: int, segment: int, received: torch.Tensor) -> torch.Tensor:
        slot = self.slot(round, segment)
        self.messages.add(received, slot)
        if round == self.encoder.code.rounds:
            return slot
        return self.messages.outgoing(round + 1, segment, slot)

    @override
    def settle(self, round: int, segment: int, received: torch.Tensor) -> None:
        encoder = self.encoder
        family = encoder.family(round)
        if round != encoder.complete[family][-1]:
            return
        slots = self.slots[family, segment][encoder.early(family) :]  # (q, s)
        decoder, correction = encoder.decoder[family], encoder.correction[family]
        for where, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            wide, messages = block.to(decoder.dtype), slots[:, where].to(decoder.dtype)
            block.copy_((correction @ wide).addmm_(decoder, messages))

    def finish(self) -> None:
        """Put the padded families back."""
        self.layout.write_back(self.flat, self.rest)


class InPlaceChain(Chain):
    """The same within the buffer: two message buffers beside it, however many passes.

    The first time a family passes, its complete contributions are encoded in place of its
    components; the incomplete ones, needed once, are formed on the way. What is forwarded is kept
    in the slot of its contribution, own term included, and decoded over all ranks. Storage is
    (c + 2)/c buffers, within the paper's (c + N)/c. The own components are gone, so that the
    decoded own term is approximate like those of the others.
    """

    def __init__(
        self,
        code: Code,
        layout: Layout,
        flat: torch.Tensor,
        wire: Wire,
        position: int,
        segments: int,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = Encoder(code, position, flat, "fresh", precise=is_native(wire))
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        lengths = [b - a for a, b in self.pieces]
        self.messages = Messages(wire, lengths, flat)
        self.values = [flat.new_empty(0 if self.messages.native else n) for n in lengths]

    def contribute(self, round: int, segment: int, values: torch.Tensor) -> None:
        """Add the contribution of ``round`` to ``values``; keep a complete message in its slot."""
        encoder, family = self.encoder, self.encoder.family(round)
        row, early = encoder.row(round), encoder.early(family)
        change = encoder.change[family]
        for where, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            if row < early:
                values[where] += change[row] @ block.to(change.dtype)
            if row == max(early - 1, 0):
                block.copy_(change[early:] @ block.to(change.dtype))
            if row >= early:
                values[where].add_(block[row - early])
                block[row - early].copy_(values[where])

    @override
    def first(self, segment: int) -> torch.Tensor:
        values = (
            self.messages.arrivals[0][segment] if self.messages.native else self.values[segment]
        )
        values.zero_()
        self.contribute(0, segment, values)
        return self.messages.outgoing(1, segment, values)

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.arrivals[round % 2][segment]

    @override
    def handle(self, round: int, segment: int, received: torch.Tensor) -> torch.Tensor:
        values = received
        if not self.messages.native:
            values = self.values[segment]
            self.messages.wire.decode(received, values)
        self.contribute(round, segment, values)
        if round == self.encoder.code.rounds:
            return values
        return self.messages.outgoing(round + 1, segment, values)

    @override
    def settle(self, round: int, segment: int, received: torch.Tensor) -> None:
        encoder, family = self.encoder, self.encoder.family(round)
        if round != encoder.complete[family][-1]:
            return
        for _, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            decoder = encoder.decoder[family]
            block.copy_(decoder @ block.to(decoder.dtype))

    def finish(self) -> None:
        """Put the padded families back."""
        self.layout.write_back(self.flat, self.rest)

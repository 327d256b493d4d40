"""What one rank does with the messages of a coded ring: encode, pass on, decode.

Layout: chain b is one stretch of memory, cut into tiles of at most 131072 elements, and the tile
into p rows: its part of the p components. So a message mixes neighbours and not distant layers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from taciturn.collectives.base import bounds
from taciturn.collectives.codes import Code, Own
from taciturn.collectives.pipeline import Chain
from taciturn.collectives.wires import Wire

__all__ = ["TILE_ELEMS", "CodedChain", "InPlaceChain", "Layout", "is_native"]

TILE_ELEMS = 1 << 16
"""Elements of a tile, part of the layout that ranks must share: 512 KiB of fp32. Matrix products of
such tiles run at twice the time of a memcpy; smaller ones pay for the calls (measured)."""

_HARMLESS_CONDITION = 10.0
"""Decoders with a condition number up to this lose less in fp32 than one rounding on the wire."""

_ROWS_AT_ONCE = 4
"""Rounds whose contributions are encoded together. All at once would read the components only once,
but then the first N rounds wait for the processor and later ones leave it idle."""


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

    def tiles(self, stretch: torch.Tensor, piece: tuple[int, int]) -> list[_Tile]:
        """Return the tiles of one piece of a family's stretch of memory."""
        start, stop = piece
        step = self.tile_length
        return [
            _Tile(
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


class _Tile(NamedTuple):
    """Some elements of all q components of a family."""

    where: slice
    """Their place in the messages of the piece."""
    block: torch.Tensor
    """The elements, shape (q, w), a view of the buffer."""


class _Encoder:
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


class _Product:
    """Products of small matrices with tiles, in the matrix's dtype, in memory that is reused.

    Allocated anew, a tile's worth of memory costs more in page faults than the product does.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.memory: list[torch.Tensor] = []

    def room(self, which: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return scratch number ``which`` with this shape."""
        numel = math.prod(shape)
        while len(self.memory) <= which:
            self.memory.append(self.like.new_empty(0))
        if self.memory[which].numel() < numel or self.memory[which].dtype != dtype:
            self.memory[which] = self.like.new_empty(numel, dtype=dtype)
        return self.memory[which][:numel].view(shape)

    def widened(self, which: int, block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``block`` in ``dtype``: itself, or a copy in scratch."""
        if block.dtype == dtype:
            return block
        return self.room(which, tuple(block.shape), dtype).copy_(block)

    def __call__(
        self, matrix: torch.Tensor, block: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``matrix @ block``: in ``out``, or in scratch and valid until the next product."""
        if out is not None and out.dtype == matrix.dtype == block.dtype:
            return torch.mm(matrix, block, out=out)
        room = self.room(0, (matrix.shape[0], block.shape[1]), matrix.dtype)
        product = torch.mm(matrix, self.widened(1, block, matrix.dtype), out=room)
        return product if out is None else out.copy_(product)


class _Messages:
    """The buffers in which messages travel, by segment: two to receive into, two to send from."""

    def __init__(self, wire: Wire, lengths: list[int], like: torch.Tensor) -> None:
        self.wire = wire
        self.native = is_native(wire)
        if self.native:
            self.plain = [[like.new_empty(n) for n in lengths] for _ in range(2)]
        else:
            made = [[wire.message(n) for n in lengths] for _ in range(4)]
            self.arrivals, self.departures = made[:2], made[2:]

    def place(self, round: int, segment: int) -> torch.Tensor:
        """Return where the message of ``round`` is received."""
        if self.native:
            return self.plain[round % 2][segment]
        return self.arrivals[round % 2][segment].data

    def outgoing(self, round: int, segment: int, values: torch.Tensor) -> torch.Tensor:
        """Return the message of ``round`` with these values: themselves on a native wire."""
        if self.native:
            return values
        message = self.departures[round % 2][segment]
        self.wire.encode(values, message)
        return message.data

    def add(self, round: int, segment: int, values: torch.Tensor) -> None:
        """Add what ``round`` brought to ``values`` in place."""
        if self.native:
            values.add_(self.plain[round % 2][segment])
        else:
            self.wire.accumulate(self.arrivals[round % 2][segment], values)


class CodedChain(Chain):
    """The contributions of a family are encoded by matrix products of a few rounds at once.

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
        memory: torch.Tensor,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = _Encoder(code, position, flat, "exact", precise=is_native(wire))
        self.product = _Product(flat)
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        self.messages = _Messages(wire, [b - a for a, b in self.pieces], flat)
        self.slots = self._cut(memory)

    def _cut(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Cut the memory of the slots into [family][segment], shape (rounds, s) each."""
        slots, taken = [], 0
        for rounds in self.encoder.rounds:
            shapes = [(len(rounds), stop - start) for start, stop in self.pieces]
            sizes = [rows * length for rows, length in shapes]
            parts = memory[taken : taken + sum(sizes)].split(sizes)
            slots.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
            taken += sum(sizes)
        return slots

    def slot(self, round: int, segment: int) -> torch.Tensor:
        """Return the contribution of ``round``, which becomes its forwarded message."""
        family, row = self.encoder.family(round), self.encoder.row(round)
        slots = self.slots[family][segment]
        if row % _ROWS_AT_ONCE == 0:
            rows = slice(row, row + _ROWS_AT_ONCE)
            change = self.encoder.change[family][rows]
            for where, block in self.layout.tiles(self.families[family], self.pieces[segment]):
                self.product(change, block, slots[rows, where])
        return slots[row]

    @override
    def first(self, segment: int) -> torch.Tensor:
        return self.messages.outgoing(1, segment, self.slot(0, segment))

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.place(round, segment)

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        slot = self.slot(round, segment)
        self.messages.add(round, segment, slot)
        if round == self.encoder.code.rounds:
            return slot
        return self.messages.outgoing(round + 1, segment, slot)

    @override
    def settle(self, round: int, segment: int) -> None:
        encoder = self.encoder
        family = encoder.family(round)
        if round != encoder.complete[family][-1]:
            return
        slots = self.slots[family][segment][encoder.early(family) :]  # (q, s)
        decoder, correction = encoder.decoder[family], encoder.correction[family]
        for where, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            total = self.product(correction, block)
            messages = self.product.widened(1, slots[:, where], decoder.dtype)
            block.copy_(total.addmm_(decoder, messages))

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
        memory: torch.Tensor,  # noqa: ARG002 - the buffer itself is the memory
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = _Encoder(code, position, flat, "fresh", precise=is_native(wire))
        self.product = _Product(flat)
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        lengths = [b - a for a, b in self.pieces]
        self.messages = _Messages(wire, lengths, flat)
        self.values = [flat.new_empty(0 if self.messages.native else n) for n in lengths]

    def contribute(self, round: int, segment: int, values: torch.Tensor) -> None:
        """Add the contribution of ``round`` to ``values``; keep a complete message in its slot."""
        encoder, family = self.encoder, self.encoder.family(round)
        row, early = encoder.row(round), encoder.early(family)
        change = encoder.change[family]
        for where, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            if row < early:
                values[where] += self.product(change[row : row + 1], block)[0]
            if row == max(early - 1, 0):
                block.copy_(self.product(change[early:], block))
            if row >= early:
                values[where].add_(block[row - early])
                block[row - early].copy_(values[where])

    @override
    def first(self, segment: int) -> torch.Tensor:
        values = self.room(0, segment)
        values.zero_()
        self.contribute(0, segment, values)
        return self.messages.outgoing(1, segment, values)

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.place(round, segment)

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        values = self.room(round, segment)
        if not self.messages.native:
            values.zero_()
            self.messages.add(round, segment, values)
        self.contribute(round, segment, values)
        if round == self.encoder.code.rounds:
            return values
        return self.messages.outgoing(round + 1, segment, values)

    def room(self, round: int, segment: int) -> torch.Tensor:
        """Return where the message of ``round`` is worked on: on a native wire where it arrived."""
        if self.messages.native:
            return self.messages.plain[round % 2][segment]
        return self.values[segment]

    @override
    def settle(self, round: int, segment: int) -> None:
        encoder, family = self.encoder, self.encoder.family(round)
        if round != encoder.complete[family][-1]:
            return
        for _, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            block.copy_(self.product(encoder.decoder[family], block))

    def finish(self) -> None:
        """Put the padded families back."""
        self.layout.write_back(self.flat, self.rest)

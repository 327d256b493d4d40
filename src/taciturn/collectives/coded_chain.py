"""What one rank does with the messages of a coded ring: encode, pass on, decode.

Layout: chain b is one stretch of memory, cut into tiles of at most 131072 elements, and the tile
into p rows: its part of the p components. So a message mixes neighbours and not distant layers.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from taciturn.collectives import products
from taciturn.collectives.base import bounds
from taciturn.collectives.codes import Code, Own
from taciturn.collectives.pipeline import Chain
from taciturn.collectives.wires import Wire
from taciturn.ledger import Ledger, labelled

__all__ = ["TILE_ELEMS", "Arena", "CodedChain", "InPlaceChain", "Layout", "is_native"]

TILE_ELEMS = 1 << 16
"""Elements of a tile, part of the layout that ranks must share: 256 KiB of fp32. Matrix products of
such tiles run at two to three times the time of a memcpy; smaller ones pay for the calls."""

_FIRST_ROWS = 4
"""Families encode their first 1 to this many terms at once, and later all others: two passes over
the components in place of one let the first messages leave early. Families differ, so that not all
ask for the processor in the same rounds."""

_HARMLESS_CONDITION = 10.0
"""Decoders with a condition number up to this lose less in fp32 than one rounding on a wire."""


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


class Arena:
    """Memory kept from call to call, by name: new memory costs page faults.

    On the CPU it is numpy's, which asks for huge pages.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return ``nbytes`` of memory, uint8; what it holds is undefined."""
        held = self._held.get(name)
        if held is None or held.numel() < nbytes or held.device != device:
            if device.type == "cpu":
                # Of nothing, from_numpy makes a tensor that has no other views.
                held = torch.from_numpy(np.empty(max(nbytes, 1), np.uint8))
            else:
                held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._held[name] = held
        return held[:nbytes]


class _Tile(NamedTuple):
    """Some elements of all q components of a family."""

    where: slice
    """Their place in the messages of the piece."""
    block: torch.Tensor
    """The elements, shape (q, w), a view of the buffer."""


class _Encoder:
    """What rank ``position`` of the ring multiplies with, as tensors.

    A family passes in its *rows*, numbered from 0; rows from ``early`` on bring complete messages.
    """

    def __init__(
        self, code: Code, position: int, like: torch.Tensor, own: Own, dtype: torch.dtype
    ) -> None:
        self.code, self.position = code, position
        self.table = code.rank_table(position)  # (L + 1, q): V[t], fp64
        decoders = code.rank_decoders(position, own)
        self.rounds: list[list[int]] = []  # [family] in which it passes here
        self.complete: list[list[int]] = []  # those that are decoded
        self.decoder: list[torch.Tensor] = []  # (q, q)
        for family in range(1 if code.shared else code.ranks):
            residue = (position - family) % code.ranks
            first, step = (0, 1) if code.shared else (residue, code.ranks)
            self.rounds.append(list(range(first, code.rounds + 1, step)))
            self.complete.append(list(code.receive_rounds(residue)))
            self.decoder.append(_tensor(decoders[0 if code.shared else residue], like, dtype))
        # Rows from the term of one pass to that of the next: one, or N where all rounds count.
        self.back = code.ranks if code.shared else 1

    def family(self, round: int) -> int:
        """Return the family of the message that passes here in ``round``."""
        return 0 if self.code.shared else (self.position - round) % self.code.ranks

    def row(self, round: int) -> int:
        """Return the number of ``round`` among those of its family."""
        return round if self.code.shared else round // self.code.ranks

    def early(self, family: int) -> int:
        """Return how many messages of a family pass before the first complete one."""
        return len(self.rounds[family]) - len(self.complete[family])

    def shift(self, family: int) -> int:
        """Return 1 if a complete message passes before there is a term to take out, else 0."""
        return self.back - self.early(family)

    @property
    def slot_counts(self) -> list[int]:
        """Slots of each family: one for each term, and that before the first if it is needed."""
        return [len(rounds) + self.shift(f) for f, rounds in enumerate(self.rounds)]

    def terms(self, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return V[t] of each family's rows, shape (rows, q)."""
        return [_tensor(self.table[rounds], like, dtype) for rounds in self.rounds]

    def changes(self, like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return V[t] - V[t-N] of each family's rows, shape (rows, q)."""
        late = np.zeros_like(self.table)
        late[self.code.ranks :] = self.table[: len(self.table) - self.code.ranks]
        return [_tensor((self.table - late)[rounds], like, dtype) for rounds in self.rounds]


def _tensor(values: Any, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)


class _Product:
    """Products of small matrices with tiles, in the matrix's dtype, in memory that is reused.

    Allocated anew, a tile's worth of memory costs more in page faults than the product does.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.memory: list[torch.Tensor] = []
        self.compiles = like.device.type == "cpu" and like.dtype == torch.float32

    def _room(self, which: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return scratch number ``which`` with this shape."""
        numel = math.prod(shape)
        while len(self.memory) <= which:
            self.memory.append(self.like.new_empty(0))
        if self.memory[which].numel() < numel or self.memory[which].dtype != dtype:
            self.memory[which] = self.like.new_empty(numel, dtype=dtype)
        return self.memory[which][:numel].view(shape)

    def __call__(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``matrix @ rows`` in scratch, valid until the next product."""
        out = self._room(0, (matrix.shape[0], rows.shape[1]), matrix.dtype)
        if rows.dtype != matrix.dtype:
            rows = self._room(1, tuple(rows.shape), matrix.dtype).copy_(rows)
        return torch.mm(matrix, rows, out=out)

    def _is_wide(self, matrix: torch.Tensor) -> bool:
        return self.compiles and matrix.dtype == torch.float64

    def encode(self, table: torch.Tensor, tile: _Tile, slots: torch.Tensor) -> None:
        """Write ``table @ tile`` into the tile's columns of ``slots``, contiguous."""
        where, block = tile
        if self._is_wide(table):
            products.wide_product(
                table.numpy(), block.numpy(), 0, slots.numpy(), where.start, block.shape[1]
            )
        elif table.dtype == block.dtype:
            torch.mm(table, block, out=slots[:, where])
        else:
            slots[:, where].copy_(self(table, block))

    def decode(self, decoder: torch.Tensor, slots: torch.Tensor, tile: _Tile) -> None:
        """Add ``decoder`` times the tile's columns of ``slots``, contiguous, to the tile."""
        where, block = tile
        if self._is_wide(decoder):
            products.add_wide_product(
                decoder.numpy(), slots.numpy(), where.start, block.numpy(), 0, block.shape[1]
            )
        elif decoder.dtype == block.dtype:
            block.addmm_(decoder, slots[:, where])
        else:
            block.add_(self(decoder, slots[:, where]))


class _Worker:
    """Does jobs one after the other, in a thread beside the one that exchanges messages.

    Products release Python's lock, so messages go on while a family is encoded or decoded: done
    between two messages, that would stall the whole ring. On a GPU, where a job is only launched,
    it is done at once, in the caller's stream.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.ledger = ledger
        self.busy_s = 0.0
        self.jobs: list[Future[None]] = []
        self.pool: ThreadPoolExecutor | None = None
        if device.type == "cpu":
            self.pool = ThreadPoolExecutor(
                1, "taciturn-codec", _be_a_worker, (torch.get_num_threads(),)
            )

    def submit(self, job: Callable[..., None], *arguments: Any) -> Future[None] | None:
        """Have ``job`` done; None if it is done already."""
        if self.pool is None:
            job(*arguments)
            return None
        future = self.pool.submit(self._timed, job, arguments)
        self.jobs.append(future)
        return future

    def _timed(self, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        with labelled("codec"):
            job(*arguments)
        self.busy_s += time.perf_counter() - start

    def wait(self, future: Future[None] | None) -> None:
        """Wait until a job is done. The ledger counts the worker's seconds, not these."""
        if future is not None:
            start = time.perf_counter()
            future.result()
            self.ledger.codec_s -= time.perf_counter() - start

    def finish(self) -> None:
        """Wait for all jobs; raise the first error."""
        for job in self.jobs:
            self.wait(job)
        self.ledger.codec_s += self.busy_s

    def close(self) -> None:
        """End the thread, also after a failure."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


def _be_a_worker(threads: int) -> None:
    """Set up a codec thread: as many cores as its owner may use, but messages come first."""
    torch.set_num_threads(threads)  # a new thread would take all cores
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class _Messages:
    """The buffers in which messages travel, by segment; on a native wire plain numbers."""

    def __init__(
        self, wire: Wire, lengths: list[int], like: torch.Tensor, inplace: bool, arena: Arena
    ) -> None:
        self.wire = wire
        self.native = is_native(wire)
        count = 2 if self.native and inplace else 4  # two to receive into, two to send from
        self.coded = [
            [
                wire.message(n, arena.take(f"message {k}.{i}", wire.nbytes(n), like.device))
                for k, n in enumerate(lengths)
            ]
            for i in range(count)
        ]
        self.plain: list[list[torch.Tensor]] = []
        if self.native:
            self.plain = [[m.data.view(like.dtype) for m in messages] for messages in self.coded]

    def place(self, round: int, segment: int) -> torch.Tensor:
        """Return where the message of ``round`` is received."""
        return self.coded[round % 2][segment].data

    def arrived(self, round: int, segment: int, values: torch.Tensor) -> torch.Tensor:
        """Return what ``round`` brought, decoded into ``values`` where it must be."""
        if self.native:
            return self.plain[round % 2][segment]
        self.wire.decode(self.coded[round % 2][segment], values)
        return values

    def outgoing(self, round: int, segment: int, values: torch.Tensor) -> torch.Tensor:
        """Return the message of ``round`` with these values: themselves on a native wire."""
        if self.native:
            return values.view(torch.uint8)
        message = self.coded[2 + round % 2][segment]
        self.wire.encode(values, message)
        return message.data

    def pass_on(
        self, round: int, segment: int, stale: torch.Tensor | None, term: torch.Tensor
    ) -> torch.Tensor:
        """Return the message of ``round``: what arrived, with a new own term for the stale one.

        ``stale`` becomes what the others said: what arrived, without it.
        """
        arrived = self.coded[(round - 1) % 2][segment]
        onward = self.coded[2 + round % 2][segment]
        if stale is None:
            self.wire.relay(arrived, term, onward, keep=False)
        else:
            self.wire.exchange(arrived, stale, term, onward)
        return onward.data


class _Decoded(Chain):
    """What both variants share: the buffer cut into pieces, and the messages of each.

    After the rounds something is left to do.
    """

    def __init__(
        self,
        layout: Layout,
        flat: torch.Tensor,
        wire: Wire,
        segments: int,
        inplace: bool,
        arena: Arena,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.product = _Product(flat)
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        lengths = [stop - start for start, stop in self.pieces]
        self.messages = _Messages(wire, lengths, flat, inplace, arena)
        # What is decoded to be worked on; on a native wire it is worked on where it arrived.
        self.values = [flat.new_empty(0 if self.messages.native else n) for n in lengths]

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.place(round, segment)

    @abstractmethod
    def finish(self) -> None:
        """Finish decoding and put the padded families back, after the last round."""

    @abstractmethod
    def close(self) -> None:
        """Free what the chain holds, whether it finished or not."""


class CodedChain(_Decoded):
    """A worker encodes contributions before they are needed and decodes what is complete.

    The rank's terms P_t = V[t] . g are formed once. When round t brings R_t, its own term of the
    pass before is taken out, X_t = R_t - P_(t-N), and that of this pass added, X_t + P_t, which is
    forwarded. What was added is taken out again bit for bit, so that roundings of the terms do not
    add up over the passes. A complete X_t holds the other ranks; the sum is g + D X. X_t takes the
    slot of P_(t-N), so L + 2 slots are enough.
    """

    def __init__(
        self,
        code: Code,
        layout: Layout,
        flat: torch.Tensor,
        wire: Wire,
        position: int,
        segments: int,
        arena: Arena,
        ledger: Ledger,
    ) -> None:
        super().__init__(layout, flat, wire, segments, False, arena)
        # An ill-conditioned decoder amplifies the roundings of our products as it does the wire's.
        self.precise = is_native(wire) and code.condition_number > _HARMLESS_CONDITION
        dtype = torch.float64 if self.precise else flat.dtype
        self.encoder = _Encoder(code, position, flat, "exact", dtype)
        self.terms = self.encoder.terms(flat, dtype)
        nbytes = (code.rounds + 2) * layout.length * flat.itemsize
        self.slots = self._cut(arena.take("slots", nbytes, flat.device).view(flat.dtype))
        self.worker = _Worker(flat.device, ledger)
        self.coming: dict[tuple[int, int], Future[None] | None] = {}
        self.decoded: dict[tuple[int, int], int] = {}  # rows below this one
        for visit in range(1 if code.shared else code.ranks):
            for segment in range(segments):
                self.encode_ahead(self.encoder.family(visit), segment, 0)

    def _cut(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Cut the memory into slots [family][segment], shape (rows, s) each.

        A family's first slot is that of the term before its first, zero, if a complete message
        takes its place.
        """
        slots, taken = [], 0
        for rows in self.encoder.slot_counts:
            shapes = [(rows, stop - start) for start, stop in self.pieces]
            sizes = [rows * length for rows, length in shapes]
            parts = memory[taken : taken + sum(sizes)].split(sizes)
            slots.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
            taken += sum(sizes)
        return slots

    def starts(self, family: int, row: int) -> bool:
        """Say whether terms are encoded from this row on."""
        return row in (0, 1 + family % _FIRST_ROWS)

    def encode_ahead(self, family: int, segment: int, row: int) -> None:
        """Have the terms formed that are needed from ``row`` on."""
        stop, last = row + 1, len(self.encoder.rounds[family])
        while stop < last and not self.starts(family, stop):
            stop += 1
        self.coming[family, segment] = self.worker.submit(
            self.encode, family, segment, slice(row, stop)
        )
        # Now the components are not needed as such any more. Decoded in two parts, an
        # ill-conditioned code would lose what cancels between them.
        if stop == last and not self.precise:
            self.decode_below(family, segment, row)

    def decode_below(self, family: int, segment: int, row: int) -> None:
        """Have the complete messages of the rows below ``row`` decoded, if they are not yet."""
        first = self.decoded.get((family, segment), self.encoder.early(family))
        if row > first:
            self.worker.submit(self.decode, family, segment, slice(first, row))
            self.decoded[family, segment] = row

    def encode(self, family: int, segment: int, rows: slice) -> None:
        """Form the terms of some rounds of a family."""
        shift = self.encoder.shift(family)
        slots = self.slots[family][segment][rows.start + shift : rows.stop + shift]
        table = self.terms[family][rows]
        for tile in self.layout.tiles(self.families[family], self.pieces[segment]):
            self.product.encode(table, tile, slots)

    def decode(self, family: int, segment: int, rows: slice) -> None:
        """Add what complete messages tell of the other ranks to the components."""
        encoder = self.encoder
        early, back = encoder.early(family), encoder.back - encoder.shift(family)
        slots = self.slots[family][segment][rows.start - back : rows.stop - back]  # (r, s)
        columns = slice(rows.start - early, rows.stop - early)
        decoder = encoder.decoder[family][:, columns].contiguous()  # (q, r)
        for tile in self.layout.tiles(self.families[family], self.pieces[segment]):
            self.product.decode(decoder, slots, tile)

    @override
    def first(self, segment: int) -> torch.Tensor:
        family = self.encoder.family(0)
        self.worker.wait(self.coming.pop((family, segment)))
        term = self.slots[family][segment][self.encoder.shift(family)]
        message = self.messages.outgoing(1, segment, term)
        self.settle(0, segment)  # the own family has passed for the first time
        return message

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        encoder, messages = self.encoder, self.messages
        family, row = encoder.family(round), encoder.row(round)
        if self.starts(family, row):
            self.worker.wait(self.coming.pop((family, segment)))
        slots, shift = self.slots[family][segment], encoder.shift(family)
        before = row - encoder.back + shift  # slot of the own term of the pass before
        stale = slots[before] if before >= 0 else None
        if before == 0 and shift:
            slots[0].zero_()  # there is none yet
        if round == encoder.code.rounds:
            assert stale is not None
            arrived = messages.arrived(round, segment, self.values[segment])
            return torch.sub(arrived, stale, out=stale)
        return messages.pass_on(round + 1, segment, stale, slots[row + shift])

    @override
    def settle(self, round: int, segment: int) -> None:
        encoder = self.encoder
        family, row = encoder.family(round), encoder.row(round) + 1
        if row == len(encoder.rounds[family]):
            self.decode_below(family, segment, row)
        elif self.starts(family, row):
            self.encode_ahead(family, segment, row)

    @override
    def finish(self) -> None:
        self.worker.finish()
        self.layout.write_back(self.flat, self.rest)

    @override
    def close(self) -> None:
        self.worker.close()


class InPlaceChain(_Decoded):
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
        super().__init__(layout, flat, wire, segments, True, Arena())
        self.encoder = _Encoder(code, position, flat, "fresh", flat.dtype)
        # Here terms of all passes are kept as changes, whose roundings stay in the chain: on a wire
        # as precise as the buffer they would outweigh the wire's if the products were not in fp64.
        dtype = torch.float64 if is_native(wire) else flat.dtype
        self.changes = self.encoder.changes(flat, dtype)

    def contribute(self, round: int, segment: int, values: torch.Tensor) -> None:
        """Add the contribution of ``round`` to ``values``; keep a complete message in its slot."""
        encoder, family = self.encoder, self.encoder.family(round)
        row, early = encoder.row(round), encoder.early(family)
        change = self.changes[family]
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
        values = self.messages.plain[0][segment] if self.messages.native else self.values[segment]
        values.zero_()
        self.contribute(0, segment, values)
        return self.messages.outgoing(1, segment, values)

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        values = self.messages.arrived(round, segment, self.values[segment])
        self.contribute(round, segment, values)
        if round == self.encoder.code.rounds:
            return values
        return self.messages.outgoing(round + 1, segment, values)

    @override
    def settle(self, round: int, segment: int) -> None:
        encoder, family = self.encoder, self.encoder.family(round)
        if round != encoder.complete[family][-1]:
            return
        for _, block in self.layout.tiles(self.families[family], self.pieces[segment]):
            block.copy_(self.product(encoder.decoder[family], block))

    @override
    def finish(self) -> None:
        self.layout.write_back(self.flat, self.rest)

    @override
    def close(self) -> None:
        pass  # all was done in the rounds

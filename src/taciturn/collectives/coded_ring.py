"""CERAR, the coded approximate ring all-reduce: fewer bytes than any exact ring.

S. Munim and A. Ramamoorthy, "Communication-Efficient Distributed Training via Ring-Based Coded
Approximate All-Reduce", arXiv:2609.23898, gives rounds L = c + N - 2, rate L/c and storage 1 + N/c;
the protocol is derived in ``docs/algorithms.md``, the codes are in :mod:`taciturn.collectives.codes`.

N ranks stand in a ring; the buffer is cut into N chains of p components (p = ``passes``, c = pN).
The message of chain b starts at rank b and goes round p times. At round t rank i receives it from
its predecessor, b = (i - t) mod N, adds ``(V[t] - V[t-N]) . g`` - its contribution of this pass in
place of that of the pass before - and forwards it. From round N - 1 on every message holds all
ranks; each rank solves the p complete messages of each chain for the p sums.

Layout: chain b is one stretch of memory, cut into tiles of at most 131072 elements, and the tile
into p rows: its part of the p components. So a message mixes neighbours and not distant layers.
"""

from __future__ import annotations

import logging
import random
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from taciturn.collectives.base import Collective, Cost, bounds, header_cost, real_numel
from taciturn.collectives.codes import Code, Own, design, rounding_of
from taciturn.collectives.pipeline import run_rounds, segments_for
from taciturn.collectives.quantized_ring import QuantizedRing, call_seed, counter_from
from taciturn.collectives.ring import Ring, check_segments, ring_neighbours
from taciturn.collectives.wires import Rounding, Wire, make_wire
from taciturn.errors import InputError
from taciturn.transport import Header, Transport

__all__ = ["CodedRing", "ring_order"]

logger = logging.getLogger(__name__)

TILE_ELEMS = 1 << 17
"""Elements of a tile, part of the layout that ranks must share: 512 KiB of fp32. Matrix products of
such tiles run at twice the time of a memcpy; smaller ones pay for the calls (measured)."""

_HARMLESS_CONDITION = 10.0
"""Decoders with a condition number up to this lose less in fp32 than one rounding on the wire."""


@dataclass(eq=False)
class CodedRing(Collective):
    """Coded ring all-reduce: L = pN + N - 2 rounds, L/(pN) of the buffer sent by each rank.

    Replicas differ by the *spread*; their mean over ranks is the sum, up to rounding, with centred
    decoding. With ``passes=1`` it is the ring.

    Args:
        passes: p, trips of each message round the ring; more send less and take more rounds.
        components: c of the Vandermonde code, which need not be a multiple of N; else None.
        code: "polynomial", "clustered", "fourier", "optimized" or "vandermonde".
        eps: nearness of the nodes; smaller lowers the spread and raises the rounding noise.
            Chosen for the wire if None.
        stretch: of the Fourier code's frequencies, in (0, 1]; smaller lowers the spread and raises
            the condition number.
        nodes: of the Vandermonde code, "near_one" or "roots".
        decode: "centred" (the mean over ranks is exact) or "least_squares" (each replica is a
            little closer).
        orthonormal: orthonormalise the table; chosen for the wire if None.
        shuffle: draw a new ring order for every call, the same on all ranks, so that no rank is
            always over- or underweighted by the same peers.
        seed: of the ring orders and of the stochastic rounding.
        ranks_per_host: shuffle hosts first and ranks within a host second, so that as few hops as
            before leave a host.
        wire: format of the messages: "fp64", "fp32", "fp16", "bf16", "int8"; the buffer's if None.
        block: elements that share a scale on the int8 wire.
        rounding: "nearest" or "stochastic".
        segments: pieces of each message, pipelined; chosen from the message size if None.
        inplace: work within the buffer: storage of at most 1 + N/c buffers, a little more spread.
        spread_budget: if given, code, passes, eps and stretch are chosen: the fewest bytes whose
            expected spread is at most this (relative to the rms of the sum).
        mean_error_budget: the same for the expected error of the mean over ranks.

    Raises:
        InputError, CodeError: parameters that admit no code.
    """

    passes: int = 4
    components: int | None = None
    code: str = "polynomial"
    eps: float | None = None
    stretch: float = 1.0
    nodes: str = "near_one"
    decode: str = "centred"
    orthonormal: bool | None = None
    shuffle: bool = False
    seed: int = 0
    ranks_per_host: int = 1
    wire: str | None = None
    block: int = 128
    rounding: Rounding = "nearest"
    segments: int | None = None
    inplace: bool = False
    spread_budget: float | None = None
    mean_error_budget: float | None = None
    _calls: int = field(default=0, init=False, repr=False)
    _chosen: dict[tuple[int, int, torch.dtype], tuple[Code | None, str]] = field(
        default_factory=dict, init=False, repr=False
    )

    mean_exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_segments(self.segments)
        if self.wire == "int4":
            raise InputError(
                "wire='int4' in a coded ring: its L hops would each round to 15 levels; "
                "use int8, or quantized:bits=4"
            )
        make_wire(self.wire, torch.float32, block=self.block, rounding=self.rounding)
        if self.ranks_per_host < 1:
            raise InputError(f"ranks_per_host={self.ranks_per_host}: must be at least 1")
        for name in ("spread_budget", "mean_error_budget"):
            budget = getattr(self, name)
            if budget is not None and not budget > 0:
                raise InputError(f"{name}={budget}: must be positive, or left out")
        self._design(3, torch.float32)  # raises for parameters that no code has

    # -- which code

    def _design(self, ranks: int, dtype: torch.dtype) -> Code:
        return design(
            self.code,
            ranks,
            self.passes,
            eps=self.eps,
            stretch=self.stretch,
            decode=self.decode,
            orthonormal=self.orthonormal,
            components=self.components,
            nodes=self.nodes,
            rounding=self._rounding_error(dtype),
        )

    def plan(self, numel: int, dtype: torch.dtype, ranks: int) -> tuple[Code | None, str]:
        """Return the code used for such buffers, and why; None where the plain ring is used.

        Args:
            numel: elements of the buffer.
            dtype: of the buffer.
            ranks: N.
        """
        key = (ranks, numel, dtype)
        if key not in self._chosen:
            self._chosen[key] = self._choose(numel, dtype, ranks)
            logger.info("coded ring of %d ranks, %d elements: %s", ranks, numel,
                        self._chosen[key][1])  # fmt: skip
        return self._chosen[key]

    def _choose(self, numel: int, dtype: torch.dtype, ranks: int) -> tuple[Code | None, str]:
        if self.spread_budget is None and self.mean_error_budget is None:
            code = self._design(ranks, dtype)
            return code, f"{code.describe()}, as given"
        wire = self._wire(dtype, None, 0)
        from taciturn.collectives.code_choice import choose
        choice = choose(
            ranks,
            wire_rounding=self._rounding_error(dtype),
            numel=numel,
            wire_itemsize=wire.nbytes(4096) / 4096,
            spread_budget=self.spread_budget,
            mean_error_budget=self.mean_error_budget,
        )
        return choice.code, choice.reason

    def _plain(self, dtype: torch.dtype) -> Collective:
        """Return the ring on the same wire, used where no code meets the budgets."""
        if self.wire is None or self._wire(dtype, None, 0).nbytes(1) == dtype.itemsize:
            return Ring(segments=self.segments)
        return QuantizedRing(self.wire, self.block, self.rounding, self.segments, self.seed)

    def _rounding_error(self, dtype: torch.dtype) -> float:
        """Return the rms relative error of one rounding on the wire."""
        return rounding_of(self._wire(dtype, None, 0).name, self.block, self.rounding)

    # -- one call

    def _wire(self, dtype: torch.dtype, device: torch.device | None, seed: int) -> Wire:
        return make_wire(
            self.wire, dtype, block=self.block, rounding=self.rounding, device=device, seed=seed
        )

    def _sum(self, flat: torch.Tensor, transport: Transport, header: Header) -> None:
        size = transport.size
        code, _ = self.plan(flat.numel(), flat.dtype, size)
        call, self._calls = self._calls, self._calls + 1
        if code is None:
            self._plain(flat.dtype)._sum(flat, transport, header)
            return
        order = ring_order(size, self.seed, call, self.ranks_per_host) if self.shuffle else None
        position = transport.rank if order is None else order.index(transport.rank)
        successor, predecessor = ring_neighbours(transport)
        peers_to, peers_from = [successor], [predecessor]
        if order is not None:
            successor, predecessor = order[(position + 1) % size], order[position - 1]
            peers_to.append(successor)
            peers_from.append(predecessor)
        # Every rank has designed the table for itself: its checksum goes into the header.
        agreed = f"{header.method} call {call} table {zlib.crc32(code.table.tobytes())}"
        transport.agree(replace(header, method=agreed), peers_to, peers_from)
        wire = self._wire(flat.dtype, flat.device, call_seed(self.seed, transport.rank, call))
        layout = _Layout(code, flat.numel(), self.inplace)
        segments = self._segments(layout, wire)
        work = flat if flat.dtype == wire.compute else flat.to(wire.compute)
        chain_type = _InPlaceChain if self.inplace else _CodedChain
        chain = chain_type(code, layout, work, wire, position, segments)
        run_rounds(
            chain, transport, code.rounds, segments, successor, predecessor, frugal=self.inplace
        )
        with transport.ledger.codec():
            chain.finish()
            if work is not flat:
                flat.copy_(work)

    def _segments(self, layout: _Layout, wire: Wire) -> int:
        return min(segments_for(wire.nbytes(layout.length), self.segments), max(layout.length, 1))

    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        numel, dtype = real_numel(numel, dtype)
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        code, _ = self.plan(numel, dtype, ranks)
        if code is None:
            cost = self._plain(dtype).cost(numel, dtype, ranks, rank)
            assert cost is not None
            return cost
        wire = self._wire(dtype, None, 0)
        layout = _Layout(code, numel, self.inplace)
        segments = self._segments(layout, wire)
        lengths = [b - a for a, b in bounds(layout.length, segments)]
        messages, nbytes = header_cost(2 if self.shuffle else 1)
        slot = layout.length * wire.compute.itemsize
        native = _is_native(wire)
        slots = 2 if self.inplace else code.rounds + 1 + 2 * native
        codes = 0 if native else 4 * sum(wire.nbytes(length) for length in lengths)
        return Cost(
            rounds=code.rounds,
            messages=messages + code.rounds * sum(1 for length in lengths if length),
            sent_bytes=nbytes + code.rounds * sum(wire.nbytes(length) for length in lengths),
            workspace_bytes=slots * slot + codes + layout.padding * wire.compute.itemsize,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = counter_from(state)


def ring_order(ranks: int, seed: int, call: int, ranks_per_host: int = 1) -> list[int]:
    """Return the order of the ranks in the ring for one call, the same on every rank.

    Hosts hold ``ranks_per_host`` consecutive ranks each (the last one what is left); they are
    shuffled, and the ranks within each, so that one hop per host leaves it.
    """
    generator = random.Random(f"taciturn ring order {seed} {call}")
    hosts = [list(range(a, min(a + ranks_per_host, ranks))) for a in range(0, ranks, ranks_per_host)]
    generator.shuffle(hosts)
    for host in hosts:
        generator.shuffle(host)
    return [rank for host in hosts for rank in host]


def _is_native(wire: Wire) -> bool:
    return wire.name in ("fp32", "fp64") and wire.nbytes(1) == wire.compute.itemsize


class _Layout:
    """Where the components lie: families of components that are encoded and decoded together.

    In chains a family is one chain, p components; in the shared layout (Vandermonde) there is one
    family of all c. A family of q components of ``length`` elements each is one stretch of memory.
    It is cut into pieces, the pipeline's segments, and each piece into tiles of shape (q, w), so
    that element j of a message mixes elements that are w apart, within one tile.
    """

    def __init__(self, code: Code, numel: int, inplace: bool = False) -> None:
        self.families = 1 if code.shared else code.ranks
        self.width = code.table.shape[1]
        self.numel = numel
        self.length = -(-numel // (self.families * self.width))
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


class _Messages:
    """The buffers in which messages travel, by segment."""

    def __init__(self, wire: Wire, lengths: list[int], like: torch.Tensor) -> None:
        self.wire = wire
        self.native = _is_native(wire)
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


class _CodedChain:
    """All contributions of a family are encoded by one matrix product when it first passes.

    The contribution of a round becomes the message forwarded after it, M_t = R_t + (V[t] - V[t-N])
    g, by adding what was received: L + 1 slots. Decoding takes the own term out of it again and
    adds the own components exactly: D M + (I - D V) g.
    """

    def __init__(
        self,
        code: Code,
        layout: _Layout,
        flat: torch.Tensor,
        wire: Wire,
        position: int,
        segments: int,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = _Encoder(code, position, flat, "exact", precise=_is_native(wire))
        self.pieces = bounds(layout.length, segments)
        self.families, self.rest = layout.stretches(flat)
        self.messages = _Messages(wire, [b - a for a, b in self.pieces], flat)
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

    def first(self, segment: int) -> torch.Tensor:
        return self.messages.outgoing(1, segment, self.slot(0, segment))

    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.arrivals[round % 2][segment]

    def handle(self, round: int, segment: int, received: torch.Tensor) -> torch.Tensor:
        slot = self.slot(round, segment)
        self.messages.add(received, slot)
        if round == self.encoder.code.rounds:
            return slot
        return self.messages.outgoing(round + 1, segment, slot)

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


class _InPlaceChain:
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
        layout: _Layout,
        flat: torch.Tensor,
        wire: Wire,
        position: int,
        segments: int,
    ) -> None:
        self.layout, self.flat = layout, flat
        self.encoder = _Encoder(code, position, flat, "fresh", precise=_is_native(wire))
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
                values[where] += change[row] @ block.to(change.dtype)
            if row == max(early - 1, 0):
                block.copy_(change[early:] @ block.to(change.dtype))
            if row >= early:
                values[where].add_(block[row - early])
                block[row - early].copy_(values[where])

    def first(self, segment: int) -> torch.Tensor:
        values = self.messages.arrivals[0][segment] if self.messages.native else self.values[segment]
        values.zero_()
        self.contribute(0, segment, values)
        return self.messages.outgoing(1, segment, values)

    def place(self, round: int, segment: int) -> torch.Tensor:
        return self.messages.arrivals[round % 2][segment]

    def handle(self, round: int, segment: int, received: torch.Tensor) -> torch.Tensor:
        values = received
        if not self.messages.native:
            values = self.values[segment]
            self.messages.wire.decode(received, values)
        self.contribute(round, segment, values)
        if round == self.encoder.code.rounds:
            return values
        return self.messages.outgoing(round + 1, segment, values)

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

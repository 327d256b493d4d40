"""CERAR, the coded approximate ring all-reduce: fewer bytes than any exact ring.

S. Munim and A. Ramamoorthy, "Communication-Efficient Distributed Training via Ring-Based Coded
Approximate All-Reduce", arXiv:2609.23898, gives rounds L = c + N - 2, rate L/c and storage 1 + N/c;
the protocol is derived in ``docs/algorithms.md``; its codes are designed in
:mod:`taciturn.collectives.codes`.

N ranks stand in a ring; the buffer is cut into N chains of p components (p = ``passes``, c = pN).
The message of chain b starts at rank b and goes round p times. At round t rank i receives it from
its predecessor, b = (i - t) mod N, adds ``(V[t] - V[t-N]) . g`` - its contribution of this pass in
place of that of the pass before - and forwards it. From round N - 1 on every message holds all
ranks; each rank solves the p complete messages of each chain for the p sums.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from taciturn.collectives import products
from taciturn.collectives.base import Collective, Cost, bounds, header_cost, real_numel
from taciturn.collectives.coded_chain import Arena, CodedChain, InPlaceChain, Layout, is_native
from taciturn.collectives.codes import Code, Own, choose, design, rounding_of
from taciturn.collectives.pipeline import run_rounds, segments_for
from taciturn.collectives.quantized_ring import QuantizedRing, call_seed, counter_from
from taciturn.collectives.ring import Ring, check_segments, ring_neighbours
from taciturn.collectives.wires import Rounding, Wire, make_wire
from taciturn.errors import InputError
from taciturn.ranges import check_number, check_whole
from taciturn.transport import Header, Transport

__all__ = ["CodedRing", "ring_order"]

logger = logging.getLogger(__name__)

_BUDGETS = ("spread_budget", "mean_error_budget")
_CHOSEN = ("passes", "components", "code", "eps", "stretch", "nodes", "orthonormal")
"""What budgets choose, or would have to."""


@dataclass(eq=False)
class CodedRing(Collective):
    """Coded ring all-reduce: L = pN + N - 2 rounds, L/(pN) of the buffer sent by each rank.

    Replicas differ by the *spread*; their mean over ranks is the sum, up to rounding, with centred
    decoding. With ``passes=1`` it is the ring.

    Args:
        passes: p, trips of each message round the ring; more send less and take more rounds.
            4 if None, or chosen by the budgets.
        components: c of the Vandermonde code, which need not be a multiple of N; else None.
        code: "polynomial", "clustered", "fourier", "optimized" or "vandermonde". The first if None,
            or chosen by the budgets.
        eps: nearness of the nodes; smaller lowers the spread and raises the rounding noise.
            Chosen for the wire if None.
        stretch: of the Fourier code's frequencies, in (0, 1]; smaller lowers the spread and raises
            the condition number. 1 if None, or chosen by the budgets.
        nodes: of the Vandermonde code, "near_one" or "roots"; the first if None.
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
        spread_budget: if given, code, passes, eps and stretch are chosen, and must not be given
            too: the fewest bytes whose expected spread is at most this (relative to the rms of the
            sum).
        mean_error_budget: the same for the expected error of the mean over ranks.

    Raises:
        InputError, CodeError: parameters that admit no code.
    """

    passes: int | None = None
    components: int | None = None
    code: str | None = None
    eps: float | None = None
    stretch: float | None = None
    nodes: str | None = None
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
    _arena: Arena = field(default_factory=Arena, init=False, repr=False)

    name: ClassVar[str] = "coded"
    mean_exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_segments(self.segments)
        if self.wire == "int4":
            raise InputError(
                "wire='int4' in a coded ring: its L hops would each round to 15 levels; "
                "use int8, or quantized:bits=4"
            )
        make_wire(self.wire, torch.float32, block=self.block, rounding=self.rounding)
        check_whole("seed", self.seed, 0)
        check_whole("ranks_per_host", self.ranks_per_host, 1)
        budgets = [name for name in _BUDGETS if getattr(self, name) is not None]
        for name in budgets:
            check_number(name, getattr(self, name), 0, above=True, hint="or leave it out")
        products.prepare()
        if budgets:
            self._refuse_beside(budgets)
        else:
            code = self._design(3, torch.float32)  # raises for what no code has
            if not code.shared:  # whose clusters of nodes are smaller the more ranks there are
                code.decoders()

    # -- which code

    def _refuse_beside(self, budgets: list[str]) -> None:
        """Raise for what the budgets would choose, or take no account of."""
        given = [name for name in _CHOSEN if getattr(self, name) is not None]
        given += ["decode"] * (self.decode != "centred")
        if given:
            told = ", ".join(f"{name}={getattr(self, name)!r}" for name in given)
            raise InputError(
                f"{told} beside {' and '.join(budgets)}: budgets choose the code with its "
                f"parameters, decoded centred; drop {' and '.join(given)}, or "
                f"{' and '.join(budgets)}"
            )

    def _design(self, ranks: int, dtype: torch.dtype) -> Code:
        return design(
            "polynomial" if self.code is None else self.code,
            ranks,
            4 if self.passes is None else self.passes,
            eps=self.eps,
            stretch=1.0 if self.stretch is None else self.stretch,
            decode=self.decode,
            orthonormal=self.orthonormal,
            components=self.components,
            nodes="near_one" if self.nodes is None else self.nodes,
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
            self._chosen[key] = code, _ = self._choose(numel, dtype, ranks)
            if code is not None:
                self._warn_of_noise(code, dtype)
            logger.info("coded ring of %d ranks, %d elements: %s", ranks, numel,
                        self._chosen[key][1])  # fmt: skip
        return self._chosen[key]

    def _choose(self, numel: int, dtype: torch.dtype, ranks: int) -> tuple[Code | None, str]:
        if self.spread_budget is None and self.mean_error_budget is None:
            code = self._design(ranks, dtype)
            return code, f"{code.describe()}, as given"
        wire = self._wire(dtype, None, 0)
        choice = choose(
            ranks,
            wire_rounding=self._rounding_error(dtype),
            numel=numel,
            wire_itemsize=wire.nbytes(4096) / 4096,
            spread_budget=self.spread_budget,
            mean_error_budget=self.mean_error_budget,
            own=self._own,
        )
        if choice.code is not None:
            return choice.code, choice.reason
        return None, f"{choice.reason} ({self._plain(dtype, ranks)})"

    def _warn_of_noise(self, code: Code, dtype: torch.dtype) -> None:
        """Say aloud that roundings drown the sum: it is no error, since codes are also studied."""
        noise = code.expected(self._rounding_error(dtype), self._own).mean_error
        if not noise < 1:
            logger.warning(
                "%s: its decoder amplifies the wire's roundings to %.2g times the sum, so that the "
                "result is noise; take code=fourier, fewer passes, a wider wire or fp64 buffers",
                code.describe(), noise,
            )  # fmt: skip

    def _plain(self, dtype: torch.dtype, ranks: int) -> Collective:
        """Return the ring used where no code meets the budgets.

        On the same wire, unless its own roundings miss the budget: the partial sums of h = 1..N
        ranks are rounded, r sqrt(1 + ... + N) in units of one rank's gradient, r sqrt((N + 1) / 2)
        of the sum.
        """
        error = self._rounding_error(dtype) * math.sqrt((ranks + 1) / 2)
        too_coarse = self.mean_error_budget is not None and error > self.mean_error_budget
        narrow = self._wire(dtype, None, 0).nbytes(1) < dtype.itemsize
        if self.wire is None or too_coarse or not narrow:
            return Ring(segments=self.segments)
        return QuantizedRing(self.wire, self.block, self.rounding, self.segments, self.seed)

    @property
    def _own(self) -> Own:
        """Which decoding is used: in place, a rank's own components are gone."""
        return "fresh" if self.inplace else "exact"

    def _rounding_error(self, dtype: torch.dtype) -> float:
        """Return the rms relative error of one rounding on the wire."""
        return rounding_of(self._wire(dtype, None, 0).name, self.block, self.rounding)

    # -- one call

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
        size = transport.size
        code, _ = self.plan(flat.numel(), flat.dtype, size)
        call, self._calls = self._calls, self._calls + 1
        if code is None:
            self._plain(flat.dtype, size)._sum(flat, transport, header, residual)
            return
        order = ring_order(size, self.seed, call, self.ranks_per_host) if self.shuffle else None
        position = transport.rank if order is None else order.index(transport.rank)
        successor, predecessor = ring_neighbours(transport)
        peers_to, peers_from = [successor], [predecessor]
        if order is not None:
            successor, predecessor = order[(position + 1) % size], order[position - 1]
            peers_to.append(successor)
            peers_from.append(predecessor)
        # Every rank has designed the code for itself: what it came to goes into the header.
        state = f"call {call}, code {code.fingerprint:08x}"
        transport.agree(replace(header, state=state), peers_to, peers_from)
        wire = self._wire(flat.dtype, flat.device, call_seed(self.seed, transport.rank, call))
        layout = Layout(code, flat.numel(), self.inplace)
        segments = self._segments(layout, wire)
        work = flat if flat.dtype == wire.compute else flat.to(wire.compute)
        chain: CodedChain | InPlaceChain
        if self.inplace:
            chain = InPlaceChain(code, layout, work, wire, position, segments)
        else:
            chain = CodedChain(
                code, layout, work, wire, position, segments, self._arena, transport.ledger
            )
        try:
            run_rounds(
                chain, transport, code.rounds, segments, successor, predecessor, frugal=self.inplace
            )
            with transport.ledger.codec():
                chain.finish()
        finally:
            chain.close()
        with transport.ledger.codec():
            if work is not flat:
                flat.copy_(work)

    def _segments(self, layout: Layout, wire: Wire) -> int:
        segments: int = segments_for(wire.nbytes(layout.length), self.segments)
        return min(segments, max(layout.length, 1))

    @override
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        numel, dtype = real_numel(numel, dtype)
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        code, _ = self.plan(numel, dtype, ranks)
        if code is None:
            cost = self._plain(dtype, ranks).cost(numel, dtype, ranks, rank)
            assert cost is not None
            return cost
        wire = self._wire(dtype, None, 0)
        layout = Layout(code, numel, self.inplace)
        segments = self._segments(layout, wire)
        lengths = [b - a for a, b in bounds(layout.length, segments)]
        messages, nbytes = header_cost(2 if self.shuffle else 1)
        slot = layout.length * wire.compute.itemsize
        native = is_native(wire)
        slots = (2 if native else 1) if self.inplace else code.rounds + 2 + (4 if native else 1)
        codes = 0 if native else 4 * sum(wire.nbytes(length) for length in lengths)
        return Cost(
            rounds=code.rounds,
            messages=messages + code.rounds * sum(1 for length in lengths if length),
            sent_bytes=nbytes + code.rounds * sum(wire.nbytes(length) for length in lengths),
            workspace_bytes=slots * slot + codes + layout.padding * wire.compute.itemsize,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls = counter_from(state)


def ring_order(ranks: int, seed: int, call: int, ranks_per_host: int = 1) -> list[int]:
    """Return the order of the ranks in the ring for one call, the same on every rank.

    Hosts hold ``ranks_per_host`` consecutive ranks each (the last one what is left); they are
    shuffled, and the ranks within each, so that one hop per host leaves it.
    """
    generator = random.Random(f"taciturn ring order {seed} {call}")
    hosts = [
        list(range(a, min(a + ranks_per_host, ranks))) for a in range(0, ranks, ranks_per_host)
    ]
    generator.shuffle(hosts)
    for host in hosts:
        generator.shuffle(host)
    return [rank for host in hosts for rank in host]

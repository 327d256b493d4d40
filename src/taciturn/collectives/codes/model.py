"""One code of the coded ring: its table, and all that follows from the table.

The protocol that a table drives is told in ``codes``, where codes are designed.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taciturn.collectives.codes import decoding
from taciturn.collectives.codes.errors import CodeErrors, expected_in_chains, expected_shared
from taciturn.collectives.codes.tables import Shape
from taciturn.errors import CodeError
from taciturn.ranges import check_number

__all__ = ["Code", "Own"]

Array: TypeAlias = NDArray[np.float64]
Own: TypeAlias = Literal["exact", "fresh"]


@dataclass(frozen=True, eq=False)
class Code:
    """One code: its table, and all that follows from it.

    Two layouts. In *chains* (``shared`` false) a message of chain b combines the p components of
    chain b. In the *shared* layout (Vandermonde, any c >= 1) every message combines all c
    components, and a rank decodes its c complete messages of all chains at once.

    Law: for centred decoding of a shift-invariant table (every built-in one) the mean over
    ranks is exact, and so is each replica of what all ranks share (test_codes_constructions.py).

    Attributes:
        name: key in ``CODES``.
        ranks: N >= 1.
        passes: p, trips of each chain round the ring; ceil(c / N) in the shared layout.
        components: c; p N in chains.
        shared: whether each message combines all components.
        table: V, shape (L + 1, p), or (L + 1, c) if shared; read-only.
        decode: "centred" (inverse of the mean over h of V_h) or "least_squares".
        orthonormal: whether the columns were orthonormalised (times sqrt(L + 1)).
        eps: nearness of the nodes, None where the code has none.
        stretch: of the Fourier code's frequencies; 1 elsewhere.
        shape: of the optimized code's generator, see ``codes.tables``; None elsewhere.
        turns: for "roots" nodes only: rank k turns each pair of components by ``turns k / ranks``
            of a circle before it encodes and back after it decodes. One integer a column, 0
            where nothing turns, +j and -j for a pair, ranks / 2 for a change of sign.
    """

    name: str
    ranks: int
    passes: int
    components: int
    shared: bool
    table: Array = field(repr=False)
    decode: str = "centred"
    orthonormal: bool = False
    eps: float | None = None
    stretch: float = 1.0
    shape: Shape | None = None
    turns: tuple[int, ...] | None = None
    _decoders: dict[str, Array] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.table.flags.writeable = False

    @property
    def rounds(self) -> int:
        """L = c + N - 2, the rounds of one all-reduce; 0 for a single rank."""
        return self.components + self.ranks - 2 if self.ranks > 1 else 0

    @property
    def sent_buffers(self) -> float:
        """Bytes each rank sends, in buffers: L / c = 1 + (N - 2)/c; 0 for a single rank."""
        return self.rounds / self.components

    @property
    def storage_buffers(self) -> float:
        """Workspace of the in-place variant, in buffers: (L + 2)/c = 1 + N/c."""
        return 1 + self.ranks / self.components

    def receive_rounds(self, residue: int = 0) -> tuple[int, ...]:
        """Return the rounds whose messages a receiver decodes, p of them (c if shared).

        Args:
            residue: (i - b) mod N for receiver i and chain b; ignored in the shared layout.
        """
        n = self.ranks
        if n == 1:
            return tuple(range(self.components))
        if self.shared:
            return tuple(range(n - 1, self.rounds + 1))
        if not 0 <= residue < n:
            raise CodeError(f"residue {residue} of a chain: give (i - b) mod {n}, in 0..{n - 1}")
        first = residue if residue == n - 1 else residue + n
        return tuple(range(first, first + n * self.passes, n))

    @property
    def residues(self) -> range:
        """The residues with a decoder of their own: 0..N-1, or only 0 if shared."""
        return range(1 if self.shared else self.ranks)

    def contributions(self, residue: int, own: Own = "exact") -> Array:
        """Return V_h for each h, shape (H, p, p): row a is V[t_a - h], t_a the receive rounds.

        ``own`` as in ``decoders``: h = 1..N-1 for "exact", 0..N-1 for "fresh".
        """
        hops = self.hops(own)
        received = np.asarray(self.receive_rounds(residue))
        stacked: Array = self.table[received[None, :] - np.asarray(hops)[:, None]]
        if self.turns is not None:  # seen from rank 0, the sender stands at rank -h
            stacked = stacked @ np.stack([self._turn(-h) for h in hops])
        return stacked

    def hops(self, own: Own = "exact") -> range:
        """How many hops away the senders stand whose sum a message is decoded to."""
        return range(0 if own == "fresh" or self.ranks == 1 else 1, self.ranks)

    def decoders(self, own: Own = "exact") -> Array:
        """Return D with ``D V_h`` near I: shape (N, p, p), by residue; (1, c, c) if shared.

        ``own="exact"``: D is for the sum of the other ranks, h = 1..N-1, decoded from the received
        messages less the own stale term; the own components are then added exactly.
        ``own="fresh"``: D is for the sum of all, h = 0..N-1, decoded from the forwarded messages.

        Raises:
            CodeError: the matrix to invert is singular.
        """
        if own not in ("exact", "fresh"):
            raise CodeError(f"own {own!r} is unknown: use 'exact' or 'fresh'")
        if own not in self._decoders:
            each = (self.contributions(w, own) for w in self.residues)  # large: one at a time
            if self.decode == "centred":
                stack = np.stack([decoding.centred(v)[0] for v in each])
            else:
                stack = np.stack([decoding.least_squares(v) for v in each])
            stack.flags.writeable = False
            self._decoders[own] = stack
        return self._decoders[own]

    @cached_property
    def condition_number(self) -> float:
        """The largest condition number, over residues, of the mean over h = 1..N-1 of V_h.

        That mean is the matrix which centred decoding inverts; it is stated for least squares too.
        """
        return max(decoding.centred(self.contributions(w))[1] for w in self.residues)

    def rank_table(self, rank: int) -> Array:
        """The table that ``rank`` encodes with: ``table``, turned by the rank for "roots" nodes."""
        return self.table if self.turns is None else self.table @ self._turn(rank)

    def rank_decoders(self, rank: int, own: Own = "exact") -> Array:
        """The decoders of ``rank``: ``decoders(own)``, turned back for "roots" nodes."""
        decoders = self.decoders(own)
        return decoders if self.turns is None else self._turn(rank).T @ decoders

    def _turn(self, rank: int) -> Array:
        """Orthogonal matrix by which ``rank`` turns its components; they add up over ranks."""
        matrix = np.eye(self.components)
        for q, j in enumerate(self.turns or ()):
            angle = 2 * math.pi * ((j * rank) % self.ranks) / self.ranks
            if 2 * j == self.ranks:
                matrix[q, q] = -1.0 if rank % 2 else 1.0
            elif j > 0:
                c, s = math.cos(angle), math.sin(angle)
                matrix[q : q + 2, q : q + 2] = [[c, -s], [s, c]]
        return matrix

    def expected(self, rounding: float, own: Own = "exact") -> CodeErrors:
        """Return the errors to expect for gradients independent between ranks and components.

        Args:
            rounding: rms relative error of one rounding on the wire, see ``rounding_of``; 0
                leaves the bias only. Rounding of the local arithmetic is not in it: float32
                arithmetic on an fp32 wire makes the noise 1.05 to 1.7 times larger (simulated,
                p = 1..16).
            own: which decoding, as in ``decoders``.
        """
        check_number("rounding", rounding, 0, hint="it is a relative error", error=CodeError)
        if self.ranks == 1:
            return CodeErrors(0.0, 0.0, 0.0, math.nan, 0.0)
        decoders, kept = self.decoders(own), own == "fresh"
        if self.shared:
            return expected_shared(
                table=self.table,
                decoder=decoders[0],
                contributions=self.contributions(0, own),
                receive_rounds=self.receive_rounds(),
                hops=self.hops(own),
                turned=np.stack([self._turn(k) for k in range(self.ranks)]),
                rounding=rounding,
                kept=kept,
            )
        return expected_in_chains(
            table=self.table,
            decoders=decoders,
            contributions=(self.contributions(w, own) for w in self.residues),
            receive_rounds=[self.receive_rounds(w) for w in self.residues],
            hops=self.hops(own),
            rounding=rounding,
            kept=kept,
        )

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that agree on two ranks exactly if they were given the same code.

        Taken from the parameters: tables from different processors may differ in their last bits.
        """
        values = (self.name, self.ranks, self.components, self.shared, self.decode,
                  self.orthonormal, self.eps, self.stretch, self.shape, self.turns)  # fmt: skip
        return zlib.crc32(repr(values).encode())

    def describe(self) -> str:
        """Name and parameters in words, e.g. ``fourier, passes 8, stretch 0.7``."""
        parts = [self.name]
        parts.append(f"components {self.components}" if self.shared else f"passes {self.passes}")
        if self.eps is not None:
            parts.append(f"eps {self.eps:.3g}")
        if self.orthonormal:
            parts.append("orthonormal")
        if self.stretch != 1.0:
            parts.append(f"stretch {self.stretch:g}")
        if self.shape is not None:
            parts.append("shape " + " ".join(f"{x:.3g}" for x in astuple(self.shape)))
        if self.decode != "centred":
            parts.append(self.decode)
        return ", ".join(parts)

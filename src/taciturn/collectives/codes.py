"""Codes of the coded ring: which combination of its components a rank adds to a message, and when.

``ranks`` ranks (N) stand in a ring. A buffer is cut into N *chains* of ``passes`` components (p)
each, c = pN in all; a table V with rows V[t] of length p, t = 0..L, L = c + N - 2, says how the
components are combined. Chain b starts at rank b with the message ``V[0] . g_b``. At round t
rank i receives ``R = sum over h = 1..N of V[t-h] . g_(i-h)`` (V[t] = 0 for t < 0; the term h = N is
its own of one pass before) and forwards ``R + (V[t] - V[t-N]) . g_i``. From round N - 1 on
every message holds all ranks, so in L rounds each rank gets p complete messages of each chain
and solves for the p sums: rate L/c = 1 + (N-2)/c against 2(N-1)/N of a plain ring, which is p = 1.

The protocol meets the rounds, rate and storage of CERAR (Munim and Ramamoorthy,
arXiv:2609.23898, abstract); centred decoding and the Fourier code are this project's own.

>>> code = design("fourier", ranks=8, passes=16)
>>> code.rounds, round(code.sent_buffers, 3)
(134, 1.047)
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from taciturn.collectives import code_decoding, code_tables
from taciturn.collectives.code_errors import (
    CodeErrors,
    expected_in_chains,
    expected_shared,
    rounding_of,
)
from taciturn.collectives.code_search import search_shape
from taciturn.errors import CodeError

__all__ = ["CODES", "EPS_GRID", "Code", "CodeErrors", "CodeSpec", "design", "rounding_of"]

Array: TypeAlias = NDArray[np.float64]
Own: TypeAlias = Literal["exact", "fresh"]

# From which a default eps is taken: 1, 10^(-1/8), 10^(-2/8), ... 1e-4.
EPS_GRID = tuple(float(f"{10 ** (-k / 8):.3g}") for k in range(33))


@dataclass(frozen=True, eq=False)
class Code:
    """One code: its table, and all that follows from it.

    Two layouts. In *chains* (``shared`` false) a message of chain b combines the p components of
    chain b. In the *shared* layout (Vandermonde, any c >= 1) every message combines all c
    components, and a rank decodes its c complete messages of all chains at once.

    Law: for centred decoding of a shift-invariant table (every built-in one) the mean over
    ranks is exact, and so is each replica of what all ranks have in common (tests/test_codes.py).

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
        shape: of the optimized code's generator, see ``code_tables``; None elsewhere.
        turns: for "roots" nodes only: rank k turns each pair of components by ``turns k / ranks``
            of a circle before it encodes and back after it decodes. One integer a column, 0
            where nothing turns, +j and -j for a pair, ranks / 2 for a change of sign.
    """

    name: str
    ranks: int
    passes: int
    components: int
    shared: bool
    table: Array
    decode: str = "centred"
    orthonormal: bool = False
    eps: float | None = None
    stretch: float = 1.0
    shape: code_tables.Shape | None = None
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
            each = [self.contributions(w, own) for w in self.residues]
            if self.decode == "centred":
                stack = np.stack([code_decoding.centred(v)[0] for v in each])
            else:
                stack = np.stack([code_decoding.least_squares(v) for v in each])
            stack.flags.writeable = False
            self._decoders[own] = stack
        return self._decoders[own]

    @cached_property
    def condition_number(self) -> float:
        """The largest condition number, over residues, of the mean over h = 1..N-1 of V_h.

        That mean is the matrix which centred decoding inverts; it is stated for least squares too.
        """
        return max(code_decoding.centred(self.contributions(w))[1] for w in self.residues)

    def rank_table(self, rank: int) -> Array:
        """The table that ``rank`` encodes with: ``table``, turned by the rank for "roots" nodes."""
        return self.table if self.turns is None else self.table @ self._turn(rank)

    def rank_decoders(self, rank: int, own: Own = "exact") -> Array:
        """The decoders of ``rank``: ``decoders(own)``, turned back for "roots" nodes."""
        decoders = self.decoders(own)
        return decoders if self.turns is None else self._turn(rank).T @ decoders

    def _turn(self, rank: int) -> Array:
        """Orthogonal matrix by which ``rank`` turns its components; they add up over ranks."""
        assert self.turns is not None
        matrix = np.eye(self.components)
        for q, j in enumerate(self.turns):
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
                leaves the bias only. Rounding of the local arithmetic is not in it: in
                float32 on an fp32 wire it makes the noise about 1.5 times larger.
            own: which decoding, as in ``decoders``.
        """
        if not (rounding >= 0 and math.isfinite(rounding)):
            raise CodeError(f"rounding {rounding} is no relative error: give a number >= 0")
        if self.ranks == 1:
            return CodeErrors(0.0, 0.0, 0.0, math.nan, 0.0)
        decoders, kept = self.decoders(own), own == "fresh"
        if self.shared:
            return expected_shared(
                table=self.table,
                decoder=decoders[0],
                contributions=self.contributions(0, own),
                receive_rounds=self.receive_rounds(),
                ranks=self.ranks,
                rounding=rounding,
                kept=kept,
            )
        return expected_in_chains(
            table=self.table,
            decoders=decoders,
            contributions=[self.contributions(w, own) for w in self.residues],
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


@dataclass(frozen=True)
class CodeSpec:
    """One construction: what it is, and which of ``design``'s parameters it takes.

    Attributes:
        name: as given to ``design``.
        summary: one line.
        parameters: parameter -> its default, in words.
    """

    name: str
    summary: str
    parameters: Mapping[str, str]


_BEST_EPS = "smallest expected replica error for the wire's rounding"
_SPECS = (
    CodeSpec(
        "vandermonde",
        "powers of c nodes near one, all components in every message; for study in float64",
        {"components": "passes * ranks", "eps": "0.01", "nodes": "near_one"},
    ),
    CodeSpec(
        "clustered",
        "p nodes near each N-th root of unity: error O(eps), condition number O(eps^-(p-1))",
        {"eps": _BEST_EPS, "orthonormal": "false"},
    ),
    CodeSpec(
        "polynomial",
        "powers of time, the limit of clustered nodes, better scaled: accurate replicas, small p",
        {"eps": _BEST_EPS, "orthonormal": "false if eps is given, else what beats every eps"},
    ),
    CodeSpec(
        "optimized",
        "a tridiagonal generator searched for the smallest expected replica error",
        {"condition_bound": "none: the wire's rounding sets the limit"},
    ),
    CodeSpec(
        "fourier",
        "nodes on the unit circle: condition number below pi/2 for every p; replicas differ",
        {"stretch": "1", "orthonormal": "false"},
    ),
)
CODES: Mapping[str, CodeSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def design(
    code: str,
    ranks: int,
    passes: int = 1,
    *,
    eps: float | None = None,
    stretch: float = 1.0,
    decode: str = "centred",
    orthonormal: bool | None = None,
    components: int | None = None,
    nodes: str = "near_one",
    rounding: float | None = None,
    condition_bound: float | None = None,
) -> Code:
    """Return the code, the same on every rank that asks with the same arguments.

    What is searched (a default eps, the optimized code) is searched on coarse grids, so that
    ranks which search for themselves agree; ``Code.fingerprint`` tells whether they did.

    Args:
        code: a key of ``CODES``.
        ranks: N >= 1.
        passes: p >= 1; p = 1 is the plain ring, V = 1, whatever the code.
        eps: > 0, nearness of the nodes: smaller keeps each replica closer to the sum and
            amplifies rounding more. None: see ``CODES``.
        stretch: in (0, 1], of the Fourier code's frequencies: smaller lowers the spread, and
            raises the condition number.
        decode: "centred" or "least_squares".
        orthonormal: whether to orthonormalise the table's columns (QR, times sqrt(L + 1)), which
            keeps messages well scaled, at the price of a spread that eps no longer lowers.
            None: see ``CODES``.
        components: c >= N, Vandermonde only, no multiple of N needed.
        nodes: Vandermonde only: "near_one", or "roots" for clusters at the N-th roots of unity.
        rounding: rms relative error of one wire rounding (see ``rounding_of``) for which to
            choose; None: fp32's.
        condition_bound: largest condition number that the optimized code may have.

    Raises:
        CodeError: an unknown code, or parameters for which there is none.
    """
    request = _Request(
        code, ranks, passes, eps, float(stretch), decode, orthonormal, components, nodes,
        rounding_of("fp32") if rounding is None else rounding, condition_bound,
    )  # fmt: skip
    _check(request)
    return _build(request)


@dataclass(frozen=True)
class _Request:
    """The arguments of ``design``."""

    code: str
    ranks: int
    passes: int
    eps: float | None
    stretch: float
    decode: str
    orthonormal: bool | None
    components: int | None
    nodes: str
    rounding: float
    condition_bound: float | None


def _check(request: _Request) -> None:
    """Refuse what no code exists for: values out of range, then keys that mean nothing here."""
    r = request
    if r.code not in CODES:
        near = difflib.get_close_matches(str(r.code), CODES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CodeError(f"no code is called {r.code!r}: {hint}known are {', '.join(CODES)}")
    for name in ("ranks", "passes", "components"):
        value = getattr(r, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and value >= 1) and not (name == "components" and value is None):
            raise CodeError(f"{name} {value!r} is impossible: give a whole number >= 1")
    if r.eps is not None and not (r.eps > 0 and math.isfinite(r.eps)):
        raise CodeError(f"eps {r.eps} is impossible: give a number > 0, such as 0.05")
    if not 0 < r.stretch <= 1:
        raise CodeError(f"stretch {r.stretch} is impossible: give a number in (0, 1]")
    if r.decode not in ("centred", "least_squares"):
        raise CodeError(f"decode {r.decode!r} is unknown: use 'centred' or 'least_squares'")
    if r.nodes not in ("near_one", "roots"):
        raise CodeError(f"nodes {r.nodes!r} are unknown: use 'near_one' or 'roots'")
    if not (r.rounding >= 0 and math.isfinite(r.rounding)):
        raise CodeError(f"rounding {r.rounding} is no relative error: give a number >= 0")
    if r.condition_bound is not None and not r.condition_bound >= 1:
        raise CodeError(f"condition_bound {r.condition_bound} is impossible: give a number >= 1")
    given = {
        "eps": r.eps is not None,
        "stretch": r.stretch != 1,
        "orthonormal": bool(r.orthonormal),
        "components": r.components not in (None, r.passes * r.ranks),
        "nodes": r.nodes != "near_one",
        "condition_bound": r.condition_bound is not None,
    }
    takes = CODES[r.code].parameters
    for name, present in given.items():
        if present and name not in takes:
            others = [spec.name for spec in _SPECS if name in spec.parameters]
            raise CodeError(
                f"{name}={getattr(r, name)!r} has no meaning for {r.code!r}: leave it out "
                f"(it takes {', '.join(takes)}), or use {' or '.join(others)}"
            )
    if r.components is not None and r.components < r.ranks:
        raise CodeError(
            f"components {r.components} for {r.ranks} ranks would send more than the plain ring: "
            f"give components >= {r.ranks}"
        )


@lru_cache(maxsize=1024)
def _build(request: _Request) -> Code:
    """``design`` after the checks."""
    r = request
    n, p = r.ranks, r.passes
    if r.code == "vandermonde" and not (p == 1 and r.components is None):
        return _vandermonde(r)
    if p == 1:
        return _chains(r, np.ones((2 * n - 1, 1)))
    if r.code == "fourier":
        table = code_tables.fourier(n, p, r.stretch, bool(r.orthonormal))
        return _chains(r, table, orthonormal=bool(r.orthonormal), stretch=r.stretch)
    if r.code == "optimized":
        return _optimized(r)
    family = code_tables.polynomial if r.code == "polynomial" else code_tables.clustered

    def near(eps: float) -> Code:
        table = family(n, p, eps, bool(r.orthonormal))
        return _chains(r, table, orthonormal=bool(r.orthonormal), eps=eps)

    if r.code == "polynomial" and r.orthonormal is not False and r.eps is None:
        scaled = _chains(r, code_tables.polynomial(n, p, 1.0, True), orthonormal=True)
        return scaled if r.orthonormal else min(_best(r, near), scaled, key=_error_on(r))
    return _best(r, near) if r.eps is None else near(r.eps)


def _chains(
    request: _Request,
    table: Array,
    *,
    orthonormal: bool = False,
    eps: float | None = None,
    stretch: float = 1.0,
    shape: code_tables.Shape | None = None,
) -> Code:
    """The code in chains with this table."""
    return Code(
        name=request.code,
        ranks=request.ranks,
        passes=request.passes,
        components=request.ranks * request.passes,
        shared=False,
        table=table,
        decode=request.decode,
        orthonormal=orthonormal,
        eps=eps,
        stretch=stretch,
        shape=shape,
    )


def _vandermonde(request: _Request) -> Code:
    """The Vandermonde codes, in the shared layout."""
    n = request.ranks
    c = request.passes * n if request.components is None else request.components
    eps = 0.01 if request.eps is None else request.eps
    turns: tuple[int, ...] | None = None
    if request.nodes == "roots":
        table, turns = code_tables.near_roots(n, c, eps)
    else:
        table = code_tables.near_one(n, c, eps)
    return Code(
        name="vandermonde",
        ranks=n,
        passes=-(-c // n),
        components=c,
        shared=True,
        table=table,
        decode=request.decode,
        eps=eps,
        turns=turns,
    )


def _error_on(request: _Request) -> Callable[[Code], float]:
    """What defaults and the search minimise: the replica error on this wire."""
    return lambda code: code.expected(request.rounding).replica_error


def _best(request: _Request, near: Callable[[float], Code]) -> Code:
    """The code with the largest eps of the grid at which the error stops falling."""
    error = _error_on(request)
    best: Code | None = None
    for eps in EPS_GRID:
        try:
            code = near(eps)
            worse = best is not None and error(code) >= error(best)
        except CodeError:  # too large for these nodes, or so small that the code is singular
            continue
        if worse:
            break
        best = code
    if best is None:
        raise CodeError(
            f"no eps gives {request.ranks} ranks and {request.passes} passes a code that can be "
            "decoded: fewer passes"
        )
    return best


def _optimized(request: _Request) -> Code:
    """The best code of the tridiagonal family, searched for centred decoding."""
    n, p = request.ranks, request.passes
    bound = math.inf if request.condition_bound is None else request.condition_bound
    shape = search_shape(max(n, 2), p, request.rounding, bound)
    code = None
    if shape is not None:
        code = _chains(request, code_tables.tridiagonal(n, p, shape), shape=shape)
    if code is None or code.condition_number > bound:
        raise CodeError(
            f"no optimized code for {n} ranks and {p} passes was found with a condition number <= "
            f"{bound:g}: raise condition_bound, or fewer passes"
        )
    return code

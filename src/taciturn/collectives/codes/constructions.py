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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from taciturn.collectives.codes import tables
from taciturn.collectives.codes.errors import rounding_of
from taciturn.collectives.codes.limits import LARGEST_EPS, MOST_COMPONENTS, MOST_PASSES
from taciturn.collectives.codes.model import Code
from taciturn.collectives.codes.search import search_shape
from taciturn.errors import CodeError
from taciturn.ranges import check_number, check_whole

__all__ = ["CODES", "EPS_GRID", "CodeSpec", "design"]

Array: TypeAlias = NDArray[np.float64]

# From which a default eps is taken: 1, 10^(-1/8), 10^(-2/8), ... 1e-4.
EPS_GRID = tuple(float(f"{10 ** (-k / 8):.3g}") for k in range(33))


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
        passes: p, 1 to ``limits.MOST_PASSES``; p = 1 is the plain ring, V = 1, whatever the code.
        eps: > 0, nearness of the nodes: smaller keeps each replica closer to the sum and
            amplifies rounding more. None: see ``CODES``.
        stretch: in (0, 1], of the Fourier code's frequencies: smaller lowers the spread, and
            raises the condition number.
        decode: "centred" or "least_squares".
        orthonormal: whether to orthonormalise the table's columns (QR, times sqrt(L + 1)), which
            keeps messages well scaled, at the price of a spread that eps no longer lowers.
            None: see ``CODES``.
        components: c >= N, Vandermonde only, no multiple of N needed, up to
            ``limits.MOST_COMPONENTS``.
        nodes: Vandermonde only: "near_one", or "roots" for clusters at the N-th roots of unity.
        rounding: rms relative error of one wire rounding (see ``rounding_of``) for which to
            choose; None: fp32's.
        condition_bound: largest condition number that the optimized code may have.

    Raises:
        CodeError: an unknown code, or parameters for which there is none.
    """
    request = _Request(
        code, ranks, passes, eps, stretch, decode, orthonormal, components, nodes,
        rounding_of("fp32") if rounding is None else rounding, condition_bound,
    )  # fmt: skip
    _check(request)
    # 1 and 1.0 are one code, with one fingerprint.
    return _build(replace(request, eps=None if eps is None else float(eps), stretch=float(stretch)))


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
    check_whole("ranks", r.ranks, 1, error=CodeError)
    why = "beyond 64 each doubling saves less than a percent of the bytes"
    check_whole("passes", r.passes, 1, MOST_PASSES, hint=why, error=CodeError)
    if r.components is not None:
        check_whole("components", r.components, 1, MOST_COMPONENTS, error=CodeError)
    if r.eps is not None:
        why = "0.001 to 1 are usual"
        check_number("eps", r.eps, 0, LARGEST_EPS, above=True, hint=why, error=CodeError)
    check_number("stretch", r.stretch, 0, 1, above=True, error=CodeError)
    if r.decode not in ("centred", "least_squares"):
        raise CodeError(f"decode {r.decode!r} is unknown: use 'centred' or 'least_squares'")
    if r.nodes not in ("near_one", "roots"):
        raise CodeError(f"nodes {r.nodes!r} are unknown: use 'near_one' or 'roots'")
    check_number("rounding", r.rounding, 0, hint="it is a relative error", error=CodeError)
    if r.condition_bound is not None:
        check_number("condition_bound", r.condition_bound, 1, error=CodeError)
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
        table = tables.fourier(n, p, r.stretch, bool(r.orthonormal))
        return _chains(r, table, orthonormal=bool(r.orthonormal), stretch=r.stretch)
    if r.code == "optimized":
        return _optimized(r)
    family = tables.polynomial if r.code == "polynomial" else tables.clustered

    def near(eps: float) -> Code:
        table = family(n, p, eps, bool(r.orthonormal))
        return _chains(r, table, orthonormal=bool(r.orthonormal), eps=eps)

    if r.code == "polynomial" and r.orthonormal is not False and r.eps is None:
        scaled = _chains(r, tables.polynomial(n, p, 1.0, True), orthonormal=True)
        if r.orthonormal:
            return scaled
        try:
            best = _best(r, near)
        except CodeError:  # too many passes for any eps
            return scaled
        return min(best, scaled, key=_error_on(r))
    return _best(r, near) if r.eps is None else near(r.eps)


def _chains(
    request: _Request,
    table: Array,
    *,
    orthonormal: bool = False,
    eps: float | None = None,
    stretch: float = 1.0,
    shape: tables.Shape | None = None,
) -> Code:
    """The code in chains with this table."""
    if not np.isfinite(table).all():
        raise CodeError(
            f"the table of {request.code} with {request.passes} passes on {request.ranks} ranks "
            "exceeds float64: smaller eps, or fewer passes"
        )
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
        table, turns = tables.near_roots(n, c, eps)
    else:
        table = tables.near_one(n, c, eps)
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
    lowest = math.inf
    for eps in EPS_GRID:
        try:
            code = near(eps)
            found = error(code)
        except CodeError:  # too large for these nodes, or so small that the code is singular
            continue
        if best is not None and found >= lowest:
            break
        best, lowest = code, found
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
        code = _chains(request, tables.tridiagonal(n, p, shape), shape=shape)
    if code is None or code.condition_number > bound:
        raise CodeError(
            f"no optimized code for {n} ranks and {p} passes was found with a condition number <= "
            f"{bound:g}: raise condition_bound, or fewer passes"
        )
    return code

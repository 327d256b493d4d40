"""A link as it was measured: what ``taciturn probe`` writes and ``taciturn plan`` reads.

Every fitted number comes with an interval, every curve with the medians it was fitted to and the
error with which it predicts sizes that it has not seen. Nothing here measures or fits.

The file is JSON with a format, a version, and units in the names. A file that is damaged, in other
units or of a newer version is refused in one line.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from taciturn.errors import InputError
from taciturn.ranges import check_number, check_whole

__all__ = [
    "FORMAT",
    "VERSION",
    "Contention",
    "Estimate",
    "Fit",
    "Link",
    "MethodSpeed",
    "Piece",
]

FORMAT = "taciturn.link"
VERSION = 2

MOST_CODEC = 1.5
"""Of a call's seconds: both are medians over calls, and of two ranks."""


@dataclass(frozen=True)
class Estimate:
    """A fitted number, from 0 on, and its 95 % bootstrap interval; units are the field's."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, 0)
        if not self.low <= self.value <= self.high:
            raise InputError(
                f"value={self.value:g} is not within its interval {self.low:g} to {self.high:g}: "
                "give low <= value <= high"
            )

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        """A number without spread."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Piece:
    """A straight part of a curve, from ``from_bytes`` to where the next one begins.

    seconds = start_s + beta_s_per_byte * (bytes - from_bytes)
    """

    from_bytes: float
    start_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, 0)


@dataclass(frozen=True)
class Fit:
    """Seconds against bytes: alpha + beta * bytes, bent only where the residual asked for it.

    Laws (``test_link.py``): ``seconds_at`` is continuous, never negative, and does not fall.

    Attributes:
        alpha_s: seconds at no bytes.
        beta_s_per_byte: of the last piece, which holds for the largest sizes; above 0.
        pieces: in order of size, the first from 0 bytes on; one is the rule.
        sizes_bytes: what was measured, ascending, two sizes at least.
        seconds: the medians there.
        leave_one_out_error: median over the sizes of the relative error with which a fit to all
            other sizes predicts this one.
        leave_one_out_p90: the 90th percentile of the same.
    """

    alpha_s: Estimate
    beta_s_per_byte: Estimate
    pieces: tuple[Piece, ...]
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    leave_one_out_error: float
    leave_one_out_p90: float

    def __post_init__(self) -> None:
        check_number("beta_s_per_byte", self.beta_s_per_byte.value, 0, above=True)
        check_number("leave_one_out_error", self.leave_one_out_error, 0)
        check_number("leave_one_out_p90", self.leave_one_out_p90, 0)
        if len(self.sizes_bytes) < 2 or list(self.sizes_bytes) != sorted(set(self.sizes_bytes)):
            raise InputError(
                f"sizes_bytes={list(self.sizes_bytes)}: a line takes two sizes at least, ascending"
            )
        if len(self.seconds) != len(self.sizes_bytes):
            raise InputError(
                f"{len(self.seconds)} seconds for {len(self.sizes_bytes)} sizes_bytes: "
                "give one each"
            )
        for size in self.sizes_bytes:
            check_whole("sizes_bytes", size, 1)
        for one in self.seconds:
            check_number("seconds", one, 0, above=True)
        self._check_pieces()

    def _check_pieces(self) -> None:
        starts = [piece.from_bytes for piece in self.pieces]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise InputError(
                f"pieces begin at {starts} bytes: the first at 0, the others ascending"
            )
        ends = [self.alpha_s.value] + [
            p.start_s + p.beta_s_per_byte * (q.from_bytes - p.from_bytes)
            for p, q in pairwise(self.pieces)
        ]
        for piece, end in zip(self.pieces, ends, strict=True):
            if not isclose(piece.start_s, end, rel_tol=1e-6, abs_tol=1e-12):
                raise InputError(
                    f"the piece from {piece.from_bytes:g} bytes begins at {piece.start_s:g} s, and "
                    f"the curve before it ends at {end:g} s: pieces must meet"
                )
        if not isclose(self.pieces[-1].beta_s_per_byte, self.beta_s_per_byte.value, rel_tol=1e-6):
            raise InputError(
                f"beta_s_per_byte={self.beta_s_per_byte.value:g}, and the last piece has "
                f"{self.pieces[-1].beta_s_per_byte:g}: both are the same number"
            )

    @property
    def bytes_per_s(self) -> float:
        """Of the largest sizes: 1 / beta."""
        return 1 / self.beta_s_per_byte.value

    def seconds_at(self, size_bytes: float) -> float:
        """Seconds for so many bytes. Beyond what was measured see :meth:`covers`.

        Raises:
            InputError: a negative or infinite number of bytes.
        """
        check_number("size_bytes", size_bytes, 0)
        piece = max((p for p in self.pieces if p.from_bytes <= size_bytes), key=_from_bytes)
        return piece.start_s + piece.beta_s_per_byte * (size_bytes - piece.from_bytes)

    def farthest(self) -> tuple[int, float]:
        """The size whose seconds are farthest from the line, and by which factor, from 1 on."""
        told = [max(self.seconds_at(size), 1e-300) for size in self.sizes_bytes]
        factors = [
            max(one / line, line / one) for one, line in zip(self.seconds, told, strict=True)
        ]
        factor = max(factors)
        return self.sizes_bytes[factors.index(factor)], factor

    def covers(self, size_bytes: float) -> bool:
        """Whether the size lies between the smallest and the largest that was measured.

        What uses a size outside must say "extrapolated".
        """
        return self.sizes_bytes[0] <= size_bytes <= self.sizes_bytes[-1]


def _from_bytes(piece: Piece) -> float:
    return piece.from_bytes


@dataclass(frozen=True)
class MethodSpeed:
    """One method end to end: the average of fp32 gradients, on all ranks at once, over this link.

    Attributes:
        method: as it is written: biased ones with their error feedback.
        elems: fp32 elements averaged, ascending.
        seconds: median wall time of one call, on the rank that was slowest.
        codec_s: of which coding, by the ledger, on the rank that coded longest.
        waiting_s: of which waiting for messages, by the ledger, on the same rank.
        rounds: of the exchange, by the ledger; None where the backend's own all_reduce is used.
        sent_bytes: by a rank, by the ledger; None as for ``rounds``.
        link_s: what the fits of this file give for the exchange alone: ``rounds`` messages of
            ``sent_bytes / rounds`` both ways at once, or the backend's own curve.
        local_fixed_s: ``local_fixed_s + local_s_per_elem * elems`` is what ``seconds`` has beyond
            ``link_s``: coding, copies, and waiting for cores that the ranks share.
        local_s_per_elem: see there.
    """

    method: str
    elems: tuple[int, ...]
    seconds: tuple[float, ...]
    codec_s: tuple[float, ...]
    waiting_s: tuple[float, ...]
    rounds: tuple[int, ...] | None
    sent_bytes: tuple[int, ...] | None
    link_s: tuple[float, ...]
    local_fixed_s: Estimate
    local_s_per_elem: Estimate

    def __post_init__(self) -> None:
        if not self.elems or list(self.elems) != sorted(set(self.elems)):
            raise InputError(f"elems={list(self.elems)}: give one size at least, ascending")
        for name in ("seconds", "codec_s", "waiting_s", "link_s", "rounds", "sent_bytes"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != len(self.elems):
                raise InputError(f"{len(values)} {name} for {len(self.elems)} elems: give one each")
            for value in values:
                check_number(name, value, 0)
        for n in self.elems:
            check_whole("elems", n, 1)
        for codec_s, seconds in zip(self.codec_s, self.seconds, strict=True):
            if codec_s > MOST_CODEC * seconds:
                raise InputError(
                    f"codec_s={codec_s:g} of {seconds:g} seconds: coding is a part of them"
                )


@dataclass(frozen=True)
class Contention:
    """What each of ``pairs`` disjoint pairs of ranks gets when all send at once, one way."""

    pairs: int
    bytes_per_s_per_pair: Estimate

    def __post_init__(self) -> None:
        check_whole("pairs", self.pairs, 1)


@dataclass(frozen=True)
class Link:
    """All that is known about one link, between the ranks that measured it.

    Matrices are indexed ``[sender][receiver]``; what was not measured, the diagonal too, is None.

    Attributes:
        ranks: how many, from 2.
        hosts: machines they run on; ranks of one machine share its cores. Ranks of a testbed are
            on one host, though each has a link of its own.
        backend: of torch.distributed.
        device: ``cpu`` or ``cuda``.
        cores: of one host, the least.
        rate_bits_per_s: to which the links were shaped; None if they were not.
        one_way: a message from a rank to its successor; nobody else sends.
        both_ways: one round of a ring: each rank sends to its successor while it receives as much
            from its predecessor.
        duplex_factor: seconds of an exchange of a large message between two ranks, both ways at
            once, over those of one way: 1 for full duplex, 2 for half.
        gamma_s_per_byte: adding received fp32 data to a buffer, on all ranks at once.
        pair_bytes_per_s: bandwidth of each pair, one way, from the fastest of a few large messages.
        pair_latency_s: seconds of the fastest of a few messages of a few bytes.
        slow_rank: far slower than the others, with whomever it talks or in what it computes; None
            if there is none. ``warnings`` say in what.
        slow_links: pairs (sender, receiver) that are far slower than the others, those of
            ``slow_rank`` left out.
        contention: what a pair gets while others send too.
        link_beside_matmul: seconds of an exchange while each rank multiplies matrices, over those
            without.
        matmul_beside_link: seconds of a multiplication while each rank exchanges, over those
            without.
        all_reduce: the backend's own all_reduce by dtype (``fp32``, ``bf16``), against the bytes
            of the buffer.
        methods: speed of each, end to end.
        probed_at: date and time, ISO 8601, UTC.
        probe_s: how long it took.
        drift: median relative difference between the two sweeps of the same measurements.
        warnings: whole sentences.
    """

    ranks: int
    hosts: int
    backend: str
    device: str
    cores: int
    rate_bits_per_s: int | None
    one_way: Fit
    both_ways: Fit
    duplex_factor: Estimate
    gamma_s_per_byte: Estimate
    pair_bytes_per_s: tuple[tuple[float | None, ...], ...]
    pair_latency_s: tuple[tuple[float | None, ...], ...]
    slow_rank: int | None
    slow_links: tuple[tuple[int, int], ...]
    contention: tuple[Contention, ...]
    link_beside_matmul: Estimate
    matmul_beside_link: Estimate
    all_reduce: Mapping[str, Fit]
    methods: tuple[MethodSpeed, ...]
    probed_at: str
    probe_s: float
    drift: float
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        check_whole("ranks", self.ranks, 2, hint="one rank has no link")
        check_whole("hosts", self.hosts, 1, self.ranks)
        check_whole("cores", self.cores, 1)
        if self.rate_bits_per_s is not None:
            check_whole("rate_bits_per_s", self.rate_bits_per_s, 1)
        check_number("duplex_factor", self.duplex_factor.value, 0, above=True)
        check_number("probe_s", self.probe_s, 0)
        check_number("drift", self.drift, 0)
        for name in ("pair_bytes_per_s", "pair_latency_s"):
            matrix = getattr(self, name)
            if len(matrix) != self.ranks or any(len(row) != self.ranks for row in matrix):
                raise InputError(f"{name} is not {self.ranks} x {self.ranks}: one row per rank")
            for value in (one for row in matrix for one in row if one is not None):
                check_number(name, value, 0, above=True)
        if self.slow_rank is not None:
            check_whole("slow_rank", self.slow_rank, 0, self.ranks - 1)
        for rank in (one for pair in self.slow_links for one in pair):
            check_whole("slow_links", rank, 0, self.ranks - 1)
        for warning in self.warnings:
            if not warning.isprintable():
                raise InputError(f"warnings: {warning!r} is no line of plain text")

    @property
    def ranks_per_host(self) -> int:
        """Most ranks that share the cores of one machine, if they are spread evenly."""
        return -(-self.ranks // self.hosts)

    @property
    def crowding(self) -> float:
        """Ranks that share a core, at least 1: so many wait for each other's computing."""
        return max(1.0, self.ranks_per_host / self.cores)

    def pass_s(self, size_bytes: int) -> float:
        """Seconds until all ranks have passed once over so many bytes of gradients each."""
        return self.gamma_s_per_byte.value * size_bytes * self.crowding

    def to_json(self) -> dict[str, Any]:
        """Plain values, as in the file. Law: ``Link.from_json(link.to_json()) == link``."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: object) -> Link:
        """The link that :meth:`to_json` wrote, also after a trip through JSON.

        Raises:
            InputError: another format, a newer version, or a value that is missing, unknown or
                cannot be; the message names it.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InputError("this is no link: taciturn probe --out FILE measures one")
        version = values.get("version")
        if version != VERSION:
            raise InputError(
                f"this link is of version {version!r}, and this taciturn reads version {VERSION}: "
                "probe again, or use the taciturn that wrote it"
            )
        plain = {key: value for key, value in values.items() if key not in ("format", "version")}
        link: Link = _taken(cls, plain, "")
        return link

    def write(self, path: Path) -> None:
        """Write the file.

        Raises:
            InputError: it cannot be written.
        """
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        try:
            path.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror}; name a file in a folder that is there and "
                "in which you may write"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Link:
        """Read the file.

        Raises:
            InputError: it cannot be read, or is no link; the message names the file.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InputError(
                f"cannot read {path}: {error.strerror}; taciturn probe --out FILE writes a link"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path} is no JSON ({type(error).__name__}); taciturn probe --out FILE writes a "
                "link"
            ) from error
        try:
            return cls.from_json(values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


def _taken(kind: Any, value: object, where: str) -> Any:
    """``value`` from JSON as the type ``kind``; raises InputError with ``where`` in front."""
    if is_dataclass(kind):
        return _record(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (one for one in arguments if one is not type(None))
        return _taken(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where} is {_shown(value)}, not a list")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise InputError(f"{where} has {len(value)} values, not {len(kinds)}")
        pairs = zip(kinds, value, strict=True)
        return tuple(_taken(one, v, f"{where}[{i}]") for i, (one, v) in enumerate(pairs))
    if origin is not None:  # Mapping[str, kind]
        if not isinstance(value, dict):
            raise InputError(f"{where} is {_shown(value)}, not an object")
        return {key: _taken(arguments[1], v, f"{where}.{key}") for key, v in value.items()}
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        words = {float: "a number", int: "a whole number", str: "text"}
        raise InputError(f"{where} is {_shown(value)}, not {words[kind]}")
    return value


def _record(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} is {_shown(value)}, not an object")
    names = [field.name for field in fields(kind)]
    missing = [name for name in names if name not in value]
    unknown = [str(key) for key in value if key not in names]
    if missing or unknown:
        said = [
            f"{word} {', '.join(some[:3])}"
            for word, some in (("lacks", missing), ("has", unknown))
            if some
        ]
        known = "units are in the names, and no others are read"
        raise InputError(f"{where or 'the link'} {' and '.join(said)}: {known}")
    hints = get_type_hints(kind)
    dot = f"{where}." if where else ""
    made = {name: _taken(hints[name], value[name], f"{dot}{name}") for name in names}
    try:
        return kind(**made)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from error


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""Closed forms: what averaging a buffer sends by each method, and how long a link takes for it.

No ranks, no tensors, no torch, and the same few operations for 4 ranks as for 4096. A schedule
knows rounds, messages, bytes and memory of fp32 buffers; on a measured link it becomes seconds.
Seconds of coding are no part of it: these are measured, not derived.

Laws (``tests/test_cost.py``):

- a schedule's rounds, messages, sent and workspace bytes are those that ``Collective.cost`` and
  ``Aggregator.cost`` claim, which the ledger counts;
- its seconds are those of an event simulation of the ranks, exactly where all messages are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from taciturn.errors import InputError
from taciturn.grammar import Method, Value
from taciturn.link import Fit, Link
from taciturn.methods import parse, table
from taciturn.ranges import check_whole

__all__ = [
    "ELEMENT_BYTES",
    "HEADER_BYTES",
    "LinkSeconds",
    "Phase",
    "Schedule",
    "all_reduce_seconds",
    "gathering",
    "interpolate",
    "is_backends",
    "link_seconds",
    "option",
    "schedule",
]

ELEMENT_BYTES = 4
"""Gradients are averaged in fp32; what a method narrows it widens again."""

HEADER_BYTES = 40
"""Of the message by which neighbours agree (``transport.HEADER_BYTES``; the same, by test)."""

_SEGMENT_BYTES, _MOST_SEGMENTS = 65536, 2
"""How messages are cut (``collectives.pipeline``; the same, by test)."""

_PLAIN_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
_BITS = {"int8": 8, "int4": 4}

Shape = Sequence[int]


@dataclass(frozen=True)
class Phase:
    """Equal rounds one after the other: each rank sends so much to one rank, and gets as much.

    Attributes:
        rounds: how many.
        sent_bytes: in each of them, of the rank that sends most.
    """

    rounds: int
    sent_bytes: int


@dataclass(frozen=True)
class Schedule:
    """What one call costs one rank, and the phases it passes through.

    Attributes:
        rounds: as the ledger counts them.
        messages: sent, headers included.
        sent_bytes: headers included.
        workspace_bytes: memory beside the buffer.
        phases: for the clock: one after the other, the header first.
    """

    rounds: int
    messages: int
    sent_bytes: int
    workspace_bytes: int
    phases: tuple[Phase, ...]


_NOTHING = Schedule(0, 0, 0, 0, ())


@dataclass(frozen=True)
class LinkSeconds:
    """Seconds of an exchange, by what causes them.

    Attributes:
        latency_s: of rounds, whatever their size.
        transfer_s: of bytes; goes with the inverse of the bandwidth.
    """

    latency_s: float
    transfer_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.latency_s + self.transfer_s

    def __add__(self, other: LinkSeconds) -> LinkSeconds:
        return LinkSeconds(self.latency_s + other.latency_s, self.transfer_s + other.transfer_s)

    def scaled(self, factor: float) -> LinkSeconds:
        """Both times a factor."""
        return LinkSeconds(self.latency_s * factor, self.transfer_s * factor)


def option(method: Method, key: str) -> Value | None:
    """What a method has for a key: what was given, else the default.

    Shorthands are written out: of ``quantized:bits=8`` the ``wire`` is ``int8``.
    """
    spec = next(spec for spec in table() if spec.name == method.name)
    value = next((k.default for k in spec.keys if k.name == key), None)
    for given in spec.keys:
        if given.name in method.options:
            target, meant = given.written_out(method.options[given.name])
            if target == key:
                value = meant
    return value


def is_backends(method: Method | str) -> bool:
    """Say whether the process group's own all_reduce sends: what it sends is its own affair."""
    method = parse(method) if isinstance(method, str) else method
    over = _over(method)
    return method.name in ("backend", "cast") or (over is not None and is_backends(over))


def schedule(
    method: Method | str,
    numel: int,
    ranks: int,
    *,
    rank: int = 0,
    shapes: Sequence[Shape] | None = None,
    step: int = 0,
) -> Schedule | None:
    """What averaging ``numel`` fp32 elements costs ``rank``; None for the backend's own.

    Args:
        method: in the grammar.
        numel: elements of the buffer.
        ranks: N.
        rank: which; those at the end of a buffer may send an element less.
        shapes: of the tensors in the buffer, in their order; PowerSGD's bytes depend on them.
        step: PowerSGD's factors alternate with it.

    Raises:
        MethodError: no such method.
        InputError: a method whose bytes cannot be told from these numbers, or bad numbers.
    """
    method = parse(method) if isinstance(method, str) else method
    check_whole("numel", numel, 0)
    check_whole("ranks", ranks, 1)
    check_whole("rank", rank, 0, ranks - 1)
    if is_backends(method):
        return _NOTHING if ranks == 1 else None
    if ranks == 1:
        return _NOTHING
    if method.name == "mean":
        over = _over(method)
        assert over is not None
        return schedule(over, numel, ranks, rank=rank)
    if method.name == "powersgd":
        return _powersgd(method, numel, ranks, rank, shapes, step)
    made = {
        "ring": _ring,
        "quantized": _quantized,
        "direct": _direct,
        "coded": _coded,
        "topk": _topk,
    }.get(method.name)
    if made is None:
        raise InputError(f"{method.text!r}: no closed form of what it sends is known")
    return made(method, numel, ranks, rank)


def gathering(row_bytes: int, ranks: int) -> Schedule:
    """What ``gather_rows`` costs, by which the ranks tell each other a few numbers.

    Args:
        row_bytes: of each rank's numbers.
        ranks: N.
    """
    check_whole("row_bytes", row_bytes, 1)
    check_whole("ranks", ranks, 1)
    if ranks == 1:
        return _NOTHING
    rounds = (ranks - 1).bit_length()
    counts = [min(2**t, ranks - 2**t) for t in range(rounds)]
    return Schedule(
        rounds=rounds,
        messages=1 + rounds,
        sent_bytes=HEADER_BYTES + (ranks - 1) * row_bytes,
        workspace_bytes=ranks * row_bytes,
        phases=(_header(), *(Phase(1, count * row_bytes) for count in counts)),
    )


def _over(method: Method) -> Method | None:
    """Return the collective that an aggregator sums by, if it is one that has it."""
    if method.name == "mean":
        over = option(method, "over")
        return over if isinstance(over, Method) else parse("backend")
    if method.name == "powersgd":
        over = option(method, "over")
        return over if isinstance(over, Method) else parse("ring")
    return None


# ------------------------------------------------------------------------------- messages


@dataclass(frozen=True)
class _Wire:
    """Bytes of a message of so many elements."""

    name: str
    block: int

    @classmethod
    def of(cls, method: Method) -> _Wire:
        return cls(str(option(method, "wire") or "fp32"), int(str(option(method, "block") or 128)))

    def nbytes(self, numel: int) -> int:
        if self.name in _BITS:
            return -(-numel // self.block) * (2 + self.block * _BITS[self.name] // 8)
        return numel * _PLAIN_BYTES[self.name]


_FP32 = _Wire("fp32", 128)


def _segments(method: Method, message_bytes: int) -> int:
    given = option(method, "segments")
    if given is not None:
        return int(str(given))
    return max(1, min(_MOST_SEGMENTS, message_bytes // _SEGMENT_BYTES))


def _pieces(numel: int, parts: int) -> list[tuple[int, int]]:
    """Return (elements, count) of the contiguous pieces into which ``numel`` elements are cut."""
    short, longer = divmod(numel, parts)
    return [(size, count) for size, count in ((short + 1, longer), (short, parts - longer)) if size]


def _cut(wire: _Wire, numel: int, segments: int) -> tuple[int, int]:
    """Return messages and bytes of ``numel`` elements that travel in segments."""
    pieces = _pieces(numel, segments)
    return sum(n for _, n in pieces), sum(n * wire.nbytes(size) for size, n in pieces)


def _chunk(numel: int, ranks: int, index: int) -> int:
    """Return the elements of chunk ``index`` of a buffer cut into ``ranks``."""
    index %= ranks
    return (index + 1) * numel // ranks - index * numel // ranks


def _header(peers: int = 1) -> Phase:
    return Phase(1, peers * HEADER_BYTES)


# -------------------------------------------------------------------------------- methods


def _around(wire: _Wire, numel: int, ranks: int, rank: int, segments: int) -> Schedule:
    """Reduce-scatter and all-gather round the ring: 2(N - 1) rounds of n / N elements."""
    # All chunks twice, but for the two that the last rounds would bring.
    totals = [
        (2 * count * messages, 2 * count * nbytes)
        for size, count in _pieces(numel, ranks)
        for messages, nbytes in [_cut(wire, size, segments)]
    ]
    for index in (rank, rank + 1):
        messages, nbytes = _cut(wire, _chunk(numel, ranks, index), segments)
        totals.append((-messages, -nbytes))
    _, largest = _cut(wire, -(-numel // ranks), segments)
    rounds = 2 * (ranks - 1)
    return Schedule(
        rounds=rounds,
        messages=1 + sum(messages for messages, _ in totals),
        sent_bytes=HEADER_BYTES + sum(nbytes for _, nbytes in totals),
        workspace_bytes=0,
        phases=(_header(), Phase(rounds, largest)),
    )


def _ring(method: Method, numel: int, ranks: int, rank: int) -> Schedule:
    longest = -(-numel // ranks)
    made = _around(_FP32, numel, ranks, rank, _segments(method, ELEMENT_BYTES * longest))
    return replace(made, workspace_bytes=2 * longest * ELEMENT_BYTES)


def _quantized(method: Method, numel: int, ranks: int, rank: int) -> Schedule:
    wire = _Wire.of(method)
    longest = -(-numel // ranks)
    # As the ring itself, which decides by what 1024 elements take.
    segments = _segments(method, int(longest * (wire.nbytes(1024) / 1024)))
    workspace = 5 * segments * wire.nbytes(-(-longest // segments))
    made = _around(wire, numel, ranks, rank, segments)
    return replace(made, workspace_bytes=workspace)


def _direct(method: Method, numel: int, ranks: int, rank: int) -> Schedule:
    wire = _Wire.of(method)
    longest = -(-numel // ranks)
    segments = _segments(method, wire.nbytes(longest))
    own = _cut(wire, _chunk(numel, ranks, rank), segments)
    parts = [
        (count * messages, count * nbytes)
        for size, count in _pieces(numel, ranks)
        for messages, nbytes in [_cut(wire, size, segments)]
    ]
    parts += [(-own[0], -own[1]), ((ranks - 1) * own[0], (ranks - 1) * own[1])]
    _, largest = _cut(wire, longest, segments)
    piece = -(-longest // segments)
    return Schedule(
        rounds=2 * (ranks - 1),
        messages=ranks - 1 + sum(messages for messages, _ in parts),
        sent_bytes=(ranks - 1) * HEADER_BYTES + sum(nbytes for _, nbytes in parts),
        workspace_bytes=(3 * (ranks - 1) + 1) * segments * wire.nbytes(piece),
        # All N - 1 messages of a half are under way at once and share this rank's port.
        phases=(_header(ranks - 1), Phase(2, (ranks - 1) * largest)),
    )


def _coded(method: Method, numel: int, ranks: int, rank: int) -> Schedule:  # noqa: ARG001 - alike
    for budget in ("spread_budget", "mean_error_budget"):
        if option(method, budget) is not None:
            raise InputError(
                f"{method.text!r}: a budget chooses the passes when the buffer is there; "
                "give passes to plan with"
            )
    passes = int(str(option(method, "passes") or 4))
    shared = option(method, "code") == "vandermonde"
    components = passes * ranks
    if shared and option(method, "components") is not None:
        components = int(str(option(method, "components")))
    # L = c + N - 2 rounds of n / c elements, rounded up.
    rounds = components + ranks - 2
    families, width = (1, components) if shared else (ranks, passes)
    length = -(-numel // (families * width))
    stretch = length * width
    padding = (families - (numel // stretch if stretch else families)) * stretch
    wire = _Wire.of(method)
    segments = min(_segments(method, wire.nbytes(length)), max(length, 1))
    messages, nbytes = _cut(wire, length, segments)
    native, inplace = wire.name == "fp32", option(method, "inplace") is True
    slots = (2 if native else 1) if inplace else rounds + 2 + (4 if native else 1)
    held = 0 if native else 4 * nbytes
    headers = 2 if option(method, "shuffle") is True else 1
    return Schedule(
        rounds=rounds,
        messages=headers + rounds * messages,
        sent_bytes=headers * HEADER_BYTES + rounds * nbytes,
        workspace_bytes=(slots * length + padding) * ELEMENT_BYTES + held,
        phases=(_header(headers), Phase(rounds, nbytes)),
    )


def _topk(method: Method, numel: int, ranks: int, rank: int) -> Schedule:  # noqa: ARG001 - alike
    ratio = float(str(option(method, "ratio")))
    k = max(1, math.ceil(ratio * numel)) if numel else 0
    value_bytes = _PLAIN_BYTES[str(option(method, "wire"))]
    message_bytes = 4 * (k + -(-k * value_bytes // 4))
    segments = _segments(replace(method, options={}), message_bytes) if k else 0
    most = max(numel * (ELEMENT_BYTES + 1), ranks * message_bytes)
    return Schedule(
        rounds=ranks - 1,
        messages=1 + (ranks - 1) * segments,
        sent_bytes=HEADER_BYTES + (ranks - 1) * message_bytes,
        workspace_bytes=most + k * (8 + ELEMENT_BYTES),
        phases=(_header(), Phase(ranks - 1, message_bytes)),
    )


def _powersgd(
    method: Method,
    numel: int,
    ranks: int,
    rank: int,
    shapes: Sequence[Shape] | None,
    step: int,
) -> Schedule:
    if shapes is None:
        raise InputError(
            f"{method.text!r}: what it sends depends on the shapes of the matrices; plan with a "
            "model in place of sizes"
        )
    if sum(math.prod(shape) for shape in shapes) != numel:
        raise InputError(f"numel={numel}, but the shapes hold another number of elements")
    most, saving = int(str(option(method, "rank"))), float(str(option(method, "min_saving")))
    left = right = rest = 0
    for shape in shapes:
        m, n = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
        r = min(most, m, n)
        if not r or r * (m + n) * saving > m * n:
            rest += math.prod(shape)
        else:
            left, right = left + r * m, right + r * n
    alternate = option(method, "alternate") is True
    numels = [(right if alternate and step % 2 else left) + rest]
    if left and not alternate:
        numels.append(right)
    over = _over(method)
    assert over is not None
    parts = [schedule(over, size, ranks, rank=rank) for size in numels]
    known = [part for part in parts if part is not None]
    elements = 2 * sum(numels) + rest + 6 * (left + right)
    return Schedule(
        rounds=sum(part.rounds for part in known),
        messages=sum(part.messages for part in known),
        sent_bytes=sum(part.sent_bytes for part in known),
        workspace_bytes=elements * ELEMENT_BYTES + max(part.workspace_bytes for part in known),
        phases=tuple(phase for part in known for phase in part.phases),
    )


# -------------------------------------------------------------------------------- seconds


def link_seconds(made: Schedule, link: Link) -> LinkSeconds:
    """Seconds of a schedule's messages: a round takes what one both ways at once took."""
    rounds = sum(phase.rounds for phase in made.phases)
    latency_s = rounds * link.both_ways.seconds_at(0)
    total_s = sum(
        phase.rounds * link.both_ways.seconds_at(phase.sent_bytes) for phase in made.phases
    )
    return LinkSeconds(latency_s, max(0.0, total_s - latency_s))


def all_reduce_seconds(fit: Fit, probed_ranks: int, size_bytes: int, ranks: int) -> LinkSeconds:
    """Seconds of the backend's own all_reduce of a buffer.

    At the probed number of ranks the measured medians are interpolated, beyond the sizes the fit
    goes on. For other numbers it is taken for a ring, 2(N - 1)(alpha + n beta / N), with the alpha
    and beta that the measured curve then has.
    """
    if ranks == 1:
        return LinkSeconds(0.0, 0.0)
    total_s = fit.seconds_at(size_bytes)
    if fit.covers(size_bytes):
        total_s = interpolate(fit.sizes_bytes, fit.seconds, size_bytes)
    latency_s = min(total_s, fit.seconds_at(0))
    if ranks == probed_ranks:
        return LinkSeconds(latency_s, total_s - latency_s)
    rounds = (ranks - 1) / (probed_ranks - 1)
    sent = rounds * probed_ranks / ranks
    return LinkSeconds(latency_s * rounds, (total_s - latency_s) * sent)


def interpolate(at: Sequence[float], values: Sequence[float], where: float) -> float:
    """Return the value at ``where`` on straight lines between points; ``at`` ascends."""
    if not at[0] <= where <= at[-1]:
        raise InputError(f"{where:g} lies outside of what was measured, {at[0]:g} to {at[-1]:g}")
    for i in range(1, len(at)):
        if where <= at[i]:
            share = (where - at[i - 1]) / (at[i] - at[i - 1])
            return values[i - 1] + share * (values[i] - values[i - 1])
    return values[0]

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from link_files import line, make_link
from taciturn import cost
from taciturn.aggregators import Aggregator, TopK
from taciturn.aggregators.base import Group
from taciturn.collectives import CodedRing, pipeline
from taciturn.collectives.base import bounds
from taciturn.collectives.ring import ring_message_lengths
from taciturn.collectives.wires import make_wire
from taciturn.cost import Schedule, all_reduce_seconds, link_seconds, schedule
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError
from taciturn.methods import aggregator, build, parse
from taciturn.transport import HEADER_BYTES

METHODS = (
    "ring",
    "ring:segments=3",
    "quantized:bits=8",
    "quantized:bits=4,block=64",
    "quantized:wire=bf16",
    "quantized:wire=fp16,segments=5",
    "direct:bits=8",
    "direct:wire=bf16,segments=3",
    "coded:passes=1",
    "coded:passes=4",
    "coded:passes=16,code=fourier",
    "coded:passes=4,code=fourier,inplace=true",
    "coded:passes=8,code=fourier,shuffle=true,wire=bf16",
    "coded:passes=4,code=fourier,wire=int8,segments=2",
    "coded:passes=4,code=fourier,wire=int8,inplace=true",
    "coded:code=vandermonde,components=11,eps=0.1",
    "coded:passes=2,wire=fp64",
    "mean:over=(quantized:bits=8)",
    "topk:ratio=0.01",
    "topk:ratio=0.3,wire=bf16",
    "powersgd:rank=1",
    "powersgd:rank=2,alternate=true",
    "powersgd:rank=4,min_saving=0,over=(quantized:bits=8)",
)
"""Every closed form, with each key that changes bytes."""


def group_of(shapes: list[tuple[int, ...]]) -> Group:
    return Group.of(
        [(f"p{i}", torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)]
    )


def bare(method: str) -> Aggregator:
    made = aggregator(method)
    return made.inner if isinstance(made, ErrorFeedback) else made


@pytest.mark.parametrize("method", METHODS)
def test_a_schedule_is_what_the_method_claims(method: str) -> None:
    """Rounds, messages, sent and workspace bytes are those that the aggregator claims for each
    rank, and the ledger counts the aggregator's (``test_aggregators.py``, ``test_collectives.py``).
    """
    made = bare(method)
    for ranks in (1, 2, 3, 8):
        for numel in (0, 1, 7, 128, 1000, 70_001, 200_000, 1_000_003):
            group = group_of([(numel,)] if numel < 1000 else [(40, 20), (numel - 800,)])
            for rank in {0, 1 % ranks, ranks - 1}:
                claimed = made.cost(group, torch.float32, ranks, rank)
                told = schedule(method, numel, ranks, rank=rank, shapes=group.shapes)
                assert claimed is not None
                assert told is not None
                assert (told.rounds, told.messages, told.sent_bytes, told.workspace_bytes) == (
                    claimed.rounds,
                    claimed.messages,
                    claimed.sent_bytes,
                    claimed.workspace_bytes,
                ), (ranks, numel, rank)


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3), max_size=6),
    ranks=st.integers(2, 9),
    alternate=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_powersgd_of_any_shapes(shapes: list[list[int]], ranks: int, alternate: bool) -> None:
    """The factors of any mixture of matrices, vectors and scalars are counted as PowerSGD does."""
    method = f"powersgd:rank=3,alternate={str(alternate).lower()}"
    group = group_of([tuple(shape) for shape in shapes])
    claimed = bare(method).cost(group, torch.float32, ranks)
    told = schedule(method, group.numel, ranks, shapes=group.shapes)
    assert claimed is not None
    assert told is not None
    assert (told.sent_bytes, told.rounds) == (claimed.sent_bytes, claimed.rounds)


def test_constants_are_those_of_the_transport() -> None:
    """What is written down twice, so that no torch is needed, is the same."""
    assert cost.HEADER_BYTES == HEADER_BYTES
    assert cost._SEGMENT_BYTES == pipeline._SEGMENT_BYTES
    assert cost._MOST_SEGMENTS == pipeline._MOST_SEGMENTS


@pytest.mark.parametrize("method", ["backend", "cast:wire=bf16", "mean", "backend:wire=fp16"])
def test_the_backends_own_is_not_claimed(method: str) -> None:
    """What the process group's own all_reduce sends is not known, only how long it took."""
    assert schedule(method, 1000, 4) is None
    assert cost.is_backends(method)
    assert schedule(method, 1000, 1) == Schedule(0, 0, 0, 0, ())


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("powersgd:rank=4", "shapes of the matrices"),
        ("coded:spread_budget=0.1", "give passes"),
    ],
)
def test_what_cannot_be_told_is_refused(method: str, words: str) -> None:
    """A method whose bytes depend on what is not given is refused, and the message says on what."""
    with pytest.raises(InputError, match=words):
        schedule(method, 1000, 4)


@pytest.mark.parametrize(
    "bad", [{"numel": -1}, {"ranks": 0}, {"numel": 2.5}, {"rank": 4}, {"shapes": [(3, 3)]}]
)
def test_bad_numbers_are_refused(bad: dict[str, object]) -> None:
    """Impossible sizes and ranks are refused by name."""
    arguments = {"method": "powersgd", "numel": 1000, "ranks": 4, "shapes": [(1000,)], **bad}
    with pytest.raises(InputError):
        schedule(**arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- against a simulation

Sends = list[list[list[tuple[int, int]]]]
"""[round][rank] -> messages, (receiver, bytes)."""


def simulated_s(sends: Sends, alpha_s: float, beta_s_per_byte: float) -> float:
    """Play ranks that exchange messages, event by event; return when the last of them has ended.

    Each rank has one port out and one in, each busy for ``beta`` times the bytes of a message; the
    message is there ``alpha`` after it left the ports. A rank begins a round as soon as it has all
    that was sent to it in the round before and its own messages have left.
    """
    rounds, ranks = len(sends), len(sends[0])
    awaited = [Counter(receiver for one in each for receiver, _ in one) for each in sends]
    there: list[Counter[int]] = [Counter() for _ in range(rounds)]
    out_free, in_free = [0.0] * ranks, [0.0] * ranks
    begun = [0] * ranks  # round in which each rank is, and when that could begin
    ready_at = [[0.0] * ranks for _ in range(rounds + 1)]
    waiting = [list(sends[0][rank]) for rank in range(ranks)]

    def start_of(rank: int) -> float:
        receiver = waiting[rank][0][0]
        return max(ready_at[begun[rank]][rank], out_free[rank], in_free[receiver])

    while any(waiting):
        # Of all messages that could go, the one that can go first; ports are taken in that order.
        rank = min((r for r in range(ranks) if waiting[r]), key=start_of)
        left = start_of(rank) + beta_s_per_byte * waiting[rank][0][1]
        receiver, _ = waiting[rank].pop(0)
        t = begun[rank]
        out_free[rank] = in_free[receiver] = left
        there[t][receiver] += 1
        ready_at[t + 1][receiver] = max(ready_at[t + 1][receiver], left + alpha_s)
        ready_at[t + 1][rank] = max(ready_at[t + 1][rank], left)
        for other in (rank, receiver):
            s = begun[other]
            done = s < rounds and not waiting[other] and there[s][other] == awaited[s][other]
            if done and s + 1 < rounds:
                begun[other] = s + 1
                waiting[other] = list(sends[s + 1][other])
    return max(ready_at[rounds])


def ring_sends(ranks: int, lengths: list[list[int]]) -> Sends:
    """Messages [rank][round] to the successor, after a header."""
    header = [[((rank + 1) % ranks, HEADER_BYTES)] for rank in range(ranks)]
    rounds = len(lengths[0])
    return [
        header,
        *(
            [[((rank + 1) % ranks, lengths[rank][t])] for rank in range(ranks)]
            for t in range(rounds)
        ),
    ]


def sends_of(method: str, numel: int, ranks: int) -> Sends:
    """What the method's own code sends, message by message."""
    if method.startswith(("ring", "quantized")):
        lengths = [ring_message_lengths(numel, ranks, rank, 1) for rank in range(ranks)]
        wire = make_wire("int8" if "8" in method else "fp32", torch.float32)
        return ring_sends(ranks, [[wire.nbytes(n) for n in each] for each in lengths])
    if method.startswith("direct"):
        wire = make_wire("int8", torch.float32)
        chunks = [stop - start for start, stop in bounds(numel, ranks)]
        header, scatter, gather = (
            [
                [((rank + step) % ranks, nbytes(rank, (rank + step) % ranks))
                 for step in range(1, ranks)]
                for rank in range(ranks)
            ]
            for nbytes in (
                lambda _rank, _peer: HEADER_BYTES,
                lambda _rank, peer: wire.nbytes(chunks[peer]),
                lambda rank, _peer: wire.nbytes(chunks[rank]),
            )
        )  # fmt: skip
        return [header, scatter, gather]
    if method.startswith("coded"):
        made = build(method)
        assert isinstance(made, CodedRing)
        code, _ = made.plan(numel, torch.float32, ranks)
        assert code is not None
        length = 4 * -(-numel // code.components)
        return ring_sends(ranks, [[length] * code.rounds] * ranks)
    topk = bare(method)
    assert isinstance(topk, TopK)
    row = 4 * topk._words(topk.sent_elements(numel))
    return ring_sends(ranks, [[row] * (ranks - 1)] * ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("beta", [4e-8, 0.0])
@pytest.mark.parametrize(
    "method", ["ring", "quantized:bits=8", "direct:bits=8", "coded:passes=4", "topk:ratio=0.01"]
)
def test_seconds_are_those_of_a_simulation(method: str, ranks: int, beta: float) -> None:
    """With equal messages the closed form is the simulated time; with beta = 0 only rounds count.

    In fp32 rounding: a few thousand additions of numbers of one sign, 1e-12 relative each.
    """
    numel, alpha = ranks * 128 * 400, 1e-3
    link = replace(make_link(ranks), both_ways=line(alpha, max(beta, 1e-30)))
    made = schedule(method, numel, ranks)
    assert made is not None
    seconds = link_seconds(made, link)
    assert seconds.total_s == pytest.approx(
        simulated_s(sends_of(method, numel, ranks), alpha, beta), rel=1e-9
    )
    assert seconds.latency_s == pytest.approx(alpha * (made.phases[-1].rounds + 1))


@given(numel=st.integers(1, 3000), ranks=st.integers(2, 7))
@settings(max_examples=40, deadline=None)
def test_uneven_chunks_lie_between(numel: int, ranks: int) -> None:
    """Chunks that differ by an element are counted as the longest, and at most as that."""
    alpha, beta = 1e-3, 1e-6
    link = replace(make_link(ranks), both_ways=line(alpha, beta))
    for method in ("ring", "quantized:bits=8", "direct:bits=8"):
        sends = sends_of(method, numel, ranks)
        played = simulated_s(sends, alpha, beta)
        made = schedule(method, numel, ranks)
        assert made is not None
        least = (len(sends) - 1) * alpha
        assert least <= played <= link_seconds(made, link).total_s * (1 + 1e-9)


def test_many_ranks_take_no_longer_to_count() -> None:
    """4096 ranks and 10 GB: the same few operations; no list of chunks is made."""
    for method in METHODS:
        told = schedule(method, 2_500_000_000, 4096, shapes=[(50_000, 50_000)])
        assert told is not None
        assert len(told.phases) <= 4


def test_the_backend_is_measured_within_and_a_ring_beyond() -> None:
    """At the probed ranks a curve's medians are interpolated; other numbers scale as a ring does.

    At 8 ranks a ring has 7/3 of the rounds of 4, and sends 7/8 of the buffer twice, not 3/4.
    """
    curve = line(6e-3, 1.5 * 4e-8)
    bent = replace(curve, seconds=(*curve.seconds[:-1], 9.0))
    within = all_reduce_seconds(bent, 4, (2**22 + 2**26) // 2, 4)
    assert within.total_s == pytest.approx((curve.seconds[-2] + 9.0) / 2)
    more = all_reduce_seconds(curve, 4, 2**22, 8)
    assert more.latency_s == pytest.approx(14e-3)
    assert more.transfer_s == pytest.approx(2 * 7 / 8 * 2**22 * 4e-8)
    assert all_reduce_seconds(curve, 4, 2**22, 1).total_s == 0


def test_option_reads_shorthands_and_defaults() -> None:
    """What is given counts, a shorthand is written out, and the table's default stands else."""
    assert cost.option(parse("quantized:bits=4"), "wire") == "int4"
    assert cost.option(parse("quantized"), "wire") == "int8"
    assert cost.option(parse("topk"), "ratio") == 0.01
    assert cost.option(parse("coded"), "passes") is None

"""What a probe says of made-up links is what they were made from."""

from __future__ import annotations

from typing import Any

import pytest

from probe_links import FIXED_S, PER_ELEM_S, MadeUp
from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.probe.calls import Sample
from taciturn.probe.steps import Step
from taciturn.probe.summary import Taken, seconds_of, slow_computing, slow_ones
from taciturn.testbed import TCP_GOODPUT


def said(link: Link, words: str) -> bool:
    """Whether a warning says so."""
    return any(words in warning for warning in link.warnings)


@pytest.mark.parametrize("made_up", [MadeUp(), MadeUp(ranks=2), MadeUp(hosts=2, ranks=3)])
def test_a_link_comes_back(made_up: MadeUp) -> None:
    """Latency, slopes, duplex, local work, and what methods have beyond the exchange."""
    link = made_up.link()
    for fit in (link.one_way, link.both_ways):
        assert fit.alpha_s.value == pytest.approx(made_up.alpha_s, rel=0.1)
        assert fit.beta_s_per_byte.value == pytest.approx(made_up.beta_s_per_byte, rel=0.05)
    assert link.duplex_factor.value == pytest.approx(1, rel=0.1)
    assert link.gamma_s_per_byte.value == pytest.approx(1e-10, rel=0.1)
    assert link.link_beside_matmul.value == pytest.approx(1.5, rel=0.1)
    assert link.matmul_beside_link.value == pytest.approx(1.2, rel=0.1)
    assert (link.slow_rank, link.slow_links) == (None, ())
    assert [one.pairs for one in link.contention] == sorted({1, made_up.ranks // 2})
    for one in link.contention:
        per_s = one.bytes_per_s_per_pair.value
        assert per_s == pytest.approx(1 / made_up.beta_s_per_byte, rel=0.15)
    size = 10**6  # not measured itself
    rounds = 2 * (made_up.ranks - 1)
    expected = rounds * made_up.round_s(size // made_up.ranks)
    assert link.all_reduce["fp32"].seconds_at(size) == pytest.approx(expected, rel=0.1)
    assert link.drift < 0.05
    methods = {one.method: one for one in link.methods}
    ring = methods["ring"]
    assert ring.rounds == (rounds,) * 3
    exchange = rounds * made_up.round_s(4 * ring.elems[-1] // made_up.ranks)
    assert ring.link_s[-1] == pytest.approx(exchange, rel=0.1)
    assert ring.codec_s[-1] == pytest.approx(PER_ELEM_S * ring.elems[-1] / 2, rel=0.1)
    assert methods["backend"].rounds is None


def test_local_work_of_a_method_is_what_the_exchange_leaves() -> None:
    """Without noise, the fixed part and the part of each element come out."""
    (backend, ring) = MadeUp(noise=0.0, alpha_s=1e-4, beta_s_per_byte=1e-9).link().methods
    for one in (backend, ring):
        assert one.local_fixed_s.value == pytest.approx(FIXED_S, rel=0.05)
        assert one.local_s_per_elem.value == pytest.approx(PER_ELEM_S, rel=0.05)


@pytest.mark.parametrize("hosts", [1, 4])
def test_entry_skew_is_no_part_of_the_times(hosts: int) -> None:
    """Ranks that come up to 50 ms late change no curve of a link whose latency is 1 ms."""
    link = MadeUp(skew_s=0.05, hosts=hosts).link()
    assert link.both_ways.alpha_s.value == pytest.approx(1e-3, rel=0.1)
    assert link.all_reduce["fp32"].alpha_s.value == pytest.approx(6e-3, rel=0.1)


@pytest.mark.parametrize(("hosts", "expected"), [(1, 2.0), (2, 1.5)])
def test_a_call_is_timed_from_the_last_arrival(hosts: int, expected: float) -> None:
    """On one clock last end less last start; on several the least of the ranks' own durations."""
    samples = (Sample(0.0, 4.0), Sample(3.0, 4.5), None, Sample(1.0, 5.0))
    assert seconds_of(Taken(Step("round", 8), samples), hosts == 1) == expected


def test_half_duplex_is_two() -> None:
    """Where both directions share the wire, sending both ways takes twice as long."""
    assert MadeUp(half_duplex=True).link().duplex_factor.value == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_rank_is_named(slow: int) -> None:
    """A rank all of whose messages take ten times as long is named, and no link beside it."""
    pairs = {(a, b): 10.0 for a in range(4) for b in range(4) if slow in (a, b)}
    link = MadeUp(slower=pairs).link()
    assert (link.slow_rank, link.slow_links) == (slow, ())
    assert said(link, f"Rank {slow} has less than half the bandwidth")


def test_a_rank_that_computes_slowly_is_named() -> None:
    """A rank that takes ten times as long for the same work is named, whatever its link."""
    link = MadeUp(computing={2: 10.0}).link()
    assert link.slow_rank == 2
    assert said(link, "Rank 2 computes")


def test_a_slow_link_is_named() -> None:
    """One direction between two ranks that is ten times slower is named, and no rank."""
    link = MadeUp(slower={(1, 3): 10.0}).link()
    assert (link.slow_rank, link.slow_links) == (None, ((1, 3),))
    assert said(link, "from rank 1 to rank 3 is far slower")


def test_a_far_rank_is_named() -> None:
    """A rank whose messages take ten times the latency, at full bandwidth, is named."""
    far = {(a, b): 20.0 for a in range(4) for b in range(4) if 1 in (a, b)}
    link = MadeUp(later=far).link()
    assert link.slow_rank == 1
    assert said(link, "Messages of rank 1 take more than 5 times")


def test_of_two_ranks_the_slower_direction_is_named() -> None:
    """Two ranks cannot be told apart from their link."""
    link = MadeUp(ranks=2, slower={(1, 0): 10.0}).link()
    assert (link.slow_rank, link.slow_links) == (None, ((1, 0),))


def test_two_slow_ranks_are_not_hidden_by_each_other() -> None:
    """The slowest is named, and the other's links are."""
    pairs = [[None if a == b else 1.0 for b in range(6)] for a in range(6)]
    for a in range(6):
        for slow, value in ((1, 0.2), (4, 0.1)):
            if a != slow:
                pairs[a][slow] = pairs[slow][a] = value
    rank, links = slow_ones(pairs, lambda one, rest: one < rest / 2)
    assert rank == 4
    assert {r for pair in links for r in pair} >= {1}
    assert all(1 in pair for pair in links)


def test_slow_work_is_told_call_by_call() -> None:
    """What is compared is each call with the same call elsewhere, not with long ones."""
    assert slow_computing([[1.0, 1.1, 10.0], [100.0, 110.0, 1000.0]]) == 2
    assert slow_computing([[1.0, 1.1, 1.2], [100.0, 110.0, 90.0]]) is None
    assert slow_computing([]) is None


def test_drift_is_told() -> None:
    """A second sweep that takes a third longer is a warning."""
    link = MadeUp(second_sweep=1.33).link()
    assert link.drift == pytest.approx(0.33, abs=0.03)
    assert said(link, "The two sweeps differ by")
    assert not said(MadeUp().link(), "The two sweeps differ")


@pytest.mark.parametrize(("share", "warns"), [(0.97, False), (0.6, True)])
def test_the_rate_is_compared_with_goodput(share: float, warns: bool) -> None:
    """What a link reaches is held against TCP's goodput at the set rate, not against the rate."""
    rate = 200_000_000
    beta = 8 / (share * TCP_GOODPUT * rate)
    link = MadeUp(beta_s_per_byte=beta, rate_bits_per_s=rate).link()
    assert said(link, "of TCP's goodput at the set rate") == warns


@pytest.mark.parametrize(
    "changes", [{"beta_s_per_byte": 0.0}, {"beta_s_per_byte": -1e-9}, {"beta_s_per_byte": 1e-15}]
)
def test_what_is_no_link_is_refused(changes: dict[str, Any]) -> None:
    """Times that do not grow with size, or fall with it, give an error and no bandwidth."""
    with pytest.raises(InputError, match=r"do not grow with size|above 0"):
        MadeUp(**changes).link()


def test_methods_may_be_left_out() -> None:
    """A probe without methods is a link all the same, and travels as JSON."""
    link = MadeUp(methods=False).link()
    assert link.methods == ()
    assert Link.from_json(link.to_json()) == link

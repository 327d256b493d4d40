"""Transfers that share a link: durations from works, works from durations, replays with others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.trace.analysis import analyse
from taciturn.trace.replay import replay
from taciturn.trace.sharing import Links, durations_ns
from taciturn.trace.timeline import fair_share_ns
from trace_files import own

TRANSFERS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)), max_size=10)


@given(TRANSFERS)
def test_works_and_starts_give_the_ends_again(transfers: list[tuple[int, int]]) -> None:
    """What each would take alone, replayed from the same starts, ends when it did."""
    starts = [start for start, _ in transfers]
    lasted = durations_ns(starts, [work for _, work in transfers])
    ends = [start + length for start, length in zip(starts, lasted, strict=True)]
    works = [round(one) for one in fair_share_ns(starts, ends).tolist()]
    again = durations_ns(starts, works)
    # Each round to whole nanoseconds, of up to ten that wait for each other.
    assert np.allclose(again, lasted, atol=10 * max(1, len(transfers)))


@given(TRANSFERS)
def test_a_link_is_busy_for_all_of_its_work(transfers: list[tuple[int, int]]) -> None:
    """From a common start the last is done after the sum; nobody is faster than alone."""
    works = [work for _, work in transfers]
    lasted = durations_ns([0] * len(works), works)
    assert max(lasted, default=0) == pytest.approx(sum(works), abs=1)
    assert all(length >= work for length, work in zip(lasted, works, strict=True))


def test_the_second_begins_later() -> None:
    """0: 100 of work, 50: 100 of work. Half speed from 50 to 150, then the second has 50 left."""
    assert durations_ns([0, 50], [100, 100]) == [150, 150]
    assert durations_ns([0, 200], [100, 100]) == [100, 100]


@pytest.mark.parametrize("name", ["bucketed", "onebucket", "straggler"])
def test_unchanged_works_replay_as_measured(name: str) -> None:
    """On recordings of gloo, whose transfers overlap: every node within 10 us."""
    analysis = analyse(own(name))
    links = Links(analysis.graph, analysis.meetings)
    shared, plain = links.replay({}), replay(analysis.graph)
    assert np.abs(shared - plain).max() < 10_000
    if name == "bucketed":
        spans = analysis.graph.weight_ns[list(links.work_ns)]
        assert sum(links.work_ns.values()) < spans.sum()


def test_what_overlapped_ends_sooner_than_in_proportion() -> None:
    """With a quarter of the work less of it overlaps: shorter than a quarter of each duration."""
    # 0-172 and 21-229 on one link: alone they take 96.5 and 132.5.
    works = fair_share_ns([0, 21], [172, 229]).tolist()
    lasted = durations_ns([0, 21], [round(one / 4) for one in works])
    assert lasted[1] < 208 / 4

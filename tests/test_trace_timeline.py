"""Interval arithmetic against sets of nanoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.trace.timeline import Intervals, fair_share_ns, intersect, subtract, unite

SPANS = st.lists(st.tuples(st.integers(-20, 40), st.integers(-20, 40)), max_size=12)


def made(spans: list[tuple[int, int]]) -> Intervals:
    return unite([a for a, _ in spans], [b for _, b in spans])


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {point for a, b in spans for point in range(a, b)}


def inside(intervals: Intervals) -> set[int]:
    pairs = zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
    return points(list(pairs))


@given(SPANS)
def test_union_is_that_of_sets(spans: list[tuple[int, int]]) -> None:
    """A union holds each point once, sorted, in stretches that do not touch."""
    union = made(spans)
    assert inside(union) == points(spans)
    assert union.total_ns == len(points(spans))
    assert (union.start_ns < union.end_ns).all()
    assert (union.end_ns[:-1] < union.start_ns[1:]).all()


@given(SPANS, SPANS)
def test_intersection_and_difference_are_those_of_sets(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    """What is in both, and what is in the first alone; together they are the first."""
    both, alone = intersect(made(one), made(other)), subtract(made(one), made(other))
    assert inside(both) == points(one) & points(other)
    assert inside(alone) == points(one) - points(other)
    assert both.total_ns + alone.total_ns == made(one).total_ns


@given(SPANS, st.integers(-20, 40), st.integers(-20, 40))
def test_clip_is_the_part_inside(spans: list[tuple[int, int]], start: int, end: int) -> None:
    """Clipping keeps the points of a window."""
    assert inside(made(spans).clip(start, end)) == points(spans) & set(range(start, end))


@given(SPANS)
def test_fair_shares_add_up(spans: list[tuple[int, int]]) -> None:
    """To the size of the union; one that overlaps no other has its own length."""
    shares = fair_share_ns([a for a, _ in spans], [b for _, b in spans])
    assert shares.sum() == pytest.approx(len(points(spans)))
    for number, span in enumerate(spans):
        others = points([*spans[:number], *spans[number + 1 :]])
        if not points([span]) & others:
            assert shares[number] == pytest.approx(len(points([span])))


def test_two_that_share_a_link_take_half_of_it_each() -> None:
    """0-100 and 50-150: each alone for 50 and at half speed for 50."""
    assert fair_share_ns([0, 50], [100, 150]).tolist() == [75, 75]


def test_three_streams_are_united_not_summed() -> None:
    """Compute 0-50, all-reduce 40-80, all-gather 60-100: busy 60, overlapped 10, alone 50."""
    compute, communication = made([(0, 50)]), made([(40, 80), (60, 100)])
    assert communication.total_ns == 60
    assert intersect(communication, compute).total_ns == 10
    assert subtract(communication, compute).total_ns == 50

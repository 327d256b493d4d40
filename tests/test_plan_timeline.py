"""Exchanges beside backward: what must hold of the seconds whatever the buffers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.plan.timeline import Piece, end_s, merged

SECONDS = st.floats(0, 10)


@st.composite
def steps(draw: st.DrawFn) -> tuple[float, list[Piece]]:
    backward = draw(SECONDS)
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=6)))
    return backward, [Piece(share * backward, draw(SECONDS), draw(SECONDS)) for share in ready]


@given(steps(), st.floats(0, 1))
def test_bounds(step: tuple[float, list[Piece]], sharing: float) -> None:
    """Law: never less than backward, or than any exchange and those after it once its buffer is
    there; never more than all one after the other, with what is shared counted once more.
    """
    backward, pieces = step
    end = end_s(backward, pieces, sharing)
    tolerance = 1e-9 * (1 + end)
    assert end >= backward - tolerance
    for i, piece in enumerate(pieces):
        rest = sum(p.link_s + p.local_s for p in pieces[i:])
        assert end >= piece.ready_s + rest - tolerance
    local = sum(p.local_s for p in pieces)
    everything = backward + sum(p.link_s + p.local_s for p in pieces)
    assert end <= everything + sharing * local + tolerance


@given(steps(), st.floats(0, 1), st.floats(1, 3))
def test_longer_exchanges_never_end_earlier(
    step: tuple[float, list[Piece]], sharing: float, factor: float
) -> None:
    """Law: a step grows with its exchanges, and with how much of a core they share."""
    backward, pieces = step
    longer = [Piece(p.ready_s, factor * p.link_s, factor * p.local_s) for p in pieces]
    end = end_s(backward, pieces, sharing)
    assert end_s(backward, longer, sharing) >= end - 1e-9 * (1 + end)
    assert end_s(backward, pieces, 1.0) >= end - 1e-9 * (1 + end)


@given(steps())
def test_without_sharing_it_is_a_queue(step: tuple[float, list[Piece]]) -> None:
    """With a core for each the exchanges are a queue with one server, and backward is untouched."""
    backward, pieces = step
    free = 0.0
    for piece in pieces:
        free = max(free, piece.ready_s) + piece.link_s + piece.local_s
    assert end_s(backward, pieces, 0.0) == pytest.approx(max(free, backward))


def test_shared_cores_take_turns() -> None:
    """Coding beside backward on one core: both together take their sum, whatever the order.

    Backward of 4 s; 2 s of coding are there from the start: the coding is over after 4 s of taking
    turns, backward after 6. Over a link that takes 2 s more, the core is backward's alone for them.
    """
    assert end_s(4.0, [Piece(0.0, 0.0, 2.0)], 1.0) == pytest.approx(6.0)
    assert end_s(4.0, [Piece(0.0, 2.0, 2.0)], 1.0) == pytest.approx(6.0)
    assert end_s(4.0, [Piece(4.0, 1.0, 2.0)], 1.0) == pytest.approx(7.0)


@given(steps(), st.integers(1, 4))
def test_joined_pieces_are_as_long(step: tuple[float, list[Piece]], most: int) -> None:
    """Joining neighbours loses no second, and is ready when the last of them is."""
    _, pieces = step
    joined = merged(pieces, most)
    assert len(joined) <= most
    assert sum(p.link_s for p in joined) == pytest.approx(sum(p.link_s for p in pieces))
    assert sum(p.local_s for p in joined) == pytest.approx(sum(p.local_s for p in pieces))
    assert joined[-1].ready_s == pieces[-1].ready_s

"""A step on the clock: buffers are exchanged in order, beside the backward that makes them.

One backward, one exchange at a time, each begun when its buffer is there and the one before is
over. An exchange needs the link and, for its coding and copying, a core; where ranks have too few
cores, coding and backward take turns and slow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

__all__ = ["Piece", "end_s", "merged"]

_Part = TypeVar("_Part", bound=tuple[float, ...])


class Piece(NamedTuple):
    """One exchange."""

    ready_s: float
    """Of backward, when its buffer is there; in order."""
    link_s: float
    local_s: float


def end_s(backward_s: float, pieces: Sequence[Piece], sharing: float) -> float:
    """Return the seconds from the start of backward to the end of all exchanges, and of itself.

    Law (``test_timeline.py``): never less than backward or all exchanges alone, never more than one
    after the other with what is shared counted twice; a longer exchange never ends a step earlier.

    Args:
        backward_s: of backward with nothing beside it.
        pieces: in the order of exchange.
        sharing: 0: coding has a core of its own; 1: it takes turns with backward on one.
    """
    now = made = 0.0  # the clock, and how much of backward is done
    for ready_s, link_s, local_s in pieces:
        if made < ready_s:
            now += ready_s - made
            made = ready_s
        alone_s = link_s + local_s
        if alone_s <= 0:
            continue
        beside_s = link_s + local_s * (1 + sharing)
        # While both run, the coding's share of the exchange is taken from backward's core.
        speed = 1 - sharing * local_s / beside_s
        overlap_s = min(beside_s, (backward_s - made) / speed) if made < backward_s else 0.0
        made = min(backward_s, made + overlap_s * speed)
        now += overlap_s + (1 - overlap_s / beside_s) * alone_s
    return now + max(0.0, backward_s - made)


def merged(parts: Sequence[_Part], most: int) -> Sequence[_Part]:
    """Return at most ``most`` parts of the same seconds in all, neighbours joined; for speed.

    Args:
        parts: named tuples; the first field is when one is ready, the others add up.
        most: of them.
    """
    if len(parts) <= most:
        return parts
    step = -(-len(parts) // most)
    runs = (parts[i : i + step] for i in range(0, len(parts), step))
    return [_joined(run) for run in runs]


def _joined(run: Sequence[_Part]) -> _Part:
    kind: Any = type(run[0])
    _, *others = zip(*run, strict=True)
    joined: _Part = kind(run[-1][0], *map(sum, others))
    return joined

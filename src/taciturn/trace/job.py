"""Whether ranks that a file says are of one job did run one job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from taciturn.errors import InputError
from taciturn.trace.collectives import UNKNOWN_GROUP, Collective

__all__ = ["check_one_job"]

ALL_TAKE_PART = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""In these every rank of a group takes part, with one size."""

Sent = tuple[str, int]
"""Name and size of a collective."""


def check_one_job(
    parts: Sequence[Sequence[Collective]], step_numbers: Sequence[Sequence[int | None]]
) -> None:
    """Refuse ranks whose collectives of one group never have a size in common.

    Files that are cut or thinned lack collectives, so a number that differs proves nothing. But in
    a step of one job each rank's sizes are found on the others.

    Args:
        parts: the collectives of each rank.
        step_numbers: of each rank, the number of each step, which ``Collective.step`` indexes.

    Raises:
        InputError: in most of the steps that two ranks have they share no size.
    """
    first: dict[object, tuple[int, dict[int | None, set[Sent]]]] = {}
    for collectives, numbers in zip(parts, step_numbers, strict=True):
        found = _sizes(collectives, numbers)
        for group, steps in found.items():
            rank = collectives[0].rank
            other, others = first.setdefault(group, (rank, steps))
            common = [number for number in steps if number in others]
            apart = Counter(not steps[number] & others[number] for number in common)
            if apart[True] > len(common) / 2:
                raise InputError(
                    f"rank {other} and rank {rank} seem to be of different jobs: in "
                    f"{apart[True]} of {len(common)} steps their collectives of one group have no "
                    f"size in common (bytes: {_shown(others[common[0]])} and "
                    f"{_shown(steps[common[0]])}); name the files of one job"
                )


def _sizes(
    collectives: Sequence[Collective], numbers: Sequence[int | None]
) -> dict[object, dict[int | None, set[Sent]]]:
    """By group and step: names and sizes, where both are known."""
    found: dict[object, dict[int | None, set[Sent]]] = defaultdict(lambda: defaultdict(set))
    for one in collectives:
        if one.size_bytes is None or one.step < 0 or one.group == UNKNOWN_GROUP:
            continue
        if one.name in ALL_TAKE_PART:
            found[one.group, one.ranks][numbers[one.step]].add((one.name, one.size_bytes))
    return found


def _shown(what: set[Sent]) -> str:
    sizes = sorted({size for _, size in what})
    return ", ".join(map(str, sizes[:3])) + (", ..." if len(sizes) > 3 else "")

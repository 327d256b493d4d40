"""Which rank of which job a file is, by what it says of itself and by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from taciturn.errors import InputError
from taciturn.trace.columns import whole
from taciturn.trace.events import Group, Trace

__all__ = [
    "MAX_RANKS",
    "check_described_alike",
    "groups_of",
    "numbered",
    "parse_ranks",
    "positive",
    "rank_of",
]

MAX_RANKS = 10**6  # of a group; more is a broken number
MAX_APART_NS = 86_400 * 10**9  # ranks of one job are recorded within a day, whatever their clocks
DATED_NS = 10**18  # the year 2001; times below count from some other beginning
_RANK_IN_NAME = re.compile(r"(?:rank|worker|(?<![a-z])r)[-_.]?(\d+)", re.IGNORECASE)


def positive(value: Any) -> int | None:
    """A whole number above 0, or None."""
    number = whole(value)
    return number if number > 0 else None


def rank_of(path: Path, info: Mapping[str, Any], given: int | None, notes: list[str]) -> int | None:
    """The rank that was given, else what the file says, else what its name says; or None."""
    said = whole(info.get("rank", -1))
    if given is not None:
        if said not in (-1, given):
            notes.append(f"the file says that it is of rank {said}: taken as {given}, as was asked")
        return given
    if said >= 0:
        return said
    if named := _RANK_IN_NAME.search(path.name):
        notes.append(f"the file does not say its rank: taken as {int(named[1])} from its name")
        return int(named[1])
    return None


def groups_of(info: Mapping[str, Any]) -> dict[str, Group]:
    """From ``pg_config``, which on-demand traces write as text."""
    config = info.get("pg_config")
    if not isinstance(config, list):
        return {}
    groups: dict[str, Group] = {}
    for one in config:
        if isinstance(one, dict) and "pg_name" in one:
            name = str(one["pg_name"])
            ranks = parse_ranks(one.get("ranks"))
            size = min(positive(one.get("pg_size")) or len(ranks), MAX_RANKS)
            groups[name] = Group(name, str(one.get("pg_desc", "")), size, ranks)
    return groups


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Ranks from a list or its text; empty if they are not there or the text is cut by "..."."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        return tuple(int(number) for number in re.findall(r"\d{1,9}", value))
    if isinstance(value, list):
        return tuple(rank for rank in value if isinstance(rank, int) and rank >= 0)
    return ()


def numbered(traces: list[Trace], notes: list[str]) -> list[Trace]:
    """Give files of unknown rank a free number; refuse two of one rank."""
    taken: dict[int, Path] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in taken:
            raise InputError(
                f"{taken[trace.rank]} and {trace.path} are both of rank {trace.rank}; name the "
                "files of one job only, or give --rank for each file"
            )
        taken[trace.rank] = trace.path
    all_numbered = []
    for trace in traces:
        if trace.rank is None:
            free = next(number for number in range(len(traces) + 1) if number not in taken)
            taken[free] = trace.path
            notes.append(
                f"{trace.path.name}: neither the file nor its name says a rank: taken as {free}"
            )
            all_numbered.append(replace(trace, rank=free))
        else:
            all_numbered.append(trace)
    return all_numbered


def check_described_alike(traces: Sequence[Trace]) -> None:
    """Refuse files that say they are of different jobs, or of ranks that their job has not.

    Raises:
        InputError: naming two such files.
    """
    for what in ("world_size", "backend"):
        seen = {getattr(trace, what): trace for trace in traces if getattr(trace, what)}
        if len(seen) > 1:
            (one, first), (other, second) = list(seen.items())[:2]
            raise InputError(
                f"{first} and {second} are of different jobs: their {what} is {one!r} and "
                f"{other!r}; name the files of one job"
            )
    # Clocks differ by seconds; a file without a time of day begins near 0.
    dated = sorted(
        (trace for trace in traces if trace.events.start_ns[0] > DATED_NS),
        key=lambda trace: int(trace.events.start_ns[0]),
    )
    for one, other in pairwise(dated):
        apart_ns = int(other.events.start_ns[0] - one.events.start_ns[0])
        if apart_ns > MAX_APART_NS:
            raise InputError(
                f"{one} and {other} are of different jobs: the second begins "
                f"{apart_ns / 86_400e9:.0f} days later; name the files of one job"
            )
    size = next((trace.world_size for trace in traces if trace.world_size), None)
    for trace in traces:
        if size is not None and trace.rank is not None and trace.rank >= size:
            raise InputError(
                f"{trace} says it is rank {trace.rank} of {size}; ranks count from 0: give the "
                "right --rank"
            )

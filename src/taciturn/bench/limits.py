"""What this machine, torch and a user's patience can take: checked before anything is started.

Whatever is refused here would otherwise end in a traceback, or in the kernel killing ranks, after
minutes of work.
"""

from __future__ import annotations

import os

import torch

from taciturn.errors import InputError
from taciturn.units import format_size

__all__ = [
    "COPIES",
    "MAX_REPEATS",
    "MAX_TIMEOUT_S",
    "MEMORY_SHARE",
    "check_memory",
    "memory_bytes",
    "needed_bytes",
]

MAX_REPEATS = 1_000_000  # every step of a run is listed before it, for the time left
MAX_TIMEOUT_S = 86_400.0  # a day, which is also the longest run
COPIES = 9
"""Sizes of the buffer that a rank holds at once while it sums the inputs exactly: the input, then
in float64 the total, the input, the mean and their difference (``measure._truth``)."""
CALL_COPIES = 4
"""The same during a call, beside the method's workspace: input, working copy, total in float64."""
MEMORY_SHARE = 0.9  # of the memory; the rest is the system's and the ranks' own programs


def memory_bytes(device: str) -> int | None:
    """Memory of this machine, or of this rank's GPU; None if the system does not say."""
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return int(torch.cuda.get_device_properties(local).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def needed_bytes(size_bytes: int, ranks: int, workspace_bytes: int = 0) -> int:
    """Most memory that ``ranks`` ranks hold together for a buffer of that size."""
    return ranks * max(COPIES * size_bytes, CALL_COPIES * size_bytes + workspace_bytes)


def check_memory(
    size_bytes: int, ranks: int, memory: int | None, method: str = "", workspace_bytes: int = 0
) -> None:
    """Refuse a buffer that cannot be in memory as often as it has to.

    Args:
        size_bytes: of the buffer.
        ranks: how many share the memory.
        memory: in bytes; None if it is not known, which lets everything pass.
        method: whose workspace is counted.
        workspace_bytes: beside the buffer, per rank.

    Raises:
        InputError: it needs more than ``MEMORY_SHARE`` of the memory.
    """
    needed = needed_bytes(size_bytes, ranks, workspace_bytes)
    if memory is None or needed <= MEMORY_SHARE * memory:
        return
    by = f" by {method}" if method else ""
    raise InputError(
        f"a buffer of {format_size(size_bytes)}, reduced{by} on {ranks} ranks that share this "
        f"memory, takes {-(-needed >> 30):,} GiB, copies included; there are {memory >> 30:,} GiB, "
        f"of which the bench takes at most {MEMORY_SHARE:.0%}; give a smaller --size or fewer "
        "--ranks"
    )

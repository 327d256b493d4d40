"""Ranks that measure together, for ``taciturn bench`` and ``taciturn probe``.

``group`` is a rank's place among the others, ``launch`` starts ranks and hands on what they found,
``progress`` tells how far they are.
"""

from __future__ import annotations

from taciturn.ranks.group import Ranks, join, own_interface
from taciturn.ranks.launch import (
    Work,
    check_torchrun,
    compile_loops,
    on_testbed,
    run_rank,
    under_torchrun,
    world_size,
)
from taciturn.ranks.progress import Clock, Eta, Progress, show_progress, tell

__all__ = [
    "Clock",
    "Eta",
    "Progress",
    "Ranks",
    "Work",
    "check_torchrun",
    "compile_loops",
    "join",
    "on_testbed",
    "own_interface",
    "run_rank",
    "show_progress",
    "tell",
    "under_torchrun",
    "world_size",
]

"""Bounds on memory and files, by trying and by arithmetic."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from taciturn.bench import limits, measure
from taciturn.errors import InputError


def test_memory_is_refused_from_the_share_on() -> None:
    """The bound is where the formula puts it, and an unknown memory bounds nothing."""
    memory = 100 << 30
    fits = int(limits.MEMORY_SHARE * memory) // (8 * limits.COPIES)
    limits.check_memory(fits, 8, memory)
    with pytest.raises(InputError, match=r"on 8 ranks.*--size"):
        limits.check_memory(fits + 1, 8, memory)
    limits.check_memory(1 << 200, 8, None)


def test_a_workspace_is_counted_beside_what_a_call_holds() -> None:
    """The larger of the two moments decides."""
    assert limits.needed_bytes(10, 2) == 2 * limits.COPIES * 10
    assert limits.needed_bytes(10, 2, 1000) == 2 * (limits.CALL_COPIES * 10 + 1000)


def test_this_machine_s_memory_is_known() -> None:
    """In bytes, on the systems that tell it."""
    memory = limits.memory_bytes("cpu")
    assert memory is None or 1 << 28 < memory < 1 << 60


def test_copies_are_those_of_the_truth() -> None:
    """``COPIES`` is the most that ``measure._truth`` holds at once, the input included."""
    held = most = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal held, most
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == numel:
                size = result.nbytes
                held += size
                most = max(most, held)
                weakref.finalize(result.untyped_storage(), drop, size)
            return result

    def drop(size: int) -> None:
        nonlocal held
        held -= size

    numel = 1000
    ranks: Any = SimpleNamespace(size=2, sum=lambda tensor: tensor)
    source = torch.ones(numel)
    with Counting():
        measure._truth(source, ranks)
    assert (most + source.nbytes) / source.nbytes == limits.COPIES

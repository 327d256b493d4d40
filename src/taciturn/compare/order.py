"""Which examples are seen when: one order per seed, the same for every method.

Every epoch is a permutation of all examples, drawn from the seed and the epoch's number. Position
``s B + j`` of the order is example ``j`` of step ``s`` with a global batch of ``B``; of a step rank
``r`` of ``W`` takes positions ``r B / W`` to ``(r + 1) B / W``.

Law (``test_an_epoch_sees_each_example_once``).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

__all__ = ["ExampleHash", "ids_of_step"]

_SEEDS = 1 << 20
"""More epochs than a run has: the seeds of two runs' epochs never meet."""


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, examples: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed + 1) * _SEEDS + epoch)
    return torch.randperm(examples, generator=generator)


def ids_of_step(seed: int, step: int, examples: int, global_batch: int) -> torch.Tensor:
    """Numbers of the examples of a step, of all ranks, in order; int64, shape (global_batch,)."""
    start = step * global_batch
    parts, need = [], global_batch
    while need:
        epoch, offset = divmod(start, examples)
        part = _epoch(seed, epoch, examples)[offset : offset + need]
        parts.append(part)
        start, need = start + len(part), need - len(part)
    return torch.cat(parts)


class ExampleHash:
    """A hash of the examples whose loss was taken, in order; and how many tokens they had."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.examples = 0
        self.tokens = 0

    def add(self, ids: torch.Tensor, tokens: int) -> None:
        """Count one batch whose loss was taken for a gradient."""
        self._hash.update(ids.numpy().astype("<i8").tobytes())
        self.examples += len(ids)
        self.tokens += tokens

    def hexdigest(self) -> str:
        """Of all so far."""
        return self._hash.hexdigest()

"""The coded ring's protocol, message by message, in plain numpy: an oracle for its codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from taciturn.collectives.codes import Code

Wire = Callable[[np.ndarray], np.ndarray]


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return kept.view(np.float32).astype(np.float64)


def fp16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def fp32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def blocks(levels: int, block: int, stochastic: bool = False, seed: int = 0) -> Wire:
    """Integers -levels..levels with one bf16 scale a block, rounded up."""
    rng = np.random.default_rng(seed)

    def wire(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(-1, block)
        scale = np.abs(rows).max(axis=1, keepdims=True) / levels
        bits = scale.astype(np.float32).view(np.uint32)
        up = ((bits + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        up[up == 0] = 1
        scaled = rows / up
        whole = np.floor(scaled + rng.random(rows.shape)) if stochastic else np.rint(scaled)
        return (whole.clip(-levels, levels) * up).reshape(x.shape)

    return wire


def exactly(x: np.ndarray) -> np.ndarray:
    return x


WIRES: dict[str, Wire] = {
    "fp32": fp32,
    "fp16": fp16,
    "bf16": bf16,
    "int8": blocks(127, 128),
}


@dataclass(frozen=True)
class Outcome:
    """What every rank ended with, and its errors as defined in the package."""

    decoded: np.ndarray  # (rank, chain, component, sample)
    total: np.ndarray  # (chain, component, sample)
    sent: int  # messages per rank

    @property
    def replica_error(self) -> float:
        return self._relative(self.decoded - self.total)

    @property
    def mean_error(self) -> float:
        return self._relative(self.decoded.mean(axis=0) - self.total)

    @property
    def spread(self) -> float:
        return self._relative(self.decoded - self.decoded.mean(axis=0))

    def _relative(self, off: np.ndarray) -> float:
        return math.sqrt(float((off**2).mean()) / float((self.total**2).mean()))


def all_reduce(
    code: Code,
    gradients: np.ndarray,
    *,
    wire: Wire = exactly,
    dtype: Any = np.float64,
    own: str = "exact",
) -> Outcome:
    """Play all rounds. Gradients: (rank, chain, component, sample); one chain if shared.

    The local arithmetic is in ``dtype``; ``wire`` rounds what a rank forwards.
    """
    n, shared = code.ranks, code.shared
    tables = [code.rank_table(i).astype(dtype) for i in range(n)]
    decoders = [code.rank_decoders(i, own).astype(dtype) for i in range(n)]
    mine = gradients.astype(dtype)

    def combine(rank: int, row: np.ndarray, chain: int) -> np.ndarray:
        return np.tensordot(row, mine[rank, 0 if shared else chain], axes=1)

    zero = np.zeros(code.table.shape[1], dtype)
    inbox: list[tuple[int, np.ndarray]] = []
    kept: dict[tuple[int, int], list[np.ndarray]] = {}
    outbox = [(b, wire(combine(b, tables[b][0], b)).astype(dtype)) for b in range(n)]
    for t in range(1, code.rounds + 1):
        inbox = [outbox[i - 1] for i in range(n)]
        outbox = []
        for i, (chain, message) in enumerate(inbox):
            assert chain == (i - t) % n
            stale = tables[i][t - n] if t >= n else zero
            forwarded = wire(message + combine(i, tables[i][t] - stale, chain)).astype(dtype)
            if t in code.receive_rounds((i - chain) % n):
                others = message - combine(i, stale, chain)
                kept.setdefault((i, 0 if shared else chain), []).append(
                    others if own == "exact" else forwarded
                )
            outbox.append((chain, forwarded))
    decoded = np.zeros_like(mine)
    for (i, chain), messages in kept.items():
        decoder = decoders[i][0 if shared else (i - chain) % n]
        decoded[i, chain] = np.tensordot(decoder, np.stack(messages), axes=1)
    if own == "exact":
        decoded = decoded + mine
    total = gradients.astype(np.float64).sum(axis=0)
    return Outcome(decoded.astype(np.float64), total, code.rounds)


def gaussian(code: Code, samples: int, seed: int = 0) -> np.ndarray:
    """Independent gradients of unit variance, in the layout of the code."""
    chains = 1 if code.shared else code.ranks
    shape = (code.ranks, chains, code.table.shape[1], samples)
    return np.random.default_rng(seed).standard_normal(shape)

"""How exact a method's average is on the task's own gradients: the two errors of evidence.

Over ranks i, with the average that rank i got d_i, the true one s and m the mean of all d_i:
replica error rms(d_i - s) / rms(s), mean error rms(m - s) / rms(s), spread rms(d_i - m) / rms(s).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from taciturn.compare.strategies import AveragesGradients, Share, strategy_for
from taciturn.compare.task import Task

__all__ = ["average_errors"]

WARM_STEPS = 8
"""Taken first, so that the gradients are those of a model that has begun to learn."""


def average_errors(
    task: Task, method: str, shares: list[Share], seed: int, learning_rate: float, timeout_s: float
) -> dict[str, Any]:
    """Take the average of one global batch by a method, and the true one. Every rank calls it.

    Args:
        task: whose gradients.
        method: one that averages the gradients of every step.
        shares: this rank's, of the steps to warm up and one more.
        seed: of the model.
        learning_rate: of these steps.
        timeout_s: a rank that is silent for longer counts as lost.

    Returns:
        ``replica_error``, ``mean_error`` and ``spread``; None where they are not finite.
    """
    strategy = strategy_for(method, task, seed, learning_rate, timeout_s)
    assert isinstance(strategy, AveragesGradients)
    *first, last = shares
    with strategy:
        for share in first:
            strategy.take(share)
        got = _gradient(strategy, last)
        with strategy.model.no_sync():
            own = _gradient(strategy, last)
    true, mean = _mean(own), _mean(got)
    scale = float(true.square().sum())
    spread = float(_mean((got - mean).square().sum()))
    replica = float(_mean((got - true).square().sum()))
    errors = {
        "replica_error": replica,
        "mean_error": float((mean - true).square().sum()),
        "spread": spread,
    }
    return {
        name: math.sqrt(square / scale) if scale and math.isfinite(square) else None
        for name, square in errors.items()
    }


def _gradient(strategy: AveragesGradients, share: Share) -> torch.Tensor:
    """Return what backward leaves, in double precision."""
    strategy.backward(share)
    return torch.cat(
        [
            p.grad.detach().double().flatten()
            for p in strategy.net.parameters()
            if p.grad is not None
        ]
    )


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    mean = tensor.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()

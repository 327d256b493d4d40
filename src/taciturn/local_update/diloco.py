"""DiLoCo, streaming DiLoCo included: an outer optimizer over averaged pseudo-gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.local_update.companions import Buffers, OptimizerState
from taciturn.local_update.rounds import LocalUpdate, Period

__all__ = ["DiLoCo", "nesterov"]


def nesterov(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return DiLoCo's outer optimizer: SGD with Nesterov momentum 0.9 at rate 0.7 (section 3.2)."""
    return torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(LocalUpdate):
    """Local steps, then an outer optimizer step by the averaged pseudo-gradient.

    ::

        with taciturn.DiLoCo(model, optimizer, steps=32, compress="quantized:bits=4,feedback=true"):
            for batch in loader:
                ...

    With ``fragments`` > 1 and ``overlap_steps`` it is streaming DiLoCo: each part of the parameters
    has its own time in the round, and its exchange goes on beside the next local steps.

    Law (``test_diloco_with_outer_sgd_is_averaging``): with outer SGD at rate 1 it is local SGD.

    Args:
        model, optimizer, warmup_steps, optimizer_state, buffers, process_group, timeout_s: as of
            :class:`LocalSGD`.
        steps: H, inner steps of a round.
        outer: makes the outer optimizer of a list of tensors, alike on every rank, such as
            ``lambda anchor: torch.optim.SGD(anchor, lr=0.7)``; :func:`nesterov` if left out.
        fragments: parts of the parameters, of about equal size, exchanged one after the other
            within a round of H steps, part f of F after step round(H f / F). More: smaller peaks on
            the link.
        overlap_steps: inner steps in which an exchange goes on; 0: the loop waits for it.
        mixing: share of its own parameters that a rank keeps when a late average comes, of
            overlapped exchanges; 0.5 if None, the paper's.
        compress: method of the outer exchange: a name, an aggregator or a collective.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Period = 32,
        *,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = nesterov,
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing: float | None = None,
        compress: str | Aggregator | Collective = "backend",
        warmup_steps: int = 0,
        optimizer_state: OptimizerState = "keep",
        buffers: Buffers = "average",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            steps,
            outer=outer,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mixing=(0.5 if overlap_steps else 0.0) if mixing is None else mixing,
            warmup_steps=warmup_steps,
            optimizer_state=optimizer_state,
            buffers=buffers,
            method=compress,
            process_group=process_group,
            timeout_s=timeout_s,
        )

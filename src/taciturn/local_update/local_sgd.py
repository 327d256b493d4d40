"""Local SGD: the average of the parameters after every few steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.local_update.companions import Buffers, OptimizerState
from taciturn.local_update.rounds import LocalUpdate, Period

__all__ = ["LocalSGD"]


class LocalSGD(LocalUpdate):
    """Average the parameters after every ``steps`` optimizer steps instead of every gradient.

    ::

        with taciturn.LocalSGD(model, optimizer, steps=8):
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    Law (``test_local_sgd_with_one_step_is_ddp``): with steps=1 and plain SGD it equals DDP.

    Args:
        model: a plain module, equal on all ranks. All its parameters are averaged, whatever their
            ``.grad`` is, frozen ones too.
        optimizer: whose steps are counted; every rank has to make as many. It steps parameters of
            ``model`` and no others.
        steps: H, local steps of a round, or a function of the round's number for a period that
            grows. More: fewer exchanges, more drift.
        warmup_steps: first steps, after each of which is averaged.
        optimizer_state: "keep": each rank's own; "average": its momenta too, at their bytes.
        buffers: such as running statistics, at the end of a round: "average" (whole numbers are
            rank 0's), "rank 0", or "keep" each rank's own.
        method: of the average: a name, an aggregator or a collective; the backend's exact mean.
        process_group: the ranks; the default group if None.
        timeout_s: every failure is an error on every rank within this time.

    Raises:
        InputError: values that cannot be used, on every rank alike.
        MismatchError: ranks that differ in them, in their parameters or in their steps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: Period = 8,
        *,
        warmup_steps: int = 0,
        optimizer_state: OptimizerState = "keep",
        buffers: Buffers = "average",
        method: str | Aggregator | Collective = "backend",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            steps,
            outer=lambda anchor: torch.optim.SGD(anchor, lr=1.0),
            fragments=1,
            overlap_steps=0,
            mixing=0.0,
            warmup_steps=warmup_steps,
            optimizer_state=optimizer_state,
            buffers=buffers,
            method=method,
            process_group=process_group,
            timeout_s=timeout_s,
        )

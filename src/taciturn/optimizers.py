"""What the loop's optimizer has to be, for all that counts its steps."""

from __future__ import annotations

import inspect

import torch

from taciturn.errors import InputError

__all__ = ["check_optimizer"]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step evaluates the loss itself.

    Raises:
        InputError: such as LBFGS; or it is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer={optimizer!r}: give the loop's torch.optim.Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, each of which "
            "would need an exchange: use an optimizer whose step needs no closure"
        )

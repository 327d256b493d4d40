"""What optimizers and schedulers have to be so that all ranks can step them alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from taciturn.errors import InputError

__all__ = ["check_optimizer", "check_scheduler", "hyperparameters", "parameters_of"]

_PLAIN = (int, float, str, tuple, type(None))
"""Types of hyperparameters that are compared as they are written."""


def check_optimizer(optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
    """Refuse an optimizer whose step evaluates the loss itself.

    Args:
        optimizer: what was given.
        name: of the argument it was given as.

    Raises:
        InputError: such as LBFGS; or it is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"{name}={optimizer!r}: a torch.optim.Optimizer is needed")
    if "closure" in _needed(type(optimizer).step):
        raise InputError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, each of which "
            "would need an exchange: use an optimizer whose step needs no closure"
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose ``step`` does not go without arguments.

    Raises:
        InputError: such as ReduceLROnPlateau; or it has no ``step``.
    """
    kind = type(scheduler)
    if not callable(getattr(kind, "step", None)):
        raise InputError(f"scheduler={scheduler!r}: give one with a step(), or None")
    if needed := _needed(kind.step):
        raise InputError(
            f"{kind.__name__}.step needs {', '.join(needed)}: call it yourself, on every rank with "
            "the same value, and leave scheduler= out"
        )


@lru_cache(maxsize=64)
def _needed(step: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments without a default of a class's ``step``."""
    some = list(inspect.signature(step).parameters.values())[1:]
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in some if p.default is inspect.Parameter.empty and p.kind in fixed)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield what the optimizer steps, of all its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def hyperparameters(optimizer: torch.optim.Optimizer, name: str) -> dict[str, str]:
    """Return what has to be the same on all ranks for equal steps, for ``exchange.agree``.

    Class, number of groups, and the plain values of each group, rates that are tensors on the CPU
    included.
    """
    items = {name: type(optimizer).__name__, f"{name}'s groups": str(len(optimizer.param_groups))}
    for number, group in enumerate(optimizer.param_groups):
        plain = {key: _plain(value) for key, value in group.items() if key != "params"}
        values = {key: value for key, value in plain.items() if isinstance(value, _PLAIN)}
        where = f"{name}'s" if len(optimizer.param_groups) == 1 else f"{name}'s group {number}'s"
        items[f"{where} hyperparameters"] = ", ".join(values)
        items |= {f"{where} {key}": repr(value) for key, value in values.items()}
    return items


def _plain(value: Any) -> Any:
    alone = isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"
    return value.item() if alone else value

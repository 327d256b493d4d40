"""The model and the optimizer of the loop: what they have to be, and that they stay so."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from taciturn.errors import InputError
from taciturn.optimizers import check_optimizer, parameters_of

__all__ = ["Trainee"]

_claimed: WeakSet[torch.nn.Module | torch.optim.Optimizer] = WeakSet()
"""Models and optimizers within some ``with`` block."""


class Trainee:
    """A model with the optimizer that steps its parameters and no others.

    Raises:
        InputError: they are no such pair, or the model cannot be averaged.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model={model!r}: a torch.nn.Module is needed")
        if isinstance(model, DistributedDataParallel):
            raise InputError(
                "a DistributedDataParallel module averages in every step already: give the module "
                "inside it"
            )
        check_optimizer(optimizer)
        self._model, self._optimizer = model, optimizer
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            if not parameter.dtype.is_floating_point or parameter.layout != torch.strided:
                raise InputError(
                    f"parameter {name!r} is {parameter.dtype}, {parameter.layout}: only dense real "
                    "ones can be averaged"
                )
        self._check_steps()

    def check(self) -> None:
        """Refuse to go on with parameters that are not averaged.

        Raises:
            InputError: a parameter was replaced, added or removed, in the model or the optimizer.
        """
        now = dict(self._model.named_parameters())
        for name in [*self._parameters, *now]:
            if now.get(name) is not self._parameters.get(name):
                what = "replaced" if name in self._parameters else "added"
                what = what if name in now else "removed"
                raise InputError(
                    f"{name!r} was {what} since local updates of this model were made, which "
                    "average the parameters of then: change these in place, or make new ones"
                )
        self._check_steps()

    def _check_steps(self) -> None:
        known = {id(parameter) for parameter in self._parameters.values()}
        steps = list(parameters_of(self._optimizer))
        foreign = [parameter for parameter in steps if id(parameter) not in known]
        if len(foreign) == len(steps):
            raise InputError(
                "optimizer= holds none of this module's parameters: give the one that steps them"
            )
        if foreign:
            raise InputError(
                f"optimizer= steps a parameter of shape {tuple(foreign[0].shape)} that is not the "
                "model's: it would go apart on the ranks and never be averaged; put all that this "
                "optimizer steps in one module"
            )

    def check_free(self) -> None:
        """Refuse a second ``with`` block around the same loop.

        Raises:
            InputError: model or optimizer are claimed.
        """
        for one, what in ((self._model, "model"), (self._optimizer, "optimizer")):
            if one in _claimed:
                raise InputError(
                    f"this {what} is within another with block of local updates already, which "
                    "counts and averages the same steps: use one at a time"
                )

    def claim(self) -> None:
        """Begin a ``with`` block."""
        _claimed.update((self._model, self._optimizer))

    def release(self) -> None:
        """End it."""
        _claimed.difference_update((self._model, self._optimizer))

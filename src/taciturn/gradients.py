"""What gradients have to be to be exchanged, and whether they stay as a backward pass left them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from taciturn.errors import InputError

__all__ = ["Untouched", "check_gradients"]


def check_gradients(model: torch.nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Refuse gradients that no method exchanges.

    Args:
        model: whose modules may say that their gradients are sparse.
        trained: its parameters that are, by name.

    Raises:
        InputError: there are none, sparse ones, or such as are not real numbers.
    """
    if not trained:
        raise InputError("no parameter of this module requires a gradient: nothing to average")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and any(
            p.requires_grad for p in module.parameters(recurse=False)
        ):
            raise InputError(
                f"module {name or 'itself'!r} has sparse gradients, which no method here "
                "exchanges: build it with sparse=False"
            )
    for name, parameter in trained.items():
        if not parameter.dtype.is_floating_point:
            raise InputError(
                f"parameter {name!r} is {parameter.dtype}: only real floating-point gradients are "
                "exchanged; view complex parameters as real ones"
            )


class Untouched:
    """Evidence that gradients and parameters stay as they were noted.

    Tensors count what changes them in place, so this reads three attributes a parameter, and no
    values.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self.forget()

    def forget(self) -> None:
        """Let go of what was noted, and of the gradients' memory."""
        self._gradients: list[torch.Tensor | None] = []
        self._versions: list[tuple[int, int]] = []

    def note(self) -> None:
        """Take parameters and gradients as they are now."""
        self._gradients = [p.grad for p in self._parameters]
        self._versions = self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [
            (p._version, -1 if gradient is None else gradient._version)
            for p, gradient in zip(self._parameters, self._gradients, strict=True)
        ]

    def change(self) -> str | None:
        """Say what became of the first that is not as it was noted; None if all are, or none was.

        Returns:
            As "'weight' lost its gradient".
        """
        if not self._gradients:
            return None
        for place, (version, _) in enumerate(now := self._now()):
            name = repr(self._names[place])
            gradient = self._parameters[place].grad
            if gradient is not self._gradients[place]:
                return f"{name} {'lost its' if gradient is None else 'was given another'} gradient"
            if version != self._versions[place][0]:
                return f"{name} was itself changed"
            if now[place] != self._versions[place]:
                return f"the gradient of {name} was changed"
        return None

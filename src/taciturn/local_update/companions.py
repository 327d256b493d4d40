"""What replicas hold beside parameters - buffers, optimizer state - and what rounds do with it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from taciturn.aggregators import Mean
from taciturn.collectives.ring import Ring
from taciturn.errors import InputError
from taciturn.exchange import Exchange, agree, all_finite
from taciturn.transport import DistributedTransport

__all__ = ["Buffers", "Companions", "OptimizerState"]

Buffers = Literal["average", "rank 0", "keep"]
OptimizerState = Literal["keep", "average"]


class Companions:
    """Buffers and optimizer state of a model, and what the ranks do with them.

    Args:
        model, optimizer: the loop's.
        buffers, optimizer_state: the policies, as of :class:`LocalSGD`.
        transport: the ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Buffers,
        optimizer_state: OptimizerState,
        transport: DistributedTransport,
    ) -> None:
        self._model, self._optimizer, self._transport = model, optimizer, transport
        self._buffers, self._averages_state = buffers, optimizer_state == "average"
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def exchanged(self) -> bool:
        """Return whether the end of a round exchanges anything of them."""
        buffers = self._buffers != "keep" and any(True for _ in self._model.buffers())
        return buffers or self._averages_state

    def exchange(self) -> None:
        """Do at the end of a round what the policies say. Nothing else may use the transport."""
        if self._buffers != "keep":
            named = dict(self._model.named_buffers())
            real = {n: b for n, b in named.items() if b.dtype.is_floating_point}
            whole = {n: b for n, b in named.items() if n not in real}
            self._average(real if self._buffers == "average" else {})
            self._take_first(whole if self._buffers == "average" else named)
        if self._averages_state:
            self._average_state()

    def keep(self) -> None:
        """Remember the real buffers for :meth:`restart`: call it where a round begins."""
        self._kept = {
            name: buffer.detach().clone()
            for name, buffer in self._model.named_buffers()
            if buffer.dtype.is_floating_point
        }

    def restart(self) -> None:
        """Begin anew with what is not finite here, after a round that was lost.

        A buffer becomes what it was when the round began. Of a parameter whose optimizer state is
        not finite in any part, all the state becomes zero, counts of steps too: for Adam, RMSprop,
        and SGD with momentum that is the state before the first step.
        """
        for name, buffer in self._model.named_buffers():
            if name in self._kept and not all_finite(buffer):
                buffer.copy_(self._kept[name])
        for state in self._optimizer.state.values():
            if all(_finite(value) for value in state.values()):
                continue
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    state[key] = type(value)(0)

    def _average(self, named: dict[str, torch.Tensor]) -> None:
        if named:
            Exchange(list(named.items()), Mean(Ring()), self._transport).run(named)

    def _take_first(self, named: dict[str, torch.Tensor]) -> None:
        """Give every rank the first one's."""
        for buffer in named.values():
            if self._transport.rank:
                buffer.zero_()
            whole = buffer.to(torch.int64) if buffer.dtype == torch.bool else buffer.contiguous()
            Ring().all_reduce(whole, self._transport)
            buffer.copy_(whole)

    def _average_state(self) -> None:
        """Average the real tensors of the optimizer's state, in the parameters' order."""
        named: dict[str, torch.Tensor] = {}
        problem: Exception | None = None
        for name, parameter in self._model.named_parameters():
            for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    named[f"{name}: {key}"] = value
                    if value.layout != torch.strided:
                        problem = InputError(
                            f"{key!r} of {name!r} in the optimizer's state is {value.layout}: only "
                            "dense state is averaged; choose optimizer_state='keep'"
                        )
        items = {"what the optimizer holds": repr(sorted(named))}
        agree(self._transport, items, problem, "the round")
        self._average(named)


def _finite(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return not real or all_finite(value.to_dense() if value.is_sparse else value)

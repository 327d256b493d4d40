"""The average over ranks by any collective, exact or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.backend import Backend
from taciturn.collectives.base import Collective, Cost
from taciturn.grammar import Method, with_option
from taciturn.transport import DistributedTransport, Transport

__all__ = ["Mean"]


@dataclass(eq=False)
class Mean(Aggregator):
    """The collective's sum over the number of ranks.

    The residual is the roundings that this rank made on narrow wires, one for each element; zero
    for exact collectives, and for coded rings, whose error is a spread with zero mean over ranks.

    Args:
        over: the collective that sums; the backend's own if left out.
    """

    over: Collective = field(default_factory=Backend)

    def __post_init__(self) -> None:
        self.bit_identical = self.over.exact or self.over.bit_identical
        self.overlaps = isinstance(self.over, Backend) and not self.over.check

    @property
    @override
    def method(self) -> Method:
        if isinstance(self.over, Backend):  # in training groups are agreed on before: no check
            return with_option(self.over.method, "check", True if self.over.check else None)
        return self.over.method

    @override
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        self.over.all_reduce(gradients, transport, residual)
        if transport.size > 1:
            gradients.div_(transport.size)

    @override
    def start(
        self, gradients: torch.Tensor, group: Group, transport: Transport
    ) -> Callable[[], None] | None:
        if not isinstance(transport, DistributedTransport) or transport.size == 1:
            return super().start(gradients, group, transport)
        if not isinstance(self.over, Backend) or self.over.check:
            return super().start(gradients, group, transport)
        wait = self.over.start(gradients, transport)

        def finish() -> None:
            wait()
            gradients.div_(transport.size)

        return finish

    @override
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        return self.over.cost(group.numel, dtype, ranks, rank)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.over.state_dict()

    @override
    def check_state(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        copy(self.over).load_state_dict(state)

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.over.load_state_dict(state)

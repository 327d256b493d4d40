"""The average over ranks in 16 bits, summed by the backend: the baseline that others must beat."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.backend import Backend
from taciturn.collectives.base import Cost
from taciturn.errors import InputError
from taciturn.transport import DistributedTransport, Transport

__all__ = ["Cast"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(eq=False)
class Cast(Aggregator):
    """Cast, the backend's own all-reduce, cast back.

    Gradients are divided by the number of ranks before the cast, so that fp16 does not overflow in
    the sum where no rank overflows alone. A backend that cannot sum the dtype sends fp32, with one
    warning.

    The residual is what the cast rounded away; what the backend rounds on the way is lost.

    Args:
        wire: "bf16", which never overflows before fp32 does, or "fp16", with three bits more.
    """

    wire: Literal["bf16", "fp16"] = "bf16"
    _warned: bool = field(default=False, init=False, repr=False)

    name: ClassVar[str] = "cast"

    def __post_init__(self) -> None:
        if self.wire not in _DTYPES:
            raise InputError(f"wire={self.wire!r}: choose {' or '.join(_DTYPES)}")
        self.overlaps = True

    @override
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        if transport.size > 1:
            gradients.div_(transport.size)
        self._backend(transport).all_reduce(gradients, transport, residual)
        if residual is not None and transport.size > 1:
            residual.mul_(transport.size)

    @override
    def start(
        self, gradients: torch.Tensor, group: Group, transport: Transport
    ) -> Callable[[], None] | None:
        if not isinstance(transport, DistributedTransport) or transport.size == 1:
            return super().start(gradients, group, transport)
        gradients.div_(transport.size)
        return self._backend(transport).start(gradients, transport)

    def _backend(self, transport: Transport) -> Backend:
        if not isinstance(transport, DistributedTransport) or transport.size == 1:
            return Backend(check=False)
        if transport.can_reduce(_DTYPES[self.wire]):
            return Backend(wire=self.wire, check=False)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"this backend cannot sum {self.wire}: gradients travel as they are", stacklevel=2
            )
        return Backend(check=False)

    @override
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        return Backend(wire=self.wire).cost(group.numel, dtype, ranks, rank)

"""Wires whose work is done by compiled loops: CPU, buffers of dtype ``compute``, nearest rounding.

The same messages as :mod:`taciturn.collectives.wires.torch_wires`, bit for bit, in a third to a
fifth of the time: memory is passed over once, and a short message does not pay for ten calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import override

from taciturn.collectives.wires import kernels
from taciturn.collectives.wires.base import BlockLayout, Message, Wire
from taciturn.collectives.wires.torch_wires import PLAIN_NAMES

__all__ = ["CompiledBlocks", "CompiledPlain"]

_CPU = torch.device("cpu")


class CompiledPlain(Wire):
    """Messages of fp32 or fp64 that are the numbers themselves, or of bf16.

    Args:
        dtype: of the messages: ``compute``, or bf16 with ``compute`` fp32.
        compute: dtype of the buffers, fp32 or fp64.
    """

    def __init__(self, dtype: torch.dtype, compute: torch.dtype) -> None:
        super().__init__(compute, _CPU)
        kernels.prepare()
        self.dtype = dtype
        self.name = PLAIN_NAMES[dtype]
        self.native = dtype == compute

    @override
    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    @override
    def _views(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, Any]:
        """Return the numbers as a tensor, and as an array, bf16 as 16-bit integers."""
        numbers = data.view(self.dtype)
        return numbers, (numbers if self.native else data.view(torch.int16)).numpy()

    @override
    def encode(self, values: torch.Tensor, message: Message) -> None:
        message.views[0].copy_(values)

    @override
    def decode(self, message: Message, out: torch.Tensor) -> None:
        out.copy_(message.views[0])

    @override
    def accumulate(self, message: Message, out: torch.Tensor) -> None:
        out.add_(message.views[0])

    @override
    def relay(self, message: Message, own: torch.Tensor, onward: Message, keep: bool) -> None:
        if not self.native:
            kernels.relay_bf16(message.views[1], own.numpy(), onward.views[1], keep)
            return
        torch.add(message.views[0], own, out=onward.views[0])
        if keep:
            own.copy_(onward.views[0])

    @override
    def exchange(
        self, message: Message, stale: torch.Tensor, term: torch.Tensor, onward: Message
    ) -> None:
        run = kernels.exchange_plain if self.native else kernels.exchange_bf16
        run(message.views[1], stale.numpy(), term.numpy(), onward.views[1])


class CompiledBlocks(Wire):
    """Block-scaled integers of 8 or 4 bits, buffers of fp32."""

    def __init__(self, layout: BlockLayout) -> None:
        super().__init__(torch.float32, _CPU)
        kernels.prepare()
        self.layout = layout
        self.name = f"int{layout.bits}"
        self.parameters = (layout.bits, layout.block)
        self.shrink = np.float32(layout.shrink)

    @override
    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    @override
    def _views(self, data: torch.Tensor, numel: int) -> tuple[Any, Any]:
        """Return the scales and the integers as arrays."""
        scales, integers = self.layout.split(data, numel)
        return scales.numpy(), integers.numpy()

    @override
    def encode(self, values: torch.Tensor, message: Message) -> None:
        kernels.encode_blocks(values.numpy(), *self.parameters, self.shrink, *message.views)

    @override
    def decode(self, message: Message, out: torch.Tensor) -> None:
        kernels.decode_blocks(*message.views, *self.parameters, out.numpy())

    @override
    def accumulate(self, message: Message, out: torch.Tensor) -> None:
        kernels.accumulate_blocks(*message.views, *self.parameters, out.numpy())

    @override
    def relay(self, message: Message, own: torch.Tensor, onward: Message, keep: bool) -> None:
        kernels.relay_blocks(
            *message.views, *self.parameters, self.shrink, own.numpy(), *onward.views, keep
        )

    @override
    def exchange(
        self, message: Message, stale: torch.Tensor, term: torch.Tensor, onward: Message
    ) -> None:
        kernels.exchange_blocks(
            *message.views,
            *self.parameters,
            self.shrink,
            stale.numpy(),
            term.numpy(),
            *onward.views,
        )

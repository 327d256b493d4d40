"""Wires made of tensor operations: any device, any dtype, both ways of rounding.

Encoding and decoding run over cache-sized spans on the CPU: whole buffers would travel to memory
and back for each of the several elementwise operations.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from typing_extensions import override

from taciturn.collectives.wires.base import (
    LARGEST_BLOCK,
    SMALLEST_SCALE,
    BlockLayout,
    Message,
    Rounding,
    Wire,
)
from taciturn.errors import InputError

__all__ = ["PLAIN_DTYPES", "PLAIN_NAMES", "BlockScaled", "Plain"]

_SPAN = LARGEST_BLOCK
"""Elements of one span: 512 KiB of fp32, half of a typical second-level cache (measured: smaller
spans pay for the calls, larger ones for memory). Blocks must divide it."""


class _SpanWire(Wire):
    """A wire that codes span by span.

    Args:
        compute: dtype in which messages are decoded and added, fp32 or fp64.
        device: device of the messages.
        generator_seed: seed of the stochastic rounding; unused with nearest rounding.
    """

    def __init__(self, compute: torch.dtype, device: torch.device, generator_seed: int = 0) -> None:
        super().__init__(compute, device)
        self._seed = generator_seed
        self._generator: torch.Generator | None = None
        self._scratch: list[torch.Tensor] = []

    @abstractmethod
    def _parts(
        self, data: torch.Tensor, numel: int, start: int, stop: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the parts of a message of ``numel`` elements that hold start..stop."""

    @abstractmethod
    def _encode(self, values: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        """Write ``values`` into the parts of a span."""

    @abstractmethod
    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Read the parts of a span into ``out``, dtype ``compute``."""

    @override
    def _views(
        self, data: torch.Tensor, numel: int
    ) -> tuple[tuple[slice, tuple[torch.Tensor, ...]], ...]:
        """Return which elements, and the parts of ``data`` that hold them, by span."""
        step = _SPAN if self.device.type == "cpu" else max(numel, 1)
        spans = []
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            spans.append((slice(start, stop), self._parts(data, numel, start, stop)))
        return tuple(spans)

    @override
    def encode(self, values: torch.Tensor, message: Message) -> None:
        for where, parts in message.views:
            self._encode(values[where], parts)

    @override
    def decode(self, message: Message, out: torch.Tensor) -> None:
        for where, parts in message.views:
            place = out[where]
            if out.dtype == self.compute:
                self._decode(parts, place)
            else:
                place.copy_(self._decoded(parts, place.numel()))

    @override
    def accumulate(self, message: Message, out: torch.Tensor) -> None:
        for where, parts in message.views:
            place = out[where]
            place.add_(self._decoded(parts, place.numel()))

    @override
    def relay(self, message: Message, own: torch.Tensor, onward: Message, keep: bool) -> None:
        for (where, parts), (_, onward_parts) in zip(message.views, onward.views, strict=True):
            mine = own[where]
            total = self._decoded(parts, mine.numel())
            total.add_(mine if mine.dtype == self.compute else mine.to(self.compute))
            self._encode(total, onward_parts)
            if keep:
                self._decode(onward_parts, total)
                mine.copy_(total)

    @override
    def exchange(
        self, message: Message, stale: torch.Tensor, term: torch.Tensor, onward: Message
    ) -> None:
        for (where, parts), (_, onward_parts) in zip(message.views, onward.views, strict=True):
            old = stale[where]
            arrived = self._decoded(parts, old.numel())
            total = torch.sub(term[where], old, out=self._take(3, old.numel())).add_(arrived)
            torch.sub(arrived, old, out=old)
            self._encode(total, onward_parts)

    def _decoded(self, parts: tuple[torch.Tensor, ...], numel: int) -> torch.Tensor:
        """Return a span decoded into scratch, valid until the next one."""
        scratch = self._take(0, numel)
        self._decode(parts, scratch)
        return scratch

    def _take(self, which: int, numel: int) -> torch.Tensor:
        """Return scratch number ``which``, shape (numel,), allocated once per object."""
        while len(self._scratch) <= which:
            self._scratch.append(torch.empty(0, dtype=self.compute, device=self.device))
        if self._scratch[which].numel() < numel:
            self._scratch[which] = torch.empty(numel, dtype=self.compute, device=self.device)
        return self._scratch[which][:numel]

    def _random(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(self.device)
            self._generator.manual_seed(self._seed)
        return self._generator


PLAIN_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
PLAIN_DTYPES = {name: dtype for dtype, name in PLAIN_NAMES.items()}


class Plain(_SpanWire):
    """A floating-point format of the hardware: fp64, fp32, fp16 or bf16."""

    def __init__(
        self,
        dtype: torch.dtype,
        compute: torch.dtype,
        device: torch.device,
        rounding: Rounding = "nearest",
        generator_seed: int = 0,
    ) -> None:
        super().__init__(compute, device, generator_seed)
        self.dtype = dtype
        self.name = PLAIN_NAMES[dtype]
        if rounding == "stochastic" and dtype is not torch.bfloat16:
            raise InputError(
                f"rounding='stochastic' with wire {self.name!r}: only int8, int4 and bf16 wires "
                "round stochastically"
            )
        self.stochastic = rounding == "stochastic"

    @override
    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    @override
    def _parts(
        self, data: torch.Tensor, numel: int, start: int, stop: int
    ) -> tuple[torch.Tensor, ...]:
        return (data.view(self.dtype)[start:stop],)

    @override
    def _encode(self, values: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        (place,) = parts
        if not self.stochastic:
            place.copy_(values)
            return
        # Adding 16 random bits below the ones that stay rounds up with the right probability.
        bits = values.to(torch.float32).view(torch.int32)
        noise = torch.empty_like(bits).random_(0, 1 << 16, generator=self._random())
        rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
        place.copy_(torch.where(values.isfinite(), rounded, values))

    @override
    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        out.copy_(parts[0])


class BlockScaled(_SpanWire):
    """Integers of 8 or 4 bits with one bf16 scale per block.

    Args:
        layout: bits and block.
        compute, device, generator_seed: see above.
        rounding: "nearest" or "stochastic".
    """

    def __init__(
        self,
        layout: BlockLayout,
        compute: torch.dtype,
        device: torch.device,
        rounding: Rounding = "nearest",
        generator_seed: int = 0,
    ) -> None:
        super().__init__(compute, device, generator_seed)
        self.layout = layout
        self.name = f"int{layout.bits}"
        self.stochastic = rounding == "stochastic"

    @override
    def nbytes(self, numel: int) -> int:
        return self.layout.nbytes(numel)

    @override
    def _parts(
        self, data: torch.Tensor, numel: int, start: int, stop: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the scales, shape (b, 1), and integers, shape (b, bytes), of whole blocks."""
        layout = self.layout
        span = slice(start // layout.block, layout.blocks(stop))
        scales, integers = layout.split(data, numel)
        rows = integers.view(layout.blocks(numel), -1)[span]
        return scales.view(torch.bfloat16)[span].unsqueeze(1), rows

    def _padded(self, values: torch.Tensor, blocks: int) -> torch.Tensor:
        """Return ``values`` as whole blocks, shape (b, block), dtype ``compute``."""
        numel, full = values.numel(), blocks * self.layout.block
        if full == numel and values.dtype == self.compute:
            return values.view(blocks, -1)
        padded = self._take(2, full)
        padded[:numel].copy_(values)
        padded[numel:] = 0
        return padded.view(blocks, -1)

    @override
    def _encode(self, values: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        scales, integers = parts
        blocks = self._padded(values, scales.shape[0])
        scaled = self._take(1, blocks.numel()).view(blocks.shape)
        torch.abs(blocks, out=scaled)
        scale = scaled.amax(1, keepdim=True).mul_(self.layout.shrink)
        scales.copy_(scale.clamp_(min=SMALLEST_SCALE))
        torch.mul(blocks, scales.to(self.compute).reciprocal_(), out=scaled)
        if self.stochastic:
            noise = torch.empty_like(scaled).uniform_(generator=self._random())
            # x + u can round up to the next integer above the largest when x is the largest.
            largest = self.layout.largest
            scaled.add_(noise).floor_().clamp_(-largest, largest)
        else:
            scaled.round_()
        if self.layout.bits == 8:
            integers.copy_(scaled)
            return
        half = self.layout.block // 2
        scaled[:, half:] *= 16  # exact, and at most 112
        low, high = scaled[:, :half].to(torch.int8), scaled[:, half:].to(torch.int8)
        torch.bitwise_or(low.bitwise_and_(15), high, out=integers)

    @override
    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        scales, integers = parts
        full = scales.shape[0] * self.layout.block
        whole = full == out.numel()
        place = out if whole else self._take(2, full)
        blocks = place.view(-1, self.layout.block)
        scale = scales.to(self.compute)
        if self.layout.bits == 8:
            blocks.copy_(integers)
        else:
            half = self.layout.block // 2
            # The high nibble is worth 16 of its integer; arithmetic shifts keep the sign.
            high = integers.bitwise_and(-16)
            blocks[:, :half].copy_(integers.bitwise_left_shift(4))
            blocks[:, half:].copy_(high)
            scale.mul_(1 / 16)
        blocks.mul_(scale)
        if not whole:
            out.copy_(place[: out.numel()])

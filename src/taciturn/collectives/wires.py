"""What a number looks like on the wire: the formats in which messages travel.

=========  =======================================  ===================  ======================
wire       one element                              bits per element     rms rounding error [1]_
=========  =======================================  ===================  ======================
fp64       IEEE double                              64                   6e-17
fp32       IEEE single                              32                   3e-8
fp16       IEEE half, overflows above 65504         16                   2e-4
bf16       upper half of a single                   16                   1.7e-3
int8       block-scaled integer -127..127           8 + 16/block         0.006
int4       block-scaled integer -7..7               4 + 16/block         0.12
=========  =======================================  ===================  ======================

.. [1] relative to the rms of normally distributed values, block 128.

A block-scaled message is one bf16 scale per ``block`` elements, then the integers; the last block
is padded with zeros. The scale is the block's largest magnitude over 127 (or 7), rounded up, so
that no integer can overflow. A block with a NaN or an infinity decodes to non-finite values only.

Encoding and decoding run over cache-sized spans on the CPU: whole buffers would travel to memory
and back for each of the several elementwise operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

import torch
from typing_extensions import override

from taciturn.errors import InputError

__all__ = ["WIRES", "BlockScaled", "Message", "Plain", "Rounding", "Wire", "make_wire"]

Rounding = Literal["nearest", "stochastic"]

_SPAN = 1 << 17
"""Elements of one span: 512 KiB of fp32, half of a typical second-level cache (measured: smaller
spans pay for the calls, larger ones for memory)."""

_ROUND_UP = 1 / (1 - 2.0**-8)

_SMALLEST_SCALE = 2.0**-126
"""Scales below the smallest normal number would have an infinite reciprocal."""


class Message(NamedTuple):
    """Memory for one encoded message, with the views that coding it needs."""

    data: torch.Tensor
    """What travels: 1-D, contiguous."""
    numel: int
    """Elements it holds."""
    spans: tuple[tuple[slice, tuple[torch.Tensor, ...]], ...]
    """Which elements, and the parts of ``data`` that hold them, by cache-sized span."""


class Wire(ABC):
    """Encodes and decodes 1-D floating-point tensors. Makes no reference to ranks.

    One object serves one call of a collective at a time: it holds scratch memory. An encoded
    message is made once, by :meth:`message`, and reused: its views cost as much as its coding does
    when it is short.

    Args:
        compute: dtype in which messages are decoded and added, fp32 or fp64.
        device: device of the messages.
        generator_seed: seed of the stochastic rounding; unused with nearest rounding.
    """

    name: str

    def __init__(self, compute: torch.dtype, device: torch.device, generator_seed: int = 0) -> None:
        self.compute = compute
        self.device = device
        self._seed = generator_seed
        self._generator: torch.Generator | None = None
        self._scratch: list[torch.Tensor] = []

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message that holds ``numel`` elements."""

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

    def message(self, numel: int, memory: torch.Tensor | None = None) -> Message:
        """Return a message for ``numel`` elements, in the first bytes of ``memory`` if given."""
        nbytes = self.nbytes(numel)
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        data = memory[:nbytes]
        step = _SPAN if self.device.type == "cpu" else max(numel, 1)
        spans = []
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            spans.append((slice(start, stop), self._parts(data, numel, start, stop)))
        return Message(data, numel, tuple(spans))

    def encode(self, values: torch.Tensor, message: Message) -> None:
        """Write ``values``, shape (n,), into a message for n elements."""
        for where, parts in message.spans:
            self._encode(values[where], parts)

    def decode(self, message: Message, out: torch.Tensor) -> None:
        """Read a message into ``out``, shape (n,), changed in place."""
        for where, parts in message.spans:
            place = out[where]
            if out.dtype == self.compute:
                self._decode(parts, place)
            else:
                scratch = self._take(0, place.numel())
                self._decode(parts, scratch)
                place.copy_(scratch)

    def accumulate(self, message: Message, out: torch.Tensor) -> None:
        """Add the decoded message to ``out``, shape (n,), changed in place."""
        for where, parts in message.spans:
            place = out[where]
            scratch = self._take(0, place.numel())
            self._decode(parts, scratch)
            place.add_(scratch)

    def relay(
        self,
        message: Message,
        own: torch.Tensor,
        onward: Message,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Write encode(decode(message) + own) into ``onward``; ``keep`` gets what it decodes to.

        The sum is formed in ``compute`` and is rounded once, by the encoding.

        Args:
            message: what was received.
            own: this rank's elements, shape (n,), any floating dtype.
            onward: what is to be sent, changed in place.
            keep: None, or where the decoded copy of ``onward`` goes; may be ``own`` itself.
        """
        for (where, parts), (_, onward_parts) in zip(message.spans, onward.spans, strict=True):
            mine = own[where]
            scratch = self._take(0, mine.numel())
            self._decode(parts, scratch)
            scratch.add_(mine if mine.dtype == self.compute else mine.to(self.compute))
            self._encode(scratch, onward_parts)
            if keep is not None:
                self._decode(onward_parts, scratch)
                keep[where].copy_(scratch)

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


class Plain(Wire):
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
        self.name = _PLAIN_NAMES[dtype]
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


class BlockScaled(Wire):
    """Integers of 8 or 4 bits with one bf16 scale per block.

    Args:
        bits: 8 or 4.
        block: elements that share a scale, a power of two.
    """

    def __init__(
        self,
        bits: Literal[8, 4],
        block: int,
        compute: torch.dtype,
        device: torch.device,
        rounding: Rounding = "nearest",
        generator_seed: int = 0,
    ) -> None:
        super().__init__(compute, device, generator_seed)
        if block < 2 or block > _SPAN or _SPAN % block:
            raise InputError(
                f"block={block}: must be a power of two from 2 to {_SPAN}; 64 to 256 are usual"
            )
        self.bits = bits
        self.block = block
        self.largest = (1 << (bits - 1)) - 1
        self.name = f"int{bits}"
        self.stochastic = rounding == "stochastic"

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    @override
    def nbytes(self, numel: int) -> int:
        return self._blocks(numel) * (2 + self.block * self.bits // 8)

    @override
    def _parts(
        self, data: torch.Tensor, numel: int, start: int, stop: int
    ) -> tuple[torch.Tensor, ...]:
        """Return the scales, shape (b, 1), and integers, shape (b, bytes), of whole blocks."""
        blocks = self._blocks(numel)
        span = slice(start // self.block, self._blocks(stop))
        scales = data[: 2 * blocks].view(torch.bfloat16)[span].unsqueeze(1)
        integers = data[2 * blocks :].view(torch.int8).view(blocks, -1)[span]
        return scales, integers

    def _padded(self, values: torch.Tensor, blocks: int) -> torch.Tensor:
        """Return ``values`` as whole blocks, shape (b, block), dtype ``compute``."""
        numel, full = values.numel(), blocks * self.block
        if full == numel and values.dtype == self.compute:
            return values.view(blocks, self.block)
        padded = self._take(2, full)
        padded[:numel].copy_(values)
        padded[numel:] = 0
        return padded.view(blocks, self.block)

    @override
    def _encode(self, values: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        scales, integers = parts
        blocks = self._padded(values, scales.shape[0])
        scaled = self._take(1, blocks.numel()).view(blocks.shape)
        torch.abs(blocks, out=scaled)
        # Rounding to bf16 errs by 2^-8 at most: made larger by that before, the scale cannot become
        # too small for the largest element, and no integer overflows.
        scale = scaled.amax(1, keepdim=True).mul_(_ROUND_UP / self.largest)
        scales.copy_(scale.clamp_(min=_SMALLEST_SCALE))
        torch.mul(blocks, scales.to(self.compute).reciprocal_(), out=scaled)
        if self.stochastic:
            noise = torch.empty_like(scaled).uniform_(generator=self._random())
            # x + u can round up to the next integer above the largest when x is the largest.
            scaled.add_(noise).floor_().clamp_(-self.largest, self.largest)
        else:
            scaled.round_()
        if self.bits == 8:
            integers.copy_(scaled)
            return
        half = self.block // 2  # the byte pairs element j with element j + half: no strided reads
        scaled[:, half:] *= 16  # exact, and at most 112
        low, high = scaled[:, :half].to(torch.int8), scaled[:, half:].to(torch.int8)
        torch.bitwise_or(low.bitwise_and_(15), high, out=integers)

    @override
    def _decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        scales, integers = parts
        full = scales.shape[0] * self.block
        whole = full == out.numel()
        place = out if whole else self._take(2, full)
        blocks = place.view(-1, self.block)
        scale = scales.to(self.compute)
        if self.bits == 8:
            blocks.copy_(integers)
        else:
            half = self.block // 2
            # The high nibble is worth 16 of its integer; arithmetic shifts keep the sign.
            high = integers.bitwise_and(-16)
            blocks[:, :half].copy_(integers.bitwise_left_shift(4))
            blocks[:, half:].copy_(high)
            scale.mul_(1 / 16)
        blocks.mul_(scale)
        if not whole:
            out.copy_(place[: out.numel()])


_PLAIN_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_PLAIN_DTYPES = {name: dtype for dtype, name in _PLAIN_NAMES.items()}

WireName = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]
WIRES: tuple[str, ...] = get_args(WireName)
"""Names of all wires, widest first."""


def make_wire(
    name: str | None,
    dtype: torch.dtype,
    *,
    block: int = 128,
    rounding: Rounding = "nearest",
    device: torch.device | None = None,
    seed: int = 0,
) -> Wire:
    """Return the wire ``name`` for buffers of ``dtype``; None means the buffer's own dtype.

    Args:
        name: one of :data:`WIRES`, or None.
        dtype: floating dtype of the buffer; sums are formed in fp32, or in fp64 if it is fp64.
        block: elements per scale of int8 and int4.
        rounding: "nearest" or "stochastic" (unbiased, twice the variance).
        device: device of the messages, the CPU if None.
        seed: seed of the stochastic rounding.

    Raises:
        InputError: no such wire, or a wire wider than the buffer.
    """
    device = device if device is not None else torch.device("cpu")
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    if rounding not in get_args(Rounding):
        raise InputError(f"rounding={rounding!r}: choose 'nearest' or 'stochastic'")
    if name is None:
        return Plain(dtype, compute, device, rounding, seed)
    if name not in WIRES:
        raise InputError(f"wire={name!r}: choose one of {', '.join(WIRES)}")
    if name in _PLAIN_DTYPES:
        return Plain(_PLAIN_DTYPES[name], compute, device, rounding, seed)
    bits: Literal[8, 4] = 8 if name == "int8" else 4
    return BlockScaled(bits, block, compute, device, rounding, seed)

"""What every wire does: the contract of the formats in which numbers travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from taciturn.errors import InputError
from taciturn.ranges import check_whole

__all__ = [
    "LARGEST_BLOCK",
    "SMALLEST_SCALE",
    "BlockLayout",
    "Message",
    "Rounding",
    "Wire",
    "check_block",
]

Rounding = Literal["nearest", "stochastic"]

_ROUND_UP = 1 / (1 - 2.0**-8)
"""Rounding to bf16 errs by 2^-8 at most: made larger by this before, no scale becomes too small
for the largest element, and no integer overflows."""

SMALLEST_SCALE = 2.0**-126
"""Scales below the smallest normal number would have an infinite reciprocal."""


class Message(NamedTuple):
    """Memory for one encoded message, with the views that coding it needs."""

    data: torch.Tensor
    """What travels: 1-D uint8, contiguous."""
    numel: int
    """Elements it holds."""
    views: Any
    """Parts of ``data``, as the wire that made the message wants them."""


class Wire(ABC):
    """Encodes and decodes 1-D contiguous floating-point tensors. Makes no reference to ranks.

    One object serves one call of a collective at a time: it may hold scratch memory. An encoded
    message is made once, by :meth:`message`, and reused: its views cost as much as its coding does
    when it is short.

    Attributes:
        name: one of :data:`taciturn.collectives.wires.WIRES`.
        compute: dtype in which messages are decoded and added, fp32 or fp64.
        device: device of the messages.
    """

    name: str

    def __init__(self, compute: torch.dtype, device: torch.device) -> None:
        self.compute = compute
        self.device = device

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message that holds ``numel`` elements."""

    @abstractmethod
    def _views(self, data: torch.Tensor, numel: int) -> Any:
        """Return the views of a message's memory that coding it needs."""

    def message(self, numel: int, memory: torch.Tensor | None = None) -> Message:
        """Return a message for ``numel`` elements, in the first bytes of ``memory`` if given."""
        nbytes = self.nbytes(numel)
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        data = memory[:nbytes]
        return Message(data, numel, self._views(data, numel))

    @abstractmethod
    def encode(self, values: torch.Tensor, message: Message) -> None:
        """Write ``values``, shape (n,), into a message for n elements."""

    @abstractmethod
    def decode(self, message: Message, out: torch.Tensor) -> None:
        """Read a message into ``out``, shape (n,), changed in place."""

    @abstractmethod
    def accumulate(self, message: Message, out: torch.Tensor) -> None:
        """Add the decoded message to ``out``, shape (n,), changed in place."""

    @abstractmethod
    def relay(self, message: Message, own: torch.Tensor, onward: Message, keep: bool) -> None:
        """Write encode(decode(message) + own) into ``onward``.

        The sum is formed in ``compute`` and is rounded once, by the encoding.

        Args:
            message: what was received.
            own: this rank's elements, shape (n,); if kept, changed in place.
            onward: what is to be sent, changed in place.
            keep: have ``own`` become the decoded copy of ``onward``.
        """

    @abstractmethod
    def exchange(
        self, message: Message, stale: torch.Tensor, term: torch.Tensor, onward: Message
    ) -> None:
        """Write encode(decode(message) - stale + term) into ``onward``.

        ``stale`` becomes decode(message) - stale. The difference of the terms, which is small, is
        formed first, so that on a wire as precise as ``compute`` the message is rounded once.

        Args:
            message: what was received.
            stale: what this rank has in it, shape (n,), dtype ``compute``, changed in place.
            term: what is to take its place, shape (n,), dtype ``compute``.
            onward: what is to be sent, changed in place.
        """

    def encode_with_error(
        self, values: torch.Tensor, message: Message, error: torch.Tensor
    ) -> None:
        """Encode; ``error``, like ``values``, becomes values - decode(message)."""
        self.encode(values, message)
        self.decode(message, error)
        torch.sub(values, error, out=error)

    def relay_with_error(
        self,
        message: Message,
        own: torch.Tensor,
        onward: Message,
        keep: bool,
        error: torch.Tensor,
    ) -> None:
        """Relay; ``error``, like ``own``, becomes decode(message) + own - decode(onward)."""
        self.decode(message, error)
        error.add_(own)
        self.encode(error, onward)
        decoded = torch.empty_like(error)
        self.decode(onward, decoded)
        error.sub_(decoded)
        if keep:
            own.copy_(decoded)


LARGEST_BLOCK = 1 << 17
"""Elements of a block at most."""


def check_block(block: int) -> None:
    """Raise InputError unless so many elements can share a scale."""
    usual = "64 to 256 are usual"
    check_whole("block", block, 2, LARGEST_BLOCK, hint=f"a power of two; {usual}")
    if LARGEST_BLOCK % block:
        raise InputError(f"block={block}: must be a power of two; {usual}")


@dataclass(frozen=True)
class BlockLayout:
    """Where a block-scaled message has what: one bf16 scale per block, then the integers.

    Each block takes ``bits * block / 8`` bytes; the last one is padded with zeros. With 4 bits a
    byte holds element j in its low and element j + block / 2 in its high half, so that neither
    packing nor unpacking strides through memory.
    """

    bits: Literal[8, 4]
    block: int
    """Elements that share a scale, a power of two; more save bytes and add error."""

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def largest(self) -> int:
        """Return the largest integer."""
        return (1 << (self.bits - 1)) - 1

    @property
    def shrink(self) -> float:
        """Return what the largest magnitude of a block is multiplied with to get its scale."""
        return _ROUND_UP / self.largest

    def blocks(self, numel: int) -> int:
        """Return the number of blocks."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message."""
        return self.blocks(numel) * (2 + self.block * self.bits // 8)

    def split(self, data: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, 1-D 16-bit integers, and the integers, 1-D int8, of a message."""
        scales = 2 * self.blocks(numel)
        return data[:scales].view(torch.int16), data[scales:].view(torch.int8)

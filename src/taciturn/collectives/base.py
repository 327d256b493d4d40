"""The contract of every collective.

Laws, each a test of the same name in ``tests/test_collectives.py`` that runs over all of them:

- *sum*: afterwards every rank's buffer holds (an approximation of) the sum over all ranks, for any
  length from 0 on, any number of ranks from 1 on, any dtype a gradient can have and any dense
  memory layout; exact collectives are bit-equal to an integer or dyadic oracle.
- *alone*: with one rank nothing is sent and the buffer is unchanged.
- *cost*: :meth:`Collective.cost` equals what the ledger counted, rounds, messages and bytes.
- *bit-identical*: where claimed, all ranks end with the same bits.
- *mean-exact*: where claimed, the mean over ranks of what they end with is the sum, up to rounding.
- *non-finite*: a NaN or infinity on one rank makes its element non-finite on every rank alike.
- *disagreement*: different lengths, dtypes or methods are an error on every rank, and no data
  passes between ranks that disagree. (A rank with an empty buffer whose neighbours have none either
  waits for nobody: it learns of it in its next call.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.grammar import Method, method_of
from taciturn.transport import HEADER_BYTES, Header, Transport

__all__ = ["Collective", "Cost", "bounds", "ceil_div", "header_cost", "is_dense", "real_numel"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True)
class Cost:
    """What one call costs one rank. The ledger must count exactly this."""

    rounds: int
    """Rounds, each one send and one receive by every rank."""
    messages: int
    """Messages sent, the header included."""
    sent_bytes: int
    """Bytes sent, the header included."""
    workspace_bytes: int
    """Memory beside the buffer, scratch of a few cache-sized spans not counted."""


class Collective(ABC):
    """An all-reduce: sums buffers over the ranks of a transport.

    Concrete classes are dataclasses whose fields are the keys of the method grammar, shorthands
    such as ``bits`` excepted; ``str`` writes one as a method. One object belongs to one rank; it
    may hold state, such as the counter of a shuffled ring order.
    """

    name: ClassVar[str]
    """The method's name in the grammar."""
    exact: ClassVar[bool] = False
    """The result is the sum in the buffer's own arithmetic."""
    bit_identical: ClassVar[bool] = False
    """All ranks end with the same bits."""
    mean_exact: ClassVar[bool] = False
    """Replicas may differ; their mean over ranks is the sum up to rounding."""
    integers: ClassVar[bool] = False
    """Integer buffers are summed too (with wrap-around, as everywhere in torch)."""

    @property
    def method(self) -> Method:
        """This collective as a method: the keys that are not at their defaults."""
        return method_of(self.name, self)

    @override
    def __str__(self) -> str:
        return self.method.text

    def all_reduce(
        self,
        buffer: torch.Tensor | Sequence[torch.Tensor],
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Replace ``buffer`` by its sum over the ranks, in place.

        Args:
            buffer: a tensor of any shape, or a list of tensors that are exchanged as one. Dense
                layouts such as channels_last are exchanged in memory order, without a copy.
            transport: the ranks that take part. All of them make the same calls in the same order.
            residual: None, or for one contiguous fp32 or fp64 tensor memory like it, which gets the
                roundings that this rank made: the sum over ranks of what they brought is the result
                plus the sum over ranks of these. Zero where a collective rounds nothing away that
                its rank could know of.

        Raises:
            InputError: a buffer that cannot be reduced (sparse, mixed devices or dtypes, ...).
            MismatchError: the ranks brought different lengths, dtypes or methods.
            PeerError: a rank died, went silent or failed. The buffer's contents are then invalid.
        """
        transport.calls += 1
        transport.round = 0
        try:
            with torch.no_grad():
                if isinstance(buffer, torch.Tensor):
                    self._reduce_tensor(buffer, transport, residual)
                elif isinstance(buffer, list | tuple):
                    self._reduce_list(list(buffer), transport)
                else:
                    raise InputError(
                        f"a buffer of type {type(buffer).__name__}: give a tensor or a list of "
                        "tensors; torch.as_tensor makes one from an array"
                    )
        except (PeerError, MismatchError):
            raise
        except Exception as error:
            transport.fail(error)  # the other ranks must not wait for this one

    def _reduce_list(self, tensors: list[torch.Tensor], transport: Transport) -> None:
        if not tensors:
            raise InputError("an empty list of tensors: there is nothing to reduce")
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise InputError(
                    f"a {type(tensor).__name__} in a list of tensors: only tensors can be reduced; "
                    "torch.as_tensor makes one"
                )
        for what, values in (
            ("devices", {str(t.device) for t in tensors}),
            ("dtypes", {str(t.dtype) for t in tensors}),
        ):
            if len(values) > 1:
                raise InputError(
                    f"tensors of different {what} in one buffer ({', '.join(sorted(values))}): "
                    f"reduce them in separate calls"
                )
        flats = [_memory_order(t) for t in tensors]
        packed = torch.cat(flats)
        self._reduce_tensor(packed, transport)
        torch._foreach_copy_(flats, list(packed.split([f.numel() for f in flats])))
        for tensor, flat in zip(tensors, flats, strict=True):
            _write_back(tensor, flat)

    def _reduce_tensor(
        self, buffer: torch.Tensor, transport: Transport, residual: torch.Tensor | None = None
    ) -> None:
        flat = _memory_order(buffer)
        if residual is not None:
            _check_residual(buffer, residual)
            residual.zero_()
        if transport.size > 1:
            real = torch.view_as_real(flat).view(-1) if flat.dtype in _COMPLEX else flat
            self._check_dtype(buffer.dtype)
            header = Header(str(self), real.numel(), str(buffer.dtype), _layout(buffer),
                            transport.calls)  # fmt: skip
            self._sum(real, transport, header, residual)
        _write_back(buffer, flat)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype in _FLOATS or dtype in _COMPLEX or (self.integers and dtype in _INTEGERS):
            return
        kind = type(self).__name__
        hint = "use Ring, which sums integers exactly" if dtype in _INTEGERS else "cast it first"
        raise InputError(f"{kind} cannot reduce a buffer of {dtype}: {hint}")

    @abstractmethod
    def _sum(
        self,
        flat: torch.Tensor,
        transport: Transport,
        header: Header,
        residual: torch.Tensor | None,
    ) -> None:
        """Sum ``flat``, 1-D and contiguous, over two or more ranks, in place.

        Exchanges ``header`` (``transport.agree``) with the peers it will exchange data with, first.
        ``residual``, if there is one, is zero; the roundings that this rank makes go there.
        """

    @abstractmethod
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        """Return what a call costs ``rank``; None if it cannot be known (the backend's own)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved for a resumed run to be bit-equal: plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            InputError: the state belongs to another kind of collective.
        """
        if state:
            raise InputError(
                f"{type(self).__name__} has no state, but was given {sorted(state)}: "
                "this checkpoint belongs to another method"
            )


def real_numel(numel: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return length and dtype of the real buffer that is exchanged for ``numel`` of ``dtype``."""
    return (2 * numel, _COMPLEX[dtype]) if dtype in _COMPLEX else (numel, dtype)


def ceil_div(numel: int, parts: int) -> int:
    """Return ``numel / parts`` rounded up."""
    return -(-numel // parts)


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into ``parts`` contiguous pieces whose lengths differ by at most one.

    Law (``test_bounds_lose_nothing``): the pieces are disjoint, in order, and cover the range.
    """
    return [(i * numel // parts, (i + 1) * numel // parts) for i in range(parts)]


def header_cost(messages: int = 1) -> tuple[int, int]:
    """Return the (messages, bytes) that agreeing with ``messages`` peers costs."""
    return messages, messages * HEADER_BYTES


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill one stretch of memory, each address once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _overlaps(tensor: torch.Tensor) -> bool:
    """Say whether elements may share an address: a dimension steps into the extent of those below.

    Interleaved layouts that only look so, which no operation of torch makes, count too.
    """
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def _memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a 1-D contiguous tensor: a view where the layout is dense."""
    if tensor.layout != torch.strided:
        raise InputError(
            f"a buffer of layout {tensor.layout}: sparse tensors cannot be summed elementwise; "
            "call .to_dense() first"
        )
    if tensor.is_quantized or tensor.device.type == "meta":
        raise InputError("a quantized or meta tensor cannot be reduced: dequantize it first")
    detached = tensor.detach()
    if detached.is_conj() or detached.is_neg():
        return detached.resolve_conj().resolve_neg().contiguous().view(-1)
    if detached.numel() == 0 or not is_dense(detached):
        if detached.numel() > 1 and _overlaps(detached):
            raise InputError(
                f"an expanded or overlapping tensor, shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}: several elements share one address, so they cannot be changed "
                "one by one; call .contiguous() first"
            )
        return detached.contiguous().view(-1)
    return torch.as_strided(detached, (detached.numel(),), (1,))


def _write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy ``flat`` back where :func:`_memory_order` had to make a copy."""
    if tensor.numel() and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _check_residual(buffer: torch.Tensor, residual: torch.Tensor) -> None:
    """Refuse a residual that is not like its buffer."""
    if buffer.dtype not in (torch.float32, torch.float64) or not buffer.is_contiguous():
        raise InputError(
            f"a residual of a buffer of {buffer.dtype}: only contiguous fp32 and fp64 buffers "
            "have one"
        )
    same = residual.shape == buffer.shape and residual.dtype == buffer.dtype
    if not same or residual.device != buffer.device or not residual.is_contiguous():
        raise InputError(
            f"a residual of shape {tuple(residual.shape)}, {residual.dtype} for a buffer of shape "
            f"{tuple(buffer.shape)}, {buffer.dtype}: give contiguous memory like the buffer"
        )


def _layout(tensor: torch.Tensor) -> int:
    """Return 0 for contiguous memory order, else a checksum of shape and strides."""
    if tensor.is_contiguous() or not is_dense(tensor):
        return 0
    import zlib

    return zlib.crc32(repr((tuple(tensor.shape), tensor.stride())).encode())

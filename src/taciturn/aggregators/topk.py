"""The elements of largest magnitude, exchanged as values and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from typing_extensions import override

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.base import Cost, bounds
from taciturn.collectives.pipeline import Chain, run_rounds, segments_for
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.ranges import check_number, check_whole
from taciturn.transport import HEADER_BYTES, Header, Transport

__all__ = ["TopK"]

_SAMPLED_FROM = 4
"""A group is sampled if it has more than this many times the elements of a sample. Measured on one
core: with 65,536 samples both ways take the same time at 250,000 elements; at 3 million and ratio
0.01 sampling takes 8 ms, ``torch.topk`` 60 ms."""

_MARGIN = 4.0
"""Standard deviations by which the sampled threshold is low: once in 30,000 times it is too high,
and the selection then starts again without it."""

_WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_WORD_BYTES = 4
_MOST_ELEMENTS = 1 << 31


@dataclass(eq=False)
class TopK(Aggregator):
    """Each rank sends the k elements of its gradient that are largest in magnitude.

    Lin et al., "Deep Gradient Compression" (arXiv:1712.01887), and Stich et al., "Sparsified SGD
    with Memory" (arXiv:1809.07599), whose operator top_k this is. An element of the output is the
    sum of what any rank sent of it, over W; the residual is local, the input without what was sent.
    Differences:

    - k counts over an exchange group, not over each tensor.
    - Lin et al. send whatever exceeds a threshold estimated from a sample, and correct it where
      that is far too much. Here the sampled threshold only narrows the search: exactly the k
      largest are sent, so that every rank sends the same number of bytes.
    - Positions travel as 32-bit integers, not as run lengths.
    - Their momentum correction, momentum factor masking, local clipping and ratio warm-up concern
      the optimizer and are not here. The memory is :mod:`taciturn.error_feedback`'s, in units of
      the gradient; that of Stich et al. is multiplied with the learning rate.

    Law (``test_selection``): of equal magnitudes those at the lowest positions are chosen, and NaN
    counts as larger than infinity. What is sent is thus a function of the gradient alone: there is
    no state, and sampling changes the time but not the result.

    Law (``test_nothing_is_lost``): what was sent and the residual add up to the input, bit for bit
    (a value of an fp64 buffer beyond the wire's range up to rounding).

    Each rank sends (W - 1) k (4 + bytes of a value) bytes, more than an fp32 ring all-reduce where
    ``ratio`` exceeds 1/W (4/(3W) with bf16 values).

    Args:
        ratio: share of a group's elements that each rank sends, in (0, 1]; more cost bytes and
            leave less behind. k = max(1, ceil(ratio * elements)), 0 for an empty group.
        sample: elements sampled to narrow the search in groups of more than four times as many.
            More cost time and spare candidates.
        seed: of the sampling, which has a generator of its own.
        wire: of the values. "bf16" saves a quarter of the bytes; its rounding error stays in the
            residual. Finite values beyond its range are sent as its largest number.
    """

    ratio: float = 0.01
    sample: int = 65536
    seed: int = 0
    wire: Literal["fp32", "bf16"] = "fp32"

    name: ClassVar[str] = "topk"
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1, above=True, hint="0.001 to 0.1 are usual")
        off = "a number above the size of every group turns sampling off"
        check_whole("sample", self.sample, 1, hint=off)
        check_whole("seed", self.seed, 0)
        if self.wire not in _WIRES:
            raise InputError(f"wire={self.wire!r}: values can travel as {', '.join(_WIRES)}")

    def sent_elements(self, numel: int) -> int:
        """Return k, the elements that each rank sends of a group of ``numel``."""
        return max(1, math.ceil(self.ratio * numel)) if numel else 0

    @override
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        transport.calls += 1
        transport.round = 0
        try:
            with torch.no_grad():
                _check(gradients, group, residual)
                if transport.size > 1:
                    self._exchange(gradients, transport, residual)
                elif residual is not None:
                    residual.zero_()
        except (PeerError, MismatchError):
            raise
        except Exception as error:
            transport.fail(error)  # the other ranks must not wait for this one

    def _exchange(
        self, flat: torch.Tensor, transport: Transport, residual: torch.Tensor | None
    ) -> None:
        rank, size = transport.rank, transport.size
        successor, predecessor = (rank + 1) % size, (rank - 1) % size
        header = Header(str(self), flat.numel(), str(flat.dtype), call=transport.calls)
        transport.agree(header, [successor], [predecessor])
        with transport.ledger.codec():
            positions = self.select(flat)
            k = positions.numel()
            values = flat[positions]
            rows = flat.new_empty((size, self._words(k)), dtype=torch.int32)
            self._pack(positions, values, rows[rank])
        segments = segments_for(_WORD_BYTES * rows.shape[1], None)
        chain = _Gathering(rows, rank, segments)
        run_rounds(chain, transport, size - 1, segments, successor, predecessor)
        with transport.ledger.codec():
            if residual is not None:
                left = values - self._unpack(rows[rank], k)[1].to(flat.dtype)
                # Infinity less infinity would be NaN; what is not finite was sent as it is.
                residual.copy_(flat)[positions] = left.where(values.isfinite(), 0.0)
            flat.zero_()
            for row in rows:  # in the order of ranks on every rank, hence the same roundings
                where, sent = self._unpack(row, k)
                flat.index_add_(0, where, sent.to(flat.dtype))
            flat.div_(size)

    def _words(self, k: int) -> int:
        """Return the 32-bit words of one rank's message: k positions, then k values."""
        return k + -(-k * _WIRES[self.wire].itemsize // _WORD_BYTES)

    def _pack(self, positions: torch.Tensor, values: torch.Tensor, row: torch.Tensor) -> None:
        """Write positions and values, shape (k,), into a message; changes ``row``."""
        row[-1:] = 0  # half of it is padding if k is odd and values take half a word
        where, places = self._unpack(row, positions.numel())
        where.copy_(positions)
        largest = torch.finfo(places.dtype).max
        places.copy_(values.clamp(-largest, largest).where(values.isfinite(), values))

    def _unpack(self, row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and values in a message, views of shape (k,)."""
        return row[:k], row[k:].view(_WIRES[self.wire])[:k]

    def select(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the positions of the k elements that this rank sends, int64, shape (k,).

        Args:
            gradients: shape (n,), fp32 or fp64.
        """
        numel, k = gradients.numel(), self.sent_elements(gradients.numel())
        if k == numel:
            return torch.arange(k, device=gradients.device)
        # Read as integers, without the sign, floating-point numbers keep their order, denormal
        # ones too, and NaN comes after infinity: a comparison of numbers would lose it.
        bits = _BITS[gradients.dtype]
        magnitudes = gradients.view(bits).bitwise_and(torch.iinfo(bits).max)
        if numel > _SAMPLED_FROM * self.sample:
            chosen = self._select_sampled(magnitudes, k)
            if chosen is not None:
                return chosen
        return _largest(magnitudes, k)

    def _select_sampled(self, magnitudes: torch.Tensor, k: int) -> torch.Tensor | None:
        """Return what :func:`_largest` does, or None if the sample says too little."""
        # The sample holds Binomial(sample, k / n) of the k largest: mean m, variance below m.
        mean = self.sample * k / magnitudes.numel()
        count = math.ceil(mean + _MARGIN * (math.sqrt(mean) + 1))
        if count >= self.sample:
            return None
        device = magnitudes.device
        generator = torch.Generator(device).manual_seed(self.seed)
        drawn = torch.randint(
            magnitudes.numel(), (self.sample,), generator=generator, device=device
        )
        threshold = magnitudes[drawn].topk(count, sorted=False).values.min()
        above = _positions(magnitudes > threshold)
        if above.numel() >= k:
            return above[_largest(magnitudes[above], k)]
        # Too few, but if enough equal the threshold it is the k-th largest: gradients that are
        # mostly zero, such as those of an embedding.
        equal = _positions(magnitudes == threshold)
        chosen = torch.cat([above, equal[: k - above.numel()]])
        return chosen if chosen.numel() == k else None

    @override
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost:
        if ranks == 1:
            return Cost(0, 0, 0, 0)
        k = self.sent_elements(group.numel)
        words = self._words(k)
        message_bytes = _WORD_BYTES * words
        messages = segments_for(message_bytes, None) if words else 0
        # Magnitudes and one comparison while selecting, then what all ranks sent.
        most = max(group.numel * (dtype.itemsize + 1), ranks * message_bytes)
        return Cost(
            rounds=ranks - 1,
            messages=1 + (ranks - 1) * messages,
            sent_bytes=HEADER_BYTES + (ranks - 1) * message_bytes,
            workspace_bytes=most + k * (torch.int64.itemsize + dtype.itemsize),
        )


class _Gathering(Chain):
    """A ring all-gather: in round t rank i receives row i - t and passes it on.

    :func:`taciturn.collectives.all_gather` would need a header of its own beside ours, which says
    that the ranks agree on the method and on the group, not only on the bytes.
    """

    def __init__(self, rows: torch.Tensor, rank: int, segments: int) -> None:
        self.rows, self.rank = rows, rank
        self.pieces = bounds(rows.shape[1], segments)

    @override
    def first(self, segment: int) -> torch.Tensor:
        return self.place(0, segment)

    @override
    def place(self, round: int, segment: int) -> torch.Tensor:
        start, stop = self.pieces[segment]
        return self.rows[(self.rank - round) % len(self.rows), start:stop]

    @override
    def handle(self, round: int, segment: int) -> torch.Tensor:
        return self.place(round, segment)

    @override
    def settle(self, round: int, segment: int) -> None:
        pass  # unpacked when all rows are there, in the order of ranks


def _check(gradients: torch.Tensor, group: Group, residual: torch.Tensor | None) -> None:
    """Raise InputError unless these are tensors that :meth:`TopK.aggregate` takes."""
    if group.numel >= _MOST_ELEMENTS:
        raise InputError(
            f"a group of {group.numel} elements: positions are 32-bit integers, so that it must "
            f"have fewer than {_MOST_ELEMENTS}; use more and smaller groups"
        )
    for name, tensor in (("gradients", gradients), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.shape != (group.numel,) or not tensor.is_contiguous():
            raise InputError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: this group "
                f"needs a contiguous tensor of shape ({group.numel},)"
            )
        like = (tensor.dtype, tensor.device) == (gradients.dtype, gradients.device)
        if tensor.dtype not in _BITS or not like:
            raise InputError(
                f"{name} of {tensor.dtype} on {tensor.device}: gradients are exchanged in fp32 or "
                "fp64, with a residual of the same dtype on the same device; cast or move it first"
            )


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the k largest, of equal ones the first; shape (k,), k >= 1."""
    smallest = magnitudes.topk(k, sorted=False).values.min()
    above, equal = _positions(magnitudes > smallest), _positions(magnitudes == smallest)
    return torch.cat([above, equal[: k - above.numel()]])


def _positions(chosen: torch.Tensor) -> torch.Tensor:
    """Return where a boolean tensor of shape (n,) is true, in order, int64."""
    if chosen.device.type == "cpu":  # NumPy takes a third of the time of torch's nonzero
        return torch.from_numpy(np.flatnonzero(chosen.numpy()))
    return chosen.nonzero().view(-1)

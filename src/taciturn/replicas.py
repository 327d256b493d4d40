"""Whether the replicas of a model are equal, how far apart they are, and how to make them equal.

What is compared are the parameters, frozen ones too, and the buffers, saved or not, by name; tied
tensors once, under their first name. A DistributedDataParallel model is unwrapped, so names have no
``module.``, and what it was told to ignore is left out. All ranks call a function of this module at
the same point, between steps.

Every call begins with three integers per rank, gathered by a ring: checksums of the names, shapes
and dtypes, and of all values. Only if the values differ do the ranks exchange a digest per tensor,
and only tensors that differ are exchanged themselves. Everything decided on the way is decided from
what all ranks have gathered, hence alike.

Equal means equal bits in logical order, whatever the memory layout, except that all NaNs are equal.
0.0 and -0.0 differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.parallel import DistributedDataParallel

from taciturn.collectives import Ring, all_gather
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.transport import Transport

__all__ = [
    "MOST_STEPS",
    "ReplicaReport",
    "Spread",
    "check_replicas",
    "ignored_by_ddp",
    "resync",
    "spread",
    "suggest_resync_every",
]

MOST_STEPS = 10_000
"""The most that :func:`suggest_resync_every` returns: replicas that seem never to drift apart are
made equal from time to time all the same."""

_INTEGERS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32,
)  # fmt: skip
"""Those that int64 holds."""
_PIECE = 1 << 16
"""Elements that are digested at a time on the CPU: they stay in its cache between two reads."""
_ROW = 1 << 16
"""Words of 32 bits that one sum of a digest on an accelerator covers."""
_ROWS = 64
"""Such sums formed at a time: 32 MiB of products."""

_Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ReplicaReport:
    """What :func:`check_replicas` found; the same on every rank.

    Differences are those between a rank's tensor and the majority's, of the rank that differs most,
    relative to the rms of the majority's tensor (its finite elements). They are infinite where an
    element is NaN or infinite on one side only, or where the majority's tensor is zero, and 0 where
    0.0 stands against -0.0.
    """

    replicas: int
    """Ranks that took part."""
    tensors: int
    """Tensors compared."""
    differing: int = 0
    """How many of them are not equal on all ranks."""
    name: str | None = None
    """The first of these: parameters in model order, then buffers. None if there is none."""
    ranks: tuple[int, ...] = ()
    """Ranks whose version of it is not the majority's: the version that most ranks hold; among
    those that equally many hold, the one that the lowest rank is among."""
    max_difference: float = 0.0
    """Largest difference of an element of it."""
    rms_difference: float = 0.0
    """Rms of the differences of its elements."""
    scale: float = 0.0
    """Rms of the majority's tensor, which the differences are relative to."""

    @property
    def equal(self) -> bool:
        """Every tensor is equal on all ranks."""
        return self.name is None

    def raise_if_different(self) -> None:
        """Raise unless the replicas are equal.

        Raises:
            MismatchError: with the report as its text, and what to do.
        """
        if not self.equal:
            raise MismatchError(
                f"the replicas differ: {self}. Find out which ranks skipped or changed a step, and "
                "call taciturn.replicas.resync on every rank to go on from the average"
            )

    def __str__(self) -> str:
        if self.name is None:
            return f"{self.replicas} replicas are equal in all {self.tensors} tensors"
        others = self.replicas - len(self.ranks)
        return (
            f"{self.name!r} on {_rank_list(self.ranks)} differs from that on the other {others} by "
            f"at most {self.max_difference:.3g} times its rms of {self.scale:.3g} "
            f"(rms {self.rms_difference:.3g}); {self.differing} of {self.tensors} tensors differ"
        )


@dataclass(frozen=True)
class Spread:
    """How far apart the replicas' parameters are; the same numbers on every rank.

    Rms over ranks and elements of (parameter - mean over ranks), divided by the rms of the mean:
    0 without deviation, whatever the mean; infinite if there is deviation around a mean of zero;
    NaN if what deviates is not finite.
    """

    overall: float
    """Of all parameters as one vector."""
    by_name: dict[str, float]
    """Of each parameter by itself."""


def check_replicas(
    model: torch.nn.Module, transport: Transport, *, buffers: bool = True
) -> ReplicaReport:
    """Compare the model's tensors over the ranks and tell the first difference.

    One pass over the values (CRC-32, whose detection of one flipped bit and of two swapped elements
    of up to 32 bits is certain; other differences go unseen with a chance of 2**-32) and 24 bytes
    sent per rank and round if all are equal. Otherwise also 8 bytes per tensor, and the ranks that
    differ are sent the majority's version of the first tensor that does.

    Args:
        model: any module; a DistributedDataParallel one is unwrapped.
        transport: the ranks that hold the replicas.
        buffers: compare buffers too.

    Raises:
        InputError: a tensor that cannot be compared (sparse, quantized, meta, not initialised).
        MismatchError: on every rank, if they hold different names, shapes, dtypes or devices;
            tells the first difference. No values are exchanged then.
        PeerError: a rank died, went silent or failed.
    """
    with _as_one(transport):
        tensors = _tensors(model, buffers)
        digests = _gather_digests("check_replicas", tensors, transport)
        differing = [i for i in range(len(tensors)) if len({row[i] for row in digests}) > 1]
        if not differing:
            return ReplicaReport(transport.size, len(tensors))
        first = differing[0]
        versions = [row[first] for row in digests]
        majority = _majority(versions)
        others = [rank for rank, version in enumerate(versions) if version != majority]
        sizes = _differences(tensors[first][1], versions.index(majority), others, transport)
        return ReplicaReport(
            transport.size, len(tensors), len(differing), tensors[first][0], tuple(others), *sizes
        )


def resync(
    model: torch.nn.Module, transport: Transport, *, exact: bool = True, buffers: bool = True
) -> None:
    """Make the replicas equal: parameters and floating buffers become their averages over ranks.

    Integer and boolean buffers, such as ``num_batches_tracked``, become the maximum over ranks: an
    average would not be one of them, and counters then go on from the rank that has seen most.
    Tensors that are equal on all ranks are left as they are, exchange nothing, and keep their bits.

    The average is summed in fp64 for fp64, in fp32 for everything else, by a plain ring, which
    gives all ranks the same bits; then divided by the number of ranks and rounded to the tensor's
    dtype. What differs is packed into one buffer for each of fp32, fp64 and the integers, which is
    the memory needed. A NaN or infinity on one rank is one on all of them afterwards, and so is a
    sum that overflows.

    Values are changed in place, also of parameters without gradient: optimizers and
    DistributedDataParallel keep what they refer to. Not between forward and backward.

    Args:
        model: any module, changed in place; a DistributedDataParallel one is unwrapped.
        transport: the ranks that hold the replicas.
        exact: only True. A lossy average would have to leave the replicas bit-equal and move them
            by no more than they are apart, which takes an agreed reference to send deviations from;
            short of that, its rounding exceeds the spread that it is to remove.
        buffers: make buffers equal too.

    Raises:
        InputError: ``exact`` is not True, a tensor that cannot be averaged (sparse, expanded, ...).
        MismatchError, PeerError: as :func:`check_replicas`.
    """
    if exact is not True:
        raise InputError(
            f"exact={exact!r}: replicas are only averaged exactly, as the rounding of a lossy "
            "average exceeds the spread it should remove; leave exact=True"
        )
    with _as_one(transport):
        tensors = _tensors(model, buffers)
        digests = _gather_digests("resync", tensors, transport)
        differing = [t for i, t in enumerate(tensors) if len({row[i] for row in digests}) > 1]
        for name, tensor in differing:
            _check_writable(name, tensor)
        integers = [tensor for _, tensor in differing if tensor.dtype in _INTEGERS]
        for means, group in _means(
            [t for t in differing if t[1].dtype not in _INTEGERS], transport
        ):
            with transport.ledger.codec():
                for (_, tensor), mean in zip(group, means, strict=True):
                    real = _real(tensor)
                    real.copy_(mean.view(real.shape))
        if integers:
            _take_maximum(integers, transport)


def spread(model: torch.nn.Module, transport: Transport) -> Spread:
    """Measure how far apart the replicas' parameters are; nothing is changed.

    One exact all-reduce of the parameters that differ, packed as in :func:`resync`, and one of two
    fp64 numbers per parameter. Rounding in the mean limits it: below about 1e-7, or the rounding of
    a sum of N numbers in fp32, it tells no more than that there is a spread.

    Args:
        model: any module; a DistributedDataParallel one is unwrapped.
        transport: the ranks that hold the replicas.

    Raises:
        InputError: a parameter that cannot be averaged (sparse, ...).
        MismatchError, PeerError: as :func:`check_replicas`.
    """
    with _as_one(transport):
        tensors = _tensors(model, buffers=False)
        digests = _gather_digests("spread", tensors, transport)
        equal = [len({row[i] for row in digests}) == 1 for i in range(len(tensors))]
        names = {name: i for i, (name, _) in enumerate(tensors)}
        # Sums over elements of squared deviations and squared means.
        sums = torch.zeros(len(tensors), 2, dtype=torch.float64, device=transport.header_device)
        with transport.ledger.codec():
            for i, (_, tensor) in enumerate(tensors):
                if equal[i]:
                    sums[i, 1] = _real(tensor).double().square().sum()
        for means, group in _means([t for t, e in zip(tensors, equal, strict=True) if not e],
                                   transport):  # fmt: skip
            with transport.ledger.codec():
                for (name, tensor), mean in zip(group, means, strict=True):
                    centre = mean.double()
                    own = _real(tensor).reshape(-1).to(centre)  # may be the parameter's memory
                    sums[names[name], 0] = (own - centre).square_().sum()
                    sums[names[name], 1] = centre.square_().sum()
        # The means' squares too, which all ranks have: sums of the same numbers may differ in the
        # last bit between machines, and what is decided from a spread must be decided alike.
        Ring().all_reduce(sums, transport)
        sums /= transport.size
        parts: list[list[float]] = sums.tolist()
    # spread^2 = sum over ranks and elements (p - mean)^2 / N / sum over elements mean^2
    return Spread(
        _ratio(*(sum(column) for column in zip(*parts, strict=True))) if parts else 0.0,
        {name: _ratio(*part) for (name, _), part in zip(tensors, parts, strict=True)},
    )


def suggest_resync_every(spread_per_step: float, budget: float) -> int:
    """Return after how many steps replicas should be made equal to stay within ``budget``.

    Errors of single steps are taken as independent, so that the spread grows like a random walk:
    spread after k steps = spread_per_step sqrt(k), hence k = floor((budget / spread_per_step)^2).

    Args:
        spread_per_step: ``Spread.overall`` that one step adds, 0 or more.
        budget: the ``Spread.overall`` that is to be tolerated, above 0.

    Returns:
        Steps from 1, even where a single step exceeds the budget, to :data:`MOST_STEPS`, also for
        a spread of 0.

    Raises:
        InputError: a number that is not finite, a negative spread, a budget that is not positive.
    """
    if not (math.isfinite(spread_per_step) and spread_per_step >= 0):
        raise InputError(
            f"spread_per_step={spread_per_step!r}: a finite number from 0 on is needed; a spread "
            "that is not finite comes from parameters that are zero or not finite"
        )
    if not (math.isfinite(budget) and budget > 0):
        raise InputError(f"budget={budget!r}: a finite number above 0 is needed, such as 1e-3")
    if spread_per_step * math.sqrt(MOST_STEPS) <= budget:
        return MOST_STEPS
    # 0.3 / 0.1 is just below 3 in floating point, and is to count as 3.
    return max(1, math.floor((budget / spread_per_step) ** 2 * (1 + 1e-12)))


# -- what is compared


@contextmanager
def _as_one(transport: Transport) -> Iterator[None]:
    """Let an error on this rank end the wait of the others. What all raise alike goes as it is."""
    try:
        with torch.no_grad():
            yield
    except (PeerError, MismatchError):
        raise
    except Exception as error:
        transport.fail(error)


def ignored_by_ddp(model: DistributedDataParallel) -> set[str]:
    """Return the names of the parameters and buffers that the model was told to leave alone."""
    ignored = set(model.parameters_to_ignore)
    own = {name for name, _ in model.module.named_parameters(recurse=False)}
    # DDP looks for the outermost module's own parameters under their names after a dot.
    return {name for name in ignored if name not in own} | {
        name for name in own if f".{name}" in ignored
    }


def _tensors(model: torch.nn.Module, buffers: bool) -> _Named:
    """Return parameters and buffers by name, detached, tied ones once."""
    ignored: set[str] = set()
    if isinstance(model, DistributedDataParallel):
        ignored, model = ignored_by_ddp(model), model.module
    named: _Named = list(model.named_parameters())
    if buffers:
        named += model.named_buffers()
    named = [(name, tensor) for name, tensor in named if name not in ignored]
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise InputError(
                f"{name!r} is not initialised yet: run the model once on every rank first"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = "meta" if tensor.device.type == "meta" else str(tensor.layout)
            raise InputError(
                f"{name!r} is a {'quantized' if tensor.is_quantized else kind} tensor, which "
                "replicas cannot be compared by: make it an ordinary dense one, or leave buffers "
                "out with buffers=False"
            )
        known = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if not known and tensor.dtype not in _INTEGERS:
            raise InputError(f"{name!r} is of {tensor.dtype}, which is not supported: cast it")
    return [(name, tensor.detach()) for name, tensor in named]


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    repeats = (s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    if any(repeats):
        raise InputError(
            f"{name!r} is an expanded tensor of shape {tuple(tensor.shape)}: several elements "
            "share one address and cannot be changed one by one; call .contiguous() on it first"
        )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# -- who holds what


def _gather_digests(purpose: str, tensors: _Named, transport: Transport) -> list[list[int]]:
    """Return the digests of every rank's tensors, [rank][tensor]; all zero if all are equal.

    Raises:
        MismatchError: on every rank, from the same data, so that the transport can go on.
    """
    zeros = [[0] * len(tensors)] * transport.size
    if transport.size == 1:
        return zeros
    with transport.ledger.codec():
        inventory = [[n, list(t.shape), str(t.dtype), t.device.type] for n, t in tensors]
        text = json.dumps([purpose, inventory]).encode()
        digests = [_digest(tensor) for _, tensor in tensors]
        if len({digest.device for digest in digests}) > 1:
            digests = [digest.cpu() for digest in digests]
        mine = torch.stack(digests).cpu() if digests else torch.empty(0, dtype=torch.int64)
        row = torch.tensor([_checksum(text), len(text), _checksum(mine.numpy().tobytes())])
    rows = _gather(row, transport).tolist()
    if len({(row[0], row[1]) for row in rows}) > 1:
        longest = max(row[1] for row in rows)
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        texts = [bytes(t.tolist()) for t in _gather(padded, transport).cpu()]
        raise MismatchError(_first_mismatch([json.loads(t) for t in texts]))
    if len({row[2] for row in rows}) == 1:
        return zeros
    found: list[list[int]] = _gather(mine, transport).tolist()
    return found


def _checksum(text: bytes) -> int:
    """Return 64 bits of BLAKE2b, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _gather(row: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the rows, 1-D and equally long, of all ranks: shape (size, row.numel())."""
    table = row.new_zeros(transport.size, row.numel(), device=transport.header_device)
    table[transport.rank] = row
    all_gather(table.view(-1), transport)
    return table


def _first_mismatch(inventories: list[list[object]]) -> str:
    """Say in what the ranks' inventories, [purpose, [[name, shape, dtype, device]]], differ."""
    what = _difference_in_kind(inventories)
    return (
        f"the ranks do not hold the same model: {what}. No values were exchanged. "
        "Build the model alike on every rank, and compare it at the same point everywhere"
    )


def _difference_in_kind(inventories: list[list[object]]) -> str:
    ranks = range(1, len(inventories))
    purposes = [inventory[0] for inventory in inventories]
    for rank in ranks:
        if purposes[rank] != purposes[0]:
            return f"rank 0 calls {purposes[0]}, rank {rank} calls {purposes[rank]}"
    lists: list[list[list[object]]] = [i[1] for i in inventories]  # type: ignore[misc]
    held = [{str(entry[0]): entry[1:] for entry in entries} for entries in lists]
    # Names in the order of the first rank that has them.
    for name in dict.fromkeys(name for names in held for name in names):
        without = [rank for rank, names in enumerate(held) if name not in names]
        if without:
            return f"{name!r} is missing on {_rank_list(without)}"
        for rank in ranks:
            for kind, mine, theirs in zip(
                ("of shape {}", "of {}", "on {}"), held[0][name], held[rank][name], strict=True
            ):
                if mine != theirs:
                    one, other = kind.format(_plain(mine)), kind.format(_plain(theirs))
                    return f"{name!r} is {one} on rank 0, {other} on rank {rank}"
    for rank in ranks:
        for mine, theirs in zip(lists[0], lists[rank], strict=True):
            if mine[0] != theirs[0]:
                return f"where rank 0 has {mine[0]!r}, rank {rank} has {theirs[0]!r}"
    raise AssertionError("the inventories are equal")


def _plain(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _majority(versions: list[int]) -> int:
    """Return the commonest; of those equally common, the one met first."""
    return Counter(versions).most_common(1)[0][0]  # stable: insertion order among equals


# -- digests


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the values in logical order, int64, shape (), on the tensor's device."""
    flat = _real(tensor).contiguous().view(-1)
    if flat.device.type == "cpu":
        return torch.tensor(_crc(flat))
    return _device_digest(flat)


def _crc(flat: torch.Tensor) -> int:
    """Return the CRC-32 of the elements' bytes, NaNs made one.

    Its generator is primitive of degree 32, so it divides no difference of up to 32 bits, nor such
    a one times (x^k + 1) for k below 2^32 - 1: single elements that changed, and pairs that were
    swapped, are always found in tensors below 512 MiB. Several times as fast on a CPU as
    :func:`_device_digest`.
    """
    crc = 0
    for piece in flat.split(_PIECE):
        # A sum tells in one quick read that there is no NaN; opposite infinities look like one.
        if flat.is_floating_point() and _comparable(piece).sum().isnan():
            piece = _without_payloads(piece)
        crc = zlib.crc32(piece.view(torch.uint8).numpy(), crc)
    return crc


def _device_digest(flat: torch.Tensor) -> torch.Tensor:
    """Return the multilinear hash of the elements' bytes, NaNs made one, without copies to the CPU.

    h = sum over i of k_i w_i mod 2^64, for 32-bit words w and random 64-bit keys k, over rows of
    words, and again over the rows' sums until one is left. Two inputs collide with a chance of at
    most about 2^-32 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section
    3; they keep the upper half only, and use each key once).
    """
    keys = _keys(flat.device)
    while True:
        sums = []
        for piece in flat.split(_ROWS * _ROW * 4 // flat.element_size()):
            words = _words(_without_payloads(piece))
            whole = words.numel() // _ROW * _ROW
            if whole:
                sums.append((words[:whole].view(-1, _ROW) * keys).sum(1))
            if whole < words.numel() or not whole:
                rest = words[whole:]
                sums.append((rest * keys[: rest.numel()]).sum(0, keepdim=True))
        flat = torch.cat(sums)
        if flat.numel() == 1:
            return flat[0]


@lru_cache
def _keys(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # of our own; any seed, the same on all ranks
    halves = torch.randint(0, 1 << 32, (2, _ROW), generator=generator, dtype=torch.int64)
    return ((halves[0] << 32) | halves[1]).to(device)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bytes as int32, filled up with zeros; a view where there is nothing to fill."""
    missing = -flat.nbytes % 4
    if missing or flat.storage_offset() * flat.element_size() % 4:
        raw = flat.view(torch.uint8)
        flat = torch.cat([raw, raw.new_zeros(missing)])
    return flat.view(torch.int32)


def _comparable(flat: torch.Tensor) -> torch.Tensor:
    """Return numbers that torch can do sums with: the 8-bit floats have no arithmetic."""
    return flat.float() if flat.is_floating_point() and flat.element_size() == 1 else flat


def _without_payloads(flat: torch.Tensor) -> torch.Tensor:
    """Return ``flat`` with all NaNs replaced by one of them."""
    if not flat.is_floating_point():
        return flat
    flat = _comparable(flat)
    return flat.masked_fill(flat.isnan(), math.nan)


# -- exchanges of values


def _differences(
    tensor: torch.Tensor, reference: int, others: list[int], transport: Transport
) -> tuple[float, float, float]:
    """Return the largest and the rms difference of ``others`` from ``reference``, and the rms.

    The reference sends its tensor to the ranks that differ; then each tells what it measured.
    """
    mine = _real(tensor).contiguous().view(-1)
    raw = mine.view(torch.uint8).to(transport.header_device)
    transport.calls += 1
    transport.round = 1
    transport.ledger.rounds += 1
    row = torch.zeros(3, dtype=torch.float64)
    sends, receives = [], []
    theirs = torch.empty_like(raw) if transport.rank in others else raw
    if transport.rank == reference:
        sends = [(raw, rank, 0) for rank in others]
    elif transport.rank in others:
        receives = [(theirs, reference, 0)]
    sent, received = transport.post(sends, receives)
    for request in [*received, *sent]:
        request.wait()
    if transport.rank in others:
        with transport.ledger.codec():
            there = theirs.to(mine.device).view(mine.dtype)
            row = torch.tensor(_distance(mine, there), dtype=torch.float64)
    largest = _gather(row, transport).amax(0).tolist()
    return largest[0], largest[1], largest[2]


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    """Return the largest and the rms difference, relative to the rms of ``theirs``, and that."""
    a, b = mine.double(), theirs.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs_().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
    scale = b[b.isfinite()].square().mean().sqrt().nan_to_num().item()
    largest, rms = difference.amax().item(), difference.square().mean().sqrt().item()
    return [*((d / scale if scale else math.inf) if d else 0.0 for d in (largest, rms)), scale]


def _means(tensors: _Named, transport: Transport) -> Iterator[tuple[list[torch.Tensor], _Named]]:
    """Yield the averages over ranks, 1-D, in logical order, with the tensors they belong to.

    First those averaged in fp32, then those in fp64; they share one buffer, which headers' device
    holds: the one that the transport can send from.
    """
    for dtype in (torch.float32, torch.float64):
        group = [t for t in tensors if _accumulator(t[1].dtype) == dtype]
        if not group:
            continue
        with transport.ledger.codec():
            sizes = [_real(tensor).numel() for _, tensor in group]
            packed = torch.empty(sum(sizes), dtype=dtype, device=transport.header_device)
            for place, (_, tensor) in zip(packed.split(sizes), group, strict=True):
                real = _real(tensor)
                place.view(real.shape).copy_(real)
        Ring().all_reduce(packed, transport)
        packed /= transport.size
        yield list(packed.split(sizes)), group


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    wide = dtype in (torch.float64, torch.complex128)
    return torch.float64 if wide else torch.float32


def _take_maximum(tensors: list[torch.Tensor], transport: Transport) -> None:
    """Replace integer tensors by their maxima over ranks, in place."""
    device = transport.header_device
    row = torch.cat([tensor.reshape(-1).to(device, torch.int64) for tensor in tensors])
    largest = _gather(row, transport).amax(0)
    for tensor, part in zip(tensors, largest.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _ratio(deviation: float, reference: float) -> float:
    """Return sqrt(deviation / reference); 0 without deviation."""
    if deviation == 0:
        return 0.0
    return math.sqrt(deviation / reference) if reference else math.inf

"""Compiled loops that code messages.

Each passes once over memory where the same in tensor operations passes five to ten times. Arrays
are 1-D and contiguous. The roundings are those of
:mod:`taciturn.collectives.wires.torch_wires`, bit for bit (tested).

Block-scaled messages: ``scales`` holds the upper halves of fp32 numbers (bf16), ``integers`` the
bytes of one block after the other; the last block may be cut short.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from taciturn.collectives.compiled import compiled, run_without_cache_if_need_be

__all__ = [
    "accumulate_blocks",
    "decode_blocks",
    "encode_blocks",
    "exchange_bf16",
    "exchange_blocks",
    "exchange_plain",
    "prepare",
    "relay_bf16",
    "relay_blocks",
]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NAN_BF16 = np.int32(0x7FC0)
_SMALLEST_SCALE = np.float32(2.0**-126)
_TO_INTEGER = np.float32(1.5 * 2**23)
"""Added to a number below 2^22 it leaves the nearest integer in the lowest bits (ties to even)."""


@compiled
def _bits(number: Any) -> Any:
    return np.float32(number).view(np.int32)


@compiled
def _number(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@compiled
def _to_bf16(value: Any) -> Any:
    """Return the upper half of the number nearest to ``value``, ties to even."""
    bits = _bits(value)
    if (bits & _MAGNITUDE) > _INFINITY:
        return _NAN_BF16
    nearest = np.int32(bits + np.int32(0x7FFF) + np.int32((bits >> np.int32(16)) & np.int32(1)))
    return np.int32(nearest >> np.int32(16))


@compiled
def _from_bf16(half: Any) -> Any:
    return _number(np.int32(half) << np.int32(16))


@compiled
def _unpack(scale: Any, integers: Any, bits: int, out: Any) -> None:
    """Decode one whole block into ``out``."""
    if bits == 8:
        for j in range(out.size):
            out[j] = np.float32(integers[j]) * scale
        return
    half = integers.size
    for j in range(half):
        both = np.int32(integers[j])
        out[j] = np.float32(np.int32(np.int32(both << np.int32(28)) >> np.int32(28))) * scale
    for j in range(half):
        out[half + j] = np.float32(np.int32(np.int32(integers[j]) >> np.int32(4))) * scale


@compiled
def _pack(values: Any, bits: int, shrink: Any, integers: Any) -> Any:
    """Encode one whole block, changing ``values``; return the scale as bf16."""
    most = np.int32(0)
    for j in range(values.size):
        most = max(most, np.int32(_bits(values[j]) & _MAGNITUDE))
    largest = _number(most) * shrink
    if largest < _SMALLEST_SCALE:
        largest = _SMALLEST_SCALE
    scale = np.int16(_to_bf16(largest))
    inverse = np.float32(1) / _from_bf16(scale)
    for j in range(values.size):
        values[j] = values[j] * inverse + _TO_INTEGER
    if bits == 8:
        for j in range(values.size):
            integers[j] = np.int8(_bits(values[j]))
        return scale
    half = integers.size
    for j in range(half):
        low = _bits(values[j]) & np.int32(15)
        high = _bits(values[half + j]) << np.int32(4)
        integers[j] = np.int8(low | high)
    return scale


@compiled
def encode_blocks(
    values: Any, bits: int, block: int, shrink: Any, scales: Any, integers: Any
) -> None:
    """Write ``values`` into a message.

    ``shrink`` times the largest magnitude of a block is its scale before that is rounded.
    """
    room = np.empty(block, np.float32)
    step = block * bits // 8
    for b in range(scales.size):
        piece = values[b * block : (b + 1) * block]
        for j in range(piece.size):
            room[j] = piece[j]
        room[piece.size :] = 0
        scales[b] = _pack(room, bits, shrink, integers[b * step : (b + 1) * step])


@compiled
def decode_blocks(scales: Any, integers: Any, bits: int, block: int, out: Any) -> None:
    """Read a message into ``out``."""
    room = np.empty(block, np.float32)
    step = block * bits // 8
    for b in range(scales.size):
        piece = out[b * block : (b + 1) * block]
        bytes_ = integers[b * step : (b + 1) * step]
        if piece.size == block:
            _unpack(_from_bf16(scales[b]), bytes_, bits, piece)
        else:
            _unpack(_from_bf16(scales[b]), bytes_, bits, room)
            piece[:] = room[: piece.size]


@compiled
def accumulate_blocks(scales: Any, integers: Any, bits: int, block: int, out: Any) -> None:
    """Add a decoded message to ``out``."""
    room = np.empty(block, np.float32)
    step = block * bits // 8
    for b in range(scales.size):
        _unpack(_from_bf16(scales[b]), integers[b * step : (b + 1) * step], bits, room)
        piece = out[b * block : (b + 1) * block]
        for j in range(piece.size):
            piece[j] += room[j]


@compiled
def relay_blocks(
    scales: Any,
    integers: Any,
    bits: int,
    block: int,
    shrink: Any,
    own: Any,
    onward_scales: Any,
    onward_integers: Any,
    keep: bool,
) -> None:
    """Write encode(decoded + own) into the message that goes on; ``own`` becomes it if kept."""
    room = np.empty(block, np.float32)
    step = block * bits // 8
    for b in range(scales.size):
        bytes_ = slice(b * step, (b + 1) * step)
        _unpack(_from_bf16(scales[b]), integers[bytes_], bits, room)
        piece = own[b * block : (b + 1) * block]
        for j in range(piece.size):
            room[j] += piece[j]
        onward = onward_integers[bytes_]
        onward_scales[b] = _pack(room, bits, shrink, onward)
        if keep:
            _unpack(_from_bf16(onward_scales[b]), onward, bits, room)
            piece[:] = room[: piece.size]


@compiled
def exchange_blocks(
    scales: Any,
    integers: Any,
    bits: int,
    block: int,
    shrink: Any,
    stale: Any,
    term: Any,
    onward_scales: Any,
    onward_integers: Any,
) -> None:
    """Write encode((term - stale) + decoded); ``stale`` becomes decoded - stale."""
    room = np.empty(block, np.float32)
    step = block * bits // 8
    for b in range(scales.size):
        bytes_ = slice(b * step, (b + 1) * step)
        _unpack(_from_bf16(scales[b]), integers[bytes_], bits, room)
        old = stale[b * block : (b + 1) * block]
        new = term[b * block : (b + 1) * block]
        for j in range(old.size):
            arrived, before = room[j], old[j]
            room[j] = (new[j] - before) + arrived
            old[j] = arrived - before
        onward_scales[b] = _pack(room, bits, shrink, onward_integers[bytes_])


@compiled
def relay_bf16(arrived: Any, own: Any, onward: Any, keep: bool) -> None:
    """The same as :func:`relay_blocks` for bf16 messages, seen as 16-bit integers."""
    for j in range(arrived.size):
        onward[j] = np.int16(_to_bf16(_from_bf16(arrived[j]) + own[j]))
    if keep:
        for j in range(arrived.size):
            own[j] = _from_bf16(onward[j])


@compiled
def exchange_bf16(arrived: Any, stale: Any, term: Any, onward: Any) -> None:
    """The same as :func:`exchange_blocks` for bf16 messages, seen as 16-bit integers."""
    for j in range(arrived.size):
        value, before = _from_bf16(arrived[j]), stale[j]
        onward[j] = np.int16(_to_bf16((term[j] - before) + value))
        stale[j] = value - before


@compiled
def exchange_plain(arrived: Any, stale: Any, term: Any, onward: Any) -> None:
    """The same as :func:`exchange_blocks` for messages that are the numbers themselves."""
    for j in range(arrived.size):
        value, before = arrived[j], stale[j]
        onward[j] = (term[j] - before) + value
        stale[j] = value - before


@cache
def prepare() -> None:
    """Compile all of these, or load them from the cache: before ranks wait for each other."""
    run_without_cache_if_need_be(_run_all)


def _run_all() -> None:
    numbers, scales, integers = np.ones(2, np.float32), np.ones(1, np.int16), np.ones(2, np.int8)
    coded, shrink = (scales, integers), np.float32(1 / 127)
    encode_blocks(numbers, 8, 2, shrink, *coded)
    decode_blocks(*coded, 8, 2, numbers)
    accumulate_blocks(*coded, 8, 2, numbers)
    relay_blocks(*coded, 8, 2, shrink, numbers, *coded, False)
    exchange_blocks(*coded, 8, 2, shrink, numbers, numbers, *coded)
    halves = np.ones(2, np.int16)
    relay_bf16(halves, numbers, halves, False)
    exchange_bf16(halves, numbers, numbers, halves)
    for wide in (numbers, numbers.astype(np.float64)):
        exchange_plain(wide, wide, wide, wide)

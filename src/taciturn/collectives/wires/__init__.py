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

On the CPU, in fp32 and with nearest rounding, compiled loops do the work; elsewhere tensor
operations do, with the same results bit for bit.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from taciturn.collectives.wires.base import BlockLayout, Message, Rounding, Wire, check_block
from taciturn.collectives.wires.compiled_wires import CompiledBlocks, CompiledPlain
from taciturn.collectives.wires.torch_wires import PLAIN_DTYPES, BlockScaled, Plain
from taciturn.errors import InputError

__all__ = ["WIRES", "Message", "Rounding", "Wire", "make_wire"]

WireName = Literal["fp64", "fp32", "fp16", "bf16", "int8", "int4"]
WIRES: tuple[str, ...] = get_args(WireName)
"""Names of all wires, widest first."""

_BITS: dict[str | None, Literal[8, 4]] = {"int8": 8, "int4": 4}


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
        block: elements per scale of int8 and int4, a power of two.
        rounding: "nearest" or "stochastic" (unbiased, twice the variance).
        device: device of the messages, the CPU if None.
        seed: seed of the stochastic rounding.

    Raises:
        InputError: no such wire, rounding or block.
    """
    device = device if device is not None else torch.device("cpu")
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    if rounding not in get_args(Rounding):
        raise InputError(f"rounding={rounding!r}: choose 'nearest' or 'stochastic'")
    if name is not None and name not in WIRES:
        raise InputError(f"wire={name!r}: choose one of {', '.join(WIRES)}")
    check_block(block)
    bits = _BITS.get(name)
    layout = BlockLayout(bits, block) if bits is not None else None
    on_wire = dtype if name is None else PLAIN_DTYPES.get(name, dtype)
    compiled = device.type == "cpu" and rounding == "nearest" and dtype == compute
    if layout is not None:
        if compiled and dtype is torch.float32:
            return CompiledBlocks(layout)
        return BlockScaled(layout, compute, device, rounding, seed)
    if compiled and (on_wire == dtype or (on_wire, dtype) == (torch.bfloat16, torch.float32)):
        return CompiledPlain(on_wire, compute)
    return Plain(on_wire, compute, device, rounding, seed)

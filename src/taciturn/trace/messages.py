"""What one collective is called and how many bytes it is about, from a name or its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["canonical", "input_type", "size_bytes"]

MAX_BYTES = 2**50

_DTYPE_BYTES = {
    **dict.fromkeys(("bool", "byte", "char", "uint8", "int8", "unsignedchar", "signedchar"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16", "c10::half"), 2),
    **dict.fromkeys(("c10::bfloat16", "shortint"), 2),
    **dict.fromkeys(("float", "int", "float32", "int32", "complexhalf"), 4),
    **dict.fromkeys(("double", "long", "longint", "int64", "float64", "complexfloat"), 8),
    **dict.fromkeys(("complexdouble",), 16),
}
# How kernels, calls and profiler metadata spell one collective; tried in this order.
_NAMES = (
    (r"^taciturn::exchange", "exchange"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather", "all_gather"),
    (r"all_?to_?all", "all_to_all"),
    (r"all_?reduce|cross_device_reduce", "all_reduce"),
    (r"broadcast", "broadcast"),
    (r"barrier", "barrier"),
    (r"send_?recv|batch_?isend|coalesced", "send_recv"),
    (r"gather", "gather"),
    (r"scatter", "scatter"),
    (r"reduce", "reduce"),
    (r"send", "send"),
    (r"recv", "recv"),
)
_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), name) for pattern, name in _NAMES)


def canonical(text: str) -> str:
    """``all_reduce`` for ``ncclDevKernel_AllReduce_Sum_f32``, ``c10d::allreduce_`` and the like."""
    for pattern, name in _COMPILED:
        if pattern.search(text):
            return name
    return "unknown"


def size_bytes(info: Mapping[str, Any]) -> int | None:
    """Bytes of the whole buffer, from message sizes or from the shapes of a call's inputs."""
    width = _width(str(info.get("dtype", "")))
    counts = [info.get("In msg nelems"), info.get("Out msg nelems")]
    whole = [n for n in counts if isinstance(n, int) and n >= 0]
    if whole and width:
        return _plausible(max(whole) * width)
    shapes, kinds = info.get("Input Dims"), info.get("Input type")
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return None
    total = 0
    for shape, kind in zip(shapes, kinds, strict=False):
        count = _count(shape)
        if count is None:
            continue
        word = str(kind)
        # A TensorList does not say its type: DDP's is float.
        total = max(total, count * (4 if word.startswith("TensorList") else _width(word)))
    return _plausible(total) if total else None


def _plausible(size: int) -> int | None:
    """None for more bytes than any machine has, which come from broken files."""
    return size if size < MAX_BYTES else None


def _count(shape: Any) -> int | None:
    """Elements of a shape, or of a list of shapes; None for what is no tensor."""
    if not isinstance(shape, list) or not shape:
        return None
    if all(isinstance(n, int) for n in shape):
        product = 1
        for n in shape:
            product *= max(n, 0)
        return product
    parts = [count for one in shape if (count := _count(one)) is not None]
    return sum(parts) if parts else None


def _width(word: str) -> int:
    return _DTYPE_BYTES.get(word.lower().replace(" ", ""), 0)


def input_type(info: Mapping[str, Any]) -> str:
    """The type of a call's first input as the file writes it; empty if it does not."""
    kinds = info.get("Input type")
    return str(kinds[0]) if isinstance(kinds, list) and kinds else ""

"""What methods cost against the plain all-reduce, and tables of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from taciturn.errors import InputError

__all__ = ["CodecCost", "method_key", "read_codecs"]


@dataclass(frozen=True)
class CodecCost:
    """What a method sends and computes, against the plain all-reduce of the same buffer.

    Attributes:
        bytes_ratio: bytes sent, over those of the plain one.
        codec_s_per_byte: encoding and decoding on each rank, per byte of the buffer.
        codec_s: the same per call, whatever the size.
    """

    bytes_ratio: float
    codec_s_per_byte: float
    codec_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and 0 <= value < 1e6):
                raise InputError(
                    f"{name} of a codec is {value!r}; give a number from 0 on and below 1e6"
                )


def method_key(method: str) -> str:
    """A method with its keys in order and without blanks."""
    name, _, keys = "".join(method.split()).partition(":")
    return name + (":" + ",".join(sorted(keys.split(","))) if keys else "")


def read_codecs(path: Path) -> dict[str, CodecCost]:
    """A table of codecs: a JSON object from method to the fields of :class:`CodecCost`.

    Raises:
        InputError: no such file, or not such a table.
    """
    shape = (
        'write {"quantized:bits=8": {"bytes_ratio": 0.26, "codec_s_per_byte": 1e-9}}, with '
        "seconds measured where it will run"
    )
    try:
        table = orjson.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read codecs from {path}: {error.strerror}; {shape}") from error
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path} is no JSON ({error}); {shape}") from error
    if not isinstance(table, dict):
        raise InputError(f"{path} is no table of codecs; {shape}")
    codecs = {}
    for method, cost in table.items():
        try:
            codecs[method_key(method)] = CodecCost(**cost)
        except TypeError as error:
            raise InputError(f"{path}: {method!r} lacks fields, or has others; {shape}") from error
    return codecs

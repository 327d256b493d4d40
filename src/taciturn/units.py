"""Rates, sizes and durations as people write them.

Links are counted in base 10 (``200mbit`` is 200 000 000 bits per second), memory in base 2 for
``KiB MiB GiB`` and in base 10 for ``kB MB GB``. Law: ``parse_rate(format_rate(r)) == r`` and
``parse_size(format_size(s)) == s`` for every whole number (``test_units.py``).
"""

from __future__ import annotations

import re
from fractions import Fraction

from taciturn.errors import InputError

__all__ = [
    "format_rate",
    "format_seconds",
    "format_size",
    "parse_rate",
    "parse_seconds",
    "parse_size",
]

UNSHAPED = ("unshaped", "none")
RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
SECOND_UNITS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}

_QUANTITY = re.compile(
    r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z/]*)\s*", re.ASCII | re.IGNORECASE
)
_RATE_HELP = "write a rate like 200mbit, 2.5Gbit/s, or unshaped for no limit"
_SECONDS_HELP = "write a duration like 180ms, 2.5s or 3min"
_SIZE_HELP = "write a size like 4096, 64KiB, 32MiB (base 2) or 1MB (base 10)"


def parse_rate(text: str) -> int | None:
    """Bits per second of a rate like ``"200mbit"`` or ``"2.5Gbit/s"``; None for ``"unshaped"``.

    Units are base 10 and case does not matter: bit, kbit, mbit, gbit, tbit, with or without
    ``/s``. Bytes per second are refused, since half of those who write them mean bits.

    Raises:
        InputError: not a rate, zero or negative, or not a whole number of bits per second.
    """
    if text.strip().lower() in UNSHAPED:
        return None
    number, unit = _split(text, "rate", _RATE_HELP)
    unit = unit.removesuffix("/s")
    if unit not in RATE_UNITS:
        known = ", ".join(RATE_UNITS)
        shown = f"unit {unit!r}" if unit else "no unit"
        raise InputError(f"rate {text!r} has {shown} (units: {known}); {_RATE_HELP}")
    return _whole(number * RATE_UNITS[unit], text, "rate", "bits per second", _RATE_HELP)


def parse_size(text: str) -> int:
    """Bytes of a size like ``"32MiB"``, ``"1MB"`` or ``"4096"``.

    ``KiB MiB GiB TiB`` are base 2, ``kB MB GB TB`` base 10; case does not matter.

    Raises:
        InputError: not a size, zero or negative, or not a whole number of bytes.
    """
    number, unit = _split(text, "size", _SIZE_HELP)
    if unit not in SIZE_UNITS:
        known = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise InputError(f"size {text!r} has unit {unit!r} (units: {known}); {_SIZE_HELP}")
    return _whole(number * SIZE_UNITS[unit], text, "size", "bytes", _SIZE_HELP)


def parse_seconds(text: str) -> float:
    """Seconds of a duration like ``"180ms"``, ``"2.5s"`` or ``"3min"``; a unit is needed.

    Raises:
        InputError: not a duration, without a unit, or zero.
    """
    number, unit = _split(text, "duration", _SECONDS_HELP)
    if unit not in SECOND_UNITS:
        shown = f"unit {unit!r}" if unit else "no unit"
        raise InputError(
            f"duration {text!r} has {shown} (units: {', '.join(SECOND_UNITS)}); {_SECONDS_HELP}"
        )
    if not number:
        raise InputError(f"duration {text!r} is zero; {_SECONDS_HELP}")
    return float(number * SECOND_UNITS[unit])


def format_rate(bits_per_s: int | None) -> str:
    """A rate as :func:`parse_rate` reads it: ``"200 Mbit/s"``, ``"2.5 Gbit/s"``, ``"unshaped"``."""
    if bits_per_s is None:
        return "unshaped"
    names = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
    return _scaled(bits_per_s, 1000, names)


def format_size(size_bytes: int) -> str:
    """A size as :func:`parse_size` reads it, in base 2: ``"1.5 KiB"``, ``"1001 B"``."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_seconds(seconds: float) -> str:
    """A duration to three digits: ``"1.23 s"``, ``"45.6 ms"``, ``"5 min 3 s"``, ``"2 h 5 min"``."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds >= 7170:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h {rest} min"
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        if seconds * factor >= 0.9995 or unit == "ns":
            value = float(f"{seconds * factor:.3g}")
            return f"{value:g} {unit}"
    raise AssertionError("the last unit always matches")


def _split(text: str, kind: str, accepted: str) -> tuple[Fraction, str]:
    """The number, exactly, and the unit in lower case."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r} is not a {kind}; {accepted}")
    return Fraction(found[1].rstrip(".")), found[2].lower()


def _whole(value: Fraction, text: str, kind: str, unit: str, accepted: str) -> int:
    if value <= 0:
        raise InputError(f"{kind} {text!r} is zero; {accepted}")
    if value.denominator != 1:
        raise InputError(
            f"{kind} {text!r} is {float(value)} {unit}, not a whole number; {accepted}"
        )
    return value.numerator


def _scaled(value: int, base: int, names: tuple[str, ...]) -> str:
    """In the largest unit in which three decimals say it exactly."""
    for power in range(len(names) - 1, 0, -1):
        scaled = Fraction(value, base**power)
        if scaled >= 1 and (scaled * 1000).denominator == 1:
            return f"{_decimal(scaled)} {names[power]}"
    return f"{value} {names[0]}"


def _decimal(value: Fraction) -> str:
    """A fraction of at most three decimals, written out: never an exponent, no trailing zeros."""
    whole, thousandths = divmod(int(value * 1000), 1000)
    return f"{whole}.{thousandths:03d}".rstrip("0").rstrip(".")

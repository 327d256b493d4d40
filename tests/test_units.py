"""Tests of taciturn.units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.errors import InputError
from taciturn.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_seconds,
    parse_size,
)

WHOLE = st.integers(min_value=1, max_value=10**18)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("2.5Gbit/s", 2_500_000_000),
        (" 200 Mbit/s ", 200_000_000),
        ("64kbit", 64_000),
        ("8000bit", 8_000),
        (".5gbit", 500_000_000),
        ("0.1gbit", 100_000_000),
        ("unshaped", None),
        ("None", None),
    ],
)
def test_rates_are_base_10_bits_per_second(text: str, bits_per_s: int | None) -> None:
    """A rate is in bits per second, base 10, exact, in any case; `unshaped` is no rate at all."""
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("64KiB", 65536),
        ("32MiB", 32 * 2**20),
        ("1GiB", 2**30),
        ("1MB", 10**6),
        ("1.5 kB", 1500),
        ("0.5kib", 512),
    ],
)
def test_sizes_are_base_2_with_an_i_and_base_10_without(text: str, size_bytes: int) -> None:
    """KiB and MiB are powers of 1024, kB and MB of 1000, a bare number is bytes."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "0", "0mbit", "-5mbit", "nan", "nanmbit", "inf", "1e3mbit", "200", "200 MB"),
        *("200mbyte", "mbit", "2,5gbit", "1.2.3gbit", "0.3bit", "200mbit/h", "10 mbit 5"),
        *("200mbit\n1", "\u0663mbit"),
    ],
)
def test_a_rate_that_makes_no_sense_says_what_does(text: str) -> None:
    """The error quotes the text and shows a rate that would be accepted."""
    with pytest.raises(InputError, match="200mbit") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "0", "0MiB", "-1", "nan", "inf", "1e6", "12mbit", "MiB", "1.5", "0.3KiB", "5 %"]
)
def test_a_size_that_makes_no_sense_says_what_does(text: str) -> None:
    """The error quotes the text and shows a size that would be accepted."""
    with pytest.raises(InputError, match="64KiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("180ms", 0.18), ("2.5 s", 2.5), ("3min", 180), ("40us", 4e-5), ("1ns", 1e-9), ("3h", 10800)],
)
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    """A duration is in seconds or a part of one, minutes or hours."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "0ms", "-1s", "nan", "180", "3d", "1e3s", "5 MB"])
def test_a_duration_that_makes_no_sense_says_what_does(text: str) -> None:
    """The error quotes the text and shows a duration that would be accepted."""
    with pytest.raises(InputError, match="180ms") as caught:
        parse_seconds(text)
    assert repr(text) in str(caught.value)


@given(WHOLE)
def test_a_rate_survives_being_written(bits_per_s: int) -> None:
    """parse_rate(format_rate(r)) == r."""
    assert parse_rate(format_rate(bits_per_s)) == bits_per_s


@given(WHOLE)
def test_a_size_survives_being_written(size_bytes: int) -> None:
    """parse_size(format_size(s)) == s."""
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_values_are_written_as_people_write_them() -> None:
    """The largest unit that says it exactly; trailing zeros of whole numbers stay."""
    assert format_rate(200_000_000) == "200 Mbit/s"
    assert format_rate(2_500_000_000) == "2.5 Gbit/s"
    assert format_rate(None) == "unshaped"
    assert format_size(32 * 2**20) == "32 MiB"
    assert format_size(100 * 2**10) == "100 KiB"
    assert format_size(1536) == "1.5 KiB"
    assert format_size(1001) == "1001 B"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ns"),
        (1e-9, "1 ns"),
        (789.4e-6, "789 us"),
        (0.0456, "45.6 ms"),
        (0.99951, "1 s"),
        (1.2345, "1.23 s"),
        (99.97, "100 s"),
        (303.0, "5 min 3 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_have_three_digits_and_a_fitting_unit(seconds: float, text: str) -> None:
    """A duration is readable at any scale, and rounding never shows 1000 of a unit."""
    assert format_seconds(seconds) == text

"""The terminal table: it fits, and what it leaves out is of lower rank."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench_rows import make_row, make_run
from taciturn.bench.table import (
    error_text,
    mib_text,
    notes,
    percent_text,
    ratio_text,
    render,
    title,
    wrap_method,
)

LONG = "coded:passes=16,code=fourier,shuffle=true,wire=bf16"


def shown(rows: list[dict[str, object]], width: int) -> str:
    """The table as a terminal of that width has it."""
    console = Console(file=io.StringIO(), width=width)
    console.print(render(rows, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 160, 240])
def test_the_table_fits(width: int) -> None:
    """No line is longer than the terminal is wide, and nothing is cut off."""
    rows = [*make_run(), make_row(LONG, sent=123_456_789)]
    text = shown(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for header in ("median", "ratio to", "sent per", "of byte", "replica", "mean"):
        assert header in text


def test_wider_shows_more() -> None:
    """120 columns show the spread and the worst parameter, 240 the bandwidths too."""
    rows = [*make_run(), make_row(LONG)]
    assert "spread" not in shown(rows, 80)
    assert "spread" in shown(rows, 120)
    assert "worst" in shown(rows, 120)
    assert "busbw" not in shown(rows, 120).split("Input:")[0]
    assert "busbw" in shown(rows, 240).split("Input:")[0]


def test_all_methods_are_there_in_full() -> None:
    """A method's text survives its line breaks."""
    text = shown([*make_run(), make_row(LONG)], 80)
    first = "".join(line[:22].strip() for line in text.splitlines())
    assert LONG in first
    assert "backend:wire=bf16" in first


def test_columns_without_values_are_left_out() -> None:
    """On a link that is not shaped there is no share of a byte limit to show."""
    text = shown([make_row("ring", rate=None), make_row("backend", rate=None, reference=True)], 200)
    assert "of byte" not in text
    assert "link not shaped" in text


def test_each_size_has_a_table() -> None:
    """Rows of two sizes are two tables under their own titles."""
    text = shown(make_run(400) + make_run(4096), 100)
    assert "400 B float32" in text
    assert "4 KiB float32" in text


def test_differing_counts_are_marked() -> None:
    """Bytes that are not the formula's are marked where they stand and named below."""
    text = shown([make_row("ring", counts_equal_formula=False)], 100)
    assert "700 B !" in text
    assert "! ring: what was counted is not what the formula says." in text


def test_notes_say_what_must_be_known() -> None:
    """An added backend, a chosen code and a method's remarks are told in sentences."""
    rows = [
        make_row("backend", added_by_bench=True),
        make_row("coded:spread_budget=0.1", choice="fourier, passes 8: fewest bytes"),
        make_row("ring", notes=["result not finite on ranks [1]"]),
    ]
    said = notes(rows)
    assert "'backend' was added: the ratios need it." in said
    assert "coded:spread_budget=0.1: fourier, passes 8: fewest bytes." in said
    assert "ring: result not finite on ranks [1]." in said


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.text("abc=1", min_size=1, max_size=20), min_size=1, max_size=8), st.integers(1, 60)
)
def test_wrapping_loses_nothing(pieces: list[str], width: int) -> None:
    """Lines joined again are the method, and only an unbreakable piece is longer than the width."""
    text = ",".join(pieces)
    lines = wrap_method(text, width).split("\n")
    assert "".join(lines) == text
    assert all(len(line) <= width or "," not in line[:-1] for line in lines)


def test_numbers() -> None:
    """Errors have two digits, ratios three, shares one decimal; what is missing is a dash."""
    assert [error_text(v) for v in (None, 0.0, 1.44e-4, 0.5, 12.0)] == [
        "-", "0", "1.4e-4", "5.0e-1", "1.2e1",
    ]  # fmt: skip
    assert [ratio_text(v) for v in (0.6254, 1.0, 12.34)] == ["0.625", "1.000", "12.3"]
    assert [percent_text(v) for v in (None, 0.9549)] == ["-", "95.5 %"]
    assert [mib_text(v) for v in (None, 12, 2048, 7.5 * 2**20, 2**31)] == [
        "-", "12 B", "2.00 KiB", "7.50 MiB", "2.00 GiB",
    ]  # fmt: skip


def test_title_names_the_range_of_sizes() -> None:
    """One size is named, several from the smallest to the largest."""
    row = make_row("ring", buffer_bytes=1 << 20)
    assert title(row) == "all-reduce of 1 MiB float32, 4 ranks, links of 200 Mbit/s"
    assert title(row, 1 << 20) == title(row)
    assert title(row, 4096).startswith("all-reduce of 4 KiB to 1 MiB float32")

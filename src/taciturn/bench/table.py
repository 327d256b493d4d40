"""The results as a terminal table that fits the width at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taciturn.bench.columns import Row
from taciturn.units import format_rate, format_seconds, format_size

__all__ = [
    "error_text",
    "mib_text",
    "notes",
    "percent_text",
    "ratio_text",
    "render",
    "seconds_text",
    "title",
    "wrap_method",
]


def error_text(value: float | None) -> str:
    """A relative error to two digits, ``1.4e-4``; a dash where there is none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def ratio_text(value: float) -> str:
    """A ratio to three digits."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent_text(value: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def mib_text(value: float | None) -> str:
    """Bytes in the base-2 unit that suits, to three or four digits; a dash where there is none."""
    if value is None:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float | None) -> str:
    """A duration; a dash where there is none."""
    return "-" if value is None else format_seconds(value)


def _sent(row: Row) -> str:
    sent = row["sent_bytes_per_rank"]
    return "-" if sent is None else mib_text(sent) + ("" if row["counts_equal_formula"] else " !")


def _range(row: Row) -> str:
    """Half the range of the middle half, relative to the median."""
    return f"{50 * (row['q3_s'] - row['q1_s']) / row['median_s']:.1f} %"


class _Column(NamedTuple):
    header: str
    text: Callable[[Row], str]
    rank: int  # columns of lower rank are kept first when the width is short


_COLUMNS = (
    _Column("median\ntime", lambda r: seconds_text(r["median_s"]), 0),
    _Column("half\nIQR", _range, 4),
    _Column("ratio to\nbackend", lambda r: ratio_text(r["ratio_to_backend"]), 0),
    _Column("sent per\nrank", _sent, 1),
    _Column("of byte\nlimit", lambda r: percent_text(r["limit_fraction"]), 2),
    _Column("replica\nerror", lambda r: error_text(r["replica_error"]), 3),
    _Column("mean\nerror", lambda r: error_text(r["mean_error"]), 3),
    _Column("spread", lambda r: error_text(r["spread"]), 5),
    _Column("worst\nreplica", lambda r: error_text(r["worst_parameter_replica_error"]), 6),
    _Column("worst\nmean", lambda r: error_text(r["worst_parameter_mean_error"]), 7),
    _Column("codec", lambda r: seconds_text(r["codec_s"]), 8),
    _Column("algbw\nMB/s", lambda r: f"{r['algbw_bytes_per_s'] / 1e6:.4g}", 10),
    _Column("busbw\nMB/s", lambda r: f"{r['busbw_bytes_per_s'] / 1e6:.4g}", 10),
    _Column("rounds", lambda r: "-" if r["rounds"] is None else str(r["rounds"]), 11),
    _Column("on the\nwire", lambda r: mib_text(r["wire_bytes_counted_by_interface"]), 9),
)
_GAP = 2  # one blank and one separator, itself blank
_METHOD_WIDTHS = (52, 36, 28, 24, 20)


def wrap_method(text: str, width: int) -> str:
    """A method cut at commas and colons into lines of at most ``width``, where that is possible."""
    pieces = text.replace(":", ":\0").replace(",", ",\0").split("\0")
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _width(column: _Column, rows: Sequence[Row]) -> int:
    return max(
        len(line) for text in [column.header, *map(column.text, rows)] for line in text.split("\n")
    )


def _layout(rows: Sequence[Row], width: int) -> tuple[int, list[_Column]]:
    """Width of the method's column, and the columns that fit beside it.

    Columns with nothing to show in any row are left out. The method gets as many lines as it takes
    for the columns up to rank 4, then as few lines as the rest of the width allows.
    """
    useful = [c for c in _COLUMNS if any(c.text(row) != "-" for row in rows)]
    for rank in sorted({c.rank for c in useful}, reverse=True):
        kept = [c for c in useful if c.rank <= rank]
        taken = sum(_width(c, rows) + _GAP for c in kept)
        widths = [w for w in _METHOD_WIDTHS if w + taken <= width]
        if widths and (widths[0] >= 36 or rank <= 5):
            longest = max(len(row["method"]) for row in rows)
            return min(widths[0], max(longest, 6)), kept
    return _METHOD_WIDTHS[-1], [c for c in useful if c.rank == 0]


def title(row: Row, smallest_bytes: int | None = None) -> str:
    """What the rows of one size, or of several up to that of ``row``, have in common."""
    rate, size = row["rate_bits_per_s"], format_size(row["buffer_bytes"])
    if smallest_bytes is not None and smallest_bytes != row["buffer_bytes"]:
        size = f"{format_size(smallest_bytes)} to {size}"
    link = "link not shaped" if rate is None else f"links of {format_rate(rate)}"
    return f"all-reduce of {size} float32, {row['ranks']} ranks, {link}"


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know beside the numbers; whole sentences."""
    said = [f"Input: {rows[-1]['conditions']['input']}."]
    if rows[0]["rate_bits_per_s"] is None:
        said.append("The link is not shaped: no share of a byte limit can be given.")
    else:
        said.append("Byte limit: TCP goodput, 0.956 of the set rate at MTU 1500.")
    said.append(
        "Errors are relative to the rms of the true sum: of each replica, and of the mean over "
        "replicas; worst: of the worst parameter. busbw is the equivalent ring bandwidth."
    )
    if any(row["added_by_bench"] for row in rows):
        said.append("'backend' was added: the ratios need it.")
    choices = {(r["method"], r["choice"]): None for r in rows if "_budget" in r["method"]}
    said += [f"{method}: {choice}." for method, choice in choices]
    mismatched = sorted({row["method"] for row in rows if row["counts_equal_formula"] is False})
    said += [f"! {method}: what was counted is not what the formula says." for method in mismatched]
    remarks = {(row["method"], note): None for row in rows for note in row["notes"]}
    said += [f"{method}: {note}." for method, note in remarks]
    return said


def render(rows: Sequence[Row], width: int) -> RenderableType:
    """All sizes as tables, one below the other, with notes.

    Args:
        rows: of one run, at least one.
        width: of the terminal in columns; 80 shows the essentials, 120 and more the rest.
    """
    parts: list[RenderableType] = []
    method_width, columns = _layout(rows, width)
    for size in dict.fromkeys(row["buffer_bytes"] for row in rows):
        chosen = [row for row in rows if row["buffer_bytes"] == size]
        table = Table(
            title=title(chosen[0]),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        table.add_column("method", width=method_width, overflow="fold", vertical="top")
        for column in columns:
            table.add_column(column.header, justify="right", no_wrap=True)
        for row in chosen:
            name = Text(
                wrap_method(row["method"], method_width),
                style="bold" if row["is_reference"] else "",
            )
            table.add_row(name, *(Text(column.text(row)) for column in columns))
        parts += [table, Text()]
    parts += [Text(note, style="yellow" if note.startswith("!") else "dim") for note in notes(rows)]
    return Group(*parts)

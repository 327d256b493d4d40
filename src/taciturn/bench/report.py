"""The results as one self-contained HTML page, made from the rows alone.

plotly's script is inside the page and a content policy forbids it to load anything: the page works
offline and tells nobody that it was opened. Every number in a figure is also in a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from taciturn.bench.columns import Row
from taciturn.bench.table import (
    error_text,
    mib_text,
    notes,
    percent_text,
    ratio_text,
    seconds_text,
    title,
)
from taciturn.bench.verdicts import bytes_per_elem, coded_verdicts, dominated, family, headlines
from taciturn.errors import InputError
from taciturn.pages import GLYPHS, MARGIN, Figure, figure, render_page, ticks
from taciturn.units import format_size

__all__ = ["html"]

# Of medium lightness, so that they read on white and on black; shapes say the same without colour.
_STYLES = {
    "backend": ("#7d8590", "diamond"),
    "ring": ("#3b82c4", "square"),
    "coded": ("#c8661a", "circle"),
    "quantized": ("#2e9e6b", "triangle-up"),
    "direct": ("#a85cc2", "triangle-down"),
}
_OTHER = ("#b0506a", "star")
_LEGENDS_APART = 0.05  # of the plot's width and height: nearer points share one label
_CHARACTER_PX = 6.5  # of the labels' 11 px font, the widest of the fonts asked for
_GAP_PX = 6  # between a bar and its label


def _style(row: Row) -> tuple[str, str]:
    return _STYLES.get(family(row["method"]), _OTHER)


# --------------------------------------------------------------------------------------- figures


def _bars(rows: Sequence[Row], numbers: dict[str, int]) -> Figure:
    """Median time of each method of one size, its name above its bar."""
    shown = list(reversed(rows))  # plotly counts upwards
    places = list(range(len(shown)))
    longest = max(row["q3_s"] for row in rows)
    texts = [
        f"{seconds_text(r['median_s'])} \u00b7 {ratio_text(r['ratio_to_backend'])}" for r in shown
    ]
    room = math.ceil(2 * _GAP_PX + _CHARACTER_PX * max(map(len, texts)))
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": places,
        "x": [row["median_s"] for row in shown],
        "width": 0.38,
        "marker": {"color": [_style(row)[0] for row in shown]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [row["q3_s"] - row["median_s"] for row in shown],
            "arrayminus": [row["median_s"] - row["q1_s"] for row in shown],
            "thickness": 1.2,
            "width": 3,
        },
        "hovertext": [
            f"{row['method']}<br>{seconds_text(row['median_s'])} "
            f"({seconds_text(row['q1_s'])} to {seconds_text(row['q3_s'])})"
            for row in shown
        ],
        "hoverinfo": "text",
    }
    labels = [
        {
            "x": 0,
            "y": place + 0.36,
            "xanchor": "left",
            "yanchor": "middle",
            "showarrow": False,
            "text": f"<b>{numbers[row['method']]}</b> {row['method']}",
            "font": {"size": 11},
        }
        for place, row in zip(places, shown, strict=True)
    ] + [
        {
            "x": row["q3_s"],
            "xshift": _GAP_PX,
            "y": place,
            "xanchor": "left",
            "yanchor": "middle",
            "showarrow": False,
            "text": text,
            "font": {"size": 11},
        }
        for place, row, text in zip(places, shown, texts, strict=True)
    ]
    return figure(
        "times",
        f"Median time of one {title(rows[0])}, with quartiles; behind each bar the time and its "
        "ratio to the backend's fp32 all_reduce. Shorter is better.",
        [bars],
        46 * len(rows) + 60,
        annotations=labels,
        # In the margin, since a share of a narrow page's axis is narrower than the label.
        margin=MARGIN | {"l": 12, "r": room},
        xaxis={"range": [0, 1.01 * longest], "title": {"text": "seconds"}, "nticks": 6},
        yaxis={"visible": False, "range": [-0.5, len(rows) - 0.3]},
    )


def _against_size(rows: Sequence[Row], numbers: dict[str, int], column: str) -> Figure:
    """One line per method over the sizes."""
    sizes = sorted({row["buffer_bytes"] for row in rows})
    data, ends = [], []
    values = [row[column] for row in rows]
    low, high = math.log10(min(values)), math.log10(max(values))
    for method, number in numbers.items():
        line = sorted((r for r in rows if r["method"] == method), key=lambda r: r["buffer_bytes"])
        color, symbol = _style(line[0])
        text = seconds_text if column == "median_s" else ratio_text
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [row["buffer_bytes"] for row in line],
                "y": [row[column] for row in line],
                "line": {"color": color, "width": 1.6},
                "marker": {"color": color, "symbol": symbol, "size": 8},
                "hovertext": [
                    f"{number} {method}<br>{format_size(row['buffer_bytes'])}: {text(row[column])}"
                    for row in line
                ],
                "hoverinfo": "text",
            }
        )
        ends.append((1.0, (math.log10(line[-1][column]) - low) / (high - low or 1), str(number)))
    what = {
        "median_s": "Median time against the size of the buffer. Where the lines are flat, latency "
        "rules; where they climb, bandwidth does.",
        "ratio_to_backend": "The same as a ratio to the backend's fp32 all_reduce; "
        "below 1 is faster.",
    }[column]
    marks = ticks(min(values), max(values))
    span = 0.06 * (high - low or 1)
    annotations = [
        {
            "x": math.log10(sizes[-1]),
            "y": low + y * (high - low),
            "xanchor": "left",
            "xshift": 8,
            "showarrow": False,
            "text": text,
            "font": {"size": 11},
        }
        for _, y, text in _merge(ends)
    ]
    return figure(
        f"sizes-{column}",
        what,
        data,
        420,
        annotations=annotations,
        margin=MARGIN | {"r": 64},
        xaxis={
            "type": "log",
            "tickvals": sizes,
            "ticktext": [format_size(size) for size in sizes],
            "title": {"text": "buffer"},
        },
        yaxis={
            "type": "log",
            "range": [low - span, high + span],
            "tickvals": marks,
            "ticktext": [seconds_text(t) if column == "median_s" else f"{t:g}" for t in marks],
        },
    )


def _merge(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Labels of points, one for those that would print over each other; places from 0 to 1."""
    merged: list[tuple[float, float, str]] = []
    for x, y, text in sorted(points, key=lambda p: (p[0], p[1])):
        for i, (x2, y2, text2) in enumerate(merged):
            if abs(x - x2) < _LEGENDS_APART and abs(y - y2) < _LEGENDS_APART:
                merged[i] = (x2, y2, f"{text2}, {text}")
                break
        else:
            merged.append((x, y, text))
    return merged


def _frontier(rows: Sequence[Row], numbers: dict[str, int], error: str) -> Figure | None:
    """Bytes per element against one error; dominated methods are hollow."""
    points = [row for row in rows if bytes_per_elem(row) and row[error]]
    if not points:
        return None
    places = [(math.log10(bytes_per_elem(row) or 1), math.log10(row[error])) for row in points]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*places, strict=True))
    width, height = (right - left) or 1, (high - low) or 1
    best = sorted(
        place
        for place, row in zip(places, points, strict=True)
        if not dominated(row, points, error)
    )
    stairs_x: list[float] = []
    stairs_y: list[float] = []
    for x, y in best:  # the least error that so many bytes can buy
        if stairs_y:
            stairs_x.append(10**x)
            stairs_y.append(stairs_y[-1])
        stairs_x.append(10**x)
        stairs_y.append(10**y)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": stairs_x,
            "y": stairs_y,
            "line": {"width": 1, "dash": "dot", "color": "#7d8590"},
            "hoverinfo": "skip",
        }
    ]
    for row in points:
        color, symbol = _style(row)
        better = dominated(row, points, error)
        beaten = (
            f"<br>beaten by {', '.join(str(numbers[b['method']]) for b in better)}"
            if better
            else ""
        )
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [bytes_per_elem(row)],
                "y": [row[error]],
                "marker": {
                    "color": color,
                    "symbol": symbol + ("-open" if better else ""),
                    "size": 11,
                    "line": {"width": 2, "color": color},
                },
                "hovertext": f"{numbers[row['method']]} {row['method']}<br>"
                f"{bytes_per_elem(row):.3f} bytes per element, "
                f"error {error_text(row[error])}{beaten}",
                "hoverinfo": "text",
            }
        )
    labels = _merge(
        [
            ((x - left) / width, (y - low) / height, str(numbers[row["method"]]))
            for (x, y), row in zip(places, points, strict=True)
        ]
    )
    annotations = [
        {
            "x": left + x * width,
            "y": low + y * height,
            "xshift": 10,
            "xanchor": "left",
            "yshift": 9,
            "showarrow": False,
            "text": text,
            "font": {"size": 11},
        }
        for x, y, text in labels
    ]
    caption = {
        "replica_error": "When every replica must be accurate: replica error against bytes.",
        "mean_error": "When the mean over replicas counts: error of the mean against bytes. The "
        "spread of a coded ring's replicas cancels in it.",
    }[error]
    x_ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16) if left - 0.2 <= math.log10(t) <= right + 0.2]
    return figure(
        error.replace("_", "-"),
        caption,
        data,
        400,
        annotations=annotations,
        xaxis={
            "type": "log",
            "tickvals": x_ticks,
            "ticktext": [f"{t:g}" for t in x_ticks],
            "range": [left - 0.06 * width, right + 0.14 * width],
            "title": {"text": "bytes sent per rank and element"},
        },
        yaxis={
            "type": "log",
            "dtick": 1,
            "exponentformat": "power",
            "range": [low - 0.08 * height, high + 0.1 * height],
        },
    )


# ---------------------------------------------------------------------------------------- tables


def _cells(row: Row, numbers: dict[str, int]) -> dict[str, str]:
    """One line of the table of all numbers."""

    def worst(kind: str) -> str:
        name = row[f"worst_parameter_{kind}"]
        return "-" if name is None else f"{error_text(row[f'worst_parameter_{kind}_error'])} {name}"

    def count(value: int | None) -> str:
        return "-" if value is None else f"{value:,}".replace(",", "\u202f")

    equal = {True: "equal", False: "DIFFERS", None: "-"}[row["counts_equal_formula"]]
    elem = bytes_per_elem(row)
    return {
        "#": str(numbers[row["method"]]),
        "method": row["method"],
        "code": row["choice"] or "-",
        "buffer": format_size(row["buffer_bytes"]),
        "median": seconds_text(row["median_s"]),
        "quartiles": f"{seconds_text(row['q1_s'])} to {seconds_text(row['q3_s'])}",
        "ratio to backend": ratio_text(row["ratio_to_backend"]),
        "sent per rank, bytes": count(row["sent_bytes_per_rank"]),
        "formula": f"{count(row['formula_bytes_per_rank'])} {equal}" if equal != "-" else "-",
        "on the wire, bytes": count(row["wire_bytes_counted_by_interface"]),
        "bytes per element": "-" if elem is None else f"{elem:.3f}",
        "of byte limit": percent_text(row["limit_fraction"]),
        "replica error": error_text(row["replica_error"]),
        "mean error": error_text(row["mean_error"]),
        "spread": error_text(row["spread"]),
        "spread of what differs": error_text(row["spread_hetero"]),
        "worst parameter, replica": worst("replica"),
        "worst parameter, mean": worst("mean"),
        "bit-identical": "yes" if row["bit_identical"] else "no",
        "algbw, MB/s": f"{row['algbw_bytes_per_s'] / 1e6:.4g}",
        "busbw, MB/s": f"{row['busbw_bytes_per_s'] / 1e6:.4g}",
        "rounds": count(row["rounds"]),
        "messages": count(row["messages"]),
        "workspace": mib_text(row["workspace_bytes"]),
        "codec": seconds_text(row["codec_s"]),
        "waiting": seconds_text(row["waiting_s"]),
        "times of the repeats": ", ".join(seconds_text(t) for t in row["times_s"]),
        "warm-ups": ", ".join(seconds_text(t) for t in row["warmup_times_s"]),
    }


def _verdict_table(rows: Sequence[Row], numbers: dict[str, int]) -> list[dict[str, str]]:
    """For each coded ring who beats it, by number and name."""

    def who(better: list[Row]) -> str:
        return ", ".join(f"{numbers[b['method']]} {b['method']}" for b in better) or "nobody"

    return [
        {
            "#": str(numbers[verdict.row["method"]]),
            "coded ring": verdict.row["method"],
            "bytes per element": f"{bytes_per_elem(verdict.row):.3f}",
            "replica error": error_text(verdict.row["replica_error"]),
            "beaten on every replica by": who(verdict.replica),
            "mean error": error_text(verdict.row["mean_error"]),
            "beaten in the mean by": who(verdict.mean),
        }
        for verdict in coded_verdicts(rows)
    ]


def html(rows: Sequence[Row]) -> str:
    """The page.

    Args:
        rows: of one run, as ``--json`` writes them.

    Raises:
        InputError: no rows.
    """
    if not rows:
        raise InputError("there are no rows to draw a page from; run the bench first")
    numbers = {
        method: i for i, method in enumerate(dict.fromkeys(row["method"] for row in rows), 1)
    }
    sizes = sorted({row["buffer_bytes"] for row in rows})
    largest = [row for row in rows if row["buffer_bytes"] == sizes[-1]]
    by_size = (
        [_against_size(rows, numbers, column) for column in ("median_s", "ratio_to_backend")]
        if len(sizes) > 1
        else []
    )
    frontiers = [_frontier(largest, numbers, error) for error in ("replica_error", "mean_error")]
    figures = [_bars(largest, numbers), *by_size, *(f for f in frontiers if f is not None)]
    key = []
    for row in largest:
        color, symbol = _style(row)
        key.append((numbers[row["method"]], row["method"], color, GLYPHS[symbol]))
    conditions = {
        "ranks": rows[0]["ranks"],
        "sizes": ", ".join(format_size(size) for size in sizes),
        **{k.replace("_", " "): v for k, v in largest[0]["conditions"].items()},
    }
    return render_page(
        "taciturn.bench",
        "report.html.jinja",
        figures,
        title=title(largest[0], sizes[0]),
        largest=format_size(sizes[-1]),
        shaped=rows[0]["rate_bits_per_s"] is not None,
        headlines=headlines(rows),
        notes=notes(largest),
        key=key,
        times=figures[0],
        by_size=by_size,
        frontiers=[f for f in frontiers if f is not None],
        unplaced=[
            numbers[row["method"]]
            for row in largest
            if not (bytes_per_elem(row) and row["replica_error"])
        ],
        verdicts=_verdict_table(largest, numbers),
        cells=[_cells(row, numbers) for row in rows],
        conditions=conditions,
    )

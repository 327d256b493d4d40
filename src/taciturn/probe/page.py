"""A link as one self-contained HTML page: curves with what they were fitted to, pairs, methods.

Every number in a figure is also in a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from taciturn.link import Fit, Link, Piece
from taciturn.pages import GLYPHS, MARGIN, Figure, figure, render_page, stacked_bars, ticks
from taciturn.probe.table import (
    between,
    curves,
    elems_text,
    headline,
    mb_per_s,
    percent,
    scalars,
    seconds_text,
    share_of_goodput,
)
from taciturn.units import format_size

__all__ = ["html"]

# Of medium lightness, so that they read on white and on black; shapes say the same without colour.
_STYLES = (
    ("#3b82c4", "square"),
    ("#c8661a", "circle"),
    ("#2e9e6b", "triangle-up"),
    ("#a85cc2", "diamond"),
    ("#7d8590", "triangle-down"),
    ("#b0506a", "star"),
)
_ROOM = MARGIN | {"r": 32}  # half a label of the last size
_POINTS = 60  # of a drawn curve, evenly spaced on the logarithmic axis
MOST_RANKS = 32  # of the matrix; the JSON has all
_PARTS = (
    ("link", "#3b82c4"),
    ("coding", "#c8661a"),
    ("other local work", "#7d8590"),
)


class _Table(NamedTuple):
    """Texts; the first ``left`` columns are words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def _line(fit: Fit) -> tuple[list[float], list[float]]:
    low, high = fit.sizes_bytes[0], fit.sizes_bytes[-1]
    sizes = [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    return sizes, [fit.seconds_at(size) for size in sizes]


def _axis_of_sizes(sizes: Sequence[int]) -> Figure:
    low, high = min(sizes), max(sizes)
    shown = [size for size in (4096 * 16**k for k in range(8)) if low <= size <= high]
    return {
        "type": "log",
        "tickvals": shown,
        "ticktext": [format_size(size) for size in shown],
        "range": [math.log10(low) - 0.1, math.log10(high) + 0.1],
        "tickangle": 0,
    }


def _curves(link: Link) -> list[Figure]:
    """Medians and fitted curves; and how far each median is from its curve."""
    data: list[Figure] = []
    rest: list[Figure] = []
    named = curves(link)
    for (name, fit), (color, symbol) in zip(named.items(), _STYLES, strict=False):
        sizes, seconds = _line(fit)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": sizes,
                "y": seconds,
                "line": {"color": color, "width": 1.6},
                "hoverinfo": "skip",
            }
        )
        medians = list(zip(fit.sizes_bytes, fit.seconds, strict=True))
        errors = [s / fit.seconds_at(n) - 1 for n, s in medians]
        for target, values in ((data, list(fit.seconds)), (rest, [100 * one for one in errors])):
            target.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": list(fit.sizes_bytes),
                    "y": values,
                    "marker": {"color": color, "symbol": symbol, "size": 8},
                    "hovertext": [
                        f"{name}<br>{format_size(n)}: {seconds_text(s)}, {e:+.1%} off the curve"
                        for (n, s), e in zip(medians, errors, strict=True)
                    ],
                    "hoverinfo": "text",
                }
            )
    sizes_axis = _axis_of_sizes([n for fit in named.values() for n in fit.sizes_bytes])
    times = [s for fit in named.values() for s in fit.seconds]
    marks = ticks(min(times), max(times))
    return [
        figure(
            "curves",
            "Seconds against bytes: medians as marks, what was fitted as lines. Flat where latency "
            "rules, climbing where bandwidth does.",
            data,
            400,
            margin=_ROOM,
            xaxis=sizes_axis,
            yaxis={
                "type": "log",
                "tickvals": marks,
                "ticktext": [seconds_text(one) for one in marks],
                "range": [math.log10(min(times)) - 0.1, math.log10(max(times)) + 0.1],
            },
        ),
        figure(
            "residuals",
            "What is left: by how many percent each median is above its curve.",
            rest,
            400,
            margin=_ROOM,
            xaxis=sizes_axis,
            yaxis={"ticksuffix": " %"},
        ),
    ]


def _pairs(link: Link) -> Figure:
    shown = min(link.ranks, MOST_RANKS)
    speeds = [
        [None if one is None else one / 1e6 for one in row[:shown]]
        for row in link.pair_bytes_per_s[:shown]
    ]
    return figure(
        "pairs",
        "Bandwidth of each pair in MB/s, from the rank at the left to the rank below; darker is "
        "slower.",
        [
            {
                "type": "heatmap",
                "z": speeds,
                "x": [str(rank) for rank in range(shown)],
                "y": [str(rank) for rank in range(shown)],
                "colorscale": [[0, "#7a3b0c"], [0.5, "#e0a472"], [1, "#dfe9f2"]],
                "zmin": 0,
                "zmax": max((one for row in speeds for one in row if one is not None), default=1),
                "texttemplate": "%{z:.3g}" if shown <= 8 else "",
                "hovertemplate": "from %{y} to %{x}: %{z:.3g} MB/s<extra></extra>",
                "showscale": False,
                "xgap": 2,
                "ygap": 2,
            }
        ],
        120 + 36 * shown if shown <= 8 else 480,
        xaxis={"title": {"text": "to rank"}, "type": "category"},
        yaxis={"title": {"text": "from rank"}, "type": "category", "autorange": "reversed"},
    )


def _methods(link: Link) -> Figure:
    """Each method at the largest number of elements that all were measured with, in parts."""
    elems = max(set.intersection(*(set(one.elems) for one in link.methods)))
    at = [one.elems.index(elems) for one in link.methods]
    return stacked_bars(
        "methods",
        f"One average of {elems_text(elems)} fp32 elements, all ranks at once: "
        "what the link's curves give for the exchange, then coding, then other local work.",
        _PARTS,
        [
            (one.method, _parts(one.seconds[i], one.link_s[i], one.codec_s[i]))
            for one, i in zip(link.methods, at, strict=True)
        ],
        seconds_text,
    )


def _parts(whole: float, link: float, codec: float) -> tuple[float, float, float]:
    """Link, coding and the rest, together the whole: what overlaps is the link's."""
    link = min(link, whole)
    codec = min(codec, whole - link)
    return link, codec, whole - link - codec


# ---------------------------------------------------------------------------------------- tables


def _tables(link: Link) -> list[_Table]:
    head = ["curve", "alpha", "95 %", "bandwidth", "95 %", "of goodput", "pieces", "sizes"]
    head += ["left-out error", "90th percentile"]
    rows = []
    for name, fit in curves(link).items():
        share = share_of_goodput(link, fit) if not name.startswith("all_reduce") else None
        beta = fit.beta_s_per_byte
        rows.append(
            (
                name,
                seconds_text(fit.alpha_s.value),
                between(fit.alpha_s),
                mb_per_s(fit.bytes_per_s),
                f"{mb_per_s(1 / beta.high)} to {mb_per_s(1 / beta.low) if beta.low else '-'}",
                "-" if share is None else percent(share),
                "; ".join(map(_piece, fit.pieces)),
                f"{format_size(fit.sizes_bytes[0])} to {format_size(fit.sizes_bytes[-1])}",
                percent(fit.leave_one_out_error),
                percent(fit.leave_one_out_p90),
            )
        )
    return [
        _Table("Curves in numbers", head, rows),
        _Table("What shares the link and the cores", ["", "value", "95 %", ""], scalars(link)),
        _medians(link),
        _latencies(link),
        *([_method_table(link)] if link.methods else []),
    ]


def _piece(piece: Piece) -> str:
    where = format_size(round(piece.from_bytes))
    return f"from {where} {piece.beta_s_per_byte * 1e9:.3g} ns/B"


def _medians(link: Link) -> _Table:
    named = curves(link)
    sizes = sorted({n for fit in named.values() for n in fit.sizes_bytes})
    known = {
        name: dict(zip(fit.sizes_bytes, fit.seconds, strict=True)) for name, fit in named.items()
    }
    rows = [
        (
            format_size(size),
            *(seconds_text(known[name][size]) if size in known[name] else "-" for name in named),
        )
        for size in sizes
    ]
    return _Table("Medians", ["bytes", *named], rows)


def _latencies(link: Link) -> _Table:
    shown = range(min(link.ranks, MOST_RANKS))
    rows = []
    for a in shown:
        speeds = [link.pair_bytes_per_s[a][b] for b in shown]
        pings = [link.pair_latency_s[a][b] for b in shown]
        rows.append(
            (
                str(a),
                *(
                    "-"
                    if speed is None and ping is None
                    else f"{'' if speed is None else mb_per_s(speed)} "
                    f"{'' if ping is None else seconds_text(ping)}".strip()
                    for speed, ping in zip(speeds, pings, strict=True)
                ),
            )
        )
    return _Table("Pairs: from the rank at the left", ["from", *(f"to {b}" for b in shown)], rows)


def _method_table(link: Link) -> _Table:
    head = ["method", "elements", "seconds", "coding", "waiting", "rounds", "sent by a rank"]
    head += ["exchange by the curves", "local: fixed", "local: per element"]
    rows = []
    for one in link.methods:
        for i, elems in enumerate(one.elems):
            rows.append(
                (
                    one.method,
                    elems_text(elems),
                    seconds_text(one.seconds[i]),
                    seconds_text(one.codec_s[i]),
                    seconds_text(one.waiting_s[i]),
                    "-" if one.rounds is None else str(one.rounds[i]),
                    "-" if one.sent_bytes is None else format_size(one.sent_bytes[i]),
                    seconds_text(one.link_s[i]),
                    seconds_text(one.local_fixed_s.value),
                    f"{one.local_s_per_elem.value * 1e9:.3g} ns",
                )
            )
    return _Table("Methods", head, rows)


def html(link: Link) -> str:
    """The page."""
    by_size = _curves(link)
    pairs = _pairs(link)
    bars = [_methods(link)] if link.methods else []
    return render_page(
        "taciturn.probe",
        "page.html.jinja",
        [*by_size, pairs, *bars],
        title=headline(link),
        link=link,
        drift=percent(link.drift),
        key=[
            (name, color, GLYPHS[symbol])
            for name, (color, symbol) in zip(curves(link), _STYLES, strict=False)
        ],
        parts=_PARTS,
        by_size=by_size,
        pairs=pairs,
        bars=bars,
        tables=_tables(link),
    )

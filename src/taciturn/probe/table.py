"""A link as a terminal shows it: a headline, the fits, the pairs, the methods, and what to mind.

Pure functions from a link to a rich renderable.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taciturn.link import Estimate, Fit, Link
from taciturn.testbed import TCP_GOODPUT
from taciturn.units import format_rate, format_seconds, format_size

__all__ = [
    "between",
    "curves",
    "headline",
    "mb_per_s",
    "percent",
    "render",
    "scalars",
    "share_of_goodput",
]

MOST_RANKS = 8  # of the matrix; the JSON has all
METHOD_WIDTH = 22
_GAP = 2  # between columns: one blank and one separator, itself blank


def mb_per_s(bytes_per_s: float) -> str:
    """A bandwidth in base 10 to three digits."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def percent(share: float) -> str:
    """A share to a digit after the point, below ten percent."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def seconds_text(seconds: float) -> str:
    """A duration; 0 without a unit."""
    return "0" if seconds < 5e-10 else format_seconds(seconds)


def between(estimate: Estimate) -> str:
    """The interval of seconds."""
    return f"{seconds_text(estimate.low)} to {seconds_text(estimate.high)}"


def share_of_goodput(link: Link, fit: Fit) -> float | None:
    """Of TCP's goodput at the set rate; None if none was set."""
    if link.rate_bits_per_s is None:
        return None
    return fit.bytes_per_s / (TCP_GOODPUT * link.rate_bits_per_s / 8)


def headline(link: Link) -> str:
    """What was probed."""
    where = "one host" if link.hosts == 1 else f"{link.hosts} hosts"
    rate = link.rate_bits_per_s
    shaped = "link not shaped" if rate is None else f"links of {format_rate(rate)}"
    return (
        f"Link between {link.ranks} ranks on {where} of {link.cores} cores, {link.backend} on "
        f"{link.device}, {shaped}; probed in {format_seconds(round(link.probe_s) or 1)}"
    )


def curves(link: Link) -> dict[str, Fit]:
    """All fitted curves by what they are of."""
    named = {"one message": link.one_way, "a round, both ways": link.both_ways}
    return named | {f"all_reduce {dtype}": fit for dtype, fit in link.all_reduce.items()}


def scalars(link: Link) -> list[tuple[str, str, str, str]]:
    """Single numbers: name, value, interval, meaning."""

    def ratio(estimate: Estimate) -> tuple[str, str]:
        return f"{estimate.value:.2f}", f"{estimate.low:.2f} to {estimate.high:.2f}"

    gamma = link.gamma_s_per_byte
    rows = [
        (
            "duplex factor",
            *ratio(link.duplex_factor),
            "both ways at once / one way; 1: full duplex",
        ),
        (
            "local addition",
            mb_per_s(1 / gamma.value) if gamma.value else "-",
            f"{mb_per_s(1 / gamma.high)} to {mb_per_s(1 / gamma.low)}" if gamma.low else "-",
            "of received fp32, on all ranks at once",
        ),
        ("link beside matmul", *ratio(link.link_beside_matmul), "times as long as without"),
        ("matmul beside link", *ratio(link.matmul_beside_link), "times as long as without"),
    ]
    for one in link.contention:
        speed = one.bytes_per_s_per_pair
        rows.append(
            (
                f"{one.pairs} pair{'s' * (one.pairs > 1)} at once",
                mb_per_s(speed.value),
                f"{mb_per_s(speed.low)} to {mb_per_s(speed.high)}",
                "each, one way",
            )
        )
    return rows


def _table(title: str, *heads: str, left: int = 1) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < left else "right", overflow="fold")
    return table


def _fitting(columns: Sequence[Sequence[str]], drop: Sequence[int], width: int) -> list[int]:
    """Which columns fit side by side: those to drop are dropped in order until they do."""
    widths = [max(len(line) for text in each for line in text.split("\n")) for each in columns]
    kept = list(range(len(columns)))
    for column in drop:
        if sum(widths[i] + _GAP for i in kept) <= width:
            break
        kept.remove(column)
    return kept


def _shown(
    title: str, rows: Sequence[Sequence[str]], drop: Sequence[int], width: int, left: int = 1
) -> Table:
    """A table of what fits; the first row is the head."""
    kept = _fitting(list(zip(*rows, strict=True)), drop, width)
    table = _table(title, *(rows[0][i] for i in kept), left=left)
    for row in rows[1:]:
        table.add_row(*(Text(row[i]) for i in kept))
    return table


def _curves(link: Link, width: int) -> Table:
    head = ["curve", "alpha", "95 %", "bandwidth", "95 %", "of\ngoodput", "pieces", "sizes"]
    head += ["left-out\nerror", "90th\npercentile"]
    rows = [head]
    for name, fit in curves(link).items():
        share = share_of_goodput(link, fit) if not name.startswith("all_reduce") else None
        beta = fit.beta_s_per_byte
        high = mb_per_s(1 / beta.low) if beta.low else "-"
        rows.append(
            [
                name,
                seconds_text(fit.alpha_s.value),
                between(fit.alpha_s),
                mb_per_s(fit.bytes_per_s),
                f"{mb_per_s(1 / beta.high)} to {high}",
                "-" if share is None else percent(share),
                str(len(fit.pieces)),
                f"{format_size(fit.sizes_bytes[0])} to {format_size(fit.sizes_bytes[-1])}",
                percent(fit.leave_one_out_error),
                percent(fit.leave_one_out_p90),
            ]
        )
    return _shown("Curves: seconds = alpha + bytes / bandwidth", rows, (6, 2, 4, 9, 7), width)


def _scalars(link: Link, width: int) -> Table:
    rows = [("", "value", "95 %", ""), *scalars(link)]
    table = _shown("What shares the link and the cores", rows, (3, 2), width)
    if len(table.columns) == 4:
        table.columns[3].justify = "left"
    return table


def _pairs(link: Link) -> Table:
    shown = range(min(link.ranks, MOST_RANKS))
    table = _table(
        "Pairs: bandwidth in MB/s, and latency in us", "from \\ to", *map(str, shown), left=0
    )
    for sender in shown:
        cells = []
        for receiver in shown:
            speed = link.pair_bytes_per_s[sender][receiver]
            latency = link.pair_latency_s[sender][receiver]
            odd = (sender, receiver) in link.slow_links or link.slow_rank in (sender, receiver)
            text = "" if speed is None else f"{speed / 1e6:.3g}"
            text += "" if latency is None else f" {latency * 1e6:.0f}"
            cells.append(Text(text.strip() or "-", style="yellow" if odd and text else ""))
        table.add_row(str(sender), *cells)
    return table


def _methods(link: Link, width: int) -> Table:
    # Those that all were measured with, and of each its own largest.
    sizes = sorted(set.intersection(*(set(speed.elems) for speed in link.methods)))
    more = any(speed.elems[-1] not in sizes for speed in link.methods)
    head = [*(f"{elems_text(n)}\nelements" for n in sizes), *["more"] * more]
    rows = [["method", *head, "beyond the link"]]
    for speed in link.methods:
        known = {
            n: f"{seconds_text(whole)} ({seconds_text(codec)})"
            for n, whole, codec in zip(speed.elems, speed.seconds, speed.codec_s, strict=True)
        }
        cells = [known[n] for n in sizes]
        if more:
            last = speed.elems[-1]
            cells.append("-" if last in sizes else f"{elems_text(last)}: {known[last]}")
        local = speed.local_s_per_elem.value * 1e9
        cells.append(f"{seconds_text(speed.local_fixed_s.value)} + {local:.3g} ns/element")
        rows.append([_wrapped(speed.method), *cells])
    last = len(rows[0]) - 1
    title = "Methods: seconds of an average of fp32 gradients (of which coding)"
    return _shown(title, rows, (last,), width)


def _wrapped(method: str) -> str:
    """A method in lines that end with its commas, where it is long."""
    lines = [""]
    for piece in method.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > METHOD_WIDTH:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def elems_text(elems: int) -> str:
    """A number of elements, in base 2 where it is round."""
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if elems % size == 0:
            return f"{elems // size} {unit}"
    return str(elems)


def render(link: Link, width: int) -> RenderableType:
    """The link as tables, one below the other.

    Args:
        link: as probed.
        width: of the terminal in columns; 80 shows the essentials, 100 and more the rest.
    """
    parts: list[RenderableType] = [Text(headline(link), style="bold"), Text()]
    for table in (_curves(link, width), _scalars(link, width), _pairs(link)):
        parts += [table, Text()]
    if link.methods:
        parts += [_methods(link, width), Text()]
    parts.append(
        Text(
            f"The two sweeps differ by {percent(link.drift)} in the median. Left-out error: of "
            "predicting each size from all others. Goodput: TCP's at the set rate, 0.956 of it.",
            style="dim",
        )
    )
    parts += [Text(one, style="yellow") for one in link.warnings]
    return Group(*parts)

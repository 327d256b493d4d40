"""Tables in the docs, made anew from the committed results.

``python benchmarks/doc_tables.py`` rewrites every table that stands in ``docs/`` between the lines
``<!-- measured: NAME -->`` and ``<!-- end of NAME -->``. A test holds the docs to the files.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ddp_losses
import local_updates
from headline import claims
from taciturn.units import format_rate

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
CASES = ((4, 10**8), (4, 10**9), (4, None), (8, 10**8), (8, 10**9))


def rows_of(name: str) -> list[Row]:
    """Return the rows of a committed result."""
    rows: list[Row] = json.loads((HERE / name).read_text("utf-8"))
    return rows


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def steps() -> str:
    """Return step times by method, as ratios to stock DDP in fp32."""
    found = {(r["method"], r["ranks"], r["rate_bits_per_s"]): r for r in rows_of("ddp_step.json")}
    lines = []
    for method in dict.fromkeys(method for method, *_ in found):
        first = found[method, *CASES[0]]
        sent, codec = first["sent_bytes_per_step"], first["codec_s"]
        ratios = [f"{found[method, *case]['ratio_to_ddp_fp32']:.2f}" for case in CASES]
        costs = [
            f"{sent / 1e6:.2f}" if sent else "-",
            "-" if codec is None else f"{codec * 1e3:.0f}",
        ]
        lines.append([f"`{method}`", *ratios, *costs])
    head = ["method", "4 x 100 Mbit/s", "4 x 1 Gbit/s", "4, unshaped", "8 x 100 Mbit/s"]
    return markdown(
        [*head, "8 x 1 Gbit/s", "sent, MB (4 ranks)", "codec, ms (4 x 100)"],
        lines,
    )


def losses() -> str:
    """Return losses by method, as ratios to stock DDP in fp32."""
    rows = ddp_losses.with_ratios(rows_of("ddp_losses.json"))
    base = {r["seed"]: r["final_loss"] for r in rows if r["method"] == "ddp fp32"}
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        some = [r for r in rows if r["method"] == method]
        ratio, half = ddp_losses.interval([r["loss_ratio_to_fp32"] for r in some])
        single = statistics.fmean(r["single_replica_loss"] / base[r["seed"]] for r in some)
        lines.append(
            [
                f"`{method}`",
                str(len(some)),
                "1" if method == "ddp fp32" else f"{ratio:.4f} ± {half:.4f}",
                f"{single:.4f}",
                f"{statistics.fmean(r['spread'] for r in some):.3f}",
                f"{statistics.fmean(r['gradient_error'] for r in some):.1e}",
                f"{statistics.fmean(r['gradient_spread'] for r in some):.1e}",
            ]
        )
    head = ["method", "seeds", "ratio to fp32", "single", "spread of parameters"]
    return markdown([*head, "gradient error", "gradient spread"], lines)


def local(sequences: int, trained: int = 0) -> str:
    """Return local updates with so many sequences in a rank's batch, after so many steps of DDP."""
    rows = local_updates.with_ratios(rows_of("local_updates.json"))
    rows = [r for r in rows if (r["sequences"], r.get("trained", 0)) == (sequences, trained)]
    lines = []
    for split in dict.fromkeys(r["split"] for r in rows):
        for method in local_updates.METHODS:
            by_rate: dict[float, list[Row]] = {}
            for row in rows:
                if (row["method"], row["split"]) == (method, split):
                    by_rate.setdefault(row["rate"], []).append(row)
            if by_rate:  # step sizes are compared on the first seed, which all have
                lines.append(_local_line(method, split, min(by_rate.values(), key=_first_loss)))
    head = ["method", "data", "rate", "seeds", "val loss", "ratio to DDP", "wall, s", "exchanges"]
    return markdown([*head, "sent, bytes/token", "exposed, s", "hidden", "drift"], lines)


def _first_loss(rows: list[Row]) -> float:
    return float(next(r for r in rows if not r["seed"])["val_loss"])


def _local_line(method: str, split: str, rows: list[Row]) -> list[str]:
    ratio, half = ddp_losses.interval([r["loss_ratio_to_ddp"] for r in rows])
    keys = ("val_loss", "wall_s", "sent_bytes_per_token", "exposed_s", "exchange_s", "drift")
    mean = {key: statistics.fmean(r[key] for r in rows) for key in keys}
    stock = method.startswith("DDP")
    return [
        method,
        split,
        f"{rows[0]['rate']:.0e}",
        str(len(rows)),
        f"{mean['val_loss']:.3f}",
        f"{ratio:.3f}" + (f" ± {half:.3f}" if 0 < half < math.inf else ""),
        f"{mean['wall_s']:.0f}",
        str(rows[0]["sync_count"]),
        f"{mean['sent_bytes_per_token']:.1f}",
        f"{mean['exposed_s']:.1f}",
        "-" if stock else f"{1 - mean['exposed_s'] / mean['exchange_s']:.0%}",
        f"{mean['drift']:.2f}",
    ]


def regret() -> Row:
    """Return how good plans were."""
    found: Row = json.loads((HERE / "plan_regret.json").read_text("utf-8"))
    return found


def plan_links() -> str:
    """Return what probes found, and how the backend's all_reduce of other sizes was foretold."""
    links = sorted(regret()["links"], key=lambda r: (r["ranks"], r["rate_bits_per_s"] or math.inf))
    lines = [
        [
            f"{r['ranks']} x {format_rate(r['rate_bits_per_s'])}",
            f"{r['probe_s']:.0f}",
            "-" if r["beta_over_goodput"] is None else f"{r['beta_over_goodput']:.3f}",
            f"{r['unseen_median_error']:.1%}",
            f"{r['unseen_p90_error']:.0%}",
        ]
        for r in links
    ]
    return markdown(["ranks, link", "probe, s", "beta", "off by, median", "90th percentile"], lines)


def plan_choices() -> str:
    """Return of each quality how often the choice was within 5 % of the best."""
    lines = [
        [
            quality,
            str(len(of["cells"])),
            f"{of['share_within_5_percent']:.0%}",
            f"{of['share_within_5_percent_by_measuring']:.0%}",
        ]
        for quality, of in regret()["by_quality"].items()
    ]
    return markdown(["quality", "cells", "plan", "measuring each once"], lines)


def plan_cells() -> str:
    """Return what was chosen in each cell, beside the best."""
    cells = sorted(
        regret()["cells"], key=lambda r: (r["model"], r["ranks"], r["rate_bits_per_s"] or math.inf)
    )
    lines = [
        [
            r["model"],
            f"{r['ranks']} x {format_rate(r['rate_bits_per_s'])}",
            f"`{r['chosen']}`",
            f"{1e3 * r['chosen_s']:.0f}",
            "the same" if r["best"] == r["chosen"] else f"`{r['best']}`",
            f"{1e3 * r['best_s']:.0f}",
            f"{1e3 * r['ddp_bf16_s']:.0f}",
        ]
        for r in cells
    ]
    head = ["model", "ranks, link", "chosen", "step, ms", "best", "step, ms"]
    return markdown([*head, "DDP in bf16, ms"], lines)


def reported() -> str:
    """Return what CERAR's abstract reports, and what is measured here."""
    return markdown(["claim", "reported", "measured here"], claims.lines())


def aims() -> str:
    """Return what the headline experiment aims for, and whether that is met."""
    return markdown(["aim", "measured", ""], claims.aims())


def verdicts(folder: Path) -> str:
    """Return the time ratios of a comparison's methods, by network."""
    return markdown(*claims.verdicts(folder))


TABLES: dict[str, Callable[[], str]] = {
    "steps of DDP": steps,
    "losses of DDP": losses,
    "local updates, 2 sequences": lambda: local(2),
    "local updates, 16 sequences": lambda: local(16),
    "local updates, from trained weights": lambda: local(2, 1024),
    "plan: links": plan_links,
    "plan: choices": plan_choices,
    "plan: cells": plan_cells,
    "CERAR's claims": reported,
    "headline: aims": aims,
    "headline": lambda: verdicts(claims.COMPOSED),
    "headline, direct": lambda: verdicts(claims.DIRECT),
}


def renewed(page: str) -> str:
    """Return a page with its tables made anew; raises KeyError for one that is not known."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[3]}"

    pattern = r"(<!-- measured: ([^>]+?) -->).*?(<!-- end of \2 -->)"
    return re.sub(pattern, table, page, flags=re.S)


def main() -> None:
    """Rewrite the docs."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text("utf-8")
        if (new := renewed(page)) != page:
            path.write_text(new, "utf-8")
            print(f"{path.relative_to(DOCS.parent)}: tables made anew")


if __name__ == "__main__":
    main()

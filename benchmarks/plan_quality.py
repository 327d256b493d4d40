"""Make ``src/taciturn/plan/quality.json`` from the tables of losses beside this file.

``python benchmarks/plan_quality.py`` writes it anew; a test compares.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "src" / "taciturn" / "plan" / "quality.json"


def summary() -> dict[str, dict[str, Any]]:
    """Return a row for each method."""
    rows: dict[str, dict[str, Any]] = {}
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in json.loads((HERE / "ddp_losses.json").read_text()):
        by_method[row["method"]].append(row)
    for method, some in by_method.items():
        source = (
            f"benchmarks/ddp_losses.json: {some[0]['ranks']} ranks, {some[0]['steps']} steps of a "
            "GPT of 0.4 million parameters, against fp32"
        )
        rows[method] = _row([row["loss_ratio_to_fp32"] for row in some], source) | {
            "error": float(f"{mean(row['gradient_error'] for row in some):.3g}"),
            "spread": float(f"{mean(row['gradient_spread'] for row in some):.3g}"),
        }
    by_method.clear()
    for row in json.loads((HERE / "local_updates.json").read_text()):
        by_method[row["method"]].append(row)
    for method, some in by_method.items():
        # A method's value is that of its best step size, for each split, batch, start and seed.
        by_run: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for row in some:
            key = (row["split"], row["sequences"], row.get("trained", 0), row["seed"])
            by_run[key].append(row["loss_ratio_to_ddp"])
        best = [min(ratios) for _, ratios in sorted(by_run.items())]
        source = (
            f"benchmarks/local_updates.json: {some[0]['ranks']} ranks, {some[0]['steps']} steps of "
            "a GPT of 0.4 million parameters, best of its step sizes, against DDP at its own"
        )
        rows[method] = _row(best, source) | {"error": None, "spread": None}
    return rows


def _row(ratios: list[float], source: str) -> dict[str, Any]:
    return {
        "ratio": round(mean(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
        "runs": len(ratios),
        "source": source,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(summary(), indent=1) + "\n")
    print(f"{TARGET}: {len(summary())} methods")

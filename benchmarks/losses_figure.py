"""Draw ``docs/losses.svg`` from ``ddp_losses.json``: loss against steps, by method.

``python benchmarks/losses_figure.py`` needs matplotlib (``pip install -e '.[figures]'``). Curves
are means over seeds and over ``SMOOTH`` steps; the right part shows them over fp32's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "docs" / "losses.svg"
BASE = "ddp fp32"
DRAWN = {
    BASE: "fp32",
    "quantized:bits=8": "quantized:bits=8",
    "quantized:bits=4,feedback=true": "quantized:bits=4, feedback",
    "coded:passes=4": "coded:passes=4",
    "coded:passes=4,code=fourier,shuffle=true": "coded:passes=4, Fourier",
    "coded:passes=16,code=fourier,shuffle=true,wire=bf16": "coded:passes=16, Fourier, bf16",
    "powersgd:rank=4": "powersgd:rank=4",
    "powersgd:rank=4,alternate=true": "powersgd:rank=4, alternate",
    "topk:ratio=0.01": "topk:ratio=0.01",
}
SMOOTH = 20


def curve(rows: list[dict[str, Any]], method: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the mean loss of each ``SMOOTH`` steps, over all seeds of a method."""
    curves = np.array([row["curve"] for row in rows if row["method"] == method])
    mean: np.ndarray[Any, np.dtype[np.float64]] = curves.mean(0).reshape(-1, SMOOTH).mean(1)
    return mean


def main() -> None:
    """Read the rows, draw, write the file."""
    rows = json.loads((HERE / "ddp_losses.json").read_text())
    mpl.rcParams.update({"svg.hashsalt": "taciturn", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    base = curve(rows, BASE)
    steps = np.arange(len(base)) * SMOOTH + SMOOTH / 2
    for number, (method, name) in enumerate(DRAWN.items()):
        look = {"color": f"C{number}", "linestyle": "-" if number % 2 else "--", "linewidth": 1.4}
        left.plot(steps, curve(rows, method), **look)
        right.plot(steps, curve(rows, method) / base, label=name, **look)
    left.set(xlabel="steps", ylabel="training loss, nats per byte")
    right.set(xlabel="steps", ylabel="loss over fp32's", ylim=(0.98, 1.12))
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()

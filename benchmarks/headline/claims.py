"""What CERAR's abstract reports (arXiv:2609.23898), and what is measured here, claim by claim.

``python benchmarks/headline/claims.py`` times raw all-reduces of 8 ranks with ``taciturn bench``,
those that ``raw/`` has no file of yet, and prints the table. Its other lines are computed from the
records of the headline experiment, in ``composed/``, and from ``../plan_regret.work.jsonl``, whose
steps are those of models of two sizes. ``../doc_tables.py`` puts these tables into the docs.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from taciturn.compare import Outcome, Records, Row, Run, outcome_of, read_experiment
from taciturn.compare.conduct import RECORDS
from taciturn.compare.intervals import RatioInterval
from taciturn.compare.verdict import FASTER, NOT_SHOWN, SLOWER

Line = tuple[str, str, str]

HERE = Path(__file__).resolve().parent
RAW, COMPOSED, DIRECT = HERE / "raw", HERE / "composed", HERE / "direct"
STEPS = HERE.parent / "plan_regret.work.jsonl"
RANKS = 8
RAW_CASES = {
    "50mbit": "1MiB,4MiB,16MiB",
    "200mbit": "1MiB,4MiB,16MiB,64MiB",
    "1gbit": "1MiB,4MiB,16MiB,64MiB",
    "unshaped": "1MiB,4MiB,16MiB,64MiB",
}
SLOW, FAST = "50mbit", "unshaped"
POLYNOMIAL, FOURIER = "coded:passes=4", "coded:passes=16,code=fourier"
NARROW = "coded:passes=16,code=fourier,shuffle=true,wire=bf16"
RAW_METHODS = ("backend", "backend:wire=bf16", "ring", POLYNOMIAL, FOURIER, NARROW)
CODED_STEPS = (POLYNOMIAL, NARROW)
FP32, BF16 = "ddp:wire=fp32,bucket={bucket}", "ddp:wire=bf16,bucket={bucket}"
SHUFFLED = "coded:passes=16,code=fourier,shuffle=true"
MIB = 1 << 20
AUTO = "auto:quality=loss"
SOONER = {"50mbit": 3.0, "200mbit": 1.5}
"""What ``auto`` is to gain, set before anything was measured."""
LESS_TIME = 0.75


def measure_raw() -> None:
    """Time the raw all-reduces of each network that has no file yet."""
    RAW.mkdir(exist_ok=True)
    for rate, sizes in RAW_CASES.items():
        out = RAW / f"{rate}.json"
        if not out.exists():
            command = ["bench", "--ranks", str(RANKS), "--rate", rate, "--size", sizes]
            options = ["--methods", "; ".join(RAW_METHODS), "--json", str(out)]
            subprocess.run([sys.executable, "-m", "taciturn", *command, *options], check=True)


def raw_ratios(rate: str) -> dict[str, dict[int, float]]:
    """Return each method's time over the backend's fp32 all-reduce, by bytes of the buffer."""
    found: dict[str, dict[int, float]] = {}
    for row in json.loads((RAW / f"{rate}.json").read_text("utf-8")):
        found.setdefault(row["method"], {})[row["buffer_bytes"]] = row["ratio_to_backend"]
    return found


def percent(ratio: float) -> str:
    """Return how much more or less than 1 a ratio is."""
    return f"{ratio - 1:+.0%}".replace("-", "\N{MINUS SIGN}")


def by_size(ratios: dict[int, float]) -> str:
    """Return ratios with the sizes they belong to."""
    return ", ".join(f"{percent(r)} ({size // MIB} MiB)" for size, r in sorted(ratios.items()))


def raw_line(rate: str, reported: str) -> Line:
    """Return the line of raw all-reduces on one network."""
    found = raw_ratios(rate)
    told = "; ".join(f"`{m}` {by_size(found[m])}" for m in (POLYNOMIAL, FOURIER))
    narrow, bf16 = found[NARROW], found["backend:wire=bf16"]
    against = {size: narrow[size] / bf16[size] for size in narrow}
    return (
        f"raw all-reduce, {rate}",
        reported,
        f"{told}; on bf16 wires against the backend in bf16: {by_size(against)}",
    )


def bytes_line() -> Line:
    """Return the line of bytes sent."""
    rows = json.loads((RAW / f"{SLOW}.json").read_text("utf-8"))
    size = max(row["buffer_bytes"] for row in rows)
    sent = {r["method"]: r["sent_bytes_per_rank"] for r in rows if r["buffer_bytes"] == size}
    coded = [1 + (RANKS - 2) / passes for passes in (4, 16)]
    exact = all(r["counts_equal_formula"] for r in rows if r["sent_bytes_per_rank"] is not None)
    shown = ", ".join(f"`{m}` {sent[m] / size:.4f}" for m in ("ring", POLYNOMIAL, FOURIER))
    return (
        f"bytes sent per rank, over the buffer's, N = {RANKS}",
        f"1 + (N - 2) / c: {coded[0]:.4f}, {coded[1]:.4f}; exact ring {2 - 2 / RANKS:.4f}",
        f"{shown}; every count equals its formula: {'yes' if exact else 'no'}",
    )


def whole_time(run: Run) -> float:
    """Return the seconds of all steps of a run; infinite of one that failed."""
    return run.points[-1].seconds if run.points and run.failure is None else math.inf


def of_equal_steps(
    outcome: Outcome, regime: str, method: str, baseline: str
) -> tuple[RatioInterval, RatioInterval]:
    """Return training time and final value of equal steps, over the baseline's."""
    runs = next(r for r in outcome.regimes if r.name == regime).runs
    base = {run.seed: run for run in runs[baseline]}
    pairs = [(run, base[run.seed]) for run in runs[method] if run.seed in base]
    return (
        RatioInterval.of([whole_time(a) / whole_time(b) for a, b in pairs]),
        RatioInterval.of([a.final / b.final for a, b in pairs]),
    )


def equal_steps(outcome: Outcome, regime: str, method: str, baseline: str) -> str:
    """Return the same in words."""
    time, final = of_equal_steps(outcome, regime, method, baseline)
    return (
        f"`{method}` time {percent(time.ratio)} (95 % {percent(time.low)} to "
        f"{percent(time.high)}), final value {final.ratio:.3f} ({final.low:.3f} to "
        f"{final.high:.3f})"
    )


def training_line(outcome: Outcome, regime: str, reported: str) -> Line:
    """Return the line of training at equal steps on one network."""
    against = ((POLYNOMIAL, FP32), (SHUFFLED, FP32), (NARROW, BF16))
    told = (equal_steps(outcome, regime, method, base) for method, base in against)
    return f"training time at equal iterations, {regime}", reported, "; ".join(told)


def size_line() -> Line:
    """Return the line of how the gap to DDP changes with the model's size on a fast network."""
    rows = [json.loads(line) for line in STEPS.read_text("utf-8").splitlines()]
    cells = {
        r["model"]: r["methods"]
        for r in rows
        if (r["kind"], r["ranks"], r["rate"]) == ("cell", RANKS, FAST)
    }

    def step_s(model: str, method: str) -> float:
        return statistics.median(s for one in cells[model][method] for s in one["steps_s"])

    told = []
    for method in CODED_STEPS:
        base = "DDP, bf16 hook" if "bf16" in method else "DDP, fp32"
        ratios = [f"{percent(step_s(m, method) / step_s(m, base))} ({m})" for m in sorted(cells)]
        told.append(f"`{method}` {', '.join(ratios)}")
    return (
        f"step of a larger model, {FAST}",
        "the gap narrows",
        "; ".join(told),
    )


def outcome_in(folder: Path) -> Outcome:
    """Return what the records of a folder say."""
    return outcome_of(read_experiment(folder / "experiment.toml"), Records(folder / RECORDS))


def lines() -> Iterator[Line]:
    """Yield claim, what is reported, what is measured, of all that there are measurements of."""
    yield bytes_line()
    for rate in RAW_CASES:
        reported = {SLOW: f"up to {percent(0.53)} (PCIe)", FAST: "slower (NVLink)"}
        yield raw_line(rate, reported.get(rate, "-"))
    if (COMPOSED / RECORDS).exists():
        outcome = outcome_in(COMPOSED)
        for regime in outcome.regimes:
            reported = {
                SLOW: f"{percent(0.83)}, validation loss essentially identical (PCIe)",
                FAST: "slightly slower (NVLink)",
            }
            if regime.runs:
                yield training_line(outcome, regime.name, reported.get(regime.name, "-"))
    yield size_line()


def aims() -> Iterator[Line]:
    """Yield each aim of the experiment, what is measured, and whether that is met."""
    outcome = outcome_in(COMPOSED)
    rows = {row.regime: row for r in outcome.regimes for row in r.rows if row.method == AUTO}
    for regime, factor in SOONER.items():
        row = rows[regime]
        met = row.verdict == FASTER and row.time_ratio is not None and row.time_ratio * factor <= 1
        told = f"ratio {verdict_text(row)}, {row.verdict}"
        yield f"`auto` at {regime}: at least {factor:g} x sooner", told, "met" if met else "missed"
    slower = [name for name, row in rows.items() if row.verdict == SLOWER]
    told = ", ".join(f"{name} {row.verdict}" for name, row in rows.items())
    yield "`auto`: never shown slower", told, "missed" if slower else "met"
    time, final = of_equal_steps(outcome, SLOW, NARROW, BF16)
    ring = f"`{NARROW}` at {SLOW}, against bf16 DDP, {outcome.experiment.steps} steps each"
    yield (
        f"{ring}: training time at least {percent(LESS_TIME)}",
        f"{percent(time.ratio)} (95 % {percent(time.low)} to {percent(time.high)})",
        "met" if time.high <= LESS_TIME else "missed",
    )
    yield (
        f"{ring}: equal loss",
        f"{final.ratio:.4f} ({final.low:.4f} to {final.high:.4f})",
        "met" if final.low <= 1 <= final.high else "missed",
    )


def verdicts(folder: Path = COMPOSED) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table of time ratios, a column for each network."""
    regimes = [r for r in outcome_in(folder).regimes if r.rows]
    of = {(row.method, row.regime): row for regime in regimes for row in regime.rows}
    methods = dict.fromkeys(method for method, _ in of)
    head = ["method", *(regime.name for regime in regimes)]
    return head, [
        [f"`{method}`", *(verdict_text(of[method, regime.name]) for regime in regimes)]
        for method in methods
    ]


def verdict_text(row: Row) -> str:
    """Return a ratio with its interval, in bold where it is shown, and who did not get there."""
    if row.time_ratio is None:
        return f"reached by {row.reached} of {row.runs}"
    assert row.time_ratio_low is not None
    assert row.time_ratio_high is not None
    text = f"{row.time_ratio:.2f} ({row.time_ratio_low:.2f} to {row.time_ratio_high:.2f})"
    return text if row.verdict == NOT_SHOWN else f"**{text}**"


if __name__ == "__main__":
    measure_raw()
    for claim, reported, measured in lines():
        print(f"{claim}\n  reported: {reported}\n  measured: {measured}")

"""Time of a data-parallel step by method, on emulated links, as a ratio to stock DDP in the run.

``python benchmarks/ddp_step.py --json benchmarks/ddp_step.json`` takes about ten minutes on two
cores. Every method has a model of its own in the same processes; the steps of all methods are
interleaved, each behind a barrier, and a step's time is that of the slowest rank. ``--losses``
trains instead (``ddp_losses.py``): every method for ``--steps`` steps, with ``--seeds`` seeds, on
unshaped links; rows that its file has already are kept, so a long run may be cut and gone on with.

The model is a byte-level GPT of about 3 million parameters on the source of Python's standard
library. Its batch is small, so that compute is a few per cent of the stock step at 100 Mbit/s and 4
ranks; the output states it. 8 ranks on two cores are bound by the cores: see ``cpu_bound``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_losses
from ddp_trainee import METHODS, STOCK, Trainee, mean, slowest
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.testbed import Testbed
from taciturn.units import parse_rate

PARAMETERS = 3_000_000
CASES = ((4, "100mbit"), (4, "1gbit"), (4, "unshaped"), (8, "100mbit"), (8, "1gbit"))
COMPUTE_SHARE = 0.05
LOSS_RANKS = 4
TIMEOUT_S = 20_000.0


def timed(run: Callable[[], object]) -> float:
    """Return the slowest rank's seconds behind a barrier."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return slowest(time.perf_counter() - start)


def measure_steps(methods: list[str], repeats: int) -> list[dict[str, Any]]:
    """Time the steps of all methods, interleaved."""
    text = inputs.corpus()
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    trainees = [Trainee(method, PARAMETERS, 1e-3, 0) for method in methods]
    batches = [inputs.draw_batch(text, 1, generator)[:, :33] for _ in range(2 + repeats)]
    times: dict[str, list[float]] = {method: [] for method in methods}
    codec: dict[str, list[float]] = {method: [] for method in methods}
    compute: list[float] = []
    backward: dict[str, list[float]] = {method: [] for method in methods}
    for number, batch in enumerate(batches):
        for trainee in trainees:
            seconds = timed(lambda t=trainee, b=batch: t.step(b))  # type: ignore[misc]
            metrics = trainee.comm.metrics() if trainee.comm is not None else None
            if number >= 2:
                times[trainee.method].append(seconds)
                codec[trainee.method].append(mean(metrics.codec_s) if metrics else 0.0)
                backward[trainee.method].append(mean(trainee.backward_s(batch, exchange=True)))
        if number >= 2:
            dist.barrier()
            first = trainees[0]
            compute.append(mean(first.backward_s(batch, exchange=False)) * 1.5)
    rows = []
    base = statistics.median(times["ddp fp32"])
    for trainee in trainees:
        method = trainee.method
        metrics = trainee.comm.metrics() if trainee.comm is not None else None
        rows.append(
            {
                "method": method,
                "step_s": statistics.median(times[method]),
                "step_s_all": times[method],
                "ratio_to_ddp_fp32": statistics.median(times[method]) / base,
                "codec_s": statistics.median(codec[method]) if metrics else None,
                "sent_bytes_per_step": metrics.sent_bytes
                if metrics and metrics.sent_bytes
                else None,
                "waiting_s": metrics.waiting_s if metrics else None,
                "residual_bytes": metrics.residual_bytes if metrics else 0,
                "backward_s": statistics.median(backward[method]),
                "backward_alone_s": statistics.median(compute) / 1.5,
                "compute_share": statistics.median(compute) / base,
            }
        )
        if trainee.comm is not None:
            trainee.comm.close()
    return rows


def rank_main(job: dict[str, Any]) -> None:
    """Run on every rank: measure, and have rank 0 write the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = Path(job["out"])
    if job["losses"]:
        ddp_losses.measure_missing(job["methods"], job["seeds"], job["steps"], out)
    else:
        rows = measure_steps(job["methods"], job["repeats"])
        if dist.get_rank() == 0:
            out.write_text(json.dumps(rows))
    dist.barrier()
    end_rank(0)


def run_ranks(ranks: int, rate: int | None, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks and return the rows that they wrote."""
    with Testbed(ranks=ranks, rate=rate) as testbed:
        environment = {"TACITURN_DDP_STEP": json.dumps(job)}
        testbed.run([sys.executable, __file__], timeout_s=TIMEOUT_S, env=environment).check()
    rows: list[dict[str, Any]] = json.loads(Path(job["out"]).read_text())
    return rows


def run_case(ranks: int, rate: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the steps of all methods on links of one rate."""
    bits = None if rate == "unshaped" else parse_rate(rate)
    rows = run_ranks(ranks, bits, job)
    for row in rows:
        row["ranks"] = ranks
        row["rate_bits_per_s"] = bits
        row["cpu_bound"] = ranks > 2 * (os.cpu_count() or 1) and rate != "100mbit"
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as lines of text."""
    lines = []
    for row in rows:
        sent = row["sent_bytes_per_step"]
        codec = row["codec_s"]
        lines.append(
            f"{row['method']:55} {row['step_s'] * 1e3:6.0f} ms ratio {row['ratio_to_ddp_fp32']:.3f}"
            f"  codec {'-' if codec is None else format(codec * 1e3, '.0f'):>4} ms"
            f"  sent {'-' if sent is None else format(sent / 1e6, '.2f'):>6} MB"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--losses", action="store_true", help="final losses instead of step times")
    parser.add_argument("--steps", type=int, default=300, help="of a run with --losses")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each method with --losses")
    parser.add_argument("--methods", default=";".join(METHODS), help="with ; between them")
    parser.add_argument(
        "--cases", default=",".join(f"{n}x{rate}" for n, rate in CASES), help="as 4x100mbit,4x1gbit"
    )
    arguments = parser.parse_args()
    methods = [*STOCK, *(m.strip() for m in arguments.methods.split(";") if m.strip())]
    with tempfile.TemporaryDirectory() as folder:
        job = {key: getattr(arguments, key) for key in ("losses", "repeats", "steps", "seeds")}
        job |= {"methods": methods, "out": str(Path(folder) / "rows.json")}
        if arguments.losses:
            if arguments.json:
                job["out"] = str(arguments.json.resolve())
            print(ddp_losses.table(run_ranks(LOSS_RANKS, None, job)))
            return
        rows: list[dict[str, Any]] = []
        for case in arguments.cases.split(","):
            ranks, _, rate = case.partition("x")
            found = run_case(int(ranks), rate, job)
            share = found[0]["compute_share"]
            print(
                f"\n{ranks} ranks, links of {rate}; compute is {share:.1%} of the stock fp32 step"
            )
            if int(ranks) == 4 and rate == "100mbit" and share > COMPUTE_SHARE:
                print(f"more than the {COMPUTE_SHARE:.0%} meant: the machine is busy")
            print(table(found), flush=True)
            rows += found
            if arguments.json:  # after every case: a long run can be cut short
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if "TACITURN_DDP_STEP" in os.environ:
        rank_main(json.loads(os.environ["TACITURN_DDP_STEP"]))
    else:
        main()

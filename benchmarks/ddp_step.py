"""Time of a data-parallel step by method, on emulated links, as a ratio to stock DDP in the run.

``python benchmarks/ddp_step.py --json benchmarks/ddp_step.json`` takes about ten minutes on two
cores. Every method has a model of its own in the same processes; the steps of all methods are
interleaved, each behind a barrier, and a step's time is that of the slowest rank. ``--losses``
trains every method for ``--steps`` steps on the same data, on loopback, and adds the final losses.

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.bench import inputs
from taciturn.replicas import spread
from taciturn.testbed import Testbed
from taciturn.units import parse_rate

PARAMETERS = 3_000_000
LOSS_PARAMETERS = 600_000
STOCK = ("ddp fp32", "ddp fp16 hook")
METHODS = (
    "backend",
    "cast:wire=bf16",
    "quantized:bits=8",
    "quantized:bits=4,feedback=true",
    "coded:passes=4",
    "coded:passes=4,code=fourier,shuffle=true",
    "coded:passes=16,code=fourier,shuffle=true,wire=bf16",
    "powersgd:rank=4",
    "powersgd:rank=4,alternate=true",
    "topk:ratio=0.01",
)
CASES = ((4, "100mbit"), (4, "1gbit"), (4, "unshaped"), (8, "100mbit"), (8, "1gbit"))
COMPUTE_SHARE = 0.05
TIMEOUT_S = 120.0


class Trainee:
    """One method's model, optimizer and communicator, on one rank."""

    def __init__(self, method: str, parameters: int, rate: float, resync_every: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        net = inputs.GPT(inputs.gpt_shape(parameters), generator)
        self.method = method
        self.model = DistributedDataParallel(net)
        self.comm: ddp.Communicator | None = None
        if method == "ddp fp16 hook":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif method not in STOCK:
            self.comm = ddp.attach(
                self.model, method, resync_every=resync_every, timeout_s=TIMEOUT_S
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01)

    def step(self, batch: torch.Tensor) -> float:
        """Take one optimizer step; return the loss of this rank's batch."""
        loss = inputs.GPT.loss(self.model, batch)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def backward_s(self, batch: torch.Tensor, exchange: bool) -> float:
        """Return the seconds of backward alone, with or without the exchange beside it."""
        self.optimizer.zero_grad()
        if exchange:
            loss = inputs.GPT.loss(self.model, batch)  # type: ignore[arg-type]
            start = time.perf_counter()
            loss.backward()
            return time.perf_counter() - start
        with self.model.no_sync():
            loss = inputs.GPT.loss(self.model, batch)  # type: ignore[arg-type]
            start = time.perf_counter()
            loss.backward()
            return time.perf_counter() - start


def slowest(seconds: float) -> float:
    """Return the largest over ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def mean(number: float) -> float:
    """Return the mean over ranks."""
    value = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


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


def measure_losses(methods: list[str], steps: int) -> list[dict[str, Any]]:
    """Train every method on the same data; losses are of the consolidated and a single model."""
    text = inputs.corpus()
    held_out = inputs.draw_batch(text, 16, torch.Generator().manual_seed(7))
    rows = []
    for method in methods:
        trainee = Trainee(method, LOSS_PARAMETERS, 2e-3, 200 if "coded" in method else 0)
        generator = torch.Generator().manual_seed(1000 + dist.get_rank())
        curve = [trainee.step(inputs.draw_batch(text, 4, generator)) for _ in range(steps)]
        apart = spread(trainee.model, trainee.comm.transport).overall if trainee.comm else 0.0
        with torch.no_grad():
            single = mean(float(inputs.GPT.loss(trainee.model.module, held_out)))
            if trainee.comm is not None:
                trainee.comm.consolidate()
            final = float(inputs.GPT.loss(trainee.model.module, held_out))
        average = [mean(value) for value in curve]
        rows.append(
            {
                "method": method,
                "final_loss": final,
                "single_replica_loss": single,
                "spread": apart,
                "curve": average,
                "gradient_noise": statistics.pstdev(curve[-50:]) if len(curve) >= 50 else None,
            }
        )
        if trainee.comm is not None:
            trainee.comm.close()
    for row in rows:
        row["loss_ratio_to_fp32"] = row["final_loss"] / rows[0]["final_loss"]
    return rows


def rank_main(job: dict[str, Any]) -> None:
    """Run on every rank: measure, and have rank 0 write the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if job["losses"]:
        rows = measure_losses(job["methods"], job["steps"])
    else:
        rows = measure_steps(job["methods"], job["repeats"])
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run_case(ranks: int, rate: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Start the ranks and return their rows."""
    out = Path(job["out"])
    out.unlink(missing_ok=True)
    bits = None if rate == "unshaped" else parse_rate(rate)
    with Testbed(ranks=ranks, rate=bits) as testbed:
        result = testbed.run(
            [sys.executable, __file__],
            timeout_s=3000,
            env={"TACITURN_DDP_STEP": json.dumps(job)},
        )
        result.check()
        rows: list[dict[str, Any]] = json.loads(out.read_text())
    for row in rows:
        row["ranks"] = ranks
        row["rate_bits_per_s"] = bits
        row["cpu_bound"] = ranks > 2 * (os.cpu_count() or 1) and rate != "100mbit"
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as lines of text."""
    lines = []
    for row in rows:
        if "final_loss" in row:
            lines.append(
                f"{row['method']:55} loss {row['final_loss']:.4f} "
                f"ratio {row['loss_ratio_to_fp32']:.4f} single {row['single_replica_loss']:.4f} "
                f"spread {row['spread']:.2g}"
            )
            continue
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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--methods", default=";".join(METHODS), help="with ; between them")
    parser.add_argument(
        "--cases", default=",".join(f"{n}x{rate}" for n, rate in CASES), help="as 4x100mbit,4x1gbit"
    )
    arguments = parser.parse_args()
    methods = [*STOCK, *(m.strip() for m in arguments.methods.split(";") if m.strip())]
    job: dict[str, Any] = {
        "losses": arguments.losses,
        "methods": methods,
        "repeats": arguments.repeats,
        "steps": arguments.steps,
        "out": str(Path("ddp_step.part.json").resolve()),
    }
    rows: list[dict[str, Any]] = []
    cases = "4xunshaped" if arguments.losses else arguments.cases
    for case in cases.split(","):
        ranks, _, rate = case.partition("x")
        found = run_case(int(ranks), rate, job)
        print(f"\n{ranks} ranks, links of {rate}")
        if not arguments.losses:
            share = found[0]["compute_share"]
            print(f"compute is {share:.1%} of the stock fp32 step")
            if int(ranks) == 4 and rate == "100mbit" and share > COMPUTE_SHARE:
                print(f"more than the {COMPUTE_SHARE:.0%} meant: the machine is busy")
        print(table(found), flush=True)
        rows += found
        if arguments.json:  # after every case: a long run can be cut short
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    Path(job["out"]).unlink(missing_ok=True)


if __name__ == "__main__":
    if "TACITURN_DDP_STEP" in os.environ:
        rank_main(json.loads(os.environ["TACITURN_DDP_STEP"]))
    else:
        main()

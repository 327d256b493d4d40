"""What each method does to each parameter's gradient, early and late in training.

``python benchmarks/ddp_parameters.py --json benchmarks/ddp_parameters.json`` trains a byte-level
GPT of 0.4 million parameters with exact averages on 4 ranks of this machine. At steps 10 and 300
each parameter's gradient is averaged by every method by itself, its state warmed up on the ten
steps up to there, as it would be in training without error feedback. Of each: bytes that one rank
sends, error relative to the exact average, codec seconds, and for PowerSGD the share of the
average's energy that it captures, beside the most that any matrix of that rank can (by singular
values).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_losses import PARAMETERS, RATE, SEQUENCES, split_corpus
from taciturn.aggregators.base import Group
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.methods import aggregator
from taciturn.testbed import Testbed
from taciturn.transport import DistributedTransport

Row = dict[str, Any]

RANKS = 4
STEPS = (10, 300)
WARM = 10
TIMEOUT_S = 3000.0
POWERSGD = {r: f"powersgd:rank={r},feedback=false" for r in (1, 2, 4, 8)}
OTHERS = (
    "quantized:bits=8",
    "quantized:bits=4",
    "coded:passes=4",
    "coded:passes=16,code=fourier,shuffle=true",
    "topk:ratio=0.01,feedback=false",
)


def average(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean over ranks, by the backend."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def mean_square(tensor: torch.Tensor) -> float:
    """Return the mean over ranks of the sum of squares."""
    return average(tensor.double().square().sum()).item()


def train() -> list[Row]:
    """Train with exact averages; measure every parameter at the steps asked for."""
    text, _ = split_corpus()
    net = inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    transport = DistributedTransport(dist.group.WORLD, 60.0)
    rows: list[Row] = []
    recent: list[dict[str, torch.Tensor]] = []
    for step in range(1, max(STEPS) + 1):
        optimizer.zero_grad()
        inputs.GPT.loss(net, inputs.draw_batch(text, SEQUENCES, generator)).backward()
        gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        recent = [*recent, gradients][-WARM:]
        if step in STEPS:
            for name in gradients:
                history = [some[name] for some in recent]
                rows += [row | {"step": step} for row in measure(name, history, transport)]
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad = average(parameter.grad)
        optimizer.step()
    transport.close()
    return rows


def measure(name: str, history: list[torch.Tensor], transport: DistributedTransport) -> list[Row]:
    """Average one parameter's gradient by every method, after those of the steps before."""
    group = Group.of([(name, history[-1])])
    exact = average(history[-1]).double()
    energy = exact.square().sum().item()
    matrix = exact.reshape(exact.shape[0], -1) if exact.ndim > 1 else None
    best = None
    if matrix is not None:
        best = torch.linalg.svdvals(matrix).square().cumsum(0) / energy
    rows = []
    for method in (*POWERSGD.values(), *OTHERS):
        averager = aggregator(method)
        for gradient in history:
            buffer = gradient.flatten().clone()
            before = transport.ledger.snapshot()
            averager.aggregate(buffer, group, transport)
            averager.finish_step(keep=True)
            spent = transport.ledger.snapshot() - before
        error = buffer.double() - exact.flatten()
        row: Row = {
            "parameter": name,
            "shape": list(exact.shape),
            "method": method,
            "sent_bytes": spent.sent_bytes,
            "codec_s": average(torch.tensor(spent.codec_s, dtype=torch.float64)).item(),
            "error": (mean_square(error) / energy) ** 0.5,
            "mean_error": (average(error).square().sum().item() / energy) ** 0.5,
        }
        for rank, text in POWERSGD.items():
            if text == method:
                row["captured_energy"] = 1 - row["error"] ** 2
                row["best_energy"] = None if best is None else best[min(rank, len(best)) - 1].item()
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Return a line for each matrix and step; vectors, which PowerSGD sends as they are, last."""
    lines = [
        "captured energy (most possible) at rank 1, 2, 4, 8",
        "error of int8, int4, coded p=4, Fourier p=16, top-k 1 %",
        "codec ms of rank 4, int8, p=4, p=16",
    ]
    for step in STEPS:
        lines.append(f"step {step}")
        some = [row for row in rows if row["step"] == step]
        for name in dict.fromkeys(row["parameter"] for row in some):
            by = {row["method"]: row for row in some if row["parameter"] == name}
            first = by[POWERSGD[1]]
            if len(first["shape"]) < 2:
                continue
            energies = "  ".join(
                f"{by[text]['captured_energy']:.2f} ({by[text]['best_energy']:.2f})"
                for text in POWERSGD.values()
            )
            errors = "  ".join(f"{by[text]['error']:.1e}" for text in OTHERS)
            codecs = " ".join(
                f"{by[text]['codec_s'] * 1e3:.1f}"
                for text in (POWERSGD[4], *OTHERS[:1], *OTHERS[2:4])
            )
            shape = "x".join(map(str, first["shape"]))
            lines.append(f"{name:24} {shape:9} {energies}  {errors}  {codecs}")
    return "\n".join(lines)


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Testbed(ranks=RANKS, rate=None) as testbed:
        out = Path(folder) / "rows.json"
        environment = {"TACITURN_DDP_PARAMETERS": str(out)}
        testbed.run([sys.executable, __file__], timeout_s=TIMEOUT_S, env=environment).check()
        rows: list[Row] = json.loads(out.read_text())
    print(table(rows))
    if arguments.json:
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.json.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    if "TACITURN_DDP_PARAMETERS" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        result = train()
        if dist.get_rank() == 0:
            Path(os.environ["TACITURN_DDP_PARAMETERS"]).write_text(json.dumps(result))
        dist.barrier()
        end_rank(0)
    else:
        main()

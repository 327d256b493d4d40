"""Held-out loss by method after the same steps on the same data, over several seeds.

Run by ``ddp_step.py --losses``. A seed decides the weights and the data; every method sees the same
ones, so that the ratio to fp32 is of pairs. The learning rate rises for a tenth of the steps and
falls to zero along a cosine: at a constant rate the last losses of runs that should be alike differ
by several per cent.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_trainee import Trainee, mean
from taciturn.bench import inputs
from taciturn.replicas import spread

Row = dict[str, Any]

PARAMETERS = 400_000
RATE, CLIP_NORM = 1e-3, 1.0
"""Without clipping early gradients of 10 to 20 times the usual norm throw single runs back: what is
then compared is which run met one."""

SEQUENCES, HELD_OUT = 2, 64
RESYNC_EVERY = 200
WARM_SHARE, AVERAGED_SHARE = 0.1, 0.1
"""Shares of the steps: the first in which the rate rises, the last whose weights are averaged."""

_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 %, by degrees of freedom."""


def split_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on and the tenth of it, the last, that is held out."""
    text = inputs.corpus()
    cut = len(text) - len(text) // 10
    return text[:cut], text[cut:]


def measure(method: str, seed: int, steps: int) -> Row:
    """Train one method on every rank; return its row, alike on all."""
    text, rest = split_corpus()
    held_out = inputs.draw_batch(rest, HELD_OUT, torch.Generator().manual_seed(7))
    resync_every = RESYNC_EVERY if "coded" in method else 0
    trainee = Trainee(method, PARAMETERS, RATE, resync_every, seed, CLIP_NORM)
    model = trainee.model
    warm = max(1, round(WARM_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainee.optimizer,
        lambda n: min((n + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * (n + 1) / (steps + 1))),
    )
    generator = torch.Generator().manual_seed(100_000 * (seed + 1) + dist.get_rank())
    curve, averaged, count = [], [torch.zeros_like(p) for p in model.parameters()], 0
    for step in range(steps):
        curve.append(trainee.step(inputs.draw_batch(text, SEQUENCES, generator)))
        schedule.step()
        if step >= steps - AVERAGED_SHARE * steps:
            torch._foreach_add_(averaged, [p.detach() for p in model.parameters()])
            count += 1
    row: Row = {"method": method, "seed": seed, "steps": steps, "ranks": dist.get_world_size()}
    row["spread"] = spread(model, trainee.comm.transport).overall if trainee.comm else 0.0
    row |= _gradient(trainee, inputs.draw_batch(text, SEQUENCES, generator))
    with torch.no_grad():
        row["single_replica_loss"] = mean(float(inputs.GPT.loss(model.module, held_out)))
        if trainee.comm is not None:
            trainee.comm.consolidate()
        row["final_loss"] = float(inputs.GPT.loss(model.module, held_out))
        for parameter, total in zip(model.parameters(), averaged, strict=True):
            dist.all_reduce(total)
            parameter.copy_(total / (count * dist.get_world_size()))
        row["averaged_loss"] = float(inputs.GPT.loss(model.module, held_out))
    if trainee.comm is not None:
        trainee.comm.close()
    row["curve"] = [round(mean(value), 4) for value in curve]
    return row


def _gradient(trainee: Trainee, batch: torch.Tensor) -> Row:
    """Compare the averaged gradient that a method gives with the exact one of the same batches.

    All three are relative to the exact average's norm: the noise of its finite batch (deviation of
    the ranks' gradients from it, over the root of their number), the error of the method's mean
    over ranks, and its spread around that.
    """
    with trainee.model.no_sync():
        own = _flat_gradient(trainee, batch)
    exact = _mean(own)
    theirs = _flat_gradient(trainee, batch)
    middle = _mean(theirs)
    scale = float(exact.norm())
    ranks = dist.get_world_size()
    noise = (mean(float((own - exact).square().sum())) / ranks) ** 0.5
    return {
        "gradient_noise": noise / scale,
        "gradient_error": float((middle - exact).norm()) / scale,
        "gradient_spread": mean(float((theirs - middle).square().sum())) ** 0.5 / scale,
    }


def _flat_gradient(trainee: Trainee, batch: torch.Tensor) -> torch.Tensor:
    trainee.optimizer.zero_grad()
    inputs.GPT.loss(trainee.model, batch).backward()  # type: ignore[arg-type]
    gradients = [p.grad for p in trainee.model.parameters()]
    return torch.cat([g.flatten().double() for g in gradients if g is not None])


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def measure_missing(methods: Iterable[str], seeds: int, steps: int, out: Path) -> None:
    """Train what ``out`` has no rows of yet; rank 0 adds each row when it is there.

    A long run can be cut short at any point and gone on with.
    """
    rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
    done = {(row["method"], row["seed"], row["steps"], row["ranks"]) for row in rows}
    for seed in range(seeds):
        for method in methods:
            if (method, seed, steps, dist.get_world_size()) in done:
                continue
            rows.append(measure(method, seed, steps))
            if dist.get_rank() == 0:
                part = out.with_suffix(".part")
                part.write_text(_lines(with_ratios(rows)))
                part.replace(out)


def _lines(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows with each final loss over fp32's of the same seed, where that is there."""
    base = {row["seed"]: row["final_loss"] for row in rows if row["method"] == "ddp fp32"}
    return [
        row | {"loss_ratio_to_fp32": row["final_loss"] / base[row["seed"]]}
        if row["seed"] in base
        else row
        for row in rows
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    if len(values) < 2:
        return values[0], math.inf
    half = _T_975[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), half


def table(rows: list[Row]) -> str:
    """Return a line for every method: means over seeds."""
    head = (
        "seeds   loss  ratio to fp32     single  averaged  spread  gradient: noise  error   spread"
    )
    lines = [f"{'method':52} {head}"]
    for method in dict.fromkeys(row["method"] for row in rows):
        some = [row for row in with_ratios(rows) if row["method"] == method]
        ratio, half = interval([row.get("loss_ratio_to_fp32", math.nan) for row in some])
        means = {
            key: statistics.fmean(row[key] for row in some)
            for key in (
                "final_loss", "single_replica_loss", "averaged_loss", "spread",
                "gradient_noise", "gradient_error", "gradient_spread",
            )
        }  # fmt: skip
        lines.append(
            f"{method:52} {len(some):5}  {means['final_loss']:.4f}  {ratio:.4f} +- {half:.4f}"
            f"  {means['single_replica_loss']:.4f}    {means['averaged_loss']:.4f}"
            f"  {means['spread']:6.4f}           {means['gradient_noise']:.3f}"
            f"  {means['gradient_error']:.1e}  {means['gradient_spread']:.1e}"
        )
    return "\n".join(lines)

"""Quality, time and bytes of local updates against data-parallel training, at the same tokens.

``python benchmarks/local_updates.py --json benchmarks/local_updates.json`` trains a byte-level GPT
of 0.4 million parameters on 4 ranks with links of 100 Mbit/s: DDP with bf16 gradients, local SGD,
DiLoCo and streaming DiLoCo, at several inner step sizes, with data that is alike on all ranks
("iid") or of other packages of Python's standard library on each ("packages"). Runs that the file
has already are kept, so a long run may be cut and gone on with. ``--quick`` does a few short ones.

Each run has the same weights to begin with, the same number of steps and tokens, AdamW with a rate
that rises for a tenth of the steps and falls to zero, and is evaluated on the same held-out text. A
method's line in the table is that of its best step size.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_losses import CLIP_NORM, PARAMETERS, interval, split_corpus
from ddp_trainee import mean, slowest
from taciturn import DiLoCo, LocalSGD, ddp
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.testbed import Testbed
from taciturn.units import parse_rate

Row = dict[str, Any]

RANKS, LINK = 4, "100mbit"
SEQUENCES, HELD_OUT = 2, 64
"""In a rank's batch, if ``--sequences`` does not say otherwise, and of the evaluation."""
STEPS, QUICK_STEPS = 256, 64
TRAINED_RATE = 2e-3
RATES, QUICK_RATES = (1e-3, 2e-3), (1e-3,)
SPLITS, QUICK_SPLITS = ("iid", "packages"), ("iid",)
TIMEOUT_S = 20_000.0
INT4 = "quantized:bits=4,feedback=true"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP, bf16 gradients": ("ddp", {}),
    "local SGD, H=4": ("local", {"steps": 4}),
    "local SGD, H=16": ("local", {"steps": 16}),
    "DiLoCo, H=16": ("diloco", {"steps": 16}),
    "DiLoCo, H=16, int4": ("diloco", {"steps": 16, "compress": INT4}),
    "DiLoCo, H=64": ("diloco", {"steps": 64}),
    "DiLoCo, H=64, int4": ("diloco", {"steps": 64, "compress": INT4}),
    "streaming DiLoCo, H=16, 4 fragments, int4": (
        "diloco",
        {"steps": 16, "fragments": 4, "overlap_steps": 2, "compress": INT4},
    ),
    "streaming DiLoCo, the same beside 4 steps": (
        "diloco",
        {"steps": 16, "fragments": 4, "overlap_steps": 4, "compress": INT4},
    ),
}
QUICK_METHODS = (
    "DDP, bf16 gradients",
    "local SGD, H=4",
    "DiLoCo, H=16",
    "streaming DiLoCo, H=16, 4 fragments, int4",
)


def outer(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Nesterov momentum as in the paper, a little less of it for so few rounds."""
    return torch.optim.SGD(anchor, lr=0.7, momentum=0.6, nesterov=True)


@functools.cache
def weights_to_begin_with(steps: int, seed: int, sequences: int) -> dict[str, torch.Tensor]:
    """Return new weights, trained for some steps with DDP in fp32 on all of the text."""
    net = inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator().manual_seed(seed))
    if not steps:
        return net.state_dict()
    text, _ = split_corpus()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=TRAINED_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(steps))
    generator = torch.Generator().manual_seed(777 * (seed + 1) + dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        loss = inputs.GPT.loss(model, inputs.draw_batch(text, sequences, generator))  # type: ignore[arg-type]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
    return net.state_dict()


def _factor(steps: int) -> Any:
    """Return the learning rate's factor: up for a tenth of the steps, then down to zero."""
    warm = max(1, steps // 10)
    return lambda n: min((n + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * (n + 1) / (steps + 1)))


def measure(
    method: str,
    split: str,
    rate: float,
    steps: int,
    seed: int,
    sequences: int = SEQUENCES,
    trained: int = 0,
) -> Row:
    """Train once, on every rank; return the row, alike on all."""
    kind, options = METHODS[method]
    text, rest = split_corpus()
    if split == "packages":
        part = len(text) // dist.get_world_size()
        text = text[dist.get_rank() * part : (dist.get_rank() + 1) * part]
    held_out = inputs.draw_batch(rest, HELD_OUT, torch.Generator().manual_seed(7))
    net = inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator().manual_seed(seed))
    net.load_state_dict(weights_to_begin_with(trained, seed, sequences))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(steps))
    generator = torch.Generator().manual_seed(100_000 * (seed + 1) + dist.get_rank())
    batches = [inputs.draw_batch(text, sequences, generator) for _ in range(steps)]
    found = _ddp if kind == "ddp" else _local
    row = found(kind, options, net, optimizer, schedule, batches)
    with torch.no_grad():
        loss = float(inputs.GPT.loss(net, held_out))
    tokens = steps * sequences * inputs.CONTEXT * dist.get_world_size()
    sent = row.pop("sent_bytes")
    return {
        "method": method, "split": split, "rate": rate, "seed": seed, "steps": steps,
        "ranks": dist.get_world_size(), "sequences": sequences, "trained": trained,
        "tokens": tokens,
        "examples": steps * sequences * dist.get_world_size(), "val_loss": loss, "sent_bytes": sent,
        "sent_bytes_per_token": None if sent is None else sent / tokens, **row,
    }  # fmt: skip


def _ddp(
    _kind: str,
    _options: dict[str, Any],
    net: inputs.GPT,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: list[torch.Tensor],
) -> Row:
    model = DistributedDataParallel(net)
    # As many bits as the backend's own bf16 all-reduce, over our ring, which counts what it sends.
    comm = ddp.attach(model, "quantized:wire=bf16", timeout_s=120)
    alone = [_backward(model, batch, sync=False) for batch in batches[:8]]
    start, sent, exposed = time.perf_counter(), 0, 0.0
    for batch in batches:
        seconds = _backward(model, batch, sync=True)
        exposed += max(0.0, seconds - statistics.median(alone))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        metrics = comm.metrics()
        assert metrics is not None
        sent += metrics.sent_bytes or 0
    wall = slowest(time.perf_counter() - start)
    comm.close()
    return {
        "sync_count": len(batches), "sent_bytes": sent, "wall_s": wall, "exposed_s": mean(exposed),
        "exchange_s": mean(exposed), "drift": 0.0,
    }  # fmt: skip


def _backward(model: DistributedDataParallel, batch: torch.Tensor, sync: bool) -> float:
    model.zero_grad()
    if not sync:
        with model.no_sync():
            loss = inputs.GPT.loss(model, batch)  # type: ignore[arg-type]
            start = time.perf_counter()
            loss.backward()
    else:
        loss = inputs.GPT.loss(model, batch)  # type: ignore[arg-type]
        start = time.perf_counter()
        loss.backward()
    return time.perf_counter() - start


def _local(
    kind: str,
    options: dict[str, Any],
    net: inputs.GPT,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: list[torch.Tensor],
) -> Row:
    more: dict[str, Any] = {"outer": outer} if kind == "diloco" else {"method": "ring"}
    more |= {} if "compress" in options or kind != "diloco" else {"compress": "ring"}
    made = (DiLoCo if kind == "diloco" else LocalSGD)(
        net, optimizer, timeout_s=120, **more, **options
    )
    seen: list[Any] = []
    dist.barrier()
    start = time.perf_counter()

    def note(*_: Any) -> None:
        metrics = made.metrics()
        if metrics is not None and (not seen or seen[-1].exchanges != metrics.exchanges):
            seen.append(metrics)

    with made:
        for batch in batches:
            optimizer.zero_grad()
            net.loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()
            note()
    note()
    wall = slowest(time.perf_counter() - start)
    count = seen[-1].exchanges
    # Of fragments that end together only the last is seen: scale to all.
    share = count / len(seen)
    return {
        "sync_count": count,
        "sent_bytes": round(sum(m.sent_bytes for m in seen) * share),
        "wall_s": wall,
        "exposed_s": mean(sum(m.exposed_s for m in seen) * share),
        "exchange_s": mean(sum(m.exchange_s for m in seen) * share),
        "drift": statistics.fmean(m.drift for m in seen),
    }


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows, each loss over that of DDP's best step size in the same split and seed."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["method"] == "DDP, bf16 gradients":
            key = (row["seed"], row["steps"], *_of_one_table(row))
            best[key] = min(best.get(key, math.inf), row["val_loss"])
    return [
        row | {"loss_ratio_to_ddp": row["val_loss"] / best[key]}
        if (key := (row["seed"], row["steps"], *_of_one_table(row))) in best
        else row
        for row in rows
    ]


def _of_one_table(row: Row) -> tuple[str, int, int]:
    """Return what lines that are compared with each other have in common."""
    return row["split"], row["sequences"], row.get("trained", 0)


def table(rows: list[Row]) -> str:
    """Return a line for each method and split, at its best step size: means over seeds."""
    measures = (
        "seeds  val loss  ratio, 95 %       wall s  syncs  bytes/token  exposed s  hidden  drift"
    )
    lines = [f"{'method':44} {'split':8} batch  after  rate   {measures}"]
    rows = with_ratios(rows)
    for which in dict.fromkeys(map(_of_one_table, rows)):
        split, sequences, trained = which
        for method in METHODS:
            by_rate: dict[float, list[Row]] = {}
            for row in rows:
                if row["method"] == method and _of_one_table(row) == which:
                    by_rate.setdefault(row["rate"], []).append(row)
            if not by_rate:
                continue
            # Step sizes are compared on the first seed, which all have.
            rate, some = min(
                by_rate.items(),
                key=lambda item: next(r for r in item[1] if not r["seed"])["val_loss"],
            )
            ratio, half = interval([row.get("loss_ratio_to_ddp", math.nan) for row in some])
            means = {
                key: statistics.fmean(row.get(key, math.nan) for row in some)
                for key in (
                    "val_loss", "wall_s", "sync_count", "sent_bytes_per_token", "exposed_s",
                    "exchange_s", "drift",
                )
            }  # fmt: skip
            hidden = 1 - means["exposed_s"] / means["exchange_s"]
            lines.append(
                f"{method:44} {split:8} {sequences:5}  {trained:5}  {rate:.0e}  {len(some):5}  "
                f"{means['val_loss']:.4f}    "
                f"{ratio:.4f} +- {half:.4f}  {means['wall_s']:6.1f}  "
                f"{means['sync_count']:5.0f}  {means['sent_bytes_per_token']:11.1f}  "
                f"{means['exposed_s']:9.2f}  {hidden:6.0%}  {means['drift']:.2f}"
            )
    return "\n".join(lines)


def rank_main(job: dict[str, Any]) -> None:
    """Train what the file has no rows of yet; rank 0 adds each row when it is there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = Path(job["out"])
    rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
    keys = ("method", "split", "rate", "steps", "seed", "sequences")
    done = {(*(row[key] for key in keys), row.get("trained", 0)) for row in rows}
    steps, sequences, trained = job["steps"], job["sequences"], job["trained"]
    for seed in range(job["seeds"]):
        for split in job["splits"]:
            for rate in job["rates"]:
                for method in job["methods"]:
                    if (method, split, rate, steps, seed, sequences, trained) in done:
                        continue
                    rows.append(measure(method, split, rate, steps, seed, sequences, trained))
                    if dist.get_rank() == 0:
                        lines = ",\n".join(json.dumps(row) for row in with_ratios(rows))
                        part = out.with_suffix(".part")
                        part.write_text(f"[\n{lines}\n]\n")
                        part.replace(out)
    dist.barrier()
    end_rank(0)


def main() -> None:
    """Parse the command line, run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="read rows there, and add to them")
    parser.add_argument("--quick", action="store_true", help="a few short runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rates", help="step sizes, with commas between them")
    parser.add_argument("--splits", help=f"of {','.join(SPLITS)}")
    parser.add_argument("--methods", help="with ; between them")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="in a rank's batch")
    parser.add_argument(
        "--trained", type=int, default=0, help="steps of DDP before, for all methods alike"
    )
    parser.add_argument("--link", default=LINK, help="rate of each rank's link")
    arguments = parser.parse_args()
    quick = arguments.quick
    usual_rates = ",".join(map(str, QUICK_RATES if quick else RATES))
    usual_splits = ",".join(QUICK_SPLITS if quick else SPLITS)
    usual_methods = ";".join(QUICK_METHODS if quick else METHODS)
    job = {
        "out": str(arguments.json.resolve()),
        "seeds": arguments.seeds,
        "steps": QUICK_STEPS if quick else STEPS,
        "rates": [float(rate) for rate in (arguments.rates or usual_rates).split(",")],
        "splits": (arguments.splits or usual_splits).split(","),
        "methods": (arguments.methods or usual_methods).split(";"),
        "sequences": arguments.sequences,
        "trained": arguments.trained,
    }
    with Testbed(ranks=RANKS, rate=parse_rate(arguments.link)) as testbed:
        environment = {"TACITURN_LOCAL_UPDATES": json.dumps(job)}
        testbed.run([sys.executable, __file__], timeout_s=TIMEOUT_S, env=environment).check()
    print(table(json.loads(arguments.json.read_text())))


if __name__ == "__main__":
    if "TACITURN_LOCAL_UPDATES" in os.environ:
        rank_main(json.loads(os.environ["TACITURN_LOCAL_UPDATES"]))
    else:
        main()

"""How the recordings in this folder were made, on two cores with PyTorch 2.13.

::

    torchrun --nproc_per_node=2 record.py ddp_bucketed 1 0 .
    torchrun --nproc_per_node=2 record.py ddp_onebucket 1000 0 .
    torchrun --nproc_per_node=4 record.py ddp_straggler 1 40 .

Arguments: name, DDP's bucket_cap_mb, milliseconds that the last rank sleeps before its backward,
and the folder. Each rank writes its trace; rank 0 also the times of steps without the profiler.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def main(name: str, bucket_mb: float, sleep_ms: float, folder: Path) -> None:
    """Train a small MLP for some steps, three of them recorded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    step = training(bucket_mb, sleep_ms if rank == world - 1 else 0.0)
    for _ in range(5):
        step(True)
    median_ms = {
        f"median_step_ms_untraced_{'sync' if sync else 'no_sync'}": timed_ms(step, sync)
        for sync in (True, False)
    }
    dist.barrier()
    path = folder / f"{name}_rank{rank}of{world}.pt.trace.json.gz"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for _ in range(5):
            step(True)
            profiler.step()
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, {"rank": rank, **median_ms})
    if rank == 0:
        truth = {
            "name": name,
            "world_size": world,
            "bucket_cap_mb": bucket_mb,
            "straggler_ms": sleep_ms,
            "torch": torch.__version__,
            "ranks": ranks,
        }
        (folder / f"{name}_truth.json").write_text(json.dumps(truth, indent=1))
    dist.destroy_process_group()


def training(bucket_mb: float, sleep_ms: float) -> Callable[[bool], None]:
    """One step of training, with gradients exchanged or not."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(768, 10)), bucket_cap_mb=bucket_mb
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 768), torch.randint(0, 10, (64,))

    def step(sync: bool) -> None:
        with contextlib.nullcontext() if sync else model.no_sync():
            with record_function("forward"):
                loss = nn.functional.cross_entropy(model(x), y)
            if sleep_ms:
                with record_function("straggler_sleep"):
                    time.sleep(sleep_ms / 1e3)
            with record_function("backward"):
                loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def timed_ms(step: Callable[[bool], None], sync: bool) -> float:
    """Median of 30 steps."""
    dist.barrier()
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        step(sync)
        times.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(times), 3)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))

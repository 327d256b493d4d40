"""A run that may be killed at any moment and goes on bit for bit, with other bucket sizes even.

torchrun --nproc-per-node 2 examples/ddp_resume.py FOLDER [--bucket-cap-mb 25] [--die-at STEP]
"""

from __future__ import annotations

import argparse
import os
import signal
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp

STEPS, SAVE_EVERY = 20, 5


def main() -> None:
    """Train from the last checkpoint in the folder, or from the start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bucket-cap-mb", type=float, default=0.002)
    parser.add_argument("--die-at", type=int)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(30, 30) for _ in range(8)])
    model = DistributedDataParallel(net, bucket_cap_mb=arguments.bucket_cap_mb)
    comm = ddp.attach(model, "powersgd:rank=2", group_bytes=8_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # Every rank has a file of its own: residuals differ. A step is resumed only if all have it.
    start = 0
    mine = arguments.folder / f"rank{rank}.pt"
    if mine.exists():
        saved = torch.load(mine, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        comm.load_state_dict(saved["comm"])
        start = saved["step"]
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(8, 30, generator=generator)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            state = {
                "step": step + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "comm": comm.state_dict(),
            }
            torch.save(state, mine.with_suffix(".part"))
            dist.barrier()  # all have written: now all may replace
            mine.with_suffix(".part").replace(mine)
            dist.barrier()
        if step == arguments.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        print(f"from step {start}: parameters {zlib.crc32(flat.numpy().tobytes()):08x}")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A DistributedDataParallel loop that sends a tenth of the bytes. The lines marked + are new.

torchrun --nproc-per-node 2 examples/ddp_minimal.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp  # +


def main() -> None:
    """Train a small autoencoder."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    comm = ddp.attach(model, "powersgd:rank=4")  # +
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)  # every rank has its own data
    for step in range(50):
        inputs = torch.randn(32, 64, generator=generator)
        loss = (model(inputs) - inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "comm": comm.state_dict(),  # +  one file per rank: each has its own residual
    }
    del checkpoint
    if rank == 0:
        print(comm.metrics())  # +
    comm.close()  # +
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

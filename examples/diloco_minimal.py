"""A training loop whose ranks meet every 16 steps. The lines marked + are new.

torchrun --nproc-per-node 2 examples/diloco_minimal.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import taciturn  # +


def main() -> None:
    """Train a small autoencoder."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # every rank begins with the same weights
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)  # and has its own data
    compress = "quantized:bits=4,feedback=true"  # +
    with taciturn.DiLoCo(model, optimizer, steps=16, compress=compress) as rounds:  # +
        for step in range(80):
            inputs = torch.randn(32, 64, generator=generator)
            loss = (model(inputs) - inputs).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 16 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
    if rank == 0:
        print(rounds.metrics())  # +
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Four microbatches of unequal length a step, and the gradient of one big batch of all ranks.

torchrun --nproc-per-node 2 examples/accumulation_minimal.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import taciturn  # +


def main() -> None:
    """Train a small model of the next byte."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(5, 50, (38 + rank,), generator=generator)  # ranks may end apart
    batches = [torch.randint(64, (int(n),), generator=generator) for n in lengths]
    accumulate = taciturn.Accumulation(model, microbatches=4)  # +
    for window in accumulate.windows(batches):  # +
        for tokens in window:  # +
            with window.microbatch(tokens=len(tokens)):  # +
                loss_sum = cross_entropy(model(tokens), tokens, reduction="sum")
                window.backward(loss_sum)  # + instead of loss.backward()
        result = window.step(optimizer, clip_norm=1.0)  # + instead of clipping, step, zero_grad
        if rank == 0:
            print(f"{result.tokens} tokens: loss {result.loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

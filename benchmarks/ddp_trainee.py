"""What the benchmarks of the DDP hook share: a model with one method, and means over ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.bench import inputs

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
TIMEOUT_S = 120.0


def bf16_hook(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Do what torch's bf16_compress_hook does, which DDP refuses by its name except over NCCL."""
    return default_hooks._compress_hook(torch.bfloat16, group, bucket)


bf16_hook.__annotations__ = {}  # DDP compares them with types, and here they are strings
HOOKS = {"ddp fp16 hook": default_hooks.fp16_compress_hook, "ddp bf16 hook": bf16_hook}


class Trainee:
    """One method's model, optimizer and communicator, on one rank."""

    def __init__(
        self,
        method: str,
        parameters: int,
        rate: float,
        resync_every: int | None,
        seed: int = 0,
        clip_norm: float | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        net = inputs.GPT(inputs.gpt_shape(parameters), generator)
        self.method, self.clip_norm = method, clip_norm
        self.model = DistributedDataParallel(net, init_sync=False)  # the seed is the same
        self.comm: ddp.Communicator | None = None
        if method in HOOKS:
            self.model.register_comm_hook(None, HOOKS[method])
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
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
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

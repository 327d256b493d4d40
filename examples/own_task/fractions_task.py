"""A task of one's own for ``taciturn compare``: which of two fractions is larger?

Run it from this folder:

    taciturn compare experiment.toml --out fractions
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from taciturn.compare import Task

EXAMPLES, HELD_OUT = 4096, 512


def make_task() -> Task:
    """Four whole numbers a, b, c, d: is a / b larger than c / d?"""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1, 10, (EXAMPLES + HELD_OUT, 4), generator=generator).float()
    larger = (numbers[:, 0] * numbers[:, 3] > numbers[:, 2] * numbers[:, 1]).float()

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))

    def batch(split: str, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = ids if split == "train" else ids + EXAMPLES
        return numbers[at] / 10, larger[at]

    def loss(
        module: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        answers = module(pair[0]).squeeze(1)
        total = functional.binary_cross_entropy_with_logits(answers, pair[1], reduction="sum")
        return total, len(pair[1])

    def wrong(
        module: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        return ((module(pair[0]).squeeze(1) > 0) != (pair[1] > 0)).sum(), len(pair[1])

    return Task(
        name="fractions",
        model=model,
        examples=EXAMPLES,
        held_out=HELD_OUT,
        batch=batch,
        loss=loss,
        judge=wrong,
        metric="share of wrong answers",
        global_batch=64,
        tokens_per_example=1,
    )

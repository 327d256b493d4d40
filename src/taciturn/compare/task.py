"""What is trained and how it is judged: one small dataclass, bundled or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from taciturn.errors import InputError
from taciturn.ranges import check_number, check_whole

__all__ = ["Split", "Task", "adamw"]

Split = Literal["train", "held_out"]

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter], float], torch.optim.Optimizer]


def adamw(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with torch's betas and a weight decay of 0.01."""
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss. A ``module:callable`` without arguments returns one.

    The harness decides which examples are seen when: the same for every method. Every rank makes
    the whole task; nothing in it may depend on the rank.

    Attributes:
        name: for the report.
        model: makes a new module of a seed; equal on every rank.
        examples: how many there are to train on; they are numbered from 0.
        held_out: how many there are to judge by.
        batch: makes what ``loss`` takes of a split and the numbers of examples, int64, shape (n,).
        loss: of the module and a batch: the sum of the losses of its tokens (or samples), a scalar
            with a gradient, and how many those are.
        global_batch: examples of a step, of all ranks together; a multiple of the ranks.
        judge: of the module and a batch: the sum of what is to become small, from 0 on, and the
            count it is divided by; the loss itself if None.
        metric: what that is, for the report.
        optimizer: makes one of parameters and a learning rate, which the harness moves.
        clip_norm: gradients' norm is clipped to it; None: not at all.
        tokens_per_example: if every example has as many; else None, and ranks tell each other their
            counts in every step, for all methods alike.
        facts: of the data, for the record: a hash, sizes, a version.

    Raises:
        InputError: values that cannot be used.
    """

    name: str
    model: Callable[[int], torch.nn.Module]
    examples: int
    held_out: int
    batch: Callable[[Split, torch.Tensor], Any]
    loss: Callable[[torch.nn.Module, Any], tuple[torch.Tensor, int]]
    global_batch: int
    judge: Callable[[torch.nn.Module, Any], tuple[torch.Tensor, int]] | None = None
    metric: str = "held-out loss"
    optimizer: MakeOptimizer = adamw
    clip_norm: float | None = 1.0
    tokens_per_example: int | None = None
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"name={self.name!r}: give the task a name")
        for name in ("examples", "held_out", "global_batch"):
            check_whole(name, getattr(self, name), 1)
        for name in ("model", "batch", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)!r}: a function is needed")
        if self.judge is not None and not callable(self.judge):
            raise InputError(f"judge={self.judge!r}: a function or None is needed")
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 0, above=True)
        if self.tokens_per_example is not None:
            check_whole("tokens_per_example", self.tokens_per_example, 1)
        if self.examples < self.global_batch:
            raise InputError(
                f"{self.examples} examples for a global batch of {self.global_batch}: a step would "
                "see one twice"
            )

    def check_ranks(self, ranks: int) -> None:
        """Whether a global batch can be shared out evenly.

        Raises:
            InputError: it cannot.
        """
        if self.global_batch % ranks:
            raise InputError(
                f"task {self.name}: a global batch of {self.global_batch} for {ranks} ranks; give "
                "a multiple"
            )

    def judged(self, module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        """The sum to become small over a held-out batch, and its count."""
        return (self.judge or self.loss)(module, batch)

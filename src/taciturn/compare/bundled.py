"""Tasks by name: scikit-learn's digits, the source of Python's own library, and the user's own."""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from taciturn.bench import inputs
from taciturn.compare.task import Split, Task
from taciturn.errors import InputError, described
from taciturn.gpt import CONTEXT, gpt_shape
from taciturn.grammar import nearest

__all__ = ["BUNDLED", "DigitsNet", "digits", "load_task", "text"]

HELD_OUT_DIGITS = 297
"""Of 1797 images; the others are trained on."""

DIGITS_BATCH, TEXT_BATCH = 64, 8
HELD_OUT_EVERY = 10
"""Of the library's files one in so many, by the hash of its name, is held out."""
HELD_OUT_SEQUENCES = 64


class DigitsNet(nn.Module):
    """Two convolutions with batch normalisation and two linear layers, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(64)
        self.hidden = nn.Linear(64 * 16, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images ``(n, 1, 8, 8)`` to logits ``(n, 10)``."""
        x = functional.relu(self.norm_1(self.first(images)))
        x = functional.max_pool2d(functional.relu(self.norm_2(self.second(x))), 2)
        logits: torch.Tensor = self.out(functional.relu(self.hidden(x.flatten(1))))
        return logits


def digits() -> Task:
    """Handwritten digits: 1797 images of 8 x 8, a small network with batch normalisation.

    Source: the UCI optical recognition of handwritten digits, as scikit-learn bundles it.

    Raises:
        InputError: scikit-learn is not there.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "the task digits needs scikit-learn: pip install 'taciturn[compare]'"
        ) from error
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = torch.from_numpy(bunch.images[order].astype(np.float32) / 16.0).unsqueeze(1)
    labels = torch.from_numpy(bunch.target[order].astype(np.int64))

    def batch(split: Split, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = ids + HELD_OUT_DIGITS if split == "train" else ids
        return images[at], labels[at]

    def loss(
        module: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        total = functional.cross_entropy(module(pair[0]), pair[1], reduction="sum")
        return total, len(pair[1])

    return Task(
        name="digits",
        model=lambda seed: _seeded(DigitsNet, seed),
        examples=len(labels) - HELD_OUT_DIGITS,
        held_out=HELD_OUT_DIGITS,
        batch=batch,
        loss=loss,
        global_batch=DIGITS_BATCH,
        tokens_per_example=1,
        facts={
            "sha256": hashlib.sha256(images.numpy().tobytes()).hexdigest(),
            "images": len(labels),
        },
    )


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a module of torch's usual initialisation, and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@lru_cache(maxsize=1)
def _split_text() -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return the text to train on, the held-out one, and a hash of both; split by whole files."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in inputs.source_files(root):
        name = path.relative_to(root).as_posix()
        held = int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0
        parts[held].append(path.read_bytes())
    train, held_out = (b"\n".join(parts[held]) for held in (False, True))
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()
    as_tensor = [torch.frombuffer(bytearray(t), dtype=torch.uint8) for t in (train, held_out)]
    return as_tensor[0], as_tensor[1], digest


def text(parameters: int, name: str) -> Task:
    """Predict the next byte of the source text of this Python's standard library, by a small GPT.

    An example is a sequence of 128 bytes and the one after it. Files are held out whole.

    Args:
        parameters: of the model, at least so many.
        name: of the task.

    Raises:
        InputError: the library's source is not there.
    """
    inputs.corpus()  # says what is wrong where there is none
    train, held_out, digest = _split_text()
    texts = {"train": train, "held_out": held_out}
    most = (len(held_out) - 1) // CONTEXT
    # Held-out sequences, evenly over all its text.
    spread = torch.arange(HELD_OUT_SEQUENCES) * most // HELD_OUT_SEQUENCES

    def batch(split: Split, ids: torch.Tensor) -> torch.Tensor:
        numbers = ids if split == "train" else spread[ids]
        starts = (numbers * CONTEXT).tolist()
        return torch.stack([texts[split][s : s + CONTEXT + 1] for s in starts]).long()

    def loss(module: nn.Module, sequences: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = module(sequences[:, :-1])
        total = functional.cross_entropy(
            logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction="sum"
        )
        return total, sequences[:, 1:].numel()

    return Task(
        name=name,
        model=lambda seed: inputs.GPT(gpt_shape(parameters), torch.Generator().manual_seed(seed)),
        examples=(len(train) - 1) // CONTEXT,
        held_out=HELD_OUT_SEQUENCES,
        batch=batch,
        loss=loss,
        global_batch=TEXT_BATCH,
        metric="held-out loss, nats per byte",
        tokens_per_example=CONTEXT,
        facts={"sha256": digest, "train_bytes": len(train), "held_out_bytes": len(held_out)},
    )


BUNDLED: dict[str, Callable[[], Task]] = {
    "digits": digits,
    **{
        name: partial(text, parameters, name)
        for name, parameters in (
            ("text-300k", 300_000),
            ("text-1m", 1_000_000),
            ("text-3m", 3_000_000),
        )
    },
}
"""By name. ``digits`` has batch normalisation, the texts have layer normalisation."""


def load_task(text: str) -> Task:
    """The task that ``text`` names: a bundled one, or ``module:callable``, which is called.

    Modules are looked for in the current folder first.

    Raises:
        InputError: it names none, or what is called fails or returns something else.
    """
    plain = text.strip()
    if plain in BUNDLED:
        return BUNDLED[plain]()
    where, _, what = plain.partition(":")
    if not where or not what:
        raise InputError(
            f"task {text!r} is none that is known{nearest(plain, list(BUNDLED))}\n"
            "Your own is written module:callable, and returns a taciturn.compare.Task"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:  # as python -m does
        sys.path.insert(0, folder)
    try:
        made = getattr(importlib.import_module(where), what)
        task = made()
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises is said
        raise InputError(f"task {text!r}: {described(error)}") from error
    if not isinstance(task, Task):
        raise InputError(
            f"task {text!r} returned {type(task).__name__}; return a taciturn.compare.Task"
        )
    return task

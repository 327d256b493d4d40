"""What a bench reduces: one flat float32 buffer per rank.

Three sources. ``gradients`` (the default) are those of a small byte-level GPT on the source text of
Python's standard library: real in the ways that matter to a lossy collective, with scales that
differ by orders of magnitude between parameters and a part that all ranks share. ``random`` is
independent normal noise, the worst case for codes whose error lies in what differs between ranks.
Anything else is a ``.pt`` or ``.npy`` file.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from taciturn.errors import InputError
from taciturn.gpt import CONTEXT, HEAD_ELEMS, VOCABULARY, GPTShape, gpt_shape

__all__ = [
    "GPT",
    "MAX_SEED",
    "GPTShape",
    "Input",
    "Span",
    "check_source",
    "corpus",
    "draw_batch",
    "file_elems",
    "file_for_rank",
    "gpt_shape",
    "gradients",
    "load_file",
    "make_input",
    "random_normal",
    "source_files",
]

SEQUENCES = 2  # sequences in the batch whose gradient a rank holds: few, as noisy as in training
WARM_STEPS = 16  # signSGD steps before that gradient is taken
WARM_RATE = 1e-3  # how far each of them moves every parameter
WARM_SEQUENCES = 1  # sequences in each of those steps, the same on all ranks
SEED_SHIFT = 20  # bits below a seed that tell the ranks apart
MAX_SEED = (1 << (64 - SEED_SHIFT)) - 1  # torch.Generator takes 64 bits in all
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


class Span(NamedTuple):
    """Where one parameter lies in the flat buffer: elements ``start`` to ``stop``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Input:
    """One rank's buffer and what is known about it.

    Attributes:
        buffer: flat float32 tensor on the CPU, shape ``(numel,)``.
        spans: the named parameters in the buffer, in order and without gaps; empty if it has none.
        note: one sentence on how the buffer was made, the same on all ranks.
    """

    buffer: torch.Tensor
    spans: tuple[Span, ...]
    note: str


# ------------------------------------------------------------------------------------------ text


def source_files(root: Path) -> Iterator[Path]:
    """Python files under ``root``, sorted, without the folders of tests and installed packages."""
    for path in sorted(root.iterdir(), key=lambda entry: entry.name):
        if path.is_dir() and path.name not in SKIPPED_FOLDERS and not path.is_symlink():
            yield from source_files(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


@lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """The source text of this Python's standard library as one uint8 tensor, shape ``(bytes,)``.

    Raises:
        InputError: the library is not there as source files (some minimal installations).
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in source_files(root)) if root.is_dir() else b""
    if len(text) < 64 * CONTEXT:
        raise InputError(
            f"the source text of Python's standard library is not at {root} ({len(text)} bytes "
            "found); use --input random or a .pt or .npy file"
        )
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def draw_batch(text: torch.Tensor, sequences: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the text, int64, shape ``(sequences, CONTEXT + 1)``."""
    starts = torch.randint(len(text) - CONTEXT - 1, (sequences,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()


# ----------------------------------------------------------------------------------------- model


class _Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a GELU network of width 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_ELEMS
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(sequences, positions, width)`` in and out."""
        rows, positions, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, positions, 3, self.heads, HEAD_ELEMS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, positions, width))
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + y


class GPT(nn.Module):
    """A byte-level GPT-2: learned positions, pre-norm blocks, head tied to the embedding.

    Initialised as GPT-2 is: normal with deviation 0.02, the two projections back into the residual
    stream divided by sqrt(2 depth), biases zero, norms one.
    """

    def __init__(self, shape: GPTShape, generator: torch.Generator) -> None:
        super().__init__()
        with torch.device("meta"):  # torch's own initialisation would draw from its global state
            self.tokens = nn.Embedding(VOCABULARY, shape.width)
            self.positions = nn.Embedding(CONTEXT, shape.width)
            self.blocks = nn.ModuleList(_Block(shape.width) for _ in range(shape.depth))
            self.norm = nn.LayerNorm(shape.width)
        self.to_empty(device="cpu")
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            else:
                residual = name.endswith(("proj.weight", "down.weight"))
                deviation = 0.02 / math.sqrt(2 * shape.depth) if residual else 0.02
                nn.init.normal_(parameter, std=deviation, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Byte values ``(sequences, positions)`` to logits ``(sequences, positions, 256)``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = functional.linear(self.norm(x), self.tokens.weight)
        return logits

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats per byte, of each byte of ``batch`` given those before it."""
        logits = self(batch[:, :-1])
        loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return loss


# --------------------------------------------------------------------------------------- sources


def _warm_up(model: GPT, text: torch.Tensor, generator: torch.Generator) -> None:
    """A few signSGD steps with momentum, changing ``model`` in place.

    Written out because torch's optimizers import their compiler first, which takes each rank longer
    than all the steps together.
    """
    parameters = list(model.parameters())
    momentum = [torch.zeros_like(p) for p in parameters]
    for _ in range(WARM_STEPS):
        slopes = torch.autograd.grad(
            model.loss(draw_batch(text, WARM_SEQUENCES, generator)), parameters
        )
        with torch.no_grad():
            for parameter, m, slope in zip(parameters, momentum, slopes, strict=True):
                m.lerp_(slope, 0.1)
                parameter.sub_(m.sign(), alpha=WARM_RATE)


def gradients(numel: int, rank: int, seed: int = 0) -> Input:
    """This rank's gradient of a byte-level GPT with at least ``numel`` parameters.

    All ranks start from the same weights and take the same few signSGD steps on the same text,
    which leads away from the initial point, where all gradients look alike. Then each takes the
    gradient of its own batch, in parameter order, cut to exactly ``numel`` elements. Computed in
    float32 on the CPU; the global random state is left alone.

    Args:
        numel: elements wanted, at least 1.
        rank: decides which batch this rank sees.
        seed: of the weights, of the common steps and, with the rank, of the batch; 0 to
            ``MAX_SEED``.
    """
    text = corpus()
    shape = gpt_shape(numel)
    common = torch.Generator().manual_seed(seed)
    model = GPT(shape, common)
    _warm_up(model, text, common)
    own = torch.Generator().manual_seed((seed << SEED_SHIFT) + rank + 1)
    loss = model.loss(draw_batch(text, SEQUENCES, own))
    slopes = torch.autograd.grad(loss, list(model.parameters()))

    buffer = torch.empty(numel)
    spans: list[Span] = []
    start = 0
    for (name, _), slope in zip(model.named_parameters(), slopes, strict=True):
        stop = min(start + slope.numel(), numel)
        if stop > start:
            buffer[start:stop] = slope.flatten()[: stop - start]
            spans.append(Span(name, start, stop))
        start = stop
    note = (
        f"gradients of a byte-level GPT (width {shape.width}, depth {shape.depth}, "
        f"{shape.params} parameters, cut to {numel}) on Python's standard library, "
        f"{SEQUENCES} x {CONTEXT} bytes per rank, after {WARM_STEPS} common signSGD steps"
    )
    return Input(buffer, tuple(spans), note)


def random_normal(numel: int, rank: int, seed: int = 0) -> Input:
    """Independent standard normal elements, different on each rank."""
    generator = torch.Generator().manual_seed((seed << SEED_SHIFT) + rank + 1)
    return Input(
        torch.randn(numel, generator=generator),
        (),
        "independent standard normal elements on each rank",
    )


def _flatten(path: Path, loaded: Any) -> tuple[torch.Tensor, tuple[Span, ...]]:
    """A tensor or a mapping of named tensors as one flat float32 tensor with its names."""
    named = loaded if isinstance(loaded, Mapping) else {"": loaded}
    parts: list[torch.Tensor] = []
    spans: list[Span] = []
    start = 0
    for name, value in named.items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.layout != torch.strided
            or tensor.is_complex()
        ):
            what = f"{type(value).__name__} under {name!r}" if name else type(value).__name__
            raise InputError(
                f"{path}: {what} is not a dense real tensor; store one tensor "
                "or a dict of named tensors"
            )
        parts.append(tensor.detach().cpu().to(torch.float32).flatten())
        if name and tensor.numel():
            spans.append(Span(str(name), start, start + tensor.numel()))
        start += tensor.numel()
    if start == 0:
        raise InputError(f"{path}: no elements; store a tensor with at least one")
    return torch.cat(parts), tuple(spans)


@lru_cache(maxsize=1)
def load_file(path: Path) -> tuple[torch.Tensor, tuple[Span, ...]]:
    """The file as one flat float32 tensor, with the names in it if it is a dict of tensors.

    Nothing is unpickled but tensors and plain containers (``weights_only``; no object arrays).

    Raises:
        InputError: no such file, neither .pt nor .npy, damaged, or not dense real numbers.
    """
    if path.suffix not in {".pt", ".npy"}:
        raise InputError(
            f"cannot use {str(path)!r} as input; use gradients, random or a .pt or .npy file"
        )
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    try:
        loaded: Any
        if path.suffix == ".pt":
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        else:
            loaded = np.load(path, allow_pickle=False)
            if loaded.dtype.kind not in "fiub":
                raise InputError(f"{path}: dtype {loaded.dtype} is not real; store real numbers")
            loaded = loaded.astype(np.float32)  # also from byte orders and dtypes torch lacks
    except InputError:
        raise
    except Exception as error:  # torch and numpy raise a dozen kinds on damaged files
        raise InputError(
            f"{path} cannot be read as {path.suffix}: it is damaged, or holds more than "
            f"numbers ({type(error).__name__}); save a tensor or an array"
        ) from error
    return _flatten(path, loaded)


def file_for_rank(source: str, rank: int) -> Path:
    """``source`` with ``{rank}`` replaced; without it every rank reads the same file."""
    return Path(source.replace("{rank}", str(rank)))


def check_source(source: str, ranks: int) -> None:
    """Refuse an ``--input`` that cannot work, before anything is started.

    Raises:
        InputError: a file is missing or damaged, or the standard library's text is not there.
    """
    if source == "gradients":
        corpus()
    elif source != "random":
        for rank in range(ranks if "{rank}" in source else 1):
            load_file(file_for_rank(source, rank))


def file_elems(source: str) -> int | None:
    """Elements in rank 0's file; None if ``source`` is not a file."""
    if source in {"gradients", "random"}:
        return None
    return load_file(file_for_rank(source, 0))[0].numel()


def _from_file(source: str, numel: int, rank: int) -> Input:
    """The rank's file, repeated or cut to ``numel`` elements."""
    whole, spans = load_file(file_for_rank(source, rank))
    note = f"{source}, " + ("one file per rank" if "{rank}" in source else "the same on all ranks")
    if numel < len(whole):
        note += f", the first {numel} of {len(whole)} elements"
    elif numel > len(whole):
        note += f", its {len(whole)} elements repeated to {numel}"
        spans = ()  # a repeated parameter has no one place
    spans = tuple(Span(s.name, s.start, min(s.stop, numel)) for s in spans if s.start < numel)
    repeats = math.ceil(numel / len(whole))
    return Input(whole.repeat(repeats)[:numel].clone(), spans, note)


def make_input(source: str, numel: int, rank: int, seed: int = 0) -> Input:
    """This rank's buffer of ``numel`` elements.

    Args:
        source: ``gradients``, ``random``, or the path of a ``.pt`` or ``.npy`` file, in which
            ``{rank}`` stands for the rank. A file of another length is cut, or repeated, and the
            note says so.
        numel: elements wanted, at least 1.
        rank: this rank.
        seed: of everything random.

    Raises:
        InputError: ``numel`` < 1, or a file that cannot be used.
    """
    if numel < 1:
        raise InputError(
            f"a buffer of {numel} elements cannot be benched; ask for at least one (4 bytes)"
        )
    if source == "gradients":
        return gradients(numel, rank, seed)
    if source == "random":
        return random_normal(numel, rank, seed)
    return _from_file(source, numel, rank)

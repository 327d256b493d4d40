"""What a step exchanges: the tensors of a model in the order of backward, cut as they travel."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from taciturn.cost import ELEMENT_BYTES
from taciturn.errors import InputError, described
from taciturn.gpt import gpt_shape
from taciturn.units import format_size, parse_size

if TYPE_CHECKING:
    import torch

__all__ = ["BUNDLED", "Buffer", "Model", "parse_model"]

GROUP_BYTES = 25 * 2**20
"""Of the hook's groups and of DDP's buckets (``exchange.GROUP_BYTES``, by test)."""

FIRST_BUCKET_BYTES = 2**20
"""Of DDP's first bucket (``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``, by test)."""

BUNDLED = {
    "gpt-05m": 500_000,
    "gpt-5m": 5_000_000,
    "gpt-50m": 50_000_000,
    "gpt-500m": 500_000_000,
}
"""Byte-level GPTs by name, with at least so many parameters (:mod:`taciturn.bench.inputs`)."""

_HELP = (
    f"give a bundled one ({', '.join(BUNDLED)}), sizes of buckets (25MiB,25MiB,3MiB), or "
    "module:callable, which returns a torch module"
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Buffer:
    """Gradients that are exchanged at once.

    Attributes:
        numel: elements; they travel as fp32 or less.
        shapes: of the tensors in it; None where only the size is known.
        ready: share of the elements that backward has made when all of these are there.
    """

    numel: int
    shapes: tuple[Shape, ...] | None
    ready: float


@dataclass(frozen=True)
class Model:
    """Parameters with gradients, in about the order in which backward makes them.

    Attributes:
        name: as given.
        tensors: names and shapes.
        sizes: elements of the buckets, where that is all that is known; else empty.
        notes: what is taken for granted; whole sentences.
    """

    name: str
    tensors: tuple[tuple[str, Shape], ...] = ()
    sizes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.tensors) and bool(self.sizes):
            raise InputError(f"{self.name}: give tensors or sizes, not both")
        if not self.numel:
            raise InputError(
                f"{self.name} has no parameters that are trained: there is nothing to exchange"
            )
        if any(size < 1 for size in self.sizes):
            raise InputError(f"{self.name}: a bucket of no elements; leave it out")

    @cached_property
    def numel(self) -> int:
        """Elements in all."""
        return sum(self.sizes) + sum(math.prod(shape) for _, shape in self.tensors)

    @property
    def shapes_known(self) -> bool:
        """Whether matrices are known, on which PowerSGD's bytes depend."""
        return not self.sizes

    def groups(self, group_bytes: int = GROUP_BYTES) -> tuple[Buffer, ...]:
        """What the hook exchanges, one after the other; closed by the tensor that fills it.

        Law (``test_groups_are_the_hooks``): these are the groups of ``taciturn.exchange``.
        """
        return self._buffers(group_bytes, group_bytes)

    def group_shapes(self) -> tuple[tuple[Shape, ...], ...]:
        """The shapes of the tensors of each group; empty where only sizes are known."""
        return tuple(g.shapes for g in self.groups() if g.shapes is not None)

    def buckets(self) -> tuple[Buffer, ...]:
        """What stock DDP exchanges, and the hook for what it overlaps: 1 MiB first, then 25.

        Law (``test_buckets_are_ddps``): these are the buckets that torch assigns.
        """
        return self._buffers(FIRST_BUCKET_BYTES, GROUP_BYTES)

    def _buffers(self, first_bytes: int, later_bytes: int) -> tuple[Buffer, ...]:
        if self.sizes:
            parts: list[tuple[int, tuple[Shape, ...] | None]] = [(n, None) for n in self.sizes]
        else:
            shapes = [shape for _, shape in self.tensors]
            cut = _cut(shapes, first_bytes, later_bytes)
            parts = [(sum(map(math.prod, some)), tuple(some)) for some in cut]
        made, done = [], 0
        for numel, some in parts:
            done += numel
            made.append(Buffer(numel, some, done / self.numel))
        return tuple(made)

    @classmethod
    def of_module(cls, module: torch.nn.Module, name: str = "") -> Model:
        """The trained parameters of a torch module, of DDP's inner one if it is wrapped.

        Raises:
            InputError: it has none, or one without a shape or of complex numbers.
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from taciturn.exchange import backward_order

        if isinstance(module, DistributedDataParallel):
            module = module.module
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        name = name or type(module).__name__
        for one, parameter in trained.items():
            if torch.nn.parameter.is_lazy(parameter):
                raise InputError(f"{name}: {one} has no shape yet: call the module once before")
            if not parameter.is_floating_point():
                raise InputError(
                    f"{name}: {one} is {parameter.dtype}, and only real gradients are averaged"
                )
        order = [n for n in backward_order(module) if n in trained]
        tensors = tuple((n, tuple(trained[n].shape)) for n in order)
        others = sorted({str(p.dtype) for p in trained.values()} - {str(torch.float32)})
        notes = (f"Gradients of {', '.join(others)} are counted as fp32.",) if others else ()
        return cls(name, tensors, notes=notes)


def _cut(shapes: Sequence[Shape], first_bytes: int, later_bytes: int) -> list[list[Shape]]:
    """Cut tensors into runs, each ended by the tensor that fills it."""
    runs: list[list[Shape]] = []
    run: list[Shape] = []
    held, limit = 0, first_bytes
    for shape in shapes:
        run.append(shape)
        held += ELEMENT_BYTES * math.prod(shape)
        if held >= limit:
            runs.append(run)
            run, held, limit = [], 0, later_bytes
    return [*runs, run] if run else runs


def parse_model(text: str) -> Model:
    """The model that ``text`` names; the module of a ``module:callable`` is imported and called.

    Raises:
        InputError: it names none, or one without parameters.
    """
    plain = text.strip()
    if plain in BUNDLED:
        return Model(plain, tuple(gpt_shape(BUNDLED[plain]).tensors()))
    if ":" in plain:
        return _from_callable(plain)
    if not plain or not (plain[0].isdigit() or plain[0] == "."):
        raise InputError(f"--model {text!r} is none that is known; {_HELP}")
    sizes = []
    for one in plain.split(","):
        size = parse_size(one)
        if size % ELEMENT_BYTES:
            raise InputError(
                f"--model {text!r}: a bucket of {size} bytes is no whole number of fp32 elements; "
                "give the bytes of its gradients in fp32"
            )
        sizes.append(size // ELEMENT_BYTES)
    total = format_size(ELEMENT_BYTES * sum(sizes))
    return Model(f"{len(sizes)} buckets, {total}", sizes=tuple(sizes))


def _from_callable(text: str) -> Model:
    where, _, what = text.partition(":")
    if not all(part.isidentifier() for part in (*where.split("."), what)):
        raise InputError(f"--model {text!r}: that is no module and a name in it; {_HELP}")
    folder = str(Path.cwd())
    if folder not in sys.path:  # as python -m does
        sys.path.insert(0, folder)
    import torch

    try:
        home = importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise InputError(f"--model {text!r}: {error}; {_HELP}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"--model {text!r} cannot be imported: {described(error)}") from error
    made = getattr(home, what, None)
    if made is None:
        raise InputError(f"--model {text!r}: module {where!r} has no {what!r}; {_HELP}")
    if isinstance(made, torch.nn.Module):
        return Model.of_module(made, text)
    if not callable(made):
        raise InputError(f"--model {text!r}: that is a {type(made).__name__}; {_HELP}")
    try:
        module = made()
    except (Exception, SystemExit) as error:
        raise InputError(
            f"--model {text!r} failed when it was called without arguments: {described(error)}"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"--model {text!r} returned a {type(module).__name__}; {_HELP}")
    return Model.of_module(module, text)

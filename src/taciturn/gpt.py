"""The shape of the byte-level GPT that bench, benchmarks and plan know by its size; no torch.

:class:`taciturn.bench.inputs.GPT` is the model itself.
"""

from __future__ import annotations

from typing import NamedTuple

from taciturn.errors import InputError

__all__ = ["CONTEXT", "HEAD_ELEMS", "VOCABULARY", "GPTShape", "gpt_shape"]

CONTEXT = 128  # bytes of text in one sequence
VOCABULARY = 256  # bytes
HEAD_ELEMS = 32  # width of one attention head


class GPTShape(NamedTuple):
    """Size of a GPT: ``width`` in elements, a multiple of the head's 32; ``depth`` in blocks."""

    width: int
    depth: int

    @property
    def params(self) -> int:
        """Number of parameters (output head tied to the byte embedding)."""
        block = 12 * self.width**2 + 13 * self.width
        return (VOCABULARY + CONTEXT + 2) * self.width + self.depth * block

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in about the order of backward."""
        w = self.width

        def linear(name: str, rows: int, columns: int) -> list[tuple[str, tuple[int, ...]]]:
            return [(f"{name}.bias", (rows,)), (f"{name}.weight", (rows, columns))]

        def norm(name: str) -> list[tuple[str, tuple[int, ...]]]:
            return [(f"{name}.weight", (w,)), (f"{name}.bias", (w,))]

        made = norm("norm")
        for block in range(self.depth - 1, -1, -1):
            at = f"blocks.{block}"
            made += [*linear(f"{at}.down", w, 4 * w), *linear(f"{at}.up", 4 * w, w)]
            made += [*norm(f"{at}.norm_2"), *linear(f"{at}.proj", w, w)]
            made += [*linear(f"{at}.qkv", 3 * w, w), *norm(f"{at}.norm_1")]
        return [*made, ("positions.weight", (CONTEXT, w)), ("tokens.weight", (VOCABULARY, w))]


def gpt_shape(numel: int) -> GPTShape:
    """The smallest GPT of usual proportions with at least ``numel`` parameters.

    Usual: a width of 32 to 128 per block, or a single block when even that is too large.
    """
    best: GPTShape | None = None
    for depth in range(1, 257):
        for width in range(HEAD_ELEMS, 16384, HEAD_ELEMS):
            shape = GPTShape(width, depth)
            if shape.params < numel:
                continue
            usual = 32 * depth <= width <= 128 * depth or depth == 1
            if usual and (best is None or shape.params < best.params):
                best = shape
            break  # wider is only larger
    if best is None:
        raise InputError(f"no GPT of usual proportions has {numel} parameters; use --input random")
    return best

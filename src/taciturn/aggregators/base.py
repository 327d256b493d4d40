"""The contract of every aggregator: this rank's gradients in, the average over ranks out.

Laws, each a test of the same name in ``tests/test_aggregators.py`` that runs over all of them, on
threads and on real processes:

- *conservation*: sum over ranks of input = sum over ranks of (output + residual), every step.
- *alone*: with one rank nothing is sent, the gradients are unchanged, and the residual is zero.
- *zero*: zero gradients give exactly zero.
- *cost*: :meth:`Aggregator.cost` equals what the ledger counted.
- *bit-identical*: where claimed, all ranks end with the same bits.
- *non-finite*: a NaN or infinity on one rank makes something non-finite on every rank alike.
- *abandoned*: a step that ends with ``finish_step(keep=False)`` leaves the state as it was.
- *resume*: a copy that loads ``state_dict()`` goes on bit for bit.
- *generator*: torch's global random state is the same before and after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override

from taciturn.collectives.base import Cost, is_dense
from taciturn.errors import InputError
from taciturn.grammar import Method, method_of, with_option
from taciturn.transport import Transport

__all__ = ["Aggregator", "Group"]


@dataclass(frozen=True)
class Group:
    """An exchange group: tensors whose gradients are exchanged together, as one flat buffer.

    Each tensor's elements lie in the buffer in its memory order, so that a channels_last gradient
    is copied as it lies; :meth:`views` shows them in logical order.
    """

    names: tuple[str, ...]
    """Of the parameters; what state is keyed by."""
    shapes: tuple[tuple[int, ...], ...]
    """Logical shapes."""
    strides: tuple[tuple[int, ...], ...]
    """Strides of each tensor within its part of the buffer; dense."""

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.Tensor]]) -> Group:
        """Return the group of named tensors. Those that are not dense lie in logical order."""
        strides = []
        for _, tensor in tensors:
            dense = tensor.numel() and is_dense(tensor)
            strides.append(tuple(tensor.stride()) if dense else _contiguous(tuple(tensor.shape)))
        return cls(
            tuple(name for name, _ in tensors),
            tuple(tuple(tensor.shape) for _, tensor in tensors),
            tuple(strides),
        )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Where each tensor's elements are in the buffer: start and stop."""
        result, start = [], 0
        for shape in self.shapes:
            stop = start + torch.Size(shape).numel()
            result.append((start, stop))
            start = stop
        return tuple(result)

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.bounds[-1][1] if self.bounds else 0

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in a buffer, logical shapes; views, so that writing changes it."""
        return [
            flat[start:stop].as_strided(shape, strides, flat.storage_offset() + start)
            for (start, stop), shape, strides in zip(
                self.bounds, self.shapes, self.strides, strict=True
            )
        ]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


class Aggregator(ABC):
    """Averages gradients over the ranks of a transport, exactly or not.

    One object belongs to one rank and sees the same groups in the same order in every step.
    """

    name: ClassVar[str] = ""
    """The method's name in the grammar; empty for what is not in it."""
    biased: ClassVar[bool] = False
    """What is left out is lost unless it is fed back (:mod:`taciturn.error_feedback`)."""
    overlaps: bool = False
    """Groups are exchanged at once, as DDP's own buckets are: :meth:`start` does not wait."""
    bit_identical: bool = True
    """All ranks end with the same bits; otherwise only the mean over ranks is right."""

    @property
    def method(self) -> Method:
        """This aggregator as a method: the keys that are not at their defaults.

        Law (``test_written_methods_build_the_same``): what is built from its text is written alike.
        """
        if not self.name:  # somebody's own; an address would be another on each rank
            plain = type(self).__repr__ is object.__repr__
            text = type(self).__qualname__ if plain else repr(self)
            return Method(text, text, {})
        bare = method_of(self.name, self)
        return with_option(bare, "feedback", False) if self.biased else bare

    @override
    def __str__(self) -> str:
        return self.method.text

    @abstractmethod
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Replace ``gradients`` by the average over ranks, in place.

        State changes only in :meth:`finish_step`.

        Args:
            gradients: shape (group.numel,), fp32 or fp64, contiguous.
            group: what they are the gradients of.
            transport: the ranks; all of them make the same calls in the same order.
            residual: None, or memory like ``gradients`` that gets what this rank brought and the
                average does not hold, in units of this rank's gradient.

        Raises:
            InputError, MismatchError, PeerError: as :meth:`Collective.all_reduce`.
        """

    def start(
        self, gradients: torch.Tensor, group: Group, transport: Transport
    ) -> Callable[[], None] | None:
        """Begin :meth:`aggregate`, without a residual; several groups may be under way at once.

        Returns:
            What has to be called before ``gradients`` are used, once, in the order of the calls;
            None if there is nothing to wait for, as in aggregators that do not overlap groups.

        Raises:
            InputError, MismatchError, PeerError: as :meth:`aggregate`; so may what is returned.
        """
        self.aggregate(gradients, group, transport)
        return None

    @abstractmethod
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        """Return what one call costs ``rank``; None where the backend's own share is unknown."""

    def finish_step(self, keep: bool) -> None:  # noqa: B027 - most hold no state
        """End a step: adopt what it learnt, or forget it (a step with non-finite gradients)."""

    def memory_bytes(self) -> int:
        """Return the bytes of state held between steps."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to be bit-equal: plain tensors (copies) and numbers.

        Keyed by parameter name where it belongs to one.
        """
        return {}

    def check_state(
        self,
        state: dict[str, Any],
        groups: Sequence[Group],  # noqa: ARG002 - for those whose state belongs to parameters
    ) -> None:
        """Refuse a state that cannot be gone on from with these groups; change nothing.

        Raises:
            InputError: it belongs to another aggregator or other parameters, or is damaged.
        """
        copy(self).load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            InputError: the state belongs to another aggregator.
        """
        if state:
            raise InputError(
                f"{type(self).__name__} has no state, but was given {sorted(state)}: "
                "this checkpoint belongs to another method"
            )

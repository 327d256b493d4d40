"""Error feedback: what one step leaves out is added to the next.

Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); Karimireddy et al., "Error
Feedback Fixes SignSGD", arXiv:1901.09847, algorithm 1. Differences: no step size inside (residuals
are gradients, so a change of the learning rate does not rescale them); a residual is what *this
rank* brought and the average does not hold, as the aggregator accounts for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from typing_extensions import override

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.base import Cost
from taciturn.errors import InputError
from taciturn.grammar import Method, with_option
from taciturn.ranges import check_number
from taciturn.transport import Transport

__all__ = ["ErrorFeedback"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_GROWTH_STEPS = 10
"""Steps in a row above the limit before growth is reported: one bad batch is no trend."""


@dataclass(eq=False)
class ErrorFeedback(Aggregator):
    """Wraps any aggregator: aggregate(gradients + residual), keep the new residual.

    Law (``test_conservation``): sum over ranks of (gradients + old residual) = sum over ranks of
    (output + new residual), in every step.

    Args:
        inner: the aggregator.
        dtype: of the residuals between steps, "fp32" or "bf16"; the latter halves their memory and
            loses what it rounds away.
        device: where residuals live between steps, such as "cpu"; the gradients' if None.
        growth_limit: a residual norm above this many times the gradients' norm, ten steps in a row,
            is warned of once.

    Attributes:
        scale: loss scale of the gradients that come in; residuals are kept unscaled. Set by the
            caller before each step.
    """

    inner: Aggregator
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: str | None = None
    growth_limit: float = 100.0
    scale: float = field(default=1.0, init=False, repr=False)
    _residuals: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    # By the first name of a group: whole residuals, now and pending, and memory to write in.
    _current: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _new: dict[str, tuple[Group, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    _spare: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _squares: torch.Tensor | None = field(default=None, init=False, repr=False)
    _norms: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)
    _grown: int = field(default=0, init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InputError(f"dtype={self.dtype!r} of residuals: choose {' or '.join(_DTYPES)}")
        check_number("growth_limit", self.growth_limit, 0, above=True)
        if isinstance(self.inner, ErrorFeedback):
            raise InputError("error feedback around error feedback: wrap the aggregator once")
        self.bit_identical = self.inner.bit_identical

    @property
    @override
    def method(self) -> Method:
        # Feedback is what biased methods have if nothing is said.
        return with_option(self.inner.method, "feedback", None if self.inner.biased else True)

    @override
    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        if residual is not None:
            raise InputError("error feedback keeps its residual itself: pass residual=None")
        if transport.size == 1:
            self.inner.aggregate(gradients, group, transport)
            return
        ledger = transport.ledger
        with ledger.codec():
            before = gradients.square().sum() if gradients.numel() else gradients.new_zeros(())
            for name, (start, stop) in zip(group.names, group.bounds, strict=True):
                kept = self._residuals.get(name)
                if kept is not None:
                    gradients[start:stop].add_(kept.to(gradients), alpha=self.scale)
        key = group.names[0] if group.names else ""
        new = self._spare.pop(key, None)
        if new is None or new.shape != gradients.shape or new.dtype != gradients.dtype:
            new = torch.empty_like(gradients)
        self.inner.aggregate(gradients, group, transport, new)
        with ledger.codec():
            new.div_(self.scale)
            squares = torch.stack([new.square().sum(), before / self.scale**2])
            self._squares = squares if self._squares is None else self._squares.add_(squares)
            stored = new.to(_DTYPES[self.dtype]) if new.dtype != torch.float64 else new
            if self.device is not None:
                stored = stored.to(self.device)
            self._new[key] = (group, stored)
            if stored is not new:
                self._spare[key] = new

    @override
    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        return self.inner.cost(group, dtype, ranks, rank)

    @override
    def finish_step(self, keep: bool) -> None:
        self.inner.finish_step(keep)
        new, self._new = self._new, {}
        for key, (group, stored) in new.items():
            # Of the old and the new residual, what is not needed is the next step's memory.
            unused = self._current.get(key) if keep else stored
            if unused is not None and unused.dtype != torch.bfloat16 and self.device is None:
                self._spare[key] = unused
            if keep:
                self._current[key] = stored
                for name, (start, stop) in zip(group.names, group.bounds, strict=True):
                    self._residuals[name] = stored[start:stop]
        squares, self._squares = self._squares, None
        if not keep:
            return
        if squares is None:
            return
        residual, gradient = squares.sqrt().tolist()
        self._norms = (residual, gradient)
        grown = residual > self.growth_limit * gradient > 0
        self._grown = self._grown + 1 if grown else 0
        if self._grown == _GROWTH_STEPS and not self._warned:
            self._warned = True
            warnings.warn(
                f"the residual's norm, {residual:.3g}, is {residual / gradient:.0f} times the "
                f"gradients' after {_GROWTH_STEPS} steps above {self.growth_limit:g}: what is left "
                "out is not caught up with; send more (a higher rank, ratio or number of bits)",
                stacklevel=2,
            )

    @property
    def residual_norm(self) -> float:
        """Return the norm of this rank's residual after the last step that was kept."""
        return self._norms[0]

    @property
    def residual_bytes(self) -> int:
        """Return the bytes of this rank's residuals."""
        return sum(kept.nbytes for kept in self._residuals.values())

    @override
    def memory_bytes(self) -> int:
        spare = sum(memory.nbytes for memory in self._spare.values())
        return self.residual_bytes + spare + self.inner.memory_bytes()

    def drop_residuals(self) -> None:
        """Forget all residuals: after a change of the number of ranks they no longer add up."""
        for held in (self._residuals, self._current, self._new):
            held.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": {name: kept.clone() for name, kept in self._residuals.items()},
            "inner": self.inner.state_dict(),
        }

    @override
    def check_state(self, state: dict[str, Any], groups: Sequence[Group]) -> None:
        """As the contract says. No residual at all means zero ones; all or none are needed."""
        self._check_keys(state)
        residuals = state["residuals"]
        lengths = {
            name: stop - start
            for group in groups
            for name, (start, stop) in zip(group.names, group.bounds, strict=True)
        }
        if residuals and (odd := sorted(set(residuals) ^ set(lengths))):
            raise InputError(
                f"the residuals in this state and the parameters here differ in "
                f"{', '.join(map(repr, odd[:3]))}: it belongs to another model, or is damaged"
            )
        for name, kept in residuals.items():
            usable = isinstance(kept, torch.Tensor) and kept.is_floating_point()
            if not usable or kept.shape != (lengths[name],):
                tensor = isinstance(kept, torch.Tensor)
                got = f"of {kept.dtype} and shape {tuple(kept.shape)}" if tensor else repr(kept)
                raise InputError(
                    f"the residual of {name!r} in this state is {got}: {lengths[name]} real "
                    "numbers are needed"
                )
            if not kept.isfinite().all():
                raise InputError(
                    f"the residual of {name!r} in this state is not finite: take an older one"
                )
        self.inner.check_state(state["inner"], groups)

    def _check_keys(self, state: dict[str, Any]) -> None:
        if set(state) != {"residuals", "inner"} or not isinstance(state["residuals"], dict):
            raise InputError(
                f"error feedback was given a state with {sorted(state)}, and needs "
                "'residuals' and 'inner': this checkpoint belongs to another method"
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_keys(state)
        self.inner.load_state_dict(state["inner"])
        self._residuals = {
            name: kept.clone().to(self.device) if self.device is not None else kept.clone()
            for name, kept in state["residuals"].items()
        }
        for held in (self._current, self._new):
            held.clear()

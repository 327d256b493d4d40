"""Parameters that are exchanged together, and what became of an exchange of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from taciturn.errors import InputError
from taciturn.exchange import Exchange
from taciturn.ranges import check_whole

__all__ = ["Fragment", "Outcome", "split", "wide"]


@dataclass(frozen=True)
class Outcome:
    """What became of one exchange; bytes and seconds of this rank, drift and cosine of all."""

    finite: bool
    sent_bytes: int
    codec_s: float
    exchange_s: float
    drift: float
    cosine: float


@dataclass
class Fragment:
    """Some of the parameters, which are exchanged together."""

    index: int
    parameters: dict[str, torch.Tensor]
    anchor: dict[str, torch.Tensor]
    outer: torch.optim.Optimizer
    exchange: Exchange | None
    """None with one rank."""
    counted: bool
    delta: dict[str, torch.Tensor]
    pending: Future[Outcome] | None = None
    due: int = 0
    """The step after which the pending exchange is applied."""
    hidden: bool = False
    """The pending exchange goes on beside local steps."""
    since: int = 0
    """Local steps since its last exchange began."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of it; waits for a pending exchange."""
        pending = None
        if self.pending is not None and self.pending.exception() is None:
            pending = {
                "due": self.due,
                "outcome": vars(self.pending.result()).copy(),
                "delta": {n: d.clone() for n, d in self.delta.items()},
            }
        return {
            "anchor": {n: a.clone() for n, a in self.anchor.items()},
            "outer": deepcopy(self.outer.state_dict()),
            "exchange": self.exchange.state_dict() if self.exchange else None,
            "since": self.since,
            "pending": pending,
        }

    def check_state(self, saved: dict[str, Any]) -> None:
        """Refuse the state of other parameters; change nothing."""
        if set(saved["anchor"]) != set(self.anchor):
            odd = sorted(set(saved["anchor"]) ^ set(self.anchor))
            raise InputError(
                f"this state belongs to another model: {', '.join(map(repr, odd[:3]))} "
                f"{'is' if len(odd) == 1 else 'are'} not in both"
            )
        for name, anchor in self.anchor.items():
            if saved["anchor"][name].shape != anchor.shape:
                raise InputError(
                    f"{name!r} has shape {tuple(saved['anchor'][name].shape)} in this state, "
                    f"and {tuple(anchor.shape)} here: it belongs to another model"
                )
            if not saved["anchor"][name].isfinite().all():
                raise InputError(f"{name!r} is not finite in this state: take an older one")
        saved_groups = saved["outer"]["param_groups"]
        lengths = [len(group["params"]) for group in saved_groups]
        if lengths != [len(group["params"]) for group in self.outer.param_groups] or any(
            set(self.outer.defaults) - set(group) for group in saved_groups
        ):
            raise InputError(
                "the outer optimizer in this state is another than the "
                f"{type(self.outer).__name__} here: resume with the outer= that it was saved with"
            )
        for place, state in saved["outer"]["state"].items():
            anchor = list(self.anchor.values())[place]
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape not in ((), anchor.shape):
                    raise InputError(
                        f"{key!r} of the outer optimizer has shape {tuple(value.shape)} in this "
                        f"state, and {tuple(anchor.shape)} is needed: it is damaged"
                    )
        check_whole("since", saved["since"], 0, hint="this state is damaged")
        if saved["pending"] is not None:
            Outcome(**saved["pending"]["outcome"])
            check_whole("due", saved["pending"]["due"], 0, hint="this state is damaged")
            shapes = {name: delta.shape for name, delta in self.delta.items()}
            if {name: d.shape for name, d in saved["pending"]["delta"].items()} != shapes:
                raise InputError(
                    "the average under way in this state is damaged: take an older one"
                )
        if self.exchange is not None and saved["exchange"] is not None:
            self.exchange.check_state(saved["exchange"])

    def digest(self, saved: dict[str, Any]) -> str:
        """Return a checksum of what a state holds of it and is the same on every rank."""
        crc = 0
        tensors = [saved["anchor"][name] for name in self.anchor]
        for state in saved["outer"]["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            crc = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), crc)
        return f"{crc:08x}"

    def load_state_dict(self, saved: dict[str, Any], *, anew: bool) -> None:
        """Restore what :meth:`state_dict` returned; ``anew``: from the anchor, without its rest."""
        for name, anchor in self.anchor.items():
            anchor.copy_(saved["anchor"][name])
        self.outer.load_state_dict(saved["outer"])
        if self.exchange is not None and saved["exchange"] is not None:
            self.exchange.load_state_dict(saved["exchange"])
        self.since, self.pending = saved["since"], None
        pending = saved["pending"]
        if anew:
            self.since = 0
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(self.anchor[name])
        elif pending is not None:
            for name, delta in self.delta.items():
                delta.copy_(pending["delta"][name])
            self.due = pending["due"]
            self.pending = Future()
            self.pending.set_result(Outcome(**pending["outcome"]))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in fp32, or fp64 if it is: what differences are taken in."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def split(
    named: Sequence[tuple[str, torch.Tensor]], count: int
) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut a sequence of tensors into ``count`` parts of about equal size, none empty."""
    total = sum(tensor.numel() for _, tensor in named)
    parts: list[list[tuple[str, torch.Tensor]]] = [[]]
    taken = 0
    for place, (name, tensor) in enumerate(named):
        left = len(named) - place
        full = parts[-1] and taken >= total * len(parts) / count
        needed = parts[-1] and left <= count - len(parts)
        if len(parts) < count and (full or needed):
            parts.append([])
        parts[-1].append((name, tensor))
        taken += tensor.numel()
    return parts

"""Named tensors in fixed groups that one aggregator averages over the ranks.

What the DDP hook, accumulation windows and local updates have in common. Groups are cut once and
saved with the state, because a ring's order of summation follows the place in a buffer: a resumed
run is bit-equal only with the groups that it was saved with.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from taciturn.aggregators.base import Aggregator, Group
from taciturn.collectives.dissemination import gather_rows
from taciturn.collectives.ring import Ring
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError
from taciturn.ledger import labelled
from taciturn.transport import DistributedTransport

__all__ = ["FIRST_BYTES", "GROUP_BYTES", "Exchange", "agree", "all_finite", "backward_order"]

GROUP_BYTES = 25 * 2**20
"""DDP's own default for buckets."""
FIRST_BYTES = 2**20
"""Of a first group that others overlap: small, so that its exchange begins early, as in DDP."""

_VERSION = 1

_Kind = tuple[torch.dtype, torch.device]


def agree(
    transport: DistributedTransport,
    items: Mapping[str, str],
    problem: Exception | None,
    what: str,
) -> None:
    """Raise on every rank if one has a problem, or if the ranks' items differ.

    Args:
        transport: the ranks; all of them call this at the same point.
        items: what must be the same everywhere, by name; the same names on all ranks that have no
            problem.
        problem: what went wrong on this rank, if anything.
        what: is being done, as "attaching".

    Raises:
        MismatchError: with another rank's problem, or with what differs and where; ``problem``
            itself on its rank.
    """
    if transport.size == 1:
        if problem is not None:
            raise problem
        return
    vote = -1 if problem is not None else zlib.crc32(repr(items).encode())
    said = gather_rows(torch.tensor([vote], device=transport.header_device), transport)[
        :, 0
    ].tolist()
    bad = [rank for rank, vote in enumerate(said) if vote == -1]
    if bad:
        text = _told(transport, bad[0], str(problem))
        if problem is not None:
            raise problem
        raise MismatchError(f"{what} failed on rank {bad[0]}: {text}")
    others = [rank for rank, vote in enumerate(said) if vote != said[0]]
    if not others:
        return
    theirs = json.loads(_told(transport, others[0], json.dumps(items)))
    ours = json.loads(_told(transport, 0, json.dumps(items)))
    name = next(n for n in ours if ours[n] != theirs.get(n))
    raise MismatchError(
        f"{what} differs between the ranks in {name}: {_short(ours[name])} on rank 0, "
        f"{_short(theirs.get(name, 'nothing'))} on rank {others[0]}"
    )


def _told(transport: DistributedTransport, rank: int, text: str) -> str:
    """Return ``rank``'s text on every rank."""
    mine = list(text.encode()) if transport.rank == rank else []
    size = torch.tensor([len(mine)], device=transport.header_device)
    Ring().all_reduce(size, transport)
    letters = torch.zeros(int(size.item()), dtype=torch.int32, device=transport.header_device)
    if mine:
        letters.copy_(torch.tensor(mine, dtype=torch.int32))
    Ring().all_reduce(letters, transport)
    return bytes(letters.tolist()).decode()


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def backward_order(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters, about as backward makes their gradients.

    Where DDP's buckets hold the same ones in the same order, it can take averages from our buffers
    as they are. Modules come in reverse, a module's own parameters as they are, but a linear
    layer's weight last, since its gradient is transposed after the bias's is there.
    """
    order = []
    for prefix, owner in reversed(list(module.named_modules())):
        names = [name for name, _ in owner.named_parameters(recurse=False)]
        if isinstance(owner, torch.nn.Linear):
            names.sort(key="weight".__eq__)
        order += [f"{prefix}.{name}" if prefix else name for name in names]
    return order


def all_finite(buffer: torch.Tensor) -> bool:
    """Return whether all elements are finite, in one cheap pass where they are."""
    # A finite sum has finite terms only; one that is not may have overflowed itself.
    return bool(buffer.sum().isfinite() or buffer.isfinite().all())


class Exchange:
    """The groups, their buffers, and the aggregator with its state.

    Args:
        tensors: by name, in the order of the exchange; only their shapes, layouts, dtypes and
            devices count. fp64 ones are exchanged as they are, all others in fp32.
        aggregator: of this exchange alone.
        transport: the ranks.
        group_bytes: of the buffer of a group, about: the tensor that reaches it is its last.
        first_bytes: the same of the first group; ``group_bytes`` if None.

    Attributes:
        groups: cut from the tensors, one device and dtype each.
        buffers: of the groups, flat; what is exchanged.
        replicas_differ: ranks may end with different averages.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.Tensor]],
        aggregator: Aggregator,
        transport: DistributedTransport,
        group_bytes: int = GROUP_BYTES,
        first_bytes: int | None = None,
    ) -> None:
        self.aggregator, self.transport = aggregator, transport
        self.replicas_differ = not aggregator.bit_identical and transport.size > 1
        self._tensors = dict(tensors)
        self._last: torch.Tensor | None = None
        self._set_groups(_cut(list(tensors), group_bytes, first_bytes or group_bytes))

    def _set_groups(self, cut: list[tuple[Group, _Kind]]) -> None:
        self.groups = [group for group, _ in cut]
        self.buffers = [
            torch.zeros(group.numel, dtype=dtype, device=device) for group, (dtype, device) in cut
        ]
        self._places = {
            name: (g, self.buffers[g][start:stop])
            for g, group in enumerate(self.groups)
            for name, (start, stop) in zip(group.names, group.bounds, strict=True)
        }

    def describe(self) -> dict[str, str]:
        """Return what has to be the same on all ranks, for :func:`agree`."""
        groups = zip(self.groups, self.buffers, strict=True)
        tensors = [
            (name, shape, strides, str(buffer.dtype), buffer.device.type)
            for group, buffer in groups
            for name, shape, strides in zip(group.names, group.shapes, group.strides, strict=True)
        ]
        return {
            "the method": str(self.aggregator),
            "the number of parameters": str(len(tensors)),
            **{f"parameter {number}": repr(tensor) for number, tensor in enumerate(tensors)},
            "the sizes of the groups": repr([group.numel for group in self.groups]),
        }

    @property
    def counted(self) -> bool:
        """Return whether the ledger sees all that is sent; the backend's own share it does not."""
        return all(
            self.aggregator.cost(group, buffer.dtype, self.transport.size) is not None
            for group, buffer in zip(self.groups, self.buffers, strict=True)
        )

    def place(self, name: str) -> tuple[int, torch.Tensor]:
        """Return a tensor's group and its part of that group's buffer, in memory order."""
        return self._places[name]

    def set_scale(self, scale: float) -> None:
        """Say what the tensors of the coming step are multiplied by; residuals are kept without."""
        if isinstance(self.aggregator, ErrorFeedback):
            self.aggregator.scale = scale

    def start(self, g: int, buffer: torch.Tensor | None = None) -> Callable[[], bool]:
        """Begin to average one group; several may be under way where the aggregator overlaps them.

        Args:
            g: index of the group.
            buffer: memory like ``buffers[g]`` to do it in, instead of there.

        Returns:
            What waits for the average and says whether it is finite here; to be called once, in the
            order in which the groups were begun.
        """
        buffer = self.buffers[g] if buffer is None else buffer
        self._last = buffer
        with labelled("exchange"):
            wait = self.aggregator.start(buffer, self.groups[g], self.transport)
        if wait is None:
            finite = all_finite(buffer)  # now, and not when other groups have been exchanged
            return lambda: finite

        def finish() -> bool:
            with labelled("exchange"):
                wait()
            return all_finite(buffer)

        return finish

    def finish_step(self, finite: bool) -> bool:
        """End a step after its last group; return whether all ranks found it finite.

        If not, the aggregator's state stays as it was, and no rank has finite averages only.
        """
        if self.replicas_differ:
            # Replicas that differ may lie on both sides of an overflow.
            flag = torch.tensor([int(finite)], device=self.transport.header_device)
            with labelled("exchange"):
                agreed = bool(gather_rows(flag, self.transport).all())
            if finite and not agreed and self._last is not None:
                self._last.fill_(float("nan"))
            finite = agreed
        self.aggregator.finish_step(keep=finite)
        return finite

    def run(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Replace all tensors by their averages, in one step; say whether all are finite.

        Args:
            tensors: by name, as given at the start; dense, of the same shapes and layouts.
        """
        views = [g.views(buffer) for g, buffer in zip(self.groups, self.buffers, strict=True)]
        finite = True
        for g, group in enumerate(self.groups):
            torch._foreach_copy_(views[g], [tensors[name] for name in group.names])
            finite &= self.start(g)()
        finite = self.finish_step(finite)
        for group, parts in zip(self.groups, views, strict=True):
            torch._foreach_copy_([tensors[name] for name in group.names], parts)
        return finite

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain tensors and numbers, of this rank."""
        return {
            "version": _VERSION,
            "method": str(self.aggregator),
            "ranks": self.transport.size,
            "rank": self.transport.rank,
            "groups": [list(group.names) for group in self.groups],
            "aggregator": self.aggregator.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any] | None) -> None:
        """Refuse a state that cannot be gone on from; change nothing.

        Raises:
            InputError: the state is missing, damaged, or of another rank, method or model.
        """
        if state is None:
            raise InputError(
                f"rank {self.transport.rank} has no state to load: its file is missing"
            )
        missing = {"version", "method", "ranks", "rank", "groups", "aggregator"} - set(state)
        if missing or state["version"] != _VERSION:
            raise InputError(
                "this is no state of a communicator or an exchange: it lacks "
                f"{', '.join(sorted(missing)) or f'version {_VERSION}'}"
            )
        if state["method"] != str(self.aggregator):
            raise InputError(
                f"this state is of {state['method']}, and {self.aggregator} is attached: attach "
                "the method that it was saved from"
            )
        names = [name for group in state["groups"] for name in group]
        if sorted(names) != sorted(self._tensors):
            odd = sorted(set(names) ^ set(self._tensors))
            raise InputError(
                f"this state belongs to another model: {', '.join(map(repr, odd[:3]))} "
                f"{'is' if len(odd) == 1 else 'are'} not in both"
            )
        if state["ranks"] == self.transport.size and state["rank"] != self.transport.rank:
            raise InputError(
                f"this state is rank {state['rank']}'s, and this is rank {self.transport.rank}: "
                "every rank loads its own"
            )
        groups = [group for group, _ in self._cut_as(state)]
        self.aggregator.check_state(state["aggregator"], groups)

    def _cut_as(self, state: Mapping[str, Any]) -> list[tuple[Group, _Kind]]:
        tensors = [[(name, self._tensors[name]) for name in group] for group in state["groups"]]
        return [cut for some in tensors for cut in _cut(some, 1 << 62, 1 << 62)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore on this rank what :meth:`state_dict` returned and :meth:`check_state` accepts.

        With another number of ranks residuals are dropped, with a warning: they add up only over
        the ranks that made them.
        """
        self._set_groups(self._cut_as(state))
        self.aggregator.load_state_dict(state["aggregator"])
        if state["ranks"] != self.transport.size and isinstance(self.aggregator, ErrorFeedback):
            self.aggregator.drop_residuals()
            warnings.warn(
                f"saved with {state['ranks']} ranks and resumed with {self.transport.size}: the "
                "residuals are dropped, since they add up only over the ranks that made them",
                stacklevel=3,
            )


def _cut(
    tensors: Sequence[tuple[str, torch.Tensor]], group_bytes: int, first_bytes: int
) -> list[tuple[Group, _Kind]]:
    """Cut the tensors into groups of one device and dtype, in order, as DDP cuts its buckets."""
    groups: list[tuple[Group, _Kind]] = []
    current: list[tuple[str, torch.Tensor]] = []
    kind: _Kind | None = None
    size = 0
    for name, tensor in tensors:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        nbytes = tensor.numel() * dtype.itemsize
        most = group_bytes if groups else min(first_bytes, group_bytes)
        if kind is not None and (kind != (dtype, tensor.device) or size >= most):
            groups.append((Group.of(current), kind))
            current, size = [], 0
        current.append((name, tensor))
        kind, size = (dtype, tensor.device), size + nbytes
    if kind is not None:
        groups.append((Group.of(current), kind))
    return groups

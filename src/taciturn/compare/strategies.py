"""A method in the harness's loop: what it does with a global batch, and what that cost.

The harness calls :meth:`Strategy.take` once per global batch and asks nothing of what a method does
with it. It hands out the loss as a function that counts: examples that a method leaves out, or sees
twice, are in the record.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.accumulation import Accumulation
from taciturn.compare.methods import Comparable, comparable
from taciturn.compare.task import Task
from taciturn.errors import InputError
from taciturn.local_update import DiLoCo, LocalSGD

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = [
    "AveragesGradients",
    "Costs",
    "LossOf",
    "Share",
    "StockDDP",
    "Strategy",
    "strategy_for",
]

BUCKET_BYTES = 25 * 2**20
"""DDP's own, of methods that say nothing of it."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Costs:
    """What a method has cost this rank so far; added to in place.

    Attributes:
        sent_bytes: counted by the ledger; None where the backend sends, which does not say.
        codec_s: seconds in encoding, adding and decoding.
        waiting_s: seconds the thread of the exchange waited for messages.
        exchanges: how many there were.
        skipped: steps or rounds that were left out because something was not finite.
        state_bytes: held between steps, the most so far.
        residual_norm: of error feedback, the last.
        residual_peak: the greatest so far.
    """

    sent_bytes: int | None = 0
    codec_s: float = 0.0
    waiting_s: float = 0.0
    exchanges: int = 0
    skipped: int = 0
    state_bytes: int = 0
    residual_norm: float = 0.0
    residual_peak: float = 0.0

    def send(self, sent_bytes: int | None) -> None:
        """Add bytes; from one unknown on the sum is unknown."""
        known = None not in (sent_bytes, self.sent_bytes)
        self.sent_bytes = self.sent_bytes + sent_bytes if known else None  # type: ignore[operator]

    def residual(self, norm: float) -> None:
        """Note the norm of what is held back."""
        self.residual_norm = norm
        self.residual_peak = max(self.residual_peak, norm)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; None for what is not finite."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        wild = [n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
        return values | dict.fromkeys(wild)


LossOf = Callable[[torch.nn.Module], tuple[torch.Tensor, int]]
"""The sum of the losses of this rank's share under a module, and its tokens."""


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch.

    Attributes:
        loss_of: takes its loss; counted.
        tokens: of this part, where that is known before its loss is taken; else None.
        total_tokens: of all ranks in this global batch, given those of this part; where they are
            not known beforehand the ranks tell each other.
    """

    loss_of: LossOf
    tokens: int | None
    total_tokens: Callable[[int], int]


class Strategy(ABC):
    """One method on one rank, with the model and the optimizer it trains.

    A context manager around the loop, whose end leaves nothing under way.
    """

    def __init__(self, task: Task, model: torch.nn.Module, learning_rate: float) -> None:
        self.task, self.net = task, model
        self.base_rate = learning_rate
        self.optimizer = task.optimizer(model.parameters(), learning_rate)
        self.costs = Costs()
        self.gradient_norm = 0.0  # before the first step

    def set_rate(self, factor: float) -> None:
        """Move the learning rate to this factor of its base."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_rate * factor

    def learn(self, shares: Iterable[Share]) -> Iterator[None]:
        """Learn from one global batch after the other; yields after each."""
        for share in shares:
            self.take(share)
            yield

    @abstractmethod
    def take(self, share: Share) -> None:
        """Learn from a global batch, of which this is the rank's share."""

    def clip(self) -> None:
        """Clip the gradients' norm, if the task wants that, and note it."""
        limit = math.inf if self.task.clip_norm is None else self.task.clip_norm
        self.gradient_norm = float(torch.nn.utils.clip_grad_norm_(self.net.parameters(), limit))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error is None)

    def end(self, orderly: bool) -> None:  # noqa: B027 - most have nothing under way
        """End what is under way, after an error without waiting for others."""


class AveragesGradients(Strategy):
    """Gradients averaged in every step, by DDP and whatever hook it has."""

    def __init__(
        self, task: Task, model: torch.nn.Module, learning_rate: float, bucket_bytes: int
    ) -> None:
        super().__init__(task, model, learning_rate)
        with warnings.catch_warnings():  # the name that torch had before 2.13
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self.model = DistributedDataParallel(
                model, bucket_cap_mb=bucket_bytes / 2**20, broadcast_buffers=False
            )

    def take(self, share: Share) -> None:
        """As :meth:`Strategy.take`."""
        self.backward(share)
        self.clip()
        self.optimizer.step()
        self.costs.exchanges += 1
        self.count()

    def backward(self, share: Share) -> None:
        """Leave the gradients of the mean over the global batch, averaged unless in no_sync."""
        self.optimizer.zero_grad()
        total, tokens = share.loss_of(self.model)
        # DDP divides the sum over ranks by their number.
        (total * (dist.get_world_size() / share.total_tokens(tokens))).backward()

    def count(self) -> None:
        """Note what the step cost."""
        self.costs.sent_bytes = None


class StockDDP(AveragesGradients):
    """DistributedDataParallel with torch's own exchange, or its own 16-bit hook."""

    def __init__(
        self, task: Task, model: torch.nn.Module, learning_rate: float, method: Comparable
    ) -> None:
        super().__init__(task, model, learning_rate, int(method.options["bucket"]))  # type: ignore[arg-type]
        wire = str(method.options["wire"])
        if wire in _HALF:
            dtype = _HALF[wire]

            def hook(
                group: dist.ProcessGroup, bucket: GradBucket
            ) -> torch.futures.Future[torch.Tensor]:
                # What bf16_compress_hook does, which DDP refuses by its name except over NCCL.
                return default_hooks._compress_hook(dtype, group, bucket)

            hook.__annotations__ = {}  # DDP compares them with types, and here they are strings
            self.model.register_comm_hook(None, hook)


class _Hooked(AveragesGradients):
    """DistributedDataParallel with a method attached."""

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        learning_rate: float,
        method: Comparable,
        timeout_s: float,
    ) -> None:
        super().__init__(task, model, learning_rate, BUCKET_BYTES)
        self.comm = ddp.attach(self.model, method.text, timeout_s=timeout_s)

    def count(self) -> None:
        metrics = self.comm.metrics()
        if metrics is None:
            return
        self.costs.send(metrics.sent_bytes)
        self.costs.codec_s += metrics.codec_s
        self.costs.waiting_s += metrics.waiting_s
        self.costs.skipped = metrics.skipped_steps
        self.costs.state_bytes = max(self.costs.state_bytes, metrics.state_bytes)
        self.costs.residual(metrics.residual_norm)

    def end(self, orderly: bool) -> None:
        if orderly:
            self.comm.close()


class _Accumulated(_Hooked):
    """Several global batches to one optimizer step and one exchange."""

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        learning_rate: float,
        method: Comparable,
        timeout_s: float,
    ) -> None:
        if task.tokens_per_example is None:
            raise InputError(
                f"{method.text}: a window has to know the tokens of a batch before its loss is "
                "taken; this is for tasks with tokens_per_example"
            )
        over = str(method.options.get("over", "backend"))
        super().__init__(task, model, learning_rate, comparable(over), timeout_s)
        self._windows = int(method.options["windows"])  # type: ignore[arg-type]

    def learn(self, shares: Iterable[Share]) -> Iterator[None]:
        accumulation = Accumulation(self.model, self._windows)
        for window in accumulation.windows(shares):
            for number, share in enumerate(window):
                if number:
                    yield  # after the batch before, which was not the last
                assert share.tokens is not None
                with window.microbatch(tokens=share.tokens):
                    total, _ = share.loss_of(self.model)
                    window.backward(total)
            result = window.step(self.optimizer, clip_norm=self.task.clip_norm)
            self.gradient_norm = result.grad_norm
            self.costs.exchanges += 1
            self.costs.skipped += not result.stepped
            self.count()
            yield


class _Local(Strategy):
    """Local steps, and now and then an exchange of the parameters."""

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        learning_rate: float,
        method: Comparable,
        timeout_s: float,
    ) -> None:
        super().__init__(task, model, learning_rate)
        options: dict[str, Any] = dict(method.options)
        steps, state = options["steps"], options["optimizer_state"]
        common = {"optimizer_state": state, "timeout_s": timeout_s}
        if method.name == "diloco":
            rate, momentum = options["outer_rate"], options["outer_momentum"]

            def outer(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
                return torch.optim.SGD(anchor, lr=rate, momentum=momentum, nesterov=momentum > 0)

            self.updates: DiLoCo | LocalSGD = DiLoCo(
                model,
                self.optimizer,
                steps,
                outer=outer,
                fragments=options["fragments"],
                overlap_steps=options["overlap_steps"],
                compress=options.get("compress", "ring"),
                **common,
            )
        else:
            self.updates = LocalSGD(
                model, self.optimizer, steps, method=options.get("over", "ring"), **common
            )
        self._seen = 0

    def take(self, share: Share) -> None:
        self.optimizer.zero_grad()
        total, tokens = share.loss_of(self.net)
        (total / max(1, tokens)).backward()
        self.clip()
        self.optimizer.step()
        self.count()

    def count(self) -> None:
        metrics = self.updates.metrics()
        if metrics is None or metrics.exchanges == self._seen:
            return
        new, self._seen = metrics.exchanges - self._seen, metrics.exchanges
        # Of fragments that end in the same step only the last is seen: it stands for all.
        self.costs.send(None if metrics.sent_bytes is None else metrics.sent_bytes * new)
        self.costs.codec_s += metrics.codec_s * new
        self.costs.waiting_s += metrics.exposed_s * new
        self.costs.exchanges = metrics.exchanges
        self.costs.skipped = metrics.skipped
        self.costs.residual(metrics.residual_norm)

    def __enter__(self) -> Self:
        self.updates.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.updates.__exit__(kind, error, trace)
        self.count()


def strategy_for(
    text: str, task: Task, seed: int, learning_rate: float, timeout_s: float
) -> Strategy:
    """The method, with a new model of the seed. Every rank calls it.

    Raises:
        InputError, MismatchError: the method refuses the model.
    """
    method = comparable(text)
    model = task.model(seed)
    if method.name == "ddp":
        return StockDDP(task, model, learning_rate, method)
    if method.name == "accumulate":
        return _Accumulated(task, model, learning_rate, method, timeout_s)
    if method.name in ("local_sgd", "diloco"):
        return _Local(task, model, learning_rate, method, timeout_s)
    return _Hooked(task, model, learning_rate, method, timeout_s)

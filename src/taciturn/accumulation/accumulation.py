"""Token-exact gradient accumulation: a window of microbatches is one big batch of all ranks.

The gradient of a window is that of the sum of all losses, over all valid tokens of all microbatches
of all ranks, divided by the number of these tokens - whatever their split. Means of means are not:
four microbatches of unequal length, or ranks that run out of data at different times, give another
gradient. Four accumulated microbatches are also not four steps: neither parameters nor optimizer
state move within a window.

Each window has one exchange of gradients, overlapped with the last microbatch's backward where
every rank has one, and one control exchange of a few numbers: tokens, losses, the gradients' norm,
and who has data for another window.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.collectives.ring import Ring
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.exchange import Exchange, agree
from taciturn.methods import as_aggregator
from taciturn.optimizers import check_optimizer
from taciturn.ranges import check_whole
from taciturn.transport import DistributedTransport

__all__ = ["Accumulation", "StepResult", "Window"]

Batch = TypeVar("Batch")

_TOKENS, _LOSS, _SQUARES, _MORE, _MICROBATCHES, _FIXED = range(6)
"""Places in the control exchange; after them, one for each parameter that this rank has used."""


@dataclass(frozen=True)
class StepResult:
    """What became of a window; the same on every rank."""

    stepped: bool
    """False if the step was skipped: no valid token on any rank, or a gradient not finite."""
    tokens: int
    """Valid tokens of all ranks."""
    loss: float
    """Mean loss per token over all of them; NaN without tokens."""
    grad_norm: float
    """Norm of the mean gradient before clipping."""
    microbatches: int
    """Of all ranks."""


class Accumulation:
    """Windows of up to ``microbatches`` batches per rank, each one optimizer step.

    ::

        accumulate = taciturn.Accumulation(model, microbatches=4)
        for window in accumulate.windows(loader):
            for batch in window:
                with window.microbatch(tokens=valid_tokens(batch)):
                    window.backward(loss_sum(model, batch))
            window.step(optimizer, clip_norm=1.0, scheduler=scheduler)

    Law (``test_a_window_is_one_big_batch``): the gradient equals that of one batch of all tokens.

    Args:
        model: a DistributedDataParallel module, or a plain one, whose gradients are then exchanged
            when the window steps. What :func:`taciturn.ddp.attach` put there is used.
        microbatches: most batches of a rank in a window, at least 1.
        method: of the exchange where nothing is attached to the model: a name, an aggregator or a
            collective; the backend's exact mean if None.
        scaler: the loop's GradScaler; windows scale, unscale, step and update it.
        process_group: of a plain module; the default one, or a single rank without one, if None.
        timeout_s: every failure is an error on every rank within this time.

    Raises:
        InputError: what cannot work, on every rank alike.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        microbatches: int,
        *,
        method: str | Aggregator | Collective | None = None,
        scaler: Any = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.model, self.microbatches, self.scaler = model, microbatches, scaler
        self._comm: ddp.Communicator | None = None
        self._exchange: Exchange | None = None
        self._transport: DistributedTransport | None = None
        self._unit = 1.0
        self._window: Window[Any] | None = None
        check_whole("microbatches", microbatches, 1)
        if isinstance(model, DistributedDataParallel):
            self._use_ddp(model, method, process_group, timeout_s)
        else:
            self._use_plain(model, method, process_group, timeout_s)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise InputError("no parameter of this module requires a gradient: nothing to step")
        if microbatches > 1 and any(isinstance(m, _BatchNorm) for m in model.modules()):
            warnings.warn(
                "batch normalisation sees one microbatch at a time: with it a window is not one "
                "big batch; GroupNorm or LayerNorm would be",
                stacklevel=2,
            )
        model.register_forward_pre_hook(self._before_forward)

    def _use_ddp(
        self,
        model: DistributedDataParallel,
        method: str | Aggregator | Collective | None,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        if process_group is not None:
            raise InputError("process_group is for plain modules: this one has DDP's own")
        if model.static_graph and self.microbatches > 1:
            raise InputError(
                "static_graph and no_sync do not go together in DDP: build the model without "
                "static_graph, or accumulate nothing (microbatches=1)"
            )
        comm = ddp.attached(model)
        if comm is not None and method is not None:
            raise InputError("a method is attached to this model already: leave method= out")
        self._comm = comm or ddp.attach(
            model, "backend" if method is None else method, scaler=self.scaler, timeout_s=timeout_s
        )
        if self._comm.transport.size > 1:
            self._transport = self._comm.transport

    def _use_plain(
        self,
        model: torch.nn.Module,
        method: str | Aggregator | Collective | None,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            return
        transport = DistributedTransport(process_group, timeout_s)
        if transport.size == 1:
            transport.close()
            return
        problem: Exception | None = None
        items: dict[str, str] = {}
        try:
            parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            aggregator = as_aggregator("backend" if method is None else method)
            self._exchange = Exchange(parameters, aggregator, transport)
            items = {"microbatches": str(self.microbatches)} | self._exchange.describe()
        except Exception as error:
            problem = error
        agree(transport, items, problem, "accumulation")
        self._transport = transport

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._transport.size if self._transport is not None else 1

    def windows(self, loader: Iterable[Batch]) -> Iterator[Window[Batch]]:
        """Yield windows until no rank has data left; the last of a rank may be short or empty.

        One batch is fetched ahead, to know which is the last.

        Raises:
            InputError: no rank has any batch, or a window was left without its step.
        """
        with self._together():
            batches = _Lookahead(loader)
            ready = batches.ready
        having = self._sum(torch.tensor([float(ready)], dtype=torch.float64)).item()
        if not having:
            raise InputError("no rank's loader has a single batch: nothing to train on")
        while having:
            self._window = window = Window(self, batches, overlapped=having == self.ranks)
            for parameter in self._parameters.values():
                parameter.grad = None
            self._rebuild_buckets()
            yield window
            if window.result is None:
                with self._together():
                    raise InputError("a window was left without window.step(optimizer)")
            having = window._having_next
        self._window = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs between windows, beside the model's and optimizer's.

        Of a plain module the exchange's state is in it; a communicator's is saved by itself.
        """
        exchange = self._exchange.state_dict() if self._exchange is not None else None
        return {"unit": self._unit, "exchange": exchange}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what :meth:`state_dict` returned. Call it on every rank.

        Raises:
            InputError: the state is missing or another's.
            MismatchError: another rank could not load its own.
        """
        problem: Exception | None = None
        try:
            if state is None or {"unit", "exchange"} - set(state):
                raise InputError("this is no state of an accumulation")
            if self._exchange is not None:
                self._exchange.check_state(state["exchange"])
            unit = float(state["unit"])
        except Exception as error:
            problem = error
        if self._transport is not None:
            agree(self._transport, {}, problem, "loading the accumulation's state")
        elif problem is not None:
            raise problem
        assert state is not None
        if self._exchange is not None:
            self._exchange.load_state_dict(state["exchange"])
        self._unit = unit

    # -- for windows

    def _before_forward(self, module: torch.nn.Module, _arguments: Any) -> None:
        window = self._window
        if window is None or not module.training or not torch.is_grad_enabled():
            return
        if not window._inside:
            with self._together():
                raise InputError(
                    "forward of the model outside window.microbatch(...): DDP decides there "
                    "whether its backward exchanges gradients; put forward and backward inside"
                )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Let an error on this rank be an error on all."""
        try:
            yield
        except (PeerError, MismatchError):
            raise
        except Exception as error:
            if self._comm is not None:
                self._comm.fail(error)
            if self._transport is not None:
                self._transport.fail(error)
            raise

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a small fp64 vector over ranks."""
        if self._transport is None:
            return numbers
        if self._comm is not None:
            self._comm.wait()
        numbers = numbers.to(self._transport.header_device)
        Ring().all_reduce(numbers, self._transport)
        return numbers.cpu()

    def _average(self) -> None:
        """Average all gradients where no backward has; a missing one counts as zero."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._comm is not None:
            self._comm.gradient_scale = 1 / self._unit
            self._comm.average_gradients()
        elif self._exchange is not None:
            gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            self._exchange.set_scale(scale / self._unit)
            self._exchange.run(gradients)

    def _rebuild_buckets(self) -> None:
        """Do here what DDP does in the first forward after a backward that exchanged: together.

        It is a collective of DDP's own, and a rank without a batch has no forward.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or self.ranks == 1:
            return
        if model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True

    def _no_sync(self, stack: ExitStack) -> None:
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())


class Window(Generic[Batch]):
    """Some batches of this rank, and then one step; made by :meth:`Accumulation.windows`.

    Attributes:
        result: what the step did; None before it.
    """

    def __init__(
        self, accumulation: Accumulation, batches: _Lookahead[Batch], overlapped: bool
    ) -> None:
        self.result: StepResult | None = None
        self._accumulation, self._batches = accumulation, batches
        # Gradients are exchanged in the last microbatch's backward; else in step().
        self._overlapped = overlapped and accumulation._comm is not None
        self._taken = self._done = self._tokens = 0
        self._loss = 0.0
        self._last = self._inside = self._backward_done = self._exchanged = False
        self._having_next = 0
        comm = accumulation._comm
        self._exchanges_before = comm.steps if comm is not None else 0

    def _check_exchanges(self) -> None:
        """Check that this window's gradients were exchanged once."""
        comm = self._accumulation._comm
        if comm is None or comm.transport.size == 1:
            return
        comm.wait()
        if (count := comm.steps - self._exchanges_before) != 1:
            raise InputError(
                f"gradients were exchanged {count} times in this window instead of once: some "
                "backward pass of this model ran outside window.backward(...)"
            )

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches of the window; maybe none, if others have some left."""
        together = self._accumulation._together
        while self._taken < self._accumulation.microbatches:
            with together():
                if not self._batches.ready:
                    return
                batch = self._batches.take()
                self._taken += 1
                full = self._taken == self._accumulation.microbatches
                self._last = full or not self._batches.ready
            yield batch
            with together():
                if self._done != self._taken:
                    raise InputError(
                        "a batch was taken and had no window.microbatch(...): a rank that leaves "
                        "one out still needs it, with tokens=0 and a loss of zero"
                    )

    @contextmanager
    def microbatch(self, tokens: int) -> Iterator[None]:
        """Surround forward and backward of one batch.

        Args:
            tokens: valid ones of this batch, or samples, or any whole-number weight from 0 on whose
                losses are summed.

        Raises:
            InputError: a wrong count, or no backward, or more than one; on every rank.
        """
        accumulation = self._accumulation
        with accumulation._together(), ExitStack() as stack:
            count = _count(tokens)
            if self._inside or self.result is not None or self._done == self._taken:
                raise InputError(
                    "window.microbatch(...) belongs once to each batch that the window yields"
                )
            synced = self._overlapped and self._last
            if not synced:
                accumulation._no_sync(stack)
            elif accumulation._comm is not None:
                accumulation._comm.gradient_scale = 1 / accumulation._unit
            self._inside, self._backward_done = True, False
            try:
                yield
            finally:
                self._inside = False
            if not self._backward_done:
                raise InputError(
                    "no window.backward(loss_sum) inside window.microbatch(...): loss.backward() "
                    "would leave the loss out of the count"
                )
            self._tokens += count
            self._done += 1
            self._exchanged = synced

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Backpropagate the sum of a batch's losses over its valid tokens; once a microbatch.

        Args:
            loss_sum: a scalar; the sum, not the mean.
        """
        accumulation = self._accumulation
        with accumulation._together():
            if not self._inside or self._backward_done:
                raise InputError(
                    "window.backward(loss_sum) belongs inside window.microbatch(...), once: add up "
                    "several losses first"
                )
            if loss_sum.numel() != 1:
                raise InputError(
                    f"loss_sum has shape {tuple(loss_sum.shape)}: give the sum over the valid "
                    "tokens, one number"
                )
            self._loss += float(loss_sum.detach())
            loss = loss_sum / accumulation._unit
            if accumulation.scaler is not None:
                loss = accumulation.scaler.scale(loss)
            loss.backward()
            self._backward_done = True

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult:
        """Divide by all tokens, clip once, step the optimizer and then the scheduler - or neither.

        Skipped on every rank alike if no rank has a valid token or a gradient is not finite.

        Args:
            optimizer: whose parameters are the model's.
            clip_norm: most norm of the mean gradient; None: no clipping.
            scheduler: of the learning rate; stepped only if the optimizer is.
        """
        accumulation = self._accumulation
        with accumulation._together():
            check_optimizer(optimizer)
            if clip_norm is not None and not clip_norm > 0:
                raise InputError(f"clip_norm={clip_norm!r}: must be positive")
            if self.result is not None:
                raise InputError("this window has made its step already")
            if self._taken != self._done or (self._overlapped and not self._exchanged):
                raise InputError("window.step(...) before all batches of the window were taken")
            parameters = accumulation._parameters
            used = [float(p.grad is not None) for p in parameters.values()]
            if not self._overlapped:
                accumulation._average()
            self._check_exchanges()
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            numbers = [0.0] * _FIXED
            numbers[_TOKENS], numbers[_LOSS] = self._tokens, self._loss
            numbers[_SQUARES] = _squares(gradients)
            numbers[_MORE] = self._batches.ready
            numbers[_MICROBATCHES] = self._done
            if not self._overlapped:
                numbers += used
            vector = torch.tensor(numbers, dtype=torch.float64)
        total = accumulation._sum(vector).tolist()
        if not self._overlapped:
            for parameter, anywhere in zip(parameters.values(), total[_FIXED:], strict=True):
                if not anywhere:
                    parameter.grad = None
        self._having_next = int(total[_MORE])
        return self._apply(total, optimizer, clip_norm, scheduler)

    def _apply(
        self,
        total: list[float],
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scheduler: Any,
    ) -> StepResult:
        """Step by what all ranks agreed on."""
        accumulation, scaler = self._accumulation, self._accumulation.scaler
        gradients = [p.grad for p in accumulation._parameters.values() if p.grad is not None]
        ranks, tokens = accumulation.ranks, int(total[_TOKENS])
        norm = math.sqrt(total[_SQUARES] / ranks)
        factor = accumulation._unit * ranks / tokens if tokens else 0.0
        norm *= factor / (scaler.get_scale() if scaler is not None else 1.0)
        finite = math.isfinite(norm)
        if tokens and clip_norm is not None and finite:
            factor *= min(1.0, clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        if tokens:
            if finite:
                torch._foreach_mul_(gradients, factor)
            elif gradients:
                gradients[0].fill_(math.inf)  # for a scaler whose rank saw nothing of it
            if scaler is not None:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            elif finite:
                optimizer.step()
        stepped = bool(tokens) and finite
        if stepped and scheduler is not None:
            scheduler.step()
        if tokens:  # a power of two: dividing the next losses by it is exact
            accumulation._unit = 2.0 ** round(math.log2(tokens / ranks))
        self.result = StepResult(
            stepped=stepped,
            tokens=tokens,
            loss=total[_LOSS] / tokens if tokens else math.nan,
            grad_norm=norm,
            microbatches=int(total[_MICROBATCHES]),
        )
        return self.result


class _Lookahead(Generic[Batch]):
    """An iterator that knows whether it has another item, by fetching it ahead."""

    def __init__(self, items: Iterable[Batch]) -> None:
        self._iterator = iter(items)
        self._held: list[Batch] = []

    @property
    def ready(self) -> bool:
        """There is another item."""
        if not self._held:
            for item in self._iterator:
                self._held.append(item)
                break
        return bool(self._held)

    def take(self) -> Batch:
        """Return the next item."""
        return self._held.pop()


def _count(tokens: Any) -> int:
    """Return a count of tokens as an int, if it is one."""
    value = tokens.item() if isinstance(tokens, torch.Tensor) and tokens.numel() == 1 else tokens
    check_whole("tokens", value, 0)
    return int(value)


def _squares(gradients: list[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)
    return sum(norm.double().square().item() for norm in norms)

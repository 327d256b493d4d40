"""One window: some batches of this rank, and then one step that all ranks make alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import torch

from taciturn.accumulation.control import (
    FIXED,
    LOSS,
    MICROBATCHES,
    MORE,
    SETTINGS,
    SQUARES,
    TOKENS,
    alike,
    moments,
)
from taciturn.accumulation.lookahead import Batch, Lookahead
from taciturn.errors import InputError
from taciturn.exchange import agree
from taciturn.optimizers import (
    check_optimizer,
    check_scheduler,
    hyperparameters,
    parameters_of,
)
from taciturn.ranges import check_number, check_whole

if TYPE_CHECKING:
    from taciturn.accumulation.accumulation import Accumulation

__all__ = ["StepResult", "Window"]

_MOST_TOKENS = 2**40
"""Of a microbatch; sums over thousands of ranks are then exact in fp64."""

_NOTHING = "tokens=0 and a loss of zero that depends on the model, such as model(batch).sum() * 0"
"""What a batch that is left out needs."""


@dataclass(frozen=True)
class StepResult:
    """What became of a window; the same on every rank."""

    stepped: bool
    """False if the step was skipped: no valid token on any rank, or a gradient not finite."""
    tokens: int
    """Valid tokens of all ranks."""
    loss: float
    """Mean loss per token over all of them; NaN in a window without tokens."""
    grad_norm: float
    """Norm of the mean gradient before clipping."""
    microbatches: int
    """Of all ranks."""


class Window(Generic[Batch]):
    """Some batches of this rank, and then one step; made by :meth:`Accumulation.windows`.

    Attributes:
        result: what the step did; None before it.
    """

    def __init__(
        self, accumulation: Accumulation, batches: Lookahead[Batch], overlapped: bool
    ) -> None:
        self.result: StepResult | None = None
        self._accumulation, self._batches = accumulation, batches
        # Gradients are exchanged in the last microbatch's backward; else in step().
        self._overlapped = overlapped and accumulation._comm is not None
        self._taken = self._done = self._tokens = self._count = 0
        self._loss = 0.0
        self._last = self._inside = self._synced = self._backward_done = False
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
            why = "some backward pass of this model ran outside window.backward(...)"
            if not count:
                why = "the last forward went round DDP: call the model itself, not model.module"
            raise InputError(
                f"gradients were exchanged {count} times in this window instead of once: {why}"
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
                        f"one out still needs it, with {_NOTHING}"
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
            self._count = _count(tokens)
            if self._inside or self.result is not None or self._done == self._taken:
                raise InputError(
                    "window.microbatch(...) belongs once to each batch that the window yields"
                )
            self._check_untouched()
            synced = self._overlapped and self._last
            if not synced:
                accumulation._no_sync(stack)
            elif accumulation._comm is not None:
                if not accumulation._comm.model.require_backward_grad_sync:
                    raise InputError(
                        "window.microbatch(...) inside no_sync(): the window knows itself which "
                        "backward exchanges; leave no_sync out"
                    )
                accumulation._comm.gradient_scale = 1 / accumulation._unit
            self._inside, self._backward_done, self._synced = True, False, synced
            try:
                yield
            finally:
                self._inside = False
            if not self._backward_done:
                raise InputError(
                    "no window.backward(loss_sum) inside window.microbatch(...): loss.backward() "
                    "would leave the loss out of the count"
                )
            self._tokens += self._count
            self._done += 1
            accumulation._untouched.note()

    def _check_untouched(self) -> None:
        change = self._accumulation._untouched.change()
        if change is not None:
            raise InputError(
                f"{change} within a window: leave zero_grad(), clip_grad_norm_(), unscale_() and "
                "optimizer.step() out of its loop; window.step(optimizer, clip_norm=...) does all "
                "that, once"
            )

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Backpropagate the sum of a batch's losses over its valid tokens; once a microbatch.

        Args:
            loss_sum: a scalar; the sum, not the mean. Zero where no token is valid, but made from
                the model's output all the same: ``model(batch).sum() * 0``.

        Raises:
            InputError: it is no such thing; on every rank.
        """
        accumulation = self._accumulation
        with accumulation._together():
            if not self._inside or self._backward_done:
                raise InputError(
                    "window.backward(loss_sum) belongs inside window.microbatch(...), once: add up "
                    "several losses first"
                )
            self._loss += _checked_loss(loss_sum, self._count)
            loss = loss_sum / accumulation._unit
            if accumulation.scaler is not None:
                loss = accumulation.scaler.scale(loss)
            if self._synced:
                accumulation._meet_for_unused()
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

        Raises:
            InputError: what cannot be stepped with, or gradients that something else changed; on
                every rank.
            MismatchError: ranks differ in clip_norm, or in the optimizer's hyperparameters.
        """
        accumulation = self._accumulation
        with accumulation._together():
            self._check_step(optimizer, clip_norm, scheduler)
            if self.result is not None:
                raise InputError("this window has made its step already")
            left = self._taken < accumulation.microbatches and self._batches.ready
            if self._taken != self._done or left:
                raise InputError("window.step(...) before all batches of the window were taken")
            self._check_untouched()
            accumulation._untouched.forget()
            settings = {"clip_norm": repr(clip_norm), "scheduler": type(scheduler).__name__}
            settings |= hyperparameters(optimizer, "the optimizer")
            parameters = accumulation._parameters
            used = [float(p.grad is not None) for p in parameters.values()]
            if not self._overlapped:
                accumulation._average()
            self._check_exchanges()
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            numbers = [0.0] * FIXED
            numbers[TOKENS], numbers[LOSS] = self._tokens, self._loss
            numbers[SQUARES] = _squares(gradients)
            numbers[MORE] = self._batches.ready
            numbers[MICROBATCHES] = self._done
            numbers[SETTINGS:FIXED] = moments(repr(settings))
            if not self._overlapped:
                numbers += used
            vector = torch.tensor(numbers, dtype=torch.float64)
        total = accumulation._sum(vector).tolist()
        if not alike(total[SETTINGS:FIXED], accumulation.ranks):
            assert accumulation._transport is not None
            agree(accumulation._transport, settings, None, "window.step")
        if not self._overlapped:
            for parameter, anywhere in zip(parameters.values(), total[FIXED:], strict=True):
                if not anywhere:
                    parameter.grad = None
        self._having_next = int(total[MORE])
        return self._apply(total, optimizer, clip_norm, scheduler)

    def _check_step(self, optimizer: torch.optim.Optimizer, clip_norm: Any, scheduler: Any) -> None:
        """Refuse on this rank what cannot be stepped with."""
        check_optimizer(optimizer)
        unlimited = clip_norm is None or (isinstance(clip_norm, float) and clip_norm == math.inf)
        if not unlimited:
            check_number("clip_norm", clip_norm, 0, above=True, hint="None for no clipping")
        if scheduler is not None:
            check_scheduler(scheduler)
        known, some = self._accumulation._known, False
        for parameter in parameters_of(optimizer):
            if id(parameter) in known:
                some = True
            elif parameter.grad is not None:
                raise InputError(
                    "optimizer= steps a parameter with a gradient, of shape "
                    f"{tuple(parameter.shape)}, that the model did not have or train when this "
                    "Accumulation was made: it is not averaged; make a new Accumulation"
                )
        if not some:
            raise InputError(
                "optimizer= holds none of this module's parameters: give the one that steps them"
            )

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
        ranks, tokens = accumulation.ranks, int(total[TOKENS])
        norm = math.sqrt(total[SQUARES] / ranks)
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
            loss=total[LOSS] / tokens if tokens else math.nan,
            grad_norm=norm,
            microbatches=int(total[MICROBATCHES]),
        )
        return self.result


def _count(tokens: Any) -> int:
    """Return a count of tokens as an int, if it is one."""
    value = tokens.item() if isinstance(tokens, torch.Tensor) and tokens.numel() == 1 else tokens
    hint = "a float is none, make it an int" if isinstance(value, float) else ""
    check_whole("tokens", value, 0, _MOST_TOKENS, hint=hint)
    return int(value)


def _checked_loss(loss_sum: Any, tokens: int) -> float:
    """Return the value of a loss that can be backpropagated and fits the number of tokens."""
    if not isinstance(loss_sum, torch.Tensor):
        raise InputError(
            f"loss_sum={loss_sum!r}: give the tensor that the loss function returned, not a number"
        )
    if loss_sum.numel() != 1:
        raise InputError(
            f"loss_sum has shape {tuple(loss_sum.shape)}: give the sum over the valid tokens, one "
            "number"
        )
    value = float(loss_sum.detach())
    if not loss_sum.requires_grad:
        raise InputError(
            f"loss_sum={value:g} does not depend on any parameter, so that there is no backward; "
            f"to leave a batch out, give {_NOTHING}"
        )
    if tokens == 0 and value and math.isfinite(value):
        raise InputError(
            f"loss_sum={value:g} with tokens=0: without a valid token the sum over these is zero; "
            "count the tokens that the loss is of"
        )
    return value


def _squares(gradients: list[torch.Tensor]) -> float:
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)
    return sum(norm.double().square().item() for norm in norms)

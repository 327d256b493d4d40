"""The loop over windows: who has data, what the ranks agree on, and the exchange beneath."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.accumulation.lookahead import Batch, Lookahead
from taciturn.accumulation.window import Window
from taciturn.aggregators.base import Aggregator
from taciturn.collectives.base import Collective
from taciturn.collectives.dissemination import gather_rows
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.exchange import Exchange, agree
from taciturn.gradients import Untouched, check_gradients
from taciturn.methods import as_aggregator
from taciturn.ranges import check_number, check_whole
from taciturn.transport import DistributedTransport

__all__ = ["Accumulation"]


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
        self.model, self.microbatches = model, microbatches
        self._comm: ddp.Communicator | None = None
        self._exchange: Exchange | None = None
        self._transport: DistributedTransport | None = None
        self._unit = 1.0
        self._window: Window[Any] | None = None
        problem: Exception | None = None
        try:
            self._check(method, scaler, process_group)
        except Exception as error:
            problem = error
        # One that is switched off does not look for what is not finite.
        self.scaler = scaler if problem is None and scaler and scaler.is_enabled() else None
        if isinstance(model, DistributedDataParallel):
            self._use_ddp(model, method, scaler, timeout_s, problem)
        else:
            self._use_plain(method, process_group, timeout_s, problem)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._known = frozenset(map(id, self._parameters.values()))
        self._untouched = Untouched(self._parameters)
        if microbatches > 1 and any(isinstance(m, _BatchNorm) for m in model.modules()):
            warnings.warn(
                "batch normalisation sees one microbatch at a time: with it a window is not one "
                "big batch; GroupNorm or LayerNorm would be",
                stacklevel=2,
            )
        model.register_forward_pre_hook(self._before_forward)

    def _check(self, method: Any, scaler: Any, process_group: dist.ProcessGroup | None) -> None:
        """Refuse on this rank what cannot work."""
        model = self.model
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model={model!r}: a torch.nn.Module is needed")
        check_whole("microbatches", self.microbatches, 1)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler={scaler!r}: give the loop's torch.amp.GradScaler")
        if not isinstance(model, DistributedDataParallel):
            check_gradients(model, {n: p for n, p in model.named_parameters() if p.requires_grad})
            return
        if process_group is not None:
            raise InputError("process_group is for plain modules: this one has DDP's own")
        if model.static_graph and self.microbatches > 1:
            raise InputError(
                "static_graph and no_sync do not go together in DDP: build the model without "
                "static_graph, or accumulate nothing (microbatches=1)"
            )
        if method is not None and ddp.attached(model) is not None:
            raise InputError("a method is attached to this model already: leave method= out")

    def _use_ddp(
        self,
        model: DistributedDataParallel,
        method: str | Aggregator | Collective | None,
        scaler: Any,
        timeout_s: float,
        problem: Exception | None,
    ) -> None:
        comm = attached = ddp.attached(model)
        if comm is None:
            method = "backend" if method is None else method
            comm = ddp.attach(model, method, scaler=scaler, timeout_s=timeout_s)
        try:
            comm.wait()
            items = {"microbatches": str(self.microbatches)}
            agree(comm.transport, items, problem, "accumulation")
        except Exception:
            if attached is None:
                comm.close()
            raise
        self._comm = comm
        if comm.transport.size > 1:
            self._transport = comm.transport

    def _use_plain(
        self,
        method: str | Aggregator | Collective | None,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        problem: Exception | None,
    ) -> None:
        transport: DistributedTransport | None = None
        if dist.is_available() and dist.is_initialized():
            transport = DistributedTransport(process_group, timeout_s)
            if transport.size == 1:
                transport.close()
                transport = None
        if transport is None:
            if problem is not None:
                raise problem
            return
        items: dict[str, str] = {}
        try:
            if problem is None:
                parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
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
            InputError: no rank has any batch, or a window was left without its step, before another
                one of this loop or of a new one.
            MismatchError: another rank left the loop and began a new one.
            PeerError: another rank left the loop.
        """
        with self._together():
            self._check_stepped()
            batches = Lookahead(loader)
            ready = batches.ready
        self._meet("the start of windows(...)")
        having = self._sum(torch.tensor([float(ready)], dtype=torch.float64)).item()
        if not having:
            raise InputError("no rank's loader has a single batch: nothing to train on")
        number = 0
        while having:
            self._window = window = Window(self, batches, overlapped=having == self.ranks)
            for parameter in self._parameters.values():
                parameter.grad = None
            number += 1
            self._do_as_ddp_does(number)
            try:
                yield window
            finally:
                if window.result is not None:
                    self._window = None  # the loop may be left here, and the model used without
            with self._together():
                self._check_stepped()
            having = window._having_next

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs between windows, beside the model's and optimizer's.

        Of a plain module the exchange's state is in it; a communicator's is saved by itself.
        """
        exchange = self._exchange.state_dict() if self._exchange is not None else None
        return {"unit": self._unit, "exchange": exchange}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what :meth:`state_dict` returned. Call it on every rank.

        Raises:
            InputError: the state is missing, damaged or another's.
            MismatchError: another rank could not load its own, or has that of another time.
        """
        problem: Exception | None = None
        try:
            if not isinstance(state, dict) or {"unit", "exchange"} - set(state):
                raise InputError(
                    f"this {type(state).__name__} is no state of an accumulation: give what "
                    "state_dict() returned on this rank"
                )
            check_number("unit", state["unit"], 0, above=True, hint="this state is damaged")
            if self._exchange is not None:
                self._exchange.check_state(state["exchange"])
            items = {"what losses are divided by": repr(state["unit"])}
        except Exception as error:
            problem, items = error, {}
        if self._transport is not None:
            agree(self._transport, items, problem, "loading the accumulation's state")
        elif problem is not None:
            raise problem
        assert state is not None
        if self._exchange is not None:
            self._exchange.load_state_dict(state["exchange"])
        self._unit = float(state["unit"])

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
        return gather_rows(numbers, self._transport).sum(0).cpu()

    def _average(self) -> None:
        """Average all gradients where no backward has; a missing one counts as zero."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout != torch.strided:
                raise InputError(
                    f"the gradient of {name!r} is {parameter.grad.layout}: no method here "
                    "exchanges sparse ones; have it made with sparse=False"
                )
        if self._comm is not None:
            self._comm.gradient_scale = 1 / self._unit
            self._comm.average_gradients()
        elif self._exchange is not None:
            gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
            scale = self.scaler.get_scale() if self.scaler is not None else 1.0
            self._exchange.set_scale(scale / self._unit)
            self._exchange.run(gradients)

    def _meet(self, where: str) -> None:
        """Find out within the time-out if another rank is not here, or is elsewhere in its loop."""
        if self._transport is not None:
            if self._comm is not None:
                self._comm.wait()
            items = {"where their loops are": where}
            agree(self._transport, items, None, "accumulation")

    def _check_stepped(self) -> None:
        if self._window is not None and self._window.result is None:
            raise InputError("a window was left without window.step(optimizer)")

    def _do_as_ddp_does(self, number: int) -> None:
        """Do here what DDP does in the first forward after a backward that exchanged: together.

        They are collectives of DDP's own, on its process group and with its time-out, and a rank
        without a batch has no forward. So the ranks meet before.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or self.ranks == 1:
            return
        assert self._transport is not None
        ever = model.static_graph or not model.find_unused_parameters
        buckets = ever and not model._has_rebuilt_buckets
        buffers = model.will_sync_module_buffers()
        if not (buckets or buffers):
            return
        self._meet(f"window {number}")
        try:
            if buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True
            if buffers:
                model._sync_buffers()
                model.require_forward_param_sync = False
        except RuntimeError as error:  # a rank was lost in their midst
            self._transport.lost(None, error)

    def _meet_for_unused(self) -> None:
        """Meet before a backward in which DDP sums on its own group which parameters were used."""
        if isinstance(self.model, DistributedDataParallel) and self.model.find_unused_parameters:
            self._meet("the last backward of a window")

    def _no_sync(self, stack: ExitStack) -> None:
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())

"""``ddp.attach(model, "auto")``: a short probe between the model's own ranks, and what follows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan.candidates import CANDIDATES, Quality, allowed, candidate_of
from taciturn.plan.choice import Plan, make_plan
from taciturn.plan.exchange import Pricer
from taciturn.plan.model import Model
from taciturn.plan.prediction import Predictor
from taciturn.plan.timing import Compute
from taciturn.units import format_seconds

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from taciturn.transport import DistributedTransport

__all__ = ["AUTO", "Picked", "pick", "picked_from"]

AUTO = "auto"
"""What stands in the place of a method."""

PROBE_S = 10.0
"""Seconds that are measured: little beside a training run, and enough for three sizes of each
method on links from 50 Mbit/s on."""

_QUALITY: Quality = "every-replica"


@dataclass(frozen=True)
class Picked:
    """What was picked, and what the measured steps are to be compared with.

    Attributes:
        method: for ``ddp.attach``.
        sentence: what and why.
        exchange_s: predicted seconds of all exchanges of a step, one after the other; None where
            there is nobody to exchange with.
        plan: all of it; None likewise.
    """

    method: str
    sentence: str
    exchange_s: float | None
    plan: Plan | None


def pick(
    model: torch.nn.Module, transport: DistributedTransport, group: dist.ProcessGroup | None
) -> Picked:
    """Probe, plan, and say on rank 0's stderr what was picked. Every rank calls it.

    Args:
        model: whose gradients are averaged, all on one device.
        transport: between the ranks; it is what is measured.
        group: that the transport was made for.

    Raises:
        InputError: a model without parameters.
        PeerError, MismatchError: a rank died, or does not attach "auto".
    """
    from taciturn.exchange import agree

    exchanged = Model.of_module(model)
    # A rank that attaches a method by name does not probe: none may wait for it.
    agree(transport, {"the method": AUTO}, None, "attach")
    if transport.size == 1:
        return Picked("backend", "one rank: nothing is exchanged", None, None)

    def probe(methods: tuple[str, ...]) -> Link:
        from taciturn.probe import Job, probe_link
        from taciturn.ranks import Ranks

        device: torch.device = next(p.device for p in model.parameters() if p.requires_grad)
        job = Job(
            seconds=PROBE_S,
            methods=methods,
            timeout_s=transport.timeout_s,
            device=device.type,
            groups=exchanged.group_shapes(),
        )
        return probe_link(Ranks(transport, device, group), job)

    picked = picked_from(exchanged, probe)
    if transport.rank == 0:
        print(f"taciturn: auto: {picked.sentence}", file=sys.stderr, flush=True)
    return picked


def picked_from(model: Model, probe: Callable[[tuple[str, ...]], Link]) -> Picked:
    """Pick by a link that ``probe`` measures for the methods it is given.

    Where it refuses, because its times tell nothing, DDP's own exchange is picked.
    """
    methods = tuple(
        dict.fromkeys(c.method for c in CANDIDATES if c.local_steps == 1 and allowed(c, _QUALITY))
    )
    try:
        link = probe(methods)
    except InputError as error:  # the same on every rank
        return Picked("backend", f"backend, since the probe was of no use: {error}", None, None)
    unknown = Compute(0.0)
    plan = make_plan(model, link, unknown, quality=_QUALITY)
    chosen = plan.recommendation
    # Of our hook, also where DDP's own would do as well: it is what will be measured.
    hooked = Predictor(candidate_of(chosen.method), model, Pricer(link, link.ranks), unknown)
    sentence = (
        f"{chosen.method}, after a probe of {format_seconds(link.probe_s)}. Exchanges alone: "
        f"{chosen.sentence}"
    )
    return Picked(chosen.method, sentence, hooked.exchange_s(), plan)

"""A method for a program: ``auto(model, link)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan.choice import make_plan
from taciturn.plan.model import Model, parse_model
from taciturn.plan.timing import Compute

if TYPE_CHECKING:
    import torch

__all__ = ["auto"]


def auto(
    model: Model | torch.nn.Module | str,
    link: Link,
    *,
    step_compute_s: float | None = None,
    quality: str = "every-replica",
) -> str:
    """The method for ``ddp.attach`` that a plan recommends: ``make_plan`` says why.

    Args:
        model: a torch module, or what ``taciturn plan --model`` takes.
        link: as probed, between as many ranks as will train.
        step_compute_s: seconds of a step without any exchange. Without them every exchange is
            taken to be waited for in full.
        quality: what must be right: "every-replica", "mean", "loss" or "any"; :class:`Candidate`.

    Raises:
        InputError: a model without parameters, or no model.
    """
    if isinstance(model, str):
        model = parse_model(model)
    elif not isinstance(model, Model):
        if not hasattr(model, "named_parameters"):
            raise InputError(
                f"model={model!r}: give a torch module, a Model, or text as for --model"
            )
        model = Model.of_module(model)
    compute = Compute(0.0 if step_compute_s is None else step_compute_s)
    return make_plan(model, link, compute, quality=quality).recommendation.method

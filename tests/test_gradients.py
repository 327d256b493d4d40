"""Whether gradients stay as a backward pass left them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from taciturn.gradients import Untouched

Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def _evaluate(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.eval()(torch.ones(1, 3))


def _assign(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


CHANGES: dict[str, tuple[Change, str | None]] = {
    "nothing": (lambda _model, _optimizer: None, None),
    "evaluation": (_evaluate, None),
    "saving": (lambda model, optimizer: (model.state_dict(), optimizer.state_dict()), None),
    "zero_grad": (lambda _, optimizer: optimizer.zero_grad(), "lost its gradient"),
    "zero_grad in place": (
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False), "gradient of .* changed",
    ),
    "clip by norm": (
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "gradient of .* changed",
    ),
    "clip by value": (
        lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1),
        "gradient of .* changed",
    ),
    "another backward": (
        lambda model, _: model(torch.ones(1, 3)).sum().backward(),
        "gradient of .* changed",
    ),
    "assigned": (_assign, "given another gradient"),
    "step": (lambda _, optimizer: optimizer.step(), "itself changed"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_gradients_is_noticed(case):
    """And what leaves them alone is not, nor is anything before and after what is watched."""
    change, said = CHANGES[case]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Untouched(dict(model.named_parameters()))
    assert watch.change() is None
    model(torch.ones(1, 3)).sum().backward()
    watch.note()
    assert watch.change() is None
    change(model, optimizer)
    found = watch.change()
    assert (found is None) == (said is None)
    if said is not None:
        assert re.search(said, str(found))
    watch.forget()
    assert watch.change() is None

"""What optimizers and schedulers have to be, and what of them all ranks compare."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from taciturn.errors import InputError
from taciturn.optimizers import check_optimizer, check_scheduler, hyperparameters


def sgd(**options: float) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (None, "outer=None: a torch.optim.Optimizer is needed"),
        (torch.optim.SGD, "a torch.optim.Optimizer is needed"),
        (torch.optim.LBFGS(nn.Linear(2, 1).parameters()), "LBFGS evaluates the loss several times"),
    ],
)
def test_optimizers_that_cannot_be_stepped_are_refused(optimizer, text):
    """None, a class instead of an object, and one whose step needs a closure."""
    check_optimizer(sgd())
    with pytest.raises(InputError, match=text):
        check_optimizer(optimizer, "outer")


def test_schedulers_that_cannot_be_stepped_are_refused():
    """One that wants a metric, and what is none; an ordinary one passes."""
    check_scheduler(torch.optim.lr_scheduler.StepLR(sgd(), 1))
    check_scheduler(torch.optim.lr_scheduler.OneCycleLR(sgd(), 1.0, total_steps=4))
    with pytest.raises(InputError, match=r"ReduceLROnPlateau.+needs metrics"):
        check_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(sgd()))
    with pytest.raises(InputError, match="scheduler=0"):
        check_scheduler(0)


def test_hyperparameters_differ_where_steps_would():
    """Class, groups, and each plain value; a rate in a tensor counts as the rate."""
    same = hyperparameters(sgd(), "outer")
    assert same == hyperparameters(sgd(), "outer")
    assert same["outer's lr"] == "0.1"
    for other in (sgd(lr=0.2), sgd(momentum=0.9), sgd(weight_decay=1e-3)):
        found = hyperparameters(other, "outer")
        assert set(found) == set(same)
        assert len({name for name in same if found[name] != same[name]}) == 1
    rate = torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=torch.tensor(0.25))
    assert hyperparameters(rate, "outer")["outer's lr"] == "0.25"
    two = torch.optim.SGD([{"params": [p]} for p in nn.Linear(2, 1).parameters()], lr=0.1)
    assert hyperparameters(two, "outer")["outer's groups"] == "2"
    assert hyperparameters(two, "outer")["outer's group 1's lr"] == "0.1"

"""``ddp.attach(model, "auto")`` on real ranks: probe, pick, train, and compare with the metrics."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import taciturn.probe
from link_files import make_link
from ranks import Ranks
from taciturn import ddp
from taciturn.errors import TaciturnError
from taciturn.methods import parse
from taciturn.plan import pick
from taciturn.probe import probe_link


def _train(
    method: str, steps: int, probed: bool = True
) -> tuple[str, str, float | None, float, torch.Tensor]:
    if not probed:
        taciturn.probe.probe_link = lambda ranks, job: make_link(  # type: ignore[assignment]
            ranks.size, 50e6, methods=job.methods
        )
    try:
        return _train_by(method, steps)
    finally:
        taciturn.probe.probe_link = probe_link


def _train_by(method: str, steps: int) -> tuple[str, str, float | None, float, torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(60, 200), nn.Linear(200, 40)))
    said = io.StringIO()
    pick.PROBE_S = 1.0
    with contextlib.redirect_stderr(said):
        comm = ddp.attach(model, method, timeout_s=20)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model.zero_grad()
        model(torch.randn(4, 60, generator=generator)).pow(2).mean().backward()
    metrics = comm.metrics()
    assert metrics is not None
    picked = comm.picked.method if comm.picked else ""
    comm.close()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return picked, said.getvalue(), metrics.predicted_s, metrics.exchange_s, gradient


@pytest.mark.processes
def test_auto(pool: Ranks) -> None:
    """All ranks pick the same, rank 0 says what and why, the metrics have prediction and
    measurement, and replicas stay alike; a method that was given has no prediction.

    A probe of a second on a busy machine may say anything, or that it can tell nothing; what
    follows from a link is tested with one that is made up.
    """
    for probed in (True, False):
        _check(pool.run(_train, "auto", 2, probed), probed)
    assert {predicted_s for _, _, predicted_s, _, _ in pool.run(_train, "ring", 1)} == {None}


def _check(results: list[tuple[str, str, float | None, float, torch.Tensor]], probed: bool) -> None:
    methods = {picked for picked, *_ in results}
    assert len(methods) == 1
    parse(methods.pop())
    assert results[0][1].startswith("taciturn: auto: ")
    assert [said for _, said, *_ in results[1:]] == [""] * 3
    for _, _, predicted_s, exchange_s, gradient in results:
        assert predicted_s == results[0][2]
        assert exchange_s > 0
        assert predicted_s > 0 if predicted_s is not None else probed
        assert torch.equal(gradient, results[0][4])


def _attach_differently() -> str:
    model = DistributedDataParallel(nn.Linear(3, 2))
    pick.PROBE_S = 1.0
    method = "auto" if torch.distributed.get_rank() else "ring"
    try:
        ddp.attach(model, method, timeout_s=5)
    except TaciturnError as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


@pytest.mark.processes
def test_auto_on_some_ranks_only_is_an_error_on_all(new_ranks) -> None:
    """Ranks that attach different things are told so, the probing ones too, and none hangs."""
    results = new_ranks(2).run(_attach_differently)
    for said in results:
        assert said.startswith("MismatchError: attach differs between the ranks in the method")
        assert "auto on rank 1" in said

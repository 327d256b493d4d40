"""Local steps and outer exchanges on real gloo processes, against a simulation in one process."""

from __future__ import annotations

import io
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks
from taciturn import DiLoCo, LocalSGD
from taciturn.aggregators import PowerSGD
from taciturn.errors import InputError, PeerError, TaciturnError
from taciturn.local_update import nesterov
from taciturn.local_update.companions import Companions
from taciturn.local_update.fragment import split

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied, frozen and unused parameters beside ordinary ones, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.tied = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.tied.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.tied(self.b(torch.tanh(self.a(x))))
        return result


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def step_once(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    net(batch(rank, step)).pow(2).mean().backward()
    optimizer.step()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def plain_sgd(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchor, lr=1.0)


# -- the simulation


def simulate(
    ranks: int, total: int, period: Callable[[int], int], outer: Outer, fragments: int = 1,
    overlap: int = 0, mixing: float = 0.0, warmup: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """Train all replicas in one process; return their parameters at the end."""
    nets = [Net() for _ in range(ranks)]
    optimizers = [sgd(net) for net in nets]
    parts = split(list(nets[0].named_parameters()), fragments)
    names = [[name for name, _ in part] for part in parts]
    anchors = [{n: p.detach().clone() for n, p in part} for part in parts]
    outers = [outer(list(anchor.values())) for anchor in anchors]
    pending: list[tuple[int, dict[str, torch.Tensor]] | None] = [None] * fragments
    since = [0] * fragments
    replicas = [dict(net.named_parameters()) for net in nets]

    def begin(f: int, step: int) -> None:
        since[f] = 0
        mean = {
            n: torch.stack([anchors[f][n] - r[n].detach() for r in replicas]).mean(0)
            for n in names[f]
        }
        pending[f] = (step + overlap, mean)

    def apply(f: int, share: float) -> None:
        waiting = pending[f]
        assert waiting is not None
        for n, anchor in anchors[f].items():
            anchor.grad = waiting[1][n]
        outers[f].step()
        for r in replicas:
            for n, anchor in anchors[f].items():
                r[n].data = share * r[n].data + (1 - share) * anchor
        pending[f] = None

    start = number = 0
    for step in range(1, total + 1):
        for rank in range(ranks):
            step_once(nets[rank], optimizers[rank], rank, step)
        for f in range(fragments):
            since[f] += 1
            waiting = pending[f]
            if waiting is not None and waiting[0] <= step:
                apply(f, mixing)
        length = 1 if start < warmup else period(number)
        for f in range(fragments):
            if step - start == max(1, round(length * (f + 1) / fragments)):
                if pending[f] is not None:
                    apply(f, mixing)
                begin(f, step)
                if not overlap:
                    apply(f, 0.0)
        if step - start >= length:
            number += start >= warmup
            start = step
    for f in range(fragments):
        if pending[f] is not None:
            apply(f, mixing)
    if any(since):
        for f in range(fragments):
            begin(f, total)
            apply(f, 0.0)
    return [flat(net) for net in nets]


def _run(kind: str, total: int, options: dict[str, Any]) -> torch.Tensor:
    net = Net()
    optimizer = sgd(net)
    made = {"local": LocalSGD, "diloco": DiLoCo}[kind](net, optimizer, timeout_s=20, **options)
    with made:
        for step in range(1, total + 1):
            step_once(net, optimizer, dist.get_rank(), step)
    return flat(net)


def growing(number: int) -> int:
    return 1 + 2 * number


CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "local SGD": ("local", 8, {"steps": 4}, {"period": lambda _: 4}),
    "a last short round": ("local", 10, {"steps": 4}, {"period": lambda _: 4}),
    "warm-up": ("local", 11, {"steps": 4, "warmup_steps": 3}, {"period": lambda _: 4, "warmup": 3}),
    "growing": ("local", 12, {"steps": growing}, {"period": growing}),
    "DiLoCo": ("diloco", 15, {"steps": 5}, {"period": lambda _: 5, "outer": nesterov}),
    "fragments": (
        "diloco", 14, {"steps": 4, "fragments": 3},
        {"period": lambda _: 4, "outer": nesterov, "fragments": 3},
    ),
    "streaming": (
        "diloco", 17, {"steps": 6, "fragments": 3, "overlap_steps": 2},
        {"period": lambda _: 6, "outer": nesterov, "fragments": 3, "overlap": 2, "mixing": 0.5},
    ),
    "streaming, all fragments at once": (
        "diloco", 9, {"steps": 2, "fragments": 4, "overlap_steps": 1, "mixing": 0.25},
        {"period": lambda _: 2, "outer": nesterov, "fragments": 4, "overlap": 1, "mixing": 0.25},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_variant_is_what_the_simulation_says(case, pool: Ranks):
    """Parameters equal those of all replicas trained in one process (fp64), and each other's."""
    kind, total, options, simulated = CASES[case]
    found = pool.run(_run, kind, total, options)
    expected = simulate(4, total, **{"outer": plain_sgd, **simulated})
    for one, right in zip(found, expected, strict=True):
        assert torch.allclose(one, right, rtol=1e-12, atol=1e-13)
        assert torch.equal(one, found[0])


def _like_ddp() -> torch.Tensor:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(1, 8):
        step_once(model, optimizer, dist.get_rank(), step)
    return flat(model.module)


def test_local_sgd_with_one_step_is_ddp(pool: Ranks):
    """With H = 1 and plain SGD, averaging parameters is averaging gradients."""
    stock = pool.run(_like_ddp)
    for ours, theirs in zip(pool.run(_run, "local", 7, {"steps": 1}), stock, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


def test_diloco_with_outer_sgd_is_averaging(pool: Ranks):
    """Outer SGD at rate 1 goes to the average of the parameters."""
    local = pool.run(_run, "local", 10, {"steps": 5})
    for ours, theirs in zip(
        pool.run(_run, "diloco", 10, {"steps": 5, "outer": plain_sgd}), local, strict=True
    ):
        assert torch.equal(ours, theirs)


def _two_groups() -> tuple[list[int], torch.Tensor]:
    net = Net()
    parts = [list(net.a.parameters()), list(net.b.parameters())]
    optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=0.05)
    synced = []
    with LocalSGD(net, optimizer, steps=4, timeout_s=20) as local:
        for step in range(1, 10):
            step_once(net, optimizer, dist.get_rank(), step)
            metrics = local.metrics()
            synced.append(metrics.exchanges if metrics is not None else 0)
    return synced, flat(net)


def test_rounds_count_steps_and_not_parameter_groups(pool: Ranks):
    """Two parameter groups, period 4: averages after steps 4 and 8, and at the end."""
    results = pool.run(_two_groups)
    for synced, weights in results:
        assert synced == [0, 0, 0, 1, 1, 1, 1, 2, 2]
        assert torch.equal(weights, results[0][1])


def _all_averaged() -> dict[str, torch.Tensor]:
    net = Net()
    optimizer = sgd(net)
    rank = dist.get_rank()
    with LocalSGD(net, optimizer, steps=2, timeout_s=20):
        with torch.no_grad():
            net.frozen.add_(rank)  # a frozen one that diverged
            net.unused.add_(2.0 * rank)
        for step in range(2):
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:  # only one rank uses b
                net(batch(rank, step)).pow(2).mean().backward()
            else:
                net.a(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_every_parameter_is_averaged_whatever_its_gradient(pool: Ranks):
    """Frozen, unused, tied, and used by one rank only: the registered list, always."""
    found = pool.run(_all_averaged)
    for weights in found:
        assert torch.allclose(weights["frozen"], torch.full((3,), 2.5).double())
        assert torch.allclose(weights["unused"], torch.full((5,), 4.0).double())
        assert all(torch.equal(weights[name], found[0][name]) for name in weights)


def _state_after(options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    rank = dist.get_rank()
    with LocalSGD(net, optimizer, steps=4, timeout_s=20, **options):
        for step in range(4):
            net.running.add_(rank)  # as a forward does
            net.seen.add_(1 + rank)
            step_once(net, optimizer, rank, step)
    momentum = optimizer.state[net.b.weight]["momentum_buffer"].clone()
    return momentum, net.running.clone(), int(net.seen)


@pytest.mark.parametrize("optimizer_state", ["keep", "average"])
@pytest.mark.parametrize("buffers", ["average", "rank 0", "keep"])
def test_momenta_and_buffers_follow_the_stated_policy(optimizer_state, buffers, pool: Ranks):
    """Momenta are equal only if averaged; buffers are averaged, rank 0's, or each rank's own."""
    options = {"optimizer_state": optimizer_state, "buffers": buffers}
    results = pool.run(_state_after, options)
    kept = [momentum for momentum, _, _ in pool.run(_state_after, {})]
    same = all(torch.equal(momentum, results[0][0]) for momentum, _, _ in results)
    assert same == (optimizer_state == "average")
    if optimizer_state == "average":
        assert torch.allclose(results[0][0], torch.stack(kept).mean(0))
    for rank, (_, running, seen) in enumerate(results):
        expected = {"average": 6.0, "rank 0": 0.0, "keep": 4.0 * rank}[buffers]
        assert running.tolist() == [expected] * 2
        assert seen == (4 * (1 + rank) if buffers == "keep" else 4)


def _alone() -> bool:
    groups = [dist.new_group([rank]) for rank in range(4)]
    mine = groups[dist.get_rank()]
    weights = []
    for kind in (None, LocalSGD, DiLoCo):
        net = Net()
        optimizer = sgd(net)
        made = kind(net, optimizer, steps=2, process_group=mine) if kind else None
        if made is not None:
            made.__enter__()
        for step in range(5):
            step_once(net, optimizer, 0, step)
        if made is not None:
            made.__exit__(None, None, None)
            assert made.metrics() is None
        weights.append(flat(net))
    return torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_a_world_of_one_is_left_alone(pool: Ranks):
    """With one rank training equals the run without the library."""
    assert pool.run(_alone) == [True] * 4


# -- metrics


def _drift() -> tuple[float, float, int, int | None]:
    net = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    rank = dist.get_rank()
    with LocalSGD(net, optimizer, steps=1, method="ring", timeout_s=20) as local:
        # The first element goes the same way on all, the others each rank's own way.
        direction = torch.zeros(4)
        direction[0] = 1.0
        direction[1 + rank % 2] += 2.0 * (1 if rank < 2 else -1)
        net.weight.grad = direction.view(1, 4).clone()
        optimizer.step()
        metrics = local.metrics()
    assert metrics is not None
    return metrics.drift, metrics.cosine, metrics.exchanges, metrics.sent_bytes


def test_drift_and_cosine_are_those_worked_out_by_hand(pool: Ranks):
    """Each rank goes (1, +-2): their mean has length 1, each is 2 away from it."""
    for drift, cosine, exchanges, sent in pool.run(_drift):
        assert drift == pytest.approx(2.0, rel=1e-6)
        assert cosine == pytest.approx(1 / math.sqrt(5), rel=1e-6)
        assert exchanges == 1
        assert sent is not None
        assert sent > 0


def _not_finite() -> tuple[bool, int, bool]:
    net = Net()
    optimizer = sgd(net)
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DiLoCo(net, optimizer, steps=3, compress="powersgd:rank=2", timeout_s=20) as made:
            for step in range(9):
                step_once(net, optimizer, rank, step)
                if step == 4 and rank == 2:
                    with torch.no_grad():
                        net.b.weight[0, 0] = math.nan
                if step == 5:
                    before = made.anchor_state_dict()
                    back = all(
                        torch.equal(before[n], p) for n, p in net.named_parameters()
                    )  # the round was lost
            metrics = made.metrics()
    assert metrics is not None
    return bool(flat(net).isfinite().all()), metrics.skipped, back


def test_a_round_that_is_not_finite_is_taken_back(pool: Ranks):
    """NaN on one rank: all go back to the anchor together and on from there, finite."""
    assert pool.run(_not_finite) == [(True, 1, True)] * 4


class Running(nn.Module):
    """A layer whose buffer follows its inputs, as running statistics do, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
        self.register_buffer("running", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.running.lerp_(x.detach().mean(0), 0.1)
        result: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return result


def _bad_batch(options: dict[str, Any]) -> tuple[int, list[bool], torch.Tensor, bool]:
    """Train with one batch of one rank that is not finite."""
    net = Running()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DiLoCo(net, optimizer, steps=4, timeout_s=20, **options) as made:
            for step in range(16):
                x = batch(rank, step)
                if step == 5 and rank == 2:
                    x = x * math.nan
                optimizer.zero_grad()
                net(x).pow(2).mean().backward()
                optimizer.step()
            start = made.anchor_state_dict()
    metrics = made.metrics()
    assert metrics is not None
    state = [bool(v.isfinite().all()) for s in optimizer.state.values() for v in s.values()]
    moved = any(not torch.equal(start[n], p) for n, p in Running().named_parameters())
    return metrics.skipped, [*state, bool(net.running.isfinite().all())], flat(net), moved


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer_state": "average"},
        {"buffers": "keep"},
        {"fragments": 4},
        {"fragments": 2, "overlap_steps": 1},
    ],
)
def test_one_bad_batch_costs_one_round(options, pool: Ranks):
    """NaN in one batch of one rank: optimizer state, buffers and all else are finite again."""
    results = pool.run(_bad_batch, options)
    for skipped, finite, weights, moved in results:
        assert skipped == 1
        assert all(finite)
        assert torch.equal(weights, results[0][2])
        assert weights.isfinite().all()
        assert moved


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_not_finite_begins_anew(name):
    """After a NaN gradient the optimizer steps on as a new one would; other state is left alone."""
    nets = [nn.Linear(3, 2), nn.Linear(3, 2)]
    nets[1].load_state_dict(nets[0].state_dict())
    used, new = (OPTIMIZERS[name](net.parameters()) for net in nets)
    transport: Any = None
    companions = Companions(nets[0], used, "keep", "keep", transport)
    start = {n: p.detach().clone() for n, p in nets[0].named_parameters()}
    for scale in (1.0, math.nan):
        nets[0].weight.grad = torch.full((2, 3), scale)
        nets[0].bias.grad = torch.ones(2)
        used.step()
    bias = {k: v.clone() for k, v in used.state[nets[0].bias].items()}
    with torch.no_grad():
        nets[0].load_state_dict(start)
        companions.restart()
    assert all(torch.equal(v, used.state[nets[0].bias][k]) for k, v in bias.items())
    for net, optimizer in zip(nets, (used, new), strict=True):
        net.weight.grad, net.bias.grad = torch.full((2, 3), 0.5), None
        optimizer.step()
    assert torch.equal(nets[0].weight, nets[1].weight)


# -- resume


def _resume(options: dict[str, Any]) -> bool:
    rank = dist.get_rank()

    def make(seed: int) -> tuple[Net, torch.optim.Optimizer, DiLoCo]:
        net = Net(seed)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        return net, optimizer, DiLoCo(net, optimizer, timeout_s=20, **options)

    net, optimizer, made = make(0)
    with made:
        for step in range(20):
            if step == 11:  # in mid-round, with an exchange under way
                file = io.BytesIO()
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"rounds": made.state_dict()}, file)
            step_once(net, optimizer, rank, step)
    expected = flat(net)
    net, optimizer, made = make(5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    made.load_state_dict(saved["rounds"])
    with made:
        for step in range(11, 20):
            step_once(net, optimizer, rank, step)
    return torch.equal(flat(net), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 8},
        {"steps": 8, "compress": "quantized:bits=4,feedback=true"},
        {"steps": 4, "fragments": 3, "overlap_steps": 2, "compress": "powersgd:rank=1"},
        {"steps": 6, "fragments": 2, "overlap_steps": 3, "compress": "quantized:bits=4"},
    ],
)
def test_resume_in_mid_round_is_bit_equal(options, pool: Ranks):
    """Saved within a round, exchanges under way or not, a run goes on bit for bit."""
    assert pool.run(_resume, options) == [True] * 4


def _lost() -> tuple[float, str, dict[str, Any] | None, torch.Tensor | None]:
    """Rank 2 dies in its second round; the others save what they can go on from."""
    net = Net()
    optimizer = sgd(net)
    rank = dist.get_rank()
    made = DiLoCo(net, optimizer, steps=4, compress="powersgd:rank=1", timeout_s=8)
    start = time.monotonic()
    try:
        with made:
            for step in range(8):
                if step == 6 and rank == 2:
                    os._exit(3)
                step_once(net, optimizer, rank, step)
    except PeerError as error:
        return time.monotonic() - start, str(error), made.state_dict(), flat(net)
    return 0.0, "", None, None


def _go_on(states: list[dict[str, Any]]) -> tuple[bool, bool, torch.Tensor]:
    net = Net(3)
    optimizer = sgd(net)
    state = states[dist.get_rank()]
    made = DiLoCo(net, optimizer, steps=4, compress="powersgd:rank=1", timeout_s=20)
    try:
        made.load_state_dict(state)
    except InputError as error:
        refused = "other_ranks=True" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.load_state_dict(state, other_ranks=True)
    anchor = made.anchor_state_dict()
    begun = all(torch.equal(anchor[name], p) for name, p in net.named_parameters())
    with made:
        for step in range(8, 14):
            step_once(net, optimizer, dist.get_rank(), step)
    return refused, begun, flat(net)


def test_a_rank_lost_in_a_round_leaves_the_others_a_start(new_ranks, tmp_path):
    """The others raise, naming it, save what all last agreed on, and go on with fewer ranks."""
    outcomes = new_ranks(3).outcomes(_lost, timeout_s=60, lost=[2])
    states = []
    for rank in (0, 1):
        seconds, text, state, _ = outcomes[rank].result
        assert "rank 2" in text
        assert seconds < 30
        states.append(state)
    for name, anchor in states[0]["fragments"][0]["anchor"].items():
        assert torch.equal(anchor, states[1]["fragments"][0]["anchor"][name])
    found = new_ranks(2).run(_go_on, states, timeout_s=60)
    for refused, begun, weights in found:
        assert refused
        assert begun
        assert weights.isfinite().all()
        assert torch.equal(weights, found[0][2])


# -- bad input


OUTERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "outer none": lambda _: None,
    "outer closure": torch.optim.LBFGS,
    "outer of others": lambda _: torch.optim.SGD([torch.ones(2)], lr=1.0),
    "outer rate": lambda anchor: torch.optim.SGD(anchor, lr=1.0 - 0.5 * (dist.get_rank() == 1)),
    "outer kind": lambda anchor: (torch.optim.Adam, torch.optim.SGD)[dist.get_rank() == 1](anchor),
}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no anchor": lambda state: state["fragments"][0].pop("anchor"),
    "anchor of text": lambda state: state["fragments"][1]["anchor"].update({"b.bias": "x"}),
    "anchor not finite": lambda state: state["fragments"][1]["anchor"]["b.bias"].fill_(math.nan),
    "fewer fragments": lambda state: state["fragments"].pop(),
    "no outer": lambda state: state["fragments"][0].update(outer={}),
    "outer of others' groups": lambda state: state["fragments"][0]["outer"].update(param_groups=[]),
    "another outer": lambda state: state["fragments"][1]["outer"]["param_groups"][0].pop(
        "momentum"
    ),
    "steps of text": lambda state: state.update(steps="4"),
    "another time": lambda state: state.update(steps=4),
    "another anchor": lambda state: state["fragments"][0]["anchor"]["a.weight"].add_(1),
}


def _refused(kind: str) -> tuple[str, str]:
    net: nn.Module = Net()
    optimizer: Any = sgd(net)
    rank = dist.get_rank()
    options: dict[str, Any] = {"timeout_s": 10}
    try:
        if kind == "steps":
            LocalSGD(net, optimizer, steps=0, **options)
        elif kind == "half":
            DiLoCo(net, optimizer, steps=2.5, **options)  # type: ignore[arg-type]
        elif kind == "fragments":
            DiLoCo(net, optimizer, steps=4, fragments=99, **options)
        elif kind == "overlap":
            DiLoCo(net, optimizer, steps=4, overlap_steps=4, **options)
        elif kind == "mixing":
            DiLoCo(net, optimizer, steps=4, mixing=1.0, **options)
        elif kind == "closure":
            LocalSGD(net, torch.optim.LBFGS(net.parameters()), **options)
        elif kind == "no optimizer":
            LocalSGD(net, None, **options)  # type: ignore[arg-type]
        elif kind == "ddp":
            LocalSGD(DistributedDataParallel(net, find_unused_parameters=True), optimizer)
        elif kind == "method":
            DiLoCo(net, optimizer, compress="quantised", **options)
        elif kind == "complex":
            LocalSGD(nn.Linear(2, 2).to(torch.complex64), optimizer, **options)
        elif kind == "buffers":
            LocalSGD(net, optimizer, buffers="mean", **options)  # type: ignore[arg-type]
        elif kind == "differ":
            DiLoCo(net, optimizer, steps=4 + (rank == 1), **options)
        elif kind == "weights":
            net = Net(rank)
            with LocalSGD(net, sgd(net), **options):
                pass
        elif kind == "steps differ":
            with LocalSGD(net, optimizer, steps=3, **options):
                for step in range(3 + (rank == 1)):
                    step_once(net, optimizer, rank, step)
                if rank != 1:
                    step_once(net, optimizer, rank, 3)
                    step_once(net, optimizer, rank, 4)
        elif kind == "period":
            with LocalSGD(net, optimizer, steps=lambda number: 2 - number, **options):
                for step in range(6):
                    step_once(net, optimizer, rank, step)
        elif kind == "raises":
            with LocalSGD(net, optimizer, steps=3, **options):
                for step in range(3):
                    if rank == 1 and step == 2:
                        raise OSError("disk on fire")
                    step_once(net, optimizer, rank, step)
        elif kind in OUTERS:
            DiLoCo(net, optimizer, outer=OUTERS[kind], **options)
        elif kind == "policies":
            LocalSGD(net, optimizer, buffers="keep" if rank == 1 else "average", **options)
        elif kind == "other optimizer":
            LocalSGD(net, sgd(Net()) if rank == 1 else optimizer, **options)
        elif kind == "more parameters":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
            LocalSGD(net, optimizer, **options)
        elif kind == "no block":
            LocalSGD(net, optimizer, **options).synchronize()
        elif kind in ("two blocks", "one optimizer"):
            both = nn.ModuleList([net, Net(1)]) if kind == "one optimizer" else net
            with LocalSGD(net, optimizer, **options), DiLoCo(both, optimizer, **options):
                pass
        elif kind in ("replaced", "added", "added to the optimizer"):
            with LocalSGD(net, optimizer, steps=2, **options):
                step_once(net, optimizer, rank, 0)
                if rank == 1 and kind == "replaced":
                    net.unused = nn.Parameter(torch.ones(5).double())
                elif rank == 1 and kind == "added":
                    net.more = nn.Parameter(torch.ones(5).double())
                elif rank == 1:
                    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
                step_once(net, optimizer, rank, 1)
        elif kind in ("leaves after a round", "leaves before the first"):
            with LocalSGD(net, optimizer, steps=3, **options):
                for step in range(6 if rank != 1 else 3 * (kind == "leaves after a round")):
                    step_once(net, optimizer, rank, step)
        elif kind == "stops":
            with LocalSGD(net, optimizer, steps=3, **options):
                for step in range(6):
                    if rank == 1 and step == 4:
                        break
                    step_once(net, optimizer, rank, step)
        elif kind == "loaded in the loop":
            with LocalSGD(net, optimizer, **options) as local:
                local.load_state_dict(local.state_dict())
        elif kind in DAMAGES:
            made = DiLoCo(net, optimizer, steps=4, fragments=2, **options)
            state = made.state_dict()
            if rank == 1:
                DAMAGES[kind](state)
            DiLoCo(net, optimizer, steps=4, fragments=2, **options).load_state_dict(state)
        elif kind == "twice":
            made = LocalSGD(net, optimizer, **options)
            with made:
                pass
            made.__enter__()
        elif kind in ("other H", "other model", "no state", "other kind", "not finite"):
            made = DiLoCo(net, optimizer, steps=4, compress="topk:ratio=0.5", **options)
            with made:
                for step in range(4):
                    step_once(net, optimizer, rank, step)
            state = made.state_dict()
            fresh = nn.Linear(2, 2) if kind == "other model" else Net()
            steps = 8 if kind == "other H" else 4
            other: Any = DiLoCo(
                fresh, sgd(fresh), steps=steps, compress="topk:ratio=0.5", **options
            )
            if kind == "other kind":
                other = LocalSGD(fresh, sgd(fresh), steps=4, timeout_s=10)
            if kind == "no state" and rank == 1:
                state = {}
            if kind == "not finite" and rank == 1:
                residuals = state["fragments"][0]["exchange"]["aggregator"]["residuals"]
                residuals["a.weight"][0] = math.nan
            other.load_state_dict(state)
    except (TaciturnError, OSError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("steps", "steps=0"),
        ("half", "steps=2.5"),
        ("fragments", "fragments=99"),
        ("overlap", "overlap_steps=4 with steps=4"),
        ("mixing", "mixing=1.0"),
        ("closure", "LBFGS evaluates the loss several times"),
        ("no optimizer", "optimizer=None"),
        ("ddp", "give the module inside it"),
        ("method", "quantised"),
        ("complex", "complex64"),
        ("buffers", "buffers='mean'"),
        ("differ", "in steps: 4 on rank 0, 5 on rank 1"),
        ("weights", "the replicas differ"),
        ("steps differ", "the local steps when it exchanges"),
        ("period", "steps(2)=0"),
        ("raises", "disk on fire"),
        ("twice", "was used already"),
        ("other H", "steps=4, and here it is 8"),
        ("other model", "another model"),
        ("no state", "no state of a DiLoCo"),
        ("other kind", "of a DiLoCo, not of a LocalSGD"),
        ("not finite", "not finite"),
        ("outer none", "outer(...)=None"),
        ("outer closure", "LBFGS evaluates the loss several times"),
        ("outer of others", "an optimizer of other tensors"),
        ("outer rate", "the outer optimizer's lr: 1.0 on rank 0, 0.5 on rank 1"),
        ("outer kind", "the outer optimizer: Adam on rank 0, SGD on rank 1"),
        ("policies", "in buffers: average on rank 0, keep on rank 1"),
        ("other optimizer", "holds none of this module's parameters"),
        ("more parameters", "of shape (7,) that is not the model's"),
        ("no block", "synchronize() outside the with block"),
        ("two blocks", "within another with block"),
        ("one optimizer", "optimizer is within another with block"),
        ("replaced", "'unused' was replaced"),
        ("added", "'more' was added"),
        ("added to the optimizer", "of shape (7,) that is not the model's"),
        ("leaves after a round", "3, its last on rank 1"),
        ("leaves before the first", "0, its last on rank 1"),
        ("stops", "4, its last on rank 1"),
        ("loaded in the loop", "before the with block"),
        *((kind, "this state is damaged") for kind in ("no anchor", "anchor of text", "no outer")),
        ("fewer fragments", "this state is damaged"),
        ("anchor not finite", "'b.bias' is not finite"),
        ("outer of others' groups", "is another than the SGD here"),
        ("another outer", "is another than the SGD here"),
        ("steps of text", "steps='4'"),
        ("another time", "in steps: 0 on rank 0, 4 on rank 1"),
        ("another anchor", "in the anchor of fragment 0"),
    ],
)
def test_wrong_use_is_an_error_on_every_rank(kind, text, pool: Ranks):
    """Whoever does it, all ranks raise, and the reason reaches them; nothing hangs."""
    found = pool.run(_refused, kind)
    assert all(name != "none" for name, _ in found)
    assert all(text in said for _, said in found), found


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fragments_hold_every_parameter_once(count):
    """In order, none empty, whatever the sizes."""
    named = [(str(n), torch.empty(size)) for n, size in enumerate((100, 1, 1, 0, 60, 5))]
    parts = split(named, count)
    assert [pair for part in parts for pair in part] == named
    assert len(parts) == count
    assert all(parts)


def test_an_aggregator_object_serves_every_fragment(pool: Ranks):
    """Each fragment has a copy of its own: states belong to parameters."""
    options = {"steps": 4, "fragments": 3, "compress": PowerSGD(rank=1)}
    found = pool.run(_run, "diloco", 8, options)
    assert all(torch.equal(weights, found[0]) for weights in found)

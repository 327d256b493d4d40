"""Attached to DistributedDataParallel, on real gloo processes: loops as people write them."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks
from taciturn import ddp
from taciturn.aggregators import Aggregator, Group, Mean, PowerSGD
from taciturn.collectives import CodedRing, Ring
from taciturn.collectives.base import Cost
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
from taciturn.transport import Transport

METHODS = [
    "backend",
    "ring",
    "cast",
    "quantized:bits=8",
    "quantized:bits=4,feedback=true",
    "coded:passes=2",
    "powersgd:rank=2",
    "powersgd:rank=1,alternate=true",
    "topk:ratio=0.1",
]
SMALL = 6_000  # bytes: a few groups, and with cap=0.002 several buckets


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)) for _ in range(3)]
    return nn.Sequential(*layers)


def build(
    method: Any, *, cap: float = 0.002, group_bytes: int = SMALL, net: nn.Module | None = None,
    options: dict[str, Any] | None = None, **keywords: Any,
) -> tuple[DistributedDataParallel, ddp.Communicator]:  # fmt: skip
    model = DistributedDataParallel(
        network() if net is None else net, bucket_cap_mb=cap, **(options or {})
    )
    keywords.setdefault("timeout_s", 20)
    return model, ddp.attach(model, method, group_bytes=group_bytes, **keywords)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    factor: Callable[[int], float] = lambda _: 1.0,
) -> None:
    rank = dist.get_rank()
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20, generator=generator)).pow(2).mean() * factor(step)
        loss.backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same_on_all(values: list[torch.Tensor]) -> bool:
    return all(torch.equal(values[0], other) for other in values[1:])


# -- averages


def _many_buckets(method: str, unused: bool) -> torch.Tensor:
    options = {"find_unused_parameters": True} if unused else {}
    model, comm = build(method, options=options)
    steps = 60 if method.startswith("powersgd:rank=1") else 20
    for step in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        model(torch.randn(4, 20, generator=generator)).pow(2).mean().backward()
    result = grads(model)
    metrics = comm.metrics()
    assert metrics is not None
    assert metrics.step == steps
    comm.close()
    return result


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_many_buckets(method, unused, pool: Ranks):
    """Backward passes over several buckets end, and all ranks hold the same gradients."""
    results = pool.run(_many_buckets, method, unused)
    assert "coded" in method or same_on_all(results)


def _like_stock(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    net: Callable[[], nn.Module] = network
    options: dict[str, Any] = {}
    if kind == "channels_last":

        def net() -> nn.Module:
            torch.manual_seed(0)
            made = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
            return made.to(memory_format=torch.channels_last)
    elif kind == "mixed":

        def net() -> nn.Module:
            class Mixed(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    torch.manual_seed(0)
                    self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
                    self.b.double()
                    self.c.bfloat16()

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.c(self.b(self.a(x).double()).bfloat16()).float()

            return Mixed()
    elif kind.endswith("view"):
        options = {"gradient_as_bucket_view": True}
    elif kind == "static":
        options = {"static_graph": True}
    shape = {"channels_last": (4, 2, 2, 2), "mixed": (4, 4)}.get(kind, (4, 20))
    results = []
    # Buckets that are groups, or not; exchanged at once, or one after the other.
    method, cap, group_bytes = Ring(), 0.002, SMALL
    if kind.startswith("whole"):
        cap, group_bytes = 0.003, round(0.003 * 2**20)
    if kind.startswith("whole at once"):
        method = "backend"
    for ours in (False, True):
        model = DistributedDataParallel(net(), bucket_cap_mb=cap, **options)
        comm = ddp.attach(model, method, group_bytes=group_bytes, timeout_s=20) if ours else None
        for step in range(4):
            model.zero_grad(set_to_none=step % 2 == 0)
            if step == 2 and comm is not None:  # DDP has rebuilt its buckets
                for buffer in comm._exchange.buffers:
                    buffer.zero_()
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            for micro in range(2):
                inputs = torch.randn(*shape, generator=generator)
                if micro == 0 and kind == "no_sync":
                    with model.no_sync():
                        model(inputs).pow(2).mean().backward()
                elif micro == 1:
                    model(inputs).pow(2).mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
        results.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        if comm is not None:
            if kind.startswith("whole"):  # what is exchanged in DDP's memory leaves ours alone
                assert not any(buffer.any() for buffer in comm._exchange.buffers)
            comm.close()
    return results[0], results[1]


@pytest.mark.parametrize(
    "kind",
    [
        *["plain", "channels_last", "mixed", "view", "static", "no_sync"],
        *["whole", "whole view", "whole at once", "whole at once view"],
    ],
)
def test_mean_is_the_stock_average(kind, pool: Ranks):
    """The exact mean gives stock DDP's gradients, whatever the layout, dtypes and DDP's options."""
    for stock, ours in pool.run(_like_stock, kind):
        tolerance = 0.02 if kind == "mixed" else 1e-5  # DDP sums bf16 gradients in bf16
        assert ((stock - ours).norm() / stock.norm()).item() < tolerance


def _subgroup() -> float:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    layer = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(layer, process_group=groups[rank // 2])
    comm = ddp.attach(model, "ring", timeout_s=20)
    model(torch.full((1, 1), float(rank))).sum().backward()
    comm.close()
    return layer.weight.grad.item()


def test_subgroups_average_among_themselves(pool: Ranks):
    """The module's own process group counts, not the world."""
    assert pool.run(_subgroup) == [0.5, 0.5, 2.5, 2.5]


def _ignored(where: str) -> tuple[float, bool, float]:
    """Return the gradient of an ignored weight, whether the others' are averaged, the weight."""
    net = network()
    owner = net[0] if where == "inside" else net
    owner.register_parameter("own", nn.Parameter(torch.full((1,), float(dist.get_rank() + 1))))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(net, ["0.own" if where == "inside" else ".own"])
    model, comm = build("ring", net=net)
    own = owner.get_parameter("own")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model.zero_grad()
        (model(torch.randn(4, 20, generator=generator)).pow(2).mean() + 2 * own).backward()
    assert own.grad is not None
    with torch.no_grad():
        own.add_(1)
    comm.consolidate()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p is not own])
    same = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(same, gradients)
    comm.close()
    return own.grad.item(), same_on_all(same), own.item()


@pytest.mark.parametrize("where", ["inside", "outermost"])
def test_parameters_that_ddp_ignores_stay_this_ranks_own(where, pool: Ranks):
    """They are neither exchanged nor made equal; the others are."""
    for rank, (gradient, averaged, weight) in enumerate(pool.run(_ignored, where)):
        assert gradient == 2
        assert averaged
        # DDP itself still makes the outermost module's own ones equal when it wraps it.
        assert weight == (rank + 2 if where == "inside" else 2)


def test_a_bucket_in_the_groups_order_is_taken_as_it_lies():
    """Parts that follow each other are one piece at the start of its storage; others are none."""
    buffer = torch.arange(10.0)
    parts = [buffer[2:5], buffer[5:6], buffer[6:9]]
    piece = ddp._joined(parts)
    assert piece is not None
    assert piece.storage_offset() == 0
    assert piece.data_ptr() == parts[0].data_ptr()
    assert torch.equal(piece, buffer[2:9])
    assert ddp._joined([parts[1], parts[0]]) is None
    assert ddp._joined([parts[0], parts[2]]) is None


def _some_attach() -> str:
    model = DistributedDataParallel(network())
    if dist.get_rank() == 1:
        return ""
    try:
        ddp.attach(model, "ring", timeout_s=3)
    except PeerError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_does_not_attach_is_named(new_ranks):
    """The others raise within the time-out and say which one did not come."""
    said = new_ranks(3).run(_some_attach, timeout_s=40)
    assert said[0].startswith("rank 1 did not come within 3 s")
    assert said[2] == said[0]


def _two_modules() -> bool:
    a, comm_a = build("powersgd:rank=1")
    b, comm_b = build("quantized:bits=8", net=network(1))
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        for model in (a, b):
            model.zero_grad()
        (
            a(torch.randn(4, 20, generator=generator)) + b(torch.randn(4, 20, generator=generator))
        ).pow(2).mean().backward()
    values = torch.cat([grads(a), grads(b)])
    others = [torch.empty_like(values) for _ in range(4)]
    dist.all_gather(others, values)
    comm_a.close()
    comm_b.close()
    return same_on_all(others)


def test_two_modules_in_one_backward(pool: Ranks):
    """Each module has its own thread and process group: they do not wait for one another."""
    assert pool.run(_two_modules) == [True] * 4


def _join() -> torch.Tensor:
    model, comm = build("ring")
    optimizer = sgd(model)
    with Join([model]):
        train(model, optimizer, range(3 + dist.get_rank()))
    result = flat(model)
    comm.close()
    return result


def test_uneven_inputs_with_join(pool: Ranks):
    """Ranks that run out of data early shadow the others' exchanges."""
    assert same_on_all(pool.run(_join))


def _compiled(outside: bool) -> bool:
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        net = network()
        if not outside:
            net = torch.compile(net, backend="eager")
        model = DistributedDataParallel(net)  # torch.compile wants buckets above 1 MB
        comm = ddp.attach(model, "ring", group_bytes=SMALL, timeout_s=30) if ours else None
        called = torch.compile(model, backend="eager") if outside else model
        for step in range(3):
            model.zero_grad()
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            called(torch.randn(8, 20, generator=generator)).pow(2).mean().backward()
        results.append(grads(model))
        if comm is not None:
            metrics = comm.metrics()
            assert metrics is not None
            assert metrics.step == 3
            comm.close()
    return torch.allclose(*results, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("outside", [False, True])
def test_compiled_modules(outside, pool: Ranks):
    """torch.compile around DDP or inside it: each step is exchanged once, as without."""
    assert pool.run(_compiled, outside) == [True] * 4


def _alone() -> bool:
    groups = [dist.new_group([rank]) for rank in range(4)]
    mine = groups[dist.get_rank()]
    results = []
    for method in (None, "powersgd:rank=1"):
        model = DistributedDataParallel(network(), process_group=mine)
        comm = ddp.attach(model, method, timeout_s=20) if method else None
        train(model, sgd(model), range(3))
        results.append(flat(model))
        if comm is not None:
            metrics = comm.metrics()
            assert metrics is not None
            assert (metrics.step, metrics.sent_bytes, metrics.residual_bytes) == (3, 0, 0)
            comm.state_dict()
            comm.consolidate()
            comm.close()
    return torch.equal(*results)


def test_a_world_of_one_is_left_alone(pool: Ranks):
    """With one rank training equals the run without the library."""
    assert pool.run(_alone) == [True] * 4


# -- resume


def _resume(method: str) -> list[bool]:
    model, comm = build(method, cap=0.002)
    optimizer = sgd(model)
    train(model, optimizer, range(10))
    file = io.BytesIO()
    state = {"model": model.state_dict(), "comm": comm.state_dict(), "opt": optimizer.state_dict()}
    torch.save(state, file)
    train(model, optimizer, range(10, 20))
    expected = flat(model)
    comm.close()
    results = []
    for cap in (0.002, 25, 0.01):
        model, comm = build(method, cap=cap, group_bytes=1 << 20, net=network(5))
        optimizer = sgd(model)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
        comm.load_state_dict(saved["comm"])
        train(model, optimizer, range(10, 20))
        results.append(torch.equal(flat(model), expected))
        comm.close()
    return results


@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_equal(method, pool: Ranks):
    """A resumed run equals the uninterrupted one, whatever DDP's buckets are then."""
    assert pool.run(_resume, method) == [[True] * 3] * 4


def _bad_state(kind: str) -> tuple[str, str]:
    model, comm = build("powersgd:rank=1")
    train(model, sgd(model), range(2))
    state: Any = comm.state_dict()
    comm.close()
    other: Any = "powersgd:rank=1"
    net = None
    if kind == "method":
        other = "powersgd:rank=2"
    elif kind == "model":
        net = nn.Sequential(nn.Linear(20, 30))
    elif kind == "missing":
        state = None if dist.get_rank() == 2 else state
    elif kind == "rank":
        state["rank"] = (state["rank"] + 1) % 4
    elif kind == "other file":
        state = {"weights": 1}
    elif dist.get_rank() == 1:
        residuals = state["aggregator"]["residuals"]
        name = "0.0.weight"
        if kind == "not finite":
            residuals[name][3] = math.nan
        elif kind == "cut":
            residuals[name] = residuals[name][:-1]
        elif kind == "lacking":
            del residuals[name]
        elif kind == "no tensor":
            residuals[name] = 5
        elif kind == "integers":
            residuals[name] = residuals[name].long()
        elif kind == "no factor":
            del state["aggregator"]["inner"]["right"][name]
        elif kind == "bad factor":
            state["aggregator"]["inner"]["right"][name] = torch.ones(1, 7)
        elif kind == "no steps":
            del state["steps"]
        elif kind == "odd steps":
            state["since_resync"] = -1
    model, comm = build(other, net=net)
    before = repr(comm.state_dict())
    try:
        comm.load_state_dict(state)
    except (InputError, MismatchError) as error:
        assert repr(comm.state_dict()) == before  # on the ranks whose own was good, too
        return type(error).__name__, str(error)
    finally:
        comm.close()
    return "none", ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("method", "attach the method"),
        ("model", "another model"),
        ("missing", "rank 2"),
        ("rank", "every rank loads its own"),
        ("other file", "no state of a communicator"),
        ("not finite", "residual of '0.0.weight' in this state is not finite"),
        ("cut", "600 real numbers are needed"),
        ("lacking", "differ in '0.0.weight'"),
        ("no tensor", "residual of '0.0.weight' in this state is 5"),
        ("integers", "torch.int64"),
        ("no factor", "right factors in this state"),
        ("bad factor", "shape (1, 7)"),
        ("no steps", "steps='missing'"),
        ("odd steps", "since_resync=-1"),
    ],
)
def test_wrong_states_are_refused_on_every_rank(kind, text, pool: Ranks):
    """A state that does not belong here is an error on all ranks, also where it is one rank's."""
    for name, message in pool.run(_bad_state, kind):
        assert name in ("InputError", "MismatchError")
        assert text in message


def _fewer_ranks() -> list[bool]:
    model, comm = build("topk:ratio=0.1")
    train(model, sgd(model), range(3))
    state = comm.state_dict()
    comm.close()
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    small = DistributedDataParallel(network(), process_group=groups[rank // 2])
    comm = ddp.attach(small, "topk:ratio=0.1", timeout_s=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.load_state_dict(state)
    train(small, sgd(small), range(2))
    values = [None, None]
    dist.all_gather_object(values, flat(small), group=groups[rank // 2])
    comm.close()
    return [len(caught) == 1, "dropped" in str(caught[0].message), same_on_all(values)]


def test_resume_with_fewer_ranks_drops_residuals(pool: Ranks):
    """They add up only over the ranks that made them: one warning, and training goes on."""
    assert pool.run(_fewer_ranks) == [[True] * 3] * 4


# -- non-finite gradients


def _overflow(method: str, nonfinite: str) -> tuple[list[bool], bool, torch.Tensor]:
    net = network()
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    optimizer = sgd(model)
    comm = ddp.attach(
        model,
        method,
        nonfinite=nonfinite,
        optimizer=optimizer if nonfinite == "skip" else None,
        group_bytes=SMALL,
        timeout_s=20,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    finite = []
    for step in range(8):
        factor = math.inf if step == 3 and dist.get_rank() == 1 else 0.0 if step == 5 else 1.0
        before = flat(model)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        (model(torch.randn(8, 20, generator=generator)).pow(2).mean() * factor).backward()
        finite.append(bool(grads(model).isfinite().all()))
        if nonfinite == "skip" or finite[-1]:
            optimizer.step()
        scheduler.step()
        if step == 3:
            assert torch.equal(before, flat(model))
    state = comm.state_dict()
    tensors = torch.utils._pytree.tree_leaves(state["aggregator"])
    sound = all(t.isfinite().all() for t in tensors if isinstance(t, torch.Tensor))
    metrics = comm.metrics()
    assert metrics is not None
    assert metrics.skipped_steps == 1
    result = flat(model)
    comm.close()
    return finite, sound, result


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("method", METHODS)
def test_one_overflow_passes(method, nonfinite, pool: Ranks):
    """An infinity on one rank spoils one step on all ranks alike, and no state; zeros pass too."""
    results = pool.run(_overflow, method, nonfinite)
    for finite, sound, parameters in results:
        assert finite == [True, True, True, False, True, True, True, True]
        assert sound
        assert parameters.isfinite().all()
    assert "coded" in method or same_on_all([parameters for _, _, parameters in results])


def _scaler() -> tuple[list[float], torch.Tensor]:
    net = network()
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    comm = ddp.attach(model, "powersgd:rank=1", scaler=scaler, group_bytes=SMALL, timeout_s=20)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(8, 20, generator=generator)).pow(2).mean()
        if step == 2 and dist.get_rank() == 3:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    metrics = comm.metrics()
    assert metrics is not None
    assert metrics.residual_norm < 10  # unscaled: the scale is about a thousand
    result = flat(model)
    comm.close()
    return scales, result


def test_loss_scaling_and_clipping(pool: Ranks):
    """A GradScaler skips everywhere alike, clipping sees the averages, replicas stay equal."""
    results = pool.run(_scaler)
    assert all(scales == results[0][0] for scales, _ in results)
    assert results[0][0][2] < results[0][0][1]
    assert same_on_all([parameters for _, parameters in results])
    assert results[0][1].isfinite().all()


# -- replicas that differ


def _coded() -> tuple[float, float, float, int]:
    model, comm = build("coded:passes=4,code=fourier,shuffle=true", resync_every=5)
    optimizer = sgd(model)
    train(model, optimizer, range(5))
    values: list[Any] = [None] * 4
    dist.all_gather_object(values, flat(model))
    before = max((v - values[0]).abs().max().item() for v in values)
    train(model, optimizer, range(5, 6))  # re-synchronises first
    dist.all_gather_object(values, flat(model))
    after = max((v - values[0]).abs().max().item() for v in values)
    comm.consolidate()
    dist.all_gather_object(values, flat(model))
    end = max((v - values[0]).abs().max().item() for v in values)
    every = comm.resync_every
    comm.close()
    return before, after, end, every


def test_coded_replicas_are_resynchronised(pool: Ranks):
    """Replicas drift apart, and are equal again after a resync and after consolidate."""
    for before, after, end, every in pool.run(_coded):
        assert before > after > 0
        assert end == 0
        assert every == 5


def _chosen() -> tuple[int, float]:
    model, comm = build("coded:passes=4,code=fourier,shuffle=true")
    train(model, sgd(model), range(52))
    metrics = comm.metrics()
    assert metrics is not None
    comm.close()
    assert metrics.spread is not None
    return metrics.resync_every, metrics.spread


def test_resync_is_chosen_from_the_spread(pool: Ranks):
    """Without a number the steps between exact averages follow from the measured spread."""
    results = pool.run(_chosen)
    assert len(set(results)) == 1
    every, spread = results[0]
    assert 10 <= every <= 1000
    assert spread > 0


# -- metrics


def _metrics(method: str) -> tuple[int, int, int]:
    model, comm = build(method, group_bytes=1 << 30)
    train(model, sgd(model), range(3))
    metrics = comm.metrics()
    assert metrics is not None
    group = comm._exchange.groups[0]
    cost = comm.aggregator.cost(group, torch.float32, 4, dist.get_rank())
    assert cost is not None
    comm.close()
    return (
        metrics.sent_bytes - cost.sent_bytes,
        metrics.rounds - cost.rounds,
        metrics.residual_bytes,
    )


@pytest.mark.parametrize("method", ["quantized:bits=8", "powersgd:rank=2", "topk:ratio=0.1"])
def test_metrics_are_the_claimed_costs(method, pool: Ranks):
    """Bytes and rounds of a step are what the aggregator claims; residuals are one buffer."""
    numel = sum(p.numel() for p in network().parameters())
    expected = 0 if method.startswith("quantized") else 4 * numel
    assert pool.run(_metrics, method) == [(0, 0, expected)] * 4


# -- what cannot work


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(6, 4, sparse=True), nn.Linear(4, 2)


def _refused(kind: str) -> tuple[str, str]:
    rank = dist.get_rank()
    model: Any = DistributedDataParallel(network(), bucket_cap_mb=0.002)
    made = []
    try:
        if kind == "plain module":
            ddp.attach(network(), "ring")  # type: ignore[arg-type]
        elif kind == "sparse":
            made.append(ddp.attach(DistributedDataParallel(_Sparse()), "powersgd", timeout_s=20))
        elif kind == "twice":
            made.append(ddp.attach(model, "ring", timeout_s=20))
            ddp.attach(model, "ring", timeout_s=20)
        elif kind == "shared":
            shared = PowerSGD()
            made.append(ddp.attach(model, shared, timeout_s=20))
            ddp.attach(DistributedDataParallel(network()), shared, timeout_s=20)
        elif kind == "no optimizer":
            ddp.attach(model, "ring", nonfinite="skip", timeout_s=20)
        elif kind == "policy":
            ddp.attach(model, "ring", nonfinite="ignore", timeout_s=20)  # type: ignore[arg-type]
        elif kind == "method":
            ddp.attach(model, "powersdg:rank=2", timeout_s=20)
        elif kind == "methods differ":
            ddp.attach(model, f"powersgd:rank={1 + (rank == 2)}", timeout_s=20)
        elif kind == "one rank fails":
            ddp.attach(model, "ring", resync_every=-1 if rank == 1 else 0, timeout_s=20)
        elif kind == "replaced":
            made.append(ddp.attach(model, "ring", timeout_s=20))
            model.module[0][0].weight = nn.Parameter(torch.zeros(30, 20))
            model(torch.zeros(1, 20))
        elif kind == "replaced module":
            made.append(ddp.attach(model, "ring", timeout_s=20))
            model.module[0][0] = nn.Linear(20, 30)
            model(torch.zeros(1, 20))
        elif kind == "thawed":
            model.module[0][0].weight.requires_grad_(False)
            model = DistributedDataParallel(model.module)
            made.append(ddp.attach(model, "ring", timeout_s=20))
            model.module[0][0].weight.requires_grad_(True)
            model(torch.zeros(1, 20))
        elif kind == "all frozen":
            ddp.attach(model.requires_grad_(False), "ring", timeout_s=20)
        elif kind == "other optimizer":
            ddp.attach(model, "ring", nonfinite="skip", optimizer=sgd(network()), timeout_s=20)
        elif kind == "no such optimizer":
            ddp.attach(model, "ring", optimizer=3, timeout_s=20)  # type: ignore[arg-type]
        elif kind == "scaler":
            ddp.attach(model, "ring", scaler=3, timeout_s=20)
        elif kind == "half a step":
            ddp.attach(model, "ring", resync_every=1.5, timeout_s=20)  # type: ignore[arg-type]
        elif kind == "group bytes":
            ddp.attach(model, "ring", group_bytes=math.nan, timeout_s=20)  # type: ignore[arg-type]
        elif kind in ("shared ring", "shared inside"):
            ring = CodedRing(passes=2, shuffle=True) if kind == "shared ring" else PowerSGD()
            wrap = Mean if kind == "shared ring" else ErrorFeedback
            made.append(ddp.attach(model, wrap(ring), timeout_s=20))  # type: ignore[arg-type]
            other = DistributedDataParallel(network())
            ddp.attach(other, wrap(ring), timeout_s=20)  # type: ignore[arg-type]
        elif kind == "closed":
            comm = ddp.attach(model, "ring", timeout_s=20)
            comm.close()
            comm.state_dict()
            model(torch.ones(1, 20)).sum().backward()
        return "none", ""
    except TaciturnError as error:
        return type(error).__name__, str(error)
    finally:
        for comm in made:
            comm.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plain module", "wrap it first"),
        ("sparse", "sparse=False"),
        ("twice", "hook already"),
        ("shared", "another module"),
        ("no optimizer", "needs optimizer="),
        ("policy", "'propagate' or 'skip'"),
        ("method", "powersgd"),
        ("methods differ", "in the method: .*rank=1.* on rank 0, .*rank=2.* on rank 2"),
        ("one rank fails", "resync_every=-1: give a whole number"),
        ("replaced", "'0.0.weight' was replaced"),
        ("replaced module", "'0.0' was replaced"),
        ("thawed", "'0.0.weight' was frozen"),
        ("all frozen", "nothing to average"),
        ("other optimizer", "none of this module's parameters"),
        ("no such optimizer", "optimizer=3"),
        ("scaler", "scaler=3"),
        ("half a step", "resync_every=1.5"),
        ("group bytes", "group_bytes=nan"),
        ("shared ring", "a part of it, is attached"),
        ("shared inside", "a part of it, is attached"),
        ("closed", "wrap the module in a new DistributedDataParallel"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(kind, text, pool: Ranks):
    """One line on what to do, on all ranks alike; nothing hangs."""
    import re

    for name, message in pool.run(_refused, kind):
        assert name != "none"
        assert re.search(text, message), message


class _Failing(Aggregator):
    """Fails on rank 1 in the third call."""

    calls = 0

    def aggregate(
        self,
        gradients: torch.Tensor,
        group: Group,
        transport: Transport,
        residual: torch.Tensor | None = None,
    ) -> None:
        self.calls += 1
        if self.calls == 3 and transport.rank == 1:
            raise ValueError("the flux capacitor is empty")
        Mean(Ring()).aggregate(gradients, group, transport, residual)

    def cost(self, group: Group, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        return Mean(Ring()).cost(group, dtype, ranks, rank)

    def __repr__(self) -> str:
        return "Failing()"


def _failing() -> list[tuple[str, str]]:
    model, _ = build(_Failing(), group_bytes=1 << 30)
    said = []
    for step in range(4):
        try:
            train(model, sgd(model), range(step, step + 1))
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    return said


def test_an_exception_in_the_hook_ends_the_step_on_every_rank(new_ranks):
    """It is raised as it is, reaches all ranks, and later steps fail too; nothing hangs."""
    for rank, said in enumerate(new_ranks(3).run(_failing, timeout_s=60)):
        assert len(said) == 2
        for kind, text in said:
            assert "flux capacitor" in text
            assert not text.startswith("Unable to cast")
            assert kind == ("ValueError" if rank == 1 else "PeerError")


def _copies() -> bool:
    """Train beside an averaged copy; return whether copies are right and train by themselves."""
    model, comm = build("powersgd:rank=1")
    optimizer = sgd(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    total = torch.zeros_like(flat(model))
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        averaged.update_parameters(model)
        total += flat(model)
    right = torch.allclose(flat(averaged), total / 3)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    right &= torch.equal(flat(saved), flat(model))
    steps = comm.steps
    train(twin, sgd(twin), range(3))  # as stock DDP does
    right &= comm.steps == steps
    comm.close()
    again = ddp.attach(twin, "ring", timeout_s=20)
    train(twin, sgd(twin), range(3))
    right &= again.steps == 3
    again.close()
    return right


def test_models_can_be_copied_and_saved(pool: Ranks):
    """A copy, an average of weights or a saved module has no hook, and can be given one."""
    assert pool.run(_copies) == [True] * 4


def _skips_alone() -> tuple[bool, int, int]:
    groups = [dist.new_group([rank]) for rank in range(4)]
    model = DistributedDataParallel(network(), process_group=groups[dist.get_rank()])
    optimizer = sgd(model)
    comm = ddp.attach(model, "powersgd:rank=1", nonfinite="skip", optimizer=optimizer)
    train(model, optimizer, range(4), lambda step: math.nan if step == 2 else 1.0)
    metrics = comm.metrics()
    assert metrics is not None
    comm.close()
    return bool(flat(model).isfinite().all()), metrics.step, metrics.skipped_steps


def test_a_world_of_one_skips_what_is_not_finite(pool: Ranks):
    """nonfinite="skip" holds without other ranks as well."""
    assert pool.run(_skips_alone) == [(True, 4, 1)] * 4


def _replicas() -> tuple[bool, bool, str | None, float]:
    model, comm = build("ring")
    train(model, sgd(model), range(2))
    before = comm.check_replicas().equal
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.module[1][0].bias.add_(1)
    report = comm.check_replicas()
    spread = comm.spread().overall
    comm.consolidate()
    equal = comm.check_replicas().equal
    comm.close()
    return before, equal, report.name, spread


def test_replicas_are_checked_through_the_communicator(pool: Ranks):
    """No transport is needed for it."""
    for before, equal, name, spread in pool.run(_replicas):
        assert before
        assert equal
        assert name == "1.0.bias"
        assert spread > 0


def _dies(method: str) -> tuple[float, str]:
    model, _ = build(method, timeout_s=8)
    train(model, sgd(model), range(2))
    start = time.monotonic()
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        train(model, sgd(model), range(2, 4))
    except Exception as error:
        return time.monotonic() - start, str(error)
    return 0.0, "nothing happened"


@pytest.mark.parametrize("method", ["powersgd:rank=1", "backend"])
def test_a_rank_that_dies_is_named_to_the_others(method, new_ranks):
    """Every other rank raises within the time-out, naming it."""
    outcomes = new_ranks(3).outcomes(_dies, method, timeout_s=60, lost=[1])
    for rank in (0, 2):
        seconds, text = outcomes[rank].result
        assert seconds < 10
        assert "rank 1" in text


def _abandoned(how: str) -> str:
    model, comm = build("ring", timeout_s=30)
    rank = dist.get_rank()

    class StopError(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise StopError

    train(model, sgd(model), range(2))
    if rank == 1:
        next(iter(model.module[0].parameters())).register_hook(stop)
    try:
        train(model, sgd(model), range(1))
    except StopError:
        try:
            if how == "forward":
                train(model, sgd(model), range(1))
            elif how == "save":
                comm.state_dict()
            else:
                comm.close()
                return "closed"
        except PeerError as error:
            return str(error)
    except Exception as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("how", ["forward", "save", "close"])
def test_a_backward_that_is_left_in_its_midst(how, new_ranks):
    """What that rank does next tells the others, long before the time-out."""
    said = new_ranks(2).run(_abandoned, how, timeout_s=25)
    assert said[1] == "closed" if how == "close" else "midst" in said[1]
    assert "midst" in said[0]


def _closed() -> str:
    import threading

    model, comm = build(ErrorFeedback(PowerSGD(rank=1)))
    train(model, sgd(model), range(2))
    comm.close()
    return ",".join(t.name for t in threading.enumerate() if t.name == "taciturn-ddp")


def test_close_ends_the_thread(pool: Ranks):
    """After close no thread of ours is left."""
    assert pool.run(_closed) == [""] * 4


# ----------------------------------------------------------------------------------- what is left


def _let_go(close: bool) -> int:
    gone = []
    for method in ("backend", "powersgd:rank=2", "coded:passes=2"):
        model, comm = build(method)
        optimizer = sgd(model)
        train(model, optimizer, range(2))
        if close:
            comm.close()
        thread = comm._thread
        gone += [weakref.ref(model), weakref.ref(model.module), weakref.ref(comm)]
        del model, comm, optimizer
        gc.collect()
        thread.join(10)
        del thread
    gc.collect()
    dist.barrier()
    return sum(ref() is not None for ref in gone)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "forgotten"])
def test_a_module_that_nobody_holds_is_freed(close, pool: Ranks):
    """Neither the reducer nor the thread keeps model and communicator when the loop lets go."""
    assert pool.run(_let_go, close) == [0] * pool.size

"""Windows of microbatches, on real gloo processes: one big batch, one exchange, one step."""

from __future__ import annotations

import io
import math
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import Ranks
from taciturn import Accumulation, ddp
from taciturn.accumulation import StepResult
from taciturn.accumulation.control import alike, moments
from taciturn.accumulation.lookahead import Lookahead
from taciturn.accumulation.window import _count
from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError

Data = list[list[int]]
"""Of each rank, the tokens of its batches."""
Weights = list[list[list[float]]]
"""Of each rank, of each batch, the inputs of its tokens."""

LAYOUTS: dict[str, Data] = {
    "equal": [[4, 4], [4, 4], [4, 4], [4, 4]],
    "unequal tokens": [[1, 7], [3, 3], [8, 2], [5, 1]],
    "a rank without tokens": [[4, 4], [0, 0], [4, 1], [2, 2]],
    "a rank without batches": [[4, 4], [], [4, 1], [2, 2]],
    "an incomplete window": [[4, 3], [2], [4, 1], [2, 2]],
    "ranks that end at different times": [[4, 3, 2, 1, 5], [2], [4, 1, 1], [2, 2]],
}


def net64(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def batch(rank: int, number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight tokens, of which some are valid."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    valid = torch.zeros(8, dtype=torch.bool)
    valid[:tokens] = True
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), valid


def loss_sum(model: nn.Module, item: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, valid = item
    return (model(x).pow(2).sum(1) * valid).sum()


def loader(data: Data, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(rank, number, tokens) for number, tokens in enumerate(data[rank])]


def build(kind: str, net: nn.Module, **options: Any) -> nn.Module:
    if kind == "buffers":  # which DDP sends round in a forward
        net.register_buffer("mask", torch.zeros(3))
    if kind == "unused":
        options["find_unused_parameters"] = True
    return net if kind == "plain" else DistributedDataParallel(net, **options)


def close(accumulate: Accumulation) -> None:
    comm = ddp.attached(accumulate.model)
    if comm is not None:
        comm.close()
    elif accumulate._transport is not None:
        accumulate._transport.close()


def run(
    accumulate: Accumulation,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    **options: Any,
) -> list[StepResult]:
    results = []
    for window in accumulate.windows(batches):
        for item in window:
            with window.microbatch(tokens=int(item[1].sum())):
                window.backward(loss_sum(accumulate.model, item))
        results.append(window.step(optimizer, **options))
    return results


# -- the gradient


def _big_batches(data: Data, microbatches: int) -> list[tuple[list[torch.Tensor], float, int]]:
    """Return the oracle's gradients, loss and tokens of each window: one process, one batch."""
    windows = max(math.ceil(len(some) / microbatches) for some in data)
    results = []
    for window in range(windows):
        net = net64()
        part = slice(window * microbatches, (window + 1) * microbatches)
        items = [item for rank in range(len(data)) for item in loader(data, rank)[part]]
        tokens = sum(int(valid.sum()) for _, valid in items)
        loss = loss_sum(net, (torch.cat([x for x, _ in items]), torch.cat([v for _, v in items])))
        (loss / tokens).backward()
        results.append(([p.grad for p in net.parameters()], loss.item() / tokens, tokens))
    return results  # type: ignore[return-value]


def _windows(kind: str, data: Data, unused: bool) -> float:
    """Return the largest error of any window's gradient, and of its loss."""
    options = {"find_unused_parameters": True} if unused and kind == "ddp" else {}
    accumulate = Accumulation(build(kind, net64(), **options), 2, timeout_s=20)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.0)
    error, number = 0.0, 0
    oracle = _big_batches(data, 2)
    for window in accumulate.windows(loader(data, dist.get_rank())):
        for item in window:
            with window.microbatch(tokens=int(item[1].sum())):
                window.backward(loss_sum(accumulate.model, item))
        result = window.step(optimizer)
        expected, loss, tokens = oracle[number]
        assert result.stepped
        assert result.tokens == tokens
        for parameter, gradient in zip(accumulate.model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            scale = gradient.abs().max().item()
            error = max(error, (parameter.grad - gradient).abs().max().item() / scale)
        norm = math.sqrt(sum(g.square().sum().item() for g in expected))
        error = max(error, abs(result.loss / loss - 1), abs(result.grad_norm / norm - 1))
        number += 1
    assert number == len(oracle)
    close(accumulate)
    return error


@pytest.mark.parametrize(
    ("kind", "unused"), [("ddp", False), ("ddp", True), ("buffers", False), ("plain", False)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_is_one_big_batch(layout, kind, unused, pool: Ranks):
    """Gradient, loss and norm are those of all valid tokens of all ranks in one batch (fp64)."""
    assert max(pool.run(_windows, kind, LAYOUTS[layout], unused)) < 1e-12


class Weight(nn.Module):
    """One weight whose gradient is the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _weight(data: Weights, kind: str, microbatches: int, **step: Any) -> list[float]:
    """Return the gradient after each window."""
    accumulate = Accumulation(build(kind, Weight()), microbatches, timeout_s=20)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.0)
    rank = dist.get_rank()
    found = []
    mine = data[rank] if rank < len(data) else []
    for window in accumulate.windows(mine):
        for tokens in window:
            with window.microbatch(tokens=len(tokens)):
                window.backward(accumulate.model(torch.tensor(tokens)).sum())
        window.step(optimizer, **step)
        (parameter,) = accumulate.model.parameters()
        assert parameter.grad is not None
        found.append(parameter.grad.item())
    close(accumulate)
    return found


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_known_means(kind, pool: Ranks):
    """Tokens count alike wherever they are; ranks count by their tokens, not by their number."""
    unequal = [[[1.0], [9.0] * 3], [[4.0] * 6, [2.0] * 2]]
    for found in pool.run(_weight, unequal, kind, 2):
        assert found == [pytest.approx(56 / 12)]
    windows = [[[1.0], [2.0], [3.0], [4.0]], [[4.0], [5.0], [6.0], [7.0]]]
    for found in pool.run(_weight, windows, kind, 4):
        assert found == [4.0]
    five = [[[2.0]] * 5, [[2.0]] * 5, [[2.0]] * 5, [[2.0]] * 5]
    for found in pool.run(_weight, five, kind, 2):  # the last window is half as long
        assert found == [2.0] * 3


def test_clipping_is_once_after_the_sum(pool: Ranks):
    """Microbatches whose gradients cancel are not clipped one by one."""
    data = [[[10.0], [0.1], [-9.9]]]
    for found in pool.run(_clipped, data, 1.0):
        assert found == [pytest.approx(0.2 / 3, rel=1e-5)]
    for found in pool.run(_clipped, data, 0.01):
        assert found == [pytest.approx(0.01, rel=1e-3)]


def _clipped(data: Weights, norm: float) -> list[float]:
    return _weight(data, "ddp", 3, clip_norm=norm)


# -- steps


def _moves(kind: str) -> tuple[int, int, float, list[bool]]:
    """Return steps, exchanges, the last rate, and whether anything moved inside a window."""
    accumulate = Accumulation(build(kind, net64()), 4, timeout_s=20)
    model = accumulate.model
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 10)
    data = [[3] * 40] * 4
    moved, steps = [], 0
    for window in accumulate.windows(loader(data, dist.get_rank())):
        before = [p.detach().clone() for p in model.parameters()]
        state = {k: v.clone() for p in optimizer.state.values() for k, v in p.items()}
        for item in window:
            with window.microbatch(tokens=int(item[1].sum())):
                window.backward(loss_sum(model, item))
            after = {k: v for p in optimizer.state.values() for k, v in p.items()}
            moved.append(any(not torch.equal(state[k], after[k]) for k in state))
            moved.append(
                any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            )
        window.step(optimizer, scheduler=schedule)
        steps += 1
    comm = ddp.attached(model)
    metrics = comm.metrics() if comm is not None else None
    exchanges = metrics.step if metrics is not None else steps
    close(accumulate)
    return steps, exchanges, schedule.get_last_lr()[0], moved


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_window_is_one_step_and_one_exchange(kind, pool: Ranks):
    """40 microbatches are 10 exchanges, steps and schedule steps; nothing moves within a window."""
    for steps, exchanges, rate, moved in pool.run(_moves, kind):
        assert steps == exchanges == 10
        assert rate == 0.0
        assert not any(moved)


def _no_tokens() -> tuple[list[bool], int, bool, float]:
    accumulate = Accumulation(DistributedDataParallel(net64()), 2, timeout_s=20)
    optimizer = torch.optim.Adam(accumulate.model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = [[3, 3, 0, 0, 2, 2]] * 4
    results = []
    for number, window in enumerate(accumulate.windows(loader(data, dist.get_rank()))):
        before = [p.detach().clone() for p in accumulate.model.parameters()]
        for item in window:
            with window.microbatch(tokens=int(item[1].sum())):
                window.backward(loss_sum(accumulate.model, item))
        results.append(window.step(optimizer, scheduler=schedule))
        if number == 1:
            same = all(map(torch.equal, before, accumulate.model.parameters()))
    close(accumulate)
    return [r.stepped for r in results], schedule.last_epoch, same, results[1].loss


def test_a_window_without_any_token_is_skipped(pool: Ranks):
    """No NaN, no step of optimizer or schedule, on any rank; the next window goes on."""
    for stepped, epochs, same, loss in pool.run(_no_tokens):
        assert stepped == [True, False, True]
        assert epochs == 2
        assert same
        assert math.isnan(loss)


def _overflow(kind: str, scaled: bool | None) -> tuple[list[bool], torch.Tensor, float]:
    scaler = None
    if scaled is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    accumulate = Accumulation(build(kind, net64()), 2, scaler=scaler, timeout_s=20)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
    stepped = []
    rank = dist.get_rank()
    for number, window in enumerate(accumulate.windows(loader([[3] * 6] * 4, rank))):
        for item in window:
            with window.microbatch(tokens=int(item[1].sum())):
                bad = math.inf if number == 1 and rank == 2 else 1.0
                window.backward(loss_sum(accumulate.model, item) * bad)
        stepped.append(window.step(optimizer, clip_norm=1.0).stepped)
    close(accumulate)
    flat = torch.cat([p.detach().flatten() for p in accumulate.model.parameters()])
    return stepped, flat, scaler.get_scale() if scaled and scaler is not None else 0.0


@pytest.mark.parametrize("scaled", [None, False, True])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_an_overflow_on_one_rank_skips_on_all(kind, scaled, pool: Ranks):
    """All ranks skip together, with a scaler, one switched off, or none, and go on equal."""
    results = pool.run(_overflow, kind, scaled)
    for stepped, flat, scale in results:
        assert stepped == [True, False, True]
        assert flat.isfinite().all()
        assert torch.equal(flat, results[0][1])
        assert scale == (512.0 if scaled else 0.0)


def _scaled_alike() -> float:
    flats = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4096.0)):
        accumulate = Accumulation(
            DistributedDataParallel(net64()), 2, method="powersgd:rank=1", scaler=scaler,
            timeout_s=20,
        )  # fmt: skip
        optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
        run(accumulate, loader([[3, 4, 5, 2, 1, 8, 4, 4]] * 4, dist.get_rank()), optimizer)
        flats.append(torch.cat([p.detach().flatten() for p in accumulate.model.parameters()]))
        close(accumulate)
    return (flats[0] - flats[1]).abs().max().item()


def test_residuals_are_kept_unscaled(pool: Ranks):
    """Loss scaling, and windows of different numbers of tokens, leave what is fed back alone."""
    assert max(pool.run(_scaled_alike)) < 1e-12


class Branches(nn.Module):
    """Two layers of which a batch uses one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        result: torch.Tensor = self.a(x) if first else self.b(x)
        return result


def _branches(kind: str, batches: int) -> tuple[bool, bool, bool]:
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    accumulate = Accumulation(build(kind, Branches(), **options), 2, timeout_s=20)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    items = [torch.randn(1, 2, generator=generator) for _ in range(2 if rank else batches)]
    for window in accumulate.windows(items):
        for number, x in enumerate(window):
            with window.microbatch(tokens=1):
                window.backward(accumulate.model(x, number == 0 and rank == 1).sum())
        window.step(torch.optim.SGD(accumulate.model.parameters(), lr=0.0))
    net = getattr(accumulate.model, "module", accumulate.model)
    a, b, c = net.a.weight.grad, net.b.weight.grad, net.c.weight.grad
    close(accumulate)
    first = torch.randn(1, 2, generator=torch.Generator().manual_seed(1))
    tokens = 6 + batches
    right = a is not None and torch.allclose(a, first.expand(2, 2) / tokens, atol=1e-6)
    return right, b is not None, c is None


@pytest.mark.parametrize("batches", [2, 0])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_parameters_that_some_or_none_use(kind, batches, pool: Ranks):
    """What one microbatch of one rank uses has its gradient everywhere; what none uses, none."""
    assert pool.run(_branches, kind, batches) == [(True, True, True)] * 4


def _nested() -> tuple[list[int], bool]:
    calls = [0, 0]

    def counting(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state[0] += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    counting.__annotations__ = {}
    inner = [DistributedDataParallel(net64(seed)) for seed in (0, 1)]
    for model in inner:
        model.register_comm_hook(calls, counting)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner[0](x) + self.inner[1](x)
            return result

    accumulate = Accumulation(Outer(), 2, timeout_s=20)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
    run(accumulate, loader([[3, 3]] * 4, dist.get_rank()), optimizer)
    flat = torch.cat([p.detach().flatten() for p in accumulate.model.parameters()])
    all_flat = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(all_flat, flat)
    close(accumulate)
    return calls[:1], all(torch.equal(flat, other) for other in all_flat)


def test_ddp_modules_inside_exchange_nothing_themselves(pool: Ranks):
    """Of a plain module's DDP parts none communicates; the window exchanges all gradients once."""
    assert pool.run(_nested) == [([0], True)] * 4


def _alone() -> tuple[bool, list[StepResult]]:
    groups = [dist.new_group([rank]) for rank in range(4)]
    mine = groups[dist.get_rank()]
    results = []
    for model in (DistributedDataParallel(net64(), process_group=mine), net64()):
        plain = not isinstance(model, DistributedDataParallel)
        accumulate = Accumulation(model, 2, process_group=mine if plain else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = run(accumulate, loader([[3, 1, 2]] * 4, 0), optimizer)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        close(accumulate)
    return torch.equal(*results), found


def test_a_world_of_one(pool: Ranks):
    """Without other ranks windows work alike and send nothing."""
    for same, found in pool.run(_alone):
        assert same
        assert [result.tokens for result in found] == [4, 2]


def test_without_torch_distributed():
    """No process group at all is one rank."""
    accumulate = Accumulation(net64(), 2)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
    results = run(accumulate, loader([[3, 1, 2]], 0), optimizer)
    assert [result.microbatches for result in results] == [2, 1]


# -- resume


def _resume(kind: str, method: str) -> bool:
    data = [[3, 4, 5, 2, 1, 8, 4, 4]] * 4
    rank = dist.get_rank()

    def make(seed: int) -> tuple[Accumulation, torch.optim.Optimizer]:
        accumulate = Accumulation(build(kind, net64(seed)), 2, method=method, timeout_s=20)
        return accumulate, torch.optim.SGD(accumulate.model.parameters(), lr=0.1, momentum=0.9)

    accumulate, optimizer = make(0)
    comm = ddp.attached(accumulate.model)
    run(accumulate, loader(data, rank)[:4], optimizer)
    file = io.BytesIO()
    state = {
        "model": accumulate.model.state_dict(), "optimizer": optimizer.state_dict(),
        "windows": accumulate.state_dict(), "comm": comm.state_dict() if comm else None,
    }  # fmt: skip
    torch.save(state, file)
    run(accumulate, loader(data, rank)[4:], optimizer)
    expected = torch.cat([p.detach().flatten() for p in accumulate.model.parameters()])
    close(accumulate)
    accumulate, optimizer = make(5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    accumulate.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    accumulate.load_state_dict(saved["windows"])
    if (comm := ddp.attached(accumulate.model)) is not None:
        comm.load_state_dict(saved["comm"])
    run(accumulate, loader(data, rank)[4:], optimizer)
    found = torch.cat([p.detach().flatten() for p in accumulate.model.parameters()])
    close(accumulate)
    return torch.equal(found, expected)


@pytest.mark.parametrize("method", ["ring", "powersgd:rank=1", "quantized:bits=4,feedback=true"])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_resume_is_bit_equal(kind, method, pool: Ranks):
    """A run resumed between windows equals the uninterrupted one."""
    assert pool.run(_resume, kind, method) == [True] * 4


def _odd_states() -> list[tuple[str, str]]:
    accumulate = Accumulation(net64(), 2, timeout_s=10)
    good = accumulate.state_dict()
    rank = dist.get_rank()
    found = []
    for state in (
        None,
        3,
        {},
        good | {"unit": "x"},
        good | {"unit": math.nan},
        good | {"unit": 2.0 if rank == 1 else 4.0},
        good if rank != 1 else None,
    ):
        try:
            accumulate.load_state_dict(state)  # type: ignore[arg-type]
        except TaciturnError as error:
            found.append((type(error).__name__, str(error)))
    accumulate.load_state_dict(good)
    close(accumulate)
    return found


def test_a_state_that_is_none_is_refused_on_every_rank(pool: Ranks):
    """Missing, damaged, of another time, or missing on one rank alone; a good one then loads."""
    for rank, found in enumerate(pool.run(_odd_states)):
        names = [name for name, _ in found]
        assert names == ["InputError"] * 5 + ["MismatchError"] + [
            "InputError" if rank == 1 else "MismatchError"
        ]
        assert "unit='x'" in found[3][1]
        assert "divided by: 4.0 on rank 0, 2.0 on rank 1" in found[5][1]


# -- bad input


def _wrong(kind: str, where: str) -> tuple[str, str]:
    """Make one rank, or all, do something wrong; return the error of this rank."""
    warnings.simplefilter("ignore")  # of a schedule that is stepped before its optimizer
    # Longer than the test may take: nobody waits for the time-out.
    accumulate = Accumulation(build(where, net64()), 2, timeout_s=100)
    model = accumulate.model
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    one = rank == 1
    batches: Any = loader([[3, 4, 5]] * 4, rank)
    if kind == "no data":
        batches = []
    if kind == "loader" and one:
        batches = (_explode() if n == 1 else item for n, item in enumerate(batches))
    if kind == "closure":
        optimizer = torch.optim.LBFGS(model.parameters())
    if kind == "other optimizer" and one:
        optimizer = torch.optim.SGD(net64().parameters(), lr=0.1)
    if kind == "more parameters":
        extra = nn.Parameter(torch.ones(7, dtype=torch.float64))
        optimizer.add_param_group({"params": [extra]})
    options: dict[str, Any] = {}
    if kind == "clip" or (kind == "clip differs" and one):
        options["clip_norm"] = -1.0 if kind == "clip" else 2.0
    if kind == "clip text":
        options["clip_norm"] = "1"
    if kind == "rate differs" and one:
        optimizer.param_groups[0]["lr"] = 0.2
    if kind == "plateau":
        options["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    try:
        for window in accumulate.windows(batches):
            for number, item in enumerate(window):
                tokens: Any = int(item[1].sum())
                if kind == "negative" and one:
                    tokens = -1
                if kind == "fraction" and one and number == 1:
                    tokens = 2.5
                if kind == "forward outside" and one:
                    loss = loss_sum(model, item)
                if kind == "left out" and one:
                    continue
                if kind == "zero_grad" and one and number == 1:
                    optimizer.zero_grad()
                if kind == "step inside" and one and number == 1:
                    optimizer.step()
                if kind == "no tokens" and one:
                    tokens = 0
                with window.microbatch(tokens=tokens):
                    if kind != "forward outside" or not one:
                        loss = loss_sum(model, item)
                    if kind == "constant" and one and number == 1:
                        loss = torch.zeros(())
                    if kind == "number" and one:
                        loss = loss.item()  # type: ignore[assignment]
                    if kind == "more parameters":
                        loss = loss + extra.sum() * 0
                    if kind == "raises" and one and number == 1:
                        raise ZeroDivisionError("oh dear")
                    if kind == "own backward" and one:
                        loss.backward()
                    elif kind == "not a sum" and one:
                        window.backward(loss.expand(3))
                    elif kind != "backward outside" or not one:
                        window.backward(loss)
                if kind == "backward outside" and one:
                    window.backward(loss)
                if kind == "inner left" and one:
                    break
                if kind == "clip inside" and one:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if kind == "no step":
                continue
            if kind == "left before its step":
                break
            window.step(optimizer, **options)
        for _ in accumulate.windows(batches):
            break
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        close(accumulate)
    return "none", ""


def _explode() -> Any:
    raise OSError("disk on fire")


@pytest.mark.parametrize("where", ["ddp", "plain"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no data", "no rank's loader has a single batch"),
        ("loader", "disk on fire"),
        ("closure", "LBFGS evaluates the loss several times"),
        ("negative", "tokens=-1"),
        ("fraction", "tokens=2.5"),
        ("forward outside", "forward of the model outside"),
        ("left out", "had no window.microbatch"),
        ("raises", "oh dear"),
        ("own backward", "no window.backward"),
        ("not a sum", "loss_sum has shape (3,)"),
        ("backward outside", "no window.backward"),
        ("no step", "left without window.step"),
        ("left before its step", "left without window.step"),
        ("clip", "clip_norm=-1.0"),
        ("clip text", "clip_norm='1'"),
        ("clip differs", "in clip_norm: None on rank 0, 2.0 on rank 1"),
        ("rate differs", "the optimizer's lr: 0.1 on rank 0, 0.2 on rank 1"),
        ("plateau", "ReduceLROnPlateau.step needs metrics"),
        ("other optimizer", "holds none of this module's parameters"),
        ("more parameters", "a parameter with a gradient, of shape (7,)"),
        ("zero_grad", "lost its gradient within a window"),
        ("clip inside", "was changed within a window"),
        ("step inside", "was itself changed within a window"),
        ("inner left", "before all batches of the window"),
        ("constant", "does not depend on any parameter"),
        ("number", "give the tensor that the loss function returned"),
        ("no tokens", "with tokens=0"),
    ],
)
def test_wrong_use_is_an_error_on_every_rank(kind, text, where, pool: Ranks):
    """Whoever does it, all ranks raise, and the reason reaches them; nothing hangs."""
    found = pool.run(_wrong, kind, where)
    assert all(name != "none" for name, _ in found)
    assert all(text in said for _, said in found)


def _refused(kind: str) -> tuple[str, str]:
    net: nn.Module = nn.Linear(2, 2)
    try:
        if kind == "zero":
            Accumulation(net, 0)
        elif kind == "static":
            Accumulation(DistributedDataParallel(net, static_graph=True), 2)
        elif kind == "frozen":
            Accumulation(net.requires_grad_(False), 2)
        elif kind == "twice":
            model = DistributedDataParallel(net)
            comm = ddp.attach(model, "ring")
            try:
                Accumulation(model, 2, method="ring")
            finally:
                comm.close()
        elif kind == "differ":
            Accumulation(net, 2 + dist.get_rank() % 2, timeout_s=10)
        elif kind == "differ in DDP":
            Accumulation(DistributedDataParallel(net), 2 + dist.get_rank() % 2, timeout_s=10)
        elif kind == "zero on one":
            Accumulation(DistributedDataParallel(net), int(dist.get_rank() != 1), timeout_s=10)
        elif kind == "method":
            Accumulation(net, 2, method="rong", timeout_s=10)
        elif kind == "scaler":
            Accumulation(net, 2, scaler=1024.0, timeout_s=10)
        elif kind == "sparse":
            Accumulation(nn.Embedding(9, 2, sparse=True), 2, timeout_s=10)
        elif kind == "complex":
            Accumulation(net.to(torch.complex64), 2, timeout_s=10)
        elif kind == "no module":
            Accumulation(net.forward, 2, timeout_s=10)  # type: ignore[arg-type]
    except TaciturnError as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("zero", "microbatches=0"),
        ("static", "static_graph"),
        ("frozen", "no parameter of this module requires a gradient"),
        ("twice", "attached to this model already"),
        ("differ", "in microbatches: 2 on rank 0, 3 on rank 1"),
        ("differ in DDP", "in microbatches: 2 on rank 0, 3 on rank 1"),
        ("zero on one", "microbatches=0"),
        ("method", "rong"),
        ("scaler", "scaler=1024.0"),
        ("sparse", "has sparse gradients"),
        ("complex", "complex64"),
        ("no module", "a torch.nn.Module is needed"),
    ],
)
def test_what_cannot_work_is_refused(kind, text, pool: Ranks):
    """At construction, on every rank alike."""
    assert all(text in said for _, said in pool.run(_refused, kind))


def _leaves(how: str, kind: str, after: int) -> tuple[str, str]:
    """Rank 1 leaves its loop after some windows, and stays, ends, or begins a new one."""
    accumulate = Accumulation(build(kind, net64()), 2, timeout_s=3)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
    batches = loader([[3] * 10] * 4, dist.get_rank())
    leaves = dist.get_rank() == 1
    try:
        for number, window in enumerate(accumulate.windows(batches), 1):
            for item in window:
                with window.microbatch(tokens=int(item[1].sum())):
                    window.backward(loss_sum(accumulate.model, item))
            window.step(optimizer)
            if leaves and number == after:
                break
        if leaves and how == "ends":
            os._exit(0)
        if how == "begins anew":
            run(accumulate, batches, optimizer)
    except TaciturnError as error:
        return type(error).__name__, str(error)
    finally:
        close(accumulate)
    return "none", ""


@pytest.mark.parametrize(
    ("how", "kind", "after"),
    [
        ("stays", "ddp", 1),
        ("stays", "buffers", 3),
        ("stays", "unused", 3),
        ("stays", "plain", 2),
        ("ends", "ddp", 1),
        ("begins anew", "ddp", 1),
        ("begins anew", "buffers", 3),
    ],
)
def test_a_rank_that_leaves_the_loop_is_named(how, kind, after, new_ranks):
    """Also where DDP itself would wait: for its buckets, its buffers, the parameters used."""
    outcomes = new_ranks(2).outcomes(_leaves, how, kind, after, timeout_s=40, lost=[1])
    assert outcomes[0].ended
    if how == "begins anew":
        assert outcomes[0].result[0] == "MismatchError"
        assert "rank 0, the start of windows(...) on rank 1" in outcomes[0].result[1]
    else:
        assert outcomes[0].result[0] == "PeerError"
        assert "rank 1" in outcomes[0].result[1]


def _ends_at_once(kind: str) -> str:
    accumulate = Accumulation(build(kind, net64()), 2, timeout_s=30)
    optimizer = torch.optim.SGD(accumulate.model.parameters(), lr=0.1)
    rank = dist.get_rank()
    try:
        for window in accumulate.windows(loader([[3, 4]] * 2, rank)):
            for number, item in enumerate(window):
                with window.microbatch(tokens=-1 if rank and number else 3):
                    window.backward(loss_sum(accumulate.model, item))
            window.step(optimizer)
    except InputError:
        os._exit(1)
    except (PeerError, MismatchError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_a_rank_that_fails_and_ends_has_told_why(kind, new_ranks):
    """The others hear the reason, though the process is gone as soon as its error is raised."""
    outcomes = new_ranks(2).outcomes(_ends_at_once, kind, timeout_s=40, lost=[1])
    assert "tokens=-1" in outcomes[0].result


@given(st.lists(st.sampled_from(["a", "b", "clip_norm=1.0", ""]), min_size=1, max_size=6))
def test_sums_over_ranks_tell_whether_all_gave_the_same(texts):
    """Exactly then, whatever the texts, from four sums."""
    sums = [sum(column) for column in zip(*map(moments, texts), strict=True)]
    assert alike(sums, len(texts)) == (len(set(texts)) == 1)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (-1, "from 0 to"),
        (2.5, "a float is none"),
        (3.0, "a float is none"),
        (2**62, f"from 0 to {2**40}"),
        (True, "tokens=True"),
        (None, "tokens=None"),
        (torch.tensor([1, 2]), "tokens=tensor"),
    ],
)
def test_what_is_no_count_is_refused(tokens, text):
    """By value, saying what would be one."""
    with pytest.raises(InputError, match=text):
        _count(tokens)


def test_batch_normalisation_is_warned_of():
    """A layer that mixes the examples of a batch makes a window unlike one big batch."""
    with pytest.warns(UserWarning, match="GroupNorm"):
        Accumulation(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2)


def test_lookahead_gives_every_item_once():
    """Asking whether there is more neither loses nor repeats anything."""
    items = Lookahead(range(3))
    found = []
    while items.ready and items.ready:
        found.append(items.take())
    assert found == [0, 1, 2]
    assert not items.ready

"""The laws of aggregators/base.py, over one table of implementations."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ranks import Ranks
from taciturn import aggregators, methods
from taciturn.aggregators import Aggregator, Cast, Group, Mean, PowerSGD, TopK
from taciturn.collectives import Backend, CodedRing, Direct, QuantizedRing, Ring
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import InputError
from taciturn.transport import DistributedTransport, Transport, run_threads

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Implementation:
    """One aggregator with what it promises beyond its class's flags."""

    make: Callable[[], Aggregator]
    unaccounted: float = 0.0
    """Rounding relative to the largest element that no residual holds: of the backend's hops, or
    of a coded ring's messages."""
    threads: bool = True


IMPLEMENTATIONS: dict[str, Implementation] = {
    "mean": Implementation(lambda: Mean(Ring())),
    "mean-backend": Implementation(lambda: Mean(Backend()), threads=False),
    "mean-int8": Implementation(lambda: Mean(QuantizedRing("int8"))),
    "mean-int4-direct": Implementation(lambda: Mean(Direct("int4"))),
    "mean-coded": Implementation(lambda: Mean(CodedRing(passes=2)), unaccounted=1e-4),
    "mean-coded-int8": Implementation(
        lambda: Mean(CodedRing(passes=4, code="fourier", shuffle=True, wire="int8")),
        unaccounted=0.5,
    ),
    "cast-bf16": Implementation(lambda: Cast("bf16"), unaccounted=0.02, threads=False),
    "cast-fp16": Implementation(lambda: Cast("fp16"), unaccounted=0.002, threads=False),
    "powersgd": Implementation(lambda: PowerSGD(rank=2)),
    "powersgd-alternate": Implementation(lambda: PowerSGD(rank=1, alternate=True)),
    "powersgd-cold": Implementation(lambda: PowerSGD(rank=1, warm_start=False)),
    "topk": Implementation(lambda: TopK(ratio=0.1)),
    "topk-bf16": Implementation(lambda: TopK(ratio=0.05, wire="bf16")),
}

THREADED = [name for name, entry in IMPLEMENTATIONS.items() if entry.threads]

TENSORS = [
    ("wide", torch.empty(12, 40)),
    ("image", torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last)),
    ("bias", torch.empty(12)),
    ("scalar", torch.empty(())),
    ("none", torch.empty(0, 4)),
    ("twin", torch.empty(12, 40)),
]
GROUP = Group.of(TENSORS)


def gradients(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(GROUP.numel, generator=generator).to(dtype)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_written_methods_build_the_same(name):
    """str() writes an aggregator as a method, feedback included, that builds one written alike."""
    keys = {spec.name: [key.name for key in spec.keys] for spec in methods.table()}
    made = IMPLEMENTATIONS[name].make()
    feeds = "feedback" in keys[made.method.name]  # of what is exact there is nothing to feed back
    for one in [made, ErrorFeedback(made)] if feeds else [made]:
        again = methods.aggregator(str(one))
        assert str(again) == str(one)
        assert repr(again) == repr(one)


def test_somebodys_own_aggregator_is_written_alike_on_all_ranks():
    """One without a repr is its type's name, not an address in this process."""

    class Own(Mean):
        method = Aggregator.method
        __repr__ = object.__repr__

    assert str(Own()) == str(Own())
    assert str(ErrorFeedback(Own())) != str(Own())


def test_every_aggregator_is_in_the_table():
    """The table names every concrete aggregator that the package exports."""
    exported = {
        found
        for found in (getattr(aggregators, name) for name in aggregators.__all__)
        if inspect.isclass(found) and issubclass(found, Aggregator) and found is not Aggregator
    }
    assert {type(entry.make()) for entry in IMPLEMENTATIONS.values()} == exported


def test_group_views_are_the_tensors():
    """A group's views have the tensors' shapes and memory order, share its memory, lose nothing."""
    flat = torch.arange(GROUP.numel, dtype=torch.float32)
    views = GROUP.views(flat)
    assert [tuple(v.shape) for v in views] == [tuple(t.shape) for _, t in TENSORS]
    assert views[1].is_contiguous(memory_format=torch.channels_last)
    seen = torch.cat([v.flatten() for v in views])
    assert torch.equal(seen.sort().values, flat)
    views[3].fill_(-1)
    assert flat[GROUP.bounds[3][0]] == -1


def conservation(
    transport: Transport, name: str, steps: int, dtype: torch.dtype, feedback: bool
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return what went in, what came out and what was left, by step."""
    aggregator = IMPLEMENTATIONS[name].make()
    seen = []
    kept = torch.zeros(GROUP.numel, dtype=dtype)
    for step in range(steps):
        brought = gradients(transport.rank, step, dtype) + (kept if feedback else 0)
        out, left = brought.clone(), torch.full_like(brought, math.nan)
        aggregator.aggregate(out, GROUP, transport, left)
        aggregator.finish_step(keep=True)
        seen.append((brought, out, left))
        kept = left
    return seen


def check_conservation(
    by_rank: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]], name: str
) -> None:
    ranks = len(by_rank)
    for step in zip(*by_rank, strict=True):
        brought, out, left = (
            torch.stack(list(part)).double().sum(0) for part in zip(*step, strict=True)
        )
        largest = max(float(part[0].abs().max()) for part in step)
        # fp32 sums of at most some ten terms per element, and what the entry declares.
        tolerance = ranks * largest * (2e-5 + IMPLEMENTATIONS[name].unaccounted)
        assert (brought - out - left).abs().max() <= tolerance
        if IMPLEMENTATIONS[name].make().bit_identical:
            assert all(torch.equal(part[1], step[0][1]) for part in step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", THREADED)
def test_conservation(name, ranks, dtype):
    """What all ranks brought is what all hold afterwards plus all residuals, in every step."""
    results = run_threads(ranks, lambda t: conservation(t, name, 4, dtype, True), TIMEOUT_S)
    check_conservation(results, name)


def conservation_on_processes(name: str) -> list[Any]:
    transport = DistributedTransport(timeout_s=30)
    try:
        return conservation(transport, name, 3, torch.float32, True)
    finally:
        transport.close()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_conservation_on_processes(name, pool: Ranks):
    """The same over a real process group."""
    check_conservation(pool.run(conservation_on_processes, name), name)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_alone(name):
    """With one rank nothing is sent, nothing is changed and nothing is left over."""

    def function(transport: Transport) -> None:
        brought = gradients(0)
        out, left = brought.clone(), torch.full_like(brought, math.nan)
        aggregator = IMPLEMENTATIONS[name].make()
        aggregator.aggregate(out, GROUP, transport, left)
        aggregator.finish_step(keep=True)
        assert torch.equal(out, brought)
        assert not left.any()
        assert transport.ledger.messages == 0

    run_threads(1, function, TIMEOUT_S)


@pytest.mark.parametrize("name", THREADED)
def test_zero(name):
    """Zero gradients give exactly zero, and so does a group with nothing in it."""

    def function(transport: Transport) -> None:
        aggregator = IMPLEMENTATIONS[name].make()
        for group in (GROUP, Group.of([("none", torch.empty(0, 3))])):
            out, left = torch.zeros(group.numel), torch.full((group.numel,), math.nan)
            aggregator.aggregate(out, group, transport, left)
            assert not out.any()
            assert not left.any()
        aggregator.finish_step(keep=True)

    run_threads(3, function, TIMEOUT_S)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", THREADED)
def test_cost(name, ranks):
    """The claimed cost is what the ledger counted: rounds, messages, bytes."""

    def function(transport: Transport) -> None:
        aggregator = IMPLEMENTATIONS[name].make()
        for step in range(2):
            before = transport.ledger.snapshot()
            claimed = aggregator.cost(GROUP, torch.float32, ranks, transport.rank)
            aggregator.aggregate(gradients(transport.rank, step), GROUP, transport)
            aggregator.finish_step(keep=True)
            spent = transport.ledger.snapshot() - before
            assert claimed is not None
            assert (claimed.rounds, claimed.messages, claimed.sent_bytes) == (
                spent.rounds,
                spent.messages,
                spent.sent_bytes,
            )

    run_threads(ranks, function, TIMEOUT_S)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["wide", "bias", "twin"])
@pytest.mark.parametrize("name", THREADED)
def test_non_finite(name, bad, place):
    """A NaN or infinity on one rank makes something non-finite on every rank alike."""

    def function(transport: Transport) -> bool:
        out = gradients(transport.rank)
        if transport.rank == 1:
            out[GROUP.bounds[GROUP.names.index(place)][0] + 3] = bad
        IMPLEMENTATIONS[name].make().aggregate(out, GROUP, transport)
        return bool(out.isfinite().all())

    assert run_threads(3, function, TIMEOUT_S) == [False] * 3


@pytest.mark.parametrize("name", [*THREADED, "feedback"])
def test_abandoned_and_resume(name):
    """An abandoned step leaves the state as it was, and a copy from it goes on bit for bit."""
    make = (
        IMPLEMENTATIONS[name].make
        if name != "feedback"
        else lambda: ErrorFeedback(PowerSGD(rank=1))
    )

    def step(aggregator: Aggregator, transport: Transport, number: int, keep: bool) -> torch.Tensor:
        out = gradients(transport.rank, number)
        if not keep:
            out[5] = math.nan
        aggregator.aggregate(out, GROUP, transport)
        aggregator.finish_step(keep=keep)
        return out

    def function(transport: Transport) -> None:
        first = make()
        step(first, transport, 0, True)
        saved = copy.deepcopy(first.state_dict())
        second = make()
        second.load_state_dict(saved)
        for number in (1, 2):
            expected = step(first, transport, number, True)
            assert torch.equal(step(second, transport, number, True), expected)
        if "coded" in name or "mean" in name:
            return  # their counters of calls go on
        third = make()
        third.load_state_dict(saved)
        step(third, transport, 9, False)
        for number in (1, 2):
            fourth = step(third, transport, number, True)
        assert torch.equal(fourth, expected)

    run_threads(3, function, TIMEOUT_S)


@pytest.mark.parametrize("name", THREADED)
def test_generator(name):
    """Torch's global random state is the same before and after."""

    def function(transport: Transport) -> None:
        aggregator = IMPLEMENTATIONS[name].make()
        for number in range(2):
            out = gradients(transport.rank, number)
            aggregator.aggregate(out, GROUP, transport)
            aggregator.finish_step(keep=True)

    before = torch.get_rng_state()
    run_threads(2, function, TIMEOUT_S)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", [n for n in THREADED if n != "mean"])
def test_wrong_state_is_refused(name):
    """A state of another aggregator is an error, not a silent restart."""
    with pytest.raises(InputError):
        IMPLEMENTATIONS[name].make().load_state_dict({"something": 1, "else": {}})


# -- error feedback


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Mean(Direct("int4")),
        lambda: PowerSGD(rank=6, min_saving=1),
        lambda: PowerSGD(rank=6, min_saving=1, alternate=True),
        lambda: TopK(ratio=0.25),
    ],
)
def test_feedback_sends_everything_in_the_end(make, dtype):
    """The mean of the outputs of a constant gradient goes to the true mean (within 1 %).

    It is off by the last residual over the number of steps, whatever the method: the ranks and
    ratios here keep the residual below two gradients.
    """

    def function(transport: Transport) -> torch.Tensor:
        aggregator = ErrorFeedback(make(), dtype=dtype)
        total = torch.zeros(GROUP.numel, dtype=torch.float64)
        for _ in range(200):
            out = gradients(transport.rank)
            aggregator.aggregate(out, GROUP, transport)
            aggregator.finish_step(keep=True)
            total += out
        return total / 200

    outputs = run_threads(3, function, TIMEOUT_S)
    mean = torch.stack([gradients(rank) for rank in range(3)]).double().mean(0)
    # bf16 residuals lose up to 2^-9 of a residual in each step, as a random walk.
    limit = 0.01 if dtype == "fp32" else 0.03
    assert ((outputs[0] - mean).norm() / mean.norm()).item() < limit


def test_feedback_is_conserved_in_every_step():
    """Gradients plus old residuals equal outputs plus new residuals, summed over ranks."""

    def function(transport: Transport) -> list[list[torch.Tensor]]:
        feedback = ErrorFeedback(TopK(ratio=0.05))
        seen = []
        for step in range(5):
            old = feedback.state_dict()["residuals"]
            out = gradients(transport.rank, step)
            brought = out + torch.cat([old[n] for n in GROUP.names]) if old else out.clone()
            feedback.aggregate(out, GROUP, transport)
            feedback.finish_step(keep=True)
            new = feedback.state_dict()["residuals"]
            seen.append([brought, out, torch.cat([new[n] for n in GROUP.names])])
        return seen

    for step in zip(*run_threads(3, function, TIMEOUT_S), strict=True):
        brought, out, left = (torch.stack(list(p)).double().sum(0) for p in zip(*step, strict=True))
        assert (brought - out - left).abs().max() <= 1e-4


def test_feedback_under_loss_scaling():
    """Residuals are unscaled: a scale that changes every step changes nothing but roundings."""

    def function(transport: Transport, scales: list[float]) -> torch.Tensor:
        feedback = ErrorFeedback(TopK(ratio=0.1))
        for step, scale in enumerate(scales):
            feedback.scale = scale
            out = gradients(transport.rank, step) * scale
            feedback.aggregate(out, GROUP, transport)
            feedback.finish_step(keep=True)
        return out / scales[-1]

    plain = run_threads(2, lambda t: function(t, [1.0] * 4), TIMEOUT_S)
    scaled = run_threads(2, lambda t: function(t, [2.0, 1024.0, 0.5, 8.0]), TIMEOUT_S)
    assert torch.equal(plain[0], scaled[0])  # powers of two: exact


def test_feedback_memory_is_one_buffer():
    """Residuals take 4 bytes an element, 2 in bf16, and say so."""

    def function(transport: Transport) -> list[int]:
        sizes = []
        for dtype in ("fp32", "bf16"):
            feedback = ErrorFeedback(TopK(ratio=0.1), dtype=dtype)
            feedback.aggregate(gradients(transport.rank), GROUP, transport)
            assert feedback.residual_bytes == 0
            feedback.finish_step(keep=True)
            sizes.append(feedback.residual_bytes)
        return sizes

    assert run_threads(2, function, TIMEOUT_S)[0] == [4 * GROUP.numel, 2 * GROUP.numel]


def test_feedback_that_grows_is_warned_of():
    """Residuals far above the gradients, ten steps in a row, are reported once."""

    def function(transport: Transport) -> None:
        feedback = ErrorFeedback(TopK(ratio=0.001), growth_limit=2.0)
        for _ in range(40):
            feedback.aggregate(gradients(transport.rank), GROUP, transport)
            feedback.finish_step(keep=True)

    with pytest.warns(UserWarning, match="send more") as caught:
        run_threads(2, function, TIMEOUT_S)
    assert len(caught) == 2  # one on each rank


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ErrorFeedback(TopK(), dtype="fp8"), "fp8"),
        (lambda: ErrorFeedback(TopK(), growth_limit=0), "growth_limit"),
        (lambda: ErrorFeedback(ErrorFeedback(TopK())), "once"),
        (lambda: Cast("int8"), "int8"),
        (lambda: TopK(ratio=0), "ratio"),
        (lambda: TopK(ratio=1.5), "ratio"),
        (lambda: PowerSGD(rank=0), "rank"),
    ],
)
def test_bad_arguments(make, text):
    """Values that cannot be are refused at construction."""
    with pytest.raises(InputError, match=text):
        make()

"""Top-k: the laws of aggregators/base.py, and which elements are sent."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import taciturn.aggregators.topk as topk
from ranks import Ranks
from taciturn.aggregators.base import Group
from taciturn.aggregators.topk import TopK
from taciturn.collectives import Ring
from taciturn.errors import InputError, MismatchError
from taciturn.ledger import LedgerCounts
from taciturn.transport import DistributedTransport, Transport, run_threads

TIMEOUT_S = 30.0
DTYPES = (torch.float32, torch.float64)
# The last is sampled from 101 elements on, the one before never.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "whole": {"ratio": 1.0},
    "tenth": {"ratio": 0.1},
    "bf16": {"ratio": 0.1, "wire": "bf16"},
    "sampled": {"ratio": 0.03, "sample": 25},
}
EACH = pytest.mark.parametrize("name", CONFIGURATIONS)
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 5])


@dataclasses.dataclass
class Ended:
    """What one rank ends with: average, residual, and what its ledger counted."""

    average: torch.Tensor
    residual: torch.Tensor
    counts: LedgerCounts


def group_of(numel: int) -> Group:
    return Group(("weight",), ((numel,),), ((1,),))


def normal(ranks: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return list(torch.randn(ranks, numel, generator=generator, dtype=dtype))


def aggregated(options: dict[str, Any], inputs: Sequence[torch.Tensor]) -> list[Ended]:
    """Average ``inputs``, one for each rank, on threads; they are left as they are."""

    def function(transport: Transport) -> Ended:
        average = inputs[transport.rank].clone()
        residual = torch.full_like(average, math.nan)
        group = group_of(average.numel())
        TopK(**options).aggregate(average, group, transport, residual)
        return Ended(average, residual, transport.ledger.snapshot())

    return run_threads(len(inputs), function, TIMEOUT_S)


def order(gradient: torch.Tensor) -> list[int]:
    """Return all positions by magnitude, NaN before infinity, equal ones by position.

    An oracle in plain Python: what is sent are the first k.
    """

    def key(position: int) -> tuple[float, float, int]:
        number = gradient[position].item()
        return (-1.0, 0.0, position) if math.isnan(number) else (0.0, -abs(number), position)

    return sorted(range(gradient.numel()), key=key)


@RANKS
@EACH
def test_conservation(name, ranks):
    """Sum over ranks of the input = sum over ranks of (output + residual).

    The output's roundings, one for each addition and one for the division, are at most
    W + 1 units in the last place of the largest output.
    """
    for numel, dtype in ((1, torch.float32), (7, torch.float64), (1001, torch.float32)):
        inputs = normal(ranks, numel, dtype)
        ended = aggregated(CONFIGURATIONS[name], inputs)
        brought = torch.stack(inputs).double().sum(0)
        kept = torch.stack([e.average.double() + e.residual.double() for e in ended]).sum(0)
        largest = max(e.average.abs().max().item() for e in ended)
        roundings = ranks * (ranks + 1) * torch.finfo(dtype).eps * largest
        assert (brought - kept).abs().max() <= roundings, (numel, dtype)


@EACH
def test_alone(name):
    """With one rank nothing is sent, the gradients are unchanged and the residual is zero."""
    (gradient,) = normal(1, 1001)
    (ended,) = aggregated(CONFIGURATIONS[name], [gradient])
    assert torch.equal(ended.average, gradient)
    assert not ended.residual.any()
    assert ended.counts == LedgerCounts()


@pytest.mark.parametrize("ranks", [2, 3, 5])
@EACH
def test_zero(name, ranks):
    """Zero gradients give exactly zero, and leave nothing; so do negative zeros."""
    for zero in (0.0, -0.0):
        for ended in aggregated(CONFIGURATIONS[name], [torch.full((1001,), zero)] * ranks):
            assert not ended.average.any()
            assert not ended.residual.any()


@RANKS
@EACH
def test_cost(name, ranks):
    """Claimed rounds, messages and bytes are what the ledger counted, one and two segments."""
    for numel in (0, 1, 2, 7, 1001, 60_000):
        for dtype in DTYPES:
            ended = aggregated(CONFIGURATIONS[name], normal(ranks, numel, dtype))
            for rank, counts in enumerate(e.counts for e in ended):
                cost = TopK(**CONFIGURATIONS[name]).cost(group_of(numel), dtype, ranks, rank)
                assert (cost.rounds, cost.messages, cost.sent_bytes) == (
                    counts.rounds,
                    counts.messages,
                    counts.sent_bytes,
                ), (numel, dtype, rank)


def test_bytes_are_the_formula():
    """(W - 1) k messages of a position and a value, and one header; a ring's at ratio 1/W."""
    for ranks in (2, 4, 8):
        group = group_of(80_000)
        wide = TopK(ratio=0.01).cost(group, torch.float32, ranks)
        assert wide.sent_bytes == 40 + (ranks - 1) * 800 * 8
        assert TopK(ratio=0.01, wire="bf16").cost(group, torch.float32, ranks).sent_bytes == (
            40 + (ranks - 1) * 800 * 6
        )
        ring = Ring().cost(group.numel, torch.float32, ranks)
        assert TopK(ratio=1 / ranks).cost(group, torch.float32, ranks).sent_bytes == ring.sent_bytes


@pytest.mark.parametrize("ranks", [2, 3, 5])
@EACH
def test_bit_identical(name, ranks):
    """All ranks end with the same bits."""
    for numel in (1, 2, 10, 1001, 40_000):
        ended = aggregated(CONFIGURATIONS[name], normal(ranks, numel))
        assert all(torch.equal(e.average, ended[0].average) for e in ended), numel


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@EACH
def test_non_finite(name, bad):
    """One NaN or infinity is always sent: that element is non-finite on every rank, no other is.

    The rank that brought it keeps nothing of it.
    """
    for numel, dtype in ((1, torch.float32), (1001, torch.float32), (1001, torch.float64)):
        inputs = normal(3, numel, dtype)
        inputs[1][numel // 2] = bad
        for ended in aggregated(CONFIGURATIONS[name], inputs):
            assert (~ended.average.isfinite()).nonzero().view(-1).tolist() == [numel // 2]
            assert ended.residual.isfinite().all()


@EACH
def test_more_non_finite_elements_than_are_sent(name):
    """Where all is NaN or infinite, what is sent is not finite either, on every rank."""
    inputs = normal(3, 1001)
    inputs[2].fill_(math.inf)[::2] = math.nan
    ended = aggregated(CONFIGURATIONS[name], inputs)
    k = TopK(**CONFIGURATIONS[name]).sent_elements(1001)
    assert all((~e.average.isfinite()).sum() == k for e in ended)


@pytest.mark.parametrize("keep", [True, False])
@EACH
def test_resumed_and_abandoned(name, keep):
    """A fresh object goes on bit for bit after steps kept or abandoned: there is no state."""
    inputs = normal(3, 1001)

    def function(transport: Transport) -> None:
        worn, group = TopK(**CONFIGURATIONS[name]), group_of(1001)
        before = copy.deepcopy(worn.state_dict())
        for _ in range(3):
            worn.aggregate(inputs[transport.rank] * 2, group, transport)
            worn.finish_step(keep)
        assert worn.state_dict() == before == {}
        assert worn.memory_bytes() == 0
        fresh = TopK(**CONFIGURATIONS[name])
        fresh.load_state_dict(worn.state_dict())
        results = []
        for aggregator in (worn, fresh):
            gradient = inputs[transport.rank].clone()
            aggregator.aggregate(gradient, group, transport)
            results.append(gradient)
        assert torch.equal(*results)

    run_threads(3, function, TIMEOUT_S)


def test_generator():
    """The sample is drawn from a generator of its own."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    TopK(ratio=0.03, sample=25).select(normal(1, 1001)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_whole_is_the_exact_mean(ranks, wire):
    """Ratio 1 gives the mean of numbers that either wire can hold, bit for bit, and no residual."""
    generator = torch.Generator().manual_seed(ranks)
    for dtype in DTYPES:
        numbers = torch.randint(-8, 9, (ranks, 1001), generator=generator).to(dtype) / 4
        for ended in aggregated({"ratio": 1.0, "wire": wire}, list(numbers)):
            assert torch.equal(ended.average, numbers.sum(0) / ranks)
            assert not ended.residual.any()


def test_output_is_the_sum_of_what_was_sent():
    """Elements that one rank sends are its share; what several send is added in their order."""
    inputs = [
        torch.tensor([8.0, 1.0, -6.0, 0.0]),
        torch.tensor([0.5, 2.0, 7.0, 0.25]),
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
    ]
    first, second, third = aggregated({"ratio": 0.5}, inputs)
    assert torch.equal(first.average, torch.tensor([9.0, 3.0, 1.0, 0.0]) / 3)
    assert torch.equal(first.residual, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert torch.equal(second.residual, torch.tensor([0.5, 0.0, 0.0, 0.25]))
    assert torch.equal(third.residual, torch.tensor([0.0, 0.0, 1.0, 1.0]))


FLOATS = st.one_of(
    st.floats(width=32),  # NaN, infinities, denormal numbers and negative zero among them
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-45, 3.4028234663852886e38]),
)


@given(
    numbers=st.lists(FLOATS, min_size=1, max_size=200),
    ratio=st.floats(min_value=1e-3, max_value=1.0),
    sample=st.sampled_from([1, 4, 16, 65536]),
    double=st.booleans(),
)
@example(numbers=[0.0] * 200, ratio=0.01, sample=16, double=False)
@example(numbers=[0.0] * 190 + [1.0] * 10, ratio=0.1, sample=16, double=False)
@example(numbers=[1.0] * 200, ratio=0.3, sample=16, double=True)
@example(numbers=[1.0] * 199 + [2.0], ratio=0.01, sample=16, double=False)
def test_selection(numbers, ratio, sample, double):
    """Exactly k distinct positions, of the largest magnitudes, the first of equal ones.

    Sampled or not, with the same result.
    """
    gradient = torch.tensor(numbers, dtype=torch.float64 if double else torch.float32)
    aggregator = TopK(ratio=ratio, sample=sample)
    chosen = aggregator.select(gradient).tolist()
    k = math.ceil(ratio * len(numbers))
    assert len(chosen) == len(set(chosen)) == k == aggregator.sent_elements(len(numbers))
    assert sorted(chosen) == sorted(order(gradient)[:k])


@given(
    numbers=st.lists(FLOATS, min_size=1, max_size=60),
    ratio=st.floats(min_value=1e-3, max_value=1.0),
    wire=st.sampled_from(["fp32", "bf16"]),
)
def test_nothing_is_lost(numbers, ratio, wire):
    """What a rank sent and its residual add up to its input, and only what it sent is gone.

    The other rank brings zeros, so that twice the average is what was sent: halving is exact but
    for denormal numbers, whose halves may be rounded.
    """
    gradient = torch.tensor(numbers)
    finite = gradient.isfinite()
    ended, _ = aggregated({"ratio": ratio, "wire": wire}, [gradient, torch.zeros_like(gradient)])
    sent = 2 * ended.average.double()
    rounded = torch.where(sent.abs() < 2.0**-125, 2.0**-149, 0.0).double()
    lost = (sent + ended.residual.double() - gradient.double()).abs()
    assert (lost[finite] <= rounded[finite]).all()
    chosen = TopK(ratio=ratio).select(gradient)
    kept = torch.ones_like(finite).index_fill(0, chosen, False)
    assert torch.equal(ended.residual[kept].nan_to_num(), gradient[kept].nan_to_num())
    assert ended.residual[chosen].isfinite().all()
    if wire == "fp32":
        assert not ended.residual[chosen].any()


def structured(kind: str, numel: int = 5000) -> torch.Tensor:
    (noise,) = normal(1, numel)
    match kind:
        case "normal":
            return noise
        case "equal":
            return torch.full((numel,), -3.0)
        case "mostly zero":
            return torch.where(torch.arange(numel) % 400 == 7, noise, 0.0)
        case "one block":
            return torch.where(torch.arange(numel) < 60, 100.0, 1e-3) * noise
        case "denormal":
            return (noise * 100).round() * 2.0**-149
        case "two values":
            return torch.where(noise > 1.5, 2.0, 1.0)
        case _:
            return torch.full((numel,), math.nan)


STRUCTURES = ["normal", "equal", "mostly zero", "one block", "denormal", "two values", "nan"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sample", [20, 300, 1200])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_sampling_changes_nothing(kind, sample, seed):
    """With ties, zeros, denormal numbers or one large block, sampled or not, the result is one."""
    gradient = structured(kind)
    for ratio in (0.001, 0.01, 0.3):
        plain = TopK(ratio=ratio, sample=10_000).select(gradient)
        sampled = TopK(ratio=ratio, sample=sample, seed=seed).select(gradient)
        assert torch.equal(plain.sort().values, sampled.sort().values), ratio
        assert sorted(plain.tolist()) == sorted(order(gradient)[: math.ceil(ratio * 5000)])


@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_samples_suffice(ratio, monkeypatch):
    """The whole group is hardly ever searched: in 200 samples not once, seeds being fixed."""
    (gradient,) = normal(1, 5000)
    k = TopK(ratio=ratio).sent_elements(5000)

    def refuse(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
        assert magnitudes.numel() < 5000, "searched the whole group"
        return search(magnitudes, count)

    search = topk._largest
    monkeypatch.setattr(topk, "_largest", refuse)
    for seed in range(200):
        assert TopK(ratio=ratio, sample=1000, seed=seed).select(gradient).numel() == k


def test_padding_is_zero():
    """An odd number of 16-bit values ends with half a word of zeros, not with what was there."""
    row = torch.full((2,), -1, dtype=torch.int32)
    TopK(wire="bf16")._pack(torch.tensor([3]), torch.tensor([1.0]), row)
    assert row.view(torch.int16).tolist() == [3, 0, 0x3F80, 0]


def test_wide_numbers_stay_finite():
    """Finite numbers beyond the wire's range are sent as its largest; the rest stays behind."""
    most = torch.finfo(torch.float32).max
    bf16 = torch.finfo(torch.bfloat16).max
    gradient = torch.tensor([most, -most, 1.0])
    ended, _ = aggregated({"ratio": 1.0, "wire": "bf16"}, [gradient, torch.zeros(3)])
    assert torch.equal(2 * ended.average.double(), torch.tensor([bf16, -bf16, 1.0]).double())
    assert torch.equal(ended.residual, torch.tensor([most - bf16, bf16 - most, 0.0]))
    tiny_and_huge = torch.tensor([1e300, 1e-300], dtype=torch.float64)
    ended, _ = aggregated({"ratio": 1.0}, [tiny_and_huge, torch.zeros(2, dtype=torch.float64)])
    assert ended.average.tolist() == [most / 2, 0.0]
    assert ended.residual.tolist() == [1e300 - most, 1e-300]


def run_on_constant_gradients(
    options: dict[str, Any], gradients: list[torch.Tensor], steps: int
) -> float:
    """Feed residuals back for some steps; return the relative error of the average output."""

    def function(transport: Transport) -> torch.Tensor:
        mine = gradients[transport.rank]
        aggregator, group = TopK(**options), group_of(mine.numel())
        residual, total = torch.zeros_like(mine), torch.zeros_like(mine)
        for _ in range(steps):
            step = mine + residual
            aggregator.aggregate(step, group, transport, residual)
            aggregator.finish_step(True)
            total += step
        return total / steps

    mean = torch.stack(gradients).mean(0)
    averages = run_threads(len(gradients), function, TIMEOUT_S)
    return max(((average - mean).norm() / mean.norm()).item() for average in averages)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_constant_gradient_with_the_residual_fed_back(wire):
    """A tenth of the elements a step, but after 200 steps the average is the mean within 1 %.

    Magnitudes are log-normal, as those of gradients nearly are: a residual grows to the mean
    magnitude over the ratio, here 74, half of it on average; over 200 steps and beside a gradient
    of rms 55 this is 0.4 %.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(3, 1001, generator=generator).mul(2).exp()
    signs = torch.randint(0, 2, (3, 1001), generator=generator) * 2 - 1
    options = {"ratio": 0.1, "wire": wire}
    assert run_on_constant_gradients(options, list(sizes * signs), 200) < 0.01


def test_residuals_are_bounded():
    """Fed-back residuals m stay below 2 n/k of the gradient g, and the average is off by m / steps.

    Of any x, top-k leaves at most sqrt(1 - k/n) |x| (Stich et al., the k-contraction), so that
    |m| <= sqrt(1 - k/n) (|m| + |g|), hence |m| <= 2 n/k |g|.
    """
    for steps in (50, 200):
        error = run_on_constant_gradients({"ratio": 0.1}, [normal(1, 1001)[0]] * 2, steps)
        assert error < 2 * 10 / steps


def test_one_element_and_none():
    """A group of one element is averaged exactly; an empty one costs a header and stays empty."""
    for numel, k in ((0, 0), (1, 1)):
        inputs = [torch.full((numel,), float(rank)) for rank in range(3)]
        assert TopK(ratio=0.01).sent_elements(numel) == k
        for ended in aggregated({"ratio": 0.01}, inputs):
            assert ended.average.tolist() == [1.0] * numel
            assert ended.residual.tolist() == [0.0] * numel
            assert ended.counts.sent_bytes == 40 + 2 * 8 * k


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": -0.1}, "ratio=-0.1"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"ratio": math.nan}, "ratio=nan"),
        ({"sample": 0}, "sample=0"),
        ({"wire": "fp16"}, "wire='fp16'"),
    ],
)
def test_bad_options(options, message):
    """Impossible options are refused when the object is made, with the value."""
    with pytest.raises(InputError, match=message):
        TopK(**options)


@pytest.mark.parametrize(
    ("gradient", "residual", "message"),
    [
        (torch.zeros(9), None, r"shape \(9,\)"),
        (torch.zeros(2, 5), None, r"shape \(2, 5\)"),
        (torch.zeros(20)[::2], None, "strides"),
        (torch.zeros(10, dtype=torch.bfloat16), None, "bfloat16"),
        (torch.zeros(10), torch.zeros(10, dtype=torch.float64), "float64"),
        (torch.zeros(10), torch.zeros(9), "residual of shape"),
    ],
)
def test_bad_buffers(gradient, residual, message):
    """What cannot be exchanged is refused, alone or not, with what it is."""
    for ranks in (1, 2):
        with pytest.raises(InputError, match=message):
            run_threads(
                ranks, lambda t: TopK().aggregate(gradient, group_of(10), t, residual), TIMEOUT_S
            )


def test_too_many_elements():
    """A group whose positions need more than 31 bits is refused."""
    large = Group(("weight",), ((1 << 31,),), ((1,),))
    with pytest.raises(InputError, match="2147483648 elements"):
        run_threads(2, lambda t: TopK().aggregate(torch.zeros(1), large, t), TIMEOUT_S)


@pytest.mark.parametrize(
    ("numel", "options"),
    [(950, {"ratio": 0.01}), (1000, {"ratio": 0.01, "wire": "bf16"}), (1000, {"ratio": 0.02})],
)
def test_disagreement(numel, options):
    """Other groups or options on one rank are an error on every rank, even if k is the same, and
    the gradients are untouched.
    """
    refused: list[bool] = []

    def function(transport: Transport) -> None:
        odd = transport.rank == 1
        size = numel if odd else 1000
        aggregator = TopK(**options) if odd else TopK(ratio=0.01)
        gradient = torch.ones(size)
        try:
            aggregator.aggregate(gradient, group_of(size), transport)
        except MismatchError:
            refused.append(torch.equal(gradient, torch.ones(size)))
            raise

    with pytest.raises(MismatchError):
        run_threads(3, function, TIMEOUT_S)
    assert refused == [True] * 3


def _average_on_gloo(options: dict[str, Any], inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    average = inputs[transport.rank].clone()
    residual = torch.empty_like(average)
    group = group_of(average.numel())
    aggregator = TopK(**options)
    aggregator.aggregate(average, group, transport, residual)
    counts = transport.ledger.snapshot()
    cost = aggregator.cost(group, average.dtype, transport.size, transport.rank)
    transport.close()
    return average, residual, counts.messages == cost.messages, counts.sent_bytes == cost.sent_bytes


@pytest.mark.processes
@pytest.mark.parametrize("name", ["tenth", "bf16", "sampled"])
def test_processes_give_what_threads_give(pool: Ranks, name: str):
    """Real gloo ranks end with the bits that threads end with, and send what is claimed."""
    inputs = normal(4, 300_001)
    inputs[3][200_000] = math.inf
    expected = aggregated(CONFIGURATIONS[name], inputs)
    for rank, (average, residual, *as_claimed) in enumerate(
        pool.run(_average_on_gloo, CONFIGURATIONS[name], inputs)
    ):
        assert torch.equal(average, expected[rank].average)
        assert torch.equal(residual, expected[rank].residual)
        assert all(as_claimed)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EACH
def test_cuda_tensors(name):
    """CUDA buffers give what CPU buffers give, bit for bit."""
    inputs = normal(3, 1001)
    expected = aggregated(CONFIGURATIONS[name], inputs)
    for cpu, gpu in zip(
        expected, aggregated(CONFIGURATIONS[name], [i.cuda() for i in inputs]), strict=True
    ):
        assert torch.equal(gpu.average.cpu(), cpu.average)
        assert torch.equal(gpu.residual.cpu(), cpu.residual)

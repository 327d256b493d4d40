"""PowerSGD: the laws of aggregators/base.py, and the cases A7 to A10."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from taciturn.aggregators.base import Group
from taciturn.aggregators.powersgd import PowerSGD, _Plan
from taciturn.collectives import CodedRing, Direct, QuantizedRing, Ring
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.transport import DistributedTransport, Transport, run_threads

TIMEOUT_S = 30.0
RANKS = [1, 2, 3]

MODES: dict[str, dict[str, Any]] = {
    "two-exchanges": {"rank": 2, "min_saving": 1.0},
    "alternate": {"rank": 2, "min_saving": 1.0, "alternate": True},
    "cold": {"rank": 2, "min_saving": 1.0, "warm_start": False},
}
WARM = ["two-exchanges", "alternate"]

SHAPES = [(12, 9), (7,), (12, 9), (3, 4, 5), (), (0, 4), (2, 2), (12, 9), (9, 20)]
"""Equal ones at unequal distances, one with three dimensions, and what is never compressed."""


def group_of(shapes: Sequence[tuple[int, ...]]) -> Group:
    return Group.of([(f"layer{i}.weight", torch.empty(s)) for i, s in enumerate(shapes)])


GROUP = group_of(SHAPES)


def normal(group: Group, ranks: int, seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(ranks, group.numel, generator=generator) * scale)


def on_ranks(ranks: int, function: Callable[[Transport], Any]) -> list[Any]:
    return run_threads(ranks, function, TIMEOUT_S)


def steps(
    aggregator: PowerSGD,
    transport: Transport,
    group: Group,
    gradients: Sequence[torch.Tensor],
    keep: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Aggregate copies, a step each; return outputs and residuals."""
    results = []
    for gradient in gradients:
        output, residual = gradient.clone(), torch.full_like(gradient, math.nan)
        aggregator.aggregate(output, group, transport, residual)
        aggregator.finish_step(keep)
        results.append((output, residual))
    return results


def run(
    mode: str, inputs: Sequence[Sequence[torch.Tensor]], group: Group = GROUP, **more: Any
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return [rank][step] of what ``inputs[step][rank]`` become."""

    def function(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        aggregator = PowerSGD(**{**MODES[mode], **more})
        return steps(aggregator, transport, group, [i[transport.rank] for i in inputs])

    return on_ranks(len(inputs[0]), function)


def largest(values: torch.Tensor) -> float:
    return values.abs().max().item()


# -- laws


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conservation(mode, ranks, dtype):
    """The sum over ranks of inputs is that of outputs and residuals, in every step.

    Sums of three numbers and products of two factors: some ten roundings of the largest.
    """
    inputs = [[x.to(dtype) for x in normal(GROUP, ranks, seed)] for seed in range(4)]
    results = run(mode, inputs)
    for step, brought in enumerate(inputs):
        total = sum(sum(results[rank][step]) for rank in range(ranks))
        assert largest(total - sum(brought)) <= 20 * torch.finfo(dtype).eps * 3 * ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "over", [lambda: QuantizedRing(wire="bf16"), lambda: Direct(wire="int8", block=64)]
)
def test_conservation_over_narrow_wires(mode, over):
    """What the wires round away is in the residuals."""
    ranks = 3
    inputs = [normal(GROUP, ranks, seed) for seed in range(4)]

    def function(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        aggregator = PowerSGD(**MODES[mode], over=over())
        return steps(aggregator, transport, GROUP, [i[transport.rank] for i in inputs])

    results = on_ranks(ranks, function)
    for step, brought in enumerate(inputs):
        assert all(torch.equal(results[0][step][0], r[step][0]) for r in results)
        total = sum(sum(results[rank][step]) for rank in range(ranks))
        assert largest(total - sum(brought)) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_alone(mode):
    """One rank: unchanged, no residual, nothing sent, no state."""
    (gradient,) = normal(GROUP, 1)

    def function(transport: Transport) -> None:
        aggregator = PowerSGD(**MODES[mode])
        ((output, residual),) = steps(aggregator, transport, GROUP, [gradient])
        assert torch.equal(output, gradient)
        assert not residual.any()
        assert transport.ledger.sent_bytes == 0
        assert aggregator.memory_bytes() == 0
        assert aggregator.state_dict()["step"] == 0

    on_ranks(1, function)


@pytest.mark.parametrize("mode", MODES)
def test_zero(mode):
    """Zero gradients give exactly zero, and leave no residual (A7)."""
    zeros = [torch.zeros(GROUP.numel)] * 2
    for per_rank in run(mode, [zeros] * 3):
        for output, residual in per_rank:
            assert not output.any()
            assert not residual.any()


def test_a_zero_step_teaches_nothing():
    """After a step of zeros the factors are those from before it, not zeros for ever."""
    gradients = normal(GROUP, 2)
    zeros = [torch.zeros(GROUP.numel)] * 2
    interrupted = run("two-exchanges", [gradients, zeros, gradients])
    plain = run("two-exchanges", [gradients, gradients])
    assert torch.equal(interrupted[0][2][0], plain[0][1][0])
    alternate = run("alternate", [gradients, zeros, zeros, zeros, gradients])[0]
    assert largest(alternate[4][0]) > 0.1


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "over", [Ring, lambda: QuantizedRing(wire="int8"), lambda: Direct(wire="bf16")]
)
@pytest.mark.parametrize("group", [GROUP, group_of([(7,), ()]), group_of([])])
def test_cost(mode, ranks, over, group):
    """Rounds, messages and bytes are those counted, in every step."""

    def function(transport: Transport) -> None:
        aggregator = PowerSGD(**MODES[mode], over=over())
        for gradient in normal(group, 3):
            expected = aggregator.cost(group, torch.float32, ranks, transport.rank)
            before = transport.ledger.snapshot()
            steps(aggregator, transport, group, [gradient])
            counted = transport.ledger.snapshot() - before
            assert expected is not None
            assert (counted.rounds, counted.messages, counted.sent_bytes) == (
                expected.rounds,
                expected.messages,
                expected.sent_bytes,
            )

    on_ranks(ranks, function)


def test_exchanges():
    """Two collectives a group, one in alternating mode, one if nothing is compressed."""

    def function(transport: Transport, mode: str, group: Group) -> int:
        calls = transport.calls
        steps(PowerSGD(**MODES[mode]), transport, group, normal(group, 1))
        return transport.calls - calls

    vectors = group_of([(7,), (5,)])
    for mode, group, calls in [
        ("two-exchanges", GROUP, 2),
        ("alternate", GROUP, 1),
        ("two-exchanges", vectors, 1),
    ]:
        assert on_ranks(2, lambda t, m=mode, g=group: function(t, m, g)) == [calls] * 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_bit_identical(mode, ranks):
    """All ranks end with the same bits, wherever their gradients lie in memory."""
    inputs = [normal(GROUP, ranks, seed) for seed in range(4)]

    def function(transport: Transport) -> list[torch.Tensor]:
        aggregator = PowerSGD(**MODES[mode])
        outputs = []
        for brought in inputs:
            memory = torch.empty(GROUP.numel + 16)[transport.rank : transport.rank + GROUP.numel]
            aggregator.aggregate(memory.copy_(brought[transport.rank]), GROUP, transport)
            aggregator.finish_step(True)
            outputs.append(memory)
        return outputs

    first, *others = on_ranks(ranks, function)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [True, False])
def test_non_finite(mode, value, keep):
    """A NaN or infinity of one rank is seen by all, and the step after it is finite (A5)."""
    matrix, vector = GROUP.bounds[0][0] + 10, GROUP.bounds[1][0]

    def function(transport: Transport) -> list[list[bool]]:
        aggregator = PowerSGD(**MODES[mode])
        seen = []
        for step, gradient in enumerate(normal(GROUP, 6, transport.rank)):
            bad = {2: matrix, 4: vector}.get(step)
            if bad is not None and transport.rank == 1:
                gradient[bad] = value
            aggregator.aggregate(gradient, GROUP, transport)
            aggregator.finish_step(keep or bad is None)
            seen.append([bool(view.isfinite().all()) for view in GROUP.views(gradient)])
        return seen

    first, second = on_ranks(2, function)
    assert first == second
    finite = [True] * len(SHAPES)
    assert [f == finite for f in first] == [True, True, False, True, False, True]
    assert first[2][1:] == finite[1:]  # only that tensor


@pytest.mark.parametrize("mode", MODES)
def test_abandoned(mode):
    """A step that is not kept leaves no trace, nor in the collective's counters."""
    one, two, three = (normal(GROUP, 2, seed) for seed in range(3))

    def function(transport: Transport, abandon: bool) -> list[torch.Tensor]:
        over = QuantizedRing(rounding="stochastic")
        aggregator = PowerSGD(**MODES[mode], over=over)
        own = transport.rank
        results = steps(aggregator, transport, GROUP, [one[own]])
        if abandon:
            before = aggregator.state_dict()
            steps(aggregator, transport, GROUP, [two[own]], keep=False)
            assert str(aggregator.state_dict()) == str(before)
        results += steps(aggregator, transport, GROUP, [three[own], one[own]])
        return [output for output, _ in results]

    with_it, without = (on_ranks(2, lambda t, a=a: function(t, a)) for a in (True, False))
    for mine, other in zip(with_it, without, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_resume(mode, kept):
    """A copy that loads the state, read back with weights_only, goes on bit for bit."""
    inputs = [normal(GROUP, 2, seed) for seed in range(6)]

    def function(transport: Transport) -> None:
        brought = [i[transport.rank] for i in inputs]
        aggregator = PowerSGD(**MODES[mode])
        steps(aggregator, transport, GROUP, brought[:kept])
        memory = aggregator.memory_bytes()
        file = io.BytesIO()
        torch.save(aggregator.state_dict(), file)
        expected = steps(aggregator, transport, GROUP, brought[kept:])
        file.seek(0)
        copy = PowerSGD(**MODES[mode])
        copy.load_state_dict(torch.load(file, weights_only=True))
        assert copy.memory_bytes() == memory
        resumed = steps(copy, transport, GROUP, brought[kept:])
        for one, other in zip(expected, resumed, strict=True):
            assert all(map(torch.equal, one, other))

    on_ranks(2, function)


def test_state_is_a_copy():
    """What state_dict returned does not change with later steps, nor do steps with it (A14)."""

    def function(transport: Transport) -> None:
        one, two, three = normal(GROUP, 3)
        aggregator = PowerSGD(**MODES["two-exchanges"])
        steps(aggregator, transport, GROUP, [one])
        state = aggregator.state_dict()
        text = str(state)
        copy = PowerSGD(**MODES["two-exchanges"])
        copy.load_state_dict(state)
        steps(copy, transport, GROUP, [two, three])
        assert str(state) == text
        factors = sum(f.numel() for f in state["right"].values())
        assert aggregator.memory_bytes() == 4 * factors
        assert factors == 2 * (3 * 9 + 20 + 20)  # (2, 2) saves nothing

    on_ranks(2, function)


# -- cases


@pytest.mark.parametrize("mode", MODES)
def test_generator_and_seeds(mode):
    """Factors are equal on ranks, other ones in each step; torch's generator is untouched (A10)."""
    gradients = normal(GROUP, 1)[0]

    def function(transport: Transport) -> list[torch.Tensor]:
        aggregator = PowerSGD(**MODES[mode])
        return [output for output, _ in steps(aggregator, transport, GROUP, [gradients] * 2)]

    torch.manual_seed(7)
    before = torch.get_rng_state()
    (one, two), (other_one, other_two) = on_ranks(2, function)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, other_one)
    assert torch.equal(two, other_two)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("mode", MODES)
def test_first_factors_depend_on_seed_and_name_only(mode):
    """Other seeds and names draw others; the order of the parameters does not matter."""
    gradient = normal(group_of([(12, 9)]), 1)[0]

    def first(names: list[str], **more: Any) -> dict[str, torch.Tensor]:
        group = Group.of([(name, torch.empty(12, 9)) for name in names])
        inputs = [[gradient.repeat(len(names))] * 2]
        output = run(mode, inputs, group, **more)[0][0][0]
        return dict(zip(names, group.views(output), strict=True))

    one, two = first(["a", "b"]), first(["b", "a"])
    assert torch.equal(one["a"], two["a"])
    assert torch.equal(one["b"], two["b"])
    assert not torch.equal(one["a"], one["b"])
    assert not torch.equal(one["a"], first(["a"], seed=1)["a"])


def rows_of(matrices: torch.Tensor) -> torch.Tensor:
    """Return what orthonormalizing the columns of each (B, m, r) gives."""
    count, m, r = matrices.shape
    # Matrices of (m, 2 m): r <= m is their rank.
    plan = _Plan(group_of([(m, 2 * m)] * count), r, 0.0)
    flat = matrices.mT.reshape(-1)
    return plan.factors(plan.orthonormal(flat, "left"), "left")[0].mT


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("r", [1, 4, 16])
def test_orthonormal_at_any_scale(scale, dtype, r):
    """P^T P = I for M = scale * randn, and for columns of very different scales (A7)."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 50, r, generator=generator, dtype=dtype) * scale
    matrices[1] *= torch.logspace(0, -8, r, dtype=dtype)
    p = rows_of(matrices)
    assert largest(p.mT @ p - torch.eye(r, dtype=dtype)) <= 1e-6


@given(st.integers(1, 6), st.integers(0, 2**31), st.integers(-45, 30))
def test_orthonormal_when_dependent(r, seed, exponent):
    """Ill-conditioned and dependent columns give orthonormal or zero ones with the same span."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(2, 40, r, generator=generator)
    for j in range(1, r):
        if torch.rand((), generator=generator) < 0.5:  # near a combination of those before
            nearness = 10.0 ** -torch.randint(1, 12, (), generator=generator)
            mix = torch.randn(2, j, 1, generator=generator)
            p[:, :, j] = (p[:, :, :j] @ mix)[:, :, 0] + nearness * p[:, :, j]
    p[1, :, 0] = 0
    q = rows_of(p * 10.0**exponent)
    gram = q.mT @ q
    alive = q.abs().amax(1) > 0
    assert largest(gram - torch.diag_embed(alive.float())) <= 1e-4
    if exponent > -30:  # fp32 itself rounds away what is smaller
        left_over = p - q @ (q.mT @ p)
        assert (left_over.norm(dim=1) <= 1e-5 * p.norm(dim=1)).all()


@pytest.mark.parametrize("mode", MODES)
def test_scale_invariant(mode):
    """Gradients times a power of two give outputs and residuals times it, bit for bit."""
    inputs = [normal(GROUP, 2, seed) for seed in range(3)]
    for factor in (2.0**-80, 2.0**60):
        scaled = run(mode, [[x * factor for x in brought] for brought in inputs])
        for mine, other in zip(run(mode, inputs), scaled, strict=True):
            for one, two in zip(mine, other, strict=True):
                assert torch.equal(one[0] * factor, two[0])
                assert torch.equal(one[1] * factor, two[1])


@pytest.mark.parametrize("mode", WARM)
@pytest.mark.parametrize("scale", [1e-30, 1.0])
def test_low_rank_is_exact(mode, scale):
    """A mean of rank 1 is found exactly, by rank 4 too, whose other directions stay zero."""
    generator = torch.Generator().manual_seed(0)
    group = group_of([(40, 30), (30, 40)])
    columns = [torch.randn(m, generator=generator) for m, _ in group.shapes]
    rows = [torch.randn(n, generator=generator) for _, n in group.shapes]
    mean = scale * torch.cat(
        [torch.outer(c, r).ravel() for c, r in zip(columns, rows, strict=True)]
    )
    for r in (1, 4):
        results = run(mode, [[mean, mean]] * 4, group, rank=r)
        assert largest(results[0][-1][0] - mean) <= 1e-5 * largest(mean)


@pytest.mark.parametrize("r", [8, 50])
def test_rank_above_the_dimensions(r):
    """Rank is clamped; full rank gives the exact mean, compressed or not (A8)."""
    shapes = [(3, 50), (50, 3), (1, 7), (7, 1), (2, 2), (7,), ()]
    group = group_of(shapes)
    inputs = [normal(group, 2, seed) for seed in range(3)]
    for min_saving in (0.0, 2.0):
        results = run("two-exchanges", inputs, group, rank=r, min_saving=min_saving)
        for step, (one, two) in enumerate(inputs):
            mean = (one + two) / 2
            for got, right in zip(group.views(results[0][step][0]), group.views(mean), strict=True):
                assert (got - right).norm() <= 1e-5 * right.norm()


def test_what_is_compressed():
    """Only what shrinks by min_saving at least; the rest is the exact mean with no residual."""
    group = group_of([(40, 40), (40,), (8, 40), (40, 40)])
    # rank 4: 40 x 40 shrinks by 5, 8 x 40 by 5/3.
    for min_saving, compressed in [(1.0, [0, 2, 3]), (2.0, [0, 3]), (5.0, [0, 3]), (5.1, [])]:
        plan = _Plan(group, 4, min_saving)
        names = sorted(name for batch in plan.batches for name in batch.names)
        assert names == [f"layer{i}.weight" for i in compressed]
        inputs = normal(group, 2)
        output, residual = run("two-exchanges", [inputs], group, rank=4, min_saving=min_saving)[0][
            0
        ]
        for i, views in enumerate(zip(*map(group.views, (output, residual, *inputs)), strict=True)):
            if i not in compressed:
                assert torch.equal(views[0], (views[2] + views[3]) / 2)
                assert not views[1].any()


@given(
    st.lists(st.sampled_from([(6, 5), (4, 8), (5, 6), (3,), (), (0, 2), (2, 3, 4, 2)]), max_size=9),
    st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_plan_loses_nothing(shapes, channels_last):
    """Batches and the rest cover each element of a group once, in any order and layout."""
    tensors = []
    for i, (shape, last) in enumerate(zip(shapes, channels_last, strict=False)):
        tensor = torch.empty(shape)
        if last and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        if last and tensor.dim() == 2:
            tensor = torch.empty(shape[::-1]).T
        tensors.append((f"p{i}", tensor))
    group = Group.of(tensors)
    plan = _Plan(group, 1, 1.0)
    flat = torch.zeros(group.numel)
    for part in plan.rest_of(flat):
        part += 1
    numbered = torch.arange(group.numel, dtype=torch.float32)
    logical = dict(zip(group.names, group.views(numbered), strict=True))
    for batch in plan.batches:
        matrices = batch.matrices(flat)
        matrices += 1
        batch.write(flat, matrices)
        for name, matrix in zip(batch.names, batch.matrices(numbered), strict=True):
            assert torch.equal(matrix.reshape(-1), logical[name].reshape(-1))
    assert torch.equal(flat, torch.ones(group.numel))
    assert plan.copied_numel + plan.rest_numel <= group.numel


def reference(
    matrices: list[torch.Tensor], q: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return output and residuals of one step, each rank's matrix given, by QR in fp64."""
    q, _ = torch.linalg.qr(q.double())
    p, _ = torch.linalg.qr(sum(m.double() @ q for m in matrices))
    qs = [m.double().T @ p for m in matrices]
    others = [torch.eye(len(f), dtype=torch.float64) - f @ f.T for f in (p, q)]
    return p @ (sum(qs) / len(qs)).T, [others[0] @ m.double() @ others[1] for m in matrices]


def test_algorithm_1():
    """Outputs and residuals of each matrix are those of the equations, step after step."""
    inputs = [normal(GROUP, 3, seed) for seed in range(3)]

    def function(transport: Transport) -> list[dict[str, torch.Tensor]]:
        aggregator = PowerSGD(**MODES["two-exchanges"])
        states = []
        for brought in inputs:
            steps(aggregator, transport, GROUP, [brought[transport.rank]])
            states.append(aggregator.state_dict()["right"])
        return states

    states = on_ranks(3, function)[0]
    results = run("two-exchanges", inputs)
    assert len(states[0]) == 5
    for name, step in itertools.product(states[0], (1, 2)):
        i = GROUP.names.index(name)
        m, n = SHAPES[i][0], math.prod(SHAPES[i][1:])
        brought = [GROUP.views(x)[i].view(m, n) for x in inputs[step]]
        output, residuals = reference(brought, states[step - 1][name].T)
        for rank, residual in enumerate(residuals):
            for got, right in zip(results[rank][step], (output, residual), strict=True):
                assert largest(GROUP.views(got)[i].view(m, n) - right) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_mean_over_200_steps(mode):
    """With the residual fed back, a constant gradient's outputs average to it within 1 % (A9).

    Residuals stay a few gradients large, also the part by which a rank differs from the mean.
    """
    ranks, group = 3, group_of([(12, 9), (7,)])
    inputs = normal(group, ranks)

    def function(transport: Transport) -> tuple[torch.Tensor, float]:
        aggregator = PowerSGD(**{**MODES[mode], "rank": 4})
        total, residual = torch.zeros(group.numel), torch.zeros(group.numel)
        norms = []
        for _ in range(200):
            gradient = inputs[transport.rank] + residual
            aggregator.aggregate(gradient, group, transport, residual)
            aggregator.finish_step(True)
            total += gradient
            norms.append(residual.norm().item())
        return total / 200, max(norms)

    mean = sum(inputs) / ranks
    for rank, (average, norm) in enumerate(on_ranks(ranks, function)):
        assert (average - mean).norm() <= 0.01 * mean.norm()
        assert norm <= 4 * inputs[rank].norm()


@pytest.mark.parametrize("mode", MODES)
def test_channels_last(mode):
    """A channels_last group gives, in logical order, what a contiguous one gives (C2)."""
    shapes = [(8, 6, 3, 3), (8, 6, 3, 3), (20, 6, 2, 1)]
    names = [f"conv{i}" for i in range(3)]
    plain = Group.of([(n, torch.empty(s)) for n, s in zip(names, shapes, strict=True)])
    last = Group.of([
        (n, torch.empty(s).to(memory_format=torch.channels_last))
        for n, s in zip(names, shapes, strict=True)
    ])  # fmt: skip
    assert plain != last
    inputs = [normal(plain, 2, seed) for seed in range(3)]
    permuted = []
    for brought in inputs:
        permuted.append([torch.empty(last.numel) for _ in brought])
        for flat, x in zip(permuted[-1], brought, strict=True):
            torch._foreach_copy_(last.views(flat), plain.views(x))
    expected, results = run(mode, inputs, plain), run(mode, permuted, last)
    for one, other in zip(itertools.chain(*expected), itertools.chain(*results), strict=True):
        for x, y in zip(one, other, strict=True):
            assert all(map(torch.equal, plain.views(x), last.views(y)))


@pytest.mark.parametrize("mode", MODES)
def test_several_groups(mode):
    """Parameters in groups of their own give what they give together, factors by name."""
    shapes = [(12, 9), (7,), (9, 20)]
    whole = group_of(shapes)
    inputs = [normal(whole, 2, seed) for seed in range(3)]
    expected = run(mode, inputs, whole)

    def function(transport: Transport) -> list[torch.Tensor]:
        aggregator = PowerSGD(**MODES[mode])
        outputs = []
        for brought in inputs:
            output = brought[transport.rank].clone()
            for name, tensor in zip(whole.names, whole.views(output), strict=True):
                aggregator.aggregate(tensor.view(-1), Group.of([(name, tensor)]), transport)
            aggregator.finish_step(True)
            outputs.append(output)
        return outputs

    for rank, outputs in enumerate(on_ranks(2, function)):
        for output, (together, _) in zip(outputs, expected[rank], strict=True):
            assert largest(output - together) <= 1e-5


# -- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": -3}, "rank=-3"),
        ({"min_saving": -1.0}, "min_saving"),
        ({"min_saving": math.nan}, "min_saving"),
        ({"alternate": True, "warm_start": False}, "warm_start"),
        ({"over": CodedRing()}, "bit for bit"),
    ],
)
def test_bad_settings(settings, message):
    """Settings that cannot work are refused at once, with what to do."""
    with pytest.raises(InputError, match=message):
        PowerSGD(**settings)


def test_bad_buffers_end_the_step_everywhere():
    """A buffer that does not fit its group is an error on every rank; nothing hangs."""

    def function(transport: Transport, bad: torch.Tensor, residual: torch.Tensor | None) -> None:
        good = torch.zeros(GROUP.numel)
        aggregator = PowerSGD()
        if transport.rank == 1:
            aggregator.aggregate(bad, GROUP, transport, residual)
        else:
            aggregator.aggregate(good, GROUP, transport)

    zeros = torch.zeros(GROUP.numel)
    for bad, residual in [
        (zeros[1:], None),
        (zeros.half(), None),
        (zeros.repeat(2)[::2], None),
        (zeros, zeros[1:]),
        (zeros, zeros.double()),
    ]:
        with pytest.raises((InputError, PeerError)):
            on_ranks(2, lambda t, b=bad, r=residual: function(t, b, r))


def test_different_ranks_disagree():
    """Ranks that compress differently notice before data moves."""

    def function(transport: Transport) -> None:
        steps(PowerSGD(rank=1 + transport.rank), transport, GROUP, normal(GROUP, 1))

    with pytest.raises(MismatchError):
        on_ranks(2, function)


def kept_state(mode: str) -> dict[str, Any]:
    def function(transport: Transport) -> dict[str, Any]:
        aggregator = PowerSGD(**MODES[mode])
        steps(aggregator, transport, GROUP, normal(GROUP, 1) * 2)
        return aggregator.state_dict()

    return on_ranks(2, function)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("step"), "another method"),
        (lambda s: s.update(residuals={}), "another method"),
        (lambda s: s.update(step=-1), "step=-1"),
        (lambda s: s.update(step="two"), "step='two'"),
        (lambda s: s["right"].update(x=torch.zeros(5, 9)), "'x'"),
        (lambda s: s["right"].update(x=torch.zeros(9)), "'x'"),
        (lambda s: s["right"].update(x=None), "'x'"),
        (lambda s: s["right"].update(x=torch.full((2, 9), math.nan)), "not finite"),
        (lambda s: s.update(left=s["right"]), "alternate=False"),
        (lambda s: s.update(over={"calls": 3}), "another method"),
    ],
)
def test_bad_state(change, message):
    """A state of something else is refused, and what was there stays."""
    state = kept_state("two-exchanges")
    aggregator = PowerSGD(**MODES["two-exchanges"])
    aggregator.load_state_dict(state)
    change(state)
    with pytest.raises(InputError, match=message):
        aggregator.load_state_dict(state)
    assert str(aggregator.state_dict()) == str(kept_state("two-exchanges"))


@pytest.mark.parametrize(("saved", "loaded"), [*itertools.permutations(MODES, 2)])
def test_state_of_another_mode(saved, loaded):
    """Factors are not taken over by a mode that has no use for them."""
    state = kept_state(saved)
    if saved == "cold":
        return  # nothing but a step number, with which all modes can begin
    with pytest.raises(InputError, match="settings"):
        PowerSGD(**MODES[loaded]).load_state_dict(state)


@pytest.mark.parametrize("shapes", [SHAPES[:-1], [(12, 10), *SHAPES[1:]]])
def test_state_of_another_model(shapes):
    """Names or shapes that the model does not have are an error in the first step."""
    state = kept_state("two-exchanges")
    group = group_of(shapes)

    def function(transport: Transport) -> None:
        aggregator = PowerSGD(**MODES["two-exchanges"])
        aggregator.load_state_dict(state)
        steps(aggregator, transport, group, normal(group, 1))

    with pytest.raises(InputError, match="another model"):
        on_ranks(2, function)


# -- real processes


def train(mode: str, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    try:
        brought = [normal(GROUP, ranks, seed)[transport.rank] for seed in range(3)]
        return steps(PowerSGD(**MODES[mode]), transport, GROUP, brought)
    finally:
        transport.close()


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_processes_agree_with_threads(pool, mode):
    """Gloo processes end with the bits that threads end with."""
    expected = run(mode, [normal(GROUP, pool.size, seed) for seed in range(3)])
    for mine, other in zip(expected, pool.run(train, mode, pool.size), strict=True):
        for one, two in zip(mine, other, strict=True):
            assert all(map(torch.equal, one, two))

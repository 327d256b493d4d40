"""What is measured: every pair, sizes that fit the budget, the same random order everywhere."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.collectives.base import Cost
from taciturn.probe.calls import gradient_group
from taciturn.probe.steps import METHOD_ELEMS, SHARE_OF_A_SWEEP, Pace, own_sizes, pairings, sweep

COSTS = {
    "ring": {n: Cost(6, 7, 6 * n, 0) for n in METHOD_ELEMS},
    "backend": dict.fromkeys(METHOD_ELEMS),
}


@given(st.integers(2, 40))
def test_pairings_are_all_pairs_once(ranks: int) -> None:
    """Law: each ordered pair is in one group, and no rank is twice in a group."""
    groups = pairings(ranks)
    pairs = Counter(pair for group in groups for pair in group)
    assert pairs == Counter((a, b) for a in range(ranks) for b in range(ranks) if a != b)
    for group in groups:
        taking_part = [rank for pair in group for rank in pair]
        assert len(set(taking_part)) == len(taking_part)
    assert max(map(len, groups)) == (1 if ranks <= 8 else ranks // 2)


@given(
    st.integers(2, 16),
    st.floats(1e-5, 1e-2),
    st.sampled_from([1e-11, 1.67e-7, 4.2e-8, 8.4e-9, 1e-10]),
    st.integers(0, 99),
)
def test_a_sweep_can_be_fitted(ranks: int, alpha: float, beta: float, seed: int) -> None:
    """On any link each curve has four sizes at least; both orders hold the same steps."""
    plan = sweep(ranks, Pace(alpha, beta, 1e-3, 2.0), 60.0, ("fp32", "bf16"), COSTS)
    sizes: dict[tuple[str, str], set[int]] = {}
    for step, seconds in plan.steps:
        assert seconds > 0
        sizes.setdefault((step.kind, step.what), set()).add(step.size)
    for curve in (("one_way", ""), ("round", ""), ("all_reduce", "fp32"), ("all_reduce", "bf16")):
        assert len(sizes[curve]) >= 4
    for method in COSTS:
        assert len(sizes["method", method]) == 3
    (beside,) = sizes["beside", ""]
    assert beside in sizes["round", ""]
    first, second = plan.shuffled(2 * seed), plan.shuffled(2 * seed + 1)
    assert first == plan.shuffled(2 * seed)
    assert first != second
    assert Counter(first) == Counter(second) == Counter(plan.steps)
    assert max(Counter(plan.once.steps).values()) == 1


@pytest.mark.parametrize("own", [[1_000_000], [6_600_000, 700_000, 6_700_000], [500]])
def test_methods_are_timed_on_a_models_own_groups(own: list[int]) -> None:
    """All of them on the same; or none, where that takes far more than three sizes do."""
    sizes = own_sizes(own)
    assert {min(own), max(own)} <= set(sizes)
    assert 2 <= len(sizes) <= 4
    costs = {
        m: of | {n: of[1 << 20] and Cost(6, 7, 6 * n, 0) for n in own} for m, of in COSTS.items()
    }
    for rate, fits in ((1e9, True), (1e6, max(own) <= 1_000_000)):
        plan = sweep(4, Pace(1e-4, 8 / rate, 1e-4, 1.0), 60.0, ("fp32",), costs, own)
        timed = {
            m: sorted({s.size for s, _ in plan.steps if s.kind == "method" and s.what == m})
            for m in costs
        }
        assert all((some == sizes) == fits for some in timed.values()), timed
    assert own_sizes([]) == []


def test_a_models_own_group_has_its_shapes() -> None:
    """Low-rank methods are timed on the matrices that they will meet."""
    shapes = ((300, 200), (200,), (7, 7))
    group = gradient_group(60249, (shapes, ((5,),)))
    assert group.numel == 60249
    assert group.shapes == shapes
    assert gradient_group(60250, (shapes,)).numel == 60250


@pytest.mark.parametrize("rate", [50e6, 200e6, 1e9, 10e9])
def test_a_sweep_fits_the_budget(rate: float) -> None:
    """From 50 Mbit/s on, two sweeps of four ranks take about as long as is given for them."""
    beta = 8 / rate
    plan = sweep(4, Pace(1e-3, beta, 1e-3, 2.0), 60.0, ("fp32", "bf16"), COSTS)
    assert plan.seconds <= 60 * SHARE_OF_A_SWEEP * 1.3
    more = sweep(4, Pace(1e-3, beta, 1e-3, 2.0), 240.0, ("fp32", "bf16"), COSTS)
    assert more.largest_bytes >= plan.largest_bytes
    assert more.seconds >= plan.seconds


def test_slower_links_get_smaller_sizes() -> None:
    """At 200 Mbit/s all_reduce goes up to 64 MiB, at a tenth of that not."""

    def largest(rate: float) -> int:
        plan = sweep(4, Pace(1e-3, 8 / rate, 1e-3, 1.0), 60.0, ("fp32",), {})
        return max(step.size for step, _ in plan.steps if step.kind == "all_reduce")

    assert largest(200e6) == 64 << 20
    assert largest(20e6) < 64 << 20


def test_methods_that_send_little_go_further() -> None:
    """Each method's largest size is its own; of all the small ones are the same, and repeated."""
    costs = COSTS | {"few bytes": {n: Cost(6, 7, n // 100, 0) for n in METHOD_ELEMS}}
    plan = sweep(4, Pace(1e-4, 8 / 50e6, 1e-4, 1.0), 60.0, ("fp32",), costs)
    sizes = {
        method: sorted({step.size for step, _ in plan.steps if step.what == method})
        for method in costs
    }
    assert sizes["few bytes"][-1] > sizes["ring"][-1]
    assert len({tuple(some[:1]) for some in sizes.values()}) == 1
    repeats = Counter(step for step, _ in plan.steps if step.what == "few bytes")
    assert [repeats[step] for step in sorted(repeats)] == sorted(repeats.values(), reverse=True)
    assert max(repeats.values()) > 5


@given(st.integers(1, 3 << 20))
def test_a_group_has_all_elements(elems: int) -> None:
    """The tensors of a group have exactly the elements that were asked for."""
    assert gradient_group(elems).numel == elems

"""Every method sees the same examples: the order is the seed's alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from taciturn.compare.order import ExampleHash, ids_of_step


@given(
    examples=st.integers(1, 60),
    batch=st.integers(1, 60),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 3),
)
def test_an_epoch_sees_each_example_once(examples: int, batch: int, seed: int, epochs: int) -> None:
    """Whatever the batch, the k-th run of as many positions as examples is a permutation."""
    steps = -(-epochs * examples // batch)
    order = torch.cat([ids_of_step(seed, s, examples, batch) for s in range(steps)])
    for epoch in range(epochs):
        part = order[epoch * examples : (epoch + 1) * examples]
        assert sorted(part.tolist()) == list(range(examples))


def test_seeds_and_epochs_differ() -> None:
    """Neither another seed nor the next epoch repeats an order."""
    orders = [ids_of_step(seed, step, 1000, 1000).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_hash_tells_order_and_examples() -> None:
    """Left out, added or exchanged examples have another hash, and the count says how many."""

    def of(*batches: list[int]) -> tuple[str, int, int]:
        seen = ExampleHash()
        for ids in batches:
            seen.add(torch.tensor(ids), 10 * len(ids))
        return seen.hexdigest(), seen.examples, seen.tokens

    whole = of([1, 2], [3, 4])
    assert whole == of([1, 2], [3, 4])
    assert whole[1:] == (4, 40)
    others = [of([1, 2]), of([1, 2], [3, 5]), of([3, 4], [1, 2]), of([1, 2], [3, 4], [3, 4])]
    assert len({whole[0], *(h for h, *_ in others)}) == 5

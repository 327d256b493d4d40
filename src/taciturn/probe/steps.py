"""What a probe measures, step by step, within a budget of time.

A sweep is a list of steps in random order; a probe makes two, each in an order of its own, so that
what changes meanwhile shows as drift and not as a curve. How large sizes may be follows from the
budget and from what the link did in a few calls before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from taciturn.collectives.base import Cost

__all__ = [
    "ITEM_BYTES",
    "PING_BYTES",
    "Pace",
    "Priced",
    "Step",
    "Sweep",
    "own_sizes",
    "pairings",
    "sweep",
]

Pair = tuple[int, int]
Priced = tuple["Step", float]

ITEM_BYTES = 4
"""Of the fp32 elements that methods average."""
PING_BYTES = 8
SMALLEST_BYTES = 4096
LARGEST_BYTES = 64 << 20
LARGEST_MESSAGE_BYTES = 16 << 20  # of one rank to another; slopes are known by then
LARGEST_PAIR_BYTES = 1 << 20  # of each pair of the matrix
SMALLEST_PAIR_BYTES = 1 << 16
LEAST_SIZES = 5  # what a line and a look at its residual take
METHOD_ELEMS = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)
METHOD_SIZES = 3
OWN_MORE = 1.5  # times what three sizes take: a model's own groups may take that
BESIDE_S = 0.1  # of an exchange beside which matrices are multiplied: many times one product
PAIRS_ALONE = 8  # ranks up to which each pair of the matrix has the machine to itself
REPEATS = ((0.005, 25), (0.015, 11), (0.05, 7), (0.4, 3))  # of a step of less
METHOD_REPEATS = ((0.015, 12), (0.05, 5), (0.15, 3), (0.4, 2))  # likewise, of a method's call
BURST_S = 0.005  # of computing before a method's call
LOCAL_S_PER_ELEM = 1.5e-8  # rough; coding and copying of a method with a core to itself
SHARE_OF_A_SWEEP = 0.45  # of the budget; the rest is for warming up and the first look
SHARES = {
    "one_way": 0.06,
    "round": 0.08,
    "pair": 0.08,
    "duplex": 0.02,
    "fp32": 0.38,
    "bf16": 0.22,
    "method": 0.60,  # on slow links the smallest sizes take more; on fast ones others take less
}


class Step(NamedTuple):
    """One timed call, the same on every rank.

    ``one_way``, ``pair``, ``crowd``: each sender of ``pairs`` sends ``size`` bytes and gets a few
    back; ``duplex``: both of a pair send. ``round``: each rank sends to its successor. ``add``: no
    message, adding as much. ``matmul``: no message, multiplying matrices; ``beside``: a round and
    that. ``all_reduce``: the backend's own, ``what`` is the dtype. ``method``: the average by
    ``what``; ``size`` counts elements.
    """

    kind: str
    size: int
    what: str = ""
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Pace:
    """What the link did in a few calls: rough, and only for choosing sizes.

    Attributes:
        alpha_s: of a round of small messages.
        beta_s_per_byte: of a round of larger ones.
        barrier_s: between steps.
        crowding: ranks per core of a host, at least 1.
    """

    alpha_s: float
    beta_s_per_byte: float
    barrier_s: float
    crowding: float

    def message_s(self, size_bytes: int) -> float:
        """Seconds of one message, or of a round."""
        return self.alpha_s + size_bytes * self.beta_s_per_byte

    @property
    def telling_bytes(self) -> int:
        """A size whose bytes take far longer than latency: there a slope shows beside noise."""
        return int(16 * self.alpha_s / self.beta_s_per_byte)

    def all_reduce_s(self, size_bytes: int, ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (N - 1) messages of a Nth each."""
        return 2 * (ranks - 1) * self.message_s(-(-size_bytes // ranks))


class Sweep(NamedTuple):
    """Steps in the order of their kinds, repeats included, with their rough seconds."""

    steps: tuple[Priced, ...]

    @property
    def seconds(self) -> float:
        """Rough duration."""
        return sum(seconds for _, seconds in self.steps)

    @property
    def largest_bytes(self) -> int:
        """Of any buffer."""
        return max(
            step.size * (ITEM_BYTES if step.kind == "method" else 1) for step, _ in self.steps
        )

    @property
    def largest_elems(self) -> int:
        """That a method averages."""
        return max((step.size for step, _ in self.steps if step.kind == "method"), default=0)

    @property
    def once(self) -> Sweep:
        """The same without repeats."""
        return Sweep(tuple(dict.fromkeys(self.steps)))

    def shuffled(self, seed: int) -> list[Priced]:
        """The steps in random order, the same on every rank."""
        steps = list(self.steps)
        random.Random(seed).shuffle(steps)
        return steps


def _repeats_of(seconds: float, share_s: float) -> int:
    """How often a step is repeated in a sweep: what is short is cheap, and noisy.

    Args:
        seconds: of the step.
        share_s: that all repeats may take together; two are made in any case of what is short.
    """
    often = next((repeats for below_s, repeats in REPEATS if seconds < below_s), 1)
    return min(often, max(2, int(share_s / seconds)))


def _ladder(largest: int, step: int = 2) -> list[int]:
    """Sizes from the smallest to the largest, each ``step`` times the one before."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * step <= largest:
        sizes.append(sizes[-1] * step)
    return sizes


def _sizes(
    largest: int, price: Callable[[int], float], telling: int, budget_s: float
) -> dict[int, int]:
    """Sizes of a curve with their repeats, within the budget if that is possible.

    Reaches ``telling`` bytes, where the bandwidth shows, whatever the budget; where the budget is
    short, with larger steps and fewer repeats.
    """
    telling = min(telling, largest // 4)
    for step in (2, 4, 8):
        sizes = _ladder(largest, step)
        chosen: dict[int, int] = {}
        spent = 0.0
        for size in sizes:
            repeats = _repeats_of(price(size), budget_s / len(sizes))
            spent += repeats * price(size)
            reached = len(chosen) >= LEAST_SIZES and max(chosen) >= telling
            if spent > budget_s and (reached or step < 8):
                break
            chosen[size] = repeats
        if len(chosen) >= LEAST_SIZES and max(chosen) >= telling:
            return chosen
    return chosen


def pairings(ranks: int) -> list[tuple[Pair, ...]]:
    """All ordered pairs, in groups that exchange at once.

    Each alone for few ranks; disjoint ones together for many, as in a round-robin tournament.

    Law (``test_pairings_are_all_pairs_once``): each ordered pair is in one group, and no rank is
    twice in a group.
    """
    if ranks <= PAIRS_ALONE:
        return [((a, b),) for a in range(ranks) for b in range(ranks) if a != b]
    seats: list[int | None] = [*range(ranks), *([None] * (ranks % 2))]
    groups = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = [
            (a, b)
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        groups += [tuple(met), tuple((b, a) for a, b in met)]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return groups


def sweep(
    ranks: int,
    pace: Pace,
    budget_s: float,
    dtypes: Sequence[str],
    costs: Mapping[str, Mapping[int, Cost | None]],
    own: Sequence[int] = (),
) -> Sweep:
    """The steps of one sweep.

    Args:
        ranks: two or more.
        pace: of the link.
        budget_s: of the whole probe, two sweeps.
        dtypes: that the backend sums, of ``fp32`` and ``bf16``.
        costs: for each method and number of elements what a call costs the busiest rank; None where
            the backend's own all_reduce is used.
        own: numbers of elements that a model exchanges at once, in ``costs`` too; methods are
            timed at these, if all of them can be within the budget.
    """
    share = {kind: budget_s * SHARE_OF_A_SWEEP * part for kind, part in SHARES.items()}
    steps: list[Priced] = []

    def add(step: Step, seconds: float, repeats: int) -> None:
        steps.extend([(step, seconds + 2 * pace.barrier_s)] * repeats)

    def message_s(size: int) -> float:
        return pace.message_s(size) + 2 * pace.barrier_s

    ring = [((r, (r + 1) % ranks),) for r in range(ranks)]
    one_way = _sizes(LARGEST_MESSAGE_BYTES, message_s, pace.telling_bytes, share["one_way"])
    for i, (size, repeats) in enumerate(one_way.items()):
        for repeat in range(repeats):  # round the ring: each repeat is another pair's
            add(Step("one_way", size, "", ring[(i + repeat) % ranks]), pace.message_s(size), 1)
    rounds = _sizes(LARGEST_MESSAGE_BYTES, message_s, pace.telling_bytes, share["round"])
    for size, repeats in rounds.items():
        add(Step("round", size), pace.message_s(size), repeats)

    sizes = list(one_way)
    large = max([n for n in sizes if 6 * pace.message_s(n) <= share["duplex"]], default=sizes[-2])
    for repeat in range(3):
        add(Step("duplex", large, "", ring[repeat % ranks]), 2 * pace.message_s(large), 1)

    groups = pairings(ranks)
    size = LARGEST_PAIR_BYTES
    while len(groups) * 2 * pace.message_s(size) > share["pair"] and size > SMALLEST_PAIR_BYTES:
        size //= 2
    for group in groups:
        add(Step("pair", PING_BYTES, "", group), pace.alpha_s, 3)
        add(Step("pair", size, "", group), pace.message_s(size), 2)
    for k in sorted({1, 2, ranks // 4, ranks // 2}):
        if 1 <= k <= ranks // 2:
            step = Step("crowd", size, "", tuple((2 * i, 2 * i + 1) for i in range(k)))
            add(step, pace.message_s(size), 3)

    for size in list(rounds)[-4:]:
        add(Step("add", size), size * 1e-9 * pace.crowding, 3)
    size = min(rounds, key=lambda one: abs(pace.message_s(one) - BESIDE_S))
    add(Step("beside", size), pace.message_s(size), 3)
    add(Step("round", size), pace.message_s(size), 2)
    add(Step("matmul", 0), BESIDE_S, 3)

    def all_reduce_s(size: int) -> float:
        return pace.all_reduce_s(size, ranks) + 2 * pace.barrier_s

    for dtype in dtypes:
        telling = ranks * pace.telling_bytes
        for size, repeats in _sizes(LARGEST_BYTES, all_reduce_s, telling, share[dtype]).items():
            add(Step("all_reduce", size, dtype), pace.all_reduce_s(size, ranks), repeats)
    return Sweep(tuple(steps + _method_steps(ranks, pace, share["method"], costs, own)))


def _method_steps(
    ranks: int,
    pace: Pace,
    budget_s: float,
    costs: Mapping[str, Mapping[int, Cost | None]],
    own: Sequence[int],
) -> list[Priced]:
    """Of each method the model's own sizes, or the largest that its part of the budget allows.

    And smaller ones: all methods at the same of a model, so that they can be told apart there.
    """

    def seconds(method: str, elems: int) -> float:
        cost = costs[method][elems]
        link = (
            pace.all_reduce_s(elems * ITEM_BYTES, ranks)
            if cost is None
            else cost.rounds * pace.alpha_s + cost.sent_bytes * pace.beta_s_per_byte
        )
        local_s = BURST_S + elems * LOCAL_S_PER_ELEM
        return link + local_s * pace.crowding + 2 * pace.barrier_s

    def repeats(one: float) -> int:
        return next((often for below_s, often in METHOD_REPEATS if one < below_s), 1)

    def within(method: str) -> dict[int, float]:
        """Seconds at three sizes, the largest that the method's part of the budget allows."""
        sizes = list(METHOD_ELEMS)
        while True:
            prices = {n: seconds(method, n) for n in _spread(sizes)}
            whole = sum(repeats(one) * one for one in prices.values())
            if len(sizes) == METHOD_SIZES or whole <= budget_s / len(costs):
                return prices
            sizes.pop()

    chosen = {method: within(method) for method in costs}
    known = {method: {n: seconds(method, n) for n in own_sizes(own)} for method in costs}
    # Three sizes are timed in any case: what takes not much more than these can be had too.
    once_s, own_s = (sum(sum(one.values()) for one in of.values()) for of in (chosen, known))
    if own_s and own_s <= max(budget_s, OWN_MORE * once_s):
        chosen = known
    return [
        priced
        for method, prices in chosen.items()
        for elems, one in prices.items()
        for priced in [(Step("method", elems, method), one)] * repeats(one)
    ]


def own_sizes(own: Sequence[int]) -> list[int]:
    """Sizes at which methods are timed for a model with groups of these; ascending.

    Its smallest and its largest group, and one or two that take next to no time.
    """
    if not own:
        return []
    least, most = min(own), max(own)
    quick = [n for n in METHOD_ELEMS[:2] if 2 * n <= least] or METHOD_ELEMS[:1]
    return sorted({*quick, least, most})


def _spread(sizes: Sequence[int]) -> list[int]:
    """The first, the middle and the last."""
    return [sizes[0], sizes[len(sizes) // 2], sizes[-1]]

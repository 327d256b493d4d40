"""A link that is made up: what ranks would have timed on it, and what is then known to be true."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from taciturn.collectives.base import Cost
from taciturn.link import Link
from taciturn.probe.calls import Sample
from taciturn.probe.steps import ITEM_BYTES, METHOD_ELEMS, Pace, Pair, Step, sweep
from taciturn.probe.summary import Conditions, Taken, summarise

FIXED_S = 2e-3
PER_ELEM_S = 5e-9


@dataclass
class MadeUp:
    """What is true of it. Latency and slope are of every pair, unless a factor says otherwise."""

    ranks: int = 4
    hosts: int = 1
    alpha_s: float = 1e-3
    beta_s_per_byte: float = 4.2e-8
    half_duplex: bool = False
    noise: float = 0.02
    slower: Mapping[Pair, float] = field(default_factory=dict)
    later: Mapping[Pair, float] = field(default_factory=dict)
    computing: Mapping[int, float] = field(default_factory=dict)
    skew_s: float = 0.0
    second_sweep: float = 1.0
    rate_bits_per_s: int | None = None
    methods: bool = True

    def message_s(self, pair: Pair, size: int) -> float:
        latency = self.alpha_s * self.later.get(pair, 1.0)
        return latency + size * self.beta_s_per_byte * self.slower.get(pair, 1.0)

    def round_s(self, size: int) -> float:
        slowest = max(self.message_s((r, (r + 1) % self.ranks), size) for r in range(self.ranks))
        return slowest * (2 if self.half_duplex else 1)

    def link(self, seed: int = 0) -> Link:
        """What a probe would find."""
        random_ = random.Random(seed)
        sent = {n: ITEM_BYTES * n // self.ranks for n in METHOD_ELEMS}
        rounds = 2 * (self.ranks - 1)
        costs = {"ring": {n: Cost(rounds, rounds, rounds * sent[n], 0) for n in METHOD_ELEMS}}
        costs["backend"] = dict.fromkeys(METHOD_ELEMS)  # type: ignore[arg-type]
        pace = Pace(self.alpha_s, max(self.beta_s_per_byte, 1e-11), 1e-3, 1.0)
        plan = sweep(self.ranks, pace, 60.0, ("fp32", "bf16"), costs if self.methods else {})
        clocks = [random_.uniform(0, 1e4) * (self.hosts > 1) for _ in range(self.ranks)]
        sweeps = [
            [Taken(step, self._samples(step, slow, clocks, random_)) for step, _ in order]
            for slow, order in (
                (1.0, plan.shuffled(0)),
                (self.second_sweep, plan.shuffled(1)),
            )
        ]
        conditions = Conditions(
            self.ranks, self.hosts, "gloo", "cpu", 2, self.rate_bits_per_s, "2026-01-01", 60.0
        )
        return summarise(conditions, sweeps)

    def _samples(
        self, step: Step, slow: float, clocks: list[float], random_: random.Random
    ) -> tuple[Sample | None, ...]:
        """Ranks arrive at random within the skew, and end together ``seconds`` after the last."""
        error = slow * (1 + self.noise * random_.gauss(0, 1))
        if step.kind in ("one_way", "pair", "crowd"):
            found: list[Sample | None] = [None] * self.ranks
            for pair in step.pairs:
                answer = self.message_s((pair[1], pair[0]), 0)
                found[pair[0]] = Sample(0.0, error * (self.message_s(pair, step.size) + answer))
            return tuple(found)
        taking_part = step.pairs[0] if step.kind == "duplex" else tuple(range(self.ranks))
        arrivals = [random_.uniform(0, self.skew_s) for _ in range(self.ranks)]
        last = max(arrivals[rank] for rank in taking_part)
        rounds = 2 * (self.ranks - 1)
        part = -(-step.size // self.ranks)
        found = [None] * self.ranks
        for rank in taking_part:
            own, more = self.computing.get(rank, 1.0), {}
            if step.kind == "duplex":
                pair = step.pairs[0]
                seconds = max(self.message_s(p, step.size) for p in (pair, pair[::-1]))
                seconds *= 2 if self.half_duplex else 1
            elif step.kind == "round":
                seconds = self.round_s(step.size)
            elif step.kind == "beside":
                seconds, more = 1.5 * self.round_s(step.size), {"matmul_s": 1.2e-3 * own}
            elif step.kind == "all_reduce":
                seconds = rounds * self.round_s(part)
            elif step.kind == "method":
                bytes_ = ITEM_BYTES * step.size // self.ranks
                seconds = rounds * self.round_s(bytes_) + FIXED_S + PER_ELEM_S * step.size
                more = {"codec_s": PER_ELEM_S * step.size / 2, "waiting_s": seconds / 2}
                if step.what == "ring":
                    more |= {"rounds": rounds, "sent_bytes": rounds * bytes_}
            else:  # alone: who comes late ends late
                seconds = own * (1e-10 * step.size if step.kind == "add" else 4e-2)
                more = {"matmul_s": 1e-3 * own} if step.kind == "matmul" else {}
                begin = clocks[rank] + arrivals[rank]
                found[rank] = Sample(begin, begin + error * seconds, **more)  # type: ignore[arg-type]
                continue
            found[rank] = Sample(
                clocks[rank] + arrivals[rank],
                clocks[rank] + last + error * seconds,
                **more,  # type: ignore[arg-type]
            )
        return tuple(found)

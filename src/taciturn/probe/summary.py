"""From what all ranks timed to one link. Pure functions; no clock and no network here.

What takes all ranks is counted from the last arrival: entry skew is no part of it. On one host all
ranks read one clock, so that is the last end less the last start. On several hosts clocks differ,
and it is the least of the ranks' own durations: who came last waited for nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from taciturn import methods
from taciturn.errors import InputError
from taciturn.link import Contention, Estimate, Fit, Link, MethodSpeed
from taciturn.probe.calls import Sample
from taciturn.probe.fit import estimate_of, fit_curve, fit_line
from taciturn.probe.steps import ITEM_BYTES, PING_BYTES, Pair, Step
from taciturn.testbed import TCP_GOODPUT
from taciturn.units import format_rate, format_size

__all__ = [
    "Conditions",
    "Pairs",
    "Taken",
    "pairs_of",
    "seconds_of",
    "slow_computing",
    "slow_ones",
    "summarise",
]

SLOW = 0.5  # of the median bandwidth: less is called slow
SLOW_COMPUTE = 3.0  # times the other ranks' median: more is called slow
FAR = 5.0  # times the median latency, likewise
DRIFT_WARNS = 0.1
ERROR_WARNS = 0.1
GOODPUT_WARNS = 0.1
_WIRES = {"bf16": ("bf16", 2), "fp16": ("bf16", 2)}  # dtype whose curve stands for it, item bytes


class Taken(NamedTuple):
    """One step with the samples of all ranks, None for those that had no part in it."""

    step: Step
    samples: tuple[Sample | None, ...]


@dataclass(frozen=True)
class Conditions:
    """What is known beside the samples; see :class:`taciturn.link.Link`."""

    ranks: int
    hosts: int
    backend: str
    device: str
    cores: int
    rate_bits_per_s: int | None
    probed_at: str
    seconds: float


def seconds_of(taken: Taken, one_clock: bool) -> float:
    """Seconds of a step that several ranks take together, from the last arrival on."""
    samples = [sample for sample in taken.samples if sample is not None]
    if one_clock:
        return max(s.end_s for s in samples) - max(s.start_s for s in samples)
    return min(sample.seconds for sample in samples)


class _Times:
    """Seconds by what was measured; within each sweep, and of both together."""

    def __init__(self, sweeps: Sequence[Sequence[Taken]], one_clock: bool) -> None:
        self.taken: dict[Step, list[list[Taken]]] = defaultdict(lambda: [[] for _ in sweeps])
        for number, sweep in enumerate(sweeps):
            for taken in sweep:
                self.taken[taken.step][number].append(taken)
        self.one_clock = one_clock

    def steps(self, kind: str, what: str = "") -> list[Step]:
        """Distinct steps, ascending in size."""
        found = [step for step in self.taken if step.kind == kind and step.what == what]
        return sorted(found, key=lambda step: (step.size, step.pairs))

    def whats(self, kind: str) -> list[str]:
        """Of all steps of a kind, sorted."""
        return sorted({step.what for step in self.taken if step.kind == kind})

    def all_of(self, step: Step) -> list[Taken]:
        """Every call of a step."""
        return [taken for some in self.taken[step] for taken in some]

    def together(self, step: Step) -> list[float]:
        """Seconds of every call of a step that several ranks take together."""
        return [seconds_of(taken, self.one_clock) for taken in self.all_of(step)]

    def by_pair(self, kind: str) -> dict[Pair, dict[int, list[float]]]:
        """Seconds of every message there and back, by pair and size."""
        found: dict[Pair, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step in self.steps(kind):
            for taken in self.all_of(step):
                for sender, receiver in step.pairs:
                    sample = taken.samples[sender]
                    assert sample is not None
                    found[sender, receiver][step.size].append(sample.seconds)
        return found

    def drift(self) -> float:
        """Median relative difference between the sweeps, over all that both measured."""
        changes = []
        for sweeps in self.taken.values():
            both = [[_any_seconds(taken, self.one_clock) for taken in some] for some in sweeps]
            if all(both):
                first, *others = (median(some) for some in both)
                changes += [abs(other / first - 1) for other in others]
        return median(changes) if changes else 0.0


def _any_seconds(taken: Taken, one_clock: bool) -> float:
    if taken.step.kind in ("one_way", "pair", "crowd"):
        return median(sample.seconds for sample in taken.samples if sample is not None)
    return seconds_of(taken, one_clock)


# ------------------------------------------------------------------------------------------ pairs


class Pairs(NamedTuple):
    """The matrix of pairs; ``[sender][receiver]``, None on the diagonal."""

    bytes_per_s: list[list[float | None]]
    latency_s: list[list[float | None]]


def pairs_of(ranks: int, seconds: Mapping[Pair, Mapping[int, Sequence[float]]]) -> Pairs:
    """Bandwidth and latency of each pair, from messages there with a short answer.

    The fastest of a few: what delays a message is not its link's, and would look like a slow one.

    Args:
        ranks: how many.
        seconds: by pair and size, answer included; the smallest size is a ping.
    """
    speeds: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
    latencies: list[list[float | None]] = [[None] * ranks for _ in range(ranks)]
    found = Pairs(speeds, latencies)
    for (sender, receiver), by_size in seconds.items():
        small, large = min(by_size), max(by_size)
        round_trip_s = min(by_size[small])
        found.latency_s[sender][receiver] = round_trip_s / 2
        if large > small:
            whole = min(by_size[large])
            # What is far from its latency is its own bytes' time; what is not, is bounded by all.
            own = whole - round_trip_s if whole > 2 * round_trip_s else whole
            found.bytes_per_s[sender][receiver] = large / own
    return found


def slow_ones(
    pairs: Sequence[Sequence[float | None]], slow: Callable[[float, float], bool]
) -> tuple[int | None, list[Pair]]:
    """The rank that is slow whomever it talks to, and pairs that are slow for no such reason.

    Args:
        pairs: one number for each pair.
        slow: whether a number is slow, beside the median of the others.

    With two ranks neither is told apart from their link; the slower direction is then a slow link.
    """
    ranks = len(pairs)
    known = {(a, b): value for a, row in enumerate(pairs) for b, value in enumerate(row) if value}
    suspects = []
    for rank in range(ranks if ranks > 2 else 0):
        own = [value for pair, value in known.items() if rank in pair]
        others = [value for pair, value in known.items() if rank not in pair]
        if own and others and slow(median(own), median(others)):
            suspects.append((median(own), rank))
    worst = min if slow(0.0, 1.0) else max
    slowest = worst(suspects)[1] if suspects else None
    links = []
    for pair, value in known.items():
        rest = [v for other, v in known.items() if other != pair and slowest not in other]
        if slowest not in pair and rest and slow(value, median(rest)):
            links.append(pair)
    return slowest, sorted(links)


def slow_computing(seconds: Sequence[Sequence[float]]) -> int | None:
    """The rank whose own work takes far longer than the others'; None if none does.

    Args:
        seconds: by call and rank.
    """
    shares = [[one / median(each) for one in each] for each in seconds]
    by_rank = [median(each) for each in zip(*shares, strict=True)] if shares else []
    for rank, own in enumerate(by_rank):
        others = by_rank[:rank] + by_rank[rank + 1 :]
        if others and own > SLOW_COMPUTE * median(others) and own == max(by_rank):
            return rank
    return None


# ----------------------------------------------------------------------------------------- curves


def _curve(times: _Times, kind: str, what: str = "") -> Fit:
    samples: dict[int, list[float]] = defaultdict(list)
    for step in times.steps(kind, what):
        samples[step.size] += times.together(step)
    name = f"{what} {kind}".strip().replace("_", " ")
    return fit_curve(sorted(samples), [samples[size] for size in sorted(samples)], name)


def _one_way(times: _Times, pings: Mapping[Pair, float], odd: Callable[[Pair], bool]) -> Fit:
    """A message alone: the time there and back less that of the answer, a ping's half.

    Pairs that are ``odd`` are left out, unless most are: a curve of two kinds of links would be
    neither's.
    """
    whole: dict[int, list[float]] = defaultdict(list)
    ordinary: dict[int, list[float]] = defaultdict(list)
    for pair, by_size in times.by_pair("one_way").items():
        for size, seconds in by_size.items():
            own = [max(one - pings[pair], one / 2) for one in seconds]
            whole[size] += own
            if not odd(pair):
                ordinary[size] += own
    samples = ordinary if 2 * len(ordinary) > len(whole) else whole
    return fit_curve(sorted(samples), [samples[size] for size in sorted(samples)], "one message")


def _method(times: _Times, text: str, both_ways: Fit, all_reduce: Mapping[str, Fit]) -> MethodSpeed:
    steps = times.steps("method", text)
    seconds = [times.together(step) for step in steps]
    busiest = [  # of each call, the sample of the rank that coded longest
        [
            max((s for s in taken.samples if s is not None), key=_codec_s)
            for taken in times.all_of(step)
        ]
        for step in steps
    ]
    elems = [step.size for step in steps]
    rounds = tuple(int(median(s.rounds for s in some)) for some in busiest)
    sent = tuple(int(median(s.sent_bytes for s in some)) for some in busiest)
    counted = any(rounds)
    if counted:
        link = [r * both_ways.seconds_at(b / r) for r, b in zip(rounds, sent, strict=True)]
    else:
        link = [_backend_s(text, n, all_reduce) for n in elems]
    fixed, per_elem = fit_line(elems, seconds, link)
    return MethodSpeed(
        method=text,
        elems=tuple(elems),
        seconds=tuple(median(some) for some in seconds),
        codec_s=tuple(median(s.codec_s for s in some) for some in busiest),
        waiting_s=tuple(median(s.waiting_s for s in some) for some in busiest),
        rounds=rounds if counted else None,
        sent_bytes=sent if counted else None,
        link_s=tuple(link),
        local_fixed_s=fixed,
        local_s_per_elem=per_elem,
    )


def _codec_s(sample: Sample) -> float:
    return sample.codec_s


def _backend_s(text: str, elems: int, all_reduce: Mapping[str, Fit]) -> float:
    """What the backend's own curve gives for so many elements; bf16 stands for fp16 too.

    0 for other methods over the backend, whose exchanges have other sizes that nobody counts.
    """
    method = methods.parse(text)
    if method.name not in ("backend", "cast"):
        return 0.0
    default = "bf16" if method.name == "cast" else "fp32"
    dtype, item = _WIRES.get(str(method.options.get("wire", default)), ("fp32", ITEM_BYTES))
    if dtype not in all_reduce:
        dtype, item = "fp32", ITEM_BYTES
    return all_reduce[dtype].seconds_at(elems * item)


# ------------------------------------------------------------------------------------------- link


def summarise(conditions: Conditions, sweeps: Sequence[Sequence[Taken]]) -> Link:
    """The link that the samples show.

    Args:
        conditions: beside the samples.
        sweeps: of the same steps, each in an order of its own.

    Raises:
        InputError: no link can be told from them; the message says which times are at fault.
    """
    ranks = conditions.ranks
    times = _Times(sweeps, conditions.hosts == 1)
    by_pair = times.by_pair("pair")
    pairs = pairs_of(ranks, by_pair)
    pings = {pair: median(by_size[PING_BYTES]) / 2 for pair, by_size in by_pair.items()}
    slow_rank, slow_links = slow_ones(pairs.bytes_per_s, lambda one, rest: one < SLOW * rest)
    far_rank, far_links = slow_ones(pairs.latency_s, lambda one, rest: one > FAR * rest)
    computing = slow_computing(
        [
            [sample.seconds for sample in taken.samples if sample is not None]
            for step in (*times.steps("matmul"), *times.steps("add")[-1:])
            for taken in times.all_of(step)
        ]
    )
    named = next((one for one in (slow_rank, computing, far_rank) if one is not None), None)
    links = tuple(sorted(p for p in {*slow_links, *far_links} if named not in p))

    def odd(pair: Pair) -> bool:
        return (ranks > 2 and named in pair) or pair in links

    one_way = _one_way(times, pings, odd)
    both_ways = _curve(times, "round")
    exchanges = times.steps("duplex")
    ordinary = [s for s in exchanges if not (odd(s.pairs[0]) or odd(s.pairs[0][::-1]))]
    duplex = [
        one / one_way.seconds_at(step.size)
        for step in ordinary or exchanges
        for one in times.together(step)
    ]
    gamma = [
        sample.seconds / step.size
        for step in times.steps("add")[-2:]
        for taken in times.all_of(step)
        for sample in taken.samples
        if sample is not None
    ]
    all_reduce = {what: _curve(times, "all_reduce", what) for what in times.whats("all_reduce")}
    link_beside, matmul_beside = _beside(times)
    speeds = tuple(_method(times, text, both_ways, all_reduce) for text in times.whats("method"))
    drift = times.drift()
    return Link(
        ranks=ranks,
        hosts=conditions.hosts,
        backend=conditions.backend,
        device=conditions.device,
        cores=conditions.cores,
        rate_bits_per_s=conditions.rate_bits_per_s,
        one_way=one_way,
        both_ways=both_ways,
        duplex_factor=estimate_of(duplex),
        gamma_s_per_byte=estimate_of(gamma),
        pair_bytes_per_s=tuple(map(tuple, pairs.bytes_per_s)),
        pair_latency_s=tuple(map(tuple, pairs.latency_s)),
        slow_rank=named,
        slow_links=links,
        contention=_contention(times, pings),
        link_beside_matmul=link_beside,
        matmul_beside_link=matmul_beside,
        all_reduce=all_reduce,
        methods=speeds,
        probed_at=conditions.probed_at,
        probe_s=conditions.seconds,
        drift=drift,
        warnings=tuple(
            _slow_words(slow_rank, computing, far_rank, links)
            + _warnings(conditions, one_way, both_ways, all_reduce, drift)
        ),
    )


def _contention(times: _Times, pings: Mapping[Pair, float]) -> tuple[Contention, ...]:
    found: dict[int, list[float]] = defaultdict(list)
    for step in times.steps("crowd"):
        for taken in times.all_of(step):
            for pair in step.pairs:
                sample = taken.samples[pair[0]]
                assert sample is not None
                own = max(sample.seconds - 2 * pings.get(pair, 0.0), sample.seconds / 2)
                found[len(step.pairs)].append(step.size / own)
    return tuple(Contention(k, estimate_of(found[k])) for k in sorted(found))


def _beside(times: _Times) -> tuple[Estimate, Estimate]:
    """Slow-down of a round beside products of matrices, and of these beside the round."""
    (beside,) = times.steps("beside")
    (matmul,) = times.steps("matmul")
    quiet = median(times.together(Step("round", beside.size)))
    alone = median(
        sample.matmul_s
        for taken in times.all_of(matmul)
        for sample in taken.samples
        if sample is not None
    )
    both = times.all_of(beside)
    products = [s.matmul_s for taken in both for s in taken.samples if s is not None and s.matmul_s]
    if not products:
        raise InputError(
            "no product of matrices came to its end beside an exchange: the machine is too busy; "
            "probe again"
        )
    return (
        estimate_of([one / quiet for one in times.together(beside)]),
        estimate_of([one / alone for one in products]),
    )


# --------------------------------------------------------------------------------------- warnings


def _slow_words(
    slow_rank: int | None, computing: int | None, far_rank: int | None, links: Sequence[Pair]
) -> list[str]:
    said = []
    if slow_rank is not None:
        said.append(
            f"Rank {slow_rank} has less than half the bandwidth of the others, with whomever it "
            "talks: every exchange waits for it."
        )
    if computing is not None:
        said.append(
            f"Rank {computing} computes more than {SLOW_COMPUTE:g} times as long as the others for "
            "the same work: every exchange waits for it."
        )
    if far_rank is not None and far_rank not in (slow_rank, computing):
        said.append(
            f"Messages of rank {far_rank} take more than {FAR:g} times as long to arrive as the "
            "others'."
        )
    for sender, receiver in links[:5]:
        said.append(f"The link from rank {sender} to rank {receiver} is far slower than the rest.")
    if len(links) > 5:
        said.append(f"So are {len(links) - 5} more.")
    return said


def _warnings(
    conditions: Conditions,
    one_way: Fit,
    both_ways: Fit,
    all_reduce: Mapping[str, Fit],
    drift: float,
) -> list[str]:
    said = []
    if drift > DRIFT_WARNS:
        said.append(
            f"The two sweeps differ by {drift:.0%} in the median: something else used the link or "
            "the cores; probe again when it is quiet."
        )
    curves = {"one message": one_way, "a round both ways": both_ways}
    curves |= {f"all_reduce of {dtype}": fit for dtype, fit in all_reduce.items()}
    for name, fit in curves.items():
        if fit.leave_one_out_error > ERROR_WARNS:
            said.append(
                f"The curve of {name} predicts sizes it has not seen with a median error of "
                f"{fit.leave_one_out_error:.0%}: take what is predicted by it as rough."
            )
    rate = conditions.rate_bits_per_s
    if rate is not None:
        share = one_way.bytes_per_s / (TCP_GOODPUT * rate / 8)
        if abs(share - 1) > GOODPUT_WARNS:
            why = (
                "the machine, and not the link, is the limit."
                if share < 1
                else "no link gives more, so the times were disturbed; probe again when the "
                "machine is quiet."
            )
            said.append(
                f"One message gets {share:.0%} of TCP's goodput at the set rate of "
                f"{format_rate(rate)}: {why}"
            )
    here = -(-conditions.ranks // conditions.hosts)
    if here > conditions.cores and conditions.device == "cpu":
        said.append(
            f"{here} ranks share {conditions.cores} cores: what they compute at once takes longer "
            "here than with cores of their own."
        )
    reached = all_reduce["fp32"].sizes_bytes[-1]
    said.append(f"all_reduce was measured up to {format_size(reached)}; larger is extrapolated.")
    return said

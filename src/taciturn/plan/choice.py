"""The recommendation: a method only where its gain is larger than the predictions may err.

Doing nothing, or sending bf16, is an answer like any other, and the one that needs no proof: what
has to be shown is that a method is faster than the better of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan.candidates import (
    BASELINES,
    Candidate,
    Quality,
    allowed,
    candidates,
    check_quality,
)
from taciturn.plan.exchange import Pricer
from taciturn.plan.model import Model
from taciturn.plan.prediction import Prediction, Predictor, unpriced
from taciturn.plan.quality import Losses, losses_of
from taciturn.plan.timing import Compute
from taciturn.ranges import check_whole
from taciturn.units import format_seconds, format_size

__all__ = ["Crossover", "Plan", "Recommendation", "make_plan", "rate_text"]

MOST_RANKS = 1_000_000
LEAST_GAIN = 0.01
"""Of the step: what gains less is not worth another method."""
MOST_OFF = 10.0
"""Factor between a measurement and its line beyond which a curve is not to be trusted; short calls
on busy machines are off by up to eight."""
SCALES = tuple(10 ** (exponent / 4) for exponent in range(-12, 13))
"""Factors of the link's seconds per byte at which the recommendation is looked at: a thousandth to
a thousand, four to a decade; between two that differ the crossover is searched."""
HALVINGS = 12
"""Of such an interval: the rate is then known to a ten-thousandth."""


@dataclass(frozen=True)
class Crossover:
    """A rate at which the recommendation changes, all else as it was measured.

    Attributes:
        rate_bits_per_s: what arrives, one way, in large messages.
        below: recommended on slower links, to the next crossover.
        above: on faster ones.
    """

    rate_bits_per_s: float
    below: str
    above: str


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Attributes:
        name: of the candidate.
        method: for ``ddp.attach``.
        sentence: what, why, and where it changes.
        gain_s: by which it is faster than the better baseline; 0 for a baseline.
        uncertainty_s: of that gain.
        crossovers: the nearest one on either side.
    """

    name: str
    method: str
    sentence: str
    gain_s: float
    uncertainty_s: float
    crossovers: tuple[Crossover, ...]


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        model: its name.
        elements: that are averaged.
        ranks: that it is for.
        probed_ranks: that measured the link.
        rate_bits_per_s: of the link, as measured: what arrives, one way, in large messages.
        compute: of a step.
        quality: the demand on the average.
        predictions: all candidates, fastest first.
        left_out: candidates that cannot be predicted, with the reason.
        losses: of candidates, from the committed tables.
        recommendation: what to do.
        notes: whole sentences.
    """

    model: str
    elements: int
    ranks: int
    probed_ranks: int
    rate_bits_per_s: float
    compute: Compute
    quality: Quality
    predictions: tuple[Prediction, ...]
    left_out: tuple[tuple[str, str], ...]
    losses: dict[str, Losses]
    recommendation: Recommendation
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        plain = asdict(self)
        for row, one in zip(plain["predictions"], self.predictions, strict=True):
            row["extrapolated"] = one.extrapolated
        return {"format": "taciturn.plan", "version": 1, **plain}


def make_plan(
    model: Model,
    link: Link,
    compute: Compute,
    *,
    ranks: int | None = None,
    quality: str = "every-replica",
    methods: str | None = None,
) -> Plan:
    """Predict every candidate's step and say which to take.

    Args:
        model: what is exchanged.
        link: as probed.
        compute: of a step without exchange.
        ranks: to plan for; those that were probed if None. Others are extrapolated.
        quality: what must be right: "every-replica", "mean", "loss" or "any"; :class:`Candidate`.
        methods: those to weigh, with ``;`` between them; DDP's own are always among them.

    Raises:
        InputError: one rank, or nothing left to weigh.
        MethodError: no such method.
    """
    demand = check_quality(quality)
    ranks = link.ranks if ranks is None else ranks
    hint = "" if ranks > 1 else "one rank has nobody to average with"
    check_whole("ranks", ranks, 2, MOST_RANKS, hint=hint)
    if not link.all_reduce:
        raise InputError("this link has no curve of the backend's all_reduce: probe it again")
    weighed = candidates(methods)
    if methods is not None and not any(allowed(c, demand) for c in weighed if not c.stock):
        asked = "; ".join(c.name for c in weighed if not c.stock)
        raise InputError(
            f"--methods {asked!r} with --quality {demand}: none of them meets that; ask for less "
            "quality (mean, loss, any), or for other methods"
        )
    pricer = Pricer(link, ranks)
    left_out = tuple((c.name, reason) for c in weighed if (reason := unpriced(model, c)))
    known = [c for c in weighed if not unpriced(model, c)]
    predictors = [Predictor(candidate, model, pricer, compute) for candidate in known]
    rows = sorted((p.predict() for p in predictors), key=lambda row: row.step_s.value)
    rate = 8 * link.both_ways.bytes_per_s
    return Plan(
        model=model.name,
        elements=model.numel,
        ranks=ranks,
        probed_ranks=link.ranks,
        rate_bits_per_s=rate,
        compute=compute,
        quality=demand,
        predictions=tuple(rows),
        left_out=left_out,
        losses={c.name: found for c in known if (found := losses_of(c)) is not None},
        recommendation=_Chooser(predictors, demand, rate).recommend(rows),
        notes=(*model.notes, *_notes(link, ranks, compute), *_own_note(model, link)),
    )


def _notes(link: Link, ranks: int, compute: Compute) -> tuple[str, ...]:
    notes = [f"The probe said: {warning}" for warning in link.warnings]
    for what, curve in (("a round both ways", link.both_ways), *link.all_reduce.items()):
        size, factor = curve.farthest()
        if factor > MOST_OFF:
            called = f"all_reduce of {what}" if what in link.all_reduce else what
            notes.append(
                f"What was measured of {called} at {format_size(size)} is off its own line by a "
                f"factor of {factor:.3g}: do not trust this plan; probe again."
            )
    if ranks != link.ranks:
        notes.append(
            f"Extrapolated: the link was measured with {link.ranks} ranks. For {ranks} the closed "
            "forms are used, with hosts like the probed ones, as many ranks on each "
            f"({link.ranks_per_host}); a network that many ranks share may be slower."
        )
    if 2 * link.ranks_per_host > link.cores:
        notes.append(
            f"{link.ranks_per_host} ranks share {link.cores} cores: coding and backward slow each "
            "other, which the step times count."
        )
    if link.backend != "nccl":
        notes.append(
            f"DDP refuses torch's bf16_compress_hook over {link.backend}: its row is of the same "
            "exchange in a hook of one's own; ddp.attach(model, 'cast:wire=bf16') is one."
        )
    if compute.step_s == 0:
        notes.append("No compute is known: every exchange is taken to be waited for in full.")
    return tuple(notes)


def _own_note(model: Model, link: Link) -> tuple[str, ...]:
    """Say that a probe can know a model; of sizes alone it cannot."""
    own = {group.numel for group in model.groups()}
    timed = {numel for speed in link.methods for numel in speed.elems}
    if not model.shapes_known or not timed or own & timed:
        return ()
    return (
        "Methods were not timed on this model's own gradients: taciturn probe --model is surer.",
    )


def _half(predictor: Predictor, error: float, scale: float) -> float:
    """Return by how much a step may be off."""
    low, high = (
        predictor.step_s(scale, max(0.0, 1 + sign * error), roughly=True) for sign in (-1, 1)
    )
    return (high - low) / 2


def _doubt(one: Predictor, other: Predictor, scale: float = 1.0) -> float:
    """Return by how much the difference of two steps may be off.

    What all methods share moves both to the same side.
    """
    shared = _half(one, one.shared_error, scale) - _half(other, other.shared_error, scale)
    own = (_half(p, p.own_error, scale) for p in (one, other))
    return math.hypot(*own, shared)


class _Chooser:
    """What is recommended on the link, and on faster and slower ones."""

    def __init__(self, predictors: Sequence[Predictor], quality: Quality, rate: float) -> None:
        self.baselines = [p for p in predictors if p.candidate.name in BASELINES]
        self.methods = [
            p
            for p in predictors
            if not p.candidate.stock
            and p.candidate.local_steps == 1
            and allowed(p.candidate, quality)
            and all(part.known for part in p.parts)
        ]
        self.quality, self.rate = quality, rate

    def best(self, scale: float = 1.0) -> tuple[Candidate, float, float]:
        """Return who is recommended where bytes take ``scale`` times as long.

        With its gain over the better baseline, and by how much that may be off.
        """

        def seconds(p: Predictor) -> float:
            return p.step_s(scale, roughly=True)

        base = min(self.baselines, key=seconds)
        base_s = seconds(base)
        best, gain, doubt = base.candidate, 0.0, _half(base, base.error, scale)
        for method in self.methods:
            faster_by_s, uncertainty = base_s - seconds(method), _doubt(method, base, scale)
            if faster_by_s > max(gain, uncertainty, LEAST_GAIN * base_s):
                best, gain, doubt = method.candidate, faster_by_s, uncertainty
        return best, gain, doubt

    def crossovers(self) -> tuple[Crossover, ...]:
        """Return the nearest change of the recommendation on a slower link and on a faster one."""
        names = [self.best(scale)[0].name for scale in SCALES]
        middle = SCALES.index(1.0)
        found = []
        for step in (1, -1):
            here = middle
            while 0 <= here + step < len(SCALES):
                there = here + step
                if names[there] != names[here]:
                    found.append(self._between(SCALES[here], SCALES[there], names[here]))
                    break
                here = there
        return tuple(found)

    def _between(self, here: float, there: float, name: str) -> Crossover:
        """Return where ``name``, recommended at one scale, ends to be on the way to another."""
        for _ in range(HALVINGS):
            between = math.sqrt(here * there)
            if self.best(between)[0].name == name:
                here = between
            else:
                there = between
        fast, slow = sorted((here, there))
        scale = math.sqrt(fast * slow)
        return Crossover(self.rate / scale, self.best(slow)[0].name, self.best(fast)[0].name)

    def recommend(self, rows: Sequence[Prediction]) -> Recommendation:
        """Return the recommendation with its sentence."""
        best, gain, doubt = self.best()
        crossovers = self.crossovers()
        by_name = {row.name: row for row in rows}
        chosen = by_name[best.name]
        base = min((by_name[p.candidate.name] for p in self.baselines), key=_step)
        if best.name == base.name:
            what = self._stays(base, rows)
        else:
            what = (
                f"{best.name}: {format_seconds(chosen.step_s.value)} a step against "
                f"{format_seconds(base.step_s.value)} with {base.name}, a gain of "
                f"{format_seconds(gain)} +- {format_seconds(doubt)}, because "
                f"{_share(base.exposed_s, base.step_s.value)} of that step waits for the exchange"
            )
        marked = " (extrapolated)" if chosen.extrapolated else ""
        sentence = f"{what}{marked}{_lossy(best)}; {self._where(best.name, crossovers)}."
        return Recommendation(best.name, best.method, sentence, gain, doubt, crossovers)

    def _stays(self, base: Prediction, rows: Sequence[Prediction]) -> str:
        """Say why nothing but DDP's own is recommended."""
        methods = {p.candidate.name: p for p in self.methods}
        nearest = min((row for row in rows if row.name in methods), key=_step, default=None)
        said = f"{_plain(base.name)}: {format_seconds(base.step_s.value)} a step"
        if nearest is None:
            return f"{said}; no method of quality {self.quality} was measured on this link"
        difference = base.step_s.value - nearest.step_s.value
        if difference <= 0:
            slower = format_seconds(-difference)
            return f"{said}, and the nearest method, {nearest.name}, would be {slower} slower"
        (baseline,) = (p for p in self.baselines if p.candidate.name == base.name)
        doubt = _doubt(methods[nearest.name], baseline)
        why = (
            f"within the uncertainty of {format_seconds(doubt)}"
            if difference <= doubt
            else f"less than {LEAST_GAIN:.0%} of it"
        )
        return (
            f"{said}; the nearest method, {nearest.name}, would gain {format_seconds(difference)}, "
            f"which is {why}"
        )

    def _where(self, name: str, crossovers: Sequence[Crossover]) -> str:
        """Say on which links the recommendation holds."""
        said = []
        for one in crossovers:
            rate = rate_text(one.rate_bits_per_s)
            if one.above == name:
                said.append(f"below {rate} {_plain(one.below)} wins")
            else:
                said.append(f"above {rate} {_plain(one.above)} wins")
        here = f"this link carries {rate_text(self.rate)}"
        if not said:
            return f"{here}, and no other wins from a thousandth to a thousand times that"
        return f"{here}; {', '.join(said)}"


def _step(row: Prediction) -> float:
    return row.step_s.value


def _lossy(candidate: Candidate) -> str:
    """Say of what may cost more loss than a demand for it allows how much it did."""
    if candidate.quality != "any":
        return ""
    losses = losses_of(candidate)
    if losses is None:
        return "; what it does to the loss was not measured"
    return f"; its loss was {losses.ratio - 1:.1%} higher in the committed runs"


def _plain(name: str) -> str:
    return f"plain {name}" if name in BASELINES else name


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def rate_text(bits_per_s: float) -> str:
    """Return a rate to two digits: ``"1.9 Gbit/s"``."""
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= 0.995 * factor:
            return f"{float(f'{bits_per_s / factor:.2g}'):g} {unit}"
    return f"{bits_per_s:.2g} bit/s"

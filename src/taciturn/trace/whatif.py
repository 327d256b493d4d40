"""What a step would take if less were sent, the link were faster, or a method coded what is sent.

Only transfers change: a collective that takes ``t`` from last arrival to end has a part ``alpha``
that no byte causes, and a rest that goes with bytes and bandwidth. Transfers that overlap share the
link (:mod:`taciturn.trace.sharing`). Waiting stays, and follows from the replay. A method adds the
seconds of its codec where the transfer runs: on the stream, or on the thread of gloo, whose core
the calling thread may need as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from taciturn.errors import InputError
from taciturn.trace.alphabeta import MAX_ALPHA_NS, AlphaBeta, disagreement, fit_alpha_beta
from taciturn.trace.analysis import Analysis
from taciturn.trace.codecs import CodecCost, method_key
from taciturn.trace.collectives import Meeting
from taciturn.trace.exposure import Class, class_of, step_ends
from taciturn.trace.graph import Graph
from taciturn.trace.occupation import mean_s
from taciturn.trace.report import Prediction, Report
from taciturn.trace.sharing import Links
from taciturn.units import format_seconds

__all__ = ["Change", "parse_change", "predict"]

_HELP = (
    'give one like "all_reduce bytes/2", "all_reduce = 0", "bandwidth*4", "latency/2", '
    '"latency = 0" or "method=quantized:bits=8"; without a collective it is about all of them'
)
_NAME = r"(?:(?P<name>[a-z_]+)\s+)?"
_SCALE = re.compile(
    rf"{_NAME}(?P<what>bytes|bandwidth|latency)\s*(?P<sign>[*/])\s*(?P<factor>[0-9.eE+-]+)"
)
_ZERO = re.compile(
    r"(?:(?P<name>(?!(?:bytes|latency|bandwidth)\s*=)[a-z_]+)\s*)?(?P<what>bytes|latency)?"
    r"\s*=\s*0(?:\.0*)?"
)
_METHOD = re.compile(r"method\s*=\s*(?P<method>\S.*)")


EVENT_S = 20e-6
"""CPU time that recording one event may take: 2.5 us on a core of its own (measured in
:mod:`taciturn.trace.recording`), 13 to 19 us where ranks and gloo's threads share the cores
(``benchmarks/trace_prediction.py``, recorded against not recorded)."""


@dataclass(frozen=True)
class Change:
    """What changes.

    Attributes:
        what: as asked.
        name: of the collectives; empty for all.
        bytes_factor: of what is sent, or of the time for it: bandwidth has the inverse.
        latency_factor: of ``alpha``.
        method: coded by which; empty for none.
    """

    what: str
    name: str = ""
    bytes_factor: float = 1.0
    latency_factor: float = 1.0
    method: str = ""


def parse_change(text: str) -> Change:
    """A change as people write it.

    Raises:
        InputError: it cannot be read, or a factor is not above 0.
    """
    plain = text.strip()
    if found := _METHOD.fullmatch(plain):
        return Change(plain, name="all_reduce", method=method_key(found["method"]))
    if found := _ZERO.fullmatch(plain):
        name, what = found["name"] or "", found["what"]
        name = "" if name == "all" else name
        return Change(plain, name, float(what == "latency"), float(what == "bytes"))
    found = _SCALE.fullmatch(plain)
    try:
        factor = float(found["factor"]) if found else 0.0
    except ValueError:
        factor = 0.0
    if found is not None and not 1e-9 <= factor <= 1e9:
        raise InputError(f"a factor of {found['factor']} in {text!r}: give one from 1e-9 to 1e9")
    if found is None:
        raise InputError(f"cannot read the change {text!r}; {_HELP}")
    name = found["name"] or ""
    name = "" if name == "all" else name
    if found["sign"] == "/":
        factor = 1 / factor
    if found["what"] == "latency":
        return Change(plain, name, latency_factor=factor)
    return Change(plain, name, factor if found["what"] == "bytes" else 1 / factor)


def predict(
    analysis: Analysis,
    changes: Sequence[Change],
    *,
    alpha_beta: AlphaBeta | Mapping[str, AlphaBeta] | None = None,
    codecs: Mapping[str, CodecCost] | None = None,
) -> Report:
    """The report with a prediction for each change.

    Args:
        analysis: of the trace.
        changes: from :func:`parse_change`.
        alpha_beta: what is known of the link, for all kinds of collective or by their names; the
            others are fitted from the trace.
        codecs: cost of methods, by their method_key text.

    Raises:
        InputError: a method that the table lacks, or a kind of collective that the trace lacks.
    """
    names = {meeting.first.name for meeting in analysis.meetings}
    if isinstance(alpha_beta, AlphaBeta):
        alpha_beta = dict.fromkeys(names, alpha_beta)
    given = {name: line for name, line in (alpha_beta or {}).items() if name in names}
    known = {name: given.get(name) or fit_alpha_beta(analysis, name) for name in names}
    doubts = [disagreement(line, analysis, name) for name, line in given.items()]
    predictions = tuple(_predict(analysis, one, known, codecs or {}) for one in changes)
    if predictions:
        notes = (*filter(None, doubts), *predictions[0].notes)
        predictions = (replace(predictions[0], notes=notes), *predictions[1:])
    return replace(analysis.report, predictions=predictions)


def _predict(
    analysis: Analysis,
    change: Change,
    known: Mapping[str, AlphaBeta],
    codecs: Mapping[str, CodecCost],
) -> Prediction:
    if change.name and change.name not in known and not change.method:
        raise InputError(
            f"the change {change.what!r} is about {change.name}, but the trace has "
            f"{', '.join(sorted(known)) or 'no collective'}; {_HELP}"
        )
    cost = None
    if change.method:
        cost = codecs.get(change.method)
        if cost is None:
            costs = ", ".join(sorted(codecs)) or "none"
            raise InputError(
                f"the cost of {change.method!r} is not known (that of: {costs}); give --link FILE "
                "of taciturn probe --methods, or --codecs FILE with its bytes_ratio and "
                "codec_s_per_byte"
            )
    edges = _Edges(analysis, change, cost, known)
    return _bounded(analysis, change, edges, _notes(change, known, edges))


class _Edges:
    """New works of the transfers that a change is about: likely, and the extremes of ``alpha``.

    Attributes:
        shared: works as measured, and replays with others.
        likely: by edge, in ns.
        fast: with ``alpha`` zero, so that everything goes with the bytes.
        slow: with ``alpha`` as large as the shortest transfer, codecs on the calling thread too.
        calls: by edge of program order, what codecs add there at the slowest.
        gone: the share of all transfer that goes, at the fastest; below 0 if there is more.
        added_ns: sum of what is likely added, mean over ranks; below 0 if there is less.
    """

    def __init__(
        self,
        analysis: Analysis,
        change: Change,
        cost: CodecCost | None,
        known: Mapping[str, AlphaBeta],
    ) -> None:
        self.likely: dict[int, int] = {}
        self.fast: dict[int, int] = {}
        self.slow: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        graph = analysis.graph
        self.shared = Links(graph, analysis.meetings)
        work_ns = self.shared.work_ns
        least: dict[Class, int] = {}
        for meeting, edges in zip(analysis.meetings, graph.transfers, strict=True):
            shortest = min((work_ns[edge] for edge in edges), default=0)
            what = class_of(meeting.first)
            least[what] = min(least.get(what, shortest), shortest)
        on_cpu = {view.rank: not view.on_gpu for view in analysis.views}
        for meeting, edges, calls in zip(
            analysis.meetings, graph.transfers, graph.calls, strict=True
        ):
            first = meeting.first
            if change.name and first.name != change.name:
                continue
            size = first.size_bytes or 0
            codec_ns = round(1e9 * (cost.codec_s + cost.codec_s_per_byte * size)) if cost else 0
            alone = meeting.alone
            shortest = least[class_of(first)]
            line = known[first.name]
            for edge in edges:
                whole = work_ns[edge]
                # Of one rank alone, no more than the shortest is known to be transfer.
                moving = min(whole, shortest) if alone else whole
                new = _Scaling(change, cost, line, size, shortest)
                self.likely[edge] = whole - moving + new.likely(moving) + codec_ns
                self.fast[edge] = new.fast(whole) + codec_ns
                self.slow[edge] = whole - moving + new.slow(moving) + codec_ns
            if codec_ns and on_cpu.get(first.rank, False):
                self.calls.update(dict.fromkeys(calls, codec_ns))
        before = sum(work_ns[edge] for edge in self.likely)
        self.gone = 1 - sum(self.fast.values()) / before if before else 0.0
        self.added_ns = (sum(self.likely.values()) - before) / len(analysis.views)


class _Scaling:
    """One transfer under a change: ``alpha * latency + (t - alpha) * bytes``."""

    def __init__(
        self, change: Change, cost: CodecCost | None, line: AlphaBeta, size: int, shortest: int
    ) -> None:
        self.bytes_factor = cost.bytes_ratio if cost else change.bytes_factor
        self.latency_factor = change.latency_factor
        self.line = line
        known = line.beta_s_per_byte is not None and size > 0
        self.moved_s = (line.beta_s_per_byte or 0.0) * size if known else None
        self.shortest = shortest

    def _at(self, transfer: int, alpha: int) -> int:
        fixed = min(transfer, alpha)
        return round(fixed * self.latency_factor + (transfer - fixed) * self.bytes_factor)

    def likely(self, transfer: int) -> int:
        """With the latency that the link says; of both its numbers, that share of the time."""
        alpha_s = self.line.alpha_s
        if self.moved_s is None:
            alpha = round(1e9 * (alpha_s or 0.0))
        elif alpha_s is None:
            alpha = transfer - round(1e9 * self.moved_s)
        elif alpha_s + self.moved_s > 0:
            alpha = round(transfer * alpha_s / (alpha_s + self.moved_s))
        else:
            alpha = 0
        # What was fitted need not be true of the shortest; what was given is.
        return self._at(transfer, max(0, alpha if self.line.given else min(alpha, self.shortest)))

    def _possible(self, transfer: int) -> list[int]:
        """With all that ``alpha`` may be, unless it was given: from nothing to the shortest."""
        if self.line.given:
            return [self.likely(transfer)]
        most = min(self.shortest, MAX_ALPHA_NS)
        return [self.likely(transfer), self._at(transfer, 0), self._at(transfer, most)]

    def fast(self, transfer: int) -> int:
        """The least it may take."""
        return min(self._possible(transfer))

    def slow(self, transfer: int) -> int:
        """The most it may take."""
        return max(self._possible(transfer))


def _bounded(
    analysis: Analysis, change: Change, edges: _Edges, notes: tuple[str, ...]
) -> Prediction:
    """The likely saving, between what is certain and what every possible wait would give."""
    graph, base = analysis.graph, analysis.report.mean.completed_s

    def step_s(
        works: Mapping[int, int],
        calls: Mapping[int, int] | None = None,
        weights: NDArray[np.int64] | None = None,
    ) -> float:
        times = edges.shared.replay(works, calls, weights)
        return _mean_steps_s(graph, times)[0]

    now = step_s({})
    saved = [
        now - step_s(edges.likely),
        now - step_s(edges.fast),
        now - step_s(edges.slow, edges.calls),
    ]
    sure = graph.proven_weight_ns
    certain = step_s({}, None, sure) - step_s(edges.slow, edges.calls, sure)
    # What does not compute while it moves, as far as it goes.
    most = edges.gone * _alone_s(analysis, change)
    if all(view.on_gpu for view in analysis.views):
        most = min(most, base - step_s(edges.fast, None, graph.asap_weight_ns))
    low = base - max(*saved, most)
    high = base - min(*saved, certain)
    low -= _recording_s(analysis) + max(0.0, edges.gone) * _crowding_s(analysis, change)
    if edges.gone < 0:
        # Not more than all that is added, one after the other.
        high = max(high, base + edges.added_ns / len(graph.ends) / 1e9)
    return Prediction(change.what, base - saved[0], max(0.0, low), high, base, notes)


def _mean_steps_s(graph: Graph, times: NDArray[np.int64]) -> list[float]:
    """Mean length of a step, for each column of a replay."""
    ends = step_ends(graph, times)
    seconds: list[float] = ((ends[-1] - ends[0]) / len(graph.ends) / 1e9).tolist()
    return seconds


def _recording_s(analysis: Analysis) -> float:
    """What recording may have added to a step that is bound by the CPU; mean over ranks and steps.

    With a GPU the CPU's time is not what bounds a step that waits for transfers.
    """
    count = 0
    for view in analysis.views:
        main = (view.events.lane == view.main_lane) & (view.step_index >= 0)
        count += 0 if view.on_gpu else int(main.sum())
    return EVENT_S * count / len(analysis.views) / len(analysis.graph.ends)


def _alone_s(analysis: Analysis, change: Change) -> float:
    """Transfer that is not overlapped by compute, of what a change is about; mean over steps."""
    about = _about(analysis, change)
    alone = [one.moving(about) for one in analysis.occupations]
    return mean_s(alone) / len(analysis.graph.ends)


def _crowding_s(analysis: Analysis, change: Change) -> float:
    """How much faster compute may be without the transfers beside it; mean over steps.

    On a CPU these take its cores: what ran beside them may have taken up to twice its time.
    """
    about = _about(analysis, change)
    beside = [one.computing_beside(about) for one in analysis.occupations if not one.view.on_gpu]
    return mean_s(beside) / 2 / len(analysis.graph.ends)


def _about(analysis: Analysis, change: Change) -> list[Meeting]:
    """The collectives in steps that a change is about."""
    return [
        meeting
        for meeting in analysis.meetings
        if (not change.name or meeting.first.name == change.name) and meeting.first.step >= 0
    ]


def _notes(change: Change, known: Mapping[str, AlphaBeta], edges: _Edges) -> tuple[str, ...]:
    notes = []
    if change.bytes_factor == change.latency_factor == 0:
        return ()
    about = [name for name in sorted(known) if not change.name or name == change.name]
    for name in about:
        alpha, beta = known[name].alpha_s, known[name].beta_s_per_byte
        if alpha is None:
            notes.append(
                f"{name}: too few sizes to tell latency from bandwidth: taken as bandwidth, and "
                f"the bounds hold up to {MAX_ALPHA_NS // 10**6} ms of latency a call (--alpha)"
            )
        elif change.latency_factor != 1 and not alpha and not known[name].given:
            notes.append(
                f"{name}: its sizes show no latency, so a change of it changes nothing but the "
                "bounds: give --alpha"
            )
        else:
            rate = f", {1e-9 / beta:.3g} GB/s" if beta else ""
            notes.append(f"{name}: latency {format_seconds(alpha)} a call{rate}")
    if edges.added_ns > 0:
        notes.append("more time than measured: waits that did not show may appear")
    return tuple(notes)

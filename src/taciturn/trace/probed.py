"""What a probe of the link tells about a trace that was recorded on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from taciturn.errors import InputError
from taciturn.link import Fit, Link, MethodSpeed
from taciturn.trace.alphabeta import AlphaBeta
from taciturn.trace.analysis import Analysis
from taciturn.trace.codecs import CodecCost, method_key

__all__ = ["Probed", "read_probed"]

FP32_BYTES = 4


@dataclass(frozen=True)
class Probed:
    """What a probe knows that a change needs.

    Attributes:
        alpha_beta: by kind of collective.
        codecs: what each method that it measured costs.
    """

    alpha_beta: Mapping[str, AlphaBeta]
    codecs: Mapping[str, CodecCost]


def read_probed(path: Path, analysis: Analysis) -> Probed:
    """The link that ``taciturn probe`` wrote, as the all_reduces of a trace used it.

    Raises:
        InputError: no such file, no link, or between another number of ranks than the trace's
            all_reduces.
    """
    link = Link.read(path)
    firsts = [meeting.first for meeting in analysis.meetings]
    sizes = {one.group_size for one in firsts if one.name == "all_reduce"}
    for other in sorted(sizes - {0, 1, link.ranks}):
        raise InputError(
            f"{path} was measured between {link.ranks} ranks, and all_reduces of the trace are "
            f"among {other}: probe between as many"
        )
    backends = {trace.backend for trace in (view.trace for view in analysis.views)} - {""}
    for other_backend in sorted(backends - {link.backend}):
        raise InputError(
            f"{path} was measured over {link.backend}, and the trace is of {other_backend}: probe "
            "over the same backend"
        )
    plain = link.all_reduce.get("fp32")
    if plain is None:
        raise InputError(f"{path} has no all_reduce of fp32: probe again")
    line = AlphaBeta(plain.alpha_s.value, plain.beta_s_per_byte.value, given=False)
    backend = next((speed for speed in link.methods if speed.method == "backend"), None)
    codecs = {
        method_key(speed.method): _cost(speed, link, plain, backend) for speed in link.methods
    }
    return Probed({"all_reduce": line}, codecs)


def _cost(speed: MethodSpeed, link: Link, plain: Fit, backend: MethodSpeed | None) -> CodecCost:
    """What a method takes beyond its bytes: coding, copies, waiting for cores, more rounds.

    What the backend takes itself is in the transfers of the trace already.
    """
    fixed_s, per_elem_s = speed.local_fixed_s.value, speed.local_s_per_elem.value
    if backend is not None:
        fixed_s = max(0.0, fixed_s - backend.local_fixed_s.value)
        per_elem_s = max(0.0, per_elem_s - backend.local_s_per_elem.value)
    nbytes = FP32_BYTES * speed.elems[-1]
    if speed.rounds is None or speed.sent_bytes is None:  # the backend's own, of narrower elements
        ratio = speed.link_s[-1] / plain.seconds_at(nbytes)
        rounds_s = 0.0
    else:
        ratio = speed.sent_bytes[-1] / (2 * (link.ranks - 1) / link.ranks * nbytes)
        latency_s = speed.rounds[-1] * link.both_ways.seconds_at(0)
        rounds_s = max(0.0, latency_s - plain.seconds_at(0))
    return CodecCost(
        bytes_ratio=ratio,
        codec_s_per_byte=per_elem_s / FP32_BYTES,
        codec_s=fixed_s + rounds_s,
    )

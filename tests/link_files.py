"""Links made up for tests: what a probe would have measured, had the machine been this simple."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from taciturn.cost import ELEMENT_BYTES, all_reduce_seconds, is_backends, link_seconds, schedule
from taciturn.link import Contention, Estimate, Fit, Link, MethodSpeed, Piece
from taciturn.methods import parse

SIZES = (1024, 16384, 262144, 2**22, 2**26)
METHODS = (
    "ring",
    "quantized:bits=8",
    "quantized:bits=4",
    "direct:bits=8",
    "coded:passes=4",
    "coded:passes=16,code=fourier,shuffle=true,wire=bf16",
    "topk:ratio=0.01",
    "cast:wire=bf16",
)


def line(alpha_s: float, beta_s_per_byte: float, sizes: Sequence[int] = SIZES) -> Fit:
    """A curve that is a straight line, measured without noise."""
    return Fit(
        alpha_s=Estimate.exactly(alpha_s),
        beta_s_per_byte=Estimate.exactly(beta_s_per_byte),
        pieces=(Piece(0, alpha_s, beta_s_per_byte),),
        sizes_bytes=tuple(sizes),
        seconds=tuple(alpha_s + beta_s_per_byte * size for size in sizes),
        leave_one_out_error=0.0,
        leave_one_out_p90=0.0,
    )


def make_link(
    ranks: int = 4,
    rate_bits_per_s: float = 200e6,
    alpha_s: float = 1e-4,
    *,
    cores: int = 64,
    local_s_per_elem: float | Callable[[str], float] = 1e-9,
    methods: Sequence[str] = METHODS,
    elems: Sequence[int] = (1024, 2**16, 2**20, 2**23),
) -> Link:
    """A link of one rate on which every method takes exactly its closed form and its coding."""
    beta = 8 / rate_bits_per_s
    backend = {
        dtype: line(2 * (ranks - 1) * alpha_s, 2 * (ranks - 1) / ranks * beta)
        for dtype in ("fp32", "bf16")
    }
    nothing = tuple(tuple(None for _ in range(ranks)) for _ in range(ranks))
    bare = Link(
        ranks=ranks,
        hosts=1,
        backend="gloo",
        device="cpu",
        cores=cores,
        rate_bits_per_s=round(rate_bits_per_s),
        one_way=line(alpha_s, beta),
        both_ways=line(alpha_s, beta),
        duplex_factor=Estimate.exactly(1.0),
        gamma_s_per_byte=Estimate.exactly(1e-10),
        pair_bytes_per_s=nothing,
        pair_latency_s=nothing,
        slow_rank=None,
        slow_links=(),
        contention=(Contention(1, Estimate.exactly(1 / beta)),),
        link_beside_matmul=Estimate.exactly(1.0),
        matmul_beside_link=Estimate.exactly(1.0),
        all_reduce=backend,
        methods=(),
        probed_at="2026-01-02T03:04:05Z",
        probe_s=30.0,
        drift=0.0,
        warnings=(),
    )
    return replace(
        bare, methods=tuple(_speed(name, bare, elems, local_s_per_elem) for name in methods)
    )


def _speed(
    name: str, link: Link, elems: Sequence[int], local: float | Callable[[str], float]
) -> MethodSpeed:
    per_elem = local(name) if callable(local) else local
    link_s, rounds, sent = [], [], []
    for numel in elems:
        made = schedule(name, numel, link.ranks)
        if made is None:
            assert is_backends(parse(name))
            wire = 2 if "16" in name else ELEMENT_BYTES
            dtype = "bf16" if wire == 2 else "fp32"
            seconds = all_reduce_seconds(
                link.all_reduce[dtype], link.ranks, wire * numel, link.ranks
            )
        else:
            seconds = link_seconds(made, link)
            rounds.append(made.rounds)
            sent.append(made.sent_bytes)
        link_s.append(seconds.total_s)
    return MethodSpeed(
        method=name,
        elems=tuple(elems),
        seconds=tuple(s + per_elem * n for s, n in zip(link_s, elems, strict=True)),
        codec_s=tuple(per_elem * n for n in elems),
        waiting_s=tuple(link_s),
        rounds=tuple(rounds) or None,
        sent_bytes=tuple(sent) or None,
        link_s=tuple(link_s),
        local_fixed_s=Estimate.exactly(0.0),
        local_s_per_elem=Estimate.exactly(per_elem),
    )

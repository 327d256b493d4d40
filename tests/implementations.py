"""The one table of collectives over which the contract tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taciturn.collectives import Backend, CodedRing, Collective, Direct, QuantizedRing, Ring


@dataclass(frozen=True)
class Implementation:
    """One collective with what it promises beyond its class's flags."""

    make: Callable[[], Collective]
    error: str = "rounding"
    """Where its error comes from: "none", "rounding" of the wire, or "spread" of the code."""
    threads: bool = True


IMPLEMENTATIONS: dict[str, Implementation] = {
    "backend": Implementation(Backend, "none", threads=False),
    "backend-bf16": Implementation(lambda: Backend(wire="bf16"), threads=False),
    "ring": Implementation(Ring, "none"),
    "ring-7-segments": Implementation(lambda: Ring(segments=7), "none"),
    "quantized-bf16": Implementation(lambda: QuantizedRing(wire="bf16")),
    "quantized-fp16": Implementation(lambda: QuantizedRing(wire="fp16")),
    "quantized-int8": Implementation(lambda: QuantizedRing(wire="int8")),
    "quantized-int4": Implementation(lambda: QuantizedRing(wire="int4", block=64)),
    "quantized-stochastic": Implementation(lambda: QuantizedRing(rounding="stochastic")),
    "direct-int8": Implementation(lambda: Direct(wire="int8")),
    "direct-bf16": Implementation(lambda: Direct(wire="bf16", segments=3)),
    "coded-1": Implementation(lambda: CodedRing(passes=1), "none"),
    "coded-2": Implementation(lambda: CodedRing(passes=2), "spread"),
    "coded-optimized": Implementation(lambda: CodedRing(passes=3, code="optimized"), "spread"),
    "coded-clustered": Implementation(lambda: CodedRing(passes=2, code="clustered"), "spread"),
    "coded-fourier": Implementation(lambda: CodedRing(passes=16, code="fourier"), "spread"),
    "coded-inplace": Implementation(
        lambda: CodedRing(passes=4, code="fourier", inplace=True), "spread"
    ),
    "coded-shuffled-bf16": Implementation(
        lambda: CodedRing(passes=8, code="fourier", shuffle=True, wire="bf16"), "spread"
    ),
    "coded-int8": Implementation(
        lambda: CodedRing(passes=4, code="fourier", wire="int8", segments=2), "spread"
    ),
    "coded-inplace-int8": Implementation(
        lambda: CodedRing(passes=4, code="fourier", wire="int8", inplace=True), "spread"
    ),
    "coded-budget": Implementation(lambda: CodedRing(spread_budget=0.2), "spread"),
}

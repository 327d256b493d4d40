"""``taciturn bench``: every method on the same buffers, side by side, in one run.

``inputs`` makes the buffers, ``measure`` runs inside the ranks, ``columns`` turns what they saw
into rows, ``run`` starts it all, ``verdicts`` reads the rows, ``table`` and ``report`` show them.
"""

from __future__ import annotations

from taciturn.bench.run import BenchConfig, bench

__all__ = ["BenchConfig", "bench"]

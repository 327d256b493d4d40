"""How far the parameters of a code may go, for whoever offers them: the one place that says so."""

from __future__ import annotations

__all__ = ["LARGEST_EPS", "MOST_COMPONENTS", "MOST_PASSES"]

MOST_PASSES = 128
"""Each doubling beyond 64 passes saves less than a percent of the bytes, 1 + (N - 2)/(p N) buffers,
and doubles the rounds. Designing a code takes p^2 N numbers and p^3 N^2 products, and a search does
that a hundred times: three seconds for the slowest code at 128 passes, forty at 256."""

MOST_COMPONENTS = 1024
"""Of the Vandermonde code, whose every message mixes all components."""

LARGEST_EPS = 100.0
"""Nodes further from one than this are near nothing; powers of them soon exceed float64."""

"""How loops over numbers are compiled, with numba.

Code is compiled on the first call and kept for later processes: in ``NUMBA_CACHE_DIR``, beside the
source, or in the user's cache folder; where none can be written to, each process compiles anew.
It runs without Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

__all__ = ["compiled", "contracted"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function``; every operation is rounded as Python and torch round it."""
    return _compile(function, set())


def contracted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function``; a product and the sum it goes into may be rounded once, not twice."""
    return _compile(function, {"contract"})


def _compile(function: Callable[..., Any], fastmath: set[str]) -> Callable[..., Any]:
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": fastmath or False}
    try:
        result: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no place for the cache
        result = numba.njit(**options)(function)
    return result

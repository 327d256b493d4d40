"""How loops over numbers are compiled, with numba.

Code is compiled on the first call and kept for later processes: in ``NUMBA_CACHE_DIR``, beside the
source, or in the user's cache folder; where none can be written to, each process compiles anew.
It runs without Python's lock.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import NullCache

__all__ = ["compiled", "contracted", "run_without_cache_if_need_be"]

_made: list[Any] = []


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
    _made.append(result)
    return result


def run_without_cache_if_need_be(compile_all: Callable[[], None]) -> None:
    """Run ``compile_all``; again without numba's cache if that is damaged or its disk is full."""
    try:
        compile_all()
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, ImportError) as error:
        warnings.warn(
            f"numba's cache cannot be used ({type(error).__name__}: {error}); compiling anew in "
            "this process. Empty it, or point NUMBA_CACHE_DIR elsewhere",
            stacklevel=3,
        )
        for function in _made:
            function._cache = NullCache()
        compile_all()

"""Compiled loops: right products, nothing compiled while ranks wait, and no cache needed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from implementations import IMPLEMENTATIONS
from taciturn.collectives import CodedRing, products
from taciturn.collectives.compiled import compiled
from taciturn.collectives.wires import kernels
from taciturn.transport import Transport, run_threads


@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 18),
    width=st.integers(0, 2100),
    starts=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 2**31),
)
def test_wide_products(rows, inner, width, starts, seed):
    """The product lies where it should, in fp64 precision, and nothing beside it is touched."""
    start, out_start = starts
    generator = np.random.default_rng(seed)
    matrix = generator.integers(-9, 9, (rows, inner)).astype(np.float64)
    source = generator.integers(-9, 9, (inner, start + width + 3)).astype(np.float32)
    before = generator.integers(-9, 9, (rows, out_start + width + 3)).astype(np.float32)
    product = matrix @ source[:, start : start + width]  # integers: exact in any order
    place = slice(out_start, out_start + width)
    for run, kept in ((products.wide_product, 0), (products.add_wide_product, 1)):
        out, expected = before.copy(), before.copy()
        expected[:, place] = kept * before[:, place] + product
        run(matrix, source, start, out, out_start, width)
        assert np.array_equal(out, expected)


def test_wide_products_cancel_in_fp64():
    """Terms of 1e8 that cancel leave what fp32 sums would have lost."""
    matrix = np.array([[1.0, 1.0, -1.0]])
    rows = np.array([[1e8] * 4, [1.5] * 4, [1e8] * 4], np.float32)
    out = np.full((1, 4), 0.25, np.float32)
    products.add_wide_product(matrix, rows, 0, out, 0, 4)
    assert out.tolist() == [[1.75] * 4]


def signatures() -> dict[str, int]:
    """Return how many versions of each loop have been compiled."""
    loops: dict[str, Any] = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (kernels, products)
        for name in module.__all__
        if name != "prepare"
    }
    return {name: len(loop.signatures) for name, loop in loops.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_is_compiled_while_ranks_wait(dtype):
    """All that any collective needs is compiled when it is made: no peer waits for a compiler."""
    makers = [entry.make for entry in IMPLEMENTATIONS.values() if entry.threads]
    makers.append(lambda: CodedRing(components=7, code="vandermonde"))
    methods = [[make() for make in makers] for _ in range(3)]
    before = signatures()
    assert all(before.values())

    def run(transport: Transport) -> None:
        for method in methods[transport.rank]:
            for numel in (5, 1000):
                method.all_reduce(torch.ones(numel, dtype=dtype), transport)

    run_threads(3, run, 60)
    assert signatures() == before


@pytest.mark.parametrize("damage", ["nothing left", "not a cache"])
def test_a_cache_that_cannot_be_used(damage, tmp_path):
    """A full disk or a damaged file costs a warning and a compilation, not the run.

    All loops are prepared in one way; those of the products take the compiler least time.
    """
    code = (
        "import warnings; warnings.simplefilter('ignore');"
        "from taciturn.collectives import products; products.prepare();"
        "print(products.wide_product.signatures)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    if damage == "nothing left":
        # Files may not grow: what numba writes fails as on a full disk, but for a signal.
        code = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); \
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); {code}"
        command = [sys.executable, "-c", code]
    else:
        subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True)
        written = [path for path in tmp_path.rglob("*.nb*") if path.is_file()]
        assert written
        for path in written:
            path.write_bytes(b"not what numba wrote")
    done = subprocess.run(
        command, env=environment, check=False, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "float32" in done.stdout


def test_no_place_for_a_cache(monkeypatch):
    """Where numba can write nowhere, loops are compiled all the same, in each process."""
    real = numba.njit

    def refusing(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(numba, "njit", refusing)

    @compiled
    def double(x: Any) -> Any:
        return 2 * x

    assert double(21) == 42

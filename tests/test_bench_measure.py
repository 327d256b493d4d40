"""What runs inside the ranks: order, progress, and the rows of a real run."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taciturn.bench import measure
from taciturn.bench.measure import Job, order_of_calls
from taciturn.collectives import Backend, Ring
from taciturn.testbed import run_local

METHODS = (
    "ring",
    "backend",
    "backend: wire=bf16",
    "coded:passes=2",
    "coded:passes=2,shuffle=true",
    "quantized:bits=8",
    "direct:bits=8",
)
RANKS = 3
SIZES = (4 * 5000, 4)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 20), st.integers(0, 50), st.integers(0, 2**31))
def test_each_repeat_runs_every_method_once(methods: int, repeat: int, seed: int) -> None:
    """The order of a repeat is a permutation, the same wherever it is asked for."""
    order = order_of_calls(methods, repeat, seed)
    assert sorted(order) == list(range(methods))
    assert order == order_of_calls(methods, repeat, seed)


def test_no_method_always_comes_first() -> None:
    """Over the repeats each of four methods comes first now and then."""
    assert {order_of_calls(4, repeat, seed=0)[0] for repeat in range(30)} == {0, 1, 2, 3}


def test_job_travels_as_json() -> None:
    """A job is the same after a trip through JSON."""
    job = Job(("ring", "backend"), 1, True, (4, 8), rate_bits_per_s=10**8, command="taciturn bench")
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of one run on real gloo ranks, from files with names."""
    folder = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(0)
    for rank in range(RANKS):
        values = {"a": 3000, "b": 1999, "c": 1}
        named = {k: torch.randn(n, generator=generator) for k, n in values.items()}
        torch.save(named, folder / f"{rank}.pt")
    job = Job(METHODS, 1, False, SIZES, str(folder / "{rank}.pt"), repeats=3, warmups=2)
    (folder / "job.json").write_text(json.dumps(job.to_dict()))
    command = [sys.executable, "-m", "taciturn.bench", str(folder)]
    run_local(command, ranks=RANKS, timeout_s=100, output="capture").check()
    # As strict readers have it: no NaN, no infinity.
    rows: list[dict[str, Any]] = json.loads(
        (folder / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    return rows


pytestmark = pytest.mark.timeout(150)


@pytest.mark.processes
def test_one_row_per_size_and_method(rows: list[dict[str, Any]]) -> None:
    """Rows come in the job's order, methods verbatim, with the raw values of every call."""
    assert [(row["buffer_bytes"], row["method"]) for row in rows] == [
        (size, method) for size in SIZES for method in METHODS
    ]
    for row in rows:
        assert row["ranks"] == RANKS
        assert len(row["times_s"]) == 3
        assert len(row["warmup_times_s"]) == 2
        assert [max(call) for call in row["times_by_rank_s"]] == row["times_s"]
        assert min(row["times_s"]) <= row["median_s"] <= max(row["times_s"])
        assert row["is_reference"] == (row["method"] == "backend")


@pytest.mark.processes
def test_counted_bytes_are_the_formula_s(rows: list[dict[str, Any]]) -> None:
    """Every method but the backend sends what its formula says; the backend's bytes are null."""
    for row in rows:
        if row["method"].startswith("backend"):
            assert row["sent_bytes_per_rank"] is row["counts_equal_formula"] is None
        else:
            assert row["counts_equal_formula"] is True, row["method"]
            assert row["sent_bytes_per_rank"] == row["formula_bytes_per_rank"] > 0
        assert row["limit_fraction"] is None  # loopback
        assert row["wire_bytes_counted_by_interface"] is None  # shared by all ranks


@pytest.mark.processes
def test_errors_are_those_of_the_method(rows: list[dict[str, Any]]) -> None:
    """Exact methods err by rounding, lossy ones more; what is bit-identical has no spread."""
    for row in rows[: len(METHODS)]:
        name = row["method"].partition(":")[0]
        exact = row["method"] in ("ring", "backend")
        # fp32 rounds with a relative error of at most 2^-24 per addition.
        assert row["replica_error"] < 1e-6 if exact else row["replica_error"] > 1e-6
        assert row["bit_identical"] == (name != "coded")
        assert (row["spread"] == 0) == (name != "coded")
        both = math.hypot(row["mean_error"], row["spread"])
        assert row["replica_error"] == pytest.approx(both, rel=1e-6)
        assert row["worst_parameter_replica"] in ("a", "b", "c")
        assert row["worst_parameter_replica_error"] >= row["replica_error"]
        # Independent inputs: the share that differs is sqrt(1 - 1 / ranks), up to chance.
        assert row["input_difference"] == pytest.approx(math.sqrt(1 - 1 / RANKS), rel=0.05)


@pytest.mark.processes
def test_conditions_are_recorded(rows: list[dict[str, Any]]) -> None:
    """Each row carries versions, seed and input, so that it can be told apart later."""
    conditions = rows[0]["conditions"]
    assert conditions["torch"] == torch.__version__
    assert conditions["backend"] == "gloo"
    assert conditions["threads_per_rank"] == 1
    assert "one file per rank" in conditions["input"]


def test_the_baseline_is_unchecked_unless_asked_for() -> None:
    """What methods are measured against pays for nothing of ours."""
    for text, check in (
        ("backend", False),
        ("backend:wire=bf16", False),
        ("backend:check=true", True),
    ):
        made = measure._make(text)
        assert isinstance(made, Backend)
        assert made.check is check
    assert isinstance(measure._make("ring"), Ring)

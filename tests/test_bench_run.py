"""Starting ranks, refusing what cannot be benched, and failing by name."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import taciturn.bench.run
import taciturn.ranks.launch
from taciturn.bench import BenchConfig, bench
from taciturn.bench.inputs import MAX_SEED
from taciturn.bench.limits import MAX_REPEATS
from taciturn.errors import CodeError, InputError, MethodError, PeerError, TaciturnError
from taciturn.ranks import Progress
from taciturn.testbed import TCP_GOODPUT, Running, Testbed, capability

pytestmark = pytest.mark.timeout(150)

FIELDS = {
    "method", "ranks", "rate_bits_per_s", "buffer_bytes", "median_s", "ratio_to_backend",
    "sent_bytes_per_rank", "formula_bytes_per_rank", "limit_fraction", "replica_error",
    "mean_error", "spread", "q1_s", "q3_s", "times_s", "rounds", "messages", "algbw_bytes_per_s",
    "busbw_bytes_per_s", "codec_s", "waiting_s", "wire_bytes_counted_by_interface",
    "worst_parameter_replica", "worst_parameter_mean", "conditions",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def run(config: BenchConfig) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a bench."""
    out, err = (Console(file=io.StringIO(), width=120) for _ in range(2))
    status = bench(config, out, err)
    assert isinstance(out.file, io.StringIO)
    assert isinstance(err.file, io.StringIO)
    return status, out.file.getvalue(), err.file.getvalue()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (MethodError, {"methods": "rong"}),
        (MethodError, {"methods": ""}),
        (CodeError, {"methods": "coded:code=vandermonde,components=4", "ranks": 8}),
        (InputError, {"ranks": 0}),
        (InputError, {"ranks": 100_000}),
        (InputError, {"rate_bits_per_s": 5}),
        (InputError, {"sizes_bytes": (6,)}),
        (InputError, {"sizes_bytes": (0,)}),
        (InputError, {"sizes_bytes": (-4,)}),
        (InputError, {"sizes_bytes": (8, 8)}),
        (InputError, {"repeats": 0}),
        (InputError, {"warmups": 0}),
        (InputError, {"seed": -1}),
        (InputError, {"timeout_s": 0.0}),
        (InputError, {"timeout_s": float("nan")}),
        (InputError, {"device": "tpu"}),
        (InputError, {"device": "cuda"}),
        (InputError, {"input": "missing.npy"}),
        (InputError, {"json": Path("no/such/folder.json")}),
        (InputError, {"html": Path()}),
        (InputError, {"html": Path("/proc/x.html")}),
        (InputError, {"json": Path("x" * 300)}),
        (InputError, {"json": Path(__file__) / "x.json"}),
        (InputError, {"seed": MAX_SEED + 1}),
        (InputError, {"repeats": MAX_REPEATS + 1}),
        (InputError, {"warmups": 10**30}),
        (InputError, {"timeout_s": 1e300}),
        (InputError, {"sizes_bytes": (99 << 40,)}),
        (InputError, {"sizes_bytes": (1 << 5000,)}),
        (MethodError, {"methods": "coded:passes=1000000000000"}),
        (MethodError, {"methods": "coded:code=vandermonde,components=3000000"}),
        (MethodError, {"methods": "coded:eps=1e300"}),
        (CodeError, {"methods": "coded:passes=128"}),
        (InputError, {"methods": "coded:passes=4,spread_budget=0.1"}),
        (InputError, {"json": Path("one"), "html": Path("one")}),
    ],
)
def test_what_cannot_be_benched_is_refused_at_once(
    kind: type[TaciturnError], changes: dict[str, Any]
) -> None:
    """Bad values raise when the config is made, before anything is started."""
    with pytest.raises(kind):
        BenchConfig(**({"methods": "ring", "input": "random"} | changes))


@pytest.mark.parametrize("error", [MemoryError("21.8 TiB"), OverflowError("too large")])
def test_a_method_that_cannot_be_built_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Numbers that run out of memory or of range while a method is built are its fault."""

    def failing(_: object) -> None:
        raise error

    monkeypatch.setattr(taciturn.bench.run.methods, "build", failing)
    with pytest.raises(InputError, match=f"'ring' cannot be built here: {error}"):
        BenchConfig("ring", input="random")


def test_a_workspace_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method whose own memory is what does not fit is named."""
    huge = SimpleNamespace(cost=lambda *_: SimpleNamespace(workspace_bytes=1 << 60))
    monkeypatch.setattr(taciturn.bench.run.methods, "build", lambda _: huge)
    with pytest.raises(InputError, match="by ring on 8 ranks"):
        BenchConfig("ring", input="random")


@pytest.mark.parametrize("asked", ["json", "html"])
def test_a_file_that_fails_in_the_end_does_not_take_the_rest_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str
) -> None:
    """The table is printed and the other file written before the error names file and cause."""
    from bench_rows import make_run

    paths = {"json": tmp_path / "rows", "html": tmp_path / "page"}
    config = BenchConfig("ring", input="random", **paths)  # type: ignore[arg-type]
    paths[asked].mkdir()  # after the check
    monkeypatch.setattr(taciturn.bench.run, "_on_testbed", lambda *_: make_run())
    out, err = (Console(file=io.StringIO(), width=120) for _ in range(2))
    with pytest.raises(InputError, match=f"cannot write {paths[asked]}: Is a directory"):
        bench(config, out, err)
    assert isinstance(out.file, io.StringIO)
    assert "ring" in out.file.getvalue()
    (other,) = set(paths.values()) - {paths[asked]}
    assert other.read_text()


def test_a_config_is_checked_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a config starts no process and makes no testbed."""
    monkeypatch.setattr(Testbed, "__enter__", lambda _: pytest.fail("a testbed was made"))
    config = BenchConfig("ring", input="random")
    assert config.world_size == 8
    assert config.sizes == (32 << 20,)


def test_under_torchrun_ranks_and_rate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and links are torchrun's there; saying otherwise is an error."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert BenchConfig("ring", input="random").world_size == 3
    for changes in ({"ranks": 3}, {"rate_bits_per_s": 10**8}):
        with pytest.raises(InputError, match="torchrun"):
            BenchConfig("ring", input="random", **changes)  # type: ignore[arg-type]


def test_the_file_s_size_is_the_default(tmp_path: Path) -> None:
    """A file is benched whole if no size is given."""
    torch.save(torch.ones(3, 5), tmp_path / "x.pt")
    assert BenchConfig("ring", input=str(tmp_path / "x.pt")).sizes == (60,)


@pytest.mark.parametrize(
    ("asked", "methods", "reference", "added"),
    [
        ("ring", ("backend", "ring"), 0, True),
        ("ring; backend", ("ring", "backend"), 1, False),
        ("backend:wire=bf16", ("backend", "backend:wire=bf16"), 0, True),
        ("backend:check=true", ("backend", "backend:check=true"), 0, True),
        ("ring;backend: wire = fp32 ", ("ring", "backend: wire = fp32"), 1, False),
        ("ring; ring", ("backend", "ring", "ring"), 0, True),
    ],
)
def test_the_backend_is_there_once(
    asked: str, methods: tuple[str, ...], reference: int, added: bool
) -> None:
    """The backend in fp32 is added, and marked, if and only if it is missing."""
    job = BenchConfig(asked, input="random").job("", None)
    assert (job.methods, job.reference, job.added) == (methods, reference, added)


@pytest.mark.processes
def test_a_bench_on_loopback(tmp_path: Path) -> None:
    """A bench prints a table, writes rows and a page, and says that the link is not shaped."""
    config = BenchConfig(
        "ring; coded:passes=2",
        sizes_bytes=(4096,),
        ranks=2,
        repeats=2,
        json=tmp_path / "rows.json",
        html=tmp_path / "page.html",
    )
    status, out, err = run(config)
    assert status == 0
    assert "link is not shaped" in err
    assert "coded:passes=2" in out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in rows] == ["backend", "ring", "coded:passes=2"]
    assert [row["added_by_bench"] for row in rows] == [True, False, False]
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["rate_bits_per_s"] is row["limit_fraction"] is None
        assert row["worst_parameter_replica"] is not None  # the input is gradients
        assert "GPT" in row["conditions"]["input"]
    page = (tmp_path / "page.html").read_text()
    assert "coded:" in page
    assert "was not shaped" in page


@pytest.mark.processes
def test_a_bench_on_a_testbed() -> None:
    """On shaped links, the interface counts what the ledger counts, and headers beside it."""
    able = capability()
    if not able.shaped:
        pytest.skip(able.reason)
    config = BenchConfig(
        "ring", sizes_bytes=(1 << 20,), ranks=2, rate_bits_per_s=10**9, input="random", repeats=2
    )
    seen: list[list[dict[str, Any]]] = []
    saved, taciturn.bench.run._save = taciturn.bench.run._save, lambda rows, *_: seen.append(rows)
    try:
        status, out, _ = run(config)
    finally:
        taciturn.bench.run._save = saved
    assert status == 0
    assert "1 Gbit/s" in out
    (backend, ring), sent = seen[0], (1 << 20) + 40
    assert ring["sent_bytes_per_rank"] == sent
    assert 0 < ring["limit_fraction"] < 1.05  # the bucket's burst lets a little through at once
    # Acknowledgements, the barriers and a retransmission or two are beyond the payload.
    for row in (backend, ring):
        assert sent - 40 < row["wire_bytes_counted_by_interface"] < sent / TCP_GOODPUT + 32768


@pytest.mark.processes
def test_nan_is_reported_and_never_written(tmp_path: Path) -> None:
    """A NaN in one rank's file: results are non-finite everywhere, noted, and null in the JSON."""
    for rank in range(2):
        values = torch.ones(100)
        values[7] = float("nan") if rank else 1.0
        torch.save(values, tmp_path / f"{rank}.pt")
    source, target = str(tmp_path / "{rank}.pt"), tmp_path / "rows.json"
    _, out, _ = run(BenchConfig("ring;quantized", (), 2, input=source, repeats=1, json=target))
    assert "not finite on every rank" in out
    rows = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(name))
    for row in rows:
        assert row["replica_error"] is row["mean_error"] is row["spread"] is None
        assert row["notes"] == ["result not finite on every rank"]


@pytest.mark.processes
def test_a_killed_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kill -9`` of one rank in the middle ends the bench with an error that names the rank."""
    started: list[Running] = []
    start = Testbed.start

    def starting(*args: Any, **keywords: Any) -> Running:
        started.append(start(*args, **keywords))
        return started[-1]

    @contextmanager
    def killing(*_: object) -> Iterator[Callable[[Progress], None]]:
        def show(progress: Progress) -> None:
            if progress.label.startswith("repeat"):
                started[0].kill(1, signal.SIGKILL)

        yield show

    monkeypatch.setattr(Testbed, "start", starting)
    monkeypatch.setattr(taciturn.ranks.launch, "show_progress", killing)
    config = BenchConfig("ring", (1 << 20,), ranks=3, input="random", repeats=10_000)
    with pytest.raises(PeerError, match="rank 1 was killed by SIGKILL") as caught:
        run(config)
    assert caught.value.ranks == (1,)


def test_differing_counts_end_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that sends other bytes than its formula says fails the bench, after the table."""
    from bench_rows import make_run

    rows = make_run()
    rows[2]["counts_equal_formula"] = False
    monkeypatch.setattr(taciturn.bench.run, "_on_testbed", lambda *_: rows)
    status, out, _ = run(BenchConfig("ring", input="random"))
    assert status == 1
    assert "not what the formula says" in out

"""Starting a probe, refusing what cannot be probed, and what it prints and writes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import taciturn.probe.run
from probe_links import MadeUp
from ranks import Ranks as Pool
from taciturn.errors import InputError, MethodError, TaciturnError
from taciturn.link import Link
from taciturn.probe import Job, ProbeConfig, measure, probe, probe_link
from taciturn.probe.measure import METHODS
from taciturn.probe.steps import Pace, Sweep
from taciturn.probe.summary import Conditions, Taken, summarise
from taciturn.ranks import Progress, Ranks
from taciturn.testbed import Testbed, capability
from taciturn.transport import DistributedTransport

LINK = MadeUp(rate_bits_per_s=200_000_000).link()


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (InputError, {"ranks": 1}, "one rank has no link"),
        (InputError, {"ranks": 0}, "0 ranks"),
        (InputError, {"rate": 5}, "rate 5"),
        (InputError, {"rate": [10**8] * 3}, "3 rates for 4 ranks"),
        (InputError, {"seconds": 0.5}, "--seconds=0.5"),
        (InputError, {"seconds": float("nan")}, "--seconds=nan"),
        (InputError, {"timeout_s": 0.0}, "--timeout=0.0"),
        (InputError, {"seed": -1}, "--seed=-1"),
        (InputError, {"device": "tpu"}, "tpu"),
        (InputError, {"device": "cuda"}, "torchrun"),
        (InputError, {"out": Path("no/such/folder.json")}, "--out: cannot write"),
        (InputError, {"html": Path("no/such/folder.html")}, "--html: cannot write"),
        (InputError, {"out": Path("one"), "html": Path("one")}, "name two files"),
        (MethodError, {"methods": "rong"}, "rong"),
    ],
)
def test_what_cannot_be_probed_is_refused_at_once(
    kind: type[TaciturnError], changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad values raise when the config is made, before anything is started."""
    monkeypatch.setattr(Testbed, "__enter__", lambda _: pytest.fail("a testbed was made"))
    with pytest.raises(kind) as caught:
        ProbeConfig(**changes)
    assert says in str(caught.value)


def test_under_torchrun_ranks_and_rate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and links are torchrun's there; one rank has none."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert ProbeConfig(methods="").world_size == 3
    for changes in ({"ranks": 3}, {"rate": 10**8}):
        with pytest.raises(InputError, match="torchrun"):
            ProbeConfig(methods="", **changes)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InputError, match="one rank has no link"):
        ProbeConfig(methods="")


def test_methods_are_each_probed_once() -> None:
    """The default is the plan's list; a method given twice is one; none are possible."""
    assert ProbeConfig().method_texts == METHODS
    assert ProbeConfig(methods="ring; ring").method_texts == ("ring",)
    assert ProbeConfig(methods=" ").method_texts == ()
    job = ProbeConfig(methods="ring").job(10**8)
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
) -> None:
    """Curves, pairs, methods and warnings in the width there is; the link and a page as files."""
    monkeypatch.setattr(taciturn.probe.run, "on_testbed", lambda *_: LINK.to_json())
    out, err = (Console(file=io.StringIO(), width=width) for _ in range(2))
    config = ProbeConfig(methods="ring", out=tmp_path / "link.json", html=tmp_path / "link.html")
    assert probe(config, out, err) == LINK
    assert Link.read(tmp_path / "link.json") == LINK
    assert isinstance(out.file, io.StringIO)
    assert isinstance(err.file, io.StringIO)
    text = out.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for word in ("all_reduce fp32", "duplex factor", "2 pairs at once", "backend", "matmul", "%"):
        assert word in text
    for warning in LINK.warnings:
        assert warning.split()[0] in text
    assert "link.json" in err.file.getvalue()
    assert "all_reduce bf16" in (tmp_path / "link.html").read_text()


def smooth(taken: Taken) -> Taken:
    """The same step as a link without noise would have been: 1 ms and 10 ns per byte."""
    end = 1e-3 + 1e-8 * taken.step.size
    return Taken(
        taken.step,
        tuple(s and s._replace(start_s=0.0, end_s=end, matmul_s=1e-3) for s in taken.samples),
    )


def probed(
    seconds: float, groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
) -> tuple[dict[str, Any], list[str], list[float]]:
    """One rank's link, and what it was told of the progress.

    The steps are real, the times are not: a busy machine's are no link's.
    """
    transport = DistributedTransport(timeout_s=30)
    told: list[Progress] = []
    job = Job(seconds=seconds, methods=("backend", "ring"), timeout_s=30, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measure, "summarise", lambda c, sweeps: summarise(c, [map(smooth, s) for s in sweeps])
        )
        link = probe_link(Ranks(transport, torch.device("cpu")), job, told.append)
    transport.close()
    return link.to_json(), [one.label for one in told], [one.fraction for one in told]


@pytest.mark.processes
def test_four_ranks_find_one_link(pool: Pool) -> None:
    """All ranks get the same link of their own loopback, and hear how far it is."""
    (values, labels, fractions), *others = pool.run(probed, 1.0)
    for other, _, _ in others:
        assert other == values
    link = Link.from_json(values)
    assert (link.ranks, link.hosts, link.rate_bits_per_s) == (4, 1, None)
    assert link.both_ways.beta_s_per_byte.value == pytest.approx(1e-8)
    assert list(link.all_reduce) == ["bf16", "fp32"]
    assert [one.method for one in link.methods] == ["backend", "ring"]
    assert link.methods[1].rounds == (6, 6, 6)
    known = [one is not None for row in link.pair_bytes_per_s for one in row]
    assert known.count(True) == 12
    assert {label.partition(":")[0] for label in labels} == {
        "warm-up", "first sweep", "second sweep",
    }  # fmt: skip
    assert all(0 <= fraction <= 1 for fraction in fractions)


@pytest.mark.processes
def test_a_model_is_probed_on_its_own_groups(pool: Pool) -> None:
    """What its methods are timed on is what it exchanges; where that takes too long, it is said."""
    small, large = ((40, 500), (500,)), ((1 << 12, 1 << 14),)
    values, _, _ = pool.run(probed, 4.0, (small,))[0]
    link = Link.from_json(values)
    assert [one.elems for one in link.methods] == [(1 << 14, 20500)] * 2
    assert not any("the model's own groups" in warning for warning in link.warnings)
    values, _, _ = pool.run(probed, 1.0, (small, large))[0]
    link = Link.from_json(values)
    assert all(1 << 26 not in one.elems for one in link.methods)
    assert any("too short to time methods on the model's own groups" in w for w in link.warnings)


def disturbed(times: int) -> tuple[dict[str, Any] | str, list[float]]:
    """One rank's link when the first probes tell nothing, and how long each try was meant to be."""
    meant: list[float] = []
    steps = measure.sweep

    def swept(ranks: int, pace: Pace, budget_s: float, *more: Any) -> Sweep:
        meant.append(budget_s)
        return steps(ranks, pace, budget_s, *more)

    def told(c: Conditions, sweeps: Any) -> Link:
        if len(meant) <= times:
            raise InputError("the times do not grow with size")
        return summarise(c, [map(smooth, s) for s in sweeps])

    transport = DistributedTransport(timeout_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "sweep", swept)
        patch.setattr(measure, "summarise", told)
        try:
            job = Job(seconds=0.5, methods=(), timeout_s=30)
            link = probe_link(Ranks(transport, torch.device("cpu")), job).to_json()
        except InputError as error:
            return str(error), meant
        finally:
            transport.close()
    return link, meant


@pytest.mark.processes
def test_a_disturbed_probe_is_tried_again(pool: Pool) -> None:
    """For longer, on all ranks alike; after the third time it is said."""
    found = pool.run(disturbed, 2)
    assert all(one == found[0] for one in found)
    assert found[0][1] == [0.5, 1.0, 1.5]
    assert Link.from_json(found[0][0]).ranks == 4
    found = pool.run(disturbed, 3)
    assert {one[0] for one in found} == {"the times do not grow with size"}


def test_jobs_travel() -> None:
    """Law: ``Job.from_dict(job.to_dict()) == job``, also through JSON."""
    job = Job(methods=("ring",), groups=(((3, 4), (3,)), ((7,),)))
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


@pytest.mark.processes
def test_a_probe_starts_its_own_ranks(tmp_path: Path) -> None:
    """Ranks on shaped links, started from nothing, leave a link that says how they were shaped."""
    able = capability()
    if not able.shaped:
        pytest.skip(able.reason)
    out, err = (Console(file=io.StringIO(), width=100) for _ in range(2))
    rate = 100_000_000
    config = ProbeConfig(ranks=2, rate=rate, methods="", seconds=1.0, out=tmp_path / "link.json")
    link = probe(config, out, err)
    assert Link.read(tmp_path / "link.json") == link
    assert (link.ranks, link.hosts, link.rate_bits_per_s) == (2, 1, rate)
    assert isinstance(out.file, io.StringIO)
    assert "links of 100 Mbit/s" in out.file.getvalue()

"""Graph and replay against a simulator that knows what really depends on what."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.replay import Variant, critical_path, replay
from trace_files import own, public, write
from trace_simulator import Op, documents, simulate

LENGTHS = st.integers(50, 3000)
OPS = st.one_of(
    st.builds(Op, st.just("compute"), LENGTHS),
    st.builds(Op, st.just("cpu"), LENGTHS),
    st.builds(Op, st.just("sync")),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[Op]], list[int]]:
    """Programs of one to three ranks with the same all-reduces, and their transfers."""
    ranks, reduces = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    waits = draw(st.lists(st.booleans(), min_size=reduces, max_size=reduces))
    programs = []
    for _ in range(ranks):
        program: list[Op] = []
        for wait in waits:
            program += draw(st.lists(OPS, max_size=4))
            program.append(Op("reduce", wait=wait))
        program += [*draw(st.lists(OPS, max_size=3)), Op("compute", draw(LENGTHS)), Op("sync")]
        programs.append(program)
    transfers = draw(st.lists(st.integers(20, 4000), min_size=reduces, max_size=reduces))
    return programs, transfers


def analysed(files: Sequence[dict[str, object]]) -> Analysis:
    with tempfile.TemporaryDirectory() as folder:
        paths = [write(Path(folder) / f"{i}.json", one) for i, one in enumerate(files)]
        return analyse(paths)


@settings(max_examples=60)
@given(jobs())
def test_replay_is_what_the_simulator_does(job: tuple[list[list[Op]], list[int]]) -> None:
    """The replay gives the measured step; with instant transfers, that of a run with instant ones.

    Tolerance: a latency or gap that did not bind is not seen in the trace. It may be off by the
    simulator's own, of 10 us, wherever it binds in the other run: once, mostly.
    """
    programs, transfers = job
    runs = simulate(programs, transfers)
    found = analysed(documents(runs))
    step = found.report.steps[0]
    done = max(run.done for run in runs)
    assert step.completed_s == pytest.approx(done / 1e6, abs=1e-9)
    assert step.replay_error <= 10 / done
    instant = max(run.done for run in simulate(programs, [0] * len(transfers)))
    if len(programs) > 1:
        assert step.exposed_s * 1e6 == pytest.approx(done - instant, abs=20)


@settings(max_examples=40)
@given(jobs(), st.data())
def test_laws_of_the_replay(job: tuple[list[list[Op]], list[int]], data: st.DataObject) -> None:
    """No node is later than measured, none later with smaller weights; many variants at once are
    what each is alone.
    """
    graph = analysed(documents(simulate(*job))).graph
    alone = replay(graph)[:, 0]
    assert (alone <= graph.time_ns).all()
    assert (replay(graph, weights_ns=graph.asap_weight_ns)[:, 0] <= graph.time_ns).all()
    assert (replay(graph, weights_ns=graph.proven_weight_ns)[:, 0] <= graph.time_ns).all()
    edges = st.integers(0, len(graph.tail) - 1)
    chosen = data.draw(st.sets(edges, min_size=1, max_size=5))
    less = Variant({e: int(graph.weight_ns[e]) // 2 for e in chosen})
    more = Variant({}, dict.fromkeys(chosen, 1000))
    both = replay(graph, [Variant({}), less, more])
    assert (both[:, 0] == alone).all()
    assert (both[:, 1] <= alone).all()
    assert (both[:, 2] >= alone).all()
    assert (both[:, 1] == replay(graph, [less])[:, 0]).all()
    many = replay(graph, [Variant({}), less, more] * 4)  # so many are replayed side by side
    assert (many == np.tile(both, 4)).all()


@settings(max_examples=40)
@given(jobs())
def test_the_critical_path_is_the_whole_step(job: tuple[list[list[Op]], list[int]]) -> None:
    """Its segments follow each other without a gap and end with the step; its kinds add up."""
    found = analysed(documents(simulate(*job)))
    final = found.graph.ends[-1]
    last = int(final[np.argmax(found.times_ns[final])])
    path = critical_path(found.graph, found.times_ns, last)
    for before, after in pairwise(path):
        assert before.end_ns == after.start_ns
    assert path[-1].end_ns == found.times_ns[last]
    step = found.report.steps[0]
    total = sum(vars(step.critical_path).values())
    begin, end = found.bounds_ns[0]
    assert total == pytest.approx((end - begin) / 1e9, abs=1e-9)


def test_a_hidden_transfer_is_not_exposed() -> None:
    """A transfer that compute covers: not a microsecond is saved by making it instant."""
    program = [Op("compute", 100), Op("reduce"), Op("compute", 5000), Op("sync")]
    found = analysed(documents(simulate([program] * 2, [1000])))
    assert found.report.steps[0].exposed_s == 0
    assert found.report.exact


def test_not_overlapped_is_not_exposed() -> None:
    """While the CPU does what it does, a transfer beside no kernel at all costs nothing."""
    program = [Op("compute", 100), Op("reduce"), Op("cpu", 5000), Op("compute", 100), Op("sync")]
    step = analysed(documents(simulate([program] * 2, [1000]))).report.steps[0]
    assert step.not_overlapped_s == pytest.approx(1e-3)
    assert step.exposed_s == 0


def test_waiting_is_not_transfer() -> None:
    """Rank 1 computes 1600 us longer: rank 0 waits for so long, and no byte less would help."""
    programs = [
        [Op("compute", length), Op("reduce", wait=True), Op("compute", 100), Op("sync")]
        for length in (400, 2000)
    ]
    report = analysed(documents(simulate(programs, [300]))).report
    row = report.steps[0].collectives[0]
    assert row.waiting_s == pytest.approx(1600e-6 / 2)  # mean of two ranks
    assert row.transfer_s == pytest.approx(300e-6)
    assert row.exposed_s == pytest.approx(300e-6)
    assert report.steps[0].critical_path.waiting_s == pytest.approx(1600e-6)
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.late_s) == (1, pytest.approx(1600e-6))
    assert report.diagnosis.startswith("Rank 1 arrives 1.6 ms late")


@pytest.mark.parametrize("name", ["bucketed", "onebucket", "straggler"])
def test_gloo_recordings_replay(name: str) -> None:
    """Our complete sets replay within 5 % of the measured step; exposed lies within its bounds."""
    report = analyse(own(name)).report
    assert not report.exact
    for step in report.steps:
        assert step.replay_error <= 0.05
        assert 0 < step.exposed_s < step.completed_s
        for row in (step, *step.collectives):
            assert row.exposed_low_s <= row.exposed_s <= row.exposed_high_s
            assert row.not_overlapped_s <= row.busy_s


def test_the_sleeper_is_named() -> None:
    """Rank 3 of four sleeps 40 ms before its backward: it is the one, and that is why."""
    straggler = analyse(own("straggler")).report.straggler
    assert straggler is not None
    assert (straggler.rank, straggler.excess) == (3, "straggler_sleep")
    assert straggler.excess_s == pytest.approx(0.040, abs=0.004)


def test_dlrm_replays() -> None:
    """Eight ranks of NCCL, complete: within 5 %, and no byte is exposed: the CPU is slower."""
    report = analyse([public("param_dlrm_8rank")]).report
    step = report.steps[0]
    assert step.replay_error <= 0.05
    assert step.exposed_high_s <= 0.01 * step.completed_s
    assert step.critical_path.launch_s > 0.8 * step.completed_s


@pytest.mark.parametrize(
    "name",
    [
        "hta/ddp_resnet_nccl_rank0of2_fullmeta.json.gz",
        "hta/perparam_allreduce_nccl_rank1of2.json.gz",
    ],
)
def test_launch_bound_steps_expose_nothing(name: str) -> None:
    """Communication beside no compute at all, 10 to 119 ms a step, and still nothing to save."""
    report = analyse([public(name)]).report
    assert "bound by the CPU that issues the work" in report.diagnosis
    for step in report.steps:
        assert step.replay_error <= 0.05
        assert step.not_overlapped_s > 0.01
        assert step.exposed_high_s <= 0.001 * step.completed_s
        assert all(row.waiting_s is None for row in step.collectives)


def test_what_the_replay_cannot_explain_gives_bounds() -> None:
    """A rank of 16 with replayed graphs that were not recorded: off by more than 5 %, and said."""
    report = analyse([public("hta/recsys_mixed_collectives_rank0of16.json.gz")]).report
    assert report.mean.replay_error > 0.05
    assert any("off the measured steps" in note for note in report.notes)
    assert report.mean.exposed_low_s < report.mean.exposed_s < report.mean.exposed_high_s

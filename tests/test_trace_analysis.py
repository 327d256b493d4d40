"""The report: its numbers on small traces, its JSON, and what it says about what it lacks."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from taciturn.errors import InputError
from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.kinds import parse_kind
from trace_files import document, event, launch, own, public, step, write
from trace_simulator import Op, documents, simulate


def made(tmp_path: Path, *files: Any, **options: Any) -> Analysis:
    paths = [write(tmp_path / f"{i}.json", one) for i, one in enumerate(files)]
    return analyse(paths, **options)


def reduce(start: float, duration: float, **args: Any) -> dict[str, Any]:
    return event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, duration, tid=20, **args)


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        return [n for one in value.values() for n in numbers(one)]
    if isinstance(value, list | tuple):
        return [n for one in value for n in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def test_json_has_the_promised_shape() -> None:
    """Steps, critical path, collectives, straggler, diagnosis; plain values, no NaN."""
    report = analyse(own("straggler")).report
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert {"steps", "straggler", "diagnosis", "mean", "notes", "unknown"} <= set(found)
    first = found["steps"][0]
    assert {"step", "measured_s", "replayed_s", "critical_path", "collectives"} <= set(first)
    assert set(first["collectives"][0]) >= {
        "name",
        "group",
        "count",
        "bytes",
        "busy_s",
        "not_overlapped_s",
        "waiting_s",
        "transfer_s",
        "exposed_s",
        "exposed_low_s",
        "exposed_high_s",
    }
    assert found["straggler"]["rank"] == 3
    assert all(map(math.isfinite, numbers(found)))


def test_no_collectives(tmp_path: Path) -> None:
    """Nothing is exposed, the overlap is not known rather than NaN, and that is said (case G2)."""
    report = made(tmp_path, document([step(1, 0, 100), event("gemm", 10, 50)])).report
    one = report.steps[0]
    assert (one.busy_s, one.exposed_s, one.exposed_high_s) == (0, 0, 0)
    assert one.overlap is None
    assert json.loads(json.dumps(report.to_json()))["steps"][0]["overlap"] is None
    assert "no collective" in report.diagnosis
    assert any("no collective" in note for note in report.notes)


def test_compute_counts_where_it_was_launched(tmp_path: Path) -> None:
    """A kernel that runs after its step's range is that step's compute, not the next one's."""
    events = [
        step(1, 0, 20),
        launch(5, 1),
        event("gemm", 30, 50, correlation=1),
        step(2, 20, 90),
        launch(25, 2),
        event("gemm", 80, 10, correlation=2),
    ]
    first, second = made(tmp_path, document(events)).report.steps
    assert [round(one.ranks[0].compute_s * 1e6) for one in (first, second)] == [50, 10]


def test_streams_are_united(tmp_path: Path) -> None:
    """Two collectives that overlap each other and compute: 60 us busy, 50 alone, 10 hidden (G4)."""
    events = [
        step(1, 0, 200),
        event("gemm", 0, 50),
        reduce(40, 40),
        event("ncclDevKernel_AllGather_RING_LL", 60, 40, tid=24),
    ]
    one = made(tmp_path, document(events)).report.steps[0]
    assert one.busy_s == pytest.approx(60e-6)
    assert one.not_overlapped_s == pytest.approx(50e-6)
    assert one.overlap == pytest.approx(10 / 60)
    assert one.busy_s <= one.measured_s
    rows = {row.name: row for row in one.collectives}
    assert rows["all_reduce"].busy_s == rows["all_gather"].busy_s == pytest.approx(40e-6)
    assert rows["all_reduce"].not_overlapped_s == pytest.approx(30e-6)


def test_groups_are_rows_of_their_own(tmp_path: Path) -> None:
    """Two groups and a kernel of none: three rows, and the total holds all (case G5)."""
    events = [
        step(1, 0, 100),
        reduce(10, 5, **{"Process Group Name": "0"}),
        reduce(20, 5, **{"Process Group Name": "1"}),
        reduce(30, 5),
    ]
    report = made(tmp_path, document(events)).report
    assert [row.group for row in report.steps[0].collectives] == ["0", "1", "unknown"]
    assert report.steps[0].busy_s == pytest.approx(15e-6)
    assert any("do not say their process group" in note for note in report.notes)


def test_kernels_before_their_launch_and_without_one(tmp_path: Path) -> None:
    """A start before the launch is clamped and counted; an orphan counts as communication (G6)."""
    events = [
        step(1, 0, 300),
        launch(50, 1),
        event("early", 45, 20, correlation=1),
        reduce(100, 40, correlation=99),
    ]
    report = made(tmp_path, document(events)).report
    assert report.steps[0].busy_s == pytest.approx(40e-6)
    assert any("1 kernels seem to start before their launch" in note for note in report.notes)


def test_overlapping_kernels_of_one_stream(tmp_path: Path) -> None:
    """Kernels that overlap or nest on a stream are united, and replayed as measured."""
    events = [
        step(1, 0, 400),
        launch(5, 1),
        launch(12, 2),
        launch(20, 3),
        event("a", 20, 100, correlation=1),
        event("b", 110, 50, correlation=2),
        event("c", 120, 10, correlation=3),
    ]
    one = made(tmp_path, document(events)).report.steps[0]
    assert one.ranks[0].compute_s == pytest.approx(140e-6)
    assert one.replay_error == 0


def test_records_of_waits_are_not_compute(tmp_path: Path) -> None:
    """A synchronisation on a stream's row covers nothing."""
    wait = event("Stream Sync", 0, 300, cat="cuda_sync", tid=7, cuda_sync_kind="Stream Sync")
    one = made(tmp_path, document([step(1, 0, 300), wait, reduce(100, 50)])).report.steps[0]
    assert one.not_overlapped_s == pytest.approx(50e-6)
    assert one.ranks[0].compute_s == 0


def test_unknown_names_are_listed_and_can_be_told(tmp_path: Path) -> None:
    """What sounds like communication is compute until the user says what it is."""
    events = [step(1, 0, 100), event("my_fast_allreduce(float*)", 10, 50)]
    report = made(tmp_path, document(events)).report
    assert report.unknown == (("my_fast_allreduce(float*)", 1),)
    assert report.steps[0].busy_s == 0
    rules = [parse_kind("my_fast*=comm")]
    told = made(tmp_path, document(events), rules=rules).report
    assert told.unknown == ()
    assert told.steps[0].busy_s == pytest.approx(50e-6)


def moved(files: Sequence[dict[str, Any]], rank: int, offset_us: float, drift: float) -> None:
    """Give one rank a clock that is ahead and fast."""
    for one in files[rank]["traceEvents"]:
        one["ts"] = one["ts"] + offset_us + drift * one["ts"]


def test_clocks_seconds_apart(tmp_path: Path) -> None:
    """11.56 s off and 50 ppm fast: who waits for whom, and how long, is found anyway (G11)."""
    late = [0, 0, 1600, 0, 0]
    programs = [
        [
            op
            for i in range(5)
            for op in (
                Op("compute", 20_000 + (late[i] if rank == 1 else 0)),
                Op("reduce", wait=True),
            )
        ]
        + [Op("sync")]
        for rank in range(2)
    ]
    files = documents(simulate(programs, [400] * 5))
    moved(files, 1, 11.56e6, 5e-5)
    found = made(tmp_path, *files)
    fix = found.clocks.corrections[1]
    assert abs(fix.offset_ns + 11_560_000_000) <= 50_000
    assert abs(fix.drift + 5e-5) < 5e-6
    third = found.meetings[2]
    waits = [max(m.start_ns for m in third.members) - one.start_ns for one in third.members]
    assert abs(waits[0] - 1_600_000) <= 50_000
    assert waits[1] == 0
    assert found.report.steps[0].replay_error <= 0.05


def test_a_rank_without_a_common_clock_stands_alone(tmp_path: Path) -> None:
    """No shared collective: the offset is not guessed; waiting is unknown, and why is said."""
    one = document([step(1, 0, 100), reduce(10, 5, Seq=1)], rank=0, world=2)
    far = 9e6
    events = [step(1, far, 100), reduce(far + 10, 5, Seq=2)]
    report = made(tmp_path, one, document(events, rank=1, world=2)).report
    assert report.steps[0].completed_s == pytest.approx(100e-6)
    assert report.steps[0].collectives[0].waiting_s is None
    assert any("clock not aligned: rank 1" in note for note in report.notes)


def test_different_numbers_of_steps(tmp_path: Path) -> None:
    """Only the steps that all ranks have are told, and which are not is said."""
    first = [step(1, 0, 100), step(2, 100, 100), reduce(10, 5, Seq=1), reduce(110, 5, Seq=2)]
    files = [document(first, rank=0, world=2), document([first[0], first[2]], rank=1, world=2)]
    report = made(tmp_path, *files).report
    assert [one.step for one in report.steps] == [1]
    assert any("not all ranks have are left out: 2" in note for note in report.notes)


def test_a_rank_without_common_steps_is_left_out(tmp_path: Path) -> None:
    """One whose file is cut before its steps, or that profiled others; and that is said."""
    good = [step(1, 0, 100), reduce(10, 5)]
    files = [document(good, rank=i, world=4) for i in range(2)]
    files.append(document([reduce(10, 5)], rank=2, world=4))
    files.append(document([step(7, 0, 100), reduce(10, 5)], rank=3, world=4))
    report = made(tmp_path, *files).report
    assert report.ranks == (0, 1)
    assert any("2.json (rank 2), 3.json (rank 3)" in note for note in report.notes)


def test_a_trace_without_steps(tmp_path: Path) -> None:
    """The whole of it counts as one."""
    report = made(tmp_path, document([event("gemm", 0, 50), reduce(50, 50)])).report
    assert [one.step for one in report.steps] == [None]
    assert report.steps[0].measured_s == pytest.approx(100e-6)
    assert any("ProfilerStep" in note for note in report.notes)


def test_a_profiler_that_slows_the_cpu_is_named(tmp_path: Path) -> None:
    """Stacks and memory make a step look bound by the CPU; shapes are what the docs ask for."""
    content = document([step(1, 0, 100), reduce(10, 5)], record_shapes=1)
    assert not any("recorded with" in note for note in made(tmp_path, content).report.notes)
    content |= {"with_stack": 1, "profile_memory": 1}
    report = made(tmp_path, content).report
    assert any("recorded with profile_memory, with_stack" in note for note in report.notes)


@pytest.mark.parametrize("how", ["cut", "odd times", "unknown name", "several ranks"])
def test_no_collective_is_no_proof_where_some_may_be_missing(tmp_path: Path, how: str) -> None:
    """A cut file, dropped events, a name that sounds like one, a job of several ranks: nothing is
    told as certain.
    """
    events = [step(1, 0, 100), event("gemm", 10, 50), {**reduce(20, 5), "ts": "never"}]
    if how == "odd times":
        content: Any = document(events)
    elif how == "cut":
        content = json.dumps(document(events)).encode()[:-150]
    elif how == "several ranks":
        content = document(events[:2], world=8)
    else:
        content = document([*events[:2], event("oneccl_allreduce", 20, 5)])
    report = made(tmp_path, content).report
    assert report.steps[0].busy_s == 0
    assert "cannot be told" in report.diagnosis
    assert "nothing" not in report.diagnosis
    assert not any("nothing is exposed" in note for note in report.notes)


def test_work_from_before_the_recording_is_of_no_step(tmp_path: Path) -> None:
    """Without a launch, before anything launched here on its stream: no step has it, nor has any
    row; a kernel without a launch that comes later counts where it runs.
    """
    late = [launch(10, 2), reduce(200, 30, correlation=2), reduce(240, 10, correlation=97)]
    events = [
        *(step(1, 0, 100), step(2, 100, 200)),
        *(reduce(20, 50, correlation=98), reduce(120, 50, correlation=99)),
        *late,
    ]
    report = made(tmp_path, document(events)).report
    assert [round(one.busy_s * 1e6) for one in report.steps] == [30, 10]
    # From the end of what was launched before.
    assert report.steps[0].completed_s == pytest.approx(60e-6)
    assert any("2 kernels and copies were launched before" in note for note in report.notes)
    assert any("of 1 kernels and copies no launch is known" in note for note in report.notes)


def test_launches_that_join_nothing_are_said(tmp_path: Path) -> None:
    """All kernels with one number, or with text for one: they count where they run."""
    for number in (5, "five"):
        kernels = [event("gemm", 10 * i, 5, correlation=number) for i in range(1, 20)]
        events = [step(1, 0, 100), step(2, 100, 100), launch(5, 5), *kernels]
        report = made(tmp_path, document(events)).report
        assert [round(one.ranks[0].compute_s * 1e6) for one in report.steps] == [45, 50]
        assert any("of 19 kernels and copies no launch is known" in one for one in report.notes)


def test_ranks_that_were_given_are_not_called_missing(tmp_path: Path) -> None:
    """A rank that lacks a step, or whose clock cannot be had: not "one rank alone", not missing."""
    files = [json.loads(gzip.decompress(one.read_bytes())) for one in own("bucketed")]
    events = files[1]["traceEvents"]
    fewer = {**files[1], "traceEvents": [e for e in events if e["name"] != "ProfilerStep#4"]}
    report = made(tmp_path, files[0], fewer).report
    assert len(report.steps) == 2
    assert "waiting for other ranks" not in report.diagnosis
    moved(files, 1, 5e6, 0)
    apart = made(tmp_path, *files).report
    assert any("have no common clock" in note for note in apart.notes)
    for note in (*report.notes, *apart.notes):
        assert "one rank alone" not in note
        assert "not all ranks of" not in note


def test_overlapping_waits_count_once(tmp_path: Path) -> None:
    """Two collectives at once for which a rank waits: no longer than it does, in all tables."""
    groups = [{"Process Group Name": name, "Seq": 1, "Group size": 2} for name in "ab"]
    files = [
        document(
            [step(1, 0, 100)]
            + [
                event("ncclDevKernel_AllReduce", come, 90 - come, tid=20 + i, **group)
                for i, group in enumerate(groups)
            ],
            rank=rank,
            world=2,
        )
        for rank, come in enumerate((10, 80))
    ]
    one = made(tmp_path, *files).report.steps[0]
    assert [round((row.waiting_s or 0) * 1e6) for row in one.ranks] == [70, 0]
    assert all(round((row.waiting_s or 0) * 1e6) == 35 for row in one.collectives)


def paused(rank: int, steps: int, pause_us: float, forward_us: float) -> dict[str, Any]:
    """A rank of gloo that pauses before its backward, in a loop of 100 ms a step."""

    def on_cpu(name: str, start: float, length: float, tid: int = 1, cat: str = "cpu_op") -> Any:
        return event(name, start, length, cat=cat, pid=100, tid=tid)

    events = []
    for number in range(steps):
        at = number * 100_000.0
        late = at + pause_us
        events += [
            step(number, at, 90_000),
            on_cpu("Forward", at + 1000, forward_us, cat="user_annotation"),
            on_cpu("aten::mean", at + 1000, forward_us),
            on_cpu("aten::ones_like", late + 6000, 1000),
            on_cpu("c10d::allreduce_", late + 7500, 100),
            on_cpu("gloo:all_reduce", late + 7700, 52_300 - pause_us, 2, "user_annotation"),
            on_cpu("aten::add_", at + 60_100, 1000),
        ]
    return document(events, rank=rank, world=2, host_name="host")


@pytest.mark.parametrize(
    ("pause_us", "forward_us", "excess", "unrecorded"),
    [
        (30_000, 4000, "'aten::mean' and 'aten::ones_like'", True),
        (3000, 4000, "Forward", False),
        (0, 1500, None, None),
    ],
    ids=["a pause", "a range", "nobody"],
)
def test_the_cause_of_lateness_explains_it(
    tmp_path: Path, pause_us: float, forward_us: float, excess: str, unrecorded: bool
) -> None:
    """A pause without a label is named by the events round it, not by an unrelated range that is
    a little longer too; a range where it is the cause.
    """
    files = [paused(0, 3, 0, 1500), paused(1, 3, pause_us, forward_us)]
    report = made(tmp_path, *files).report
    found = report.straggler
    if excess is None:
        assert found is None
        return
    assert found is not None
    assert (found.rank, found.excess, found.unrecorded) == (1, excess, unrecorded)
    assert excess in report.diagnosis
    # One definition in the sentence and in the table.
    assert (
        found.late_s == pytest.approx(report.mean.ranks[1].late_s) == pytest.approx(pause_us / 1e6)
    )


@pytest.mark.parametrize("steps", [4, 1])
def test_lateness_is_of_the_steps_that_are_known(tmp_path: Path, steps: int) -> None:
    """Rank 1 is 3 ms late in each step; of one step a kernel is lost: the mean is over the others,
    and where there are none it is a least, and the table has no number.
    """

    def rank(late_us: int) -> list[Any]:
        events = []
        for i in range(steps):
            at, size = 20_000 * i, {"dtype": "Float", "In msg nelems": 1000}
            events += [
                step(i + 1, at, 18_000),
                *(launch(at + 100, 2 * i + 1), launch(at + 110, 2 * i + 2)),
                reduce(at + 2000 + late_us, 3400 - late_us, correlation=2 * i + 1, **size),
                reduce(at + 5410, 400, correlation=2 * i + 2, **{**size, "In msg nelems": 10}),
            ]
        return events

    files = [document(rank(late), rank=late // 3000, world=2) for late in (0, 3000)]
    del files[1]["traceEvents"][4]
    report = made(tmp_path, *files).report
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.at_least) == (1, steps == 1)
    assert report.straggler.late_s == pytest.approx(3e-3, rel=0.01)
    assert [step.ranks[1].late_s is None for step in report.steps] == [True] + [False] * (steps - 1)
    assert (report.mean.ranks[1].late_s is None) == (steps == 1)
    assert ("at least" in report.diagnosis) == (steps == 1)


def test_ranks_of_different_jobs_are_refused_by_what_they_send() -> None:
    """Two files that say they are of one job, whose collectives have no size in common."""
    with pytest.raises(InputError, match="no size in common"):
        analyse([own("bucketed")[0], own("onebucket")[1]])


def test_a_kind_that_matches_nothing_is_said(tmp_path: Path) -> None:
    """A misspelt pattern must not look as if it had been heeded."""
    rules = [parse_kind("my_fest*=comm"), parse_kind("gem*=compute")]
    report = made(tmp_path, document([step(1, 0, 9), event("gemm", 1, 5)]), rules=rules).report
    assert [note for note in report.notes if "matches no event" in note] == [
        "--kind 'my_fest*=comm' matches no event"
    ]


def test_work_after_the_window_counts(tmp_path: Path) -> None:
    """A GPU that runs behind its CPU: the step is done when its last kernel is."""
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        launch(10, 1),
        launch(110, 2),
        event("gemm", 20, 500, correlation=1),
        event("gemm", 521, 500, correlation=2),
    ]
    report = made(tmp_path, document(events)).report
    assert [round(one.measured_s * 1e6) for one in report.steps] == [100, 100]
    assert [round(one.completed_s * 1e6) for one in report.steps] == [520, 501]


def test_one_rank_of_many() -> None:
    """Waiting and transfer cannot be told apart; what can is told, with bounds."""
    report = analyse([public("tracelens/ddp_resnet_mi300_rank0of8.json.gz")]).report
    assert report.world_size == 8
    assert all(row.waiting_s is None for one in report.steps for row in one.collectives)
    assert "waiting for other ranks included" in report.diagnosis
    assert report.mean.replay_error <= 0.05


def test_two_thinned_ranks_of_128() -> None:
    """Two ranks without most events align on the one collective that both have once."""
    paths = [public(f"hta/sampled_rank{i}of128.json.gz") for i in range(2)]
    report = analyse(paths).report
    assert report.ranks == (0, 1)
    assert any("clocks aligned" in note for note in report.notes)
    assert any("not all ranks" in note for note in report.notes)


@pytest.mark.parametrize("lost", [0, 5])
def test_a_lost_collective_of_gloo_moves_no_step(tmp_path: Path, lost: int) -> None:
    """One event of gloo missing on one rank: every step takes as long as its window still."""
    whole, broken = (json.loads(gzip.decompress(one.read_bytes())) for one in own("bucketed"))
    events = broken["traceEvents"]
    del events[[i for i, e in enumerate(events) if e.get("name") == "gloo:all_reduce"][lost]]
    for one in made(tmp_path, whole, broken).report.steps:
        assert one.completed_s == pytest.approx(one.measured_s, rel=0.05)


def test_a_file_that_is_cut_says_so(tmp_path: Path) -> None:
    """The report of what is left is marked."""
    text = json.dumps(document([step(1, 0, 100), reduce(10, 5), event("gemm", 20, 5)]))
    path = tmp_path / "cut.json"
    path.write_text(text[:-30])
    assert analyse([path]).report.lost
    with pytest.raises(InputError, match="not whole"):
        analyse([path], strict=True)

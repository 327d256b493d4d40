"""Collectives: what they are, whose they are, and the figures of real files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from taciturn.trace import Kind, Trace, read, read_all
from taciturn.trace.collectives import Collective, Matching, collectives_of, match
from taciturn.trace.messages import canonical
from taciturn.trace.steps import launch_rows, step_of_rows, steps_of
from taciturn.trace.timeline import intersect, unite
from trace_files import document, event, launch, own, public, step, write


def parts(traces: Sequence[Trace]) -> tuple[list[list[Collective]], list[list[int | None]]]:
    steps = [steps_of(trace) for trace in traces]
    found = [collectives_of(trace, one) for trace, one in zip(traces, steps, strict=True)]
    return found, [[one.number for one in each] for each in steps]


def matched(traces: Sequence[Trace]) -> Matching:
    return match(*parts(traces))


def kernel(name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return event(name, start, duration, tid=20, **args)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "all_reduce"),
        ("c10d::allreduce_coalesced_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("ncclKernel_ReduceScatter_RING", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("ncclKernel_SendRecv_RING", "send_recv"),
        ("gloo:recvAnySource", "recv"),
        ("ncclKernel_Reduce_RING", "reduce"),
        ("gloo:scatter", "scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclDevKernel_Generic", "unknown"),
    ],
)
def test_names(text: str, name: str) -> None:
    """Every spelling of a collective is one name."""
    assert canonical(text) == name


@pytest.mark.parametrize(
    ("name", "category", "tid"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(...)", "kernel", 20),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "kernel", 20),
        ("nccldevkernel_allreduce(...)", "kernel", 20),
        ("ncclDevKernel_Generic(...)", "kernel", 20),
        ("gloo:all_reduce", "user_annotation", 20),
        ("nccl:all_reduce", "gpu_user_annotation", 20),
    ],
)
def test_each_name_of_a_kernel_gives_the_same_time(
    tmp_path: Path, name: str, category: str, tid: int
) -> None:
    """Old, new, lower case, generic, gloo, and a range on the GPU without its kernel (case G1)."""
    events = [step(1, 0, 100), event("gemm", 0, 50), event(name, 40, 30, cat=category, tid=tid)]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    assert [(one.start_ns, one.end_ns, one.step) for one in found] == [(40_000, 70_000, 0)]


def test_metadata_of_the_kernel(tmp_path: Path) -> None:
    """Name, group, size, number, from the kernel's own arguments."""
    meta = {
        "Collective name": "_reduce_scatter_base",
        "In msg nelems": 1000,
        "Out msg nelems": 500,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "7",
        "Process Group Ranks": "[0, 1]",
        "Seq": 12,
        "Comms Id": "99",
    }
    events = [step(1, 0, 100), kernel("ncclDevKernel_Generic", 10, 5, **meta)]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    one = found[0]
    assert (one.name, one.group, one.ranks, one.group_size) == ("reduce_scatter", "7", (0, 1), 2)
    assert (one.seq, one.comm_id, one.size_bytes) == (12, "99", 2000)


def test_what_a_kernel_lacks_comes_from_its_call(tmp_path: Path) -> None:
    """A generic kernel without metadata takes name and size from the call its launch lies in."""
    call = event(
        "c10d::alltoall_base_",
        10,
        20,
        cat="cpu_op",
        pid=100,
        tid=1,
        **{"Input Dims": [[64, 3], []], "Input type": ["long int", ""]},
    )
    events = [step(1, 0, 100), call, launch(15, 4), kernel("ncclDevKernel_X", 20, 9, correlation=4)]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    assert (found[0].name, found[0].size_bytes, found[0].call_ns) == ("all_to_all", 1536, 15_000)


def test_groups_are_told_apart_and_a_nameless_one_is_unknown(tmp_path: Path) -> None:
    """Two groups and a kernel that names none (case G5); nothing is dropped."""
    events = [
        step(1, 0, 100),
        kernel("ncclKernel_AllReduce", 10, 5, **{"Process Group Name": "0"}),
        kernel("ncclKernel_AllReduce", 20, 5, **{"Process Group Name": "1"}),
        kernel("ncclKernel_AllReduce", 30, 5),
    ]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    assert [one.group for one in found] == ["0", "1", "unknown"]


def test_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """A kernel that runs after its step's window, or before its own launch, is that step's; one
    without a launch is of the step it runs in, or of none if it comes before all launched here.
    """
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        launch(90, 1),
        launch(150, 2),
        event("late", 120, 10, correlation=1),
        event("early", 140, 5, correlation=2),
        event("before", 30, 5, correlation=76),
        event("orphan", 132, 5, correlation=77),
        event("outside", 300, 5),
    ]
    trace = read(write(tmp_path / "t.json", document(events)))
    steps = steps_of(trace)
    index = step_of_rows(trace, steps)
    by_name = {trace.name(row): int(index[row]) for row in range(len(trace.events))}
    assert {k: by_name[k] for k in ("late", "early", "before", "orphan", "outside")} == {
        "late": 0,
        "early": 1,
        "before": -1,
        "orphan": 1,
        "outside": -1,
    }
    launches = launch_rows(trace)
    assert (launches >= 0).sum() == 2


def two_ranks(tmp_path: Path, *ranks: list[dict[str, Any]]) -> list[Trace]:
    files = [
        write(
            tmp_path / f"{i}.json", document([step(1, 0, 1000), *events], rank=i, world=len(ranks))
        )
        for i, events in enumerate(ranks)
    ]
    return read_all(files)[0]


def test_sequence_numbers_match_what_order_cannot(tmp_path: Path) -> None:
    """A rank that lacks the first collective is matched by number; the rest is alone (case G11)."""

    def numbered(*numbers: int) -> list[dict[str, Any]]:
        return [kernel("ncclKernel_AllReduce", 10 * n, 5, Seq=n) for n in numbers]

    found = matched(two_ranks(tmp_path, numbered(1, 2, 3), numbered(2, 3)))
    seqs = [[one.seq for one in meeting.members] for meeting in found.meetings]
    assert sorted(seqs) == [[1], [2, 2], [3, 3]]


def test_order_matches_only_what_agrees(tmp_path: Path) -> None:
    """Different counts without numbers: matched is only what every rank has once."""
    size = {"dtype": "Float", "Group size": 2}
    one = [
        kernel("ncclKernel_AllReduce", 10, 5, **size, **{"In msg nelems": 8}),
        kernel("ncclKernel_AllReduce", 20, 5, **size, **{"In msg nelems": 4}),
        kernel("ncclKernel_AllReduce", 30, 5, **size, **{"In msg nelems": 4}),
    ]
    found = matched(two_ranks(tmp_path, one, one[:2]))
    assert sorted(len(meeting.members) for meeting in found.meetings) == [1, 1, 1, 2]
    assert any("rank 0: 3, rank 1: 2" in note for note in found.notes)


def test_gloo_events_find_their_calls() -> None:
    """All collectives of our recordings, 12 or 3 a rank, have a call of their own before them."""
    count = 0
    for name in ("bucketed", "onebucket", "straggler"):
        for trace in read_all(own(name))[0]:
            (found,), _ = parts([trace])
            for one in found:
                assert one.call_row >= 0
                assert one.call_ns <= one.start_ns
                assert trace.name(one.call_row) == "c10d::allreduce_"
                assert one.group == "0"
            assert len({one.call_row for one in found}) == len(found)
            count += len(found)
    assert count == 2 * 12 + 2 * 3 + 4 * 12


@pytest.mark.parametrize("late_us", [100, 10_000, 100_000])
def test_events_taken_up_late_keep_their_calls(tmp_path: Path, late_us: int) -> None:
    """Where nothing is lost, however long a thread of gloo waits for a core, also before steps."""
    events = [step(1, 1_000_000, 500_000)]
    for i, at in enumerate((0, 1000, 2000, 3000, 1_000_100, 1_001_000)):
        events += [
            event("c10d::allreduce_", at, 10, cat="cpu_op", tid=1),
            event("gloo:all_reduce", at + late_us + i, 400, cat="user_annotation", tid=2 + i % 2),
        ]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    assert [one.start_ns - one.call_ns for one in found] == [1000 * (late_us + i) for i in range(6)]


@cache
def whole_pairs() -> dict[int, int]:
    """Start of each event of gloo in one of our recordings, and the time of its call."""
    (found,), _ = parts([read(own("bucketed")[1])])
    return {one.start_ns: one.call_ns for one in found}


@pytest.mark.parametrize("sizes", [True, False], ids=["sizes", "no sizes"])
@pytest.mark.parametrize("lost", range(12))
def test_a_lost_event_of_gloo_is_its_own_loss(tmp_path: Path, lost: int, sizes: bool) -> None:
    """Whichever event is lost, and with sizes or without: those of other steps keep their calls,
    and those of its own step get calls of that step.
    """
    content = json.loads(gzip.decompress(own("bucketed")[1].read_bytes()))
    events = content["traceEvents"]
    mine = [i for i, one in enumerate(events) if one.get("name") == "gloo:all_reduce"]
    mine.sort(key=lambda i: events[i]["ts"])
    del events[mine[lost]]
    if not sizes:
        for one in events:
            one.get("args", {}).pop("Input Dims", None)
    (found,), _ = parts([read(write(tmp_path / "t.json", content))])
    assert len(found) == 11
    assert [one.step for one in found] == [i // 4 for i in range(12) if i != lost]
    for one in found:
        if one.step != lost // 4:
            assert one.call_ns == whole_pairs()[one.start_ns]


def test_an_exchange_is_one_collective(tmp_path: Path) -> None:
    """Messages inside a labelled exchange of our own are its parts; those of other threads, or
    outside of it, are collectives.
    """

    def span(name: str, start: float, end: float, tid: int) -> dict[str, Any]:
        return event(name, start, end - start, cat="user_annotation", pid=1, tid=tid)

    events = [
        step(1, 0, 100),
        span("taciturn::exchange", 10, 30, 5),
        span("gloo:send", 10, 15, 5),
        span("gloo:recv", 12, 30, 5),
        span("gloo:recv", 29, 31, 5),
        span("gloo:send", 40, 45, 5),
        span("gloo:all_reduce", 15, 20, 6),
        span("taciturn::exchange", 50, 70, 5),
        span("gloo:send", 55, 60, 5),
    ]
    (found,), _ = parts([read(write(tmp_path / "t.json", document(events)))])
    assert [(one.name, one.start_ns // 1000) for one in found] == [
        ("exchange", 10),
        ("all_reduce", 15),
        ("recv", 29),
        ("send", 40),
        ("exchange", 50),
    ]


def test_dlrm_on_eight_ranks() -> None:
    """Ends agree within 7 us where starts differ by up to 7.6 ms; durations and sum as measured."""
    traces, _ = read_all([public("param_dlrm_8rank")])
    found = matched(traces)
    assert found.notes == ()
    assert all(meeting.complete for meeting in found.meetings)

    def us(values: list[int]) -> int:
        return (max(values) - min(values)) // 1000

    ends = [us([one.end_ns for one in m.members]) for m in found.meetings]
    starts = [us([one.start_ns for one in m.members]) for m in found.meetings]
    least = [min(one.end_ns - one.start_ns for one in m.members) // 1000 for m in found.meetings]
    assert ends == [2, 2, 1, 2, 5, 3, 5, 7]
    assert starts == [7624, 1101, 168, 125, 223, 534, 584, 885]
    assert least == [10, 8, 7, 7, 86, 10, 20, 69]
    names = Counter(meeting.first.name for meeting in found.meetings)
    assert names == {"all_to_all": 5, "all_reduce": 3}
    on_one = [m.members[1] for m in found.meetings]
    assert sum(one.end_ns - one.start_ns for one in on_one) == 11_336_000


def busy_us(trace: Trace, one: Any) -> tuple[float, float]:
    """Communication in a step's window by kernel time, and its overlap with compute."""
    events = trace.events

    def united(kind: Kind) -> Any:
        rows = events.of(kind)
        return unite(events.start_ns[rows], events.end_ns[rows])

    window = united(Kind.COMMUNICATION).clip(one.start_ns, one.end_ns)
    return window.total_ns / 1e3, intersect(window, united(Kind.COMPUTE)).total_ns / 1e3


def test_ddp_resnet_with_metadata() -> None:
    """Step times, busy and overlapped time, and bucket sizes of three steps."""
    trace = read(public("hta/ddp_resnet_nccl_rank0of2_fullmeta.json.gz"))
    steps = steps_of(trace)
    assert [one.number for one in steps] == [4, 5, 6]
    assert [round((s.end_ns - s.start_ns) / 1e3) for s in steps] == [222442, 219727, 224936]
    busy = [busy_us(trace, one) for one in steps]
    assert [round(value) for value, _ in busy] == [11989, 12300, 22587]
    assert [round(overlap) for _, overlap in busy] == [1825, 1760, 3731]
    (found,), _ = parts([trace])
    for index in range(3):
        inside = [one for one in found if one.step == index]
        assert [one.size_bytes for one in inside if one.name == "all_reduce"] == [
            4 * n for n in (2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040)
        ]
        assert [one.name for one in inside].count("broadcast") == 2
    assert {one.group for one in found} == {"0"}


def test_ddp_resnet_with_404_all_reduces_a_step() -> None:
    """59.5 to 59.6 ms a step, never overlapped; the last step really has 119.1 ms."""
    trace = read(public("hta/perparam_allreduce_nccl_rank1of2.json.gz"))
    (found,), _ = parts([trace])
    steps = steps_of(trace)
    for index in range(5):
        inside = [one for one in found if one.step == index]
        assert len(inside) == 404
        total = unite([one.start_ns for one in inside], [one.end_ns for one in inside])
        busy = total.total_ns / 1e6
        assert 59.5 <= round(busy, 1) <= 59.6 if index < 4 else round(busy, 1) == 119.1
    assert all(busy_us(trace, one)[1] == 0 for one in steps)


def test_rccl_kernels_say_nothing_by_name() -> None:
    """A generic kernel is known by metadata, where it has any; the rest counts all the same."""
    trace = read(public("tracelens/ddp_resnet_mi300_rank0of8.json.gz"))
    (found,), _ = parts([trace])
    names = Counter(one.name for one in found)
    assert names == {"all_reduce": 6, "broadcast": 6, "unknown": 5}


def test_a_rank_of_many_on_gloo() -> None:
    """Ten all-reduces on two threads, without calls; two of them in the only step."""
    trace = read(public("hta/gloo_cpuonly_rank34of300.json.gz"))
    (found,), _ = parts([trace])
    assert (len(found), trace.rank, trace.world_size) == (10, 34, 300)
    assert [one.step for one in found].count(0) == 2

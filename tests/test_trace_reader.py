"""Reading: every format, exact times, broken files with their loss."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.errors import InputError
from taciturn.trace import Kind, Trace, analyse, read, read_all
from taciturn.trace import scan as scan_module
from trace_files import document, event, launch, own, public, step, write

EVENTS = [
    step(3, 10, 100),
    launch(12, 1),
    event("gemm", 20, 30.5, correlation=1),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 60, 20, tid=20, correlation=2),
]


def names(trace: Trace) -> list[str]:
    return [trace.name(row) for row in range(len(trace.events))]


def plain(tmp_path: Path, content: Any, name: str = "t.json") -> Trace:
    return read(write(tmp_path / name, content))


def test_columns_of_a_small_trace(tmp_path: Path) -> None:
    """Times in nanoseconds with the base added, kinds, streams and correlations."""
    trace = plain(tmp_path, document(EVENTS, base=1_700_000_000_000_000_000))
    assert trace.rank == 0
    assert trace.events.start_ns.tolist() == [
        1_700_000_000_000_000_000 + us * 1000 for us in (10, 12, 20, 60)
    ]
    assert (trace.events.end_ns - trace.events.start_ns).tolist() == [100000, 5000, 30500, 20000]
    assert trace.events.kind.tolist() == [
        Kind.ANNOTATION,
        Kind.LAUNCH,
        Kind.COMPUTE,
        Kind.COMMUNICATION,
    ]
    assert trace.events.correlation.tolist() == [-1, 1, 1, 2]
    assert [trace.queues[q].stream for q in trace.events.queue if q >= 0] == ["7", "20"]
    assert trace.loss.complete


@pytest.mark.parametrize("indent", [None, 1, 2], ids=["compact", "indent 1", "indent 2"])
@pytest.mark.parametrize("shape", ["object", "list", "metadata last"])
def test_shapes_of_files(tmp_path: Path, shape: str, indent: int | None) -> None:
    """An object, a bare list, and metadata after the events read alike."""
    content: Any = document(EVENTS)
    if shape == "list":
        content = EVENTS
    elif shape == "metadata last":
        content = {"traceEvents": content.pop("traceEvents"), **content}
    trace = plain(tmp_path, json.dumps(content, indent=indent).encode())
    assert len(trace.events) == 4
    assert trace.loss.complete
    assert trace.rank == (None if shape == "list" else 0)


def test_packed_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    """gzip, several gzip members and zip are told by content, whatever the name says."""
    text = json.dumps(document(EVENTS)).encode()
    (tmp_path / "one.json").write_bytes(gzip.compress(text))
    (tmp_path / "two.json").write_bytes(gzip.compress(text[:300]) + gzip.compress(text[300:]))
    with zipfile.ZipFile(tmp_path / "three.json", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trace.json", text)
    for path in sorted(tmp_path.iterdir()):
        assert len(read(path).events) == 4


@given(st.integers(0, 4 * 10**15), st.integers(0, 10**9))
def test_times_are_rounded_not_cut(start_ns: int, duration_ns: int) -> None:
    """Microseconds with three decimals come back as the nanoseconds they were written from.

    Floats hold them up to 2^53 ns from the base, which is 104 days; the base changes every quarter.
    """
    from taciturn.trace.columns import Columns, nanoseconds

    columns = Columns(())
    start, duration = (float(f"{ns // 1000}.{ns % 1000:03d}") for ns in (start_ns, duration_ns))
    columns.add([event("k", start, duration)])
    assert nanoseconds(columns.start_us).tolist() == [start_ns]
    assert nanoseconds(columns.duration_us).tolist() == [duration_ns]


def test_absolute_microseconds_keep_their_digits(tmp_path: Path) -> None:
    """Times of 2023, whole microseconds since 1970, lose nothing."""
    trace = plain(tmp_path, document([event("k", 1694128201436249, 86)]))
    assert trace.events.start_ns.tolist() == [1694128201436249000]


def test_numbers_written_as_text(tmp_path: Path) -> None:
    """Times, thread and stream as text, as in files of 2021."""
    old = {**event("k", 0, 0, tid="stream 7"), "ts": "12.5", "dur": "3", "args": {"device": 0}}
    trace = plain(tmp_path, {"traceEvents": [{**old, "cat": "Kernel"}]})
    assert trace.events.start_ns.tolist() == [12500]
    assert trace.queues[0].stream == "7"
    assert trace.events.kind.tolist() == [Kind.COMPUTE]


def test_stream_comes_from_the_arguments(tmp_path: Path) -> None:
    """Records of waits sit on rows of their own since 2026: the stream is in the arguments."""
    wait = event("Stream Sync", 5, 1, cat="cuda_sync", tid=1_000_007, stream=7, device=0)
    trace = plain(tmp_path, document([event("k", 0, 4), wait]))
    assert trace.events.queue.tolist() == [0, 0]
    assert trace.events.kind.tolist() == [Kind.COMPUTE, Kind.DEVICE_SYNC]


def test_odd_events_are_counted_not_used(tmp_path: Path) -> None:
    """No time, infinite time, time 0 in a trace of today, no object, a year's duration."""
    now = 1.7e15
    odd = [
        {"ph": "X", "name": "k", "cat": "kernel"},
        event("k", 1e300, 1),
        event("k", 0, 1),
        event("k", now, 3e13),
        17,
        None,
    ]
    good = [event("k", now + i, 1) for i in range(5)]
    trace = plain(tmp_path, document([*odd, *good]))
    assert len(trace.events) == 5
    assert trace.loss.events_odd == 6
    assert any("6 events" in note for note in trace.notes)


@pytest.mark.parametrize(
    "broken",
    [
        event("ncclX", 40, 3.6e9, tid=20),
        event("ncclX", 3.6e9, 10, tid=20),
        event("ncclX", -3.6e9, 10, tid=20),
        event("op", 40, 3.6e9, cat="cpu_op", tid=1),
    ],
    ids=["long", "late", "early", "long on the CPU"],
)
def test_an_event_an_hour_off_is_set_aside(tmp_path: Path, broken: dict[str, Any]) -> None:
    """One event that makes a recording of a tenth of a millisecond last an hour, with its name."""
    trace = plain(tmp_path, document([*EVENTS, broken]))
    assert len(trace.events) == len(EVENTS)
    assert trace.loss.events_odd == 1
    assert any("60 min" in note and broken["name"] in note for note in trace.notes)


def test_a_long_wait_is_no_broken_time(tmp_path: Path) -> None:
    """A kernel of half a minute, after which its step ends on the CPU, or alone one of a second."""
    wait = event("ncclX", 40, 3e7, tid=20)
    events = [*EVENTS, wait, step(4, 110, 3e7)]
    assert len(plain(tmp_path, document(events)).events) == len(events)
    alone = [*EVENTS, event("ncclX", 40, 9e5, tid=20)]
    assert len(plain(tmp_path, document(alone)).events) == len(alone)


@pytest.mark.parametrize("base", ["abc", 1e30, -5, [1]])
def test_a_base_time_that_is_none_is_said(tmp_path: Path, base: Any) -> None:
    """Times count from 0 then, and a note has the value."""
    content = {**document(EVENTS), "baseTimeNanoseconds": base}
    trace = plain(tmp_path, content)
    assert int(trace.events.start_ns[0]) == 10_000
    assert any("baseTimeNanoseconds" in note for note in trace.notes)


def test_numbers_beyond_64_bits(tmp_path: Path) -> None:
    """Step numbers, sizes and groups that no machine has are not taken for real."""
    huge = {"In msg nelems": 2**63, "dtype": "Float", "Group size": 2**60}
    for digits in (18, 25, 5000):
        named = {**step(1, 0, 100), "name": "ProfilerStep#" + "9" * digits}
        path = write(tmp_path / "t.json", document([named, event("ncclKernel_X", 5, 9, **huge)]))
        report = analyse([path]).report
        orjson.dumps(report.to_json())
        assert report.steps[0].step == (int("9" * 18) if digits == 18 else None)
        assert report.steps[0].collectives[0].bytes is None


def test_negative_durations_become_zero(tmp_path: Path) -> None:
    """And that is said."""
    trace = plain(tmp_path, document([event("k", 5, -3), event("k", 9, 0)]))
    assert (trace.events.end_ns - trace.events.start_ns).tolist() == [0, 0]
    assert any("negative" in note for note in trace.notes)


def test_python_functions_are_skipped(tmp_path: Path) -> None:
    """They are counted, not kept."""
    python = [event("f", i, 1, cat="python_function") for i in range(10)]
    trace = plain(tmp_path, document([*python, *EVENTS]))
    assert trace.python_events == 10
    assert len(trace.events) == 4


@pytest.mark.parametrize(
    ("name", "info", "given", "rank"),
    [
        ("t.json", {"rank": 5}, None, 5),
        ("t.json", {"rank": "5"}, None, 5),
        ("t.json", {"rank": 5}, 2, 2),
        ("worker12_step.json", {}, None, 12),
        ("x_rank3of8.json", {}, None, 3),
        ("t.json", {}, None, None),
    ],
)
def test_rank(
    tmp_path: Path, name: str, info: dict[str, Any], given: int | None, rank: int | None
) -> None:
    """The option counts most, then the file, then its name; a contradiction is said."""
    content = {"distributedInfo": info, "traceEvents": EVENTS}
    trace = read(write(tmp_path / name, content), rank=given)
    assert trace.rank == rank
    assert any("of rank 5: taken as 2" in note for note in trace.notes) == (given is not None)


def test_groups_of_on_demand_traces(tmp_path: Path) -> None:
    """Ranks written as text are read; a list that is cut is not taken for the whole."""
    config = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": "[0, 1, 2, 3]"},
        {"pg_name": "1", "pg_size": 100, "ranks": "[0, 1, ...]"},
    ]
    content = document(EVENTS)
    content["distributedInfo"]["pg_config"] = config
    groups = plain(tmp_path, content).groups
    assert groups["0"].ranks == (0, 1, 2, 3)
    assert (groups["1"].ranks, groups["1"].size) == ((), 100)


# -- broken files ------------------------------------------------------------------------------

TEXT = json.dumps(document(EVENTS)).encode()
PRETTY = json.dumps(document(EVENTS), indent=2).encode()
CUT = TEXT.index(b"ncclDev")


@pytest.mark.parametrize(
    ("broken", "left", "lost"),
    [
        pytest.param(TEXT[:CUT], 3, 1, id="cut inside an event"),
        pytest.param(TEXT[: TEXT.rindex(b"]}")], 4, 0, id="cut before the bracket"),
        pytest.param(json.dumps(EVENTS).encode()[:-1], 4, 0, id="list without its bracket"),
        pytest.param(TEXT[:-1], 4, 0, id="without the last brace"),
        pytest.param(gzip.compress(TEXT)[:-12], 3, 1, id="gzip cut short"),
        pytest.param(TEXT.replace(b"gemm", b"ge\x01m"), 4, 0, id="control byte"),
        pytest.param(TEXT.replace(b"gemm", b"ge\xff\xfem"), 4, 0, id="not UTF-8"),
        pytest.param(TEXT.replace(b'"device": 0', b'"device": NaN', 1), 4, 0, id="NaN"),
        pytest.param(TEXT.replace(b'"device": 0', b'"device": -inf', 1), 4, 0, id="inf"),
        pytest.param(TEXT.replace(b"gemm", b"C:\\gemm"), 4, 0, id="bad escape"),
        pytest.param(TEXT.replace(b"gemm", b'ge"mm'), 3, 1, id="quote inside"),
        pytest.param(TEXT.replace(b'"gemm"', b'"gemm'), 3, 1, id="quote missing"),
        pytest.param(PRETTY.replace(b'"gemm"', b'"gemm'), 3, 1, id="quote missing, indented"),
    ],
)
def test_what_is_whole_is_read_and_the_loss_stated(
    tmp_path: Path, broken: bytes, left: int, lost: int
) -> None:
    """Complete events come back; what is lost is counted; strict refuses."""
    path = tmp_path / "broken.json"
    path.write_bytes(broken)
    trace = read(path)
    assert len(trace.events) >= left
    assert trace.loss.events_lost == lost
    assert (trace.loss.bytes_lost > 0) == (lost > 0)
    assert not trace.loss.complete
    assert any("not whole" in note for note in trace.notes)
    with pytest.raises(InputError, match="not whole"):
        read(path, strict=True)


@pytest.mark.parametrize("damage", ["checksum", "length", "middle"])
def test_what_a_damaged_gzip_still_gives_is_read(tmp_path: Path, damage: str) -> None:
    """All of it where only the checksum is wrong, else what comes before the damage."""
    events = [event(f"kernel{i * 7919 % 10_007}", i, 1) for i in range(5000)]
    packed = bytearray(gzip.compress(json.dumps(document(events)).encode()))
    place = {"checksum": -8, "length": -4, "middle": len(packed) // 2}[damage]
    packed[place : place + 4 or None] = b"\xff\xff\xff\xff"
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed)
    trace = read(path)
    assert len(trace.events) >= (5000 if damage != "middle" else 2000)
    assert not trace.loss.complete
    assert any("not whole" in note for note in trace.notes)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("damage", ["cut", "no directory", "middle"])
def test_what_a_damaged_zip_still_gives_is_read(tmp_path: Path, damage: str, method: int) -> None:
    """All up to the damage, also where the archive's directory, at its end, is lost."""
    events = [event(f"kernel{i * 7919 % 10_007}", i, 1) for i in range(5000)]
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("trace.json", json.dumps(document(events)))
    packed = bytearray(path.read_bytes())
    middle = len(packed) // 2
    if damage == "middle":
        packed[middle : middle + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(packed[: {"cut": middle, "no directory": -60, "middle": None}[damage]])
    trace = read(path)
    assert len(trace.events) >= (5000 if damage == "no directory" else 2000)
    assert not trace.loss.complete
    assert any("not whole" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\x00\x01\x02\x03binary", "not a profiler trace"),
        (b'{"a": [1, 2]}', "not a profiler trace"),
        (b"[1, 2, 3]", "no event"),
        (b'{"traceEvents": []}', "no event"),
        (b"hello", "not a profiler trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """With the file's name and what to do."""
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@given(st.data())
def test_batches_do_not_depend_on_the_block(data: st.DataObject) -> None:
    """Cutting the text anywhere loses nothing, also where arguments hold lists of objects."""
    import tempfile

    number = st.integers(-(2**63), 2**63)  # orjson makes floats of larger ones
    inner = st.lists(st.fixed_dictionaries({"a": number, "name": st.text()}), max_size=3)
    extra = data.draw(st.lists(inner, min_size=1, max_size=6))
    events = [event(f"k{i}", i, 1, lists=one) for i, one in enumerate(extra)]
    indent = data.draw(st.sampled_from([None, 2]))
    text = json.dumps(document(events), indent=indent).encode()
    block = data.draw(st.integers(1, len(text)))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "BLOCK_BYTES", block)
        path = Path(folder) / "t.json"
        path.write_bytes(text)
        scan = scan_module.Scan(path)
        found = [one for batch in scan.batches() for one in batch]
    assert found == events
    assert scan.metadata["schemaVersion"] == 1
    assert (scan.events_lost, scan.bytes_lost, scan.repaired) == (0, 0, 0)


def test_memory_is_bounded_by_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of mostly Python functions takes less memory than it is long (case G10)."""
    python = event("torch/nn/modules/module.py(1511): _wrapped_call_impl", 1, 2, tid=1)
    python["cat"] = "python_function"
    one = json.dumps(python).encode()
    many = b", ".join([one] * 40_000 + [json.dumps(launch(5, 1)).encode()] * 4_000)
    path = write(tmp_path / "t.json", b'{"traceEvents": [' + many + b"]}")
    size = path.stat().st_size
    monkeypatch.setattr(scan_module, "BLOCK_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        trace = read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (trace.python_events, len(trace.events)) == (40_000, 4_000)
    assert peak < size


# -- several files -----------------------------------------------------------------------------


def ranks(tmp_path: Path, *infos: dict[str, Any]) -> list[Path]:
    return [
        write(tmp_path / f"{i}.json", {"distributedInfo": info, "traceEvents": EVENTS})
        for i, info in enumerate(infos)
    ]


def test_files_come_back_by_rank(tmp_path: Path) -> None:
    """Whatever order they are named in; a folder is searched."""
    ranks(tmp_path, {"rank": 1, "world_size": 2}, {"rank": 0, "world_size": 2})
    traces, notes = read_all([tmp_path])
    assert [trace.rank for trace in traces] == [0, 1]
    assert notes == []


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    """With both names."""
    files = ranks(tmp_path, {"rank": 1}, {"rank": 1})
    with pytest.raises(InputError, match="both of rank 1"):
        read_all(files)
    traces, _ = read_all(files, ranks=[0, 1])
    assert [trace.rank for trace in traces] == [0, 1]


def test_ranks_of_different_jobs_are_refused(tmp_path: Path) -> None:
    """World sizes, backends, or a rank beyond the world."""
    files = ranks(tmp_path, {"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 4})
    with pytest.raises(InputError, match="different jobs"):
        read_all(files)
    files = ranks(tmp_path, {"rank": 0, "world_size": 2}, {"rank": 2, "world_size": 2})
    with pytest.raises(InputError, match="rank 2 of 2"):
        read_all(files)
    day_ns = 86_400 * 10**9
    for days, refused in ((3, True), (0.5, False)):
        bases = (1_700_000_000_000_000_000, 1_700_000_000_000_000_000 + int(days * day_ns))
        files = [
            write(tmp_path / f"{rank}.json", document(EVENTS, rank=rank, world=2, base=base))
            for rank, base in enumerate(bases)
        ]
        if refused:
            with pytest.raises(InputError, match="begins 3 days later"):
                read_all(files)
        else:
            assert len(read_all(files)[0]) == 2


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, as a file is."""

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match=r"cannot read the folder .* Permission denied"):
        read_all([tmp_path])


def test_a_folder_may_hold_other_json(tmp_path: Path) -> None:
    """What is no trace is left out with a note; named, it is an error."""
    ranks(tmp_path, {"rank": 0})
    other = write(tmp_path / "settings.json", {"a": 1})
    traces, notes = read_all([tmp_path])
    assert len(traces) == 1
    assert any("settings.json" in note for note in notes)
    with pytest.raises(InputError, match="not a profiler trace"):
        read_all([tmp_path, other])


def test_nothing_to_read(tmp_path: Path) -> None:
    """No such path, or an empty folder."""
    with pytest.raises(InputError, match="there is no file"):
        read_all([tmp_path / "none.json"])
    with pytest.raises(InputError, match="holds no file"):
        read_all([tmp_path])


# -- real files --------------------------------------------------------------------------------


def test_our_own_recordings_are_whole() -> None:
    """Eight files of gloo ranks: ranks, host, group, and every event."""
    for name, size in (("bucketed", 2), ("onebucket", 2), ("straggler", 4)):
        traces, notes = read_all(own(name))
        assert [trace.rank for trace in traces] == list(range(size))
        assert notes == []
        for trace in traces:
            assert trace.loss.complete
            assert trace.groups["0"].ranks == tuple(range(size))
            assert trace.host


@pytest.mark.parametrize(
    ("name", "rank", "events", "kernels"),
    [
        ("hta/ddp_resnet_nccl_rank0of2_fullmeta.json.gz", 0, 26933, 2700),
        ("hta/recsys_async_cpu_to_gpu_rank3of8.json.gz", 3, 74937, 8568),
        ("hta/legacy_cats_Kernel_Runtime_async_gpu.json.gz", 1, 13, 4),
        ("hta/no_distributed_info_cpuops_only.json.gz", None, 2467, 0),
        ("tracelens/ddp_resnet_mi300_rank0of8.json.gz", 0, 14803, 2995),
        ("param_dlrm_8rank/rank0.pt.trace.json.gz", 0, 2460, 245),
    ],
)
def test_public_files_read_whole(name: str, rank: int | None, events: int, kernels: int) -> None:
    """As many events and kernels as a plain JSON parser finds."""
    trace = read(public(name))
    assert trace.loss.complete
    assert (trace.rank, len(trace.events)) == (rank, events)
    rows = trace.events.of(Kind.COMPUTE, Kind.COMMUNICATION, Kind.UNKNOWN)
    assert len(rows) == kernels
    assert (np.diff(trace.events.start_ns) >= 0).all()

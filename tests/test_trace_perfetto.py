"""The joined file: valid, complete, on one clock to the nanosecond."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.errors import InputError
from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.perfetto import Written, write_perfetto
from taciturn.trace.reader import read
from trace_files import document, event, launch, own, public, step, write
from trace_simulator import Op, documents, simulate


def joined(analysis: Analysis, path: Path) -> tuple[dict[str, Any], Written]:
    written = write_perfetto(analysis, path)
    # NaN and the like are no JSON
    text = gzip.decompress(path.read_bytes())
    value: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    return value, written


def raw(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    value = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return list(value["traceEvents"] if isinstance(value, dict) else value)


def ns(us: float) -> int:
    return round(us * 1000)


def check_valid(value: dict[str, Any]) -> None:
    """What Chrome's trace format asks of each event."""
    for one in value["traceEvents"]:
        assert isinstance(one["pid"], int)
        assert isinstance(one["tid"], int)
        assert isinstance(one["ts"], int | float)
        if one["ph"] == "X":
            assert one["dur"] >= 0
        if one["ph"] in "sf":
            assert isinstance(one["id"], int)
        if one["ph"] == "M":
            assert one["args"]


def content(one: dict[str, Any]) -> str:
    """An event without what joining changes."""
    kept = {
        key: value for key, value in one.items() if key not in ("ts", "dur", "pid", "tid", "id")
    }
    return json.dumps(kept, sort_keys=True)


@pytest.mark.parametrize("name", ["bucketed", "straggler"])
def test_nothing_is_lost(tmp_path: Path, name: str) -> None:
    """Every event of every rank is there once, under its rank, with its name and arguments."""
    paths = own(name)
    analysis = analyse(paths)
    value, written = joined(analysis, tmp_path / "out.json.gz")
    check_valid(value)
    expected = 0
    for view, path in zip(analysis.views, paths, strict=True):
        mine = [e for e in value["traceEvents"] if e["pid"] == view.rank and e["ph"] != "M"]
        theirs = [e for e in raw(path) if e["ph"] != "M"]
        assert Counter(map(content, mine)) == Counter(map(content, theirs))
        expected += len(theirs)
        threads = {(str(e["pid"]), str(e["tid"])) for e in theirs}
        assert len({e["tid"] for e in mine}) == len(threads)
    assert written == Written(expected, 0)


def test_times_are_those_of_the_analysis(tmp_path: Path) -> None:
    """Two ranks whose clocks differ by seconds, one drifting: each start and end to the ns."""
    programs = [[Op("compute", 40), Op("reduce", wait=True), Op("compute", 9), Op("sync")] * 4] * 2
    files = documents(simulate(programs, [20, 25, 30, 20]))
    for one in files[1]["traceEvents"]:
        if one["ph"] == "X":
            end = one["ts"] + one["dur"]
            one["ts"] = round(one["ts"] * 1.0001 + 3e6, 3)
            one["dur"] = round(end * 1.0001 + 3e6 - one["ts"], 3)
    paths = [write(tmp_path / f"{i}.json", one) for i, one in enumerate(files)]
    analysis = analyse(paths)
    assert set(analysis.clocks.corrections) == {0, 1}
    assert abs(analysis.clocks.corrections[1].offset_ns + 3_000_000_000) < 10_000_000
    value, _ = joined(analysis, tmp_path / "out.json.gz")
    base = value["baseTimeNanoseconds"]
    for view in analysis.views:
        mine = [e for e in value["traceEvents"] if e["pid"] == view.rank and e["ph"] == "X"]
        found = sorted((base + ns(e["ts"]), base + ns(e["ts"]) + ns(e["dur"])) for e in mine)
        assert found == sorted(zip(view.start_ns.tolist(), view.end_ns.tolist(), strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10**9)), min_size=1, max_size=20),
    st.integers(0, 2 * 10**18),
)
def test_a_round_trip_is_exact(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]], base: int
) -> None:
    """Whatever the base time, reading the joined file gives the same nanoseconds."""
    folder = tmp_path_factory.mktemp("trip")
    events = [event("gemm", a / 1000, n / 1000) for a, n in spans]
    path = write(folder / "in.json", document(events, base=base))
    analysis = analyse([path])
    write_perfetto(analysis, folder / "out.json.gz")
    before, after = read(path).events, read(folder / "out.json.gz")
    kept = [row for row in range(len(after.events)) if after.name(row) == "gemm"]
    assert after.events.start_ns[kept].tolist() == before.start_ns.tolist()
    assert sorted((after.events.end_ns - after.events.start_ns)[kept].tolist()) == sorted(
        (before.end_ns - before.start_ns).tolist()
    )


COMMUNICATION = "communication on the critical path"


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_the_name_says_whether_it_is_packed(tmp_path: Path, name: str) -> None:
    """Plain JSON unless the name ends in ``.gz``."""
    write_perfetto(analyse(own("onebucket")), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    assert json.loads(text)["traceEvents"]


def test_the_critical_path_and_exposed_parts(tmp_path: Path) -> None:
    """Two tracks: the path without a gap, and of it the transfers, with rank and event."""
    programs = [
        [Op("compute", 40), Op("reduce")],
        [Op("compute", 60), Op("reduce"), Op("compute", 10)],
    ]
    paths = [
        write(tmp_path / f"{i}.json", one)
        for i, one in enumerate(documents(simulate(programs, [20])))
    ]
    value, _ = joined(analyse(paths), tmp_path / "out.json.gz")
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in value["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {"critical path", COMMUNICATION} <= set(named.values())
    tracks: dict[str, list[Any]] = {"critical path": [], COMMUNICATION: []}
    for e in value["traceEvents"]:
        if e["ph"] == "X" and named[e["pid"], e["tid"]] in tracks:
            tracks[named[e["pid"], e["tid"]]].append(e)
    path = tracks["critical path"]
    assert all(ns(one["ts"] + one["dur"]) == ns(other["ts"]) for one, other in pairwise(path))
    assert (path[0]["ts"], path[-1]["ts"] + path[-1]["dur"]) == (0, 96)
    (exposed,) = tracks[COMMUNICATION]
    assert (exposed["ts"], exposed["dur"]) == (76, 20)
    assert "AllReduce" in exposed["name"]
    assert exposed["args"]["kind"] == "communication"


def test_arrows_of_ranks_stay_apart(tmp_path: Path) -> None:
    """Both ends of an arrow have one number, which no other rank has."""
    value, _ = joined(analyse(own("bucketed")), tmp_path / "out.json.gz")
    by_id: dict[int, list[dict[str, Any]]] = {}
    for e in value["traceEvents"]:
        if e["ph"] in "sf":
            by_id.setdefault(e["id"], []).append(e)
    assert by_id
    assert all(len({e["pid"] for e in ends}) == 1 for ends in by_id.values())
    assert all(sorted(e["ph"] for e in ends) == ["f", "s"] for ends in by_id.values())


def test_what_cannot_be_placed_is_counted(tmp_path: Path) -> None:
    """No time, text for a time, a year off: left out, and said; a negative duration becomes 0."""
    good = [step(1, 0, 100), launch(5, 1), event("gemm", 20, 50, correlation=1)]
    odd: list[Any] = [event("late", 3e13, 1), event("text", "soon", 1), event("none", None, 1)]  # type: ignore[arg-type]
    negative = event("negative", 30, -5)
    path = write(tmp_path / "in.json", document([*good, *odd, negative]))
    value, written = joined(analyse([path]), tmp_path / "out.json.gz")
    assert written == Written(4, 3)
    check_valid(value)
    names = {e["name"]: e for e in value["traceEvents"] if e["ph"] == "X"}
    assert names["negative"]["dur"] == 0
    assert "late" not in names


def test_real_files(tmp_path: Path) -> None:
    """All eight ranks of a public set, whose times are whole microseconds since 1970."""
    analysis = analyse([public("param_dlrm_8rank")])
    value, written = joined(analysis, tmp_path / "out.json.gz")
    check_valid(value)
    assert written.left_out == 0
    files = sorted(public("param_dlrm_8rank").glob("*.gz"))
    assert written.events == sum(e["ph"] != "M" for path in files for e in raw(path))


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    """That is an error that names the file, and nothing is left behind."""
    analysis = analyse(own("bucketed"))
    with pytest.raises(InputError, match="cannot write"):
        write_perfetto(analysis, tmp_path / "no" / "folder" / "out.json.gz")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_perfetto(analysis, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

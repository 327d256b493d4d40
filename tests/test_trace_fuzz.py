"""Damaged traces: a report with finite numbers or one error of ours, never anything else."""

from __future__ import annotations

import copy
import gzip
import json
import math
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from taciturn.errors import InputError
from taciturn.trace import analyse, parse_change, predict
from taciturn.trace.table import render
from trace_files import PUBLIC, own
from trace_simulator import Op, documents, simulate

MAX_EVENTS = 400  # of each file: a third of a step of the recordings


@cache
def originals() -> list[list[bytes]]:
    """Jobs of one or two files: our recordings and simulations, and public ones where they are."""
    jobs = [[gzip.decompress(path.read_bytes()) for path in own("bucketed")]]
    jobs.append([gzip.decompress(own("onebucket")[0].read_bytes())])
    program = [Op("compute", 90), Op("reduce", wait=True), Op("compute", 50), Op("sync")] * 2
    jobs.append([json.dumps(one).encode() for one in documents(simulate([program] * 2, [70, 80]))])
    public = [
        "hta/cuda_sync_event_multistream_singlegpu.json.gz",
        "hta/gloo_cpuonly_rank34of300.json.gz",
        "hta/legacy_cats_Kernel_Runtime_async_gpu.json.gz",
    ]
    there = [PUBLIC / name for name in public if (PUBLIC / name).exists()]
    return jobs + [[gzip.decompress(path.read_bytes())] for path in there]


@cache
def thinned() -> list[list[dict[str, Any]]]:
    """The same as objects, with at most so many events each."""
    jobs = []
    for files in originals():
        job = []
        for text in files:
            one = json.loads(text)
            # Short events first: ranges and collectives are few, and come last.
            few = one["traceEvents"][:MAX_EVENTS]
            kept = [e for e in one["traceEvents"] if e.get("cat") == "user_annotation"]
            job.append({**one, "traceEvents": few + kept})
        jobs.append(job)
    return jobs


def check(files: Sequence[bytes]) -> None:
    """Analyse, predict, print and write: finite numbers, or an error of ours."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, text in enumerate(files):
            paths.append(Path(folder) / f"{number}.json")
            paths[-1].write_bytes(text)
        try:
            analysis = analyse(paths)
        except InputError:
            return
        report = predict(analysis, [parse_change("bytes/2"), parse_change("bandwidth/3")])
    json.dumps(report.to_json(), allow_nan=False)
    for step in (*report.steps, report.mean):
        for value in (step.measured_s, step.busy_s, step.exposed_low_s, step.exposed_high_s):
            assert math.isfinite(value)
            assert value >= 0
        assert step.overlap is None or 0 <= step.overlap <= 1
        assert step.not_overlapped_s <= step.busy_s
        assert step.exposed_low_s <= step.exposed_s <= step.exposed_high_s
        assert all(seconds >= 0 for seconds in vars(step.critical_path).values())
    for one in report.predictions:
        assert 0 <= one.low_s <= one.step_s <= one.high_s
    with Path("/dev/null").open("w", encoding="utf-8") as nowhere:
        Console(file=nowhere, width=80).print(render(report))


@st.composite
def damaged_bytes(draw: st.DrawFn) -> list[bytes]:
    """A job in which bytes of one file are overwritten, cut out, doubled, or cut off."""
    files = list(draw(st.sampled_from(originals())))
    which = draw(st.integers(0, len(files) - 1))
    text = bytearray(files[which])
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 1, 7, 300, 40_000])))
        how = draw(st.sampled_from(["overwrite", "cut out", "double", "cut off"]))
        if how == "overwrite":
            text[start:end] = draw(st.binary(max_size=20))
        elif how == "cut out":
            del text[start:end]
        elif how == "double":
            text[end:end] = text[start:end]
        elif draw(st.booleans()):
            del text[start:]
    files[which] = bytes(text)
    if draw(st.booleans()):
        files[which] = gzip.compress(files[which], 1)[: draw(st.integers(10, 200_000))]
    return files


@settings(max_examples=120)
@given(damaged_bytes())
def test_damaged_bytes(files: list[bytes]) -> None:
    """Bytes gone wrong anywhere: what is left is analysed, or refused with a message."""
    check(files)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "7", "stream 7", "nan", "-1", "1e400", [], {}, [1, [2]], {"a": 1}]),
    st.text(max_size=5),
)
FIELDS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]
ARGS = [
    "correlation",
    "stream",
    "device",
    "External id",
    "Collective name",
    "In msg nelems",
    "dtype",
    "Process Group Name",
    "Process Group Ranks",
    "Group size",
    "Seq",
    "Comms Id",
    "Input Dims",
    "Input type",
    "cuda_sync_kind",
    "wait_on_stream",
    "wait_on_cuda_event_record_corr_id",
]
META = ["distributedInfo", "baseTimeNanoseconds", "deviceProperties", "host_name", "traceName"]
INFO = ["rank", "world_size", "backend", "pg_config"]


@st.composite
def damaged_events(draw: st.DrawFn) -> list[bytes]:
    """A job in which events are valid JSON and wrong: fields, types, times, order, number."""
    files = copy.deepcopy(draw(st.sampled_from(thinned())))
    one = files[draw(st.integers(0, len(files) - 1))]
    events = one["traceEvents"]
    for _ in range(draw(st.integers(1, 12))):
        at = draw(st.integers(0, len(events) - 1)) if events else 0
        how = draw(st.sampled_from(["field", "args", "meta", "info", "drop", "double", "shift"]))
        if how == "meta":
            one[draw(st.sampled_from(META))] = draw(ODD)
        elif how == "info" and isinstance(one.get("distributedInfo"), dict):
            one["distributedInfo"][draw(st.sampled_from(INFO))] = draw(ODD)
        elif not events:
            continue
        elif how == "field":
            events[at] = {**events[at], draw(st.sampled_from(FIELDS)): draw(ODD)}
        elif how == "args" and isinstance(events[at].get("args"), dict):
            args = {**events[at]["args"], draw(st.sampled_from(ARGS)): draw(ODD)}
            events[at] = {**events[at], "args": args}
        elif how == "drop":
            del events[at : at + draw(st.integers(1, 200))]
        elif how == "double":
            events += events[at : at + draw(st.integers(1, 50))]
        elif how == "shift":
            by = draw(st.sampled_from([-1e9, -1000, -1, 0.0005, 3, 1e5, 1e14]))
            for index in range(at, min(len(events), at + draw(st.integers(1, 100)))):
                if isinstance(events[index].get("ts"), int | float):
                    events[index] = {**events[index], "ts": events[index]["ts"] + by}
    if draw(st.booleans()):
        events.reverse()
    return [json.dumps(file).encode() for file in files]


@settings(max_examples=200)
@given(damaged_events())
def test_damaged_events(files: list[bytes]) -> None:
    """Events that are JSON and nonsense: the same."""
    check(files)


@pytest.mark.parametrize("number", range(6))
def test_undamaged(number: int) -> None:
    """The originals themselves pass, whole and thinned."""
    if number >= len(originals()):
        pytest.skip("the public traces are not here")
    check(originals()[number])
    check([json.dumps(one).encode() for one in thinned()[number]])

"""Seconds and peak memory of reading and analysing one trace, beside HolisticTraceAnalysis.

``python benchmarks/trace_speed.py [TRACE] [--events N] [--hta-python PYTHON] [--json FILE]``. The
default is a generated trace of two million events. Every measurement is a process of its own, which
reports its peak resident memory; that of importing the libraries is given apart and is part of it.
HolisticTraceAnalysis (from PyPI) is measured where ``--hta-python`` names the interpreter of an
environment that has it: loading the file, and its overlap of communication and computation, which
is the nearest to a part of our report. The repeats of all programs are interleaved.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS = 2_000_000
KERNELS_PER_STEP = 2000
REDUCE_EVERY = 50  # kernels
EVENT_US = 10.0

# Each prints one JSON object on its last line; argv[1] is the trace.
_MEASURE = """
import json, resource, sys, time
start = time.perf_counter()
{imports}
imported_s = time.perf_counter() - start
def peak():
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(one).ru_maxrss for one in who)
imported_bytes = peak()
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
print(json.dumps(dict(seconds=seconds, peak_bytes=peak(), imported_s=imported_s,
                      imported_bytes=imported_bytes)))
"""
OURS = {
    "taciturn: read": (
        "from pathlib import Path; from taciturn.trace.reader import read",
        "read(Path(sys.argv[1]))",
    ),
    "taciturn: read, analyse": (
        "from pathlib import Path; from taciturn.trace.analysis import analyse",
        "analyse([Path(sys.argv[1])])",
    ),
}
THEIRS = {
    "HolisticTraceAnalysis: load": (
        "from hta.trace_analysis import TraceAnalysis",
        "TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir='')",
    ),
    "HolisticTraceAnalysis: load, overlap": (
        "from hta.trace_analysis import TraceAnalysis",
        "TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir='').get_comm_comp_overlap(False)",
    ),
}


def events(count: int) -> Iterator[dict[str, Any]]:
    """A step after the other: an operator, its launch and its kernel; now and then a collective."""
    steps = max(1, count // (3 * KERNELS_PER_STEP))
    kernels = max(1, count // (3 * steps))
    number, ts = 0, 1000.0
    for step in range(steps):
        yield {
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1,
            "tid": 1, "ts": ts, "dur": EVENT_US * kernels, "args": {"External id": 0},
        }  # fmt: skip
        for place in range(kernels):
            number += 1
            at = ts + EVENT_US * place
            reduces = place % REDUCE_EVERY == REDUCE_EVERY - 1
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if reduces else f"gemm_{place % 40}"
            args: dict[str, Any] = {
                "External id": number, "device": 0, "context": 1, "stream": 20 if reduces else 7,
                "correlation": number, "grid": [32, 1, 1], "block": [256, 1, 1],
                "registers per thread": 96, "shared memory": 0, "queued": 0,
                "est. achieved occupancy %": 50,
            }  # fmt: skip
            if reduces:
                args |= {
                    "Collective name": "allreduce", "In msg nelems": 262144,
                    "Out msg nelems": 262144, "Group size": 8, "dtype": "Float",
                    "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
                }  # fmt: skip
            yield {
                "ph": "X", "cat": "cpu_op", "name": f"aten::op_{place % 60}", "pid": 1, "tid": 1,
                "ts": at, "dur": 8.5, "args": {"External id": number, "Ev Idx": number},
            }  # fmt: skip
            yield {
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                "ts": at + 2, "dur": 4.25,
                "args": {"External id": number, "cbid": 211, "correlation": number},
            }  # fmt: skip
            yield {
                "ph": "X", "cat": "kernel", "name": name, "pid": 0,
                "tid": 20 if reduces else 7, "ts": at + 12, "dur": 7.75, "args": args,
            }  # fmt: skip
        ts += EVENT_US * (kernels + 5)


def generate(path: Path, count: int) -> None:
    """Write a trace of about that many events, gzipped."""
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "deviceProperties": [{"id": 0, "name": "GPU", "numSms": 108}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for place, event in enumerate(events(count)):
            file.write((",\n" if place else "") + json.dumps(event))
        file.write("]}")


def count_bytes(path: Path) -> int:
    """Length of the text, decompressed."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else path.open("rb") as file:
        return sum(len(block) for block in iter(lambda: file.read(1 << 20), b""))


def measure(python: str, program: tuple[str, str], trace: Path) -> dict[str, Any]:
    """Run one program on the trace, in a process of its own."""
    code = _MEASURE.format(imports=program[0], work=program[1])
    done = subprocess.run(
        [python, "-c", code, str(trace.resolve())], capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        raise SystemExit(f"{program[1]} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, nargs="?", help="by default a generated one")
    parser.add_argument("--events", type=int, default=EVENTS, help="of the generated one")
    parser.add_argument("--hta-python", help="of an environment with HolisticTraceAnalysis")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    programs = [(sys.executable, name, program) for name, program in OURS.items()]
    if arguments.hta_python:
        programs += [(arguments.hta_python, name, program) for name, program in THEIRS.items()]
    with tempfile.TemporaryDirectory() as folder:
        trace = arguments.trace or Path(folder, "rank0.json.gz")
        if not arguments.trace:
            generate(trace, arguments.events)
        size = count_bytes(trace)
        found: dict[str, list[dict[str, Any]]] = {name: [] for _, name, _ in programs}
        for _ in range(arguments.repeats):
            for python, name, program in programs:
                found[name].append(measure(python, program, trace))
        what = trace.name if arguments.trace else f"generated, {arguments.events} events"
    rows = []
    print(f"{what}: {size / 1e6:.1f} MB of JSON; medians of {arguments.repeats}")
    print(
        f"{'program':40}{'seconds':>10}{'MB/s':>8}{'peak MB':>10}{'of file':>9}{'imports MB':>12}"
    )
    for name, runs in found.items():
        seconds = statistics.median(one["seconds"] for one in runs)
        peak = max(one["peak_bytes"] for one in runs)
        imported = max(one["imported_bytes"] for one in runs)
        print(
            f"{name:40}{seconds:10.2f}{size / 1e6 / seconds:8.1f}{peak / 1e6:10.0f}"
            f"{peak / size:8.1f}x{imported / 1e6:12.0f}"
        )
        rows.append({"program": name, "trace": what, "text_bytes": size, "runs": runs})
    if arguments.json:
        about = {"python": platform.python_version(), "system": platform.platform()}
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Trace files for tests: made by hand, our own recordings, and public ones where they are.

The public files are third-party data and not part of the project. A checkout may have them beside
it, or TACITURN_TRACES may name their folder; the tests that read them skip where they are missing.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

OWN = Path(__file__).parent / "traces"
PUBLIC = Path(os.environ.get("TACITURN_TRACES", Path(__file__).parents[2] / "shared" / "traces"))


def public(name: str) -> Path:
    """A public file or folder; skips the test where it is not there."""
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"the public traces are not here: {path} (set TACITURN_TRACES)")
    return path


def own(name: str) -> list[Path]:
    """Our own recording ``bucketed``, ``onebucket`` or ``straggler``: one file per rank."""
    return sorted(OWN.glob(f"ddp_{name}_rank*.json.gz"))


def event(
    name: str,
    start_us: float,
    duration_us: float,
    *,
    cat: str = "kernel",
    tid: Any = 7,
    pid: Any = 0,
    **args: Any,
) -> dict[str, Any]:
    """A complete event; a kernel on stream 7 if nothing else is said."""
    if cat in ("kernel", "gpu_memcpy", "cuda_sync") and "stream" not in args:
        args = {"device": 0, "stream": tid, **args}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def launch(start_us: float, correlation: int, duration_us: float = 5, tid: int = 1) -> Any:
    """A runtime call that launches the kernel of that correlation."""
    return event(
        "cudaLaunchKernel",
        start_us,
        duration_us,
        cat="cuda_runtime",
        pid=100,
        tid=tid,
        correlation=correlation,
    )


def step(number: int, start_us: float, duration_us: float, tid: int = 1) -> Any:
    """A step's range on the CPU."""
    name = f"ProfilerStep#{number}"
    return event(name, start_us, duration_us, cat="user_annotation", pid=100, tid=tid)


def document(
    events: Sequence[Any], *, rank: int | None = 0, world: int = 1, base: int = 0, **more: Any
) -> dict[str, Any]:
    """What the profiler writes round the events."""
    info = {"backend": "nccl", "world_size": world}
    if rank is not None:
        info["rank"] = rank
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": list(events),
        **more,
    }


def write(path: Path, content: Any) -> Path:
    """Write bytes as they are, anything else as JSON; gzipped if the name ends in ``.gz``."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path

"""Time of encoding and decoding a buffer on each wire, as a ratio to one memcpy of it.

One thread, 32 MiB of fp32, all measured side by side in one run; the median of interleaved repeats.

    python benchmarks/wires.py [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from taciturn.collectives.wires import WIRES, make_wire

NUMEL = 32 * (1 << 20) // 4
REPEATS = 15


def clocked(function: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows, raw times included, to a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    jobs: dict[str, Callable[[], object]] = {"memcpy": lambda: out.copy_(values)}
    for name in WIRES[1:]:
        wire = make_wire(name, torch.float32)
        message = wire.message(NUMEL)

        def job(wire=wire, message=message) -> None:  # type: ignore[no-untyped-def]
            wire.encode(values, message)
            wire.decode(message, out)

        jobs[name] = job
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(REPEATS + 1):
        for name, job in jobs.items():
            seconds = clocked(job)
            if repeat:
                times[name].append(seconds)
    memcpy_s = statistics.median(times["memcpy"])
    rows = [
        {
            "wire": name,
            "median_s": statistics.median(seconds),
            "ratio_to_memcpy": statistics.median(seconds) / memcpy_s,
            "times_s": seconds,
            "buffer_bytes": NUMEL * 4,
        }
        for name, seconds in times.items()
    ]
    for row in rows:
        print(
            f"{row['wire']:8} {row['median_s'] * 1e3:8.2f} ms {row['ratio_to_memcpy']:6.2f} memcpy"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

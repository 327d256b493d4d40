"""Predict a step from a recording at one link rate, then run what was predicted, and compare.

``python benchmarks/trace_prediction.py --json benchmarks/trace_prediction.json`` takes about five
minutes on two cores. Three checks, all on emulated links:

- data-parallel training of a small GPT is recorded at 100 Mbit/s; the step is predicted at 200 and
  400 Mbit/s and with ``quantized:bits=8``, then each of these is run without a profiler;
- an all-reduce that is completely hidden behind compute: its bytes are cut to a quarter, in the
  prediction and then in the program;
- the same program with its compute cut instead, so that the all-reduce shows: the opposite answer.
  Compute is nearly all of these two, and from run to run it may be half as fast: so the program is
  run both as it was and changed, in turns, and predicted is by how much they differ.

The codec's seconds are measured before, on loopback, where no link is shaped. Every prediction is
made before what it predicts is run. A measured step is the median over blocks of consecutive steps,
without barriers, of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from taciturn import ddp
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.testbed import Testbed
from taciturn.trace import CodecCost, parse_change, predict
from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.recording import record
from taciturn.trace.report import Prediction
from taciturn.units import format_rate, parse_rate

RANKS = 2  # one core each: the compute of one must not slow the other's
BASE = "100mbit"
RATES = ("200mbit", "400mbit")
METHOD = "quantized:bits=8"
PARAMETERS = 1_000_000
SEQUENCES = 4
PIECE_MIB = 1  # of DDP's buckets and of the method's groups: what overlaps must be alike
HIDDEN_ELEMS = 150_000  # 600 kB: 50 ms at 100 Mbit/s, behind the compute below
WORK = {"hidden": 40, "shown": 2}  # matrix products beside the all-reduce
WIDTH = 512
JOB = "TACITURN_TRACE_PREDICTION"


def slowest(seconds: float) -> float:
    """Return the largest over ranks."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def training(method: str) -> tuple[Callable[[], None], ddp.Communicator | None]:
    """Return the step of a data-parallel loop, and the communicator of a method."""
    net = inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator().manual_seed(0))
    model = DistributedDataParallel(net, bucket_cap_mb=PIECE_MIB)
    communicator = None
    if method:
        communicator = ddp.attach(model, method, group_bytes=PIECE_MIB * 2**20, timeout_s=120)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = inputs.draw_batch(inputs.corpus(), SEQUENCES, generator)

    def step() -> None:
        optimizer.zero_grad()
        inputs.GPT.loss(model, batch).backward()  # type: ignore[arg-type]
        optimizer.step()

    return step, communicator


def beside(products: int, elems: int) -> Callable[[], None]:
    """Return a step that computes beside one all-reduce, and then waits for it."""
    buffer, matrix = torch.zeros(elems), torch.eye(WIDTH)

    def step() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        for _ in range(products):
            torch.mm(matrix, matrix)
        assert work is not None
        work.wait()
        buffer.add_(1)

    return step


def rank_main(job: dict[str, Any]) -> None:
    """Run on every rank: time blocks of steps, record some where asked, write what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator = None
    if job["program"] == "training":
        step, communicator = training(job["method"])
    else:
        step = beside(WORK[job["program"]], job["elems"])
    steps = [step]
    if job["reference_elems"]:
        steps.append(beside(WORK[job["program"]], job["reference_elems"]))
    for one in steps * 3:
        one()
    blocks: list[list[float]] = [[] for _ in steps]
    for _ in range(job["blocks"]):
        for one, seconds in zip(steps, blocks, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(job["steps"]):
                one()
            seconds.append(slowest(time.perf_counter() - start) / job["steps"])
    answer: dict[str, Any] = {"step_s": statistics.median(blocks[0]), "step_s_all": blocks[0]}
    answer["reference_s"] = statistics.median(blocks[-1])
    if communicator is not None and (metrics := communicator.metrics()) is not None:
        answer["codec_s"] = slowest(metrics.codec_s)
        answer["sent_bytes"] = metrics.sent_bytes
    if job["folder"]:
        with record(job["folder"], steps=job["steps"], skip=2) as recording:
            for _ in range(job["steps"] + 2):
                step()
                recording.step()
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(answer))
    if communicator is not None:
        communicator.close()
    dist.barrier()
    end_rank(0)


def run(rate: str, arguments: argparse.Namespace, **job: Any) -> dict[str, Any]:
    """Run a program on the ranks, and return what it measured."""
    bits = parse_rate(rate)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "program": "training",
            "method": "",
            "folder": "",
            "elems": HIDDEN_ELEMS,
            "reference_elems": 0,
            "steps": arguments.steps,
            "blocks": arguments.blocks,
            "out": str(Path(folder, "out.json")),
            **job,
        }
        with Testbed(ranks=RANKS, rate=bits, namespaces=bits is not None) as testbed:
            testbed.run(
                [sys.executable, __file__], timeout_s=600, env={JOB: json.dumps(job)}
            ).check()
        answer: dict[str, Any] = json.loads(Path(job["out"]).read_text())
    return answer


def codec_cost(arguments: argparse.Namespace) -> CodecCost:
    """What the method costs, from a run on loopback: seconds and bytes, over those of DDP's."""
    found = run("unshaped", arguments, method=METHOD, blocks=1)
    net = inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator())
    plain_bytes = 4 * sum(p.numel() for p in net.parameters())
    # A ring all-reduce sends 2 (N - 1) / N of the buffer.
    ring_bytes = plain_bytes * 2 * (RANKS - 1) / RANKS
    return CodecCost(found["sent_bytes"] / ring_bytes, found["codec_s"] / plain_bytes)


def recorded(arguments: argparse.Namespace, **job: Any) -> tuple[dict[str, Any], Analysis]:
    """Run and record at the base rate; return what was measured, and the analysis."""
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder, "traces")
        found = run(BASE, arguments, folder=str(traces), **job)
        return found, analyse([traces])


def predicted(analysis: Analysis, text: str, codecs: dict[str, CodecCost]) -> Prediction:
    """Predict one change."""
    return predict(analysis, [parse_change(text)], codecs=codecs).predictions[0]


def row(
    name: str, one: Prediction, base_s: float, found: dict[str, Any], speed: float = 1.0
) -> dict[str, Any]:
    """One line of the table.

    Args:
        name: of the check.
        one: the prediction.
        base_s: a step before the change.
        found: what was measured with it.
        speed: seconds of a step before the change when that was measured, over those when it was
            recorded.
    """
    actual = found["step_s"]
    return {
        "check": name,
        "change": one.what,
        "recorded_base_s": one.base_s,
        "measured_base_s": base_s,
        "predicted_s": one.step_s * speed,
        "predicted_low_s": one.low_s * speed,
        "predicted_high_s": one.high_s * speed,
        "measured_s": actual,
        "measured_s_all": found["step_s_all"],
        "error": one.step_s * speed / actual - 1,
        "inside": one.low_s * speed <= actual <= one.high_s * speed,
        "notes": list(one.notes),
    }


def check_training(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Faster links and a method, predicted from one recording."""
    cost = codec_cost(arguments)
    base, analysis = recorded(arguments)
    print(f"{analysis.report.diagnosis}\n{asdict(cost)}", flush=True)
    rows = []
    slow = parse_rate(BASE) or 1
    for rate in RATES:
        change = f"bandwidth*{(parse_rate(rate) or slow) / slow:g}"
        one = predicted(analysis, change, {})
        rows.append(row(f"training at {rate}", one, base["step_s"], run(rate, arguments)))
    one = predicted(analysis, f"method={METHOD}", {METHOD: cost})
    found = run(BASE, arguments, method=METHOD)
    rows.append(row(f"training with {METHOD}", one, base["step_s"], found))
    return rows


def check_beside(arguments: argparse.Namespace, program: str) -> list[dict[str, Any]]:
    """A quarter of the bytes of an all-reduce that is hidden, or shows."""
    _, analysis = recorded(arguments, program=program)
    one = predicted(analysis, "all_reduce bytes/4", {})
    changed = HIDDEN_ELEMS // 4
    found = run(BASE, arguments, program=program, elems=changed, reference_elems=HIDDEN_ELEMS)
    base_s = found["reference_s"]
    return [
        row(f"{program} all-reduce, a quarter", one, base_s, found, base_s / one.base_s),
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as lines of text."""
    head = ("check", "before", "recorded", "predicted", "bounds", "measured", "error")
    lines = [f"{head[0]:32}" + "".join(f"{name:>18}" for name in head[1:])]
    for one in rows:
        bounds = f"{one['predicted_low_s'] * 1e3:.0f}..{one['predicted_high_s'] * 1e3:.0f} ms"
        cells = [f"{one[key] * 1e3:.1f} ms" for key in ("measured_base_s", "recorded_base_s")]
        cells += [f"{one['predicted_s'] * 1e3:.1f} ms", bounds, f"{one['measured_s'] * 1e3:.1f} ms"]
        cells.append(f"{one['error']:+.1%}{'' if one['inside'] else ' outside'}")
        lines.append(f"{one['check']:32}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--steps", type=int, default=10, help="in a block, and recorded")
    parser.add_argument("--blocks", type=int, default=5, help="of which the median counts")
    arguments = parser.parse_args()
    rows = check_training(arguments)
    rows += check_beside(arguments, "hidden")
    rows += check_beside(arguments, "shown")
    errors = [abs(one["error"]) for one in rows]
    print(f"{RANKS} ranks, recorded at {format_rate(parse_rate(BASE))}, gloo\n{table(rows)}")
    inside = sum(one["inside"] for one in rows)
    print(f"median error {statistics.median(errors):.1%}, {inside} of {len(rows)} inside bounds")
    if arguments.json:
        about = {
            "ranks": RANKS,
            "parameters": PARAMETERS,
            "steps": arguments.steps,
            "blocks": arguments.blocks,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "median_error": statistics.median(errors),
        }
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if JOB in os.environ:
        rank_main(json.loads(os.environ[JOB]))
    else:
        main()

"""How good plans are: what was chosen against what was fastest, on emulated links.

``python benchmarks/plan_regret.py --json benchmarks/plan_regret.json`` probes links of 50, 200 and
1000 Mbit/s and unshaped ones between 2, 4 and 8 ranks, and right after it measures the training
steps of all methods there, for GPTs of 0.5 and 5 million parameters: about an hour and a half on
two cores, links in random order. What is measured is appended to a work file beside the result
(``--work``), one line each; a run that was cut goes on where it stopped. ``--quick`` does two
cells. ``--summarise`` only computes the result anew from the work file, with the plans as they are
made now.

Every method has a pass of its own (a new model, two steps to warm up, a few timed ones), all
methods in random order. A step is that of the slowest rank. Then the fastest three, the chosen ones
and DDP are measured again, in five passes in which they take turns, a few steps each: chosen_s,
best_s and ddp_bf16_s are of the second time, so that the best is not the luckiest. Relative errors
of predictions are of the first. How much of the regret is noise is told by a chooser that needs no
plan: ``by_measuring`` is the method that was fastest the first time.

On every link the backend's all_reduce is timed for sizes that the probe did not see.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_trainee import Trainee, mean, slowest
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan import CANDIDATES, Compute, Plan, make_plan, parse_model
from taciturn.plan.candidates import QUALITIES, allowed
from taciturn.plan.exchange import Pricer
from taciturn.plan.model import BUNDLED, Buffer
from taciturn.testbed import TCP_GOODPUT, Testbed
from taciturn.units import parse_rate

Row = dict[str, Any]

RANKS = (2, 4, 8)
RATES = ("50mbit", "200mbit", "1gbit", "unshaped")
MODELS = ("gpt-05m", "gpt-5m")
QUICK = ((2, "200mbit", "gpt-05m"), (4, "1gbit", "gpt-05m"))
LEFT_OUT = ("DDP, fp16 hook", "cast:wire=bf16", "ring", "coded:passes=16,code=fourier,shuffle=true")
"""Never the fastest: their like on narrower wires, or in DDP's own hook, is measured."""
STOCK = {"DDP, fp32": "ddp fp32", "DDP, bf16 hook": "ddp bf16 hook"}
PROBE_S, QUICK_PROBE_S = 60.0, 25.0
PROBES = 3
"""Tries, each longer, before a link counts as one that cannot be told."""
AGAIN, AGAIN_S = 5, 75.0
"""Passes of the second time, each of new models, for about so long together."""
MOST_TURNS, TURN, MOST_TURN = 30, 3, 12
"""Turns of a pass at most; steps of a turn: so many of the slowest method, at most so many of one
that takes as long with more. The first is not timed."""
MOST_PARAMETERS = 200_000_000
"""Of models that take turns with each other, over all ranks: about 10 GB with all they hold."""
WARMUPS, LEAST, MOST, PASS_S = 2, 2, 8, 2.5
"""Steps of a pass: to warm up, then at least and at most so many, for about so many seconds."""
UNSEEN_BYTES = (4 << 10, 64 << 20)
UNSEEN, UNSEEN_REPEATS, UNSEEN_S = 9, 25, 1.0
"""Sizes, and repeats of one: at most so many, in about so many seconds."""
TIMEOUT_S = 20_000.0


# ------------------------------------------------------------------------------ on the ranks


def step_seconds(method: str, parameters: int, batch: torch.Tensor) -> tuple[list[float], float]:
    """Return the seconds of each timed step of one pass, and those of coding in the last."""
    trainee = Trainee(method, parameters, 1e-3, 0)
    seconds = [timed(lambda: trainee.step(batch)) for _ in range(WARMUPS)]
    count = max(LEAST, min(MOST, int(PASS_S / max(seconds[-1], 1e-3))))
    seconds = [timed(lambda: trainee.step(batch)) for _ in range(count)]
    codec = 0.0
    if trainee.comm is not None:
        metrics = trainee.comm.metrics()
        codec = mean(metrics.codec_s) if metrics else 0.0
        trainee.comm.close()
    return seconds, codec


def batch_of(seed: int) -> torch.Tensor:
    """Return one sequence of 32 tokens and its next: computing is short beside what is sent."""
    generator = torch.Generator().manual_seed(seed)
    return inputs.draw_batch(inputs.corpus(), 1, generator)[:, :33]


def measure_again(job: Row) -> Row:
    """Measure the steps of a few methods in turns, so that all meet the same disturbances."""
    batch = batch_of(2000 + dist.get_rank())
    parameters, order = BUNDLED[job["model"]], random.Random(job["seed"])
    found: Row = {name: [] for name in job["names"]}
    together = max(2, MOST_PARAMETERS // (parameters * dist.get_world_size()))
    for _ in range(AGAIN):
        names = order.sample(job["names"], len(job["names"]))
        for start in range(0, len(names), together):
            some = names[start : start + together]
            for name, steps_s in take_turns(some, parameters, batch, job, order).items():
                found[name].append({"steps_s": steps_s})
            gc.collect()  # models and hooks hold each other; those of two groups would not fit
    return {"methods": found}


def take_turns(
    names: list[str], parameters: int, batch: torch.Tensor, job: Row, order: random.Random
) -> dict[str, list[float]]:
    """Return the seconds of each method's timed steps, of new models in turns."""
    trainees = {name: Trainee(STOCK.get(name, name), parameters, 1e-3, 0) for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    for trainee in trainees.values():
        for _ in range(WARMUPS):
            trainee.step(batch)
    for _ in range(job["turns"]):
        for name in order.sample(names, len(names)):
            step = trainees[name].step
            seconds = [timed(lambda: step(batch)) for _ in range(job["steps"][name])]  # noqa: B023
            steps[name] += seconds[1:]
    for trainee in trainees.values():
        if trainee.comm is not None:
            trainee.comm.close()
    return steps


def timed(run: Any) -> float:
    """Return the slowest rank's seconds behind a barrier."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return slowest(time.perf_counter() - start)


def compute_seconds(parameters: int, batch: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a step without exchange, and of backward in it."""
    trainee = Trainee("ddp fp32", parameters, 1e-3, 0)
    trainee.step(batch)
    steps, backwards = [], []
    for _ in range(7):

        def alone() -> None:
            with trainee.model.no_sync():
                trainee.step(batch)

        steps.append(timed(alone))
        dist.barrier()
        backwards.append(slowest(trainee.backward_s(batch, exchange=False)))
    return statistics.median(steps[1:]), statistics.median(backwards[1:])


def measure_cell(job: Row) -> Row:
    """Measure the steps of some methods of one model, in random order."""
    batch = batch_of(1000 + dist.get_rank())
    parameters, order = BUNDLED[job["model"]], random.Random(job["seed"])
    found: Row = {name: [] for name in job["names"]}
    computes = [compute_seconds(parameters, batch)]
    for name in order.sample(job["names"], len(job["names"])):
        seconds, codec = step_seconds(STOCK.get(name, name), parameters, batch)
        found[name].append({"steps_s": seconds, "codec_s": codec})
    computes.append(compute_seconds(parameters, batch))
    return {
        "compute_s": statistics.median(step for step, _ in computes),
        "backward_s": statistics.median(backward for _, backward in computes),
        "methods": found,
    }


def measure_link(job: Row) -> Row:
    """Probe, then time the backend's all_reduce of sizes that the probe did not see."""
    from taciturn.probe import Job, probe_link
    from taciturn.ranks import Ranks
    from taciturn.transport import DistributedTransport

    transport = DistributedTransport(timeout_s=60.0)
    ranks = Ranks(transport, torch.device("cpu"))
    refused: list[str] = []
    while True:
        start = time.perf_counter()
        budget_s = job["probe_s"] * (1 + len(refused))
        try:  # a probe disturbed by something else refuses to tell a link, on every rank alike
            link = probe_link(ranks, Job(seconds=budget_s, rate_bits_per_s=job["rate"]))
            break
        except InputError as error:
            refused.append(str(error))
            if len(refused) == PROBES:
                raise
    probe_s = time.perf_counter() - start
    unseen = measure_unseen(random.Random(ranks.size))
    transport.close()
    return {"link": link.to_json(), "probe_s": probe_s, "refused": refused, "unseen": unseen}


def measure_unseen(order: random.Random) -> list[Row]:
    """Time the backend's all_reduce of sizes that the probe did not see.

    In rounds of random order; short calls, which scatter most, are in more of the rounds.
    """
    low, high = UNSEEN_BYTES
    calls = []
    for number in range(UNSEEN):
        # Between powers of two, evenly in the logarithm.
        size = int(low * (high / low) ** ((number + 0.5) / UNSEEN)) // 4 * 4
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            flat = torch.zeros(size // dtype.itemsize, dtype=dtype)
            dist.all_reduce(flat)
            first_s = timed(lambda f=flat: dist.all_reduce(f))  # type: ignore[misc]
            repeats = max(1, min(UNSEEN_REPEATS, int(UNSEEN_S / first_s)))
            calls.append((name, size, flat, repeats, [first_s]))
    for number in range(1, UNSEEN_REPEATS):
        for _, _, flat, repeats, seconds in order.sample(calls, len(calls)):
            if number < repeats:
                seconds.append(timed(lambda f=flat: dist.all_reduce(f)))  # type: ignore[misc]
    return [
        {"dtype": name, "size_bytes": size, "seconds": statistics.median(seconds)}
        for name, size, _, _, seconds in calls
    ]


def rank_main(job: Row) -> None:
    """Run on every rank: measure, and have rank 0 write the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = {"link": measure_link, "cell": measure_cell, "again": measure_again}[job["kind"]](job)
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(row))
    dist.barrier()
    end_rank(0)


# ------------------------------------------------------------------------------- the driver


class Work:
    """What was measured so far: a file of JSON lines, read once and appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = []
        for line in lines:
            try:
                self.rows.append(json.loads(line))
            except json.JSONDecodeError:  # a run that was cut in the midst of a line
                continue

    def find(self, **what: Any) -> Row | None:
        """Return the latest row with these values."""
        rows = [r for r in self.rows if all(r.get(k) == v for k, v in what.items())]
        return rows[-1] if rows else None

    def add(self, row: Row) -> Row:
        """Keep a row, on disk too, on a line of its own after one that was cut."""
        self.rows.append(row)
        text = self.path.read_text() if self.path.exists() else ""
        cut = bool(text) and not text.endswith("\n")
        with self.path.open("a") as file:
            file.write("\n" * cut + json.dumps(row) + "\n")
        return row


def run_ranks(ranks: int, rate: int | None, job: Row) -> Row:
    """Start the ranks and return the row that they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        job = job | {"out": str(Path(folder) / "row.json"), "rate": rate}
        with Testbed(ranks=ranks, rate=rate) as testbed:
            environment = {"TACITURN_PLAN_REGRET": json.dumps(job)}
            testbed.run([sys.executable, __file__], timeout_s=TIMEOUT_S, env=environment).check()
        row: Row = json.loads(Path(job["out"]).read_text())
        return row


def link_of(work: Work, ranks: int, rate: str, probe_s: float) -> Row:
    """Return the probe of a link, measured if it is not in the work file."""
    key = {"kind": "link", "ranks": ranks, "rate": rate}
    found = work.find(**key)
    if found is None:
        print(f"probing {ranks} ranks at {rate}", flush=True)
        job = {"kind": "link", "probe_s": probe_s}
        found = work.add(key | run_ranks(ranks, parse_rate(rate), job))
    return found


def measured(work: Work, kind: str, cell: Sequence[Any], names: list[str], **how: Any) -> Row:
    """Return the steps of methods in a cell; those not in the work file are measured."""
    ranks, rate, model = cell
    key = {"kind": kind, "ranks": ranks, "rate": rate, "model": model}
    found = work.find(**key)
    if found is None or not set(names) <= set(found["methods"]):
        print(f"{kind}: {ranks} ranks at {rate}, {model}, {len(names)} methods", flush=True)
        job = {
            "kind": kind,
            "model": model,
            "names": names,
            "seed": len(work.rows),
            **how,
        }
        found = work.add(key | run_ranks(ranks, parse_rate(rate), job))
    return found


def plan_of(link_row: Row, cell_row: Row, quality: str) -> Plan:
    """Return the plan made of a probe and the compute of a cell."""
    link = Link.from_json(link_row["link"])
    compute = Compute(
        cell_row["compute_s"],
        min(1.0, cell_row["backward_s"] / max(cell_row["compute_s"], 1e-9)),
    )
    return make_plan(parse_model(cell_row["model"]), link, compute, quality=quality)


def step_s(row: Row, name: str) -> float:
    """Return the median step of a method, over all its passes."""
    return statistics.median(s for one in row["methods"][name] for s in one["steps_s"])


def noise(row: Row, name: str) -> float:
    """Return how much the medians of a method's passes differ, relative to the median."""
    medians = [statistics.median(one["steps_s"]) for one in row["methods"][name]]
    return (max(medians) - min(medians)) / statistics.median(medians)


def measured_names(quality: str = "any") -> list[str]:
    """Return the candidates that are measured, of a quality."""
    return [
        c.name
        for c in CANDIDATES
        if c.local_steps == 1 and c.name not in LEFT_OUT and allowed(c, quality)  # type: ignore[arg-type]
    ]


def run_cell(work: Work, cell: tuple[int, str, str], probe_s: float) -> None:
    """Measure one cell, and again what matters in it."""
    link_row = link_of(work, cell[0], cell[1], probe_s)
    first = measured(work, "cell", cell, measured_names())
    again = {"DDP, bf16 hook"}
    for quality in QUALITIES:
        names = [n for n in measured_names(quality) if n in first["methods"]]
        again |= set(sorted(names, key=lambda name: step_s(first, name))[:3])
        again.add(plan_of(link_row, first, quality).recommendation.name)
    names = sorted(again & set(measured_names()))
    slowest_s = max(step_s(first, name) for name in names)
    steps = {n: min(MOST_TURN, round(TURN * slowest_s / step_s(first, n))) for n in names}
    turn_s = sum(steps[name] * step_s(first, name) for name in names)
    turns = max(1, min(MOST_TURNS, round(AGAIN_S / AGAIN / turn_s)))
    measured(work, "again", cell, names, turns=turns, steps=steps)


# ------------------------------------------------------------------------------- the result


def cell_result(work: Work, first: Row, quality: str) -> Row | None:
    """Return a cell's line of the result; None if it is not whole yet."""
    key = {k: first[k] for k in ("ranks", "rate", "model")}
    link_row = work.find(kind="link", ranks=key["ranks"], rate=key["rate"])
    again = work.find(kind="again", **key)
    if link_row is None or again is None:
        return None
    plan = plan_of(link_row, first, quality)
    chosen = plan.recommendation.name

    def best_known(name: str) -> float:
        return step_s(again if name in again["methods"] else first, name)

    names = [n for n in measured_names(quality) if n in first["methods"]]
    finalists = [n for n in names if n in again["methods"]]
    best = min(finalists, key=best_known)
    by_measuring = min(names, key=lambda name: step_s(first, name))
    ddp = "DDP, bf16 hook"
    return {
        "ranks": key["ranks"],
        "rate_bits_per_s": parse_rate(key["rate"]),
        "model": key["model"],
        "quality": quality,
        "chosen": chosen,
        "chosen_s": best_known(chosen),
        "best": best,
        "best_s": best_known(best),
        "ddp_bf16_s": best_known(ddp),
        "by_measuring": by_measuring,
        "by_measuring_s": best_known(by_measuring),
        "noise": max(noise(again, n) for n in {best, ddp} | ({chosen} & set(again["methods"]))),
        "sentence": plan.recommendation.sentence,
    }


def errors_of(work: Work) -> list[Row]:
    """Return predicted and measured seconds of every method in every cell."""
    rows = []
    for first in work.rows:
        if first["kind"] != "cell":
            continue
        link_row = work.find(kind="link", ranks=first["ranks"], rate=first["rate"])
        if link_row is None:
            continue
        for row in plan_of(link_row, first, "any").predictions:
            if row.name in first["methods"]:
                seconds = step_s(first, row.name)
                rows.append(
                    {
                        "ranks": first["ranks"],
                        "rate": first["rate"],
                        "model": first["model"],
                        "method": row.name,
                        "predicted_s": row.step_s.value,
                        "low_s": row.step_s.low,
                        "high_s": row.step_s.high,
                        "measured_s": seconds,
                    }
                )
    return rows


def link_results(work: Work) -> list[Row]:
    """Return for each link its beta against the goodput, and how unseen sizes were predicted."""
    rows = []
    for row in work.rows:
        if row["kind"] != "link":
            continue
        link, rate = Link.from_json(row["link"]), parse_rate(row["rate"])
        pricer = Pricer(link, link.ranks)
        errors = []
        for one in row["unseen"]:
            item, method = (4, "backend") if one["dtype"] == "fp32" else (2, "backend:wire=bf16")
            told = pricer.seconds(method, Buffer(one["size_bytes"] // item, None, 1.0))
            errors.append(abs(told.link.total_s / one["seconds"] - 1))
        rows.append(
            {
                "ranks": row["ranks"],
                "rate_bits_per_s": rate,
                "probe_s": row["probe_s"],
                "refused": row["refused"],
                "beta_over_goodput": None
                if rate is None
                else TCP_GOODPUT * rate * link.both_ways.beta_s_per_byte.value / 8,
                "unseen_median_error": statistics.median(errors),
                "unseen_p90_error": statistics.quantiles(errors, n=10)[-1],
                "unseen_errors": errors,
            }
        )
    return rows


def share_within(cells: Sequence[Row], who: str = "chosen", most: float = 1.05) -> float | None:
    """Return the share of cells in which what somebody chose is within 5 % of the best."""
    if not cells:
        return None
    return sum(c[f"{who}_s"] <= most * c["best_s"] for c in cells) / len(cells)


def result(work: Work) -> Row:
    """Return the whole result, from the work file."""
    firsts = [row for row in work.rows if row["kind"] == "cell"]
    by_quality = {
        quality: [c for first in firsts if (c := cell_result(work, first, quality)) is not None]
        for quality in QUALITIES
    }
    errors, links = errors_of(work), link_results(work)
    unseen = [error for link in links for error in link["unseen_errors"]]
    relative = [abs(e["predicted_s"] / e["measured_s"] - 1) for e in errors]
    return {
        "cells": by_quality["any"],
        "median_relative_error": statistics.median(relative) if relative else None,
        "share_within_5_percent": share_within(by_quality["any"]),
        "share_within_interval": statistics.mean(
            e["low_s"] <= e["measured_s"] <= e["high_s"] for e in errors
        )
        if errors
        else None,
        "slower_than_ddp_bf16": [
            c
            for cells in by_quality.values()
            for c in cells
            if c["chosen_s"] > c["ddp_bf16_s"] * (1 + c["noise"])
        ],
        "by_quality": {
            quality: {
                "cells": cells,
                "share_within_5_percent": share_within(cells),
                "share_within_5_percent_by_measuring": share_within(cells, "by_measuring"),
            }
            for quality, cells in by_quality.items()
        },
        "links": links,
        "unseen_median_error": statistics.median(unseen) if unseen else None,
        "unseen_p90_error": statistics.quantiles(unseen, n=10)[-1] if unseen else None,
        "predictions": errors,
    }


def table(found: Row) -> str:
    """Return the result as lines of text."""
    lines = []
    for one in found["links"]:
        beta = one["beta_over_goodput"]
        lines.append(
            f"{one['ranks']} ranks at {_rate(one['rate_bits_per_s']):>10}: probe "
            f"{one['probe_s']:.0f} s, beta {'-' if beta is None else f'{beta:.3f}'} of goodput, "
            f"unseen all_reduces off by {one['unseen_median_error']:.1%} (p90 "
            f"{one['unseen_p90_error']:.1%})"
        )
    if found["links"]:
        lines.append(
            f"all: off by {found['unseen_median_error']:.1%} (p90 {found['unseen_p90_error']:.1%})"
        )
    for quality, of in found["by_quality"].items():
        share = of["share_within_5_percent"]
        if share is not None:
            measuring = of["share_within_5_percent_by_measuring"]
            told = f"within 5 % in {share:.0%}, chosen by measuring all in {measuring:.0%}"
            lines.append(f"\nquality {quality}: {told}")
        lines += [_line(cell) for cell in of["cells"]]
    ratios: dict[str, list[float]] = {}
    for one in found["predictions"]:
        ratios.setdefault(one["method"], []).append(one["predicted_s"] / one["measured_s"])
    lines.append("\npredicted over measured, median over the cells, least and greatest:")
    lines += [
        f"{name:52} {statistics.median(some):.2f}  {min(some):.2f} .. {max(some):.2f}"
        for name, some in ratios.items()
    ]
    error, inside = found["median_relative_error"], found["share_within_interval"]
    if error is not None:
        lines.append(f"\nstep times are off by {error:.1%} (median); {inside:.0%} within intervals")
    lines.append(f"shown slower than bf16 DDP: {len(found['slower_than_ddp_bf16'])}")
    return "\n".join(lines)


def _line(c: Row) -> str:
    return (
        f"{c['ranks']} x {_rate(c['rate_bits_per_s']):>10} {c['model']:8} "
        f"{c['chosen']:45} {c['chosen_s'] * 1e3:6.0f} ms; best {c['best']:45} "
        f"{c['best_s'] * 1e3:6.0f} ms; bf16 DDP {c['ddp_bf16_s'] * 1e3:6.0f} ms; "
        f"noise {c['noise']:.0%}"
    )


def _rate(bits_per_s: int | None) -> str:
    return "unshaped" if bits_per_s is None else f"{bits_per_s // 10**6} Mbit/s"


def main() -> None:
    """Parse the command line, measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--work", type=Path, help="measurements; by default beside --json")
    parser.add_argument("--quick", action="store_true", help="two cells, short probes")
    parser.add_argument("--summarise", action="store_true", help="measure nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cells")
    parser.add_argument("--cells", help="only these, as 4x200mbit:gpt-5m,8x50mbit:gpt-05m")
    arguments = parser.parse_args()
    target = arguments.json or Path("plan_regret.json")
    work = Work(arguments.work or target.with_suffix(".work.jsonl"))
    order = random.Random(arguments.seed)
    links = [(n, rate) for n in RANKS for rate in RATES]
    order.shuffle(links)
    cells = [(*link, model) for link in links for model in order.sample(MODELS, len(MODELS))]
    if arguments.quick:
        cells = list(QUICK)
    if arguments.cells:
        cells = [_cell(text) for text in arguments.cells.split(",")]
    if not arguments.summarise:
        for cell in cells:
            run_cell(work, cell, QUICK_PROBE_S if arguments.quick else PROBE_S)
            if arguments.json:
                arguments.json.write_text(json.dumps(result(work), indent=1) + "\n")
    found = result(work)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _cell(text: str) -> tuple[int, str, str]:
    where, _, model = text.partition(":")
    ranks, _, rate = where.partition("x")
    return int(ranks), rate, model


if __name__ == "__main__":
    if "TACITURN_PLAN_REGRET" in os.environ:
        rank_main(json.loads(os.environ["TACITURN_PLAN_REGRET"]))
    else:
        main()

"""What `taciturn.Accumulation` costs over a hand-written loop that computes the same gradient.

``python benchmarks/accumulation.py --json benchmarks/accumulation.json`` trains a byte-level GPT on
4 ranks, on loopback and over links of 100 Mbit/s. Both loops see the same sequences of unequal
length, four microbatches a step, and take the mean over all valid tokens of all ranks: by hand that
is ``no_sync`` for all but the last microbatch, one all-reduce of the counts ahead, the clip and the
step. Windows of both alternate in one run; the ratio of a pair is taken before the median, and the
interval is that of the median by bootstrap. ``norm_difference`` is the relative difference of the
norms of the two first gradients: that both compute the same thing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import bootstrap
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_trainee import mean, slowest
from taciturn import Accumulation
from taciturn.bench import inputs
from taciturn.ending import end_rank
from taciturn.testbed import Testbed
from taciturn.units import parse_rate

Row = dict[str, Any]

RANKS, MICROBATCHES, PARAMETERS, CLIP = 4, 4, 1_000_000, 1.0
CASES = ("unshaped", "100mbit")
TIMEOUT_S = 3000.0


def loss_sum(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses over the tokens of a batch, shape (sequences, length)."""
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def tokens_in(batch: torch.Tensor) -> int:
    """Return how many tokens are predicted."""
    return batch[:, 1:].numel()


class ByHand:
    """The loop that a careful person writes."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def window(self, batches: list[torch.Tensor]) -> float:
        """Take one step; return its norm."""
        tokens = torch.tensor([float(sum(map(tokens_in, batches)))], dtype=torch.float64)
        dist.all_reduce(tokens)
        factor = dist.get_world_size() / tokens.item()  # DDP divides by the number of ranks
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self.model.no_sync():
                (loss_sum(self.model, batch) * factor).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


class Ours:
    """The same with windows."""

    def __init__(self, net: torch.nn.Module, batches: list[list[torch.Tensor]]) -> None:
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        accumulation = Accumulation(self.model, MICROBATCHES)
        self.windows = accumulation.windows([one for window in batches for one in window])
        self._next = next(self.windows)

    def window(self, _batches: list[torch.Tensor]) -> float:
        """Take one step; return its norm."""
        window = self._next
        for batch in window:
            with window.microbatch(tokens=tokens_in(batch)):
                window.backward(loss_sum(self.model, batch))
        result = window.step(self.optimizer, clip_norm=CLIP)
        self._next = next(self.windows, window)
        return result.grad_norm


def measure(windows: int) -> Row:
    """Time pairs of windows; return the row, alike on all ranks."""
    text = inputs.corpus()
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    lengths = torch.randint(16, inputs.CONTEXT, (windows + 2, MICROBATCHES), generator=generator)
    batches = [
        [inputs.draw_batch(text, 2, generator)[:, : int(n) + 1] for n in some] for some in lengths
    ]
    nets = [
        inputs.GPT(inputs.gpt_shape(PARAMETERS), torch.Generator().manual_seed(0)) for _ in range(2)
    ]
    loops = {"by hand": ByHand(nets[0]), "ours": Ours(nets[1], batches)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    difference = 0.0
    for number, some in enumerate(batches):
        norms = {}
        for name in list(loops) if number % 2 else reversed(loops):
            dist.barrier()
            start = time.perf_counter()
            norms[name] = loops[name].window(some)
            times[name].append(slowest(time.perf_counter() - start))
        if number == 0:
            difference = abs(norms["ours"] / norms["by hand"] - 1)
    hand, ours = (np.array(times[name][2:]) for name in ("by hand", "ours"))
    interval = bootstrap((ours / hand,), np.median, rng=0).confidence_interval
    return {
        "ranks": dist.get_world_size(),
        "microbatches": MICROBATCHES,
        "windows": windows,
        "by_hand_s": statistics.median(hand.tolist()),
        "ours_s": statistics.median(ours.tolist()),
        "ratio": float(np.median(ours / hand)),
        "ratio_low": float(interval.low),
        "ratio_high": float(interval.high),
        "norm_difference": mean(difference),
    }


def rank_main(job: dict[str, Any]) -> None:
    """Run on every rank: measure, and have rank 0 write the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = measure(job["windows"])
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(row))
    dist.barrier()
    end_rank(0)


def main() -> None:
    """Parse the command line, run the cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--windows", type=int, default=40, help="timed pairs of windows")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        rate = None if case == "unshaped" else parse_rate(case)
        with tempfile.TemporaryDirectory() as folder, Testbed(ranks=RANKS, rate=rate) as testbed:
            out = Path(folder) / "row.json"
            job = json.dumps({"windows": arguments.windows, "out": str(out)})
            environment = {"TACITURN_ACCUMULATION": job}
            testbed.run([sys.executable, __file__], timeout_s=TIMEOUT_S, env=environment).check()
            row = {"rate_bits_per_s": rate, **json.loads(out.read_text())}
        rows.append(row)
        print(
            f"{RANKS} ranks, {case}: by hand {row['by_hand_s'] * 1e3:.0f} ms, "
            f"ours {row['ours_s'] * 1e3:.0f} ms, ratio {row['ratio']:.3f} "
            f"(95 % {row['ratio_low']:.3f} to {row['ratio_high']:.3f}); "
            f"norms differ by {row['norm_difference']:.1e}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if "TACITURN_ACCUMULATION" in os.environ:
        rank_main(json.loads(os.environ["TACITURN_ACCUMULATION"]))
    else:
        main()

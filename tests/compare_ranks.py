"""Ranks of a comparison that are made up: a job is done at once, with numbers as they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from probe_links import MadeUp
from taciturn.compare.sessions import Done

__all__ = ["MadeUpRanks"]

LINK = MadeUp().link().to_json()


class MadeUpRanks:
    """Does every job at once; ``failing`` says which fail, and how often."""

    def __init__(self, failing: Mapping[str, Any] | None = None, times: int = 10**6) -> None:
        self.failing, self.left = failing, times
        self.done: list[tuple[str, Mapping[str, Any]]] = []

    def do(self, regime: str, job: Mapping[str, Any]) -> Done:
        """As the contract says."""
        self.done.append((regime, job))
        if self.failing and self.left and all(job.get(k) == v for k, v in self.failing.items()):
            self.left -= 1
            return Done(None, "InputError on rank 0: disturbed")
        return Done(getattr(self, f"_{job['kind']}", self._train)(job), None)

    def _train(self, job: Mapping[str, Any]) -> dict[str, Any]:
        points = [
            {
                "step": step,
                "examples": 64 * step,
                "seconds": 0.01 * step,
                "consolidate_s": 0.0,
                "judge_s": 0.002,
                "interface_bytes": None,
                "sent_bytes": 100 * step,
                "residual_norm": 0.0,
                "gradient_norm": 1.0,
                # Best at the middle of the learning rates.
                "value": 1 / step + abs(math.log(job["learning_rate"] / 2e-3)) + 1e-4 * job["seed"],
            }
            for step in job["evaluate_at"]
        ]
        return {
            "points": points,
            "single_replica_value": points[-1]["value"],
            "averaged_value": points[-1]["value"],
            "replica_spread": 0.0,
            "nonfinite_steps": 0,
            "gradient_norm_last": 1.0,
            "gradient_norm_most": 1.0,
            "costs": {"residual_peak": 0.0},
            "examples": 64 * job["steps"],
            "tokens": 64 * job["steps"],
            "examples_hash": f"h{job['seed']}",
            "parameters": 1000,
        }

    def _time(self, job: Mapping[str, Any]) -> dict[str, Any]:
        step_s = 0.01 if job["method"].startswith("ddp") else 0.005
        return {
            "step_s": step_s * (1 + 1e-3 * (job["seed"] % 7)),
            "steps": 10,
            "start_s": 0.0,
            "consolidate_s": 0.0,
            "codec_s": 0.0,
            "waiting_s": 0.0,
            "state_bytes": 0,
            "sent_bytes": 100.0,
            "interface_bytes": None,
        }

    def _errors(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"replica_error": 0.0, "mean_error": 0.0, "spread": 0.0}

    def _probe(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"link": LINK}

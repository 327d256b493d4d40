"""One job on the ranks that do it: plain values in, plain values out, the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from taciturn.compare.average_errors import WARM_STEPS, average_errors
from taciturn.compare.experiment import CLUSTER
from taciturn.compare.task import Task
from taciturn.compare.training import TimeJob, TrainJob, shares_of, time_steps, train
from taciturn.plan import Model
from taciturn.probe import Job as ProbeJob
from taciturn.probe import probe_link
from taciturn.ranks import Ranks
from taciturn.transport import DistributedTransport
from taciturn.units import parse_rate

__all__ = ["Job", "do_job"]

Job = Mapping[str, Any]
"""What is to be measured; its ``kind`` among it. It is its own name."""


def do_job(task: Task, job: Job, timeout_s: float) -> dict[str, Any]:
    """Do a job; every rank calls it, in a process group.

    Raises:
        InputError: what was asked for cannot be, or a link that cannot be told.
        PeerError, MismatchError: a rank was lost or does something else.
    """
    match job["kind"]:
        case "trial" | "target" | "run":
            return train(
                task,
                TrainJob(
                    method=job["method"],
                    seed=job["seed"],
                    learning_rate=job["learning_rate"],
                    steps=job["steps"],
                    evaluate_at=tuple(job["evaluate_at"]),
                    timeout_s=timeout_s,
                ),
            )
        case "time":
            return time_steps(
                task,
                TimeJob(
                    method=job["method"],
                    seconds=job["seconds"],
                    seed=job["seed"],
                    timeout_s=timeout_s,
                ),
            )
        case "errors":
            shares = itertools.islice(shares_of(task, job["seed"]), WARM_STEPS + 1)
            rate = job["learning_rate"]
            return average_errors(task, job["method"], list(shares), job["seed"], rate, timeout_s)
        case "probe":
            return _probe(task, job, timeout_s)
        case kind:
            raise AssertionError(f"a job of kind {kind!r}")


def _probe(task: Task, job: Job, timeout_s: float) -> dict[str, Any]:
    transport = DistributedTransport(timeout_s=timeout_s)
    groups = Model.of_module(task.model(0), task.name).group_shapes()
    try:
        ranks = Ranks(transport, torch.device("cpu"))
        asked = ProbeJob(
            seconds=job["seconds"],
            methods=tuple(job["methods"]),
            timeout_s=timeout_s,
            rate_bits_per_s=None if job["regime"] == CLUSTER else parse_rate(job["regime"]),
            groups=groups,
        )
        return {"link": probe_link(ranks, asked).to_json()}
    finally:
        transport.close()

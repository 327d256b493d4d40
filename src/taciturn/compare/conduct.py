"""The whole comparison, in the order that the rules ask for; nothing is done twice.

Tune the baselines; fix the target; probe each regime and store what the plan says; tune each method
with its budget; run fresh paired seeds of all, interleaved; time all in each regime, interleaved;
probe again.
"""

from __future__ import annotations

import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from taciturn.compare import jobs as plan
from taciturn.compare.bundled import load_task
from taciturn.compare.experiment import Contender, Experiment
from taciturn.compare.predictions import predict
from taciturn.compare.records import Records
from taciturn.compare.sessions import LOOPBACK, Job, run_jobs
from taciturn.compare.task import Task
from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan import Compute, Model

__all__ = ["RECORDS", "about_here", "conduct", "remaining"]

RECORDS = "records.jsonl"

Say = Callable[[str], None]
OnProgress = Callable[[int, int, str], None]
"""Given how many jobs are done, how many there are in all, and what is under way."""


def conduct(
    experiment: Experiment, records: Records, on_progress: OnProgress | None = None
) -> None:
    """Do all that is missing.

    Raises:
        InputError: a baseline that never learns, a link of which nothing can be told.
        TestbedError: a regime that this machine cannot make.
    """
    _Conductor(experiment, records, on_progress).run()


class _Conductor:
    def __init__(
        self, experiment: Experiment, records: Records, on_progress: OnProgress | None
    ) -> None:
        self.experiment, self.records, self.on_progress = experiment, records, on_progress
        self.task: Task = load_task(experiment.task)
        self.model = Model.of_module(self.task.model(0), self.task.name)
        self.total = self._count()

    def run(self) -> None:
        experiment, records = self.experiment, self.records
        self._tune(experiment.baselines)
        self._do(LOOPBACK, plan.target_jobs(experiment, records))
        self._check_target()
        for regime in experiment.regimes:
            self._look_at(regime)
        self._tune(plan.contenders_to_tune(experiment, records, experiment.regimes))
        if experiment.mode == "composed":
            self._do(LOOPBACK, self._runs(*experiment.regimes))
        for regime in experiment.regimes:
            if experiment.mode == "direct":
                self._do(regime, self._runs(regime))
            after = [*self._timings(regime), plan.probe_job(experiment, regime, "after")]
            self._do(regime, after)

    def _tune(self, contenders: Sequence[Contender]) -> None:
        self._do(LOOPBACK, [j for c in contenders for j in plan.trial_jobs(self.experiment, c)])

    def _count(self) -> int:
        """Return about how many jobs there are in all."""
        e = self.experiment
        trials = len(e.baselines) * e.baseline_trials + len(e.methods) * e.trials
        looks = 3 + sum(len(c.variants()) for c in e.baselines)
        runs = len(e.contenders) * e.seeds
        direct = len(e.regimes) if e.mode == "direct" else 1
        return trials + e.target_seeds + len(e.regimes) * (looks + runs) + direct * runs

    def _look_at(self, regime: str) -> None:
        """Probe a regime, and store what is foretold of it before anything is run there."""
        experiment, records = self.experiment, self.records
        probe = plan.probe_job(experiment, regime, "before")
        compute = plan.compute_job(experiment, regime)
        self._do(regime, [probe, compute, *plan.variant_jobs(experiment, regime)])
        if records.find(plan.plan_job(regime)) is not None:
            return
        for job in (probe, compute):
            record = records.find(job)
            if record is None or record.result is None:
                why = "" if record is None else f": {record.failure}"
                raise InputError(
                    f"nothing can be foretold of the regime {regime}, as its {job['kind']} "
                    f"failed{why}; move {records.path} away and try again, or leave this regime out"
                )
        link = Link.from_json(records.find(probe).result["link"])  # type: ignore[union-attr, index]
        step_s = records.find(compute).result["step_s"]  # type: ignore[union-attr, index]
        texts = [t for c in experiment.contenders if not c.is_auto for t in c.variants()]
        autos = [c.method for c in experiment.methods if c.is_auto]
        told = predict(link, self.model, Compute(step_s), texts, autos)
        records.add(plan.plan_job(regime), told)

    def _runs(self, *regimes: str) -> list[Job]:
        """Return the runs that are reported, seed by seed, methods in a random order in each."""
        experiment, order = self.experiment, random.Random(0)
        found: list[Job] = []
        for seed in experiment.run_seeds():
            some = []
            for regime in regimes:
                for contender in experiment.contenders:
                    actual = plan.standing_for(experiment, self.records, contender, regime)
                    some.append(plan.run_job(experiment, self.records, actual, regime, seed))
            order.shuffle(some)
            found += some
        return found

    def _timings(self, regime: str) -> list[Job]:
        """Return what is timed in a regime, seed by seed likewise."""
        experiment, order = self.experiment, random.Random(regime)
        found: list[Job] = []
        for seed in experiment.run_seeds():
            some = []
            for contender in experiment.contenders:
                actual = plan.standing_for(experiment, self.records, contender, regime)
                text = plan.timed_method(experiment, self.records, actual, regime)
                some.append(plan.time_job(experiment, regime, text, seed))
            order.shuffle(some)
            found += some
        return found

    def _check_target(self) -> None:
        experiment, records = self.experiment, self.records
        for job in plan.target_jobs(experiment, records):
            record = records.find(job)
            if record is not None and record.result is not None:
                return
        failures = [
            f"{r.job['method']}: {r.failure}"
            for kind in ("trial", "target")
            for r in records.of_kind(kind)
            if r.failure is not None
        ]
        raise InputError(
            "no run of the tuned baseline ended, so there is no target: "
            f"{failures[0] if failures else 'no reason is recorded'}; see {records.path}"
        )

    def _do(self, regime: str, some: Sequence[Job]) -> None:
        """Do the jobs of which there is no record."""
        each = {repr(job): job for job in some}.values()  # contenders may share a run
        missing = [job for job in each if self.records.find(job) is None]
        if not missing:
            return

        def begun(job: Job) -> None:
            if self.on_progress is not None:
                what = job.get("method") or job.get("when")
                done = sum(1 for _ in self.records)
                self.on_progress(done, max(self.total, done + 1), f"{regime}: {job['kind']} {what}")

        run_jobs(
            self.experiment.task,
            self.experiment.ranks,
            regime,
            missing,
            self.experiment.timeout_s,
            self.records.add,
            begun,
        )


def remaining(experiment: Experiment, records: Records) -> tuple[int, int]:
    """How many jobs have a record, and about how many there are in all."""
    total = _Conductor(experiment, records, None).total
    done = sum(1 for _ in records)
    return done, max(done, total)


def about_here(experiment: Experiment) -> dict[str, Any]:
    """What the records are made with, here and now."""
    task = load_task(experiment.task)
    return {
        "taciturn": _version("taciturn"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "host": platform.node(),
        "threads": 1,
        "task": experiment.task,
        "facts": dict(task.facts) | {"examples": task.examples, "held_out": task.held_out},
        "metric": task.metric,
        "global_batch": task.global_batch,
        "settings": experiment.settings(),
        "commit": _commit(),
        "began_s": round(time.time(), 3),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """Return the commit of a checkout that this package runs from; "" if it does not."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()

"""The whole comparison, in the order that the rules ask for; nothing is done twice.

Tune the baselines; fix the target; probe each regime and store what the plan says; tune each method
with its budget; run fresh paired seeds of all, interleaved; time all in each regime, interleaved;
probe again.
"""

from __future__ import annotations

import math
import os
import platform
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from taciturn.compare import jobs as plan
from taciturn.compare.bundled import load_task
from taciturn.compare.experiment import CLUSTER, Contender, Experiment
from taciturn.compare.methods import comparable
from taciturn.compare.predictions import predict
from taciturn.compare.records import Records
from taciturn.compare.sessions import Done
from taciturn.compare.training import COMPUTE, fingerprint
from taciturn.compare.work import Job
from taciturn.errors import InputError
from taciturn.link import Link
from taciturn.plan import Compute, Model
from taciturn.ranks import Progress

__all__ = ["RECORDS", "Doer", "about_here", "conduct", "remaining"]

RECORDS = "records.jsonl"

TRIES = 3
"""Of what says nothing of a method when it fails: a busy machine may spoil one probe."""

OnProgress = Callable[[Progress], None]


class Doer(Protocol):
    """Who has ranks do jobs."""

    def do(self, regime: str, job: Job) -> Done:
        """Do a job on a network, and wait for it."""
        ...


def conduct(
    experiment: Experiment,
    records: Records,
    doer: Doer,
    on_progress: OnProgress | None = None,
) -> list[str]:
    """Do all that is missing.

    Returns:
        What could not be had, and is tried again next time: whole sentences.

    Raises:
        InputError: a baseline that never learns, a link of which nothing can be told.
        TestbedError: a regime that this machine cannot make.
    """
    conductor = _Conductor(experiment, records, doer, on_progress)
    conductor.run()
    return conductor.wanting


class _Conductor:
    def __init__(
        self,
        experiment: Experiment,
        records: Records,
        doer: Doer,
        on_progress: OnProgress | None,
    ) -> None:
        self.experiment, self.records, self.doer = experiment, records, doer
        self.on_progress = on_progress
        self.wanting: list[str] = []

    def run(self) -> None:
        experiment, records = self.experiment, self.records
        self._tune(experiment.baselines)
        for baseline in experiment.baselines:
            self._check_tuned(baseline)
        self._do(experiment.home, plan.target_jobs(experiment, records))
        for regime in experiment.regimes:
            self._look_at(regime)
        methods = plan.contenders_to_tune(experiment, records, experiment.regimes)
        self._tune(methods)
        errors = [
            plan.errors_job(experiment, records, c) for c in (*experiment.baselines, *methods)
        ]
        self._do(experiment.home, [job for job in errors if job is not None])
        if experiment.mode == "composed":
            self._do(experiment.home, self._runs(*experiment.regimes))
        for regime in experiment.regimes:
            if experiment.mode == "direct":
                self._do(regime, self._runs(regime))
            after = [*self._timings(regime), plan.probe_job(experiment, regime, "after")]
            self._do(regime, after)

    def _tune(self, contenders: Sequence[Contender]) -> None:
        experiment = self.experiment
        self._do(experiment.home, [j for c in contenders for j in plan.trial_jobs(experiment, c)])

    def _check_tuned(self, baseline: Contender) -> None:
        """Refuse a baseline that no tuning run says anything of: a rival untuned is none."""
        if plan.best_setting(self.experiment, self.records, baseline).value < math.inf:
            return
        tried = [self.records.get(job) for job in plan.trial_jobs(self.experiment, baseline)]
        why = next((r.failure for r in tried if r.failure is not None), "no value was finite")
        raise InputError(
            f"none of the {len(tried)} tuning runs of the baseline {baseline.shown} came to an end "
            f"with a value: {why}. Mend that, and name another folder"
        )

    def _look_at(self, regime: str) -> None:
        """Probe a regime, and store what is foretold of it before anything is run there."""
        experiment, records = self.experiment, self.records
        probe = plan.probe_job(experiment, regime, "before")
        compute = plan.compute_job(experiment, regime)
        self._do(regime, [probe, compute, *plan.variant_jobs(experiment, regime)])
        if records.find(plan.plan_job(regime)) is not None:
            return
        link = Link.from_json(records.get(probe).result["link"])  # type: ignore[index]
        step_s = records.get(compute).result["step_s"]  # type: ignore[index]
        texts = [t for c in experiment.contenders if not c.is_auto for t in c.variants()]
        autos = [c.method for c in experiment.methods if c.is_auto]
        task = load_task(experiment.task)
        model = Model.of_module(task.model(0), task.name)
        told = predict(link, model, Compute(step_s), texts, autos)
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
            some = [plan.compute_job(experiment, regime, seed)]
            for contender in experiment.contenders:
                actual = plan.standing_for(experiment, self.records, contender, regime)
                text = plan.timed_method(experiment, self.records, actual, regime)
                some.append(plan.time_job(experiment, regime, text, seed))
            order.shuffle(some)
            found += some
        return found

    def _do(self, regime: str, some: Sequence[Job]) -> None:
        """Do the jobs of which there is no record."""
        for job in some:  # contenders may share a run
            if self.records.find(job) is not None:
                continue
            if self.on_progress is not None:
                self.on_progress(_progress(self.experiment, self.records, regime, job))
            tries = TRIES if _is_tried_again(job) else 1
            for _ in range(tries):
                began = time.monotonic()
                result, failure = self.doer.do(regime, job)
                if failure is None:
                    break
            if failure is not None and tries > 1:
                self._want(regime, job, failure)
                continue
            self.records.add(job, result, failure, time.monotonic() - began)

    def _want(self, regime: str, job: Job, failure: str) -> None:
        if job["kind"] == "target":
            raise InputError(
                f"a run of the tuned baseline, {job['method']}, failed, so there is no target: "
                f"{failure}. The same command tries again"
            )
        what = "was not probed" if job["kind"] == "probe" else "has no step without exchange"
        sentence = f"the regime {regime} {what}: {failure}"
        if job.get("when") == "after":  # what was run stands; its rule is broken until then
            self.wanting.append(f"{sentence}; the same command tries again")
            return
        raise InputError(
            f"{sentence}. Nothing can be foretold of it: the same command tries again, or leave "
            "this regime out"
        )


def _is_tried_again(job: Job) -> bool:
    """Whether a failure of a job says nothing of a method, and is no result."""
    return job["kind"] in ("probe", "target") or job.get("method") == COMPUTE


def _expected(experiment: Experiment) -> dict[str, int]:
    """Return about how many jobs of each sort there are in all."""
    e = experiment
    trials = len(e.baselines) * e.baseline_trials + len(e.methods) * e.trials
    runs = len(e.contenders) * e.seeds
    variants = sum(len(c.variants()) for c in e.baselines)
    return {
        "train": trials + e.target_seeds + runs * (len(e.regimes) if e.mode == "direct" else 1),
        "time": len(e.regimes) * (1 + variants + runs + e.seeds),
        "errors": sum(comparable(c.variants()[0]).averages_gradients for c in e.contenders),
        "probe": len(e.regimes) * 2,
        "plan": len(e.regimes),
    }


def _sort_of(job: Job) -> str:
    kind = str(job["kind"])
    return kind if kind in ("time", "errors", "probe", "plan") else "train"


def _progress(experiment: Experiment, records: Records, regime: str, job: Job) -> Progress:
    """Return how far all is: a job is expected to take as long as those of its sort did."""
    guess = {
        "train": 5.0,
        "errors": 1.0,
        "time": 3 * experiment.time_s,
        "probe": 2 * experiment.probe_s,
    }
    left_s = done_s = 0.0
    for sort, count in _expected(experiment).items():
        took = [r.took_s for r in records if _sort_of(r.job) == sort]
        each = sum(took) / len(took) if took else guess.get(sort, 0.0)
        left_s += each * max(0, count - len(took))
        done_s += sum(took)
    what = job.get("method") or f"{job['when']} the runs"
    fraction = done_s / (done_s + left_s) if done_s else 0.0
    return Progress(fraction, left_s, f"{regime}: {job['kind']} {what}")


def remaining(experiment: Experiment, records: Records) -> tuple[int, int]:
    """How many jobs have a record, and about how many there are in all."""
    done = sum(1 for _ in records)
    return done, max(done, sum(_expected(experiment).values()))


def about_here(experiment: Experiment) -> dict[str, Any]:
    """What the records are made with, here and now.

    Raises:
        InputError: a task that cannot be loaded, or not be trained by so many ranks.
    """
    task = load_task(experiment.task)
    task.check_ranks(experiment.ranks)
    facts = dict(task.facts) | {"examples": task.examples, "held_out": task.held_out}
    if ":" in experiment.task:  # which may be another one tomorrow
        try:
            facts["fingerprint"] = fingerprint(task, 0)
        except InputError as error:
            raise InputError(f"task {task.name}: {error}") from error
    return {
        "taciturn": _version("taciturn"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        # On a cluster it may be another each time.
        "host": CLUSTER if experiment.on_cluster else platform.node(),
        "threads": 1,
        "task": experiment.task,
        "facts": facts,
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

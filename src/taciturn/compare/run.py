"""What ``taciturn compare`` does: a folder of records, and what they say."""

from __future__ import annotations

import fcntl
import itertools
import json
import shlex
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from taciturn.compare.cluster import Cluster
from taciturn.compare.conduct import RECORDS, Doer, about_here, conduct, remaining
from taciturn.compare.experiment import CLUSTER, Contender, Experiment, read_experiment
from taciturn.compare.outcome import Outcome, outcome_of
from taciturn.compare.page import html
from taciturn.compare.records import Records
from taciturn.compare.sessions import Networks
from taciturn.compare.table import render
from taciturn.errors import InputError
from taciturn.files import check_file, write_whole
from taciturn.ranks import show_progress, tell, under_torchrun

__all__ = ["QUICK", "add_seeds", "compare", "experiment_in", "report", "rerun_of", "status"]

EXPERIMENT, PAGE = "experiment.toml", "report.html"

QUICK = Experiment(
    task="text-300k",
    ranks=4,
    regimes=("100mbit", "unshaped"),
    steps=60,
    evaluations=20,
    learning_rates=(1e-3, 8e-3),
    seeds=2,
    baseline_trials=3,
    trials=2,
    target_seeds=2,
    probe_s=8.0,
    time_s=1.0,
    methods=(
        Contender("coded:passes=4"),
        Contender("quantized:bits=8"),
        Contender("powersgd:rank=4"),
        Contender("diloco:steps=10,outer_momentum=0.6"),
    ),
)
"""What ``--quick`` compares."""


def compare(
    experiment: Experiment,
    folder: Path,
    out: Console,
    err: Console,
    json_path: Path | None = None,
) -> Outcome | None:
    """Do what is missing in a folder, print what its records say, and write its page.

    Under torchrun every rank calls it; only rank 0 reads and writes the folder.

    Returns:
        None on the ranks of torchrun other than 0.

    Raises:
        InputError: the folder holds another experiment, is in use, or cannot be written.
        TestbedError: a regime that this machine cannot make.
        PeerError: a rank of torchrun was lost.
    """
    if experiment.on_cluster != under_torchrun():
        raise InputError(
            f"regimes={list(experiment.regimes)}: the regime {CLUSTER!r} is of ranks that torchrun "
            f"starts (torchrun ... -m taciturn compare FILE.toml), and they have no other"
        )
    if experiment.on_cluster:
        with Cluster(experiment) as cluster:
            if cluster.rank:
                cluster.serve()
                return None
            return _compare(experiment, folder, cluster, out, err, json_path)
    with Networks(experiment.task, experiment.ranks, experiment.timeout_s) as networks:
        return _compare(experiment, folder, networks, out, err, json_path)


def _compare(
    experiment: Experiment,
    folder: Path,
    doer: Doer,
    out: Console,
    err: Console,
    json_path: Path | None,
) -> Outcome:
    if json_path is not None:
        check_file("--json", json_path)
    about = about_here(experiment)  # a task that cannot be loaded leaves no folder behind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name a folder to write in") from error
    with _alone_in(folder):
        experiment = _gone_on_with(experiment, folder)
        records = Records(folder / RECORDS, about)
        _write("the experiment", folder / EXPERIMENT, experiment.to_toml())
        before = sum(1 for _ in records)
        try:
            with show_progress(err, f"comparing in {folder}") as show:
                wanting = conduct(experiment, records, doer, show)
        except (KeyboardInterrupt, SystemExit):
            done = sum(1 for _ in records)
            tell(err, f"stopped: {done} jobs are kept in {folder}; the same command goes on there")
            raise
        for sentence in wanting:
            tell(err, sentence)
        if sum(1 for _ in records) == before and not wanting:
            tell(err, f"nothing was missing in {folder}")
        return report(folder, out, json_path)


def _gone_on_with(experiment: Experiment, folder: Path) -> Experiment:
    """Return the experiment with the seeds that its folder has.

    Raises:
        InputError: the folder holds another one.
    """
    if not (folder / EXPERIMENT).exists():
        return experiment
    known = experiment_in(folder)
    experiment = replace(experiment, seeds=max(experiment.seeds, known.seeds))
    then, now = _plain(known.settings()), _plain(experiment.settings())
    if then != now:
        raise InputError(
            f"{folder} holds another experiment ({_differing(then, now)}): name another folder "
            "with --out"
        )
    return experiment


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder; the lock goes with this process, however it ends."""
    try:
        file = (folder / "lock").open("a")
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name a folder to write in") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"{folder} is in use by another taciturn compare: wait for it, or name another "
                "folder with --out"
            ) from error
        yield


def report(folder: Path, out: Console, json_path: Path | None = None) -> Outcome:
    """Print what the records of a folder say, and write its page; measures nothing.

    Raises:
        InputError: no records there, not enough for any answer, or a file that cannot be written.
    """
    experiment, records = _opened(folder)
    outcome = outcome_of(experiment, records)
    out.print(render(outcome))
    if records.damaged:
        out.print(f"lines {records.damaged} of {records.path} are damaged, and left out")
    if json_path is not None:
        rows = json.dumps(outcome.rows_json(), indent=1) + "\n"
        _write("--json", json_path, rows, whole=json_path.is_file() or not json_path.exists())
    path = folder / PAGE
    _write("the page", path, html(outcome, rerun_of(folder)))
    out.print(f"report: {path}", soft_wrap=True)
    return outcome


def rerun_of(folder: Path) -> str:
    """The command that does the same experiment anew."""
    named = folder.resolve() if folder.name in ("", "..") else folder
    again = named.with_name(f"{named.name}-again")
    return shlex.join(["taciturn", "compare", str(folder / EXPERIMENT), "--out", str(again)])


def _write(what: str, path: Path, text: str, whole: bool = True) -> None:
    """Write a file; whole or not at all, unless it may be a pipe or a terminal."""
    try:
        if whole:
            write_whole(path, text)
        else:
            path.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{what}: cannot write {path}: {error.strerror}") from error


def status(folder: Path, out: Console) -> None:
    """Print how far a folder is.

    Raises:
        InputError: no experiment there.
    """
    experiment, records = _opened(folder)
    done, total = remaining(experiment, records)
    failed = [r for r in records if r.failure is not None]
    out.print(f"{folder}: {done} of about {total} jobs are done, {len(failed)} of them failed")
    for record in failed:
        out.print(f"  failed: {record.job['kind']} {record.job.get('method')}: {record.failure}")
    if records.damaged:
        out.print(f"  lines {records.damaged} of {records.path} are damaged, and left out")
    kinds = {str(r.job["kind"]) for r in records}
    for kind in sorted(kinds):
        some = records.of_kind(kind)
        out.print(f"  {kind}: {len(some)}")
    ended = [r.at_s for r in records]
    if len(ended) > 1:
        gaps = [b - a for a, b in itertools.pairwise(ended)]
        out.print(f"  a job took {statistics.median(gaps):.1f} s (median)")


def add_seeds(
    folder: Path, seeds: int, out: Console, err: Console, json_path: Path | None = None
) -> Outcome | None:
    """Run more fresh seeds of everything; what is tuned and the target stay.

    Raises:
        InputError: no experiment there, or no more seeds than it has.
    """
    experiment, _ = _opened(folder)
    replace(experiment, seeds=seeds)  # whether that many can be at all
    if seeds <= experiment.seeds:
        raise InputError(f"--seeds {seeds}: {folder} has {experiment.seeds} already")
    return compare(replace(experiment, seeds=seeds), folder, out, err, json_path)


def experiment_in(folder: Path) -> Experiment:
    """The experiment of a folder.

    Raises:
        InputError: there is none, or one of another version.
    """
    path = folder / EXPERIMENT
    if not path.is_file():
        raise InputError(
            f"{folder} holds no experiment: start one with taciturn compare FILE.toml --out "
            f"{folder}"
        )
    return read_experiment(path)


def _opened(folder: Path) -> tuple[Experiment, Records]:
    """Return the experiment of a folder and its records, read only.

    Raises:
        InputError: neither is there, or the experiment was changed since the records were made:
            what is looked at is decided before.
    """
    experiment = experiment_in(folder)
    records = Records(folder / RECORDS)
    then, now = records.about["settings"], _plain(experiment.settings())
    if then != now:
        raise InputError(
            f"{folder / EXPERIMENT} was changed since its records were made "
            f"({_differing(then, now)}): bring the old file back, and start another experiment in "
            "another folder"
        )
    dropped = sorted({r.job["seed"] for r in records.of_kind("run")} - {*experiment.run_seeds()})
    if dropped:
        raise InputError(
            f"{folder / EXPERIMENT} plans {experiment.seeds} seeds, and there are runs of the "
            f"seeds {dropped} too: no run is dropped; bring the old file back"
        )
    return experiment, records


def _plain(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values))


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first of the settings that differ, in words."""
    key = next(k for k in now if then.get(k) != now[k])
    return f"{key} is {json.dumps(then.get(key))[:80]} there and {json.dumps(now[key])[:80]} here"

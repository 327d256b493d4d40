"""What ``taciturn compare`` does: a folder of records, and what they say."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from taciturn.compare.conduct import RECORDS, about_here, conduct, remaining
from taciturn.compare.experiment import Contender, Experiment
from taciturn.compare.outcome import Outcome, outcome_of
from taciturn.compare.records import Records
from taciturn.compare.table import render
from taciturn.errors import InputError
from taciturn.files import write_whole
from taciturn.ranks import Progress, show_progress, tell

__all__ = ["QUICK", "add_seeds", "compare", "experiment_in", "report", "status"]

EXPERIMENT = "experiment.json"

QUICK = Experiment(
    task="digits",
    ranks=4,
    regimes=("100mbit", "unshaped"),
    steps=100,
    evaluations=20,
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
) -> Outcome:
    """Do what is missing in a folder, and print what its records say.

    Raises:
        InputError: the folder holds another experiment, or cannot be written.
        TestbedError: a regime that this machine cannot make.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}; name a folder to write in") from error
    stored = folder / EXPERIMENT
    if stored.exists():
        known = experiment_in(folder)
        experiment = replace(experiment, seeds=max(experiment.seeds, known.seeds))
        if _plain(experiment.settings()) != _plain(known.settings()):
            raise InputError(
                f"{folder} holds another experiment ({_difference(known, experiment)}): name "
                "another folder with --out"
            )
    records = Records(folder / RECORDS, about_here(experiment))
    _store(experiment, folder)
    before, _ = remaining(experiment, records)
    with show_progress(err, f"comparing in {folder}") as show:
        conduct(experiment, records, _shown(records, show))
    after, _ = remaining(experiment, records)
    if after == before:
        tell(err, f"nothing was missing in {folder}")
    return report(folder, out, json_path)


def _shown(records: Records, show: Any) -> Any:
    """Return what is told of progress: the rest is expected to take as long as what was done."""
    began, taken = time.monotonic(), [sum(1 for _ in records)]

    def progress(done: int, total: int, label: str) -> None:
        new = done - taken[0]
        each = (time.monotonic() - began) / new if new else 5.0
        show(Progress(done / total, each * (total - done), label))

    return progress


def report(folder: Path, out: Console, json_path: Path | None = None) -> Outcome:
    """Print what the records of a folder say; measures nothing.

    Raises:
        InputError: no records there, or not enough for any answer.
    """
    experiment = experiment_in(folder)
    outcome = outcome_of(experiment, Records(folder / RECORDS))
    out.print(render(outcome))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(outcome.rows_json(), indent=1) + "\n", "utf-8")
        except OSError as error:
            raise InputError(f"--json: cannot write {json_path}: {error.strerror}") from error
    return outcome


def status(folder: Path, out: Console) -> None:
    """Print how far a folder is.

    Raises:
        InputError: no experiment there.
    """
    experiment = experiment_in(folder)
    records = Records(folder / RECORDS)
    done, total = remaining(experiment, records)
    failed = sum(r.failure is not None for r in records)
    out.print(f"{folder}: {done} of about {total} jobs are done, {failed} of them failed")
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
) -> Outcome:
    """Run more fresh seeds of everything; what is tuned and the target stay.

    Raises:
        InputError: no experiment there, or no more seeds than it has.
    """
    experiment = experiment_in(folder)
    if seeds <= experiment.seeds:
        raise InputError(f"--seeds {seeds}: {folder} has {experiment.seeds} already")
    return compare(replace(experiment, seeds=seeds), folder, out, err, json_path)


def experiment_in(folder: Path) -> Experiment:
    """The experiment of a folder.

    Raises:
        InputError: there is none, or one of another version.
    """
    path = folder / EXPERIMENT
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder} holds no experiment: start one with taciturn compare FILE.toml --out "
            f"{folder}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    try:
        for key in ("methods", "baselines"):
            values[key] = tuple(Contender(**one) for one in values[key])
        for key in ("regimes", "learning_rates"):
            values[key] = tuple(values[key])
        return Experiment(**values)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is not of this version of Taciturn: {error}") from error


def _store(experiment: Experiment, folder: Path) -> None:
    write_whole(folder / EXPERIMENT, json.dumps(asdict(experiment), indent=1) + "\n")


def _plain(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values))


def _difference(one: Experiment, other: Experiment) -> str:
    a, b = _plain(one.settings()), _plain(other.settings())
    key = next(k for k in a if a[k] != b[k])
    return f"{key} is {json.dumps(a[key])[:80]} there and {json.dumps(b[key])[:80]} here"

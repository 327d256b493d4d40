"""What is done in which order, and again: the conductor before ranks that are made up."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from compare_ranks import MadeUpRanks
from taciturn.compare import Contender, Experiment, Records, outcome_of
from taciturn.compare.conduct import TRIES, about_here, conduct, remaining
from taciturn.compare.experiment import LOOPBACK
from taciturn.compare.jobs import target_value
from taciturn.compare.outcome import MOST_DRIFT, Rate, drift_of
from taciturn.compare.predictions import probed_methods
from taciturn.errors import InputError
from taciturn.ranks import Progress

OWN = Path(__file__).resolve().parent.parent / "examples" / "own_task"
EXPERIMENT = Experiment(
    task="fractions_task:make_task",
    methods=(Contender("quantized:bits={bits}", {"bits": [8, 4]}), Contender("local_sgd:steps=4")),
    regimes=("100mbit", "1gbit"),
    steps=40,
    evaluations=4,
    seeds=5,
    trials=2,
    baseline_trials=2,
)


@pytest.fixture(autouse=True)
def _beside_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(OWN)


def records(folder: Path) -> Records:
    return Records(folder / "records.jsonl", about_here(EXPERIMENT))


def test_the_order_is_that_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines, target, probes and what is foretold, then methods, runs, times, probes again."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks), time=time.time)
    monkeypatch.setattr("taciturn.compare.conduct.time", clock)  # each job takes a second
    ranks, told = MadeUpRanks(), list[Progress]()
    kept = records(tmp_path)
    assert conduct(EXPERIMENT, kept, ranks, told.append) == []
    kinds = [r.job["kind"] for r in kept]
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    assert list(first) == ["trial", "target", "probe", "time", "plan", "errors", "run"]
    last_run = max(i for i, kind in enumerate(kinds) if kind == "run")
    after = [i for i, r in enumerate(kept) if r.job.get("when") == "after"]
    assert len(after) == len(EXPERIMENT.regimes)
    assert min(after) > last_run
    assert max(i for i, kind in enumerate(kinds) if kind == "plan") < first["run"]
    # Seeds are interleaved: each is over before the next begins.
    seeds = [r.job["seed"] for r in kept.of_kind("run")]
    assert seeds == sorted(seeds)
    assert Counter(seeds) == dict.fromkeys(EXPERIMENT.run_seeds(), 4)
    assert {regime for regime, job in ranks.done if job["kind"] == "run"} == {LOOPBACK}
    done, total = remaining(EXPERIMENT, kept)
    assert done == total
    fractions = [p.fraction for p in told]
    assert fractions[0] == 0
    assert fractions[-1] > 0.95
    assert told[-1].remaining_s < 4


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    """A second conductor finds all there; what is shown is the same."""
    kept = records(tmp_path)
    conduct(EXPERIMENT, kept, MadeUpRanks())
    again, ranks = records(tmp_path), MadeUpRanks()
    conduct(EXPERIMENT, again, ranks)
    assert ranks.done == []
    rows = outcome_of(EXPERIMENT, again).rows_json()
    assert {row["verdict"] for row in rows} == {"faster"}
    assert all(0.4 < row["time_ratio"] < 0.6 for row in rows)


def test_a_failed_run_is_a_miss_and_is_not_tried_again(tmp_path: Path) -> None:
    """Rule 7: it is recorded, and with it nothing is shown to be faster."""
    failing = {"kind": "run", "method": "local_sgd:steps=4", "seed": 2}
    conduct(EXPERIMENT, records(tmp_path), MadeUpRanks(failing))
    again, ranks = records(tmp_path), MadeUpRanks()
    conduct(EXPERIMENT, again, ranks)
    assert ranks.done == []
    rows = outcome_of(EXPERIMENT, again).rows_json()
    missed = [row for row in rows if row["method"] == "local_sgd:steps=4"]
    assert all((row["reached"], row["runs"]) == (4, 5) for row in missed)
    assert {row["verdict"] for row in missed} == {"not shown"}


def test_a_failed_probe_is_no_result_and_is_tried_again(tmp_path: Path) -> None:
    """After the runs it is wanting, and the same command does it alone; before, it ends all."""
    kept = records(tmp_path)
    (wanting,) = conduct(
        EXPERIMENT, kept, MadeUpRanks({"kind": "probe", "when": "after", "regime": "1gbit"})
    )
    assert "1gbit was not probed" in wanting
    broken = {r.name: r.broken for r in outcome_of(EXPERIMENT, kept).regimes}
    assert broken["100mbit"] == ()
    assert "rule 10" in broken["1gbit"][0]
    ranks = MadeUpRanks()
    assert conduct(EXPERIMENT, records(tmp_path), ranks) == []
    assert [(regime, job["when"]) for regime, job in ranks.done] == [("1gbit", "after")]

    other = tmp_path / "other"
    other.mkdir()
    failing = MadeUpRanks({"kind": "probe", "when": "before", "regime": "1gbit"})
    with pytest.raises(InputError, match="same command tries again"):
        conduct(EXPERIMENT, records(other), failing)
    assert conduct(EXPERIMENT, records(other), MadeUpRanks()) == []


@pytest.mark.parametrize(
    "job", [{"kind": "probe"}, {"kind": "target"}, {"kind": "time", "method": "compute"}]
)
def test_what_says_nothing_of_a_method_is_tried_again_at_once(
    tmp_path: Path, job: dict[str, str]
) -> None:
    """A busy machine that spoils a probe twice ends nothing."""
    kept, ranks = records(tmp_path), MadeUpRanks(job, times=TRIES - 1)
    assert conduct(EXPERIMENT, kept, ranks) == []
    assert ranks.left == 0
    assert [r for r in kept if r.failure is not None] == []


def test_a_baseline_that_never_ends_is_said(tmp_path: Path) -> None:
    """Without a target nothing else is run."""
    ranks = MadeUpRanks({"kind": "target"})
    with pytest.raises(InputError, match="so there is no target: InputError on rank 0: disturbed"):
        conduct(EXPERIMENT, records(tmp_path), ranks)
    assert {job["kind"] for _, job in ranks.done} == {"trial", "target"}


@pytest.mark.parametrize("baseline", [0, 1])
def test_a_baseline_that_is_not_tuned_is_no_rival(tmp_path: Path, baseline: int) -> None:
    """Without any tuning run nothing goes on; with fewer than a method has rule 5 is broken."""
    method = EXPERIMENT.baselines[baseline].variants()[0]
    failing = {"kind": "trial", "method": method}
    none = tmp_path / "none"
    none.mkdir()
    with pytest.raises(InputError, match=r"none of the 2 tuning runs .* disturbed"):
        conduct(EXPERIMENT, records(none), MadeUpRanks(failing))
    kept = records(tmp_path)
    conduct(EXPERIMENT, kept, MadeUpRanks(failing, times=1))
    rows = outcome_of(EXPERIMENT, kept).rows_json()
    assert {row["verdict"] for row in rows} == {"not shown"}
    assert all("rule 5, the baseline was tuned in 1 runs" in row["broken"][0] for row in rows)


def test_the_target_is_a_median(tmp_path: Path) -> None:
    """Of an even number of runs too: the mean of the two in the middle."""
    kept = records(tmp_path)
    two = replace(EXPERIMENT, target_seeds=2)
    conduct(two, kept, MadeUpRanks())
    runs = [r.result["points"][-1]["value"] for r in kept.of_kind("target")]  # type: ignore[index]
    assert target_value(two, kept) == pytest.approx(sum(runs) / 2)
    assert runs[0] != runs[1]


def test_all_that_is_compared_is_probed() -> None:
    """The averages that the methods are made of, each once."""
    texts = [t for c in EXPERIMENT.contenders for t in c.variants()]
    probed = probed_methods(texts)
    assert {"quantized:bits=8", "quantized:bits=4", "ring"} <= set(probed)
    assert len(set(probed)) == len(probed)


NARROW, WIDE = 1.02, 1.5


@pytest.mark.parametrize(
    ("change", "factor", "breaks", "unsure"),
    [
        (1.05, NARROW, False, False),
        (0.95, WIDE, False, False),
        (1.3, NARROW, True, False),
        (0.7, NARROW, True, False),
        (1.3, WIDE, False, True),
        (0.75, WIDE, False, True),
    ],
)
def test_a_link_that_moved_breaks_rule_10(
    change: float, factor: float, breaks: bool, unsure: bool
) -> None:
    """By more than 10 %, if the probes are sure enough of it; where they are not, that is said."""
    before, after = (Rate(r, r / factor, r * factor) for r in (1e8, 1e8 * change))
    drift, broken, note = drift_of(before, after, "100mbit")
    assert drift == pytest.approx(change - 1)
    assert bool(broken) == breaks
    assert bool(note) == unsure
    assert not breaks or abs(change - 1) > MOST_DRIFT
    assert drift_of(before, None, "x")[1].startswith("rule 10")

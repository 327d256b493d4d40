"""An experiment is checked whole before anything runs, and says where it is wrong."""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import pytest

from taciturn.compare import Contender, Experiment, read_experiment
from taciturn.compare.jobs import trial_jobs
from taciturn.compare.run import QUICK, rerun_of
from taciturn.errors import TaciturnError

ROOT = Path(__file__).resolve().parent.parent
GOOD = """\
task = "digits"
regimes = ["100mbit", "unshaped"]
steps = 50
seeds = 5

[[methods]]
method = "powersgd:rank={rank}"
space = {rank = [1, 2]}
"""


def read(tmp_path: Path, text: str) -> Experiment:
    path = tmp_path / "e.toml"
    path.write_text(text)
    return read_experiment(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    """What it says is there, and the rest has its default."""
    found = read(tmp_path, GOOD)
    assert (found.steps, found.regimes, found.ranks) == (50, ("100mbit", "unshaped"), 4)
    assert found.methods[0].variants() == ["powersgd:rank=1", "powersgd:rank=2"]
    assert found.methods[0].shown == "powersgd:rank=1|2"
    assert found.evaluate_at()[-1] == 50
    assert "seeds" not in found.settings()
    assert set(found.settings()) == set(asdict(found)) - {"seeds"}


WRONG = {
    "an unknown key": (
        GOOD.replace("steps", "stepps"),
        "line 3: unknown key 'stepps'; did you mean 'steps'",
    ),
    "an unknown method": (GOOD.replace("powersgd", "powerssgd"), "line 7: unknown method"),
    "an unknown key of a method": (GOOD.replace("rank=", "rang="), "did you mean 'rank'"),
    "a knob without values": (GOOD.replace("[1, 2]", "[]"), "needs a list of values"),
    "a knob that is not there": (GOOD.replace("{rank}", "3"), "knobs none, and its space"),
    "no seeds": (GOOD.replace("seeds = 5", "seeds = 0"), "line 4: seeds=0"),
    "no trials": (GOOD.replace("seeds = 5", "trials = 0"), "a method that is not tuned"),
    "a baseline tuned less": (
        GOOD.replace("seeds = 5", "trials = 9"),
        "baseline_trials=8: give a whole number from 9",
    ),
    "rates that fall": (
        GOOD.replace("seeds = 5", "learning_rates = [0.01, 0.001]"),
        "line 4: learning_rates=[0.01, 0.001]: give two, least first",
    ),
    "a code that cannot be decoded": (
        GOOD.replace("powersgd:rank={rank}", "coded:passes={rank}").replace("[1, 2]", "[4, 64]"),
        "line 7: 'coded:passes={rank}': a decoding matrix of size 64",
    ),
    "no regime": (GOOD.replace('["100mbit", "unshaped"]', "[]"), "no regimes"),
    "a regime that is none": (GOOD.replace("100mbit", "fast"), "line 2: 'fast' is not a rate"),
    "a regime twice": (GOOD.replace("unshaped", "100mbit"), "there twice"),
    "a regime twice in other words": (GOOD.replace("unshaped", "0.1gbit"), "there twice"),
    "no methods": (GOOD.split("[[methods]]")[0] + "methods = []\n", "no methods"),
    "a missing key": (GOOD.replace('task = "digits"\n', ""), "'task' is missing"),
    "no TOML": ("task = ", "is no TOML"),
    "one rank": (GOOD.replace("seeds = 5", "ranks = 1"), "nobody to average with"),
    "a longer round": (
        GOOD.replace("powersgd:rank={rank}", "local_sgd:steps={rank}").replace("[1, 2]", "[60]"),
        "rounds of 60 steps",
    ),
    "a method in a method": (
        GOOD.replace("powersgd:rank={rank}", "diloco:steps={rank},compress=(auto)"),
        "averages nothing by itself",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, what: str) -> None:
    """The message names the file, mostly the line, and what to do."""
    text, message = WRONG[what]
    with pytest.raises(TaciturnError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert "e.toml" in str(caught.value)


def test_all_are_tuned_alike() -> None:
    """Rule 5: as many trials for each method, not more than the baseline's, over the same rates."""
    low, high = QUICK.learning_rates
    for contender in QUICK.contenders:
        jobs = trial_jobs(QUICK, contender)
        wanted = QUICK.baseline_trials if contender.is_baseline else QUICK.trials
        assert len(jobs) == wanted
        assert all(low <= job["learning_rate"] <= high for job in jobs)
        assert len({job["learning_rate"] for job in jobs}) == wanted
    knobs = Contender("powersgd:rank={rank}", {"rank": [1, 2, 4]})
    tuned = trial_jobs(Experiment("digits", (knobs,), ("1gbit",), trials=8), knobs)
    assert {job["method"] for job in tuned} == {f"powersgd:rank={r}" for r in (1, 2, 4)}


def test_every_key_is_in_the_docs() -> None:
    """With its default, so that nobody has to read the source."""
    page = (ROOT / "docs" / "evidence.md").read_text("utf-8")
    for one in fields(Experiment):
        assert f"| `{one.name}` |" in page, one.name
        if one.default is not MISSING:
            values = one.default if isinstance(one.default, tuple) else (one.default,)
            shown = re.escape(" to ".join(map(str, values)))
            line = rf"\| `{one.name}` \| [^\n]* \| {shown} \|\n"
            assert re.search(line, page), one.name


def test_seeds_never_meet() -> None:
    """Rule 6: seeds that tuned or fixed the target are not reported."""
    tuning = {job["seed"] for c in QUICK.contenders for job in trial_jobs(QUICK, c)}
    assert not tuning & set(Experiment("digits", QUICK.methods, ("1gbit",), seeds=100).run_seeds())


@pytest.mark.parametrize("which", ["quick", "file", "headline"])
def test_a_written_experiment_is_read_as_it_was(tmp_path: Path, which: str) -> None:
    """The file that a folder keeps says all, and nothing else."""
    headline = ROOT / "benchmarks" / "headline" / "experiment.toml"
    if which == "headline" and not headline.exists():
        pytest.skip("the benchmarks are not part of this source distribution")
    made = {
        "quick": lambda: QUICK,
        "file": lambda: read(tmp_path, GOOD),
        "headline": lambda: read_experiment(headline),
    }[which]()
    assert read(tmp_path, made.to_toml()) == made


@pytest.mark.parametrize("folder", ["out", "some/out", ".", "some/.."])
def test_another_folder_is_named_to_run_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Beside the one that the records are in, wherever the command is given."""
    (tmp_path / "here" / "some").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    words = rerun_of(Path(folder)).split()
    assert words[:2] == ["taciturn", "compare"]
    assert Path(words[2]).parent.resolve() == Path(folder).resolve()
    again = Path(words[4]).resolve()
    assert again.name == f"{Path(folder).resolve().name}-again"
    assert again.parent == Path(folder).resolve().parent

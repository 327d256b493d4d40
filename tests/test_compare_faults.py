"""Methods that cheat, trained by real ranks: the harness sees it, and nothing is shown of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_ranks import MadeUpRanks
from ranks import Ranks
from taciturn.compare import Contender, Experiment, Records, outcome_of
from taciturn.compare.bundled import load_task
from taciturn.compare.conduct import about_here, conduct
from taciturn.compare.sessions import Done
from taciturn.compare.strategies import Share, Strategy

OWN = Path(__file__).resolve().parent.parent / "examples" / "own_task"
METHOD = "quantized:bits=8"
EXPERIMENT = Experiment(
    task="fractions_task:make_task",
    methods=(Contender(METHOD),),
    regimes=("100mbit",),
    ranks=4,
    steps=12,
    evaluations=3,
    seeds=1,
    trials=1,
    baseline_trials=1,
    mode="direct",
)

Learn = Callable[[Strategy, Iterable[Share]], Iterator[None]]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def pairs(shares: Iterable[Share]) -> Iterator[tuple[Share, Share]]:
    some = iter(shares)
    return zip(some, some, strict=True)


def honest(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """As the harness means it."""
    for share in shares:
        strategy.take(share)
        yield


def skips_examples(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """Leaves out every fourth batch, which would have taken time."""
    for number, share in enumerate(shares):
        if number % 4 < 3:
            strategy.take(share)
        yield


def has_a_larger_batch(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """Learns from each batch twice, and counts one step."""
    for share in shares:
        strategy.take(share)
        strategy.take(share)
        yield


def takes_another_order(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """Looks at the next batch first."""
    for pair in pairs(shares):
        for share in reversed(pair):
            strategy.take(share)
            yield


def runs_ahead(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """Learns from two batches in the time of one, until there are no more."""
    for pair in pairs(shares):
        for share in pair:
            strategy.take(share)
        yield


def learns_what_it_is_judged_by(strategy: Strategy, shares: Iterable[Share]) -> Iterator[None]:
    """Takes the held-out examples in the place of those that it is handed."""
    task = strategy.task

    def loss_of(module: torch.nn.Module) -> tuple[torch.Tensor, int]:
        ids = torch.arange(task.global_batch // 4)
        return task.loss(module, task.batch("held_out", ids))

    for share in shares:
        strategy.take(replace(share, loss_of=loss_of))
        yield


FAULTS: dict[Learn, str] = {
    skips_examples: "rule 4, in seed 0 it took the loss of 576 examples, 576 tokens, and the "
    "baseline of 768",
    has_a_larger_batch: "rule 4, in seed 0 it took the loss of 1536 examples",
    takes_another_order: "rule 4, in seed 0 it saw other examples, or in another order",
    learns_what_it_is_judged_by: "rule 4, in seed 0 it took the loss of 0 examples",
    runs_ahead: "",
}


def _train(job: Mapping[str, Any], learn: Learn) -> dict[str, Any]:
    """On every rank: a run whose method learns so."""
    from taciturn.compare import training

    os.chdir(OWN)
    known = training.strategy_for

    def strategy_for(*of: Any) -> Strategy:
        strategy = known(*of)
        strategy.learn = lambda shares: learn(strategy, shares)  # type: ignore[method-assign]
        return strategy

    given = {k: job[k] for k in ("method", "seed", "learning_rate", "steps", "evaluate_at")}
    try:
        training.strategy_for = strategy_for
        return training.train(load_task(EXPERIMENT.task), training.TrainJob(**given, timeout_s=20))
    finally:
        training.strategy_for = known


class RealRuns(MadeUpRanks):
    """Reported runs are trained for real, the method's with its fault."""

    def __init__(self, pool: Ranks, learn: Learn) -> None:
        super().__init__()
        self.pool, self.learn = pool, learn

    def do(self, regime: str, job: Mapping[str, Any]) -> Done:
        """As the contract says."""
        if job["kind"] != "run":
            return super().do(regime, job)
        learn = self.learn if job["method"] == METHOD else honest
        outcome = self.pool.outcomes(_train, job, learn)[0]
        if outcome.error is not None:
            return Done(None, repr(outcome.error))
        return Done(outcome.result, None)


def row_of(pool: Ranks, learn: Learn, folder: Path) -> Any:
    """The verdict on a method that learns so."""
    records = Records(folder / "records.jsonl", about_here(EXPERIMENT))
    conduct(EXPERIMENT, records, RealRuns(pool, learn))
    ((row,),) = (r.rows for r in outcome_of(EXPERIMENT, records).regimes)
    return row


@pytest.fixture(autouse=True)
def _beside_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(OWN)


def test_an_honest_method_breaks_nothing(pool: Ranks, tmp_path: Path) -> None:
    """What the others are held against."""
    row = row_of(pool, honest, tmp_path)
    assert row.broken == ()
    assert not any("failed" in note for note in row.notes)


@pytest.mark.parametrize("learn", FAULTS, ids=lambda learn: learn.__name__)
def test_a_method_that_cheats_is_seen(pool: Ranks, tmp_path: Path, learn: Learn) -> None:
    """It is said what it did, and in which seed; one that runs out of batches is a failed run."""
    row = row_of(pool, learn, tmp_path)
    assert row.verdict == "not shown"
    if FAULTS[learn]:
        assert row.broken[0].startswith(FAULTS[learn])
    else:
        assert (row.reached, row.runs) == (0, 1)
        assert "1 of 1 runs failed" in row.notes[0]

"""The page of a comparison: self-contained, complete, and drawn by a real browser at two widths."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import escape

from browser import BROWSER, open_page
from taciturn.compare import Contender, Experiment, Outcome, Point, Run
from taciturn.compare.crossover import crossovers
from taciturn.compare.jobs import Setting
from taciturn.compare.outcome import Rate, Regime, Share
from taciturn.compare.page import html
from taciturn.compare.rules import RULES, rules_kept
from taciturn.compare.table import sentence
from taciturn.compare.verdict import Row, judge_runs

BASES = ("ddp:wire=fp32", "ddp:wire=bf16")
METHODS = (
    "coded:passes=16,code=fourier,shuffle=true,wire=bf16",
    "quantized:bits=4,feedback=true",
    "powersgd:rank=4",
    "diloco:steps=10,outer_momentum=0.6",
    "auto",
)
REGIMES = {"50mbit": 0.4, "2.5gbit": 1.5}
"""And how long a method takes there, of the baseline's time."""
EXPERIMENT = Experiment(
    task="text-1m",
    methods=tuple(map(Contender, METHODS)),
    regimes=tuple(REGIMES),
    baselines=tuple(map(Contender, BASES)),
    seeds=5,
)
ABOUT = {
    "task": "text-1m",
    "metric": "cross-entropy",
    "global_batch": 8,
    "torch": "2.13.0",
    "facts": {"files": 3, "sha256": "abc"},
    "settings": {},
}


def run(method: str, seed: int, step_s: float, *, failed: bool = False) -> Run:
    """A run whose value falls below the target halfway."""
    noise = random.Random(f"{method} {seed}")
    if failed:
        return Run(method, seed, (), failure="rank 1 was killed")
    points = tuple(
        Point(
            examples=8 * 10 * n,
            seconds=10 * n * step_s * (1 + noise.gauss(0, 0.005)),
            value=3.0 / n + noise.gauss(0, 0.005),
            sent_bytes=1e6 * n,
            residual_norm=0.1 * n if "feedback" in method else 0.0,
            gradient_norm=1.0,
        )
        for n in range(1, 11)
    )
    return Run(
        method,
        seed,
        points,
        examples=800,
        tokens=102_400,
        examples_hash=f"h{seed}",
        learning_rate=1e-3,
        trials=4,
        replica_spread=1e-3,
        residual_growth=0.2,
        single_replica=points[-1].value,
        averaged=points[-1].value,
    )


def regime(name: str, *, failing: str = "") -> Regime:
    slow = REGIMES[name]
    runs = {
        c.method: [
            run(c.method, s, 1.0 if c.is_baseline else slow, failed=c.method == failing)
            for s in EXPERIMENT.run_seeds()
        ]
        for c in EXPERIMENT.contenders
    }
    rows = [tuple(judge_runs(EXPERIMENT, name, runs, t, ())) for t in (0.6, 0.7, 0.5)]
    shares = {
        c.method: Share(1.0, 0.3, 0.7, 0.2, 0.6, 1e6, 1000, 0.9) for c in EXPERIMENT.contenders
    }
    return Regime(
        name,
        rows=rows[0],
        looser=rows[1],
        stricter=rows[2],
        runs=runs,
        shares=shares,
        settings={c.method: Setting(c.method, 1e-3, 4, 0.3) for c in EXPERIMENT.contenders},
        stands_for={"auto": METHODS[2]},
        errors={METHODS[0]: {"replica_error": 0.05, "mean_error": 1e-2, "spread": 0.05}},
        rate=Rate(47.8e6, 47e6, 48e6) if name == "50mbit" else Rate(2.4e9, 2.2e9, 2.6e9),
        drift=0.01,
        broken=(),
        notes=(),
    )


def outcome(*regimes: Regime) -> Outcome:
    return Outcome(
        EXPERIMENT, ABOUT, target=0.6, looser_target=0.7, stricter_target=0.5, regimes=regimes
    )


WHOLE = outcome(regime("50mbit"), regime("2.5gbit"))
ANSWERS = """{
  plots: [...document.querySelectorAll(".plot")].map(plot => ({
    name: plot.id,
    width: plot.clientWidth,
    points: plot.querySelectorAll("svg .points .point, svg .scatterlayer .trace").length,
    outside: [...plot.querySelectorAll("svg text")].filter(text => {
      const [inner, outer] = [text.getBoundingClientRect(), plot.getBoundingClientRect()];
      return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1);
    }).map(text => text.textContent),
  })),
}"""
FIGURES = {
    *(f"{kind}-{name}" for kind in ("ratio", "seconds", "parts") for name in ("50mbit", "2-5gbit")),
    "by-steps",
    "by-tokens",
    "by-mib",
    "foretold",
    "residuals",
}


@BROWSER
@pytest.mark.timeout(150)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_every_figure(tmp_path: Path, width: int) -> None:
    """All figures are drawn, without an error, a request or a horizontal scroll bar."""
    came = open_page(html(WHOLE, "taciturn compare e.toml --out again"), tmp_path, width, ANSWERS)
    assert came["failures"] == []
    assert came["content"] <= width
    plots = {plot["name"]: plot for plot in came["plots"]}
    assert set(plots) == FIGURES
    for plot in plots.values():
        assert plot["points"] > 0, plot["name"]
        assert 300 < plot["width"] <= width
        assert plot["outside"] == [], plot["name"]


def test_verdicts_are_in_words_and_rules_in_a_table() -> None:
    """Each verdict as the terminal says it, every rule, the crossover and the way to run again."""
    page = html(WHOLE, "taciturn compare e.toml --out again")
    for one in WHOLE.regimes:
        for row in one.rows:
            assert sentence(row, one.stands_for).split(",")[0].split(" x ")[0] in page
    for text in RULES.values():
        assert str(escape(text)).replace(",", ",<wbr>") in page
    assert "takes as long as the best baseline at about" in page
    assert "taciturn compare e.toml --out again" in page
    assert "default-src 'none'" in page


def test_what_failed_is_on_the_page_too() -> None:
    """A method whose runs all failed has a row that says why, and text becomes no markup."""
    some = outcome(regime("50mbit", failing=METHODS[1]))
    page = html(some, "rerun <b>")
    assert "rank 1 was killed" in page
    assert "reached 0 of 5" in page
    assert "rerun <b>" not in page


def test_a_regime_without_runs_says_so() -> None:
    """A comparison that was stopped has a page all the same."""
    early = replace(
        regime("50mbit"), rows=(), looser=(), stricter=(), runs={}, shares={}, settings={}
    )
    assert "Nothing is run here yet" in html(outcome(early), "x")


def test_broken_rules_are_named() -> None:
    """Of a regime and of a method, each under its number; what too few runs leave open as well."""
    (row, *_) = WHOLE.regimes[0].rows
    other = replace(row, broken=("rule 4, in seed 3 it saw other examples, or in another order",))
    one = replace(
        WHOLE.regimes[0],
        rows=(other, *WHOLE.regimes[0].rows[1:]),
        broken=("rule 10, the rate of 50mbit changed by +30% during the runs",),
    )
    states = {rule.number: rule for rule in rules_kept(outcome(one))}
    assert list(states) == list(RULES)
    assert states[4].state == "broken"
    assert states[4].details == (
        f"50mbit, {METHODS[0]}: in seed 3 it saw other examples, or in another order",
    )
    assert states[10].details == ("the rate of 50mbit changed by +30% during the runs",)
    assert states[7].state == "kept"
    few = replace(one.rows[0], runs=2)
    states = {r.number: r for r in rules_kept(outcome(replace(one, rows=(few,))))}
    assert states[6].state == "not shown"


def made(regime: str, low: float, ratio: float, high: float) -> Row:
    (row, *_) = WHOLE.regimes[0].rows
    return replace(row, regime=regime, time_ratio=ratio, time_ratio_low=low, time_ratio_high=high)


def test_the_crossover_is_between_two_regimes() -> None:
    """Straight in logarithms: from 0.5 to 2 it is the geometric mean of the bandwidths."""
    rates = {"a": 1e8, "b": 1e10, "c": 1e12}
    rows = [made("b", 1.8, 2.0, 2.2), made("a", 0.4, 0.5, 0.6), made("lost", 1, 1, 1)]
    (found,) = crossovers(rows, rates)
    assert found.bits_per_s == pytest.approx(1e9)
    assert found.low is not None
    assert found.high is not None
    assert 1e8 < found.low < found.bits_per_s < found.high < 1e10
    (open_ended,) = crossovers([made("a", 0.4, 0.5, 1.5), made("b", 0.5, 2.0, 3.0)], rates)
    assert (open_ended.low, open_ended.high) == (None, None)
    assert crossovers([made("a", 0.4, 0.5, 0.6), made("b", 0.5, 0.9, 1.2)], rates) == []

"""An outcome as one self-contained HTML page. Every number in a figure is also in a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from taciturn.bench.table import error_text, mib_text, seconds_text
from taciturn.compare.crossover import crossovers
from taciturn.compare.outcome import Outcome, Regime, Share
from taciturn.compare.rules import rules_kept
from taciturn.compare.table import heading, sentence, shown_name
from taciturn.compare.verdict import NOT_SHOWN, Point, Row, Run, crossing
from taciturn.pages import MARGIN, Figure, figure, render_page, ticks
from taciturn.plan.choice import rate_text

__all__ = ["html"]

# Of medium lightness, so that they read on white and on black; shapes say the same without colour.
_COLORS = (
    "#7d8590",
    "#3b82c4",
    "#c8661a",
    "#2e9e6b",
    "#a85cc2",
    "#b0506a",
    "#8a7a1f",
    "#1f8f9e",
)
_SYMBOLS = {
    "square": "\u25a0",
    "circle": "\u25cf",
    "triangle-up": "\u25b2",
    "diamond": "\u25c6",
    "triangle-down": "\u25bc",
    "star": "\u2605",
}
_PARTS = (
    ("computing", "#7d8590"),
    ("coding", "#c8661a"),
    ("waiting for messages", "#3b82c4"),
    ("other exchange", "#a85cc2"),
)
_LINE = 44
"""Characters of a label that fit into the narrowest screen."""
_ROW_PX = 58
_WIDE = MARGIN | {"l": 12}
_BAND = 0.15
"""Opacity."""

SMALL_PRINT = (
    "Wall-clock times are of ranks on this machine and networks that were emulated where a rate is "
    "named. Ranks that share cores overstate what coding costs, and understate what overlaps. "
    "In the mode composed a method's losses are measured once for each seed, as they do not "
    "depend on the network, and its steps are timed in each network; in the mode direct every "
    "network is run in full. Not shown means: these runs do not show it."
)


@dataclass(frozen=True)
class _Style:
    name: str
    color: str
    symbol: str

    @property
    def glyph(self) -> str:
        return _SYMBOLS[self.symbol]


class _Table(NamedTuple):
    """Texts; the first ``left`` columns are words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    wrap: bool = False
    note: str = ""


def html(outcome: Outcome, rerun: str) -> str:
    """The page.

    Args:
        outcome: what the records say.
        rerun: the command that does the experiment anew.
    """
    e = outcome.experiment
    styles = {
        c.method: _Style(c.method, _COLORS[i % len(_COLORS)], list(_SYMBOLS)[i % len(_SYMBOLS)])
        for i, c in enumerate(e.contenders)
    }
    with_runs = [r for r in outcome.regimes if any(r.runs.values())]
    ratios = [_ratios(r, styles) for r in with_runs if r.rows]
    losses = list(_losses(outcome, with_runs, styles))
    bars = [_bars(r) for r in outcome.regimes if r.shares]
    foretold = _foretold(outcome, styles)
    residuals = _residuals(with_runs[:1], styles, outcome.about["global_batch"])
    return render_page(
        "taciturn.compare",
        "page.html.jinja",
        [*ratios, *losses, *bars, *foretold, *residuals],
        title=(
            f"{outcome.about['task']}: {len(e.methods)} methods against tuned DDP, {e.ranks} ranks"
        ),
        lead=(
            f"{e.steps} steps of {outcome.about['global_batch']} examples, {e.seeds} fresh seeds, "
            f"mode {e.mode}. The target, {outcome.about['metric']} <= {outcome.target:.4g}, was "
            "fixed by the tuned baseline on seeds of its own."
        ),
        regimes=[_regime(r) for r in outcome.regimes],
        key=[(s.name, s.color, s.glyph) for s in styles.values()],
        ratios=ratios,
        crossovers=_crossovers(outcome),
        losses=losses,
        parts=_PARTS,
        bars=bars,
        foretold=foretold,
        residuals=residuals,
        tables=[t for t in _tables(outcome) if t.rows],
        about=_about(outcome.about),
        rerun=rerun,
        experiment=e.to_toml(),
        small_print=SMALL_PRINT,
    )


def _regime(regime: Regime) -> dict[str, Any]:
    """Return what the template says of a regime in words."""
    findings = [
        {
            "text": sentence(row, regime.stands_for),
            "verdict": "none" if row.verdict == NOT_SHOWN else row.verdict,
            "notes": [*row.broken[1:], *row.notes],
        }
        for row in regime.rows
    ]
    return {
        "heading": f"At {heading(regime)}",
        "findings": findings,
        "warnings": [
            *(f"Broken: {text}." for text in regime.broken),
            *(f"{text[:1].upper()}{text[1:]}." for text in regime.notes),
        ],
    }


def _crossovers(outcome: Outcome) -> Iterator[str]:
    rows = [row for regime in outcome.regimes for row in regime.rows]
    rates = {r.name: r.rate.bits_per_s for r in outcome.regimes if r.rate is not None}
    for one in crossovers(rows, rates):
        if one.low is None and one.high is None:
            continue  # nothing is known of where it is
        low = "below the slowest network" if one.low is None else rate_text(one.low)
        high = "beyond the fastest network" if one.high is None else rate_text(one.high)
        yield (
            f"{one.method} takes as long as the best baseline at about {rate_text(one.bits_per_s)} "
            f"(95 %: {low} to {high}), interpolated between the networks that were measured."
        )


# --------------------------------------------------------------------------------------- figures


def _name_of(regime: Regime, kind: str) -> str:
    """Return what the page's script finds a figure by."""
    return f"{kind}-{regime.name.replace('.', '-')}"


def _ratios(regime: Regime, styles: Mapping[str, _Style]) -> Figure:
    """The ratio of each method with its interval, its name above; what was foretold beside."""
    shown = list(reversed(regime.rows))  # plotly counts upwards
    data: list[Figure] = []
    labels, ends = [], [1.0]
    for place, row in enumerate(shown):
        style = styles[row.method]
        name = shown_name(row.method, regime.stands_for.get(row.method))
        low, high = row.time_ratio_low, row.time_ratio_high
        told = f"reached {row.reached} of {row.runs}"
        if row.time_ratio is not None:
            told = f"{row.time_ratio:.2f}"
        told += f", {row.verdict}"
        labels.append(_label(place, f"{name} \u00b7 {told}"))
        predicted = _predicted_ratio(regime, row)
        if predicted is not None:
            ends.append(predicted)
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [predicted],
                    "y": [place],
                    "marker": {"symbol": "line-ns-open", "size": 14, "color": style.color},
                    "hovertext": [f"{name}<br>a step was foretold to take {predicted:.2f}"],
                    "hoverinfo": "text",
                }
            )
        if row.time_ratio is None:
            continue
        known = low is not None and high is not None
        ends += [row.time_ratio, *((low, high) if known else ())]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [row.time_ratio],
                "y": [place],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [high - row.time_ratio if known else 0],  # type: ignore[operator]
                    "arrayminus": [row.time_ratio - low if known else 0],  # type: ignore[operator]
                    "thickness": 1.5,
                    "width": 5,
                },
                "marker": {"color": style.color, "symbol": style.symbol, "size": 10},
                "hovertext": [f"{name}<br>{told}"],
                "hoverinfo": "text",
            }
        )
    least, most = min(ends) / 1.15, max(ends) * 1.15
    marks = [x for x in ticks(least, most) if least <= x <= most]
    return figure(
        _name_of(regime, "ratio"),
        f"At {regime.name}: time to the target over the best baseline's, with its 95 % interval; "
        "the upright stroke is what was foretold of a step. Left of 1 is faster.",
        data,
        _ROW_PX * len(shown) + 60,
        annotations=labels,
        margin=_WIDE,
        shapes=[_line_at(1)],
        xaxis={
            "type": "log",
            "range": [math.log10(least), math.log10(most)],
            "tickvals": marks,
            "ticktext": [f"{x:g}" for x in marks],
        },
        yaxis={"visible": False, "range": [-0.4, len(shown) - 0.2]},
    )


def _label(place: int, text: str) -> Figure:
    """A text above a bar or a mark, in two lines if it is too long for a narrow screen."""
    places = [at + 1 for at, letter in enumerate(text) if letter in ",\u00b7"]
    if len(text) > _LINE and places:
        middle = min(places, key=lambda at: abs(at - len(text) / 2))
        text = f"{text[:middle].rstrip()}<br>{text[middle:].lstrip()}"
    return {
        "x": 0,
        "xref": "paper",
        "y": place + 0.2,
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "text": text,
        "font": {"size": 11},
    }


def _line_at(x: float) -> Figure:
    line = {"color": "#7d8590", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _predicted_ratio(regime: Regime, row: Row) -> float | None:
    mine, base = regime.shares.get(row.method), regime.shares.get(row.baseline)
    if mine is None or base is None or not mine.predicted_s or not base.predicted_s:
        return None
    return mine.predicted_s / base.predicted_s


class _Curve(NamedTuple):
    """Of one method, at each evaluation: where, and the mean, least and greatest value."""

    x: list[float]
    mean: list[float]
    least: list[float]
    most: list[float]


def _curve(runs: Sequence[Run], where: Callable[[Run, Point], float | None]) -> _Curve:
    curve = _Curve([], [], [], [])
    alive = [run for run in runs if run.failure is None]
    for points in zip(*(run.points for run in alive), strict=False):
        at = [where(run, point) for run, point in zip(alive, points, strict=True)]
        values = [p.value for p in points]
        if None in at or None in values:
            continue
        curve.x.append(statistics.fmean(at))  # type: ignore[arg-type]
        curve.mean.append(statistics.fmean(values))
        curve.least.append(min(values))
        curve.most.append(max(values))
    return curve


def _losses(
    outcome: Outcome, regimes: Sequence[Regime], styles: Mapping[str, _Style]
) -> Iterator[Figure]:
    metric = outcome.about["metric"]
    for regime in regimes:
        yield _loss(
            _name_of(regime, "seconds"),
            f"At {regime.name}: {metric} against seconds on the clock.",
            {name: _curve(runs, lambda _, p: p.seconds) for name, runs in regime.runs.items()},
            styles,
            outcome.target,
            "seconds",
        )
    if not regimes:
        return
    first, batch = regimes[0], outcome.about["global_batch"]
    kinds: dict[str, Callable[[Run, Point], float | None]] = {
        "steps": lambda _, p: p.examples / batch,
        "tokens": lambda r, p: p.examples * r.tokens / r.examples,
        "MiB sent by a rank": lambda _, p: None if p.sent_bytes is None else p.sent_bytes / 2**20,
    }
    for kind, where in kinds.items():
        curves = {name: _curve(runs, where) for name, runs in first.runs.items()}
        if not any(curve.x for curve in curves.values()):
            continue
        of = (
            f" at {first.name}"
            if kind.startswith("MiB") or outcome.experiment.mode == "direct"
            else ""
        )
        yield _loss(
            f"by-{kind.split()[0].lower()}",
            f"{metric} against {kind}{of}.",
            curves,
            styles,
            outcome.target,
            kind,
        )


def _loss(
    name: str,
    caption: str,
    curves: Mapping[str, _Curve],
    styles: Mapping[str, _Style],
    target: float,
    unit: str,
) -> Figure:
    data: list[Figure] = []
    lines: list[Figure] = []
    values = [target]
    for method, curve in curves.items():
        if not curve.x:
            continue
        style = styles[method]
        values += [*curve.least, *curve.most]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [*curve.x, *reversed(curve.x)],
                "y": [*curve.least, *reversed(curve.most)],
                "fill": "toself",
                "fillcolor": _clear(style.color),
                "line": {"width": 0},
                "hoverinfo": "skip",
            }
        )
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": curve.x,
                "y": curve.mean,
                "line": {"color": style.color, "width": 1.5},
                "marker": {"color": style.color, "symbol": style.symbol, "size": 6},
                "hovertext": [
                    f"{method}<br>{y:.4g} at {x:.4g} {unit}"
                    for x, y in zip(curve.x, curve.mean, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    yaxis: Figure = {"nticks": 6}
    if min(values) > 0:
        low, high = min(values) / 1.1, max(values) * 1.1
        marks = [y for y in ticks(low, high) if low <= y <= high]
        yaxis = {"type": "log", "range": [math.log10(low), math.log10(high)]}
        if len(marks) > 1:
            yaxis |= {"tickvals": marks, "ticktext": [f"{y:g}" for y in marks]}
        else:
            yaxis |= {"nticks": 5}
    across = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": target, "y1": target}
    return figure(
        name,
        caption,
        data + lines,
        320,
        shapes=[across | {"line": {"color": "#7d8590", "width": 1.2, "dash": "dash"}}],
        xaxis={"title": {"text": unit}, "rangemode": "tozero", "nticks": 6},
        yaxis=yaxis,
    )


def _clear(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_BAND})"


def _parts_of(share: Share) -> tuple[float, float, float, float]:
    """Computing, coding, waiting and the rest, together the step: what overlaps is left out."""
    exposed = share.exposed_s
    coding = min(share.codec_s, exposed)
    waiting = min(share.waiting_s, exposed - coding)
    return share.step_s - exposed, coding, waiting, exposed - coding - waiting


def _bars(regime: Regime) -> Figure:
    """The step of each method in parts, its name above its bar."""
    shown = list(regime.shares.items())[::-1]  # plotly counts upwards
    places = list(range(len(shown)))
    names = [shown_name(name, regime.stands_for.get(name)) for name, _ in shown]
    parts = [_parts_of(share) for _, share in shown]
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": places,
            "x": [each[i] for each in parts],
            "width": 0.3,
            "marker": {"color": color},
            "hovertext": [
                f"{name}<br>{part}: {seconds_text(each[i])}"
                for name, each in zip(names, parts, strict=True)
            ],
            "hoverinfo": "text",
        }
        for i, (part, color) in enumerate(_PARTS)
    ]
    labels = [
        _label(place, f"{name} \u00b7 {seconds_text(share.step_s)}")
        for place, name, (_, share) in zip(places, names, shown, strict=True)
    ]
    return figure(
        _name_of(regime, "parts"),
        f"At {regime.name}: seconds of a step on the slowest rank, with nothing counted twice: "
        "coding and waiting only as far as they are not hidden behind computing.",
        data,
        _ROW_PX * len(shown) + 60,
        annotations=labels,
        barmode="stack",
        margin=_WIDE,
        xaxis={"title": {"text": "seconds"}, "nticks": 6, "rangemode": "tozero"},
        yaxis={"visible": False, "range": [-0.4, len(shown) - 0.2]},
    )


def _foretold(outcome: Outcome, styles: Mapping[str, _Style]) -> list[Figure]:
    data: list[Figure] = []
    seconds: list[float] = []
    for regime in outcome.regimes:
        for name, share in regime.shares.items():
            if share.predicted_s is None:
                continue
            seconds += [share.predicted_s, share.step_s]
            off = share.predicted_s / share.step_s - 1
            style = styles[name]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [share.step_s],
                    "y": [share.predicted_s],
                    "marker": {"color": style.color, "symbol": style.symbol, "size": 9},
                    "hovertext": [f"{name}<br>{regime.name}: foretold {off:+.0%}"],
                    "hoverinfo": "text",
                }
            )
    if not data:
        return []
    low, high = min(seconds) / 1.3, max(seconds) * 1.3
    marks = [x for x in ticks(low, high) if low <= x <= high]
    axis = {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": marks,
        "ticktext": [seconds_text(x) for x in marks],
    }
    diagonal = {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high],
        "y": [low, high],
        "line": {"color": "#7d8590", "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }
    return [
        figure(
            "foretold",
            "Seconds of a step in every network: what the plan foretold before anything was run, "
            "upwards, against what was measured. On the dotted line they agree.",
            [diagonal, *data],
            400,
            xaxis=axis | {"title": {"text": "measured"}},
            yaxis=dict(axis),
        )
    ]


def _residuals(regimes: Sequence[Regime], styles: Mapping[str, _Style], batch: int) -> list[Figure]:
    data: list[Figure] = []
    for regime in regimes:
        for name, runs in regime.runs.items():
            alive = [run for run in runs if run.failure is None and run.points]
            if not any(p.residual_norm for run in alive for p in run.points):
                continue
            style = styles[name]
            means = [
                statistics.fmean(p.residual_norm or 0.0 for p in points)
                for points in zip(*(run.points for run in alive), strict=False)
            ]
            steps = [p.examples / batch for p in alive[0].points]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": steps,
                    "y": means,
                    "line": {"color": style.color, "width": 1.5},
                    "marker": {"color": style.color, "symbol": style.symbol, "size": 6},
                    "hovertext": [
                        f"{name}<br>{y:.3g} at step {x:g}"
                        for x, y in zip(steps, means, strict=True)
                    ],
                    "hoverinfo": "text",
                }
            )
    if not data:
        return []
    return [
        figure(
            "residuals",
            "Norm of the residual that error feedback carries to the next step, mean over seeds.",
            data,
            300,
            xaxis={"title": {"text": "steps"}, "rangemode": "tozero", "nticks": 6},
            yaxis={"rangemode": "tozero", "nticks": 6},
        )
    ]


# ---------------------------------------------------------------------------------------- tables


def _tables(outcome: Outcome) -> Iterator[_Table]:
    yield _verdicts(outcome)
    yield _steps(outcome)
    yield _replicas(outcome)
    yield _rules(outcome)
    yield _settings(outcome)
    yield _runs(outcome)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None else f"{low:.3f} to {_number(high)}"


def _verdicts(outcome: Outcome) -> _Table:
    head = ["network", "method", "run as", "verdict", "time ratio", "95 %", "P(faster)", "reached"]
    head += [
        "baseline reached",
        "baseline",
        "looser target",
        "stricter target",
        "examples",
        "final",
        "at most",
    ]
    head += ["foretold"]
    rows = []
    for regime in outcome.regimes:
        others = zip(regime.rows, regime.looser, regime.stricter, strict=True)
        for row, looser, stricter in others:
            rows.append(
                (
                    regime.name,
                    row.method,
                    regime.stands_for.get(row.method, row.method),
                    row.verdict,
                    _number(row.time_ratio),
                    _interval(row.time_ratio_low, row.time_ratio_high),
                    _number(row.p_faster, 2),
                    f"{row.reached} of {row.runs}",
                    str(row.baseline_reached),
                    regime.stands_for.get(row.baseline, row.baseline),
                    _number(looser.time_ratio),
                    _number(stricter.time_ratio),
                    _number(row.examples_ratio),
                    _number(row.final_quality_ratio),
                    _number(row.final_quality_high),
                    _number(_predicted_ratio(regime, row)),
                )
            )
    return _Table(
        "Verdicts in numbers",
        head,
        rows,
        4,
        note=f"Targets: {outcome.looser_target:.4g} looser, {outcome.target:.4g}, "
        f"{outcome.stricter_target:.4g} stricter. Ratios are to the best baseline in the same "
        "network; of final values, above 1 is worse, and the next column is the end of the "
        "one-sided 95 % interval.",
    )


def _steps(outcome: Outcome) -> _Table:
    head = ["network", "method", "step", "computing", "exposed", "coding", "waiting", "sent"]
    head += ["held memory", "foretold"]
    rows = [
        (
            regime.name,
            name,
            seconds_text(share.step_s),
            seconds_text(share.compute_s),
            seconds_text(share.exposed_s),
            *_told(share),
            mib_text(share.sent_bytes),
            mib_text(share.state_bytes),
            seconds_text(share.predicted_s),
        )
        for regime in outcome.regimes
        for name, share in regime.shares.items()
    ]
    return _Table("Steps", head, rows, 2, note="Means over seeds, of the slowest rank.")


def _told(share: Share) -> tuple[str, str]:
    """Seconds in coding and waiting; of the backend's own exchange nothing is told."""
    if not share.codec_s and not share.waiting_s:
        return "-", "-"
    return seconds_text(share.codec_s), seconds_text(share.waiting_s)


def _replicas(outcome: Outcome) -> _Table:
    head = ["network", "method", "replica error", "mean error", "spread", "spread at the end"]
    head += ["one replica", "averaged weights", "steps not finite", "most held back"]
    rows = []
    for regime in outcome.regimes:
        verdicts = {row.method: row for row in regime.rows}
        for name, runs in regime.runs.items():
            errors, row = regime.errors.get(name, {}), verdicts.get(name)
            alive = [run for run in runs if run.failure is None]
            spreads = [r.replica_spread for r in alive if r.replica_spread is not None]
            rows.append(
                (
                    regime.name,
                    name,
                    error_text(errors.get("replica_error")),
                    error_text(errors.get("mean_error")),
                    error_text(errors.get("spread")),
                    error_text(max(spreads, default=None)),
                    _number(None if row is None else row.single_replica_ratio),
                    _number(None if row is None else row.averaged_ratio),
                    str(sum(r.nonfinite_steps for r in alive)),
                    _number(max((r.residual_growth for r in alive), default=None), 2),
                )
            )
    return _Table(
        "Replicas and averages",
        head,
        rows,
        2,
        note="Errors are of one average of the task's gradients, relative to the true one: of a "
        "replica, of the mean of all replicas, and between replicas. The spread at the end is of "
        "the weights. Final values of one replica by itself, and of the weights averaged over the "
        "last tenth of the steps, are over the baseline's. The residual is over the greatest "
        "gradient.",
    )


def _rules(outcome: Outcome) -> _Table:
    rows = [
        (f"{rule.number}. {rule.text}", rule.state, "; ".join(rule.details) or "-")
        for rule in rules_kept(outcome)
    ]
    return _Table("Rules of evidence", ["rule", "", "where not"], rows, 3, wrap=True)


def _settings(outcome: Outcome) -> _Table:
    rows = []
    for regime in outcome.regimes:
        for name, setting in regime.settings.items():
            line = (
                name,
                setting.method,
                f"{setting.learning_rate:.3g}",
                str(setting.trials),
                _number(setting.value, 4),
            )
            if line not in rows:
                rows.append(line)
    head = ["method", "tuned", "learning rate", "tuning runs", "best final value"]
    return _Table("Settings", head, rows, 2)


def _runs(outcome: Outcome) -> _Table:
    head = ["network", "method", "seed", "reached after", "examples", "final", "best", "failure"]
    rows = []
    for regime in outcome.regimes:
        for name, runs in regime.runs.items():
            for run in runs:
                at = crossing(run.points, outcome.target)
                rows.append(
                    (
                        regime.name,
                        name,
                        str(run.seed),
                        "-" if at is None else seconds_text(at.seconds),
                        "-" if at is None else str(at.examples),
                        _number(run.final, 4),
                        _number(run.best, 4),
                        run.failure or "-",
                    )
                )
    return _Table("Runs", head, rows, 2)


def _about(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the records were made with, as far as a line holds it."""
    plain = {k: v for k, v in about.items() if k not in ("settings", "facts", "began_s")}
    return [(key, str(value)) for key, value in {**plain, **about["facts"]}.items() if value != ""]

"""The figures of a comparison's page, each from an outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from taciturn.bench.table import seconds_text
from taciturn.compare.experiment import Experiment
from taciturn.compare.outcome import Outcome, Regime, Share
from taciturn.compare.table import shown_name
from taciturn.compare.verdict import Point, Run
from taciturn.pages import BARE_MARGIN, GLYPHS, ROW_PX, Figure, figure, label, stacked_bars, ticks

__all__ = ["PARTS", "Style", "bars", "foretold", "losses", "ratios", "residuals", "styles_of"]

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
PARTS = (
    ("computing", "#7d8590"),
    ("coding", "#c8661a"),
    ("waiting for messages", "#3b82c4"),
    ("other exchange", "#a85cc2"),
)
_BAND = 0.15
"""Opacity."""


@dataclass(frozen=True)
class Style:
    """How a contender is drawn: a name of plotly's for the shape."""

    name: str
    color: str
    symbol: str

    @property
    def glyph(self) -> str:
        """The shape as a character."""
        return GLYPHS[self.symbol]


def styles_of(experiment: Experiment) -> dict[str, Style]:
    """A colour and a shape for each contender."""
    symbols = list(GLYPHS)
    return {
        c.method: Style(c.shown, _COLORS[i % len(_COLORS)], symbols[i % len(symbols)])
        for i, c in enumerate(experiment.contenders)
    }


def _name_of(regime: Regime, kind: str) -> str:
    """Return what the page's script finds a figure by."""
    return f"{kind}-{regime.name.replace('.', '-')}"


def ratios(regime: Regime, styles: Mapping[str, Style]) -> Figure:
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
        labels.append(label(place, f"{name} \u00b7 {told}"))
        predicted = regime.predicted_ratio(row)
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
        ROW_PX * len(shown) + 60,
        annotations=labels,
        margin=BARE_MARGIN,
        shapes=[_line_at(1)],
        xaxis={
            "type": "log",
            "range": [math.log10(least), math.log10(most)],
            "tickvals": marks,
            "ticktext": [f"{x:g}" for x in marks],
        },
        yaxis={"visible": False, "range": [-0.4, len(shown) - 0.2]},
    )


def _line_at(x: float) -> Figure:
    line = {"color": "#7d8590", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


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


def losses(
    outcome: Outcome, regimes: Sequence[Regime], styles: Mapping[str, Style]
) -> Iterator[Figure]:
    """Values against seconds in every network, and against steps, tokens and bytes in the first."""
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
    styles: Mapping[str, Style],
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
                    f"{style.name}<br>{y:.4g} at {x:.4g} {unit}"
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


def bars(regime: Regime) -> Figure:
    """The step of each method in parts."""
    return stacked_bars(
        _name_of(regime, "parts"),
        f"At {regime.name}: seconds of a step on the slowest rank, with nothing counted twice: "
        "coding and waiting only as far as they are not hidden behind computing.",
        PARTS,
        [
            (shown_name(name, regime.stands_for.get(name)), _parts_of(share))
            for name, share in regime.shares.items()
        ],
        seconds_text,
    )


def foretold(outcome: Outcome, styles: Mapping[str, Style]) -> list[Figure]:
    """Steps as they were foretold, against those that were measured; empty if none was."""
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


def residuals(regimes: Sequence[Regime], styles: Mapping[str, Style], batch: int) -> list[Figure]:
    """Norms of what error feedback holds back; empty if nothing does."""
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

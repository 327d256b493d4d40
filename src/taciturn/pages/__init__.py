"""What the pages with figures share: one template, one way to draw.

plotly's script is inside a page and a content policy forbids it to load anything: it works offline
and tells nobody that it was opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

__all__ = [
    "BARE_MARGIN",
    "GLYPHS",
    "MARGIN",
    "ROW_PX",
    "Figure",
    "figure",
    "label",
    "render_page",
    "stacked_bars",
    "ticks",
]

Figure = dict[str, Any]

GLYPHS = {
    "square": "\u25a0",
    "circle": "\u25cf",
    "triangle-up": "\u25b2",
    "diamond": "\u25c6",
    "triangle-down": "\u25bc",
    "star": "\u2605",
}
"""Characters that look like plotly's symbols of these names, for a key beside a figure."""
MARGIN = {"l": 56, "r": 18, "t": 8, "b": 46}
"""Of a figure, in pixels."""
BARE_MARGIN = MARGIN | {"l": 12}
"""Of one without an axis at its left."""
ROW_PX = 58
"""Of a bar or a mark with its label above."""
LINE = 44
"""Characters of a label that fit into the narrowest screen."""


def figure(name: str, caption: str, data: list[Figure], height: int, **layout: Any) -> Figure:
    """What the page's script draws, beside what its template needs."""
    base = {
        "height": height,
        "margin": MARGIN,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
    }
    return {"name": name, "caption": caption, "spec": {"data": data, "layout": base | layout}}


def label(place: int, text: str) -> Figure:
    """A text above a bar or a mark, in two lines if it is too long for a narrow screen."""
    places = [at + 1 for at, letter in enumerate(text) if letter in ",\u00b7"]
    if len(text) > LINE and places:
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


def stacked_bars(
    name: str,
    caption: str,
    parts: Sequence[tuple[str, str]],
    bars: Sequence[tuple[str, Sequence[float]]],
    text: Callable[[float], str],
) -> Figure:
    """Seconds in parts, one bar below the other, with what it is and the whole above each.

    Args:
        name: as of :func:`figure`.
        caption: likewise.
        parts: what each part is, and its colour.
        bars: what each bar is, and its parts in seconds, in their order.
        text: seconds in words.
    """
    shown = list(bars)[::-1]  # plotly counts upwards
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(range(len(shown))),
            "x": [values[i] for _, values in shown],
            "width": 0.3,
            "marker": {"color": color},
            "hovertext": [f"{what}<br>{part}: {text(values[i])}" for what, values in shown],
            "hoverinfo": "text",
        }
        for i, (part, color) in enumerate(parts)
    ]
    return figure(
        name,
        caption,
        data,
        ROW_PX * len(shown) + 60,
        annotations=[
            label(place, f"{what} \u00b7 {text(sum(values))}")
            for place, (what, values) in enumerate(shown)
        ],
        barmode="stack",
        margin=BARE_MARGIN,
        xaxis={"title": {"text": "seconds"}, "nticks": 6, "rangemode": "tozero"},
        yaxis={"visible": False, "range": [-0.4, len(shown) - 0.2]},
    )


def ticks(low: float, high: float) -> list[float]:
    """Round values for a logarithmic axis: decades, with 2 and 5 between where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    return [step * 10.0**k for k in decades for step in steps]


def _breakable(text: str) -> Markup:
    """Allow line breaks after the commas of a method."""
    return Markup(str(escape(text)).replace(",", ",<wbr>"))


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("taciturn.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


def render_page(package: str, template: str, figures: Sequence[Figure], **values: Any) -> str:
    """The page: a template that extends ``base.html.jinja``, with all its figures.

    Args:
        package: that the template is in.
        template: its file.
        figures: as :func:`figure` makes them; the template says where each is, by name.
        values: for the template.
    """
    specs = json.dumps({f["name"]: f["spec"] for f in figures}, allow_nan=False)
    return (
        _environment(package)
        .get_template(template)
        .render(specs=specs.replace("<", "\\u003c"), plotly=get_plotlyjs(), **values)
    )

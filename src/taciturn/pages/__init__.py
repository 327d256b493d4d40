"""What the pages with figures share: one template, one way to draw.

plotly's script is inside a page and a content policy forbids it to load anything: it works offline
and tells nobody that it was opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

__all__ = ["MARGIN", "Figure", "figure", "render_page", "ticks"]

Figure = dict[str, Any]

MARGIN = {"l": 56, "r": 18, "t": 8, "b": 46}
"""Of a figure, in pixels."""


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

"""The page of a link: self-contained, complete, and drawn by a real browser at two widths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from browser import BROWSER, open_page
from probe_links import MadeUp
from taciturn.probe.page import html

LINK = MadeUp(rate_bits_per_s=200_000_000).link()
ANSWERS = """{
  plots: [...document.querySelectorAll(".plot")].map(plot => ({
    name: plot.id,
    width: plot.clientWidth,
    points: plot.querySelectorAll("svg .points .point").length,
    outside: [...plot.querySelectorAll("svg text")].filter(text => {
      const [inner, outer] = [text.getBoundingClientRect(), plot.getBoundingClientRect()];
      return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1);
    }).map(text => text.textContent),
  })),
}"""


@BROWSER
@pytest.mark.timeout(150)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_every_figure(tmp_path: Path, width: int) -> None:
    """All figures are drawn, without an error, a request or a horizontal scroll bar."""
    came = open_page(html(LINK), tmp_path, width, ANSWERS)
    assert came["failures"] == []
    assert came["content"] <= width
    plots = {plot["name"]: plot for plot in came["plots"]}
    sizes = sum(
        len(fit.sizes_bytes) for fit in (LINK.one_way, LINK.both_ways, *LINK.all_reduce.values())
    )
    assert {name: plot["points"] for name, plot in plots.items()} == {
        "curves": sizes,
        "residuals": sizes,
        "pairs": 0,
        "methods": 3 * len(LINK.methods),
    }
    for plot in plots.values():
        assert 300 < plot["width"] <= width
        assert plot["outside"] == []


def test_the_page_is_self_contained() -> None:
    """Nothing is loaded, warnings and methods are there, and text does not become markup."""
    odd = replace(LINK, warnings=("<b>odd</b>",))
    page = html(odd)
    assert "default-src 'none'" in page
    assert "<b>odd" not in page
    assert "&lt;b&gt;odd" in page
    for one in LINK.methods:
        assert one.method in page


def test_a_page_without_methods() -> None:
    """A probe that measured none has no bars and no empty table."""
    page = html(replace(LINK, methods=()))
    assert 'id="methods"' not in page
    assert ">Methods<" not in page

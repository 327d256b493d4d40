"""The page: self-contained, complete, and drawn by a real browser at two widths."""

from __future__ import annotations

import html as escaping
import re
from pathlib import Path
from typing import Any

import pytest

from bench_rows import make_row, make_run
from browser import BROWSER, open_page
from taciturn.bench import report
from taciturn.bench.report import html
from taciturn.bench.table import error_text, ratio_text, seconds_text
from taciturn.errors import InputError

SEVERAL = make_run(400) + make_run(1 << 20)
ANSWERS = """{
  plots: [...document.querySelectorAll(".plot")].map(plot => ({
    name: plot.id,
    width: plot.clientWidth,
    marks: plot.querySelectorAll("svg .point").length,
    labels: [...plot.querySelectorAll("svg .annotation-text")].map(label => label.textContent),
    outside: [...plot.querySelectorAll("svg text")].filter(text => {
      const [inner, outer] = [text.getBoundingClientRect(), plot.getBoundingClientRect()];
      return inner.width && (inner.left < outer.left - 1 || inner.right > outer.right + 1);
    }).map(text => text.textContent),
  })),
}"""


def text_of(page: str) -> str:
    """What a reader sees, without scripts, styles and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", escaping.unescape(re.sub(r"<wbr>|<[^>]*>", "", page)))


def opened(rows: list[dict[str, Any]], folder: Path, width: int) -> dict[str, Any]:
    return open_page(html(rows), folder, width, ANSWERS)


@BROWSER
@pytest.mark.timeout(150)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_every_figure(tmp_path: Path, width: int) -> None:
    """All figures are drawn, without an error, a request or a horizontal scroll bar."""
    came = opened(SEVERAL, tmp_path, width)
    assert came["failures"] == []
    assert came["width"] == width
    assert came["content"] <= width
    plots = {plot["name"]: plot for plot in came["plots"]}
    methods, sizes = len(SEVERAL) // 2, 2
    assert {name: plot["marks"] for name, plot in plots.items()} == {
        "times": methods,
        "sizes-median_s": methods * sizes,
        "sizes-ratio_to_backend": methods * sizes,
        "replica-error": methods,
        "mean-error": methods,
    }
    for plot in plots.values():
        assert 300 < plot["width"] <= width
        assert plot["outside"] == []  # a figure clips what does not fit
        numbers = re.findall(r"\b\d+\b", " ".join(plot["labels"]))
        assert {str(i) for i in range(1, methods + 1)} <= set(numbers)


@BROWSER
@pytest.mark.timeout(150)
def test_a_browser_draws_one_row(tmp_path: Path) -> None:
    """A run of one rank and one method, without bytes and errors, is drawn too."""
    row = make_row("backend", (0.1,), 0, 0.0, 0.0, reference=True, rate=None, ranks=1)
    came = opened([row], tmp_path, 390)
    assert came["failures"] == []
    assert [(plot["name"], plot["marks"]) for plot in came["plots"]] == [("times", 1)]


@pytest.mark.parametrize("seconds", [2.47, 1e-6, 12345.0, 119.4])
def test_the_longest_bar_leaves_room_for_its_label(seconds: float) -> None:
    """The margin behind the bars is as wide as the widest label, whatever the page's width."""
    rows = [make_row("backend", (1e-4,), reference=True), make_row("ring", (seconds,))]
    figure = report._bars(rows, {"backend": 1, "ring": 2})["spec"]
    behind = [label for label in figure["layout"]["annotations"] if label["x"] > 0]
    widest = max(len(label["text"]) for label in behind)
    assert len(behind) == len(rows)
    assert figure["layout"]["margin"]["r"] >= 6 * widest + max(one["xshift"] for one in behind)
    assert max(label["x"] for label in behind) <= figure["layout"]["xaxis"]["range"][1]


def test_the_page_is_self_contained() -> None:
    """Nothing is loaded from anywhere, and the page's own policy forbids it."""
    page = html(SEVERAL)
    outside = re.sub(r"<script\b.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|https?://", outside)
    assert "default-src 'none'" in page
    assert not re.search(r"<script[^>]+src", page)


def test_every_number_is_text() -> None:
    """What a figure shows also stands in a table or a sentence."""
    text = text_of(html(SEVERAL))
    for row in SEVERAL:
        assert row["method"] in text
        for value in (
            seconds_text(row["median_s"]),
            ratio_text(row["ratio_to_backend"]),
            error_text(row["replica_error"]),
            error_text(row["mean_error"]),
            error_text(row["spread"]),
        ):
            assert value in text


def test_the_page_says_where_the_coded_ring_is_beaten() -> None:
    """The verdict on each coded ring names its rivals, for each of the two errors."""
    page = html(make_run())
    table = page[page.index('aria-label="Where the coded ring is beaten"') :]
    lines = [text_of(line) for line in table.split("</table>")[0].split("<tr>")[2:]]
    assert len(lines) == 2
    assert lines[0].count("nobody") == 2
    assert "6 quantized:bits=8, 7 direct:bits=8" in lines[1]
    assert lines[1].count("nobody") == 1


def test_conditions_are_on_the_page() -> None:
    """The command, the link, the input and the versions are there."""
    text = text_of(html(make_run()))
    for value in ("taciturn bench --ranks 4", "200 Mbit/s up", "independent standard", "2.13.0"):
        assert value in text
    assert "not shaped" not in text


def test_a_link_that_is_not_shaped_is_named() -> None:
    """Without a set rate the page says so before anything else."""
    rows = [make_row("backend", rate=None, reference=True), make_row("ring", rate=None)]
    assert "The link was not shaped" in text_of(html(rows))


def test_what_cannot_be_placed_is_named() -> None:
    """A method without a byte count is left out of the frontier, and the page says which."""
    rows = [make_row("backend", sent=None, reference=True), make_row("ring")]
    assert "Not placed, for want of a byte count or of an error above zero: 1." in text_of(
        html(rows)
    )


def test_nothing_in_a_row_becomes_markup() -> None:
    """Names from files cannot inject anything."""
    evil = "</script><img src=x onerror=alert(1)>"
    row = make_row("ring", reference=True, worst_parameter_replica=evil, notes=[evil])
    row["conditions"]["input"] = row["method"] = evil
    page = html([row])
    assert evil not in page
    assert "<img" not in page.split("<script>")[0]


def test_a_page_needs_rows() -> None:
    """No rows, no page."""
    with pytest.raises(InputError, match="no rows"):
        html([])

"""The page and its picture: self-contained, complete, bounded, drawn by a browser at two widths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import BROWSER, open_page
from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.page import LEGEND, html
from taciturn.trace.picture import CELLS, LEVELS, MAX_HINTS, MAX_RANKS, draw, paint
from taciturn.trace.timeline import unite
from taciturn.trace.whatif import parse_change, predict
from taciturn.units import format_seconds
from trace_files import document, event, launch, own, public, step, write
from trace_simulator import Op, documents, simulate

# Boxes of all text outside of the tables that scroll, and of the shapes of the picture.
ANSWERS = """{
  shapes: [...document.querySelectorAll("svg.strip path")].map(shape => {
    const box = shape.getBoundingClientRect();
    return [shape.getAttribute("class"), box.left, box.right, box.height];
  }),
  labels: [...document.querySelectorAll(".axis span, .who, .bars span, .key li, h1, h2, p, li")]
    .filter(one => one.textContent.trim() && one.getBoundingClientRect().width)
    .filter(one => !one.closest("li") || one.matches("li"))
    .map(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      const box = range.getBoundingClientRect();
      return [one.textContent.trim(), box.left, box.top, box.right, box.bottom];
    }),
}"""

SPANS = st.lists(st.tuples(st.integers(-50, 1100), st.integers(0, 300)), max_size=12)


def overlapping(labels: list[list[Any]]) -> list[tuple[str, str]]:
    return [
        (one[0], other[0])
        for i, one in enumerate(labels)
        for other in labels[i + 1 :]
        if one[1] < other[3] - 1
        and other[1] < one[3] - 1
        and one[2] < other[4] - 1
        and other[2] < one[4] - 1
    ]


def made(tmp_path: Path, *files: Any) -> Analysis:
    return analyse([write(tmp_path / f"{i}.json", one) for i, one in enumerate(files)])


@given(SPANS, st.sampled_from([1, 7, 100, 1000]))
def test_a_cell_is_as_dark_as_it_is_covered(spans: list[tuple[int, int]], cells: int) -> None:
    """Blank if nothing of it is covered, darkest if all of it is, and in between in proportion."""
    intervals = unite([a for a, _ in spans], [a + n for a, n in spans]).clip(0, 1000)
    covered = np.zeros(1000)
    for a, b in zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True):
        covered[a:b] = 1
    levels = np.zeros(cells)
    for run in paint(intervals, 0, 1000, cells):
        assert not levels[run.first : run.first + run.width].any()
        levels[run.first : run.first + run.width] = run.level
    edges = np.linspace(0, 1000, cells + 1)
    total = np.concatenate([[0], np.cumsum(covered)])
    share = np.diff(np.interp(edges, np.arange(1001), total)) / np.diff(edges)
    assert np.array_equal(levels > 0, share > 0)
    assert np.array_equal(levels[share >= 1], np.full(int((share >= 1).sum()), LEVELS))
    assert (np.abs(levels / LEVELS - share) <= 1 / LEVELS + 1e-6).all()


def test_a_nanosecond_shows() -> None:
    """However long the step, work of one nanosecond leaves a mark, in its place."""
    runs = paint(unite([5 * 10**11], [5 * 10**11 + 1]), 0, 10**12)
    assert [tuple(run) for run in runs] == [(CELLS // 2, 1, 1)]


@BROWSER
@pytest.mark.timeout(150)
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_it(tmp_path: Path, width: int) -> None:
    """Nothing fails or is loaded, the timeline is drawn, labels keep apart, nothing sticks out."""
    analysis = analyse(own("straggler"))
    came = open_page(html(analysis), tmp_path, width, ANSWERS)
    assert came["failures"] == []
    assert came["width"] == width
    assert came["content"] <= width
    drawn = {kind for kind, left, right, height in came["shapes"] if right > left and height > 2}
    assert {"compute", "alone", "waiting", "critical"} <= drawn
    assert all(left >= 0 and right <= width for _, left, right, _ in came["shapes"])
    labels = came["labels"]
    assert [text for text, left, _, right, _ in labels if left < 0 or right > width] == []
    assert overlapping(labels) == []
    assert {"rank 0", "rank 3", "communication", "0"} <= {text for text, *_ in labels}


@BROWSER
@pytest.mark.timeout(150)
def test_a_browser_draws_eight_ranks_on_gpus(tmp_path: Path) -> None:
    """The same of a set on GPUs, whose collectives are mostly too short to see."""
    came = open_page(html(analyse([public("param_dlrm_8rank")])), tmp_path, 400, ANSWERS)
    assert came["failures"] == []
    assert came["content"] <= 400
    assert overlapping(came["labels"]) == []
    assert {"launch", "compute", "waiting", "critical"} <= {kind for kind, *_ in came["shapes"]}


def test_the_picture_is_that_of_the_intervals(tmp_path: Path) -> None:
    """Two ranks of an exact simulation: who computes, waits, transfers and is exposed when."""
    programs = [
        [Op("compute", 400), Op("reduce", wait=True), Op("compute", 100), Op("sync")],
        [Op("compute", 600), Op("reduce", wait=True), Op("compute", 100), Op("sync")],
    ]
    runs = simulate(programs, [300])
    picture = draw(made(tmp_path, *documents(runs)))
    length_us = (picture.end_ns - picture.start_ns) / 1e3

    def times(rank: int, strip: str, kind: str) -> list[tuple[float, float]]:
        (found,) = [one for one in picture.rows[rank].strips if one.name == strip]
        (layer,) = [one for one in found.layers if one.kind == kind]
        cells = unite(
            [run.first for run in layer.runs], [run.first + run.width for run in layer.runs]
        )
        return [
            (a * length_us / CELLS, b * length_us / CELLS)
            for a, b in zip(cells.start_ns.tolist(), cells.end_ns.tolist(), strict=True)
        ]

    cell = length_us / CELLS
    last, end = max(run.arrivals[0] for run in runs), runs[0].ends[0]
    (waiting,) = times(0, "communication", "waiting")
    assert waiting == (pytest.approx(runs[0].arrivals[0], abs=cell), pytest.approx(last, abs=cell))
    assert times(1, "communication", "waiting") == []
    (moving,) = times(0, "communication", "alone")
    assert moving == (pytest.approx(last, abs=cell), pytest.approx(end, abs=cell))
    exposed = [*times(0, "communication", "critical"), *times(1, "communication", "critical")]
    assert exposed == [(pytest.approx(last, abs=cell), pytest.approx(end, abs=cell))]
    (hint,) = picture.rows[0].strips[-2].hints
    assert hint.text.startswith("all_reduce")
    assert f"waits {(last - runs[0].arrivals[0]) / 1e3:.3g} ms, moves 0.3 ms" in hint.text


def test_every_meaning_has_a_colour_of_its_own() -> None:
    """No kind of the legend or of the path is drawn in black for want of one."""
    page = html(analyse(own("straggler")))
    colours = re.findall(r"--([a-z]+):", page)
    assert set(LEGEND) <= set(colours)


def test_the_path_is_drawn_where_it_runs_and_only_in_the_step(tmp_path: Path) -> None:
    """Before the step's begin nothing of it is drawn; the late rank is late, it does not wait."""
    for name in ("straggler", "bucketed"):
        analysis = analyse(own(name))
        picture = draw(analysis)
        index = list(analysis.report.steps).index(picture.step)
        begin, end = analysis.bounds_ns[index]
        length = picture.end_ns - picture.start_ns
        first = (begin - picture.start_ns) * CELLS // length
        last = -(-(end - picture.start_ns) * CELLS // length)
        for row in picture.rows:
            (path,) = [strip for strip in row.strips if strip.name == "critical path"]
            assert "waiting" not in {layer.kind for layer in path.layers}
            for layer in path.layers:
                assert all(first <= run.first < run.first + run.width <= last for run in layer.runs)


def test_the_page_is_self_contained() -> None:
    """No script, nothing loaded from anywhere, and the page's own policy forbids both."""
    page = html(analyse(own("bucketed")))
    assert not re.search(r"\b(src|href)\s*=|url\((?!#)|@import|https?://|<script", page)
    assert "default-src 'none'" in page


def test_every_number_is_there() -> None:
    """Sentence, steps, collectives, ranks, kinds of the critical path and notes are on the page."""
    analysis = analyse(own("straggler"))
    report = predict(analysis, [parse_change("all_reduce bytes/2")])
    page = html(analysis, report)
    text = re.sub(r"\s+", " ", page.replace("&#39;", "'"))
    assert report.diagnosis in text
    for one in [*report.steps, report.mean]:
        for value in (one.completed_s, one.exposed_s, one.exposed_low_s, one.exposed_high_s):
            assert format_seconds(value) in text
    for row in report.mean.collectives:
        assert row.waiting_s is not None
        assert format_seconds(row.waiting_s) in text
    for rank in report.mean.ranks:
        assert f"rank {rank.rank}</div>" in text
        assert format_seconds(rank.compute_s) in text
    for seconds in vars(report.mean.critical_path).values():
        assert not seconds or format_seconds(seconds) in text
    assert "all_reduce bytes/2" in text
    assert format_seconds(report.predictions[0].high_s) in text
    for note in report.notes:
        assert note in text.replace("&lt;", "<").replace("&#34;", '"')


def test_the_size_is_bounded(tmp_path: Path) -> None:
    """A hundred times as many events make a page that is hardly larger."""

    def trace(count: int) -> Any:
        events: list[Any] = [step(1, 0, 20 * count + 100)]
        for i in range(count):
            events.append(launch(20 * i + 1, i + 1))
            name = "ncclDevKernel_AllReduce_Sum_f32" if i % 2 else "gemm"
            events.append(event(name, 20 * i + 12, 7, tid=7 + i % 2, correlation=i + 1))
        return document(events)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    small = html(made(tmp_path / "a", trace(200)))
    large = html(made(tmp_path / "b", trace(20_000)))
    assert small.count('class="hint"') == large.count('class="hint"') == MAX_HINTS
    strips, bytes_per_cell = 4, 2 * len("M999 0h9v1h-9z")
    assert len(large) <= len(small) + strips * 2 * CELLS * bytes_per_cell


def test_many_ranks(tmp_path: Path) -> None:
    """Those on the critical path are drawn, and how many are not is said."""
    count = MAX_RANKS + 3
    late = count - 1
    programs = [
        [Op("compute", 900 if rank == late else 100), Op("reduce", wait=True), Op("sync")]
        for rank in range(count)
    ]
    analysis = made(tmp_path, *documents(simulate(programs, [50])))
    picture = draw(analysis)
    assert len(picture.rows) == MAX_RANKS
    assert picture.hidden_ranks == 3
    assert late in [row.rank for row in picture.rows]
    assert "3 ranks on which the critical path" in re.sub(r"\s+", " ", html(analysis))


def test_no_collectives_and_no_length(tmp_path: Path) -> None:
    """A trace without collectives, and one of a single event of no duration, have pages too."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    page = html(made(tmp_path / "a", document([step(1, 0, 100), event("gemm", 10, 50)])))
    assert "no collective" in page
    assert "n/a" in page
    assert "taciturn trace" in html(made(tmp_path / "b", document([event("gemm", 10, 0)])))


def test_nothing_in_a_trace_becomes_markup(tmp_path: Path) -> None:
    """Names from files cannot inject anything."""
    evil = "<img src=x onerror=alert(1)>all_reduce"
    events = [step(1, 0, 100), event(evil, 10, 50), event("nccl_kernel", 60, 5)]
    events[2]["args"]["Process Group Name"] = evil
    page = html(made(tmp_path, document(events)))
    assert "<img" not in page
    assert "&lt;img" in page

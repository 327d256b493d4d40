"""``taciturn trace``: what it prints and writes, its statuses, and that it needs no torch."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from link_files import make_link
from trace_files import document, event, own, step, write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(command: Run) -> Run:
    """Runs ``taciturn trace ARGUMENTS`` on a terminal of 80 columns."""
    return partial(command, "trace")


def test_the_report_for_people(run: Run) -> None:
    """Diagnosis, steps, path, collectives, ranks and notes, within 80 columns."""
    status, out, err = run(*own("straggler"))
    assert (status, err) == (0, "")
    assert "Rank 3 arrives" in out
    for part in ("Steps", "Critical path", "Collectives", "Ranks", "Note: exposed is given with"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_no_cell_is_cut(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """At any width, also for a group with a long name: every number with its unit, no ellipsis."""
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["tensor_parallel_group_of_the_second_stage", "1"]
    events = [step(1, 0, 1000)]
    for i, name in enumerate(names):
        at = 123.456 * (i + 1)
        events.append(event("ncclAllReduceKernel", at, 99.9, **{"Process Group Name": name}))
    path = write(tmp_path / "t.json", document(events))
    status, out, _ = run(path, "--what-if", "all_reduce bytes*1000")
    assert status == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= width
    assert out.count("99.9") >= 4
    assert re.sub(r"\s", "", out).count("costs") == 1


def test_names_do_not_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    """Escapes in the names of a file are shown, not sent."""
    name = "my_allreduce\x1b[31m\x9b2J\r"
    path = write(tmp_path / "t.json", document([step(1, 0, 100), event(name, 10, 5)]))
    _, out, _ = run(path)
    assert "my_allreduce\ufffd[31m\ufffd2J\ufffd" in out
    assert not {"\x1b", "\x9b", "\r"} & set(out)


@pytest.mark.parametrize("option", ["--codecs", "--link", "--alpha", "--beta"])
def test_options_of_a_change_need_one(run: Run, tmp_path: Path, option: str) -> None:
    """Without --what-if they would do nothing, silently."""
    table = write(tmp_path / "codecs.json", {})
    status, _, err = run(
        *own("onebucket"), option, table if option in ("--codecs", "--link") else 1
    )
    assert status == 2
    assert f"{option} is about a change" in err


def test_the_report_as_json(run: Run, tmp_path: Path) -> None:
    """``--json`` writes the report, predictions included."""
    path = tmp_path / "report.json"
    status, out, _ = run(*own("bucketed"), "--what-if", "bandwidth*4", "--json", path)
    assert status == 0
    assert "What if" in out
    found = json.loads(path.read_text())
    assert [one["step"] for one in found["steps"]] == [2, 3, 4]
    assert [one["what"] for one in found["predictions"]] == ["bandwidth*4"]
    status, _, err = run(*own("bucketed"), "--json", tmp_path / "none" / "report.json")
    assert status == 2
    assert "--json: cannot write" in err


def test_the_page_and_the_joined_file(run: Run, tmp_path: Path) -> None:
    """``--html`` and ``--perfetto`` write their files, predictions included; or say why not."""
    page, joined = tmp_path / "page.html", tmp_path / "out.json.gz"
    status, _, err = run(
        *own("bucketed"), "--what-if", "bandwidth*4", "--html", page, "--perfetto", joined
    )
    assert (status, err) == (0, "")
    assert "bandwidth*4" in page.read_text()
    events = json.loads(gzip.decompress(joined.read_bytes()))["traceEvents"]
    assert {0, 1, 2} == {one["pid"] for one in events}
    for option in ("--html", "--perfetto"):
        status, _, err = run(*own("bucketed"), option, tmp_path / "none" / "file")
        assert status == 2
        assert "cannot write" in err


def test_nothing_is_written_over_what_is_read(run: Run, tmp_path: Path) -> None:
    """Nor twice to one file, nor into a folder's trace."""
    trace = tmp_path / "rank0.json"
    trace.write_text(json.dumps(document([step(1, 0, 100), event("gemm", 5, 5)])))
    before = trace.read_bytes()
    for given in (trace, tmp_path):
        status, _, err = run(given, "--json", tmp_path / "." / "rank0.json")
        assert (status, "--json" in err, "is read" in err) == (2, True, True)
    status, _, err = run(trace, "--json", tmp_path / "out", "--html", tmp_path / "out")
    assert (status, "is that of --json" in err) == (2, True)
    assert trace.read_bytes() == before


def test_a_method_with_its_codec(run: Run, tmp_path: Path) -> None:
    """``--codecs`` names the cost that ``--what-if method=...`` needs."""
    codecs = tmp_path / "codecs.json"
    cost = {"bytes_ratio": 0.26, "codec_s_per_byte": 1e-9}
    codecs.write_text(json.dumps({"quantized:bits=8": cost}))
    asked = [*own("bucketed"), "--what-if", "method=quantized:bits=8"]
    assert run(*asked)[0] == 2
    status, out, _ = run(*asked, "--codecs", codecs)
    assert status == 0
    assert "method=quantized:bits=8" in out


def test_a_link_tells_what_methods_cost(run: Run, tmp_path: Path) -> None:
    """``--link`` in place of a table; a table is before it; not beside ``--alpha``."""
    link, codecs = tmp_path / "link.json", tmp_path / "codecs.json"
    make_link(ranks=2, local_s_per_elem=0.0).write(link)
    codecs.write_text('{"quantized:bits=8": {"bytes_ratio": 1, "codec_s_per_byte": 0.001}}')
    asked = [*own("bucketed"), "--what-if", "method=quantized:bits=8", "--link", link]
    status, out, _ = run(*asked)
    assert (status, " saves " in out) == (0, True), out
    status, out, _ = run(*asked, "--codecs", codecs)
    assert (status, " costs " in out) == (0, True), out
    status, _, err = run(*asked, "--alpha", "1e-4")
    assert status == 2
    assert "leave --alpha and --beta out" in err


@pytest.mark.parametrize("change", ["method=quantized:bits=8", "broadcast bytes/2"])
def test_a_change_that_cannot_be_told_costs_no_report(
    run: Run, tmp_path: Path, change: str
) -> None:
    """The files that were asked for are written all the same."""
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    status, out, err = run(*own("bucketed"), "--what-if", change, "--json", report, "--html", page)
    assert status == 2
    assert "broadcast" in err or "is not known" in err
    assert json.loads(report.read_text())["steps"]
    assert page.stat().st_size > 10_000
    assert "Removing every byte" in out


def test_a_cut_file_has_a_status_of_its_own(run: Run, tmp_path: Path) -> None:
    """3 and a report of the rest; with ``--strict`` 2 and no report."""
    text = json.dumps(document([step(1, 0, 100), event("gemm", 5, 5), event("gemm", 20, 5)]))
    path = tmp_path / "cut.json"
    path.write_text(text[:-30])
    status, out, _ = run(path)
    assert status == 3
    assert "not whole" in out
    status, out, err = run(path, "--strict")
    assert (status, out) == (2, "")
    assert "not whole" in err


def test_a_trace_without_collectives(run: Run, tmp_path: Path) -> None:
    """Status 0, overlap "n/a", and a sentence that says so."""
    path = write(tmp_path / "t.json", document([step(1, 0, 100), event("gemm", 5, 5)]))
    status, out, _ = run(path)
    assert status == 0
    assert "n/a" in out
    assert "no collective" in out


def test_ranks_and_kinds_from_the_command_line(run: Run, tmp_path: Path) -> None:
    """``--rank`` for files that do not say it, ``--kind`` for names of unknown kind."""
    events = [step(1, 0, 100), event("my_fast_allreduce(float*)", 5, 50)]
    files = [write(tmp_path / f"{c}.json", document(events, rank=None, world=2)) for c in "ab"]
    status, out, _ = run(*files, "--rank", 1, "--rank", 0)
    assert status == 0
    assert "my_fast_allreduce" in out
    status, out, _ = run(*files, "--rank", 1, "--rank", 0, "--kind", "my_fast*=comm")
    assert status == 0
    assert "my_fast_allreduce" not in out
    status, _, err = run(*files, "--rank", 1)
    assert status == 2
    assert "1 ranks for 2 different files" in err
    status, _, err = run(*files, "--rank", 1, "--rank", -1)
    assert status == 2
    assert "--rank=-1" in err


def test_no_torch_is_needed() -> None:
    """Reading, replaying and predicting work where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from taciturn.cli import main\n"
        "main(['trace', *sys.argv[1:], '--what-if', 'bytes/2'])"
    )
    command = [sys.executable, "-W", "error", "-c", code, *map(str, own("onebucket"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "What if" in done.stdout

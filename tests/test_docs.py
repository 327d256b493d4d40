"""README and docs cannot rot: their Python runs, and the commands that they show exist.

Every block fenced as ``python`` runs; the blocks of one page are one program, in order. Words
after ``python`` change that: ``ranks=4`` runs the block as a script of its own on four ranks, and
``fragment`` says that it is only to be read.

In blocks fenced as ``sh``, lines that start with ``taciturn`` are parsed by the command line: the
command, its options, and the methods that are named.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from ranks import run_script
from taciturn.cli import app
from taciturn.methods import parse_list

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    if page.exists()
]


class Block(NamedTuple):
    """A fenced block: the page, its first line's number, the words after the fence, the text."""

    page: Path
    line: int
    words: tuple[str, ...]
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start(2)].count("\n") + 1, tuple(match[1].split()), match[2])
        for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```\s*$", text, re.M | re.S)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
SCRIPTS = [block for block in BLOCKS if block.words[:1] == ("python",) and len(block.words) > 1]
COMMANDS = [
    pytest.param(line, id=f"{block.page.name}:{block.line}")
    for block in BLOCKS
    if block.words[:1] == ("sh",)
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    if line.startswith("taciturn ")
]

# Compiles each block where it stands in its page, so that a traceback shows the page's line.
RUNNER = """
import json, sys
space = {"__name__": "__main__"}
for page, line, text in json.loads(sys.argv[1]):
    exec(compile("\\n" * (line - 1) + text, page, "exec"), space)
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run from top to bottom, without a warning."""
    parts = [
        (str(block.page), block.line, block.text)
        for block in blocks(page)
        if block.words == ("python",)
    ]
    command = [sys.executable, "-W", "error", "-c", RUNNER, json.dumps(parts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block.page.name}:{block.line}")
def test_scripts_run_on_ranks(block: Block, tmp_path: Path) -> None:
    """A block with ``ranks=N`` runs on N ranks; any other word but ``fragment`` is a mistake."""
    (word,) = block.words[1:]
    if word == "fragment":
        compile(block.text, str(block.page), "exec")
        return
    match = re.fullmatch(r"ranks=(\d+)", word)
    assert match, f"{block.page.name}:{block.line}: unknown word {word!r} after python"
    script = tmp_path / "script.py"
    script.write_text(block.text)
    ended = run_script(script, [], tmp_path, ranks=int(match[1]), timeout_s=90)
    assert [rank.status for rank in ended] == [0] * len(ended), [rank.err for rank in ended]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str) -> None:
    """A command that is shown has these options, and its methods parse."""
    words = shlex.split(line, comments=True)[1:]
    group: Any = typer.main.get_command(app)
    context = group.make_context("taciturn", list(words), resilient_parsing=True)
    name, command, rest = group.resolve_command(context, list(words))
    parsed = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
    if parsed.params.get("methods"):
        assert parse_list(parsed.params["methods"])


def test_blocks_are_found(tmp_path: Path) -> None:
    """The reader of fences finds words, text and line numbers."""
    page = tmp_path / "page.md"
    page.write_text("a\n\n```python ranks=2\nx = 1\ny = 2\n```\nb\n```\nplain\n```\n")
    assert blocks(page) == [
        Block(page, 4, ("python", "ranks=2"), "x = 1\ny = 2\n"),
        Block(page, 9, (), "plain\n"),
    ]


def test_a_failing_block_names_its_line(tmp_path: Path) -> None:
    """An error in a block shows the page and the line in it."""
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\nassert x == 2\n```\n")
    parts = [(str(block.page), block.line, block.text) for block in blocks(page)]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(parts)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f'"{page}", line 5' in done.stderr


def test_tables_are_those_of_the_committed_results() -> None:
    """What stands between marks in the docs is what ``benchmarks/doc_tables.py`` makes of files."""
    script = ROOT / "benchmarks" / "doc_tables.py"
    if not script.exists():
        pytest.skip("the benchmarks are not part of this source distribution")
    code = (
        "import doc_tables, pathlib, sys\n"
        "for page in sys.argv[1:]:\n"
        "    text = pathlib.Path(page).read_text('utf-8')\n"
        "    assert doc_tables.renewed(text) == text, page\n"
        "    print(text.count('<!-- measured: '))\n"
    )
    pages = [str(page) for page in PAGES if ROOT / "docs" in page.parents]
    found = subprocess.run(
        [sys.executable, "-c", code, *pages],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    assert sum(map(int, found.stdout.split())) >= 4

"""Hooks of mkdocs: help pages as the commands print them, and links out of the folder of pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

HELP = re.compile(r"^<!-- help: (.*?) -->$", re.MULTILINE)
WIDTH = "96"


@cache
def help_of(words: str) -> str:
    """What ``taciturn WORDS --help`` prints; as plain text."""
    done = subprocess.run(
        [sys.executable, "-m", "taciturn", *words.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": WIDTH, "TERM": "dumb", "NO_COLOR": "1"},
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for every page: fill in what it asks for."""
    return HELP.sub(lambda found: f"```text\n{help_of(found[1])}\n```", markdown)

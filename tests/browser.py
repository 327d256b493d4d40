"""Pages opened by a real browser, at any width, which tells how they came out."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
BROWSER = pytest.mark.skipif(not CHROMIUM, reason="no chromium here to open the page with")

# Tells the page around it how the page came out.
_PROBE = """
<script>
addEventListener("error", event => failures.push(String(event.message)));
addEventListener("securitypolicyviolation", event => failures.push("loads " + event.blockedURI));
const failures = [];
for (const level of ["error", "warn"])
  console[level] = (...words) => failures.push(words.join(" "));
addEventListener("load", () => setTimeout(() => parent.postMessage(JSON.stringify({
  width: innerWidth,
  content: document.documentElement.scrollWidth,
  failures: failures,
  ...({ANSWERS}),
}), "*"), 500));
</script>
"""
_FRAME = """<!doctype html><title>waiting</title>
<iframe src="page.html" style="border: 0; width: {width}px; height: 4000px"></iframe>
<script>addEventListener("message", event => document.title = "came:" + btoa(event.data));</script>
"""


def open_page(page: str, folder: Path, width: int, answers: str) -> dict[str, Any]:
    """How the page came out in a browser of that width: a frame has no least width.

    Args:
        page: its text.
        folder: for files of this test.
        width: in pixels.
        answers: a JavaScript object whose values are told, beside ``width``, ``content`` (the width
            that the content needs) and ``failures`` (errors, warnings and refused loads).
    """
    probe = _PROBE.replace("{ANSWERS}", answers)
    (folder / "page.html").write_text(page.replace("<head>", "<head>" + probe, 1), "utf-8")
    (folder / "frame.html").write_text(_FRAME.format(width=width))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=20000",
        "--window-size=1400,4000",
        "--dump-dom",
        (folder / "frame.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    told = re.search(r"<title>came:([^<]*)</title>", done.stdout)
    assert told, (done.stdout[:2000], done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(base64.b64decode(told[1]).decode("latin-1"))
    return answer

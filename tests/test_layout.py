"""The shape of the package: who imports whom, what is exported, and what importing does."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import taciturn

ROOT = Path(__file__).resolve().parent.parent
FOUND = pkgutil.walk_packages(taciturn.__path__, "taciturn.")
MODULES = sorted({"taciturn", *(f.name for f in FOUND if not f.name.endswith("__main__"))})
TORCH_FREE = [
    "taciturn",
    "taciturn.cli",
    "taciturn.collectives",
    "taciturn.collectives.codes.choice",
    "taciturn.collectives.codes",
    "taciturn.cost",
    "taciturn.errors",
    "taciturn.gpt",
    "taciturn.grammar",
    "taciturn.link",
    "taciturn.methods",
    "taciturn.plan",
    "taciturn.testbed",
    "taciturn.trace",
    "taciturn.units",
]
STATE = """
import logging, os, random, threading, warnings
import numpy, plotly.offline, rich.console, scipy.optimize, torch, torch.distributed

def state():
    return {{
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "random numbers": (random.getstate(), str(numpy.random.get_state()), torch.initial_seed()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "threads": threading.active_count(),
        "process group": torch.distributed.is_initialized(),
        "warnings": list(warnings.filters),
    }}

before = state()
import {modules}
after = state()
for name in before:
    assert before[name] == after[name], (name, before[name], after[name])
"""
EACH_MODULE = pytest.mark.parametrize("name", MODULES)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter of its own."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@cache
def tree(name: str) -> ast.Module:
    """A module's source, parsed."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return ast.parse(Path(found.origin).read_text(encoding="utf-8"))


def test_imports_point_one_way() -> None:
    """The contracts in pyproject.toml hold: layers, no circles, no torch where it is not needed."""
    # In a process of its own: it switches off all loggers that are there.
    config = str(ROOT / "pyproject.toml")
    done = python(
        "import sys; from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports(config_filename={config!r}, no_cache=True))"
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch(name: str) -> None:
    """These modules can be imported where torch is not installed."""
    done = python(f"import sys; sys.modules['torch'] = None; import {name}")
    assert done.returncode == 0, done.stderr


def test_importing_changes_nothing() -> None:
    """Importing all of it leaves environment, logging, random numbers and threads alone."""
    done = python(STATE.format(modules=", ".join(MODULES)))
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


@EACH_MODULE
def test_exports_are_there(name: str) -> None:
    """Every module lists what it exports, nothing twice, and each name exists (ruff sorts them)."""
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None


@cache
def imported() -> list[tuple[str, str, str]]:
    """Who takes what from whom: (importing module, module, name), for our own modules."""
    return [
        (name, entry.module, alias.name)
        for name in MODULES
        for entry in ast.walk(tree(name))
        if isinstance(entry, ast.ImportFrom) and (entry.module or "") in MODULES
        for alias in entry.names
    ]


@EACH_MODULE
def test_exports_are_complete(name: str) -> None:
    """A function or class is exported, shared with a sibling module, or starts with ``_``."""
    defined = {
        entry.name
        for entry in tree(name).body
        if isinstance(entry, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not entry.name.startswith("_")
    }
    shared = {taken for _, module, taken in imported() if module == name}
    assert defined <= set(importlib.import_module(name).__all__) | shared


def test_only_exports_cross_packages() -> None:
    """What one package takes from a module of another is in that module's ``__all__``."""
    for importer, module, taken in imported():
        if (
            f"{module}.{taken}" in MODULES
            or importer.rpartition(".")[0] == module.rpartition(".")[0]
        ):
            continue
        assert not taken.startswith("_")
        within = importer.startswith(f"{module}.") or module.startswith(f"{importer}.")
        assert within or taken in importlib.import_module(module).__all__, (importer, module, taken)


@EACH_MODULE
def test_public_names_are_documented(name: str) -> None:
    """Each module has a docstring, and so has each public function, class, method and property."""
    module = importlib.import_module(name)
    assert module.__doc__
    for public in module.__all__:
        value = getattr(module, public)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        assert inspect.getdoc(value), public
        if not inspect.isclass(value) or not value.__module__.startswith("taciturn"):
            continue
        for member, found in vars(value).items():
            if member.startswith("_") or not (
                inspect.isfunction(found) or isinstance(found, property | classmethod)
            ):
                continue
            # A method of a contract is documented where the contract is.
            assert inspect.getdoc(getattr(value, member)), f"{public}.{member}"


def test_every_command_is_documented() -> None:
    """README or docs show each command of the command line."""
    import typer

    from taciturn.cli import app

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for command in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"taciturn {command}" in text, command


def test_versions_agree() -> None:
    """The installed package, pyproject.toml, CITATION.cff and the changelog tell one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert cited is not None
    assert project["version"] == version("taciturn") == cited[1]
    assert re.search(rf"^## \[?({re.escape(project['version'])}|Unreleased)\]?", changes, re.M)


def test_constraints_pin_what_the_project_asks_for() -> None:
    """Each requirement, extras included, has one exact version in constraints.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [*project["dependencies"], *(one for extra in extras for one in extra)]
    names = {re.split(r"[^A-Za-z0-9.-]", requirement)[0].lower() for requirement in asked}
    pins = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in "#"
    ]
    assert all(re.fullmatch(r"[a-z0-9_.-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = [pin.split("==")[0] for pin in pins]
    assert sorted(set(pinned)) == sorted(pinned)
    assert names - {"taciturn"} <= set(pinned)

"""Start the ranks, or be one of them; print what the probe found, and write its files.

Under torchrun :func:`probe` is one of the ranks and measures the cluster that it is part of;
otherwise it starts ranks of its own, on an emulated network where a rate was asked for and one can
be made, else on loopback, and says which.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from taciturn import methods, ranks
from taciturn.errors import InputError
from taciturn.files import check_file
from taciturn.link import Link
from taciturn.probe.calls import Shapes
from taciturn.probe.measure import METHODS, Job, measure
from taciturn.probe.table import render
from taciturn.ranges import check_number, check_whole
from taciturn.ranks import (
    check_torchrun,
    compile_loops,
    on_testbed,
    show_progress,
    tell,
    under_torchrun,
    world_size,
)
from taciturn.testbed import Description, Testbed
from taciturn.units import format_size

__all__ = ["ProbeConfig", "probe", "run_rank"]

DEFAULT_RANKS = 4
LEAST_SECONDS = 1.0
MOST_SECONDS = 3600.0
MOST_TIMEOUT_S = 86_400.0


@dataclass(frozen=True)
class ProbeConfig:
    """What to probe. Checked at construction, before anything is started.

    Attributes:
        ranks: how many to start, 4 if None; must be None under torchrun.
        rate: of every link in bits per second, or one per rank; None leaves loopback as it is. Must
            be None under torchrun.
        methods: whose speed is measured, a list in the grammar of :mod:`taciturn.methods`; empty
            for none.
        seconds: the budget: about how long to measure. Larger sizes and more repeats fit into more.
        seed: of the order in which things are measured.
        timeout_s: a rank that is silent for longer ends the probe with an error that names it.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL; under torchrun).
        out: file for the link; None for none.
        html: file for the page; None for none.
        groups: of a model; :class:`taciturn.probe.Job`.

    Raises:
        InputError, MethodError: something cannot be used.
    """

    ranks: int | None = None
    rate: int | Sequence[int | None] | None = None
    methods: str = "; ".join(METHODS)
    seconds: float = 60.0
    seed: int = 0
    timeout_s: float = 60.0
    device: str = "cpu"
    out: Path | None = None
    html: Path | None = None
    groups: tuple[Shapes, ...] = ()

    def __post_init__(self) -> None:
        check_number("--seconds", self.seconds, LEAST_SECONDS, MOST_SECONDS)
        check_number("--timeout", self.timeout_s, 0, MOST_TIMEOUT_S, above=True)
        check_whole("--seed", self.seed, 0)
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device {self.device!r} is unknown; use cpu or cuda")
        if under_torchrun():
            check_torchrun(self.ranks, self.rate, self.device)
        elif self.device == "cuda":
            raise InputError(
                "device 'cuda' needs one GPU per rank and a launcher: "
                "torchrun ... -m taciturn probe --device cuda"
            )
        else:
            Testbed(self.world_size, self.rate)  # checks both; makes nothing yet
        if self.world_size == 1:
            raise InputError("one rank has no link: probe with two at least")
        if self.out is not None and self.out == self.html:
            raise InputError(f"{self.out} cannot be both the link and the page; name two files")
        if os.environ.get("RANK", "0") == "0":  # which writes them, maybe on another machine
            for option, path in (("--out", self.out), ("--html", self.html)):
                if path is not None:
                    check_file(option, path)
        compile_loops(Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
        for method in self.method_texts:
            methods.aggregator(method)

    @property
    def world_size(self) -> int:
        """Number of ranks, whoever starts them."""
        return world_size(self.ranks, DEFAULT_RANKS)

    @property
    def method_texts(self) -> tuple[str, ...]:
        """The methods one by one, each once."""
        if not self.methods.strip():
            return ()
        return tuple(dict.fromkeys(method.text for method in methods.parse_list(self.methods)))

    def job(self, rate_bits_per_s: int | None) -> Job:
        """The job for the ranks, given what the links turned out to be."""
        return Job(
            seconds=self.seconds,
            methods=self.method_texts,
            seed=self.seed,
            timeout_s=self.timeout_s,
            device=self.device,
            rate_bits_per_s=rate_bits_per_s,
            groups=self.groups,
        )


def run_rank(folder: Path) -> int:
    """Be a rank that :func:`probe` has started: the exit status."""
    return ranks.run_rank(folder, lambda job, report: measure(Job.from_dict(job), report))


def _on_testbed(config: ProbeConfig, console: Console) -> dict[str, Any]:
    """Start ranks of our own and collect rank 0's link."""

    def job(network: Description) -> dict[str, Any]:
        rates = set(network.up)
        (rate,) = rates if len(rates) == 1 else (None,)
        return config.job(rate).to_dict()

    values: dict[str, Any] = on_testbed(
        "taciturn.probe", config.world_size, config.rate, job, console
    )
    return values


def _in_place(config: ProbeConfig, console: Console) -> dict[str, Any]:
    """Be a rank of the cluster that torchrun started."""
    job = config.job(None)
    if int(os.environ["RANK"]) != 0:
        return measure(job)
    with show_progress(console, "waiting for the other ranks") as show:
        return measure(job, show)


def probe(config: ProbeConfig, out: Console | None = None, err: Console | None = None) -> Link:
    """Probe the link, print its table, write its files.

    Args:
        config: what to probe.
        out: where the table goes; stdout if None.
        err: where progress and remarks go; stderr if None.

    Raises:
        PeerError, MismatchError: a rank died, went silent or failed; the message names it.
        TestbedError: the ranks could not be run.
        InputError: no link can be told from what was measured; or, after the table, a file cannot
            be written in the end.
    """
    out = out or Console()
    err = err or Console(stderr=True)
    values = _in_place(config, err) if under_torchrun() else _on_testbed(config, err)
    link = Link.from_json(values)
    if os.environ.get("RANK", "0") == "0":
        out.print(render(link, out.width))
        _save(link, config, err)
    return link


def _save(link: Link, config: ProbeConfig, console: Console) -> None:
    if config.out is not None:
        link.write(config.out)
        tell(console, f"link: {config.out}")
    if config.html is not None:
        from taciturn.probe.page import html  # late: the ranks need no plotting library

        page = html(link)
        try:
            config.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {config.html}: {error.strerror}; the results are in the table"
            ) from error
        tell(console, f"page: {config.html} ({format_size(len(page.encode()))})")

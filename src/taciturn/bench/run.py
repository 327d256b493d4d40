"""Start the ranks, watch them, and hand on what they measured.

Under torchrun :func:`bench` is one of the ranks and measures in place; otherwise it makes ranks of
its own: on an emulated network where a rate was asked for and one can be made, else on loopback,
and says which.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from taciturn import methods, ranks
from taciturn.bench.columns import Row
from taciturn.bench.inputs import MAX_SEED, check_source, file_elems
from taciturn.bench.limits import (
    MAX_REPEATS,
    MAX_TIMEOUT_S,
    check_memory,
    memory_bytes,
)
from taciturn.bench.measure import ITEM_BYTES, Job, measure
from taciturn.bench.table import render
from taciturn.errors import InputError
from taciturn.files import check_file
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
from taciturn.testbed.launcher import MAX_RANKS
from taciturn.units import format_size

__all__ = ["BenchConfig", "bench", "run_rank"]

DEFAULT_SIZE_BYTES = 32 << 20
DEFAULT_RANKS = 8


@dataclass(frozen=True)
class BenchConfig:
    """What to bench. Checked at construction, before anything is started.

    Attributes:
        methods: a list in the grammar of :mod:`taciturn.methods`, separated by ``;``.
        sizes_bytes: buffer sizes in bytes, multiples of 4; empty for the size of the input file, or
            32 MiB. Small ones show latency, large ones bandwidth.
        ranks: how many to start, 8 if None; must be None under torchrun.
        rate_bits_per_s: of every link, both ways; None leaves loopback as it is. Must be None under
            torchrun.
        input: ``gradients``, ``random``, or a ``.pt`` or ``.npy`` file (``{rank}`` in its name is
            replaced by the rank; without, all ranks take the same file).
        repeats: timed calls per method and size, at least 1; more narrows the quartiles.
        warmups: rounds before them, kept apart; at least 1, since first calls open connections.
        seed: of inputs and order.
        timeout_s: a rank that is silent for longer ends the bench with an error that names it. A
            message on a slow link must fit in. It holds for each wait of a rank, so the error comes
            later: the rank that noticed asks the others, and all have time to report.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL; under torchrun).
        json: file for the rows; None for none.
        html: file for the page; None for none.
        command: the command line, kept with the results.

    Raises:
        InputError, MethodError, CodeError: something cannot be used.
    """

    methods: str
    sizes_bytes: tuple[int, ...] = ()
    ranks: int | None = None
    rate_bits_per_s: int | None = None
    input: str = "gradients"
    repeats: int = 5
    warmups: int = 1
    seed: int = 0
    timeout_s: float = 60.0
    device: str = "cpu"
    json: Path | None = None
    html: Path | None = None
    command: str = field(default_factory=lambda: " ".join(sys.argv), compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        if under_torchrun():
            check_torchrun(self.ranks, self.rate_bits_per_s, self.device)
        elif self.device == "cuda":
            raise InputError(
                "device 'cuda' needs one GPU per rank and a launcher: "
                "torchrun ... -m taciturn bench --device cuda"
            )
        self._check_files()
        check_source(self.input, self.world_size)
        self._check_methods()

    def _check_numbers(self) -> None:
        for option, value, least, most in (
            ("--ranks", self.ranks, 1, MAX_RANKS),
            ("--repeats", self.repeats, 1, MAX_REPEATS),
            ("--warmup", self.warmups, 1, MAX_REPEATS),
            ("--seed", self.seed, 0, MAX_SEED),
        ):
            if value is not None and not least <= value <= most:
                raise InputError(f"{option} {value}: give a whole number from {least} to {most}")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise InputError(
                f"--timeout {self.timeout_s:g}: give seconds above 0, up to {MAX_TIMEOUT_S:.0f}"
            )
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device {self.device!r} is unknown; use cpu or cuda")
        for size in self.sizes_bytes:
            if size < ITEM_BYTES or size % ITEM_BYTES:
                raise InputError(
                    f"a buffer of {size} bytes holds no whole number of float32; "
                    f"give a multiple of {ITEM_BYTES}"
                )
        if len(set(self.sizes_bytes)) < len(self.sizes_bytes):
            raise InputError(f"a size is given twice in {self.sizes_bytes}; give each once")
        if not under_torchrun():
            Testbed(self.world_size, self.rate_bits_per_s)  # checks both; makes nothing yet

    def _check_files(self) -> None:
        """Try the files now: nobody wants to hear of them when the bench is over."""
        if self.json is not None and self.json == self.html:
            raise InputError(
                f"{self.json} cannot be both the JSON and the HTML file; name two files"
            )
        if under_torchrun() and os.environ["RANK"] != "0":
            return  # rank 0 writes them, maybe on another machine
        for option, path in (("--json", self.json), ("--html", self.html)):
            if path is not None:
                check_file(option, path)

    def _check_methods(self) -> None:
        """Build every method and cost it at every size: what cannot be, fails here.

        Building compiles the loops that a method needs, so this is where a first start takes long.
        """
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else self.world_size
        sharing = 1 if self.device == "cuda" else here
        memory = memory_bytes(self.device)
        for size in self.sizes:
            check_memory(size, sharing, memory)
        asked_for = methods.parse_list(self.methods)
        compile_loops(Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
        for method in asked_for:
            try:
                with np.errstate(all="ignore"):
                    collective = methods.build(method)
                    for size in self.sizes:
                        cost = collective.cost(size // ITEM_BYTES, torch.float32, self.world_size)
                        work = 0 if cost is None else cost.workspace_bytes
                        check_memory(size, sharing, memory, method.text, work)
            except (MemoryError, ArithmeticError) as error:
                raise InputError(
                    f"{method.text!r} cannot be built here: {error}; give smaller numbers"
                ) from error

    @property
    def world_size(self) -> int:
        """Number of ranks, whoever starts them."""
        return world_size(self.ranks, DEFAULT_RANKS)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes with their default filled in."""
        if self.sizes_bytes:
            return self.sizes_bytes
        elems = file_elems(self.input)
        return (DEFAULT_SIZE_BYTES if elems is None else elems * ITEM_BYTES,)

    def job(self, link: str, rate_bits_per_s: int | None) -> Job:
        """The job for the ranks, given what the link turned out to be.

        The backend's fp32 all_reduce is put first if the list lacks it, since ratios need it.
        """
        asked = methods.parse_list(self.methods)
        plain = [
            i
            for i, m in enumerate(asked)
            if m.name == "backend"
            and m.options.get("wire", "fp32") == "fp32"
            and not m.options.get("check")
        ]
        texts = [m.text for m in asked]
        return Job(
            methods=tuple(texts if plain else ["backend", *texts]),
            reference=plain[0] if plain else 0,
            added=not plain,
            sizes_bytes=self.sizes,
            source=self.input,
            repeats=self.repeats,
            warmups=self.warmups,
            seed=self.seed,
            timeout_s=self.timeout_s,
            device=self.device,
            rate_bits_per_s=rate_bits_per_s,
            link=link,
            command=self.command,
        )


def run_rank(folder: Path) -> int:
    """Be a rank that :func:`bench` has started: the exit status."""
    return ranks.run_rank(folder, lambda job, report: measure(Job.from_dict(job), report))


def _on_testbed(config: BenchConfig, console: Console) -> list[Row]:
    """Start ranks of our own and collect rank 0's rows."""

    def job(network: Description) -> dict[str, Any]:
        rate = config.rate_bits_per_s if network.shaped else None
        return config.job(str(network), rate).to_dict()

    rows: list[Row] = on_testbed(
        "taciturn.bench", config.world_size, config.rate_bits_per_s, job, console
    )
    return rows


def _in_place(config: BenchConfig, console: Console) -> list[Row]:
    """Be a rank of the cluster that torchrun started."""
    job = config.job("as torchrun found it, not shaped by taciturn", None)
    if int(os.environ["RANK"]) != 0:
        return measure(job)
    with show_progress(console, "waiting for the other ranks") as show:
        return measure(job, show)


def _save(rows: list[Row], config: BenchConfig, console: Console) -> None:
    """Write the files that were asked for, the second even if the first cannot be written.

    Raises:
        InputError: one or both could not be written.
    """
    failures = []
    if config.json is not None:
        text = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        try:
            config.json.write_text(f"[\n{text}\n]\n")
            tell(console, f"rows: {config.json}")
        except OSError as error:
            failures.append(f"cannot write {config.json}: {error.strerror}")
    if config.html is not None:
        from taciturn.bench.report import html  # late: the ranks need no plotting library

        page = html(rows)
        try:
            config.html.write_text(page, encoding="utf-8")
            tell(console, f"page: {config.html} ({format_size(len(page.encode()))})")
        except OSError as error:
            failures.append(f"cannot write {config.html}: {error.strerror}")
    if failures:
        raise InputError(f"{'; '.join(failures)}; the results are in the table only")


def bench(config: BenchConfig, out: Console | None = None, err: Console | None = None) -> int:
    """Run the bench, print its table, write its files.

    Args:
        config: what to bench.
        out: where the table goes; stdout if None.
        err: where progress and remarks go; stderr if None.

    Returns:
        The exit status: 0, or 1 if the bytes counted are not those of a method's formula.

    Raises:
        PeerError, MismatchError: a rank died, went silent or failed; the message names it.
        TestbedError: the ranks could not be run.
        InputError: after the table, if a file cannot be written in the end.
    """
    out = out or Console()
    err = err or Console(stderr=True)
    rows = _in_place(config, err) if under_torchrun() else _on_testbed(config, err)
    if not rows:
        return 0  # a rank other than 0
    out.print(render(rows, out.width))
    _save(rows, config, err)
    return 1 if any(row["counts_equal_formula"] is False for row in rows) else 0

"""Start the ranks, watch them, and hand on what they measured.

Under torchrun :func:`bench` is one of the ranks and measures in place; otherwise it makes ranks of
its own: on an emulated network where a rate was asked for and one can be made, else on loopback,
and says which.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from taciturn import errors, methods
from taciturn.bench.columns import Row
from taciturn.bench.inputs import MAX_SEED, check_source, file_elems
from taciturn.bench.limits import (
    MAX_REPEATS,
    MAX_TIMEOUT_S,
    check_file,
    check_memory,
    memory_bytes,
)
from taciturn.bench.measure import ITEM_BYTES, Job, Progress, measure
from taciturn.bench.table import render
from taciturn.collectives import products
from taciturn.collectives.wires import kernels
from taciturn.errors import InputError, PeerError, TaciturnError, TestbedError
from taciturn.testbed import RunResult, Testbed, capability
from taciturn.testbed.launcher import MAX_RANKS
from taciturn.units import format_rate, format_seconds, format_size

__all__ = ["BenchConfig", "bench", "run_rank", "under_torchrun"]

DEFAULT_SIZE_BYTES = 32 << 20
DEFAULT_RANKS = 8
RUN_WITHIN_S = 86400.0  # the ranks' own time-outs end a run that hangs long before
GRACE_S = 6.0  # for the other ranks to say what they saw; they settle it within three seconds
LINE_EVERY_S = 15.0  # between lines of progress where there is no terminal
COMPILING_AFTER_S = 1.0  # loading compiled loops from the cache takes a third of that


def under_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already."""
    return "RANK" in environment and "WORLD_SIZE" in environment


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
            self._check_torchrun()
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

    def _check_torchrun(self) -> None:
        if self.ranks is not None or self.rate_bits_per_s is not None:
            raise InputError(
                f"under torchrun the {self.world_size} ranks and their links are there already; "
                "leave --ranks and --rate out"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device 'cuda' is not there: torch sees no GPU; use --device cpu")

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
        _compile(Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
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
        if under_torchrun():
            return int(os.environ["WORLD_SIZE"])
        return DEFAULT_RANKS if self.ranks is None else self.ranks

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


# ---------------------------------------------------------------------------------- in each rank


def run_rank(folder: Path) -> int:
    """Measure what ``folder/job.json`` asks for; leave rows, progress or the error in the folder.

    Returns:
        The exit status: 0, or 1 after an error.
    """
    rank = int(os.environ["RANK"])
    try:
        job = Job.from_dict(json.loads((folder / "job.json").read_text()))

        def report(progress: Progress) -> None:
            _write(folder / "progress.json", json.dumps(progress))

        rows = measure(job, report if rank == 0 else None)
        if rank == 0:
            _write(folder / "rows.json", json.dumps(rows, allow_nan=False))
    except TaciturnError as error:
        failure = {
            "kind": type(error).__name__,
            "text": str(error),
            "ranks": list(getattr(error, "ranks", ())),
            "round": getattr(error, "round", 0),
        }
        _write(folder / f"failure-{rank}.json", json.dumps(failure))
        print(f"taciturn: error: {error}", file=sys.stderr, flush=True)
        _leave()
    except Exception:
        traceback.print_exc()
        _leave()
    return 0


def _leave() -> None:
    """End at once: in an orderly exit gloo's threads might wait for ranks that are lost."""
    sys.stderr.flush()
    os._exit(1)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for whoever reads at the same time."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


# --------------------------------------------------------------------------------- in the launcher


def _tell(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _compile(console: Console) -> None:
    """Compile the loops once, before the ranks all do the same; says so if they are not cached."""
    told = threading.Timer(
        COMPILING_AFTER_S,
        _tell,
        (console, "compiling loops (first start only; it can take a minute)"),
    )
    told.daemon = True
    told.start()
    try:
        with suppress(Exception):  # the ranks compile too, and report what goes wrong
            kernels.prepare()
            products.prepare()
    finally:
        told.cancel()


@contextmanager
def _progress(console: Console, start: str) -> Iterator[Callable[[Progress], None]]:
    """A bar where there is a terminal, now and then a line where there is none."""
    if not console.is_terminal:
        last, told = time.monotonic(), ""

        def line(progress: Progress) -> None:
            nonlocal last, told
            if time.monotonic() - last >= LINE_EVERY_S and progress.label != told:
                last, told = time.monotonic(), progress.label
                left = format_seconds(round(progress.remaining_s) or 1)
                _tell(
                    console,
                    f"{100 * progress.fraction:3.0f} %, about {left} left: {progress.label}",
                )

        yield line
        return
    columns = (
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(start, total=1.0, left="")

        def show(progress: Progress) -> None:
            left = f"about {format_seconds(round(progress.remaining_s) or 1)} left"
            bar.update(task, completed=progress.fraction, description=progress.label, left=left)

        yield show


def _failure(folder: Path, result: RunResult) -> TaciturnError:
    """The error to raise for a run that failed: what killed a rank, and what others say of it."""
    said = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("failure-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    ]
    first = result.first_failure
    if first is not None and first.returncode < 0:
        # What the others made of it is a guess; shown where it is the right one.
        texts = [failure["text"] for failure in said if failure["ranks"] == [first.rank]]
        others = f"; the others: {texts[0]}" if texts else ""
        return PeerError(f"{first} after {first.seconds:.1f} s{others}", [first.rank])
    if not said:
        tail = (first.stderr or "").strip() if first is not None else ""
        return TestbedError(f"{result}" + (f"\n{tail}" if "\n" in tail else ""))
    # One rank's own mistake explains the rest better than those who lost it.
    told = min(said, key=lambda failure: failure["kind"] == "PeerError")
    kind: type[TaciturnError] = getattr(errors, told["kind"], TaciturnError)
    if kind is PeerError:
        return PeerError(told["text"], told["ranks"], told["round"])
    return kind(told["text"])


def _on_testbed(config: BenchConfig, console: Console) -> list[Row]:
    """Start ranks of our own and collect rank 0's rows.

    However this ends, the ranks' folder goes with it, unless this process is killed by SIGKILL.
    """
    rate = config.rate_bits_per_s
    if rate is not None and not (able := capability()).shaped:
        _tell(
            console,
            f"The link is NOT shaped to {format_rate(rate)}, the ranks talk over loopback: "
            f"{able.reason}",
        )
        rate = None
    elif rate is None:
        _tell(console, "The ranks talk over loopback: the link is not shaped.")
    with (
        tempfile.TemporaryDirectory(prefix="taciturn-") as name,
        Testbed(config.world_size, rate, namespaces=rate is not None) as testbed,
        _progress(console, f"starting {config.world_size} ranks") as show,
    ):
        folder = Path(name)
        job = config.job(str(testbed.description), rate)
        (folder / "job.json").write_text(json.dumps(job.to_dict()))
        command = [sys.executable, "-P", "-m", "taciturn.bench", name]
        running = testbed.start(command, timeout_s=RUN_WITHIN_S, grace_s=GRACE_S, output="capture")
        while not running.done:
            time.sleep(0.1)
            with suppress(FileNotFoundError):  # the ranks are still starting
                show(Progress(*json.loads((folder / "progress.json").read_text())))
        result = running.wait()
        if not result.ok:
            raise _failure(folder, result)
        rows: list[Row] = json.loads((folder / "rows.json").read_text())
    return rows


def _in_place(config: BenchConfig, console: Console) -> list[Row]:
    """Be a rank of the cluster that torchrun started."""
    job = config.job("as torchrun found it, not shaped by taciturn", None)
    if int(os.environ["RANK"]) != 0:
        return measure(job)
    with _progress(console, "waiting for the other ranks") as show:
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
            _tell(console, f"rows: {config.json}")
        except OSError as error:
            failures.append(f"cannot write {config.json}: {error.strerror}")
    if config.html is not None:
        from taciturn.bench.report import html  # late: the ranks need no plotting library

        page = html(rows)
        try:
            config.html.write_text(page, encoding="utf-8")
            _tell(console, f"page: {config.html} ({format_size(len(page.encode()))})")
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

"""The command line: one thin function per command.

Each command imports what it needs when it runs, so that ``--help`` and ``methods`` answer at once,
without torch. Errors that Taciturn raises on purpose become ``taciturn: error: MESSAGE`` on stderr
and an exit status, without a traceback: 2 if the input was wrong, 1 if the run failed. A rank of a
larger group says which one it is. SIGTERM and SIGHUP end a command as Ctrl-C does, with its ranks
and their folder, and a status of 128 plus the signal's number; after SIGKILL the ranks end too, but
a folder of the bench stays in the temporary directory.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from taciturn.ending import end_rank
from taciturn.errors import CodeError, InputError, MethodError, TaciturnError

__all__ = ["main"]

METHODS = "backend; ring; coded:passes=4; coded:passes=16,code=fourier; quantized:bits=8"
"""What is benched if nothing is said."""

app = typer.Typer(
    help="Training that talks less, and proof that it helped.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: what follows the program's name; by default this process's own.
    """
    rank = os.environ.get("RANK")
    try:
        app(arguments, prog_name="taciturn")
    except TaciturnError as error:
        who = "" if rank is None else f"rank {rank}: "
        print(f"taciturn: error: {who}{error}", file=sys.stderr, flush=True)
        status = 2 if isinstance(error, MethodError | InputError | CodeError) else 1
    except SystemExit as end:  # what typer ends with, always
        if not (end.code is None or isinstance(end.code, int)):
            raise
        status = end.code or 0
    except Exception:
        if rank is None:
            raise
        traceback.print_exc()
        status = 1
    else:
        status = 0
    if rank is not None:
        end_rank(status)
    sys.exit(status)


@contextmanager
def _signals_clean_up() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit inside, so that what was started is ended and removed.

    One that the caller ignores (``nohup``) or handles is left alone. The first that comes is the
    last that is heard: another must not interrupt the cleaning up.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]

    def end(number: int, _: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"taciturn {version('taciturn')}")
        raise typer.Exit


@app.callback()
def _taciturn(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command("methods")
def _methods(
    json: Annotated[bool, typer.Option("--json", help="One JSON list instead of tables.")] = False,
) -> None:
    """List the methods, their keys, values and defaults.

    A method is written name:key=value,key=value. A list of methods has a ; between them.
    """
    from taciturn.methods import table

    if json:
        import orjson

        print(orjson.dumps(table(), option=orjson.OPT_INDENT_2).decode())
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    console.print(
        "A method is name:key=value,key=value; a list of methods has a ; between them:\n"
        "ring; coded:passes=16,code=fourier; quantized:bits=8"
    )
    for spec in table():
        console.print(Text.assemble("\n", (spec.name, "bold"), f"  {spec.summary}"))
        rows = Table("key", "values", "default", "meaning", box=None, pad_edge=False)
        rows.columns[0].no_wrap = True
        rows.columns[1].max_width = 24
        for key in spec.keys:
            rows.add_row(*map(Text, (key.name, key.values, key.default_words, key.meaning)))
        console.print(rows)


@app.command("bench")
def _bench(
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine; 8 if not given. Not under torchrun."),
    ] = None,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of every link, both ways: 200mbit, 1gbit, unshaped. Not under torchrun."
        ),
    ] = "unshaped",
    size: Annotated[
        str,
        typer.Option(
            help="Buffer sizes: 32MiB or 64KiB,1MiB,8MiB. By default that of the input file, "
            "or 32MiB.",
            show_default=False,
        ),
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Methods with ; between them; see taciturn methods.")
    ] = METHODS,
    input: Annotated[
        str,
        typer.Option(
            help="What to reduce: gradients (of a small GPT on real text), random, or a .pt or "
            ".npy file, in whose name {rank} stands for the rank."
        ),
    ] = "gradients",
    repeats: Annotated[int, typer.Option(help="Timed calls of each method and size.")] = 5,
    warmup: Annotated[int, typer.Option(help="Calls before them, kept apart.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a silent rank counts as lost, in each wait for it. The ranks "
            "then settle who it was and are ended, so the command ends 10 to 20 seconds later."
        ),
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of inputs and of the order of calls.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda (under torchrun).")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="File for the rows, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for one self-contained page.")] = None,
) -> None:
    """Time all-reduce methods side by side, and measure their bytes and errors.

    Starts its own ranks, on an emulated network if a rate is given and one can be made here, on
    loopback otherwise; it says which. Under torchrun it measures the cluster that it is part of.
    """
    from taciturn.bench import BenchConfig, bench
    from taciturn.ranks import under_torchrun
    from taciturn.units import parse_rate, parse_size

    config = BenchConfig(
        methods=methods,
        sizes_bytes=tuple(parse_size(one) for one in size.split(",")) if size else (),
        ranks=ranks,
        rate_bits_per_s=parse_rate(rate),
        input=input,
        repeats=repeats,
        warmups=warmup,
        seed=seed,
        timeout_s=timeout,
        device=device,
        json=json,
        html=html,
    )
    if under_torchrun():
        raise typer.Exit(bench(config))  # torchrun's SIGTERM must end a rank even inside gloo
    with _signals_clean_up():
        status = bench(config)
    raise typer.Exit(status)


@app.command("probe")
def _probe(
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine; 4 if not given. Not under torchrun."),
    ] = None,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of every link, both ways: 200mbit, unshaped; or one per rank: "
            "200mbit,200mbit,20mbit. Not under torchrun."
        ),
    ] = "unshaped",
    seconds: Annotated[
        float,
        typer.Option(help="Budget: about how long to measure. Larger sizes fit into more."),
    ] = 60.0,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods whose speed is measured, with ; between them; an empty text for none. "
            "By default those that taciturn plan compares.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model whose gradients methods are timed on, as for taciturn plan, where the "
            "budget allows it; what a transformer block has if not given."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank counts as lost.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the order in which things are measured.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda (under torchrun).")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="File for the link, for taciturn plan.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for one self-contained page.")] = None,
) -> None:
    """Measure a link: latency, bandwidth, contention, slow ranks, and what methods take on it.

    Starts its own ranks, on an emulated network if a rate is given and one can be made here, on
    loopback otherwise; it says which. Under torchrun it measures the cluster that it is part of.
    """
    from taciturn.probe import ProbeConfig, probe
    from taciturn.ranks import under_torchrun

    given = {} if methods is None else {"methods": methods}
    config = ProbeConfig(
        ranks=ranks,
        rate=_rates(rate),
        seconds=seconds,
        seed=seed,
        timeout_s=timeout,
        device=device,
        out=out,
        html=html,
        groups=() if model is None else _groups(model),
        **given,
    )
    if under_torchrun():
        probe(config)  # torchrun's SIGTERM must end a rank even inside gloo
        return
    with _signals_clean_up():
        probe(config)


def _groups(model: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Shapes of what a model exchanges at once."""
    from taciturn.plan import parse_model

    parsed = parse_model(model)
    if not parsed.shapes_known:
        raise InputError(
            f"--model {model}: methods are timed on tensors of a model's shapes, and these are "
            "only sizes; give a bundled one or module:callable"
        )
    return parsed.group_shapes()


def _rates(text: str) -> int | list[int | None] | None:
    """One rate, or one per rank."""
    from taciturn.units import parse_rate

    each = [parse_rate(one) for one in text.split(",")]
    return each if len(each) > 1 else each[0]


@app.command("testbed", context_settings={"allow_interspersed_args": False})
def _testbed(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What each rank runs, after a --.")
    ],
    ranks: Annotated[int, typer.Option(help="How many ranks.")] = 4,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of every link, both ways: 200mbit, unshaped; or one per rank: "
            "200mbit,200mbit,20mbit. Without it the ranks run on loopback.",
        ),
    ] = None,
    rate_down: Annotated[
        str | None, typer.Option(help="What a rank receives at, if not at --rate.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(help="From rank to rank, one way; needs netem.")] = 0,
    loss: Annotated[float, typer.Option(help="Share of packets lost; needs netem.")] = 0,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which the ranks are ended.")
    ] = 86400,
) -> None:
    """Run a command on every rank of an emulated cluster, with torchrun's variables set.

    Example: taciturn testbed --ranks 8 --rate 200mbit -- python train.py
    """
    from taciturn.testbed import run_command

    if not 0 < timeout < 1e9:
        raise InputError(f"--timeout {timeout:g}: give seconds above 0, below 1e9")
    with _signals_clean_up():
        status = run_command(
            ranks,
            None if rate is None else _rates(rate),
            command,
            local=rate is None and rate_down is None,
            rate_down="same" if rate_down is None else _rates(rate_down),
            delay_s=delay_ms / 1e3,
            loss=loss,
            timeout_s=timeout,
        )
    raise typer.Exit(status)


@app.command("plan")
def _plan(
    link: Annotated[Path, typer.Option(help="What taciturn probe --out wrote.")],
    model: Annotated[
        str,
        typer.Option(
            help="What is exchanged: gpt-05m, gpt-5m, gpt-50m, gpt-500m; sizes of buckets in the "
            "order of backward, as 25MiB,25MiB,3MiB; or module:callable, which returns a module."
        ),
    ],
    step_compute: Annotated[
        str | None,
        typer.Option(
            help="Seconds of a step without any exchange, all ranks at work: 180ms. From --trace "
            "if not given."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Folder with torch.profiler's files of a DDP run: when which gradients are there."
        ),
    ] = None,
    backward_share: Annotated[
        float | None,
        typer.Option(help="Share of the compute that backward is; 0.6 if not given."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to plan for; those of the probe if not given, else extrapolated."),
    ] = None,
    quality: Annotated[
        str,
        typer.Option(
            help="What must be right: every-replica; mean (over replicas, which may differ); loss "
            "(a step may leave out much, and add it later, if the loss was measured to end within "
            "1 %); any."
        ),
    ] = "every-replica",
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to weigh beside DDP's own, with ; between them."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of the table.")
    ] = False,
) -> None:
    """Predict the step time of each method on a probed link, and say which to take, or none.

    Example: taciturn plan --link link.json --model gpt-5m --step-compute 300ms
    """
    from taciturn.link import Link
    from taciturn.plan import Compute, make_plan, parse_model, read_timing
    from taciturn.plan.timing import BACKWARD_SHARE
    from taciturn.units import parse_seconds

    if step_compute is None and trace is None:
        raise InputError(
            "--step-compute or --trace is needed: how long a step takes without any exchange "
            "decides how much of an exchange is hidden"
        )
    if trace is not None and backward_share is not None:
        raise InputError("--backward-share beside --trace, which tells it: drop one of them")
    seconds = None if step_compute is None else parse_seconds(step_compute)
    if trace is not None:
        compute = read_timing(trace, seconds)
    else:
        assert seconds is not None
        compute = Compute(seconds, BACKWARD_SHARE if backward_share is None else backward_share)
    plan = make_plan(
        parse_model(model),
        Link.read(link),
        compute,
        ranks=ranks,
        quality=quality,
        methods=methods,
    )
    if json:
        import orjson

        print(orjson.dumps(plan.to_json(), option=orjson.OPT_INDENT_2).decode())
        return

    from rich.console import Console

    from taciturn.plan.table import render

    Console(highlight=False, markup=False).print(render(plan))


@app.command("trace")
def _trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Trace files of torch.profiler, one per rank, or the folder they are in.",
        ),
    ],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="A change to predict, once for each: 'all_reduce bytes/2', 'all_reduce = 0', "
            "'bandwidth*4', 'latency/2', 'method=quantized:bits=8' (with --link or --codecs)."
        ),
    ] = None,
    link: Annotated[
        Path | None,
        typer.Option(
            help="Link file of taciturn probe, on the link of the trace: latency, bandwidth, and "
            "what methods cost, for --what-if."
        ),
    ] = None,
    codecs: Annotated[
        Path | None,
        typer.Option(
            help="JSON table of what methods cost, for --what-if method=...; before --link's."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Seconds of a collective that no byte causes; fitted if not given."),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Seconds per byte of it; fitted if not given.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=KIND for names of unknown kind, such as 'my_allreduce*=comm'."),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(help="Rank of each file, in their order, instead of what the files say."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse files that are cut or broken.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File for the report, as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="File for one self-contained page with a timeline.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="File, such as out.json.gz (without .gz: plain JSON), for all ranks on one clock "
            "with the critical path; opens in the Perfetto viewer."
        ),
    ] = None,
) -> None:
    """Say what training steps wait for, from the trace files of their ranks.

    Exits with 3 if something of the files could not be read; the report is of the rest.
    """
    import orjson
    from rich.console import Console

    from taciturn.trace import (
        AlphaBeta,
        analyse,
        parse_change,
        parse_kind,
        predict,
        read_codecs,
        read_probed,
    )
    from taciturn.trace.table import render

    changes = [parse_change(one) for one in what_if or ()]
    costs = read_codecs(codecs) if codecs is not None else {}
    line = None if alpha is None and beta is None else AlphaBeta(alpha, beta)
    about = {"--link": link, "--codecs": codecs, "--alpha": alpha, "--beta": beta}
    for option, value in about.items():
        if value is not None and not changes:
            raise InputError(f"{option} is about a change: say which, with --what-if")
    if link is not None and line is not None:
        raise InputError("--link has latency and bandwidth: leave --alpha and --beta out")
    _check_outputs(paths, {"--json": json, "--html": html, "--perfetto": perfetto})
    rules = [parse_kind(one) for one in kind or ()]
    analysis = analyse(paths, ranks=rank or (), rules=rules, strict=strict)
    report, refused = analysis.report, None
    try:
        probed = read_probed(link, analysis) if link is not None else None
        report = predict(
            analysis,
            changes,
            alpha_beta=probed.alpha_beta if probed is not None else line,
            codecs={**(probed.codecs if probed is not None else {}), **costs},
        )
    except InputError as error:  # of a change: the rest is there, and is written
        refused = error
    if json is not None:
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        _write("--json", json, orjson.dumps(report.to_json(), option=options))
    if html is not None:
        from taciturn.trace.page import html as page

        _write("--html", html, page(analysis, report).encode())
    if perfetto is not None:
        from taciturn.trace.perfetto import write_perfetto

        write_perfetto(analysis, perfetto)
    Console(highlight=False, markup=False).print(render(report))
    if refused is not None:
        raise refused
    if report.lost:
        raise typer.Exit(3)


@app.command("compare")
def _compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.toml | status | report | add-seeds [FOLDER]",
            help="An experiment to run; or what to do with a folder of one.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small comparison of its own, of some minutes.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the records; that of an experiment is gone on with."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Fresh seeds in all, for add-seeds or beside a file.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="File for the rows of the result, as JSON.")
    ] = None,
) -> None:
    """Compare methods with tuned DistributedDataParallel: time to the same quality.

    Tunes all alike, fixes the target before, runs fresh paired seeds, and says "not shown" unless
    it is. What is finished is kept: the same command goes on where it was stopped.

    Examples: taciturn compare experiment.toml --out folder; taciturn compare report folder
    """
    from rich.console import Console

    from taciturn.compare import run

    console, err = Console(highlight=False, markup=False), Console(stderr=True)
    first, *rest = words or [""]
    if first in ("status", "report", "add-seeds"):
        if quick or out is not None or len(rest) != 1:
            raise InputError(f"write taciturn compare {first} FOLDER, without --out and --quick")
        folder = Path(rest[0])
        if first == "status":
            run.status(folder, console)
        elif first == "report":
            run.report(folder, console, json)
        else:
            if seeds is None:
                raise InputError("add-seeds needs --seeds: how many there are to be in all")
            with _signals_clean_up():
                run.add_seeds(folder, seeds, console, err, json)
        return
    if bool(words) == quick or rest:
        asked = " ".join(words or ["nothing"]) + (" and --quick" if quick and words else "")
        raise InputError(
            f"give one experiment as a .toml file, or --quick, or status, report or add-seeds with "
            f"a folder; this is {asked}"
        )
    from dataclasses import replace

    from taciturn.compare.experiment import read_experiment

    experiment = run.QUICK if quick else read_experiment(Path(first))
    if seeds is not None:
        experiment = replace(experiment, seeds=seeds)
    folder = out or Path("quick" if quick else Path(first).stem)
    with _signals_clean_up():
        run.compare(experiment, folder, console, err, json)


def _check_outputs(inputs: list[Path], outputs: dict[str, Path | None]) -> None:
    """Refuse to write over what is read, or twice to one file."""
    within = [one for path in inputs if path.is_dir() for one in path.glob("*")]
    taken = {path.resolve(): "is read" for path in [*inputs, *within]}
    for option, path in outputs.items():
        if path is None:
            continue
        if path.resolve() in taken:
            raise InputError(f"{option} {path}: this file {taken[path.resolve()]}; name another")
        taken[path.resolve()] = f"is that of {option}"


def _write(option: str, path: Path, data: bytes) -> None:
    """Write what an option asked for; raises InputError where that is not possible."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(
            f"{option}: cannot write {path}: {error.strerror}; name a file in a folder that is "
            "there and in which you may write"
        ) from error

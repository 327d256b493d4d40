"""The command line: help, exit statuses, messages, and that commands pass on what was said."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import taciturn.bench
from taciturn import cli, errors, testbed
from taciturn.bench import BenchConfig
from taciturn.methods import parse_list, table


class Outcome(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]

COMMANDS = ["bench", "compare", "methods", "plan", "probe", "testbed", "trace"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``taciturn ARGUMENTS`` in this process, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "end_rank", sys.exit)  # this process goes on

    def run(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, printed.out, printed.err)

    return run


def options(command: str) -> dict[str, Any]:
    """A command's parameters by name."""
    group: Any = typer.main.get_command(cli.app)
    return {parameter.name: parameter for parameter in group.commands[command].params}


def test_commands_are_all_here() -> None:
    """The tests below run over every command there is."""
    group: Any = typer.main.get_command(cli.app)
    assert sorted(group.commands) == COMMANDS


def test_help_lists_the_commands(run: Run) -> None:
    """``taciturn --help`` names each command, and fits 80 columns."""
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for command in COMMANDS:
        assert f" {command} " in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(run: Run, command: str) -> None:
    """Each command's help names and explains every option, and fits 80 columns."""
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert f"Usage: taciturn {command}" in out
    for parameter in options(command).values():
        assert parameter.help
        for spelling in parameter.opts:
            assert spelling in out or parameter.param_type_name == "argument"


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    """``taciturn`` alone says what there is."""
    status, out, err = run()
    assert status in {0, 2}
    assert "Usage: taciturn" in out + err


def test_version(run: Run) -> None:
    """``--version`` prints the name and the version of the installed package."""
    from importlib.metadata import version

    assert run("--version") == (0, f"taciturn {version('taciturn')}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "--help"],
        ["plan", "--help"],
        ["testbed", "--help"],
        ["trace", "--help"],
        ["methods"],
        ["methods", "--json"],
    ],
    ids=" ".join,
)
def test_help_and_methods_answer_without_torch(arguments: list[str]) -> None:
    """Nobody waits for torch to read a help page or the list of methods."""
    code = (
        "import sys, runpy; sys.argv[1:] = sys.argv[2:]\n"
        "try: runpy.run_module('taciturn', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_methods_prints_the_whole_table(run: Run) -> None:
    """Each method, key, choice and default is in the printed table, within 80 columns."""
    status, out, _ = run("methods")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    for spec in table():
        part = out[out.index(f"\n{spec.name}  ") + 1 :].split("\n\n")[0]
        for key in spec.keys:
            assert f"\n{key.name} " in part
            assert key.default_words in part
            for choice in key.choices:
                assert str(choice) in part


def test_methods_prints_the_whole_table_as_json(run: Run) -> None:
    """``--json`` is the table itself: names, types, defaults, choices and bounds."""
    status, out, _ = run("methods", "--json")
    assert status == 0
    expected = json.loads(json.dumps([dataclasses.asdict(spec) for spec in table()]))
    assert json.loads(out) == expected


class Recorder:
    """Stands in for the function behind a command: keeps its arguments, raises or returns."""

    def __init__(self, result: int | Exception) -> None:
        self.result = result
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> int:
        self.calls.append((arguments, keywords))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.MethodError, 2),
        (errors.InputError, 2),
        (errors.CodeError, 2),
        (errors.MismatchError, 1),
        (errors.PeerError, 1),
        (errors.TestbedError, 1),
        (errors.TaciturnError, 1),
    ],
)
def test_errors_become_one_line_and_a_status(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[errors.TaciturnError],
    status: int,
) -> None:
    """Wrong input exits with 2 and a failed run with 1, each with its message and no traceback."""
    monkeypatch.setattr(taciturn.bench, "bench", Recorder(kind("this [bold]went[/bold] wrong")))
    assert run("bench") == (status, "", "taciturn: error: this [bold]went[/bold] wrong\n")


def test_every_error_has_a_status() -> None:
    """The statuses above cover the whole tree of errors."""
    tested = {
        parameter[0]
        for mark in test_errors_become_one_line_and_a_status.pytestmark  # type: ignore[attr-defined]
        for parameter in mark.args[1]
    }
    named = [getattr(errors, name) for name in errors.__all__]
    assert tested == {error for error in named if isinstance(error, type)}


def test_a_rank_says_which_one_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, where all ranks write to one terminal, an error starts with the rank."""
    monkeypatch.setattr(taciturn.bench, "bench", Recorder(errors.MismatchError("we differ")))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run("bench") == (1, "", "taciturn: error: rank 3: we differ\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --methods qantized:bits=8", "at position 1; did you mean 'quantized'?"),
        ("bench --methods ring;coded:pases=4", "position 7 of method 2; did you mean 'passes'?"),
        ("bench --methods coded:eps=0.1,code=fourier", "eps"),
        ("bench --rate 200", "'200'"),
        ("bench --rate fast", "'fast'"),
        ("bench --rate -5mbit", "'-5mbit'"),
        ("bench --size 3MiBB", "'3MiBB'"),
        ("bench --size 1MiB,,2MiB", "''"),
        ("bench --size 3", "multiple of 4"),
        ("bench --repeats 0", "--repeats 0"),
        ("bench --warmup -1", "--warmup -1"),
        ("bench --ranks 0", "--ranks 0"),
        ("bench --seed 99999999999999999999999", "--seed 99999999999999999999999"),
        ("bench --size 99TiB --input random", "99 TiB"),
        ("bench --html /proc/page.html", "--html: cannot write /proc/page.html"),
        ("bench --timeout nan", "--timeout nan"),
        ("testbed --timeout 0 -- true", "--timeout 0"),
        ("testbed --timeout 1e300 -- true", "--timeout 1e+300"),
        ("bench --device tpu", "'tpu'"),
        ("bench --input nowhere.pt", "nowhere.pt"),
        ("bench --json /nowhere/rows.json", "/nowhere/rows.json"),
        ("testbed --rate bogus -- true", "'bogus'"),
        ("testbed --rate 1mbit,2mbit --ranks 3 -- true", "2 rates for 3 ranks"),
        ("testbed --ranks 0 -- true", "0 ranks"),
        ("testbed -- no-such-program-anywhere", "no-such-program-anywhere"),
        ("trace nowhere.json", "there is no file nowhere.json"),
        ("trace nowhere.json --what-if faster", "'faster'"),
        ("trace nowhere.json --kind gemm", "'gemm'"),
        ("trace nowhere.json --alpha -1", "alpha_s is -1.0"),
        ("trace nowhere.json --codecs nothing.json", "cannot read codecs from nothing.json"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: str, says: str) -> None:
    """Whatever cannot be used is refused with its value and status 2, before anything runs."""
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert "taciturn: error: " in err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bogus", "bogus"),
        ("bench --rnks 3", "--ranks"),
        ("bench --ranks many", "--ranks"),
        ("testbed", "COMMAND"),
        ("trace", "PATH"),
        ("methods extra", "extra"),
    ],
)
def test_wrong_usage_is_named(run: Run, arguments: str, says: str) -> None:
    """An unknown command or option, or one without its value, exits with 2 and says which."""
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_bench_passes_everything_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each option of ``taciturn bench`` arrives in the BenchConfig, in its unit."""
    recorder = Recorder(0)
    monkeypatch.setattr(taciturn.bench, "bench", recorder)
    files = {"json": tmp_path / "rows.json", "html": tmp_path / "page.html"}
    said = {
        "--ranks": "3",
        "--rate": "20mbit",
        "--size": "64KiB,1MB",
        "--methods": "ring; coded:passes=2",
        "--input": "random",
        "--repeats": "7",
        "--warmup": "2",
        "--timeout": "9.5",
        "--seed": "11",
        "--device": "cpu",
        **{f"--{name}": str(path) for name, path in files.items()},
    }
    assert set(said) == {p.opts[0] for p in options("bench").values()} - {"--help"}
    assert run("bench", *(word for pair in said.items() for word in pair)).status == 0
    ((config,), keywords) = recorder.calls.pop()
    assert not keywords
    assert config == BenchConfig(
        methods="ring; coded:passes=2",
        sizes_bytes=(65536, 1000000),
        ranks=3,
        rate_bits_per_s=20_000_000,
        input="random",
        repeats=7,
        warmups=2,
        seed=11,
        timeout_s=9.5,
        device="cpu",
        **files,
    )


def test_bench_defaults_are_those_of_the_library(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """``taciturn bench`` without options is ``BenchConfig`` without arguments."""
    recorder = Recorder(0)
    monkeypatch.setattr(taciturn.bench, "bench", recorder)
    assert run("bench").status == 0
    ((config,), _) = recorder.calls.pop()
    assert config == BenchConfig(methods=cli.METHODS)
    assert parse_list(cli.METHODS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("command", "home", "name"),
    [("bench", taciturn.bench, "bench"), ("testbed -- true", testbed, "run_command")],
)
def test_a_signal_cleans_up_and_is_the_status(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    command: str,
    home: object,
    name: str,
) -> None:
    """SIGTERM and SIGHUP leave through every ``with``, as Ctrl-C does; a second is not heard."""
    folder = tmp_path / "folder"

    def working(*_: object, **__: object) -> int:
        folder.mkdir()
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), number)
            folder.rmdir()
        return 0

    monkeypatch.setattr(home, name, working)
    before = signal.getsignal(number)
    assert run(*command.split()) == (128 + number, "", "")
    assert not folder.exists()
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    """``nohup`` keeps its meaning."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli._signals_clean_up():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_bench_status_is_the_bench_s(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench whose counted bytes are not its formulas' ends with its own status."""
    monkeypatch.setattr(taciturn.bench, "bench", Recorder(1))
    assert run("bench") == (1, "", "")


@pytest.mark.parametrize(
    ("arguments", "rate", "expected"),
    [
        ("-- python a.py --rate 3", None, {"local": True, "rate_down": "same"}),
        ("--rate 200mbit -- python a.py --rate 3", 200_000_000, {"local": False}),
        ("--rate 200mbit python a.py --rate 3", 200_000_000, {"local": False}),
        ("--rate unshaped -- python a.py --rate 3", None, {"local": False}),
        (
            "--rate 1mbit,2mbit,unshaped,3mbit --rate-down 4mbit -- python a.py --rate 3",
            [1_000_000, 2_000_000, None, 3_000_000],
            {"local": False, "rate_down": 4_000_000},
        ),
        (
            "--rate 1mbit --delay-ms 20 --loss 0.01 --timeout 5 -- python a.py --rate 3",
            1_000_000,
            {"delay_s": 0.02, "loss": 0.01, "timeout_s": 5.0},
        ),
    ],
)
def test_testbed_passes_everything_on(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    rate: object,
    expected: dict[str, object],
) -> None:
    """Options before the command are the testbed's, all after it are the command's own."""
    recorder = Recorder(7)
    monkeypatch.setattr(testbed, "run_command", recorder)
    assert run("testbed", "--ranks", "4", *arguments.split()).status == 7
    ((given, keywords),) = recorder.calls
    assert given == (4, rate, ["python", "a.py", "--rate", "3"])
    assert {name: keywords[name] for name in expected} == expected


@pytest.mark.processes
def test_testbed_ends_with_the_first_failure_s_status(run: Run) -> None:
    """A rank's exit status is the command's, and the rank is named on stderr."""
    script = "import os, sys; sys.exit(5 if os.environ['RANK'] == '1' else 0)"
    status, _, err = run("testbed", "--ranks", "2", "--", sys.executable, "-c", script)
    assert status == 5
    assert "rank 1" in err


@pytest.mark.processes
def test_under_torchrun_errors_are_the_same() -> None:
    """Each rank of a torchrun names itself and the mistake, and prints no traceback of ours."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "taciturn", "bench", "--methods", "rong"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "taciturn: error:" in line]
    assert lines  # torchrun may end the second rank before it has said it too
    for line in lines:
        assert "taciturn: error: rank " in line
        assert "unknown method 'rong', at position 1; did you mean 'ring'?" in line
    assert "taciturn/cli.py" not in done.stderr

"""Tests of taciturn.testbed: real namespaces, real processes, nothing left behind."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import taciturn
from taciturn.errors import InputError, TestbedError
from taciturn.testbed import (
    EXITED_KEY,
    TCP_GOODPUT,
    RunResult,
    Testbed,
    capability,
    interface_counters,
    run_command,
    run_local,
)
from taciturn.testbed.launcher import RunOptions

pytestmark = pytest.mark.processes

NOBODY = 65534
SOURCE = Path(taciturn.__file__).resolve().parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@pytest.fixture
def shaped() -> None:
    """Skip where no namespace can be had."""
    if not capability().shaped:
        pytest.skip(capability().reason)


@pytest.fixture
def unchanged() -> Iterator[None]:
    """The machine's interfaces, named namespaces and mounts are as before."""
    before = outside()
    yield
    assert outside() == before


@pytest.fixture
def marker() -> str:
    """A number of seconds to sleep that finds the sleeper again among the processes."""
    return f"3600.{time.monotonic_ns()}"


def outside() -> dict[str, Any]:
    """What the machine shows to those outside."""
    folders = [Path("/run/netns"), Path("/var/run/netns")]
    mounts = Path("/proc/self/mounts")
    return {
        "interfaces": socket.if_nameindex(),
        "names": [sorted(f.iterdir()) if f.is_dir() else None for f in folders],
        "mounts": mounts.read_text() if mounts.exists() else None,
    }


def processes(word: str) -> list[str]:
    """Command lines of the processes that have this argument."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-Ao", "args="], capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if word in line.split()]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(b" ".join(words).decode(errors="replace"))
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def sh(script: str) -> list[str]:
    """A command of the shell."""
    return ["sh", "-c", script]


def environment() -> dict[str, str]:
    """For an interpreter that has not our environment: where this package and pyroute2 are."""
    spec = find_spec("pyroute2")
    found = [str(Path(spec.origin).parents[1])] if spec is not None and spec.origin else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *found])}


def launch(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Run a launcher of its own, as a user's program would be."""
    return subprocess.Popen(
        [options.pop("interpreter", sys.executable), "-c", textwrap.dedent(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[str, str]:
    """What it wrote to stdout and stderr until it ended."""
    with process:
        try:
            return process.communicate(timeout=seconds)
        finally:
            process.kill()


# --- the network ---------------------------------------------------------------------------------

RING = """
import os, socket, sys, threading, time
rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 5000
host = lambda r: f"10.77.0.{r + 2}"
listening = socket.create_server((host(rank), port))
def send():
    while True:
        try:
            link = socket.create_connection((host((rank + 1) % size), port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    try:
        while True:
            link.sendall(bytes(1 << 18))
    except OSError:
        pass
threading.Thread(target=send, daemon=True).start()
link, _ = listening.accept()
link.recv_into(bytearray(1))
buffer, total, start = bytearray(1 << 18), 0, time.monotonic()
while time.monotonic() < start + 0.4:
    link.recv_into(buffer)
start = time.monotonic()
while time.monotonic() < start + 1.2:
    total += link.recv_into(buffer)
print(total * 8 / (time.monotonic() - start))
sys.stdout.flush()
time.sleep(0.5)
os._exit(0)
"""


def _received(testbed: Testbed) -> list[float]:
    """Bits per second that each rank of a ring of senders received over 1.2 s."""
    result = testbed.run(
        [sys.executable, "-S", "-c", RING], timeout_s=30, output="capture", store=False
    ).check()
    return [float(result[rank].stdout or "nan") for rank in range(testbed.ranks)]


def _check_rates(testbed: Testbed, limits: tuple[int, ...]) -> None:
    """No link is ever faster than its limit; each reaches half of it, in the best of some tries.

    A busy machine makes any link slower for a while, none faster; half tells every limit in these
    tests from any other.
    """
    best = [0.0] * testbed.ranks
    for _ in range(5):
        received = _received(testbed)
        for rank, limit in enumerate(limits):
            assert received[rank] < 1.02 * limit * TCP_GOODPUT, (rank, received)
        best = [max(pair) for pair in zip(best, received, strict=True)]
        if all(rate > 0.5 * limit for rate, limit in zip(best, limits, strict=True)):
            return
    pytest.fail(f"received {best} of {limits}")


@linux
def test_each_link_keeps_its_rate_in_both_directions(shaped: None, unchanged: None) -> None:
    """Of the set rate TCP gets TCP_GOODPUT; a straggler's link slows what it sends and receives."""
    fast, slow = 40_000_000, 10_000_000
    with Testbed(4, (fast, fast, slow, fast)) as testbed:
        _check_rates(testbed, (fast, fast, slow, slow))  # rank r receives from r - 1


@linux
def test_the_downlink_may_be_slower_than_the_uplink(shaped: None) -> None:
    """rate_down limits what a rank receives, whatever its peer may send."""
    with Testbed(2, 40_000_000, rate_down=(None, 10_000_000)) as testbed:
        assert "40 Mbit/s up and unshaped/10 Mbit/s down" in str(testbed.description)
        _check_rates(testbed, (40_000_000, 10_000_000))


COUNT = """
import os, socket
from taciturn.testbed import interface_counters
before = interface_counters()
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.2", 5000)) as listening:
        link, _ = listening.accept()
        while link.recv(1 << 16):
            pass
else:
    import time
    while True:
        try:
            link = socket.create_connection(("10.77.0.2", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    link.sendall(bytes(1000000))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
after = interface_counters()
print(after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes)
"""


@linux
def test_a_rank_counts_what_its_own_link_carries(shaped: None) -> None:
    """Inside a rank, interface_counters() sees the payload and headers, and no one else's."""
    with Testbed(2, 10**8) as testbed:
        result = testbed.run(
            [sys.executable, "-c", COUNT],
            timeout_s=30,
            output="capture",
            store=False,
            env={"PYTHONPATH": environment()["PYTHONPATH"]},
        ).check()
    (_, received), (sent, _) = (map(int, (one.stdout or "").split()) for one in result)
    assert 1_000_000 < sent < 1_000_000 / TCP_GOODPUT * 1.02
    assert abs(received - sent) < 1000


@linux
def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    """interface_counters() of a wrong name lists the right ones."""
    with pytest.raises(InputError, match=r"'nowhere0'.*lo"):
        interface_counters("nowhere0")
    assert interface_counters("lo").sent_bytes >= 0


@linux
def test_ranks_see_one_interface_each_and_each_other_by_name(shaped: None) -> None:
    """A rank has lo and its own eth0, without IPv6, and its peers' names resolve."""
    script = "ls /proc/self/net >/dev/null; tail -n +3 /proc/self/net/dev; getent hosts rank1"
    with Testbed(2, 10**8) as testbed:
        result = testbed.run(sh(script), timeout_s=20, output="capture", store=False).check()
    for one in result:
        lines = (one.stdout or "").splitlines()
        assert sorted(line.split(":")[0].strip() for line in lines[:2]) == ["eth0", "lo"]
        assert lines[2].split() == ["10.77.0.3", "rank1"]


@linux
def test_delay_needs_netem_and_its_absence_is_said(shaped: None, unchanged: None) -> None:
    """Without netem a delay is an error that names it; the description says so too."""
    if capability().delay:
        pytest.skip("this kernel has netem")
    with pytest.raises(TestbedError, match="no netem"), Testbed(2, 10**8, delay_s=0.01):
        pass
    with Testbed(1, 10**8) as testbed:
        assert "no netem" in str(testbed.description)


CONNECT = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.2", 5000)) as listening:
        time.sleep(2)
else:
    time.sleep(1)
    start = time.monotonic()
    socket.create_connection(("10.77.0.2", 5000)).close()
    print(time.monotonic() - start)
"""


@linux
def test_a_delay_holds_for_each_way(shaped: None) -> None:
    """With netem a connection takes the delay there and back."""
    if not capability().delay:
        pytest.skip("this kernel has no netem")
    with Testbed(2, 10**8, delay_s=0.05) as testbed:
        result = testbed.run(
            [sys.executable, "-S", "-c", CONNECT], timeout_s=20, output="capture", store=False
        )
    assert 0.1 <= float(result.check()[1].stdout or "nan") < 1.0


def test_the_description_is_plain_data(shaped: None) -> None:
    """What was made goes into a JSON record unchanged, and reads as a sentence."""
    with Testbed(3, (10**8, None, 10**7), rate_down=None) as testbed:
        described = testbed.description
    assert json.loads(json.dumps(described.as_dict()))["up"] == [10**8, None, 10**7]
    assert described.shaped
    assert described.congestion_control in ("cubic", "reno")
    assert "100 Mbit/s/unshaped/10 Mbit/s up and unshaped down" in str(described)


# --- running -------------------------------------------------------------------------------------


def run_in_both(namespaces: bool, ranks: int, command: list[str], **options: Any) -> RunResult:
    """In namespaces on fast links, or on loopback."""
    if not namespaces:
        return run_local(command, ranks=ranks, **options)
    if not capability().shaped:
        pytest.skip(capability().reason)
    with Testbed(ranks, 10**9) as testbed:
        return testbed.run(command, **options)


both = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "loopback"])


@both
def test_ranks_get_torchruns_variables(namespaces: bool) -> None:
    """Every variable that torchrun sets is there: one host per rank, or all on one host."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    result = run_in_both(
        namespaces,
        2,
        [sys.executable, "-S", "-c", show],
        timeout_s=20,
        output="capture",
        store=False,
        env={"OURS": "yes", "OMP_NUM_THREADS": "2", "RANK": "77"},
    ).check()
    for rank, one in enumerate(result):
        seen = json.loads(one.stdout or "")
        expected = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0 if namespaces else rank,
            "LOCAL_WORLD_SIZE": 1 if namespaces else 2,
            "GROUP_RANK": rank if namespaces else 0,
            "MASTER_ADDR": "10.77.0.1" if namespaces else "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "OURS": "yes",
            "OMP_NUM_THREADS": 2,
        }
        assert {name: seen[name] for name in expected} == {k: str(v) for k, v in expected.items()}
        assert seen["GLOO_SOCKET_IFNAME"] == "eth0" if namespaces else seen["GLOO_SOCKET_IFNAME"]


REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(int(x))
if dist.get_rank() == 1:
    os._exit(3)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
print(store.get(sys.argv[1]).decode())
"""


@both
def test_the_store_outlives_a_rank_and_tells_how_it_ended(namespaces: bool) -> None:
    """Ranks meet over the store that the launcher holds, and a dead rank's status appears in it."""
    result = run_in_both(
        namespaces,
        2,
        [sys.executable, "-c", REDUCE, EXITED_KEY.format(rank=1)],
        timeout_s=60,
        output="capture",
        grace_s=20,
    )
    assert [(one.stdout or "").split() for one in result] == [["3", "3"], ["3"]]
    assert result.first_failure is result[1]
    assert result[0].returncode == 0
    assert "hostname" not in (result[0].stderr or "")


@both
def test_a_failing_rank_is_named_and_the_others_may_speak(namespaces: bool) -> None:
    """The others have the grace time to raise their own errors; the first failure is the result."""
    script = "[ $RANK = 1 ] && { echo broken >&2; exit 3; }; sleep 0.4; exit 7"
    result = run_in_both(
        namespaces, 3, sh(script), timeout_s=20, output="capture", store=False, grace_s=15
    )
    assert result.first_failure is result[1]
    assert [one.returncode for one in result] == [7, 3, 7]
    assert not any(one.stopped for one in result)
    assert (result.exit_code, result.ok, result.timed_out) == (3, False, False)
    with pytest.raises(TestbedError, match=r"rank 1 ended with status 3.*broken"):
        result.check()


@both
def test_after_the_grace_time_the_others_are_ended(namespaces: bool, marker: str) -> None:
    """SIGTERM first, and SIGKILL for the rank that ignores it, with all that it started."""
    script = (
        f"[ $RANK = 2 ] && exit 3; [ $RANK = 1 ] && trap '' TERM; sleep {marker} & wait; sleep 60"
    )
    result = run_in_both(
        namespaces,
        3,
        sh(script),
        timeout_s=60,
        output="capture",
        store=False,
        grace_s=0.3,
        stop_s=0.5,
    )
    assert result[0].stopped
    assert result[0].returncode == -signal.SIGTERM
    assert result[1].stopped
    assert result[1].returncode == -signal.SIGKILL
    assert result.first_failure is result[2]
    assert not processes(marker)


@both
def test_a_stopped_rank_ends_with_the_others(namespaces: bool, marker: str) -> None:
    """A rank under SIGSTOP takes SIGTERM like any other, and not SIGKILL after ``stop_s``."""
    script = f"[ $RANK = 1 ] && exit 3; kill -STOP $$; sleep {marker}"
    result = run_in_both(
        namespaces, 2, sh(script), timeout_s=60, store=False, grace_s=0.5, stop_s=20
    )
    assert result[0].returncode == -signal.SIGTERM
    assert not processes(marker)


@both
def test_a_killed_rank_is_named_and_nothing_is_left(
    namespaces: bool, marker: str, unchanged: None
) -> None:
    """SIGKILL of one rank: the result says so, 128 + 9 for the shell, and the others end."""
    if namespaces and not capability().shaped:
        pytest.skip(capability().reason)
    with Testbed(3, 10**8 if namespaces else None, namespaces=namespaces) as testbed:
        running = testbed.start(
            sh(f"sleep {marker}"), timeout_s=60, grace_s=0.2, store=False, output="capture"
        )
        assert wait_until(lambda: len(processes(marker)) >= 3)
        running.kill(1)
        result = running.wait()
        assert result.first_failure is result[1]
        assert result[1].returncode == -signal.SIGKILL
        assert result.exit_code == 137
        assert "rank 1 was killed by SIGKILL" in str(result)
        assert not processes(marker)
        # the testbed can be used again
        assert testbed.run(sh("exit 0"), timeout_s=20, store=False).ok


@both
def test_time_is_bounded(namespaces: bool, marker: str) -> None:
    """At the time-out all ranks are ended; that is a failure of none of them."""
    result = run_in_both(
        namespaces, 2, sh(f"[ $RANK = 0 ] || sleep {marker}"), timeout_s=0.5, store=False
    )
    assert result.timed_out
    assert result.first_failure is None
    assert (result.exit_code, result[0].returncode, result[1].stopped) == (124, 0, True)
    assert "ranks [1]" in str(result)
    assert not processes(marker)


@pytest.mark.parametrize("timeout_s", [30 * 86_400.0, 9.9e8])
def test_a_time_out_may_be_months_away(timeout_s: float) -> None:
    """As long as is accepted, it is waited for."""
    with Testbed(2, None, namespaces=False) as testbed:
        assert testbed.run(sh("exit 0"), timeout_s=timeout_s, store=False).ok


@linux
def test_what_a_rank_leaves_behind_ends_with_the_run(shaped: None, marker: str) -> None:
    """A background process, even in its own session, neither delays the run nor survives it."""
    start = time.monotonic()
    with Testbed(2, None) as testbed:
        testbed.run(sh(f"setsid sleep {marker} & exit 0"), timeout_s=60, store=False).check()
        assert not processes(marker)
    assert time.monotonic() - start < 30


@both
def test_output_is_relayed_line_by_line_with_the_rank(
    namespaces: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line has its rank in front, also the last one without an end."""
    run_in_both(
        namespaces, 2, sh("echo a; echo b >&2; printf 'r%s' $RANK"), timeout_s=20, store=False
    ).check()
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] a", "[0] r0", "[1] a", "[1] r1"]
    assert sorted(err.splitlines()) == ["[0] b", "[1] b"]


def test_output_can_be_plain_or_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Without prefix as it comes; captured, complete and undecorated."""
    run_local(sh("printf 'x\\ny'"), ranks=1, timeout_s=20, store=False, output="plain").check()
    assert capsys.readouterr().out == "x\ny"
    big = "i=0; while [ $i -lt 20000 ]; do echo 0123456789; i=$((i+1)); done"
    result = run_local(sh(big), ranks=1, timeout_s=60, store=False, output="capture").check()
    assert result[0].stdout == "0123456789\n" * 20000
    assert capsys.readouterr().out == ""


# --- what users do wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, None), {}, "0 ranks"),
        ((-1, None), {}, "-1 ranks"),
        ((2.0, None), {}, "2.0 ranks"),
        ((True, None), {}, "True ranks"),
        ((10**6, None), {}, "1000000 ranks"),
        ((2, 0), {}, "rate 0"),
        ((2, -5), {}, "rate -5"),
        ((2, 1e6), {}, "rate 1000000.0"),
        ((2, float("nan")), {}, "rate nan"),
        ((2, 10**13), {}, "rate 10000000000000"),
        ((3, (10**6, 10**6)), {}, "2 rates for 3 ranks"),
        ((2, [10**6, "fast"]), {}, "rate 'fast'"),
        ((2, None), {"rate_down": (10**6,)}, "1 rates for 2 ranks"),
        ((2, None), {"mtu": 100}, "MTU 100"),
        ((2, None), {"delay_s": -1.0}, "delay of -1.0"),
        ((2, None), {"loss": 1.5}, "loss of 1.5"),
        ((2, 10**6), {"namespaces": False}, "loopback cannot be shaped"),
    ],
)
def test_a_testbed_that_cannot_be_is_refused_at_once(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """A bad number is an InputError at construction that quotes it."""
    with pytest.raises(InputError, match=message):
        Testbed(*arguments, **options)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {}, "give a list"),
        ("ls -l", {}, "give a list"),
        (["no-such-program-here"], {}, "'no-such-program-here' is not found"),
        (["./no-such-file"], {}, "not found"),
        (["/"], {}, "cannot be executed"),
        (["sh"], {"timeout_s": 0.0}, "timeout_s=0.0"),
        (["sh"], {"timeout_s": float("nan")}, "timeout_s=nan"),
        (["sh"], {"grace_s": -1.0}, "grace_s=-1.0"),
        (["sh"], {"cwd": "/no/such/folder"}, "no such folder"),
        (["sh"], {"output": "loud"}, "output 'loud'"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_it_starts(
    command: Any, options: dict[str, Any], message: str
) -> None:
    """An InputError that says which part is wrong, and the testbed still works."""
    with Testbed(1, None, namespaces=False) as testbed:
        with pytest.raises(InputError, match=message):
            testbed.run(command, **{"timeout_s": 5.0, "store": False} | options)
        assert testbed.run(sh("exit 0"), timeout_s=20, store=False).ok


def test_a_file_that_is_no_program_fails_like_in_a_shell(tmp_path: Path) -> None:
    """What only the kernel can see, a broken executable, is a failed rank with a message."""
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELFnot")
    broken.chmod(0o755)
    result = run_local([str(broken)], ranks=2, timeout_s=20, store=False, output="capture")
    assert result.exit_code in (126, 127)
    assert "cannot start" in (result[0].stderr or "")


def test_a_testbed_is_used_open_and_by_one_command_at_a_time() -> None:
    """Closed or busy it says so."""
    testbed = Testbed(1, None, namespaces=False)
    with pytest.raises(TestbedError, match="not open"):
        testbed.run(sh("exit 0"), timeout_s=5)
    with pytest.raises(TestbedError, match="not open"):
        assert testbed.description
    with testbed:
        running = testbed.start(sh("sleep 60"), timeout_s=60, store=False)
        with pytest.raises(TestbedError, match="running a command"):
            testbed.run(sh("exit 0"), timeout_s=5)
        with pytest.raises(TestbedError, match="open already"):
            testbed.__enter__()
        with pytest.raises(InputError, match="no rank 1"):
            running.kill(1)
        running.stop()
        result = running.wait()
        assert result[0].stopped
        assert not result.ok


def test_the_options_of_run_are_those_of_start() -> None:
    """RunOptions lists exactly the keywords of Testbed.start."""
    keywords = set(inspect.signature(Testbed.start).parameters) - {"self", "command"}
    assert set(RunOptions.__annotations__) == keywords


def test_run_command_says_what_it_did(capfd: pytest.CaptureFixture[str]) -> None:
    """The shell gets the first failing rank's status; the network and the failure are told."""
    told: list[str] = []
    script = sh("echo out; exit $((RANK * 4))")
    code = run_command(2, None, script, local=True, store=False, say=told.append, timeout_s=20)
    assert code == 4
    assert "loopback; the link is not shaped" in told[0]
    assert "rank 1 ended with status 4" in told[1]
    assert run_command(2, None, sh("exit 0"), local=True, store=False, timeout_s=20) == 0
    assert "taciturn: 2 ranks on loopback" in capfd.readouterr().err


# --- cleaning up ---------------------------------------------------------------------------------

LAUNCHER = """
import sys
from taciturn.testbed import Testbed
shape = (10**8, True) if sys.argv[2] == "namespaces" else (None, False)
with Testbed(2, shape[0], namespaces=shape[1]) as testbed:
    testbed.run(["sh", "-c", "echo up; sleep " + sys.argv[1]], timeout_s=60, store=False)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@both
def test_nothing_survives_the_launcher(
    namespaces: bool, number: signal.Signals, marker: str, unchanged: None
) -> None:
    """Ctrl-C, SIGTERM or SIGKILL of the launcher: no process, no interface, no mount is left."""
    if namespaces and not capability().shaped:
        pytest.skip(capability().reason)
    process = launch(LAUNCHER, marker, "namespaces" if namespaces else "loopback")
    owner = str(process.pid)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("up\n")
    assert wait_until(lambda: len(processes(marker)) >= 3)  # the launcher and two sleepers
    assert processes(owner)
    process.send_signal(number)
    _, err = finish(process)
    assert process.returncode == -number
    assert number != signal.SIGINT or "KeyboardInterrupt" in err
    assert wait_until(lambda: not processes(marker) and not processes(owner))


def test_an_exception_ends_the_ranks(shaped: None, marker: str, unchanged: None) -> None:
    """Leaving the with block by an exception leaves nothing running."""

    def fail() -> None:
        with Testbed(2, 10**8) as testbed:
            testbed.start(sh(f"sleep {marker}"), timeout_s=60, store=False)
            assert wait_until(lambda: len(processes(marker)) >= 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not processes(marker)


@both
def test_the_owners_death_is_told(namespaces: bool, marker: str, unchanged: None) -> None:
    """SIGKILL of the process that owns the testbed is a TestbedError, and its ranks are gone."""
    if namespaces and not capability().shaped:
        pytest.skip(capability().reason)
    with Testbed(2, 10**8 if namespaces else None, namespaces=namespaces) as testbed:
        running = testbed.start(sh(f"exec sleep {marker}"), timeout_s=60, store=False)
        assert wait_until(lambda: len(processes(marker)) >= 2)
        owner = testbed._owner
        assert owner is not None
        owner.kill()
        with pytest.raises(TestbedError, match="owner ended"):
            running.wait()
        with pytest.raises(TestbedError, match="owner ended"):
            testbed.run(sh("exit 0"), timeout_s=5, store=False)
    assert wait_until(lambda: not processes(marker))


@linux
def test_the_stores_death_is_told(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    """Ranks that would wait for ever for a store that is gone are ended, with an error."""
    monkeypatch.setenv("TACITURN_TEST", marker)

    def holders() -> list[int]:
        """Process ids of the store's holder, known by the variable that only we have set."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = f"TACITURN_TEST={marker}".encode() in (folder / "environ").read_bytes()
                if ours and b"hold_store()" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    with Testbed(2, None, namespaces=False) as testbed:
        running = testbed.start(sh(f"exec sleep {marker}"), timeout_s=60, output="capture")
        assert wait_until(lambda: len(holders()) == 1)
        os.kill(holders()[0], signal.SIGKILL)
        with pytest.raises(TestbedError, match=r"holds the store ended with status -9"):
            running.wait()
    assert not processes(marker)


PIPED = """
import sys
from taciturn.testbed import run_local
run_local(["sh", "-c", "while :; do echo line; sleep 0.01; done", sys.argv[1]],
          ranks=1, timeout_s=60, store=False)
"""


def test_a_closed_pipe_ends_the_run(marker: str) -> None:
    """`taciturn testbed ... | head` ends when head does."""
    process = launch(PIPED, marker)
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] line\n"
    process.stdout.close()
    process.stdout = None
    _, err = finish(process)
    assert process.returncode == 1
    assert "BrokenPipeError" in err
    assert not processes(marker)


# --- other users ---------------------------------------------------------------------------------

SMALL = """
import os
from taciturn.testbed import Testbed, capability
print(os.getuid(), capability().shaped, capability().privileged, capability().reason)
with Testbed(2, 10**8) as testbed:
    result = testbed.run(["sh", "-c", "cat /proc/self/net/dev; id -u"], timeout_s=20,
                         output="capture", store=False).check()
print(all("eth0" in one.stdout for one in result))
"""


@linux
def test_an_ordinary_user_needs_no_rights(unchanged: None) -> None:
    """Without privileges it works through a user namespace, where the kernel allows those."""
    interpreter, user = sys.executable, {}
    if os.geteuid() == 0:
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        interpreter = readable_interpreter(user)
    process = launch(SMALL, interpreter=interpreter, cwd="/", **user)
    out, err = finish(process)
    if os.geteuid() == 0 and "False" in out.split()[1:2]:
        pytest.skip(f"no user namespaces for ordinary users here: {out}")
    assert (process.returncode, err) == (0, "")
    first, second = out.splitlines()
    assert first.split()[:3] == [str(user.get("user", os.getuid())), "True", "False"]
    assert second == "True"


def readable_interpreter(user: dict[str, Any]) -> str:
    """A Python of this version that the user may run and that finds this package."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (
        sys.executable,
        f"/usr/local/bin/python{version}",
        f"/usr/bin/python{version}",
    ):
        try:
            tried = subprocess.run(
                [candidate, "-c", "import taciturn.testbed, pyroute2"],
                env=environment(),
                cwd="/",
                capture_output=True,
                **user,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    pytest.skip(f"an ordinary user may read no Python {version} with this package here")


REFUSED = """
import ctypes, os, sys
from pathlib import Path
uid, gid = os.getuid(), os.getgid()
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:
    sys.exit(77)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
Path("/proc/sys/user/max_net_namespaces").write_text("0")
from taciturn.errors import TestbedError
from taciturn.testbed import Testbed, capability, run_local
able = capability()
assert not able.shaped and not able.delay, able
try:
    with Testbed(2, 10**8):
        pass
except TestbedError as error:
    assert str(error) == able.reason
    print(error)
assert run_local(["true"], ranks=2, timeout_s=20, store=False).ok
"""


@linux
def test_without_permission_the_reason_and_the_way_on_are_given(unchanged: None) -> None:
    """Where the kernel forbids namespaces the error says which switch; loopback works.

    For real: in a user namespace that may have no network namespaces.
    """
    process = launch(REFUSED)
    out, err = finish(process)
    if process.returncode == 77:
        pytest.skip("no user namespace to forbid network namespaces in")
    assert (process.returncode, err) == (0, "")
    assert "max_net_namespaces is 0" in out
    assert "run without --rate" in out


def test_another_system_is_told_to_use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no namespaces at all, capability() says so and how to go on."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TestbedError, match=r"darwin.*run without --rate"), Testbed(2, 10**8):
        pass

"""Fixtures that start processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

# Before NumPy is loaded, here and in what tests start (a plugin may have loaded it: hence also
# in the Makefile). Its threads gain nothing on matrices of a code's size, and where others want the
# cores they wait for each other ten times as long as they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from ranks import Ranks
from taciturn import cli
from taciturn.ranks import launch

torch.set_num_threads(1)
# What tests start has to end by these signals, also where the tests themselves run in the
# background: whoever starts them there has them ignored, and that is inherited.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
# The same examples in every run, and no clock: the machine may be busy.
settings.register_profile("taciturn", deadline=None, derandomize=True)
settings.load_profile("taciturn")


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool(_pools: dict[int, Ranks]) -> Ranks:
    """Four gloo ranks that live for the whole test run; started again if one was lost."""
    ranks = _pools.get(4)
    if ranks is None or not all(process.is_alive() for process in ranks.processes):
        if ranks is not None:
            ranks.close()
        ranks = _pools[4] = Ranks(4)
    return ranks


@pytest.fixture
def new_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Gloo ranks of this test alone, which may be killed."""
    made: list[Ranks] = []

    def make(size: int) -> Ranks:
        made.append(Ranks(size))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture(autouse=True)
def _silent_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """That loops are being compiled is told after a second: a busy machine must not decide it."""
    monkeypatch.setattr(launch, "COMPILING_AFTER_S", 86400.0)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``taciturn ARGUMENTS`` on a terminal of 80 columns: status, output, errors."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RANK", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run

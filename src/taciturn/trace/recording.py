"""Recording a few steps of a training loop, so that ``taciturn trace`` can read them.

This is the one module here that needs torch, and only when a recording begins.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tempfile
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from taciturn.errors import InputError

if TYPE_CHECKING:
    from torch.profiler import profile

__all__ = ["Recording", "record"]

_FILE = "rank{rank}.pt.trace.json.gz"
_OUR_FILE = re.compile(r"^rank(\d+)\.pt\.trace\.json\.gz$")
_STEP = "ProfilerStep#{number}"  # what torch.profiler calls its own steps
_HOW = "call its step() after every optimizer step: with record(folder) as recording: ..."


def record(
    folder: str | os.PathLike[str], steps: int = 3, skip: int = 3, *, shapes: bool = True
) -> Recording:
    """Profile some steps on every rank; each rank writes one file into ``folder``.

    ::

        with record("traces", steps=3) as recording:
            for batch in loader:
                ...  # forward, backward, optimizer
                recording.step()

    Call it on every rank, around a loop that takes equally many steps on all. The loop may go on
    for as long as it likes: after ``skip + steps`` steps the file is written and nothing more is
    recorded. If it ends before, or raises, what was recorded until then is written, and a step in
    its midst does not count as one.

    Operators and collectives of all threads on the CPU are recorded, with their sizes; with CUDA
    also kernels, launches, and which stream waits for which. The package's own phases show as
    ``taciturn::codec`` and ``taciturn::exchange``. Stacks and memory are not recorded: they slow
    the CPU.

    A recorded step takes longer than others: 2.5 us of CPU time for each event, measured on two
    gloo ranks (torch 2.13, CPU). A step of a small GPT with 1700 events took 42 ms of CPU time
    instead of 38, one of an MLP with 450 events 24.7 ms instead of 23.6. Writing a file of 10 such
    steps took a rank about a second, once, after the last of them. Compare the report's step time
    with that of the loop without a recording.

    Args:
        folder: made if it is not there. A rank's file is ``rank3.pt.trace.json.gz``.
        steps: to record, from 1.
        skip: steps before them, from 1: the first steps of a loop build buckets and connections.
            In the last of them the profiler runs already, as its own start takes time.
        shapes: record sizes of operators: without them gloo's collectives have no size.

    Raises:
        InputError: a number out of range. On entry: a folder that cannot be written to or holds
            such files already, or another profiler that runs. At the end: no step was recorded.
    """
    return Recording(Path(folder), steps, skip, shapes)


class Recording(AbstractContextManager["Recording"]):
    """A recording; made by :func:`record`, used once.

    Attributes:
        path: of this rank's file once it is written; None before.
    """

    def __init__(self, folder: Path, steps: int, skip: int, shapes: bool) -> None:
        for name, value in (("steps", steps), ("skip", skip)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r}: give a whole number from 1")
        self.path: Path | None = None
        self._folder, self._steps, self._skip, self._shapes = folder, steps, skip, shapes
        self._done = -1  # steps that have ended; -1 before the recording is entered
        self._left = False
        self._profile: profile | None = None
        self._range: Any = None

    def __enter__(self) -> Self:
        if self._done >= 0:
            raise InputError("this recording was used already: call record() again, and only once")
        self._rank, size = _place()
        _check(self._folder, self._rank, size)
        if _profiling():
            raise InputError("another profiler runs in this process: end it before recording")
        self._done = 0
        self._advance()
        return self

    def step(self) -> None:
        """Say that a step has ended.

        Raises:
            InputError: outside of the ``with`` block.
        """
        if self._done < 0 or self._left:
            raise InputError("step() outside of its with block records nothing: call it inside")
        self._done += 1
        self._advance()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        self._left = True
        if self._profile is None:
            if error is None and self.path is None:
                raise InputError(self._too_few())
            return
        recorded = self._done - self._skip
        self._end_range()
        if recorded < 1 and error is None:
            self._profile.stop()
            self._profile = None
            raise InputError(self._too_few())
        try:
            # Of a loop that raises in its first recorded step, that step is all there is.
            self._write(unfinished=_STEP.format(number=self._done) if recorded >= 1 else "")
            if error is None:
                warnings.warn(
                    f"the loop ended after {recorded} of the {self._steps} steps to record: the "
                    "file has only these",
                    stacklevel=2,
                )
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"and the recording of rank {self._rank} could not be written: {failed}")

    def _too_few(self) -> str:
        if not self._done:
            return f"the recording's step() was never called, so nothing was recorded; {_HOW}"
        return (
            f"the loop took {self._done} steps, and the recording skips {self._skip} of them: "
            "nothing was recorded; take more steps, or give a smaller skip"
        )

    def _advance(self) -> None:
        """Do what is due between two steps."""
        if self._done == self._skip - 1:
            self._start()
        recorded = self._done - self._skip
        if recorded > self._steps or recorded < 0:
            return
        self._end_range()
        if recorded == self._steps:
            self._write()
            return
        from torch.profiler import record_function

        self._range = record_function(_STEP.format(number=self._done))
        self._range.__enter__()

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profile = profile(
            activities=activities, record_shapes=self._shapes, experimental_config=_switches(cuda)
        )
        self._profile.start()
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            info = {"rank": self._rank, "world_size": 1, "pg_count": 0, "pg_config": []}
            self._profile.add_metadata_json("distributedInfo", orjson.dumps(info).decode())

    def _write(self, unfinished: str = "") -> None:
        """End the profile and write its file, in one piece or not at all.

        Args:
            unfinished: the range of a step that must not count as one.
        """
        assert self._profile is not None
        profile, self._profile = self._profile, None
        profile.stop()
        path = self._folder / _FILE.format(rank=self._rank)
        # Inside the folder, so that the last step is a rename; hidden from who reads the folder.
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".recording-") as inside:
            plain, packed = Path(inside, "trace.json"), Path(inside, "trace.gz")
            profile.export_chrome_trace(str(plain))
            if unfinished:
                _drop(plain, unfinished)
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
            packed.replace(path)
        self.path = path


def _place() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _profiling() -> bool:
    from torch.autograd import profiler

    return bool(getattr(profiler, "_is_profiler_enabled", False))


def _switches(cuda: bool) -> Any:
    """Switches that are not arguments of ``profile``; None where this torch lacks them.

    On the CPU all threads, as the exchange runs in one of its own. With CUDA, where its kernels
    are recorded anyway, the waits between streams instead.
    """
    from torch._C._profiler import _ExperimentalConfig

    try:
        return (
            _ExperimentalConfig(enable_cuda_sync_events=True)
            if cuda
            else _ExperimentalConfig(profile_all_threads=True)
        )
    except TypeError:
        return None


def _check(folder: Path, rank: int, size: int) -> None:
    """Refuse a folder into which the recording could not be written, before training begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot record into {folder}: {error.strerror}; name a folder that you may write to"
        ) from error
    for path in sorted(folder.iterdir()):
        found = _OUR_FILE.match(path.name)
        # Of ranks that this job has not, too: they would be read as part of it.
        if found and (int(found[1]) == rank or int(found[1]) >= size):
            raise InputError(
                f"{folder} holds a recording already ({path.name}): name another folder, or remove "
                "its files"
            )


def _drop(path: Path, name: str) -> None:
    """Take the range of that name out of a trace."""
    trace = orjson.loads(path.read_bytes())
    trace["traceEvents"] = [one for one in trace["traceEvents"] if one.get("name") != name]
    path.write_bytes(orjson.dumps(trace))

"""The launcher's view of one command that runs on all ranks: its output, its end."""

from __future__ import annotations

import codecs
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from taciturn.errors import InputError, TestbedError
from taciturn.testbed.results import RankResult, RunResult

__all__ = ["Output", "Running"]

Output = Literal["prefix", "plain", "capture", "inherit"]


class Running:
    """A command that runs on all ranks; made by ``Testbed.start``."""

    def __init__(
        self, control: socket.socket, ranks: int, output: Output, why: Callable[[], str]
    ) -> None:
        self._control = control
        self._output = output
        self._why = why
        self._size = ranks
        self._streams: list[_Stream] = []
        self._exits: dict[int, dict[str, Any]] = {}
        self._order: list[int] = []
        self._timed_out: bool | None = None
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._relay, name="taciturn-testbed", daemon=True)

    @property
    def done(self) -> bool:
        """All ranks have ended and their output is here."""
        return not self._thread.is_alive()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank and what it started; no effect if it has ended."""
        if not 0 <= rank < self._size:
            raise InputError(f"there is no rank {rank}; ranks are 0 to {self._size - 1}")
        self._send(do="kill", rank=rank, signal=int(number))

    def stop(self) -> None:
        """End the ranks: SIGTERM, then SIGKILL. Returns at once; ``wait`` waits."""
        self._send(do="stop")

    def wait(self) -> RunResult:
        """Wait for all ranks. Ctrl-C ends them first and is raised when nothing is left.

        Raises:
            TestbedError: the process that owns the testbed was killed.
        """
        try:
            self._thread.join()
        except BaseException:
            self.stop()
            self._thread.join()
            raise
        if self._error is not None:
            raise self._error
        results = tuple(self._result(rank) for rank in range(self._size))
        failed = [
            rank for rank in self._order if results[rank].returncode and not results[rank].stopped
        ]
        first = results[failed[0]] if failed else None
        return RunResult(results, first, bool(self._timed_out), self._seconds)

    def _result(self, rank: int) -> RankResult:
        ended = self._exits[rank]
        texts = {
            stream.name: stream.text
            for stream in self._streams
            if stream.rank == rank and stream.keep
        }
        return RankResult(rank, ended["status"], ended["seconds"], ended["stopped"], **texts)

    def begin(self, request: Mapping[str, object]) -> None:
        """Send the command, then for each rank the two descriptors that it writes to."""
        self._send(do="start", **request)
        for rank in range(self._size):
            ends: list[int] = []
            for name in ("stdout", "stderr"):
                if self._output == "inherit":
                    ends.append(os.dup(getattr(sys, f"__{name}__").fileno()))
                    continue
                reading, writing = os.pipe()
                ends.append(writing)
                prefix = f"[{rank}] " if self._output == "prefix" else ""
                self._streams.append(
                    _Stream(rank, name, reading, prefix, self._output == "capture")
                )
            try:
                line = json.dumps({"do": "rank", "rank": rank}).encode() + b"\n"
                socket.send_fds(self._control, [line], ends)
            finally:
                for end in ends:
                    os.close(end)
        self._thread.start()

    def _send(self, **request: object) -> None:
        try:
            self._control.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            if request["do"] == "start":
                raise TestbedError(f"the testbed's owner ended: {self._why()}") from None

    def join(self) -> None:
        """Wait without a look at how it ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _relay(self) -> None:
        """Thread: pass on what the ranks write, until they have ended."""
        try:
            self._relay_until_done()
        except BaseException as error:  # raised again by wait(), in the thread that asked
            self._error = self._error or error
        finally:
            self._seconds = time.monotonic() - self._began
            for stream in self._streams:
                stream.close()

    def _relay_until_done(self) -> None:
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for stream in self._streams:
                selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            while self._timed_out is None:
                for key, _ in selector.select():
                    if key.data is not None:
                        self._pump(selector, key.data)
                        continue
                    try:
                        data = self._control.recv(65536)
                    except ConnectionResetError:
                        data = b""
                    if not data:
                        raise TestbedError(f"the testbed's owner ended: {self._why()}")
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._note(json.loads(line))
            selector.unregister(self._control)
            # The writers are dead, so the pipes end; unless one hides in a session of its own.
            while selector.get_map() and (ready := selector.select(1.0)):
                for key, _ in ready:
                    self._pump(selector, key.data)

    def _pump(self, selector: selectors.BaseSelector, stream: _Stream) -> None:
        """Relay what is there. Where nobody reads our own output any more, the run is over."""
        try:
            if not stream.pump():
                selector.unregister(stream.descriptor)
        except (OSError, ValueError) as error:
            if self._error is None:
                self._error = error
                self.stop()
            for each in self._streams:
                each.muted = True

    def _note(self, message: dict[str, Any]) -> None:
        if message["event"] == "exit":
            self._exits[message["rank"]] = message
            self._order.append(message["rank"])
        elif message["event"] == "store_lost":
            self._error = TestbedError(
                f"the process that holds the store ended with status {message['status']}; "
                f"{self._why()}"
            )
        elif message["event"] == "done":
            self._timed_out = message["timed_out"]


@dataclass
class _Stream:
    """One pipe from a rank: relayed as it comes, whole lines where there is a prefix, or kept."""

    rank: int
    name: str  # "stdout" or "stderr"
    descriptor: int
    prefix: str
    keep: bool
    pieces: list[str] = field(default_factory=list)
    line: str = ""
    muted: bool = False
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def pump(self) -> bool:
        """Take what is there; False at the end."""
        data = os.read(self.descriptor, 65536)
        self._take(self.decoder.decode(data, final=not data))
        return bool(data)

    def close(self) -> None:
        """Pass on an unfinished line and give the descriptor back."""
        os.close(self.descriptor)
        if self.line:
            with suppress(OSError, ValueError):
                self._write(self.prefix + self.line + "\n")

    @property
    def text(self) -> str:
        """What was kept."""
        return "".join(self.pieces)

    def _take(self, text: str) -> None:
        if self.keep:
            self.pieces.append(text)
        elif not self.prefix:
            self._write(text)
        else:
            *lines, self.line = (self.line + text).split("\n")
            self._write("".join(f"{self.prefix}{line}\n" for line in lines))

    def _write(self, text: str) -> None:
        if text and not self.muted:
            sink = getattr(sys, self.name)
            sink.write(text)
            sink.flush()

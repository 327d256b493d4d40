"""What was sent, received and waited for: the only place where messages and bytes are counted.

A transport owns one :class:`Ledger` and writes every message into it; collectives add their rounds
and the seconds they spend in encoding and decoding. Nothing else counts bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from torch.autograd import profiler

__all__ = ["Ledger", "LedgerCounts", "labelled"]

_NO_LABEL = nullcontext()


def labelled(phase: str) -> AbstractContextManager[Any]:
    """Show the block as ``taciturn::PHASE`` in a profile, while one is taken; free otherwise.

    ``taciturn trace`` knows ``codec`` and ``exchange``.
    """
    # Without this attribute of torch only the labels would be missing.
    if getattr(profiler, "_is_profiler_enabled", False):
        return profiler.record_function(f"taciturn::{phase}")
    return _NO_LABEL


@dataclass(frozen=True)
class LedgerCounts:
    """Totals of one rank at one moment; the difference of two is what happened in between."""

    messages: int = 0
    """Messages sent by this rank, headers included."""
    sent_bytes: int = 0
    """Payload bytes handed to the transport for other ranks, headers included."""
    received_bytes: int = 0
    """Payload bytes received from other ranks, headers included."""
    rounds: int = 0
    """Rounds of the collectives; a round is one send and one receive by every rank."""
    waiting_s: float = 0.0
    """Seconds blocked in waits for messages to arrive or leave."""
    codec_s: float = 0.0
    """Seconds spent encoding, adding and decoding."""

    def __sub__(self, earlier: LedgerCounts) -> LedgerCounts:
        """Return what was counted since ``earlier``."""
        return LedgerCounts(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


class Ledger:
    """Running totals of one rank. Changed in place by the transport and the collectives."""

    def __init__(self) -> None:
        self.messages = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.rounds = 0
        self.waiting_s = 0.0
        self.codec_s = 0.0

    def sent(self, nbytes: int) -> None:
        """Count one message of ``nbytes`` bytes on its way to another rank."""
        self.messages += 1
        self.sent_bytes += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of the block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waiting_s += time.perf_counter() - start

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Count the seconds of the block as encoding and decoding."""
        start = time.perf_counter()
        try:
            with labelled("codec"):
                yield
        finally:
            self.codec_s += time.perf_counter() - start

    def snapshot(self) -> LedgerCounts:
        """Return the totals so far."""
        return LedgerCounts(**{f.name: getattr(self, f.name) for f in fields(LedgerCounts)})

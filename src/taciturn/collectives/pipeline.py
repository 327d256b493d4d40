"""The rounds that all ring collectives share.

In round t = 1..L every rank sends one message to its successor and receives one from its
predecessor. What it receives in round t decides what it sends in round t + 1. Each message is cut
into segments that travel independently, so that one segment is encoded while others are on the
wire; the receive of round t + 1 is posted before round t is handled, so that no message finds its
receiver unprepared.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from taciturn.ledger import labelled
from taciturn.transport import Request, Transport

__all__ = ["Chain", "run_rounds", "segments_for"]

_SEGMENT_BYTES = 65536
"""Messages below this are dominated by their start-up cost and are not cut."""
_MOST_SEGMENTS = 2
"""One is handled while the other is on the wire. More gain nothing on links of 50 to 1000 Mbit/s
(measured with 8 and 16 ranks), and every message costs processor time."""


class Chain(Protocol):
    """What a ring collective does with its messages. Tensors may be empty: they are not sent."""

    def first(self, segment: int) -> torch.Tensor:
        """Return the message of round 1."""

    def place(self, round: int, segment: int) -> torch.Tensor:
        """Return where the message of ``round`` is to be received.

        Its memory may have been used by any message sent in round - 2 or earlier.
        """

    def handle(self, round: int, segment: int) -> torch.Tensor:
        """Take what ``round`` has brought to its place and return the message of round + 1.

        In the last round the result is unused. The message may use memory of messages sent in
        round - 1 or earlier.
        """

    def settle(self, round: int, segment: int) -> None:
        """Do what can wait until the message of round + 1 is on its way."""


def segments_for(message_bytes: int, segments: int | None) -> int:
    """Return the number of segments of messages of this size; ``segments`` if given."""
    if segments is not None:
        return segments
    return max(1, min(_MOST_SEGMENTS, message_bytes // _SEGMENT_BYTES))


def run_rounds(
    chain: Chain,
    transport: Transport,
    rounds: int,
    segments: int,
    successor: int,
    predecessor: int,
    *,
    frugal: bool = False,
) -> None:
    """Run ``rounds`` rounds of ``segments`` segments each.

    Args:
        chain: what is sent and what is done with what arrives; changed in place.
        transport: over which; its ledger counts the rounds.
        rounds: L.
        segments: pieces of every message, each with a tag of its own.
        successor: rank that this one sends to.
        predecessor: rank that this one receives from.
        frugal: finish the send of a round before the next receive is posted. ``place`` may then
            reuse the memory of messages sent in round - 1: one buffer less, a little slower.
    """
    ledger, clock = transport.ledger, time.perf_counter
    nothing = torch.empty(0)
    places = [nothing] * segments
    receiving: list[Request | None] = [None] * segments
    # Sends of the last two rounds, by segment; that of round t is at t % 2.
    sending: list[list[Request | None]] = [[None, None] for _ in range(segments)]

    def prepare(round: int, segment: int) -> None:
        """Choose where the message of a round goes and, unless batched, post its receive."""
        places[segment] = place = chain.place(round, segment)
        receiving[segment] = None
        if not transport.batched and place.numel():
            receiving[segment] = transport.receive(place, predecessor, segment)

    def exchange(round: int, segment: int, message: torch.Tensor) -> None:
        """Post the send of a round; on a batched transport its receive too."""
        if not transport.batched:
            if message.numel():
                sending[segment][round % 2] = transport.send(message, successor, segment)
            return
        place = places[segment]
        sent, received = transport.post(
            [(message, successor, segment)] if message.numel() else [],
            [(place, predecessor, segment)] if place.numel() else [],
        )
        sending[segment][round % 2] = sent[0] if sent else None
        receiving[segment] = received[0] if received else None

    def finish(round: int, segment: int) -> None:
        """Wait until the message sent in ``round`` has left."""
        request, sending[segment][round % 2] = sending[segment][round % 2], None
        if request is not None:
            request.wait()

    transport.round = 1
    for segment in range(segments):
        prepare(1, segment)
    for segment in range(segments):
        start = clock()
        with labelled("codec"):
            message = chain.first(segment)
        ledger.codec_s += clock() - start
        exchange(1, segment, message)
    for now in range(1, rounds + 1):
        transport.round = now
        ledger.rounds += 1
        for segment in range(segments):
            request = receiving[segment]
            if request is not None:
                request.wait()
            finish(now if frugal else now - 1, segment)
            if now < rounds:
                prepare(now + 1, segment)
            start = clock()
            with labelled("codec"):
                message = chain.handle(now, segment)
            ledger.codec_s += clock() - start
            if now < rounds:
                exchange(now + 1, segment, message)
            start = clock()
            with labelled("codec"):
                chain.settle(now, segment)
            ledger.codec_s += clock() - start
    for segment in range(segments):
        finish(rounds - 1, segment)
        finish(rounds, segment)

"""Timed calls of one rank: a step of the probe in, when it began and ended here out.

All ranks begin behind a barrier, methods after a few milliseconds of computing. A message is timed
by its sender, from the moment its receiver says that it is ready to the receiver's answer: no
rank's lateness is in it. Whatever takes all ranks is timed by each; :mod:`taciturn.probe.summary`
counts from the last arrival.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from taciturn import methods
from taciturn.aggregators import Aggregator, Group
from taciturn.probe.steps import ITEM_BYTES, PING_BYTES, Step
from taciturn.ranks import Ranks

__all__ = ["Caller", "Sample", "Shapes", "gradient_group"]

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a group."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MATMUL_WIDTH = {"cpu": 192, "cuda": 4096}  # a millisecond or so
MATMULS_ALONE = 40
BURST = 8  # products before a method's call
_TAG = 7  # of our messages


class Sample(NamedTuple):
    """One step on one rank that takes part: plain numbers, so that it travels.

    Attributes:
        start_s: on this host's monotonic clock.
        end_s: on the same.
        codec_s: of which coding, by the ledger.
        waiting_s: of which waiting, by the ledger.
        rounds: by the ledger.
        sent_bytes: by the ledger.
        matmul_s: of one product, where matrices are multiplied; else 0.
    """

    start_s: float
    end_s: float
    codec_s: float = 0.0
    waiting_s: float = 0.0
    rounds: int = 0
    sent_bytes: int = 0
    matmul_s: float = 0.0

    @property
    def seconds(self) -> float:
        """By this rank's own clock."""
        return self.end_s - self.start_s


def gradient_group(elems: int, own: Sequence[Shapes] = ()) -> Group:
    """A model's own group of ``elems`` elements; else matrices and biases of a transformer block.

    What is no matrix of the block is one vector: low-rank methods send it as it is.
    """
    for some in own:
        if sum(map(math.prod, some)) == elems:
            return Group.of(
                [(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(some)]
            )
    width = 8
    while 12 * (width + 8) ** 2 <= elems:
        width += 8
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("qkv", (3 * width, width)),
        ("proj", (width, width)),
        ("up", (4 * width, width)),
        ("down", (width, 4 * width)),
    ]
    if 12 * width * width > elems:
        shapes = []
    rest = elems - sum(rows * columns for _, (rows, columns) in shapes)
    if rest:
        shapes.append(("bias", (rest,)))
    return Group.of([(name, torch.empty(shape, device="meta")) for name, shape in shapes])


class Caller:
    """This rank's side of every step.

    Args:
        ranks: all of them.
        largest_bytes: of any buffer.
        largest_elems: that methods average.
        own: groups of a model, as shapes of their tensors.
    """

    def __init__(
        self,
        ranks: Ranks,
        largest_bytes: int,
        largest_elems: int = 0,
        own: Sequence[Shapes] = (),
    ) -> None:
        self.own = own
        self.ranks, self.transport = ranks, ranks.transport
        device = ranks.device
        self.out = torch.zeros(largest_bytes, dtype=torch.uint8, device=device)
        self.into = torch.zeros_like(self.out)
        for buffer in (self.out, self.into):
            buffer.fill_(0)  # the memory is there before the clock runs
        self.token = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
        width = MATMUL_WIDTH[device.type]
        self.matrices = torch.randn(2, width, width, device=device)
        # One for each method and size: what a low-rank one keeps belongs to its matrices.
        self.aggregators: dict[tuple[str, int], tuple[Aggregator, Group]] = {}
        self.actions: dict[str, Callable[[Step], Sample | None]] = {
            "one_way": self._messages,
            "pair": self._messages,
            "crowd": self._messages,
            "duplex": self._duplex,
            "round": self._round,
            "add": self._add,
            "matmul": self._matmul,
            "beside": self._beside,
            "all_reduce": self._all_reduce,
            "method": self._method,
        }
        generator = torch.Generator().manual_seed(ranks.rank)
        self.gradients = torch.randn(largest_elems, generator=generator).to(device)

    def call(self, step: Step) -> Sample | None:
        """Do the step behind a barrier; None if this rank has no part in it."""
        action = self.actions[step.kind]
        self.ranks.barrier()
        return action(step)

    # -- messages

    def _messages(self, step: Step) -> Sample | None:
        for sender, receiver in step.pairs:
            if self.transport.rank == sender:
                return self._send(step.size, receiver)
            if self.transport.rank == receiver:
                self._receive(step.size, sender)
        return None

    def _send(self, size: int, peer: int) -> Sample:
        self._exchange([], [(self.token, peer)])
        start = time.monotonic()
        self._exchange([(self.out[:size], peer)], [])
        self._exchange([], [(self.token, peer)])
        return Sample(start, time.monotonic())

    def _receive(self, size: int, peer: int) -> None:
        self._exchange([(self.token, peer)], [])
        self._exchange([], [(self.into[:size], peer)])
        self._exchange([(self.token, peer)], [])

    def _exchange(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]
    ) -> None:
        sent, received = self.transport.post(
            [(message, peer, _TAG) for message, peer in sends],
            [(place, peer, _TAG) for place, peer in receives],
        )
        for request in (*received, *sent):
            request.wait()
        self.ranks.synchronize()

    def _duplex(self, step: Step) -> Sample | None:
        for pair in step.pairs:
            if self.transport.rank in pair:
                (peer,) = set(pair) - {self.transport.rank}
                start = time.monotonic()
                self._exchange([(self.out[: step.size], peer)], [(self.into[: step.size], peer)])
                return Sample(start, time.monotonic())
        return None

    def _round(self, step: Step) -> Sample:
        rank, size = self.transport.rank, self.transport.size
        start = time.monotonic()
        self._exchange(
            [(self.out[: step.size], (rank + 1) % size)],
            [(self.into[: step.size], (rank - 1) % size)],
        )
        return Sample(start, time.monotonic())

    # -- this machine

    def _add(self, step: Step) -> Sample:
        total, received = (
            buffer[: step.size].view(torch.float32) for buffer in (self.out, self.into)
        )
        start = time.monotonic()
        total.add_(received)
        self.ranks.synchronize()
        return Sample(start, time.monotonic())

    def _matmul(self, _: Step) -> Sample:
        start = time.monotonic()
        for _product in range(MATMULS_ALONE):
            self._multiply()
        end = time.monotonic()
        return Sample(start, end, matmul_s=(end - start) / MATMULS_ALONE)

    def _multiply(self) -> None:
        torch.mm(self.matrices[0], self.matrices[1])
        self.ranks.synchronize()

    def _beside(self, step: Step) -> Sample:
        """A round while a thread multiplies: the thread runs before, and until, it is over."""
        running, over = threading.Event(), threading.Event()
        products: list[float] = []

        def multiply() -> None:
            running.set()
            while not over.is_set():
                start = time.monotonic()
                self._multiply()
                products.append(time.monotonic() - start)

        thread = threading.Thread(target=multiply)
        thread.start()
        running.wait()
        try:
            sample = self._round(step)
        finally:
            over.set()
            thread.join()
        return sample._replace(matmul_s=sum(products) / max(1, len(products)))

    # -- all ranks

    def _all_reduce(self, step: Step) -> Sample:
        flat = self.out[: step.size].view(DTYPES[step.what])
        flat.zero_()  # sums of sums would overflow
        start = time.monotonic()
        self.transport.start_all_reduce(flat)()
        self.ranks.synchronize()
        return Sample(start, time.monotonic())

    def _method(self, step: Step) -> Sample:
        key = step.what, step.size
        if key not in self.aggregators:
            self.aggregators[key] = (
                methods.aggregator(step.what),
                gradient_group(step.size, self.own),
            )
        aggregator, group = self.aggregators[key]
        work = self.out[: step.size * ITEM_BYTES].view(torch.float32)
        work.copy_(self.gradients[: step.size])
        self.ranks.barrier()  # copying took each rank its own time
        # A step computes before it exchanges: ranks do not arrive together, nor with warm caches.
        for _ in range(BURST):
            self._multiply()
        before = self.transport.ledger.snapshot()
        start = time.monotonic()
        aggregator.aggregate(work, group, self.transport)
        aggregator.finish_step(keep=True)
        self.ranks.synchronize()
        end = time.monotonic()
        counts = self.transport.ledger.snapshot() - before
        return Sample(
            start, end, counts.codec_s, counts.waiting_s, counts.rounds, counts.sent_bytes
        )

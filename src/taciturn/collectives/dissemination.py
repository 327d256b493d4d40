"""All-gather of a few numbers in as few rounds as can be: ceil(log2 N).

The algorithm of Bruck, Ho, Kipnis, Upfal and Weathersby (1997): in round t every rank sends all
that it has to the rank 2^t places on. Each number travels to each rank once, as in a ring, in
ceil(log2 N) rounds where a ring's all-reduce has 2(N - 1); it pays where messages are so short that
rounds are all that counts.
"""

from __future__ import annotations

import torch

from taciturn.collectives.ring import ring_neighbours
from taciturn.errors import InputError
from taciturn.transport import Header, Transport

__all__ = ["gather_rows"]


def gather_rows(row: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return every rank's row on every rank, shape ``(ranks, numbers)``, in order of rank.

    Args:
        row: this rank's, 1-D and contiguous, where headers live (``transport.header_device``); as
            long as the others'.
        transport: the ranks that take part.

    Raises:
        InputError: the row is not 1-D and contiguous.
        MismatchError: another rank makes another call, or brings a row of other length or dtype.
        PeerError: a rank died, went silent or failed.
    """
    if row.dim() != 1 or not row.is_contiguous():
        raise InputError(f"a 1-D contiguous tensor is needed, got shape {tuple(row.shape)}")
    size, rank = transport.size, transport.rank
    rows = row.new_empty((size, row.numel()))  # first this rank's own, then its predecessors'
    rows[0] = row
    if size > 1:
        transport.calls += 1
        transport.round = 0
        header = Header("gather_rows", row.numel(), str(row.dtype), call=transport.calls)
        transport.agree(header, *([peer] for peer in ring_neighbours(transport)))
    have = 1
    while have < size and row.numel():
        count = min(have, size - have)
        transport.round += 1
        sent, received = transport.post(
            [(rows[:count], (rank + have) % size, 0)],
            [(rows[have : have + count], (rank - have) % size, 0)],
        )
        for request in (*received, *sent):
            request.wait()
        transport.ledger.rounds += 1
        have += count
    places = [(rank - peer) % size for peer in range(size)]
    return rows[places]

"""The communication backend's own all-reduce: what everything else is measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from taciturn.collectives.base import Collective, Cost
from taciturn.collectives.ring import ring_neighbours
from taciturn.errors import InputError
from taciturn.transport import DistributedTransport, Header, Transport

__all__ = ["Backend"]

_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(eq=False)
class Backend(Collective):
    """``torch.distributed.all_reduce`` of gloo, NCCL or whatever backend the group has.

    Needs a :class:`DistributedTransport`. What it sends is its own affair: its messages and bytes
    are not counted; the headers that the ranks exchange first are.

    Args:
        wire: cast to this dtype for the exchange ("bf16", "fp16", "fp32"); None: as it is. Of a
            residual only the cast is known; what the backend rounds on the way is lost.
        check: each rank sends its successor a header first, one short message and its latency per
            call, since gloo aborts the process where lengths or dtypes differ. False for ranks that
            are known to agree, such as those of a measurement.
    """

    wire: str | None = None
    check: bool = True

    name: ClassVar[str] = "backend"
    bit_identical: ClassVar[bool] = True
    mean_exact: ClassVar[bool] = True
    integers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in _WIRES:
            raise InputError(f"wire={self.wire!r}: the backend can send {', '.join(_WIRES)}")

    @override
    def _sum(
        self,
        flat: torch.Tensor,
        transport: Transport,
        header: Header,
        residual: torch.Tensor | None,
    ) -> None:
        if not isinstance(transport, DistributedTransport):
            raise InputError(
                "the backend's own all-reduce needs a torch.distributed group: "
                "use DistributedTransport, or another collective"
            )
        if self.check:
            # Of two neighbours that differ, the successor finds it and stays away. Those that agree
            # with their predecessor may begin: gloo's ring takes data between neighbours only, so
            # it never passes between two that differ, and ends when who stayed away closes.
            transport.agree(header, *([n] for n in ring_neighbours(transport)))
        self._start(flat, transport, residual)()

    def start(self, flat: torch.Tensor, transport: DistributedTransport) -> Callable[[], None]:
        """Begin what :meth:`all_reduce` does; several may be under way at once.

        Args:
            flat: 1-D, contiguous, fp32 or fp64; the ranks agree on it (``check=False``).
            transport: as of :meth:`all_reduce`.

        Returns:
            What has to be called before ``flat`` is used, once, in the order of the calls.

        Raises:
            PeerError: a rank died, went silent or failed; what is returned raises it too.
        """
        if self.check:
            raise InputError("only ranks that agree beforehand can overlap calls: check=False")
        transport.calls += 1
        transport.round = 0
        return self._start(flat, transport, None)

    def _start(
        self, flat: torch.Tensor, transport: DistributedTransport, residual: torch.Tensor | None
    ) -> Callable[[], None]:
        if self.wire is None or _WIRES[self.wire] == flat.dtype:
            return transport.start_all_reduce(flat)
        with transport.ledger.codec():
            narrow = flat.to(_WIRES[self.wire])
            if residual is not None:
                torch.sub(flat, narrow, out=residual)
        wait = transport.start_all_reduce(narrow)

        def finish() -> None:
            wait()
            with transport.ledger.codec():
                flat.copy_(narrow)

        return finish

    @override
    def cost(self, numel: int, dtype: torch.dtype, ranks: int, rank: int = 0) -> Cost | None:
        return Cost(0, 0, 0, 0) if ranks == 1 else None

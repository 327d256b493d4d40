"""This rank's place among the others of a measurement, and their exchanges off the clock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
from taciturn.testbed import interface_counters
from taciturn.transport import DistributedTransport

__all__ = ["Ranks", "join", "own_interface"]


@dataclass
class Ranks:
    """This rank's place among the others, and the exchanges outside the clock.

    Args:
        transport: between them.
        device: of this rank's buffers.
        group: that the transport was made for; the default group if None.
    """

    transport: DistributedTransport
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.transport.size

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A collective of torch.distributed whose failure is reported like one of the transport."""
        try:
            yield
        except RuntimeError as error:
            self.transport.lost((self.rank - 1) % self.size, error)

    def barrier(self) -> None:
        """Wait for all ranks, and for the device."""
        with self._watched():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                dist.barrier(self.group, device_ids=[self.device.index])
            else:
                dist.barrier(self.group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        with self._watched():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        values: list[Any] = [None] * self.size
        with self._watched():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def synchronize(self) -> None:
        """Wait for what the device still has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def agree(self, job: dict[str, Any]) -> None:
        """Raise MismatchError, on every rank, unless all were given the same job.

        Args:
            job: plain values by name.
        """
        mine, *others = self.gather(job)
        for rank, other in enumerate(others, start=1):
            keys = [key for key, value in mine.items() if other[key] != value]
            if keys:
                told = "; ".join(f"{key} {mine[key]!r} and {other[key]!r}" for key in keys)
                raise MismatchError(
                    f"ranks 0 and {rank} were given different jobs: {told}. Start all ranks with "
                    "the same command"
                )

    def leave(self) -> None:
        """End the transport and the process group, together with the other ranks."""
        self.barrier()
        self.transport.close()
        dist.destroy_process_group()


def _not_joined(timeout_s: float, error: Exception) -> PeerError:
    """What to say when the ranks did not all meet.

    Gloo waits for the ranks in their order, and the store's error ends with the key of the one that
    did not come: ``wait timeout after 4000ms, keys: /default_pg/0//cpu//0/2``.
    """
    text = str(error).strip().splitlines()
    key = re.search(r"keys: \S*/(\d+)$", text[0]) if text else None
    what = "its process may be stopped, stuck or gone; look at it, or give a longer --timeout"
    if key is not None:
        missing = int(key[1])
        return PeerError(f"rank {missing} did not join within {timeout_s:g} s: {what}", [missing])
    said = text[0] if text else type(error).__name__
    return PeerError(
        f"the ranks did not all join; one may be stopped, stuck or gone, or --timeout "
        f"({timeout_s:g} s) too short: {said}"
    )


def join(device_type: str, timeout_s: float) -> Ranks:
    """Meet the other ranks as torchrun's environment says.

    Args:
        device_type: ``cpu`` (gloo) or ``cuda`` (NCCL).
        timeout_s: a rank that is silent for longer counts as lost.

    Raises:
        PeerError: not all of them came; names who did not, if torch does.
    """
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        transport = DistributedTransport(timeout_s=timeout_s)
    except TaciturnError:
        raise
    except RuntimeError as error:
        raise _not_joined(timeout_s, error) from error
    return Ranks(transport, device)


def own_interface() -> str | None:
    """The network interface that only this rank uses; None if it shares one, as on loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if os.environ.get("LOCAL_WORLD_SIZE") != "1" or not name:
        return None
    try:
        interface_counters(name)
    except (InputError, OSError):
        return None
    return name

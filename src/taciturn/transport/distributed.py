"""Messages over a process group of ``torch.distributed``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _get_default_store,
)
from typing_extensions import override

from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError
from taciturn.ranges import check_number
from taciturn.transport.base import HEADER_TAG, LONGEST_TIMEOUT_S, Request, Transport
from taciturn.transport.reports import (
    REPORT_MAX_S,
    REPORT_SHARE,
    WAIT_SHARE,
    Report,
    Verdict,
    decide,
    error_of,
    report_of,
)

__all__ = ["DistributedTransport"]

_BREAK_TAG = HEADER_TAG + 1


class _DistributedRequest:
    """One ``Work`` of torch.distributed, waited for exactly once."""

    def __init__(
        self, transport: DistributedTransport, work: Any, peer: int, received_bytes: int
    ) -> None:
        self._transport = transport
        self._work = work
        self._peer = peer
        self._received_bytes = received_bytes

    def wait(self) -> None:
        work, self._work = self._work, None
        assert work is not None, "a request is waited for exactly once"
        transport = self._transport
        ledger, start = transport.ledger, time.perf_counter()
        try:
            work.wait(transport.wait_timeout)
        except RuntimeError as error:  # gloo and NCCL raise nothing more precise
            transport.lost(self._peer, error)
        ledger.waiting_s += time.perf_counter() - start
        ledger.received_bytes += self._received_bytes


class DistributedTransport(Transport):
    """Point-to-point messages of ``torch.distributed`` (gloo, NCCL, whatever registers).

    Uses a process group of its own with the members of ``group``, so that its messages never mix
    with the caller's and the caller's group survives a failure. Creating it is a collective call
    of all members of ``group``.

    Args:
        group: the ranks that take part; the default group if None. Ranks are counted within it.
        timeout_s: every failure is an error on every rank within this many seconds.

    Raises:
        InputError: torch.distributed is not initialised, this rank is not in ``group``, or
            ``timeout_s`` is no time-out.
    """

    _made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised: call init_process_group first, "
                "or start the program with torchrun"
            )
        check_number("timeout_s", timeout_s, 0, LONGEST_TIMEOUT_S, above=True)
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        if dist.get_rank() not in members:
            raise InputError(
                f"rank {dist.get_rank()} is not a member of this group of ranks {members}"
            )
        backend = dist.get_backend(group)
        self.timeout_s = timeout_s
        self.wait_timeout = timedelta(seconds=timeout_s * WAIT_SHARE)
        self.members = members
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self.batched = backend == "nccl"
        self._closes_on_timeout = backend == "gloo"
        # Members number their transports themselves, so that other ranks need not know of them.
        key = tuple(members)
        number = DistributedTransport._made[key]
        DistributedTransport._made[key] += 1
        prefix = f"taciturn/{'-'.join(map(str, members))}/{number}"
        self._store = PrefixStore(f"{prefix}/reports", _launcher_store())
        self._store.set(f"here/{self.rank}", "")
        try:
            self.group = self._connect(backend, prefix)
        except RuntimeError as error:
            self._name_missing(error)
            raise
        if self.batched:
            self.header_device = torch.device("cuda", torch.cuda.current_device())
        self._failure: TaciturnError | None = None
        self._reducible: dict[torch.dtype, bool] = {}
        # Gloo's own connecting is no barrier: a rank that went on and closed would break those
        # that still connect.
        self._meet("opening")

    # Messages go through the group's own methods: dist.isend checks and translates at every call,
    # which costs as much as a short message.

    @override
    def send(self, message: torch.Tensor, peer: int, tag: int) -> Request:
        if self._failure is not None:
            raise self._failure
        try:
            work = self.group.send([message], peer, tag)
        except RuntimeError as error:
            self.lost(peer, error)
        self.ledger.sent(message.nbytes)
        return _DistributedRequest(self, work, peer, 0)

    @override
    def receive(self, place: torch.Tensor, peer: int, tag: int) -> Request:
        if self._failure is not None:
            raise self._failure
        try:
            work = self.group.recv([place], peer, tag)
        except RuntimeError as error:
            self.lost(peer, error)
        return _DistributedRequest(self, work, peer, place.nbytes)

    @override
    def _post_batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int, int]],
        receives: Sequence[tuple[torch.Tensor, int, int]],
    ) -> tuple[list[Request], list[Request]]:
        if self._failure is not None:
            raise self._failure
        operations = [
            dist.P2POp(start, tensor, self.members[peer], self.group)
            for start, posts in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer, _ in posts
        ]
        if not operations:
            return [], []
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self.lost(None, error)
        if len(works) < len(operations):  # NCCL coalesces a batch into one, which may wait twice
            works = [works[0]] * len(operations)
        for message, _, _ in sends:
            self.ledger.sent(message.nbytes)
        received: list[Request] = [
            _DistributedRequest(self, work, peer, place.nbytes)
            for work, (place, peer, _) in zip(works, receives, strict=False)
        ]
        sent: list[Request] = [
            _DistributedRequest(self, work, peer, 0)
            for work, (_, peer, _) in zip(works[len(receives) :], sends, strict=True)
        ]
        return sent, received

    def start_all_reduce(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin to sum ``flat`` in place with the backend's own algorithm, which is not counted.

        Returns what has to be called before ``flat`` is used, once, in the order of the calls.

        Raises:
            PeerError: a rank died, went silent or failed; what is returned raises it too.
        """
        if self._failure is not None:
            raise self._failure
        try:
            work = self.group.allreduce([flat])
        except RuntimeError as error:
            self.lost(None, error)

        def finish() -> None:
            try:
                with self.ledger.waiting():
                    work.wait()
            except RuntimeError as error:
                self.lost(None, error)  # gloo does not say on whom it waited

        return finish

    def can_reduce(self, dtype: torch.dtype) -> bool:
        """Say whether the backend sums this dtype. All ranks call it, and get the same answer."""
        if dtype not in self._reducible:
            probe = torch.zeros(1, dtype=dtype, device=self.header_device)
            try:
                self.group.allreduce([probe]).wait(self.wait_timeout)
                self._reducible[dtype] = True
            except (RuntimeError, TypeError) as error:
                if "type" not in str(error).lower():
                    self.lost(None, error)
                self._reducible[dtype] = False
        return self._reducible[dtype]

    def close(self) -> None:
        """End this transport and its connections. Call it on every rank, after its last use.

        Returns when every rank has called it, or after the time-out: what a rank has sent is lost
        if it closes its connections before the others have read it.
        """
        if self._failure is None:
            with suppress(PeerError):
                self._meet("closing")
            self._failure = PeerError("this transport is closed; make a new one")
        self.group = None

    def _connect(self, backend: str, prefix: str) -> Any:
        """Return a process group of our own."""
        if backend == "gloo":
            # Made directly: new_group names groups by what each rank has made and destroyed
            # before, so ranks with different pasts wait for each other for ever.
            store = PrefixStore(f"{prefix}/gloo", _launcher_store())
            return ProcessGroupGloo(store, self.rank, self.size, self.wait_timeout)
        return dist.new_group(
            self.members,
            timeout=timedelta(seconds=self.timeout_s),
            backend=backend,
            use_local_synchronization=True,
        )

    def _name_missing(self, cause: Exception) -> None:
        """Raise if some ranks have not even begun to make this transport."""
        missing = [r for r in range(self.size) if not self._store.check([f"here/{r}"])]
        if missing:
            named = ", ".join(map(str, missing))
            raise PeerError(
                f"rank{'s' * (len(missing) > 1)} {named} did not come within {self.timeout_s:g} s: "
                "every rank of the group has to make this transport (or attach, or accumulate) at "
                "the same point",
                missing,
            ) from cause

    def _meet(self, where: str) -> None:
        """Wait at the store until every rank is here."""
        try:
            if self._store.add(f"{where}/count", 1) == self.size:
                self._store.set(f"{where}/all", "")
            self._store.wait([f"{where}/all"], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise PeerError(
                f"not all {self.size} ranks were {where} this transport within "
                f"{self.timeout_s:g} s: {error}"
            ) from error

    # -- failure

    @override
    def fail(self, error: Exception) -> NoReturn:
        if self._failure is not None:
            raise error
        self._report(report_of(error, self.calls, self.round))
        if isinstance(error, MismatchError):
            raise self._settle() from None
        self._failure = PeerError(f"this transport failed: {error}. Make a new one")
        raise error

    def lost(self, peer: int | None, cause: Exception) -> NoReturn:
        """Raise the error for a ``peer`` that did not answer, agreed with the other ranks.

        None if it is not known which one.
        """
        if self._failure is not None:
            raise self._failure
        silent = "Timed out" in str(cause) or "timeout" in str(cause).lower()
        self._report(
            Report(
                kind="silent" if silent else "closed",
                text=str(cause),
                suspect=peer,
                call=self.calls,
                round=self.round,
            )
        )
        raise self._settle(patient=peer is None) from cause

    def _report(self, report: Report) -> None:
        """Post this rank's report, then close its connections, which wakes its neighbours."""
        with suppress(RuntimeError):  # the store may have died with its holder; _settle says so
            self._store.set(f"report/{self.rank}", json.dumps(report))
        if self._closes_on_timeout and self.size > 1:
            # Gloo closes every connection of a group in which a wait timed out. That is the one way
            # to wake ranks that wait for this one. Waiting for a rank that is gone fails at once
            # and closes nothing, so the next one is tried.
            for step in range(1, self.size):
                try:
                    work = self.group.recv(
                        [torch.empty(1)], (self.rank + step) % self.size, _BREAK_TAG
                    )
                    work.wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if "Timed out" in str(error):
                        break

    def _settle(self, patient: bool = False) -> TaciturnError:
        """Read the reports until they tell who is to blame; the first verdict is everyone's.

        Args:
            patient: ranks may still be waiting in the backend, which nothing can wake.
        """
        grace_s = min(self.timeout_s * REPORT_SHARE, REPORT_MAX_S)
        deadline = time.monotonic() + (self.timeout_s * WAIT_SHARE * patient) + grace_s
        try:
            reports: dict[int, Report] = {}
            while True:
                for rank in range(self.size):
                    key = f"report/{rank}"
                    if rank not in reports and self._store.check([key]):
                        reports[rank] = json.loads(self._store.get(key))
                if self._store.check(["verdict"]):
                    break
                stated = any(r["kind"] in ("error", "mismatch") for r in reports.values())
                if stated or len(reports) == self.size or time.monotonic() > deadline:
                    mine = json.dumps(decide(reports, self.size, self.timeout_s))
                    self._store.compare_set("verdict", "", mine)
                    break
                time.sleep(0.01)
            verdict: Verdict = json.loads(self._store.get("verdict"))
        except RuntimeError:
            verdict = {
                "kind": "peer",
                "ranks": [],
                "text": "a rank was lost, and with it the store that the ranks report to; "
                "the process that held it (usually rank 0) has probably died",
            }
        self._failure = error_of(verdict, self.rank, self.round)
        return self._failure


def _launcher_store() -> Store:
    """Return the store that the ranks met at; under torchrun the launcher holds it."""
    store: Store = _get_default_store()
    return store

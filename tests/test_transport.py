"""Laws of both transports, and what happens when ranks fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from taciturn.collectives import Backend, CodedRing, Collective, Direct, QuantizedRing, Ring
from taciturn.errors import InputError, MismatchError, PeerError
from taciturn.ledger import Ledger, LedgerCounts
from taciturn.methods import build
from taciturn.transport import (
    HEADER_BYTES,
    DistributedTransport,
    Header,
    Transport,
    run_threads,
)
from taciturn.transport.reports import decide

TIMEOUT_S = 6.0


# --- laws, on threads and on processes


def exchange_in_order(transport: Transport) -> list[float]:
    """Send three messages of two tags to the next rank; return what came, by tag and order."""
    to, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    tags = [0, 1, 0]
    messages = [torch.full((5,), float(10 * transport.rank + i)) for i in range(3)]
    places = [torch.empty(5) for _ in range(3)]
    sends, receives = transport.post(
        [(m, to, tag) for m, tag in zip(messages, tags, strict=True)],
        [(p, source, tag) for p, tag in zip(places, tags, strict=True)],
    )
    for request in [*receives, *sends]:
        request.wait()
    counts = transport.ledger.snapshot()
    assert (counts.messages, counts.sent_bytes, counts.received_bytes) == (3, 60, 60)
    return [place[0].item() for place in places]


def distributed_exchange_in_order() -> list[float]:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    result = exchange_in_order(transport)
    transport.close()
    return result


@pytest.mark.parametrize("size", [2, 3, 64])
def test_thread_messages_keep_their_order(size):
    """Messages of one tag arrive in the order they were sent, and the ledger counts them."""
    results = run_threads(size, exchange_in_order, TIMEOUT_S)
    assert results == [[10.0 * ((r - 1) % size) + i for i in range(3)] for r in range(size)]


@pytest.mark.processes
def test_distributed_messages_keep_their_order(pool):
    """The same over gloo."""
    results = pool.run(distributed_exchange_in_order)
    assert results == [[10.0 * ((r - 1) % 4) + i for i in range(3)] for r in range(4)]


def wait_twice() -> str:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    peer = transport.rank ^ 1
    sends, receives = transport.post([(torch.ones(1), peer, 0)], [(torch.empty(1), peer, 0)])
    receives[0].wait()
    sends[0].wait()
    try:
        sends[0].wait()
    except AssertionError as error:
        return str(error)
    finally:
        transport.close()
    return "waited twice"


@pytest.mark.processes
def test_waiting_twice_is_refused(pool):
    """A second wait on a request, which would hang on gloo, is an error of ours at once."""
    assert pool.run(wait_twice) == ["a request is waited for exactly once"] * 4


def test_thread_request_is_waited_for_once():
    """The same rule between threads."""

    def function(transport: Transport) -> None:
        sends, _ = transport.post([(torch.ones(1), transport.rank ^ 1, 0)], [])
        _, receives = transport.post([], [(torch.empty(1), transport.rank ^ 1, 0)])
        receives[0].wait()
        sends[0].wait()
        with pytest.raises(AssertionError, match="exactly once"):
            sends[0].wait()

    assert run_threads(2, function, TIMEOUT_S) == [None, None]


def test_thread_message_is_read_when_it_travels():
    """A tensor changed before its send was waited for is seen changed, as on a real network."""

    def function(transport: Transport) -> float:
        if transport.rank == 0:
            message = torch.zeros(1)
            sends, _ = transport.post([(message, 1, 0)], [])
            message.fill_(7)
            ready.set()
            sends[0].wait()
            return 7.0
        assert ready.wait(TIMEOUT_S)
        place = torch.empty(1)
        _, receives = transport.post([], [(place, 0, 0)])
        receives[0].wait()
        return place.item()

    ready = threading.Event()
    assert run_threads(2, function, TIMEOUT_S) == [7.0, 7.0]


def test_threads_fail_fast_on_the_first_exception():
    """One rank's exception ends the waits of the others at once and is what is raised."""

    def function(transport: Transport) -> None:
        if transport.rank == 2:
            raise ZeroDivisionError("rank 2 is broken")
        try:
            _, receives = transport.post([], [(torch.empty(1), 2, 0)])
            receives[0].wait()
        except PeerError as error:
            seen.append(error)
            raise

    seen: list[PeerError] = []
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 2 is broken"):
        run_threads(4, function, timeout_s=60)
    assert time.monotonic() - start < 30
    assert [error.ranks for error in seen] == [(2,)] * 3


def test_a_failure_that_its_rank_has_caught_is_raised_all_the_same():
    """A transport that failed is finished, whatever its rank makes of the error."""

    def function(transport: Transport) -> None:
        with pytest.raises(InputError, match="sparse"):
            Ring().all_reduce(torch.eye(2).to_sparse(), transport)

    for size in (1, 3):
        with pytest.raises((InputError, PeerError), match="sparse"):
            run_threads(size, function, TIMEOUT_S)


def test_threads_never_hang_on_a_silent_rank():
    """A rank that stops answering is named after the time-out, though its thread goes on."""
    release = threading.Event()

    def function(transport: Transport) -> None:
        if transport.rank == 1:
            release.wait(30)
        else:
            Ring().all_reduce(torch.ones(8), transport)

    with pytest.raises(PeerError, match="rank 1 did not answer") as caught:
        run_threads(3, function, timeout_s=0.5)
    release.set()
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("size", [0, -1, 65])
def test_thread_count_is_checked(size):
    """Only 1 to 64 threads can play ranks."""
    with pytest.raises(InputError, match=f"size={size}"):
        run_threads(size, exchange_in_order)


def test_ledger_counts_subtract():
    """The difference of two snapshots is what was counted in between."""
    ledger = Ledger()
    ledger.sent(10)
    before = ledger.snapshot()
    ledger.sent(5)
    ledger.received_bytes += 7
    ledger.rounds += 1
    with ledger.codec(), ledger.waiting():
        pass
    since = ledger.snapshot() - before
    assert (since.messages, since.sent_bytes, since.received_bytes, since.rounds) == (1, 5, 7, 1)
    assert since.codec_s >= since.waiting_s >= 0
    assert isinstance(since, LedgerCounts)


def test_header_bytes_are_what_is_sent():
    """The header's stated size, which the cost formulas count, is that of its tensor."""
    assert Header("ring", 3, "torch.float32").encode().nbytes == HEADER_BYTES


# --- disagreement

BAD = {
    "length": (lambda rank: torch.ones(100 + (rank == 2)), "100|101"),
    "dtype": (
        lambda rank: torch.ones(100, dtype=torch.float64 if rank == 2 else torch.float32),
        "float32|float64",
    ),
    "layout": (
        lambda rank: torch.ones(2, 3, 4, 5).to(
            memory_format=torch.channels_last if rank == 2 else torch.contiguous_format
        ),
        "memory order",
    ),
}
COLLECTIVES: dict[str, Callable[[], Collective]] = {
    "backend": Backend,
    "ring": Ring,
    "coded": lambda: CodedRing(passes=2),
    "shuffled": lambda: CodedRing(passes=2, shuffle=True),
    "quantized": QuantizedRing,
    "direct": Direct,
}

THREADED = [name for name in COLLECTIVES if name != "backend"]  # between threads there is none


def disagree(which: str, collective: str) -> tuple[str, str, bool]:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    buffer = BAD[which][0](transport.rank)
    try:
        COLLECTIVES[collective]().all_reduce(buffer, transport)
    except (MismatchError, PeerError) as error:
        return type(error).__name__, str(error), bool((buffer == 1).all())
    finally:
        transport.close()
    return "nothing", "", False


@pytest.mark.processes
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("which", BAD)
def test_disagreement_is_an_error_on_every_rank(pool, which, collective):
    """Other lengths, dtypes or layouts on one rank: the same MismatchError everywhere.

    No data passes between ranks that disagree: rank 2, and rank 3 which would receive from it.
    """
    results = pool.run(disagree, which, collective)
    assert {kind for kind, _, _ in results} == {"MismatchError"}
    assert len({text for _, text, _ in results}) == 1
    assert all(part in results[0][1] for part in BAD[which][1].split("|"))
    assert all(untouched for _, _, untouched in results[2:])


@pytest.mark.parametrize("collective", THREADED)
@pytest.mark.parametrize("which", BAD)
def test_thread_disagreement(which, collective):
    """The same between threads."""

    def function(transport: Transport) -> None:
        COLLECTIVES[collective]().all_reduce(BAD[which][0](transport.rank), transport)

    with pytest.raises(MismatchError, match="do not agree"):
        run_threads(4, function, TIMEOUT_S)


def sums_of_lengths(*lengths: list[int]) -> list[str]:
    """What the backend makes of ranks that bring these lengths, one transport for each list."""
    said = []
    for brought in lengths:
        transport = DistributedTransport(timeout_s=TIMEOUT_S)
        try:
            Backend().all_reduce(torch.ones(brought[transport.rank]), transport)
        except (MismatchError, PeerError) as error:
            said.append(type(error).__name__)
        else:
            said.append("summed")
        transport.close()
    return said


@pytest.mark.processes
def test_the_backend_survives_any_pattern_of_lengths(pool):
    """Whichever ranks differ, all raise and no process is aborted, as gloo would abort it."""
    patterns = [[7 + (i >> rank & 1) for rank in range(4)] for i in range(8)]
    patterns += [[1, 1, 2, 3], [0, 5, 5, 5], [1 << 20, 1, 1, 1 << 20]]
    expected = ["MismatchError" if len(set(brought)) > 1 else "summed" for brought in patterns]
    assert pool.run(sums_of_lengths, *patterns) == [expected] * 4


@pytest.mark.processes
def test_the_backend_s_check_is_one_header(pool):
    """It costs 40 bytes to the successor; without it nothing of ours is sent."""
    assert pool.run(bytes_of_the_backend) == [(HEADER_BYTES, 0)] * 4


def bytes_of_the_backend() -> tuple[int, int]:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    Backend().all_reduce(torch.ones(10), transport)
    checked = transport.ledger.sent_bytes
    Backend(check=False).all_reduce(torch.ones(10), transport)
    transport.close()
    return checked, transport.ledger.sent_bytes - checked


def run_two_methods(usual: str, other: str) -> str:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    collective = build(usual if transport.rank != 3 else other)
    try:
        collective.all_reduce(torch.ones(100), transport)
    except MismatchError as error:
        return str(error)
    finally:
        transport.close()
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("usual", "other"),
    [("ring", "quantized:block=64"), ("backend", "ring"), ("coded:passes=2", "coded:passes=3")],
)
def test_different_methods_are_an_error_on_every_rank(pool, usual, other):
    """A rank with another method is found out before data moves, and told as methods are written.

    Rank 3 finds that rank 2's is not its own, or rank 0 that rank 3's is not.
    """
    results = pool.run(run_two_methods, usual, other)
    assert len(set(results)) == 1
    assert f"rank 3 runs '{other}', rank 2 another method" in results[0] or (
        f"rank 0 runs '{usual}', rank 3 another method" in results[0]
    )


def resume_on_one_rank() -> str:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    collective = CodedRing(passes=2, shuffle=True)
    if transport.rank == 1:
        collective.load_state_dict({"calls": 7})
    try:
        collective.all_reduce(torch.ones(1000), transport)
    except (MismatchError, PeerError) as error:
        return type(error).__name__
    finally:
        transport.close()
    return "nothing"


@pytest.mark.processes
def test_a_counter_that_differs_is_an_error_on_every_rank(pool):
    """A state loaded on one rank only gives other ring orders: an error, not a hang."""
    assert pool.run(resume_on_one_rank) == ["MismatchError"] * 4


# --- failure


def fail_at_post(transport: DistributedTransport, how: str, fatal: int) -> None:
    """Let this rank fail when it posts for the ``fatal``-th time from now; 0: at once."""
    post, posts = transport.post, 0

    def failing_post(sends, receives):  # type: ignore[no-untyped-def]
        nonlocal posts
        posts += 1
        if posts >= fatal:
            if how == "dies":
                os._exit(3)
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ZeroDivisionError("a bug in round 2")
        return post(sends, receives)

    if fatal == 0:
        failing_post([], [])
    transport.post = failing_post  # type: ignore[method-assign]


def fail_in_round(how: str, culprit: int, collective: str) -> tuple[str, tuple[int, ...]]:
    """All-reduce again and again; the culprit fails in the middle of the third call."""
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    method = COLLECTIVES[collective]()
    for call in range(50):
        buffer = torch.ones(200_000)
        if transport.rank == culprit and call == 2:
            fail_at_post(transport, how, 0 if collective == "backend" else 4)
        try:
            method.all_reduce(buffer, transport)
        except PeerError as error:
            text, ranks = str(error), error.ranks
            with pytest.raises(PeerError):  # the transport is finished
                method.all_reduce(buffer, transport)
            return text, ranks
    return "nothing happened", ()


@pytest.mark.processes
@pytest.mark.parametrize("collective", ["ring", "coded", "direct", "backend"])
@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_lost_rank_is_named_on_every_other(new_ranks, how, collective):
    """A rank that dies or stops in round k: the others raise within the time-out and name it."""
    outcomes = new_ranks(4).outcomes(fail_in_round, how, 1, collective, lost=[1])
    assert not outcomes[1].ended
    for rank in (0, 2, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        text, ranks = outcomes[rank].result
        assert ranks == (1,), text
        assert "rank 1" in text


@pytest.mark.processes
def test_a_rank_that_raises_is_named_with_its_error(new_ranks):
    """An exception on one rank ends the call on every rank, with that error's text."""
    outcomes = new_ranks(4).outcomes(fail_in_round, "raises", 1, "ring")
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    for rank in (0, 2, 3):
        text, ranks = outcomes[rank].result
        assert (ranks, "a bug in round 2" in text) == ((1,), True), text


def late_rank(sleep_s: float) -> str:
    transport = DistributedTransport(timeout_s=2.0)
    if transport.rank == 2:
        time.sleep(sleep_s)
    try:
        Ring().all_reduce(torch.ones(1000), transport)
    except PeerError as error:
        return str(error.ranks)
    return "fine"


@pytest.mark.processes
def test_a_late_rank_is_named_and_learns_of_it(pool):
    """A rank that comes after the time-out is blamed, and told so; the default group lives."""
    assert pool.run(late_rank, 4.0) == ["(2,)"] * 4
    assert pool.run(late_rank, 0.0) == ["fine"] * 4


def bad_input_on_one_rank() -> str:
    transport = DistributedTransport(timeout_s=TIMEOUT_S)
    bad = torch.ones(10).to_sparse() if transport.rank == 0 else torch.ones(10)
    try:
        Ring().all_reduce(bad, transport)
    except (InputError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.processes
def test_bad_input_on_one_rank_ends_the_call_on_all(pool):
    """A buffer that one rank cannot reduce is an error on the others too, with its reason."""
    results = pool.run(bad_input_on_one_rank)
    assert results[0].startswith("InputError")
    assert all(r.startswith("PeerError: rank 0 failed") and "sparse" in r for r in results[1:])


# --- groups


def in_subgroups() -> tuple[int, float, list[float]]:
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = halves[dist.get_rank() % 2]
    transport = DistributedTransport(group, timeout_s=TIMEOUT_S)
    buffer = torch.full((10,), float(dist.get_rank()))
    Ring().all_reduce(buffer, transport)
    coded = torch.full((10,), float(dist.get_rank()), dtype=torch.float64)
    CodedRing(passes=2, shuffle=True).all_reduce(coded, transport)
    transport.close()
    return transport.rank, buffer[0].item(), coded.tolist()


@pytest.mark.processes
def test_subgroups_count_their_own_ranks(pool):
    """Over subgroups {0, 2} and {1, 3} the sums are those of the members, ranks are the group's."""
    results = pool.run(in_subgroups)
    assert [total for _, total, _ in results] == [2.0, 4.0, 2.0, 4.0]
    assert sorted(rank for rank, _, _ in results) == [0, 0, 1, 1]
    for _, total, coded in results:
        assert coded == pytest.approx([total] * 10, abs=1e-9)


def outside_a_group() -> str:
    group = dist.new_group([0, 1])
    try:
        DistributedTransport(group, timeout_s=TIMEOUT_S).close()
    except InputError as error:
        return str(error)
    return "member"


@pytest.mark.processes
def test_a_rank_outside_the_group_is_told_so(pool):
    """A transport over a group this rank does not belong to is refused with the members' ranks."""
    results = pool.run(outside_a_group)
    assert results[:2] == ["member"] * 2
    assert all("not a member" in r for r in results[2:])


def test_transport_needs_torch_distributed():
    """Without init_process_group the error says what to do."""
    with pytest.raises(InputError, match="init_process_group"):
        DistributedTransport()


# --- who is to blame, as a pure function


def report(kind: str, suspect: int | None = None, call: int = 1, round: int = 1):
    return {"kind": kind, "text": "why", "suspect": suspect, "call": call, "round": round}


@pytest.mark.parametrize(
    ("reports", "ranks", "text"),
    [
        ({0: report("closed", 3), 1: report("closed", 0), 2: report("closed", 1)}, [3], "died"),
        ({0: report("silent", 3), 1: report("silent", 0)}, [2, 3], "did not answer"),
        ({0: report("closed"), 2: report("closed"), 3: report("closed")}, [1], "died"),
        ({0: report("error"), 1: report("closed", 0)}, [0], "rank 0 failed: why"),
        ({r: report("silent", round=5 - (r == 2)) for r in range(4)}, [2], "held up"),
        ({r: report("silent") for r in range(4)}, [], "network is down"),
        ({0: report("mismatch"), 3: report("error")}, [0], "why"),
    ],
)
def test_verdict(reports, ranks, text):
    """The reports decide: stated errors, then closed connections of the silent, then progress."""
    verdict = decide(reports, 4, 5.0)
    assert verdict["ranks"] == ranks
    assert text in verdict["text"]

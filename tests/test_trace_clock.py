"""Clocks of ranks: found from ends, bracketed by gloo, or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.trace import read_all
from taciturn.trace.clock import align
from taciturn.trace.collectives import Collective, Meeting, collectives_of, match
from taciturn.trace.steps import steps_of
from trace_files import own, public

ORIGIN = 1_700_000_000_000_000_000


def part(rank: int, start_ns: int, end_ns: int, name: str = "all_reduce") -> Collective:
    return Collective(
        rank=rank,
        row=0,
        name=name,
        group="0",
        ranks=(0, 1),
        group_size=2,
        seq=-1,
        comm_id="",
        size_bytes=8,
        dtype="Float",
        step=0,
        call_row=-1,
        call_ns=start_ns,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def shifted(one: Collective, offset_ns: int, drift: float) -> Collective:
    """As a clock shows it that is ahead by an offset and runs fast."""

    def on(time: int) -> int:
        return time + offset_ns + round(drift * (time - ORIGIN))

    return replace(one, call_ns=on(one.call_ns), start_ns=on(one.start_ns), end_ns=on(one.end_ns))


def five(offset_ns: int, drift: float, late_ns: int, jitter_ns: list[int]) -> list[Meeting]:
    """Five all-reduces over a second; rank 1 comes late to the third; ends differ by the jitter."""
    meetings = []
    for number, jitter in enumerate(jitter_ns):
        start = ORIGIN + number * 250_000_000
        late = late_ns if number == 2 else 0
        end = start + late + 400_000
        true = part(1, start + late, end + jitter)
        meetings.append(Meeting((part(0, start, end), shifted(true, offset_ns, drift)), True))
    return meetings


@given(
    st.integers(-20_000_000_000, 20_000_000_000),
    st.floats(-5e-5, 5e-5),
    st.lists(st.integers(-7_000, 7_000), min_size=5, max_size=5),
)
def test_offset_and_drift_come_back(offset_ns: int, drift: float, jitter: list[int]) -> None:
    """Seconds off and 50 ppm fast, ends 7 us apart: every time within 50 us, waits as they were."""
    meetings = five(offset_ns, drift, 1_600_000, jitter)
    clocks = align([0, 1], meetings, bracketed=False)
    fixed = [clocks.correct(meeting.members[1]) for meeting in meetings]
    true = [m.members[1] for m in five(0, 0.0, 1_600_000, jitter)]
    for one, real in zip(fixed, true, strict=True):
        assert abs(one.start_ns - real.start_ns) <= 50_000
        assert abs(one.end_ns - real.end_ns) <= 50_000
    wait = fixed[2].start_ns - meetings[2].members[0].start_ns
    assert abs(wait - 1_600_000) <= 50_000
    times = np.array([meeting.members[1].start_ns for meeting in meetings])
    assert clocks.corrections[1].apply(times).tolist() == [one.start_ns for one in fixed]


def test_the_case_of_eleven_seconds() -> None:
    """Rank 1 is 11.56 s ahead and 50 ppm fast, late by 1.6 ms once (case G11)."""
    clocks = align([0, 1], five(11_560_000_000, 5e-5, 1_600_000, [0] * 5), bracketed=False)
    fixed = clocks.correct(five(11_560_000_000, 5e-5, 1_600_000, [0] * 5)[2].members[1])
    assert abs(fixed.start_ns - (ORIGIN + 500_000_000 + 1_600_000)) <= 50_000
    assert "-11560" in clocks.notes[0]


def test_a_broadcast_aligns_nothing() -> None:
    """Its root does not wait: no correction, with the reason."""
    meeting = Meeting((part(0, 0, 10, "broadcast"), part(1, 5, 20, "broadcast")), True)
    clocks = align([0, 1], [meeting], bracketed=False)
    assert list(clocks.corrections) == [0]
    assert "shares no matched collective" in clocks.refused[1]


def test_ends_that_do_not_agree_are_refused() -> None:
    """Ends milliseconds apart, at random, are not of the same collectives."""
    jitter = [0, 9_000_000, -7_000_000, 4_000_000, -2_000_000]
    clocks = align([0, 1], five(0, 0.0, 0, jitter), bracketed=False)
    assert "not the same collectives" in clocks.refused[1]
    assert clocks.correct(part(1, 3, 4)) == part(1, 3, 4)


def test_noise_is_no_drift() -> None:
    """A few ends within 10 ms that happen to lie on a line steeper than crystals differ."""
    steep = [0, 2600, 5200, 7800, 10_400]  # ns over 4 x 10 ms: 260 ppm
    meetings = [
        Meeting((part(0, at, at + 1000), part(1, at, at + 1000 + off)), True)
        for at, off in zip(range(0, 50_000_000, 10_000_000), steep, strict=True)
    ]
    fix = align([0, 1], meetings, bracketed=False).corrections[1]
    assert fix.drift == 0
    assert fix.uncertainty_ns >= 2600


def test_a_rank_is_aligned_over_another() -> None:
    """Rank 2 shares nothing with rank 0, but with rank 1, which does."""
    first = Meeting((part(0, 0, 100_000), part(1, 1_000_000, 1_100_000)), True)
    second = Meeting((part(1, 2_000_000, 2_100_000), part(2, 9_000_000, 9_100_000)), True)
    clocks = align([0, 1, 2], [first, second], bracketed=False)
    assert clocks.corrections[1].offset_ns == -1_000_000
    assert clocks.corrections[2].offset_ns == -8_000_000


@pytest.mark.parametrize("offset_ns", [0, 300_000, 11_560_000_000])
def test_brackets(offset_ns: int) -> None:
    """Nobody is done before the other has come: the middle of what that leaves, or a refusal."""

    def meeting(late_ns: int, first: int) -> Meeting:
        members = [part(0, ORIGIN, ORIGIN + 500_000), part(1, ORIGIN, ORIGIN + 500_000)]
        start = members[first].start_ns + late_ns
        members[first] = replace(members[first], start_ns=start)
        return Meeting((members[0], shifted(members[1], offset_ns, 0.0)), True)

    tight = [meeting(450_000, 0), meeting(450_000, 1)]
    clocks = align([0, 1], tight, bracketed=True)
    assert clocks.corrections[1].offset_ns == -offset_ns
    assert clocks.corrections[1].uncertainty_ns == 50_000
    wide = [
        Meeting(tuple(replace(one, end_ns=one.end_ns + 5_000_000) for one in m.members), True)
        for m in tight
    ]
    assert "names one host" not in align([0, 1], wide, bracketed=True).refused[1]
    on_one_host = align([0, 1], wide, bracketed=True, one_host=True)
    assert (1 in on_one_host.corrections) == (offset_ns < 5_000_000)


def test_brackets_that_contradict_each_other_are_refused() -> None:
    """Rank 1 done before rank 0 came, and the other way round."""
    meetings = [
        Meeting((part(0, 1000, 2000), part(1, 0, 500)), True),
        Meeting((part(0, 3000, 3500), part(1, 4000, 5000)), True),
    ]
    assert "no offset explains" in align([0, 1], meetings, bracketed=True).refused[1]


def test_clocks_of_one_host() -> None:
    """Our gloo ranks share a host and need nothing; the NCCL ranks of one host under 2 us."""
    for paths, bracketed in ((own("straggler"), True), ([public("param_dlrm_8rank")], False)):
        traces, _ = read_all(paths)
        steps = [steps_of(trace) for trace in traces]
        found = match(
            [collectives_of(t, s) for t, s in zip(traces, steps, strict=True)],
            [[one.number for one in each] for each in steps],
        )
        ranks = [trace.rank or 0 for trace in traces]
        clocks = align(ranks, found.meetings, bracketed=bracketed, one_host=True)
        assert sorted(clocks.corrections) == ranks
        assert all(abs(fix.offset_ns) <= 2_000 for fix in clocks.corrections.values())

"""What rows say, and what they do not show."""

from __future__ import annotations

from bench_rows import make_row, make_run
from taciturn.bench.verdicts import (
    bytes_per_elem,
    coded_verdicts,
    dominated,
    family,
    headlines,
    is_faster,
)


def test_family() -> None:
    """A method's family is its name, without keys and blanks."""
    assert [family(m) for m in ("ring", "coded:passes=2", " direct : bits=4")] == [
        "ring", "coded", "direct",
    ]  # fmt: skip


def test_bytes_per_elem() -> None:
    """Counted bytes count; the backend's are its interface's, or unknown."""
    assert bytes_per_elem(make_row("ring", sent=700)) == 7
    assert bytes_per_elem(make_row("ring", sent=700, wire=720)) == 7
    assert bytes_per_elem(make_row("backend", sent=None, wire=720)) == 7.2
    assert bytes_per_elem(make_row("backend", sent=None)) is None


def test_dominated_is_no_more_of_both() -> None:
    """As many bytes with as small an error beat nobody; less of one and no more of the other do."""
    row = make_row("coded", sent=500, replica=1e-2)
    same = make_row("quantized", sent=500, replica=1e-2)
    fewer = make_row("quantized", sent=499, replica=1e-2)
    closer = make_row("quantized", sent=500, replica=9e-3)
    more = make_row("quantized", sent=501, replica=1e-9, mean=1e-9)
    unknown = make_row("backend", sent=None, replica=1e-9, mean=1e-9)
    failed = make_row("ring", sent=1, replica_error=None)
    others = [row, same, fewer, closer, more, unknown, failed]
    assert dominated(row, others, "replica_error") == [fewer, closer]
    assert dominated(unknown, others, "replica_error") == []
    assert dominated(failed, others, "replica_error") == []


def test_coded_rings_are_judged_by_both_errors() -> None:
    """A quantized ring can beat a coded one on every replica and still lose in the mean."""
    rows = make_run()
    by_two, by_sixteen = coded_verdicts(rows)
    assert by_two.row["method"] == "coded:passes=2"
    assert (by_two.replica, by_two.mean) == ([], [])
    assert [row["method"] for row in by_sixteen.replica] == ["quantized:bits=8", "direct:bits=8"]
    assert by_sixteen.mean == []


def test_only_quantized_and_direct_are_rivals() -> None:
    """A coded ring is not held against another, nor against the plain ring."""
    rows = [
        make_row("coded", sent=500),
        make_row("coded:eps=1", sent=400),
        make_row("ring", sent=1),
    ]
    assert all(verdict.replica == verdict.mean == [] for verdict in coded_verdicts(rows))


def test_faster_needs_quartiles_apart_and_repeats() -> None:
    """Overlapping times, or two repeats, show nothing."""
    slow = make_row("backend", (1.0, 1.1, 1.2))
    assert is_faster(make_row("ring", (0.7, 0.8, 0.9)), slow)
    assert not is_faster(make_row("ring", (0.7, 1.0, 1.3)), slow)
    assert not is_faster(slow, slow)
    assert not is_faster(make_row("ring", (0.1, 0.1)), slow)


def test_headlines_of_a_run() -> None:
    """The sentences name the fastest, who beats bf16 fairly, and where the coded ring stands."""
    said = headlines(make_run())
    assert said[0].startswith("5 of 6 methods are faster")
    assert "quantized:bits=8, takes 0.270 of its time" in said[0]
    # bf16 errs by 3e-3 on both counts: int8 wires err more.
    assert said[1].startswith("No method is shown to be faster than the backend's bf16")
    assert said[2].startswith("Faster than the backend's bf16 all_reduce (0.500")
    assert said[2].endswith("at most its 3.0e-3: coded:passes=16,code=fourier,wire=bf16 (0.310).")
    assert "beats 1 of 2 coded rings" in said[3]
    assert "none beats coded:passes=2 (5.50 bytes per element, error 2.0e-4)" in said[3]
    assert "beats 0 of 2 coded rings" in said[4]
    assert said[5].startswith("Of the link's byte limit")


def test_too_few_repeats_show_no_winner() -> None:
    """With two repeats nobody is said to be faster."""
    rows = [make_row("backend", (1.0, 1.0), reference=True), make_row("ring", (0.1, 0.1))]
    assert headlines(rows)[0] == "Who is faster is not shown: it takes at least 3 repeats."


def test_missing_comparisons_are_named() -> None:
    """Without bf16, or without a quantized ring, the sentence says what is missing."""
    said = headlines([make_row("backend", reference=True), make_row("coded:passes=2")])
    assert said[0] == "No method is faster than the backend's fp32 all_reduce here."
    assert "bf16 all_reduce, the usual alternative, was not in this run" in said[1]
    assert "No quantized ring or direct exchange was in this run" in said[2]


def test_headlines_are_of_the_largest_size() -> None:
    """Small buffers, where latency rules, do not decide."""
    small = [make_row("backend", (1, 1, 1), reference=True), make_row("ring", (9, 9, 9))]
    assert headlines([*small, *make_run(1 << 20)])[0].startswith("5 of 6")

"""The file of a link: what was written is read, and what cannot be is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.errors import InputError
from taciturn.link import VERSION, Contention, Estimate, Fit, Link, MethodSpeed, Piece

CURVE = Fit(
    alpha_s=Estimate(1e-3, 5e-4, 2e-3),
    beta_s_per_byte=Estimate(1e-8, 9e-9, 2e-8),
    pieces=(Piece(0, 1e-3, 4e-8), Piece(1000, 1e-3 + 4e-5, 1e-8)),
    sizes_bytes=(10, 1000, 100_000),
    seconds=(1e-3, 1.04e-3, 2.03e-3),
    leave_one_out_error=0.01,
    leave_one_out_p90=0.02,
)
SPEED = MethodSpeed(
    method="quantized:bits=8",
    elems=(1000, 100_000),
    seconds=(0.1, 0.2),
    codec_s=(0.01, 0.1),
    waiting_s=(0.09, 0.1),
    rounds=(2, 2),
    sent_bytes=(1040, 100_040),
    link_s=(0.08, 0.1),
    local_fixed_s=Estimate.exactly(0.02),
    local_s_per_elem=Estimate(1e-6, 0, 2e-6),
)
LINK = Link(
    ranks=2,
    hosts=1,
    backend="gloo",
    device="cpu",
    cores=2,
    rate_bits_per_s=200_000_000,
    one_way=CURVE,
    both_ways=CURVE,
    duplex_factor=Estimate(1, 1, 1.1),
    gamma_s_per_byte=Estimate.exactly(1e-10),
    pair_bytes_per_s=((None, 1e8), (9e7, None)),
    pair_latency_s=((None, 1e-3), (None, None)),
    slow_rank=1,
    slow_links=((0, 1),),
    contention=(Contention(1, Estimate.exactly(1e8)),),
    link_beside_matmul=Estimate(1.2, 1, 1.3),
    matmul_beside_link=Estimate(1.1, 1, 1.3),
    all_reduce={"fp32": CURVE},
    methods=(SPEED, replace(SPEED, method="backend", rounds=None, sent_bytes=None)),
    probed_at="2026-01-01T00:00:00+00:00",
    probe_s=60,
    drift=0.03,
    warnings=("It was a Thursday.",),
)


def test_a_link_is_read_as_it_was_written(tmp_path: Path) -> None:
    """What comes back is equal, and the file's numbers carry their units in the names."""
    LINK.write(tmp_path / "link.json")
    assert Link.read(tmp_path / "link.json") == LINK
    values = json.loads((tmp_path / "link.json").read_text())
    assert (values["format"], values["version"]) == ("taciturn.link", VERSION)
    assert Link.from_json(LINK.to_json()) == LINK


def test_a_curve_is_read_off() -> None:
    """Within a piece it is its line; the last piece goes on, and says that it is not covered."""
    assert CURVE.seconds_at(0) == CURVE.alpha_s.value
    assert CURVE.seconds_at(500) == pytest.approx(1e-3 + 500 * 4e-8)
    assert CURVE.seconds_at(10**6) == pytest.approx(1.04e-3 + 999_000 * 1e-8)
    assert [CURVE.covers(n) for n in (9, 10, 100_000, 100_001)] == [False, True, True, False]
    assert CURVE.bytes_per_s == pytest.approx(1e8)
    assert LINK.ranks_per_host == 2


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=9))
def test_a_curve_does_not_fall(sizes: list[float]) -> None:
    """Law: more bytes never take less time, and no time is negative."""
    seconds = [CURVE.seconds_at(size) for size in sorted(sizes)]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a link's values: ``path`` has dots between keys and places."""

    def change(values: dict[str, Any]) -> None:
        *way, last = path.split(".")
        at: Any = values
        for key in way:
            at = at[int(key) if isinstance(at, list) else key]
        at[int(last) if isinstance(at, list) else last] = value

    return change


def renamed(values: dict[str, Any]) -> None:
    """The same in other units."""
    values["one_way"]["alpha_ms"] = 1000 * values["one_way"].pop("alpha_s")["value"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("format", "taciturn.bench"), "this is no link"),
        (changed("version", VERSION + 1), f"version {VERSION + 1}"),
        (changed("version", VERSION - 1), f"version {VERSION - 1}"),
        (changed("version", None), "version None"),
        (renamed, "one_way lacks alpha_s and has alpha_ms: units are in the names"),
        (changed("gamma_s_per_byte", None), "gamma_s_per_byte is null, not an object"),
        (changed("gamma_s_per_byte.value", "1"), 'gamma_s_per_byte.value is "1", not a number'),
        (changed("one_way.alpha_s.value", -1e-3), "one_way.alpha_s: value=-0.001"),
        (changed("one_way.alpha_s.value", float("nan")), "one_way.alpha_s: value=nan"),
        (changed("one_way.alpha_s.high", float("inf")), "one_way.alpha_s: high=inf"),
        (changed("one_way.alpha_s.high", 0.0), "not within its interval"),
        (changed("one_way.beta_s_per_byte", {"value": 0.0, "low": 0, "high": 1}), "one_way: beta"),
        (changed("both_ways.sizes_bytes", [10]), "a line takes two sizes"),
        (changed("both_ways.sizes_bytes", [10, 10, 20]), "a line takes two sizes"),
        (changed("both_ways.seconds", [1, 2]), "2 seconds for 3 sizes_bytes"),
        (changed("both_ways.seconds.0", 0), "both_ways: seconds=0"),
        (changed("both_ways.pieces", []), "pieces begin at"),
        (changed("both_ways.pieces.1.start_s", 0.5), "pieces must meet"),
        (changed("both_ways.pieces.1.beta_s_per_byte", 1e-9), "both are the same number"),
        (changed("ranks", 1), "one rank has no link"),
        (changed("ranks", 3), "pair_bytes_per_s is not 3 x 3"),
        (changed("ranks", 2.0), "ranks is 2.0, not a whole number"),
        (changed("ranks", True), "ranks is true, not a whole number"),
        (changed("hosts", 3), "hosts=3"),
        (changed("rate_bits_per_s", 0), "rate_bits_per_s=0"),
        (changed("pair_bytes_per_s.0.1", -5.0), "pair_bytes_per_s=-5.0"),
        (changed("slow_links.0", [0]), "slow_links[0] has 1 values, not 2"),
        (changed("slow_links.0", [0, 7]), "slow_links=7"),
        (changed("slow_rank", 2), "slow_rank=2"),
        (changed("all_reduce", []), "all_reduce is [], not an object"),
        (changed("all_reduce.fp32.pieces", 3), "all_reduce.fp32.pieces is 3, not a list"),
        (changed("methods.0.elems", []), "methods[0]: elems=[]"),
        (changed("methods.0.seconds", [1.0]), "methods[0]: 1 seconds for 2 elems"),
        (changed("methods.0.method", 3), "methods[0].method is 3, not text"),
        (changed("both_ways.sizes_bytes.0", 0), "both_ways: sizes_bytes=0"),
        (changed("methods.0.elems.0", 0), "methods[0]: elems=0"),
        (changed("methods.0.codec_s.0", 100.0), "coding is a part of them"),
        (changed("warnings", ["red \x1b[31m"]), "no line of plain text"),
        (changed("warnings", ["two\nlines"]), "no line of plain text"),
        (changed("drift", -0.1), "drift=-0.1"),
        (changed("speed", 1), "the link has speed"),
    ],
)
def test_what_is_no_link_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    """Other units, other versions, missing, negative or non-finite values: one line, by name."""
    values = json.loads(json.dumps(LINK.to_json()))
    change(values)
    path = tmp_path / "link.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        Link.read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "[1]", '"x"', "\xff"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    """A damaged file is an error that names it and says what makes one."""
    path = tmp_path / "link.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="taciturn probe --out FILE"):
        Link.read(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """Neither a missing file nor an impossible one is a traceback."""
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        Link.read(tmp_path / "link.json")
    with pytest.raises(InputError, match=r"cannot write .*No such file"):
        LINK.write(tmp_path / "no" / "link.json")

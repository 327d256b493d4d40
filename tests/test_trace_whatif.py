"""Changes: how they are written, what they cost, and predictions against runs of the simulator."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from link_files import make_link
from taciturn.errors import InputError
from taciturn.trace.alphabeta import AlphaBeta, fit_alpha_beta
from taciturn.trace.analysis import Analysis, analyse
from taciturn.trace.codecs import CodecCost, method_key, read_codecs
from taciturn.trace.probed import read_probed
from taciturn.trace.report import Prediction
from taciturn.trace.whatif import Change, parse_change, predict
from test_trace_replay import jobs
from trace_files import own, write
from trace_simulator import Op, Run, documents, simulate


def analysed(runs: list[Run]) -> Analysis:
    with tempfile.TemporaryDirectory() as folder:
        files = enumerate(documents(runs))
        return analyse([write(Path(folder) / f"{i}.json", one) for i, one in files])


def ask(analysis: Analysis, *changes: str, **options: object) -> list[Prediction]:
    asked = [parse_change(one) for one in changes]
    return list(predict(analysis, asked, **options).predictions)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("all_reduce bytes/2", Change("all_reduce bytes/2", "all_reduce", 0.5)),
        ("bytes*2", Change("bytes*2", "", 2.0)),
        ("bandwidth*4", Change("bandwidth*4", "", 0.25)),
        (" bandwidth / 2 ", Change("bandwidth / 2", "", 2.0)),
        ("all_gather latency/10", Change("all_gather latency/10", "all_gather", 1.0, 0.1)),
        ("all_reduce = 0", Change("all_reduce = 0", "all_reduce", 0.0, 0.0)),
        ("all=0", Change("all=0", "", 0.0, 0.0)),
        ("latency = 0", Change("latency = 0", "", 1.0, 0.0)),
        ("all_reduce bytes=0", Change("all_reduce bytes=0", "all_reduce", 0.0, 1.0)),
        (
            "method=quantized:wire=int8, bits=8",
            Change(
                "method=quantized:wire=int8, bits=8",
                "all_reduce",
                method="quantized:bits=8,wire=int8",
            ),
        ),
    ],
)
def test_changes_as_written(text: str, change: Change) -> None:
    """Collective, what of it, and by how much; a method in one spelling."""
    assert parse_change(text) == change


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *[(text, "bandwidth") for text in ("", "faster", "all_reduce = 1", "bytes/x")],
        *[(text, "from 1e-9 to 1e9") for text in ("bytes/0", "bytes*-1", "bandwidth*1e99")],
    ],
)
def test_what_is_no_change_is_refused(text: str, said: str) -> None:
    """With examples, or with the bounds of a factor."""
    with pytest.raises(InputError, match=said):
        parse_change(text)


@settings(max_examples=40)
@given(jobs())
def test_predictions_are_what_then_happens(job: tuple[list[list[Op]], list[int]]) -> None:
    """Half the bytes, twice the time: within 20 us and within the bounds, on two or more ranks."""
    programs, transfers = job
    if len(programs) == 1:
        programs = programs * 2
    analysis = analysed(simulate(programs, transfers))
    line = AlphaBeta(alpha_s=0.0)
    half, double, none = ask(analysis, "bytes/2", "bandwidth/2", "all_reduce = 0", alpha_beta=line)
    for found, factor in ((half, 0.5), (double, 2), (none, 0)):
        changed = simulate(programs, [round(time * factor) for time in transfers])
        done = max(run.done for run in changed) / 1e6
        # Half microseconds round; latencies that did not bind before are not known to 10 us.
        assert found.step_s == pytest.approx(done, abs=20e-6)
        assert found.low_s - 20e-6 <= done <= found.high_s + 20e-6


def test_a_hidden_transfer_predicts_no_change() -> None:
    """A quarter of the bytes of what compute covers: the same step."""
    program = [Op("compute", 100), Op("reduce"), Op("compute", 5000), Op("sync")]
    (found,) = ask(analysed(simulate([program] * 2, [1000])), "all_reduce bytes/4")
    assert found.step_s == found.base_s


def test_latency_stays() -> None:
    """With 400 of 1000 us latency, no bandwidth saves more than 600."""
    program = [Op("compute", 100), Op("reduce", wait=True), Op("compute", 100), Op("sync")]
    analysis = analysed(simulate([program] * 2, [1000]))
    (found,) = ask(analysis, "bandwidth*1e6", alpha_beta=AlphaBeta(alpha_s=400e-6))
    assert found.base_s - found.step_s == pytest.approx(600e-6, abs=1e-6)
    (unknown,) = ask(analysis, "bandwidth*1e6")
    assert (found.low_s, found.high_s) == pytest.approx((found.step_s, found.step_s), abs=20e-6)
    assert unknown.low_s == pytest.approx(found.base_s - 1000e-6, abs=1e-6)
    assert unknown.high_s == pytest.approx(found.base_s, abs=1e-6)


def test_a_codec_may_cost_more_than_it_saves() -> None:
    """A quarter of the bytes, and seconds for coding them, on the stream of the transfer."""
    program = [Op("compute", 100), Op("reduce", wait=True), Op("compute", 100), Op("sync")]
    analysis = analysed(simulate([program] * 2, [1000]))
    fast, slow = CodecCost(0.25, 0, 100e-6), CodecCost(0.25, 0, 900e-6)
    (good,) = ask(analysis, "method=quantized:bits=8", codecs={"quantized:bits=8": fast})
    (bad,) = ask(analysis, "method=quantized:bits=8", codecs={"quantized:bits=8": slow})
    assert good.base_s - good.step_s == pytest.approx(650e-6, abs=1e-6)
    assert bad.step_s - bad.base_s == pytest.approx(150e-6, abs=1e-6)


def test_a_codec_that_is_not_known_is_refused() -> None:
    """So is a collective that the trace does not have."""
    analysis = analyse(own("bucketed"))
    with pytest.raises(InputError, match=r"--link FILE .* --codecs"):
        ask(analysis, "method=quantized:bits=8")
    with pytest.raises(InputError, match="the trace has all_reduce"):
        ask(analysis, "all_gather bytes/2")


def test_a_table_of_codecs(tmp_path: Path) -> None:
    """Read from JSON, in one spelling; what is no such table is refused."""
    path = tmp_path / "codecs.json"
    cost = {"bytes_ratio": 0.26, "codec_s_per_byte": 1e-9}
    path.write_text(json.dumps({"quantized: bits=8": cost}))
    assert read_codecs(path) == {"quantized:bits=8": CodecCost(0.26, 1e-9)}
    for text in ("[]", "{", '{"a": {"b": 1}}', '{"a": {"bytes_ratio": -1, "codec_s_per_byte": 0}}'):
        path.write_text(text)
        with pytest.raises(InputError):
            read_codecs(path)
    with pytest.raises(InputError, match="cannot read"):
        read_codecs(tmp_path / "none.json")


def test_a_probed_link_knows_methods_and_latency(tmp_path: Path) -> None:
    """Bytes and rounds of its ledger, seconds of coding, and the backend's own line."""
    path = tmp_path / "link.json"
    link = make_link(ranks=2, rate_bits_per_s=8e6, alpha_s=1e-3, local_s_per_elem=8e-9)
    link.write(path)
    probed = read_probed(path, analyse(own("bucketed")))
    assert probed.alpha_beta == {"all_reduce": AlphaBeta(2e-3, 1e-6, given=False)}
    assert set(probed.codecs) == {method_key(speed.method) for speed in link.methods}
    int8 = probed.codecs["quantized:bits=8"]
    assert int8.bytes_ratio == pytest.approx(130 / 512, rel=1e-3)
    assert int8.codec_s_per_byte == pytest.approx(2e-9)
    assert int8.codec_s >= 0
    assert probed.codecs["cast:wire=bf16"].bytes_ratio == pytest.approx(0.5, rel=0.01)
    (coded,) = (cost for method, cost in probed.codecs.items() if "passes=16" in method)
    assert coded.codec_s == pytest.approx(30e-3)  # 32 rounds where the backend has 2


def test_what_the_backend_takes_itself_is_not_charged(tmp_path: Path) -> None:
    """It is in the recorded transfers: the backend costs nothing, others what they take beyond."""
    path = tmp_path / "link.json"
    names = ("backend", "ring", "quantized:bits=8")
    seconds = {"backend": 4e-9, "ring": 3e-9, "quantized:bits=8": 12e-9}
    make_link(ranks=2, methods=names, local_s_per_elem=seconds.__getitem__).write(path)
    analysis = analyse(own("bucketed"))
    probed = read_probed(path, analysis)
    assert {k: round(v.codec_s_per_byte * 1e9, 6) for k, v in probed.codecs.items()} == {
        "backend": 0,
        "ring": 0,
        "quantized:bits=8": 2,
    }
    (same,) = ask(analysis, "method=backend", alpha_beta=probed.alpha_beta, codecs=probed.codecs)
    assert same.step_s == pytest.approx(same.base_s, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "backend", "said"),
    [
        (3, "gloo", "between 3 ranks, and all_reduces .* among 2"),
        (2, "nccl", "over nccl, and the trace is of gloo"),
    ],
)
def test_a_probe_of_another_link_is_refused(
    tmp_path: Path, ranks: int, backend: str, said: str
) -> None:
    """What is known of three ranks, or of another backend, is not known of these."""
    path = tmp_path / "link.json"
    replace(make_link(ranks=ranks), backend=backend).write(path)
    with pytest.raises(InputError, match=said):
        read_probed(path, analyse(own("bucketed")))


@pytest.mark.parametrize(("slower", "noted"), [(1, False), (100, True)])
def test_a_link_that_is_not_that_of_the_trace_is_noted(slower: int, noted: bool) -> None:
    """Where what it says of a size is far from what the trace took."""
    analysis = analyse(own("bucketed"))
    (found,) = ask(analysis, "bandwidth*2", alpha_beta=AlphaBeta(0.0, slower * 6e-9))
    assert any("as if on another link" in note for note in found.notes) == noted


def test_the_link_is_fitted_from_sizes() -> None:
    """100 us and 1 ns a byte come back from four sizes; fewer sizes give none."""
    sizes = [100_000, 200_000, 400_000, 800_000]
    program = [op for _ in sizes for op in (Op("compute", 50), Op("reduce", wait=True))]
    runs = simulate([[*program, Op("sync")]] * 2, [100 + size // 1000 for size in sizes])
    for run in runs:
        reduces = [one for one in run.events if "AllReduce" in one["name"]]
        for one, size in zip(reduces, sizes, strict=True):
            one["args"].update({"In msg nelems": size // 4, "dtype": "Float"})
    found = fit_alpha_beta(analysed(runs), "all_reduce")
    assert found.alpha_s == pytest.approx(100e-6, rel=1e-3)
    assert found.beta_s_per_byte == pytest.approx(1e-9, rel=1e-3)
    assert fit_alpha_beta(analyse(own("onebucket")), "all_reduce") == AlphaBeta(given=False)


def test_bounds_hold_the_value() -> None:
    """On our recordings, whatever is asked."""
    analysis = analyse(own("bucketed"))
    codecs = {"quantized:bits=8": CodecCost(0.26, 1e-9)}
    asked = ["=0", "bytes/2", "bytes*3", "bandwidth*4", "latency/2", "method=quantized:bits=8"]
    for found in ask(analysis, *asked, codecs=codecs):
        assert 0 < found.low_s <= found.step_s <= found.high_s
        assert found.base_s == analysis.report.mean.completed_s


def test_a_link_on_which_bytes_cost_nothing() -> None:
    """Given that, more bandwidth saves nothing, and the latency is all of a transfer."""
    analysis = analyse(own("bucketed"))
    more, less, both = (
        ask(analysis, change, alpha_beta=AlphaBeta(None, 0.0))[0]
        for change in ("bandwidth*4", "latency = 0", "all = 0")
    )
    assert more.step_s == more.base_s
    assert less.step_s == both.step_s < both.base_s
    with pytest.raises(InputError, match="both 0"):
        AlphaBeta(0.0, 0.0)

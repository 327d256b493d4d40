"""From a link to a recommendation: what is predicted, what is said of it, and what is refused."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from link_files import METHODS, line, make_link
from taciturn.cost import link_seconds, schedule
from taciturn.errors import InputError, MethodError
from taciturn.link import Link, MethodSpeed
from taciturn.methods import parse
from taciturn.plan import Compute, Model, Plan, auto, make_plan, parse_model
from taciturn.plan.candidates import (
    BASELINES,
    CANDIDATES,
    MOST_LOSS,
    NEAR_LOSS,
    QUALITIES,
    allowed,
    candidate_of,
    key_of,
)
from taciturn.plan.choice import rate_text
from taciturn.plan.exchange import FEEDBACK_PASSES, LEAST_ERROR, ExchangeSeconds, Pricer
from taciturn.plan.model import Buffer
from taciturn.plan.pick import picked_from
from taciturn.plan.quality import losses_of
from taciturn.plan.table import render

GPT = parse_model("gpt-5m")
SMALL = parse_model("gpt-05m")
COMPUTE = Compute(0.3)


def plan(link: Link, model: Model = GPT, **options: object) -> Plan:
    return make_plan(model, link, COMPUTE, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- exchanges


@pytest.mark.parametrize("method", METHODS)
def test_what_was_measured_is_what_is_predicted(method: str) -> None:
    """At each size and the number of ranks of the probe the prediction is the measurement."""
    link = make_link(local_s_per_elem=3e-9)
    speed = next(s for s in link.methods if s.method == method)
    for numel, seconds in zip(speed.elems, speed.seconds, strict=True):
        told = Pricer(link, link.ranks).seconds(method, Buffer(numel, None, 1.0))
        assert told.total_s() == pytest.approx(seconds)
        assert told.notes == ()
        assert told.known


def test_a_method_faster_than_its_closed_form_stays_what_was_measured() -> None:
    """A measurement below the closed form is kept: neither part becomes negative."""
    link = make_link(methods=["ring"])
    (speed,) = link.methods
    fast = replace(speed, seconds=tuple(0.8 * s for s in speed.seconds))
    told = Pricer(replace(link, methods=(fast,)), 4).seconds("ring", Buffer(2**20, None, 1.0))
    assert told.total_s() == pytest.approx(fast.seconds[2])
    assert min(told.rest_s, told.link.latency_s, told.link.transfer_s) >= 0


@given(
    numel=st.integers(1, 2**28),
    ranks=st.sampled_from([2, 3, 4, 64, 4096]),
    method=st.sampled_from([*METHODS, "coded:passes=8", "backend"]),
    factor=st.floats(0.3, 3),
)
@settings(max_examples=150, deadline=None)
def test_no_part_is_negative_and_nothing_is_extrapolated_in_silence(
    numel: int, ranks: int, method: str, factor: float
) -> None:
    """Law: every part is 0 or more; a note stands wherever sizes, ranks or method lie outside."""
    link = make_link(4)
    noisy = [replace(s, seconds=tuple(factor * t for t in s.seconds)) for s in link.methods]
    told = Pricer(replace(link, methods=tuple(noisy)), ranks).seconds(
        method, Buffer(numel, None, 1.0)
    )
    assert min(told.rest_s, told.codec_s, told.link.latency_s, told.link.transfer_s) >= 0
    assert math.isfinite(told.total_s())
    if method == "backend" or "cast" in method:
        wire = 4 if method == "backend" else 2
        inside = 1024 <= wire * numel <= 2**26
    else:
        inside = 1024 <= numel <= 2**23
    measured = ranks == 4 and inside and method != "coded:passes=8"
    assert bool(told.notes) == (not measured)
    assert told.error >= LEAST_ERROR
    if told.notes:
        assert told.error > 0.2


def test_other_ranks_follow_the_closed_form() -> None:
    """At 64 ranks the rounds and bytes are those of 64, the coding that of the probe."""
    link = make_link(4, local_s_per_elem=3e-9)
    numel = 2**20
    told = Pricer(link, 64).seconds("quantized:bits=8", Buffer(numel, None, 1.0))
    made = schedule("quantized:bits=8", numel, 64)
    assert made is not None
    assert told.total_s() == pytest.approx(link_seconds(made, link).total_s + 3e-9 * numel)
    assert told.notes == ("64 ranks, measured with 4",)


def test_what_rounds_cost_is_not_carried_on_with_the_size() -> None:
    """Beyond the largest size 0.1 s of rounds stay 0.1 s, and each element costs what it did."""
    link = make_link(
        methods=["quantized:bits=8"], local_s_per_elem=2e-9, elems=(1024, 2**18, 2**20)
    )
    (speed,) = link.methods
    slow = replace(speed, seconds=tuple(s + 0.1 for s in speed.seconds))
    numel = 2**23
    plain, slower = (
        Pricer(replace(link, methods=(one,)), 4).seconds(one.method, Buffer(numel, None, 1.0))
        for one in (speed, slow)
    )
    assert plain.rest_s == pytest.approx(numel * 2e-9, rel=0.05)
    assert slower.rest_s - plain.rest_s == pytest.approx(0.1)
    assert any("measured from" in note for note in slower.notes)


def test_rounds_that_cost_a_processor_cost_it_for_more_ranks_too() -> None:
    """What the smallest buffer took beyond link and coding is of its rounds: 126 in place of 6."""
    link = make_link(4, local_s_per_elem=3e-9, methods=["quantized:bits=8"])
    (speed,) = link.methods
    slow = replace(speed, seconds=tuple(s + 6e-4 for s in speed.seconds))
    buffer = Buffer(2**20, None, 1.0)
    plain, slower = (
        Pricer(replace(link, methods=(one,)), 64).seconds("quantized:bits=8", buffer).total_s()
        for one in (speed, slow)
    )
    assert slower - plain == pytest.approx(126 * 1e-4)


def test_two_spellings_are_one_method() -> None:
    """A probe's ``cast`` is a plan's ``cast:wire=bf16``; other wires and passes are others."""
    for one, other in (
        ("cast", "cast:wire=bf16"),
        ("backend:wire=bf16", "cast:wire=bf16"),
        ("quantized", "quantized:bits=8"),
        ("quantized:wire=int4,feedback=true", "quantized:bits=4"),
        ("coded", "coded:passes=4,code=polynomial,seed=3"),
        ("mean:over=(ring)", "ring"),
    ):
        assert key_of(one) == key_of(other), (one, other)
    assert len({key_of(c.method) for c in CANDIDATES if not c.stock and c.local_steps == 1}) == len(
        [c for c in CANDIDATES if not c.stock and c.local_steps == 1]
    )


# ------------------------------------------------------------------------------- choice


def test_every_row_has_an_interval_and_says_what_it_costs() -> None:
    """All candidates are in the table, doing nothing and 16 bits among them, fastest first."""
    made = plan(make_link())
    assert {one.name for one in made.predictions} == {c.name for c in CANDIDATES}
    steps = [one.step_s.value for one in made.predictions]
    assert steps == sorted(steps)
    for one in made.predictions:
        assert one.step_s.low < one.step_s.value < one.step_s.high
        assert one.step_s.value >= COMPUTE.step_s + one.exposed_s - 1e-12 >= COMPUTE.step_s - 1e-12
        assert one.codec_s >= 0
        assert one.extrapolated == bool(one.notes)


def test_nothing_is_recommended_where_nothing_is_shown() -> None:
    """On a link that is no bottleneck the answer is DDP as it is, with the nearest method's loss;
    a slower one changes it, and the sentence says where.
    """
    made = plan(make_link(4, 100e9, local_s_per_elem=5e-9))
    chosen = made.recommendation
    assert chosen.name in BASELINES
    assert chosen.gain_s == 0
    assert "slower" in chosen.sentence or "within the uncertainty" in chosen.sentence
    assert "below" in chosen.sentence


@given(
    rate=st.floats(1e6, 1e12),
    alpha=st.floats(1e-6, 1e-2),
    local=st.floats(0, 5e-8),
    cores=st.sampled_from([1, 4, 64]),
    quality=st.sampled_from(QUALITIES),
)
@settings(max_examples=60, deadline=None)
def test_a_method_is_recommended_only_if_it_is_shown_faster(
    rate: float, alpha: float, local: float, cores: int, quality: str
) -> None:
    """Law: what is recommended is DDP's own, or beats the better of fp32 and bf16 by more than both
    predictions may err together, was measured, and meets the demand.
    """
    made = plan(make_link(4, rate, alpha, cores=cores, local_s_per_elem=local), quality=quality)
    by_name = {one.name: one for one in made.predictions}
    base = min((by_name[name] for name in BASELINES), key=lambda one: one.step_s.value)
    chosen = by_name[made.recommendation.name]
    if chosen.stock:
        assert chosen == base
        return
    assert base.step_s.value - chosen.step_s.value >= math.hypot(base.half_s, chosen.half_s)
    assert chosen.known
    assert allowed(candidate_of(chosen.method), made.quality)
    assert chosen.local_steps == 1


def test_the_crossover_is_where_the_choice_changes() -> None:
    """A link of a rate just below the crossover gets one answer, just above it the other."""
    link = make_link(4, 200e6, local_s_per_elem=5e-9)
    methods = "quantized:bits=8"
    made = plan(link, methods=methods)
    assert made.recommendation.name == methods
    (crossover,) = made.recommendation.crossovers
    assert crossover.below == methods
    assert crossover.above in BASELINES
    assert f"above {rate_text(crossover.rate_bits_per_s)} plain {crossover.above} wins" in (
        made.recommendation.sentence
    )
    for factor, name in ((0.98, methods), (1.02, crossover.above)):
        scale = 200e6 / (factor * crossover.rate_bits_per_s)
        beta = 8 / 200e6 * scale
        # The backend's curve and the speeds have the same part that is bytes.
        other = make_link(4, 8 / beta, local_s_per_elem=5e-9)
        assert plan(other, methods=methods).recommendation.name == name


def test_what_gains_next_to_nothing_is_not_recommended() -> None:
    """A step of minutes is not made another algorithm's for a second, however sure that is."""
    made = make_plan(GPT, make_link(4, 200e6), Compute(300.0))
    assert made.recommendation.name in BASELINES
    assert "would gain" in made.recommendation.sentence
    assert "less than 1% of it" in made.recommendation.sentence
    assert plan(make_link(4, 200e6)).recommendation.name not in BASELINES


def test_measurements_that_contradict_their_line_are_told_of() -> None:
    """A file that was edited, or one outlier of x20, is not planned with in silence."""
    link = make_link(4)
    curve = link.all_reduce["bf16"]
    odd = replace(curve, seconds=(*curve.seconds[:-1], 20 * curve.seconds[-1]))
    made = plan(replace(link, all_reduce={**link.all_reduce, "bf16": odd}))
    (said,) = (note for note in made.notes if "do not trust this plan" in note)
    assert "all_reduce of bf16" in said
    assert "by a factor of 20" in said
    assert not any("do not trust" in note for note in plan(link).notes)


def test_a_method_of_the_link_that_nobody_knows_is_the_links_fault() -> None:
    """It is not said as if --methods were wrong."""
    link = make_link(4)
    odd = replace(link.methods[0], method="foo")
    with pytest.raises(InputError, match="the link has a method that is not known"):
        plan(replace(link, methods=(odd,)))


def test_many_buffers_are_joined_on_the_timeline() -> None:
    """As many as anybody has are planned with in the same way: seconds differ by little."""
    sizes = [1 << 14] * 5000
    many, few = (Model("m", sizes=tuple(some)) for some in (sizes, sizes[: 1 << 10]))
    link = make_link(4, alpha_s=0.0)
    steps = [plan(link, model).predictions for model in (many, few)]
    by_name = [{p.name: p for p in predictions} for predictions in steps]
    for name, row in by_name[0].items():
        exchange_s = by_name[1][name].exchange_s * len(sizes) / (1 << 10)
        assert row.exchange_s == pytest.approx(exchange_s, rel=0.01)
        assert row.step_s.value >= COMPUTE.step_s


def test_quality_decides_what_may_be_recommended() -> None:
    """Replicas that differ are never recommended where every one must be right."""
    link = make_link(
        8, 20e6, local_s_per_elem=lambda m: 0.0 if m.startswith(("co", "to")) else 4e-6
    )
    assert plan(link).recommendation.name in (*BASELINES, "ring", "quantized:bits=8")
    assert plan(link, quality="mean").recommendation.name.startswith("coded")
    assert plan(link, quality="any").recommendation.name.startswith("topk")
    losing = plan(link, quality="loss").recommendation.name
    assert allowed(candidate_of(losing), "loss")
    assert not losing.startswith("topk")
    assert {c.name for c in CANDIDATES if c.quality == "every-replica"} == {
        *("DDP, fp32", "DDP, bf16 hook", "DDP, fp16 hook", "cast:wire=bf16", "ring"),
        *("quantized:bits=8", "direct:bits=8"),
    }
    for text, quality in (
        ("quantized:bits=4", "any"),
        ("quantized:bits=8,feedback=true", "any"),
        ("mean:over=(coded:passes=4)", "mean"),
        ("quantized:wire=bf16", "every-replica"),
    ):
        assert candidate_of(text).quality == quality


def second(values: tuple[Any, ...] | None, one: Any) -> tuple[Any, ...]:
    """The values with another one in the second place."""
    assert values is not None
    return (values[0], one, *values[2:])


def test_a_probe_of_other_sizes_is_told_of() -> None:
    """With one of the model itself, and with sizes alone, there is nothing better to be had."""
    says = "taciturn probe --model is surer"
    (group,) = SMALL.groups()
    assert any(says in note for note in plan(make_link()).notes)
    own = make_link(elems=(1 << 14, group.numel))
    assert not any(says in note for note in plan(own, SMALL).notes)
    assert not any(says in note for note in plan(make_link(), parse_model("25MiB,3MiB")).notes)


@pytest.mark.parametrize("method", ["quantized:bits=8", "powersgd:rank=8"])
def test_what_was_timed_on_the_models_own_groups_is_known_best(method: str) -> None:
    """There the prediction is the measurement, without an interpolation's error.

    Nor with that of other shapes, where as many bytes were sent.
    """
    (group,) = SMALL.groups()
    link = make_link(8, 200e6, elems=(1 << 14, 1 << 17, 1 << 22), methods=["quantized:bits=8"])
    told = schedule(parse(method), group.numel, 8, shapes=group.shapes)
    assert told is not None
    (speed,) = link.methods
    # The middle size is off the line of the others, and is now the model's own.
    own = replace(
        speed,
        method=method,
        elems=second(speed.elems, group.numel),
        seconds=second(speed.seconds, 0.3),
        link_s=second(speed.link_s, link_seconds(told, link).total_s),
        rounds=second(speed.rounds, told.rounds),
        sent_bytes=second(speed.sent_bytes, told.sent_bytes),
    )

    def priced(speed: MethodSpeed) -> ExchangeSeconds:
        return Pricer(replace(link, methods=(speed,)), 8).seconds(method, group)

    made = priced(own)
    assert made.total_s() == pytest.approx(0.3)
    assert made.own_error == pytest.approx(LEAST_ERROR)
    others = priced(replace(own, sent_bytes=second(own.sent_bytes, 2 * told.sent_bytes)))
    assert (others.own_error > made.own_error) == (method == "powersgd:rank=8")
    assert priced(replace(own, elems=second(own.elems, group.numel // 3))).own_error > 0.05


def test_what_is_as_good_by_its_loss_is_so_in_the_committed_tables() -> None:
    """The demand ``loss`` is met by what was measured within the margin, and by nothing else."""
    for candidate in CANDIDATES:
        losses = losses_of(candidate)
        if candidate.local_steps > 1:
            assert candidate.quality == "any"
        elif losses is not None:
            most = NEAR_LOSS if candidate.quality in ("loss", "any") else MOST_LOSS
            assert (losses.ratio > most) == (candidate.quality == "any")
        else:
            assert candidate.quality == "every-replica"


def test_a_choice_that_costs_loss_says_so() -> None:
    """Nobody reads a table below the sentence."""
    link = make_link(8, 20e6, local_s_per_elem=lambda m: 0.0 if m.startswith("to") else 4e-6)
    made = plan(link, quality="any")
    losses = made.losses[made.recommendation.name]
    assert f"its loss was {losses.ratio - 1:.1%} higher in the committed runs" in (
        made.recommendation.sentence
    )
    assert "loss" not in plan(link).recommendation.sentence


def test_a_method_that_was_not_measured_is_shown_but_not_recommended() -> None:
    """Its coding is unknown: the row says so, its interval is wide, and it never wins."""
    made = plan(make_link(8, 20e6, methods=["ring"]), methods="coded:passes=8; ring", quality="any")
    coded = next(one for one in made.predictions if one.name == "coded:passes=8")
    assert not coded.known
    assert "not measured" in coded.notes[0]
    assert made.recommendation.name != "coded:passes=8"


def test_extrapolated_ranks_are_marked_everywhere() -> None:
    """For ranks that were not probed, rows, sentence and notes say so, and intervals widen."""
    link = make_link(4)
    far = plan(link, ranks=4096)
    assert all(one.extrapolated for one in far.predictions)
    assert "(extrapolated)" in far.recommendation.sentence
    assert any("measured with 4 ranks" in note for note in far.notes)
    near = plan(link)
    widths = [
        next(one for one in made.predictions if one.name == "DDP, fp32").half_s
        for made in (near, far)
    ]
    assert widths[1] > 2 * widths[0]
    assert far.to_json()["predictions"][0]["extrapolated"]


def test_rounds_that_nobody_has_seen_are_no_gain() -> None:
    """A short call between 4 ranks says little of 8190 rounds between 4096; of bytes it does."""
    slow_to_start = make_link(4, 1e9, 1e-3, methods=["ring"])
    later = {
        dtype: line(10 * fit.alpha_s.value, fit.beta_s_per_byte.value)
        for dtype, fit in slow_to_start.all_reduce.items()
    }
    far = plan(replace(slow_to_start, all_reduce=later), parse_model("1MiB"), ranks=4096)
    assert far.recommendation.name in BASELINES
    assert "ring, would gain" in far.recommendation.sentence
    of_bytes = plan(make_link(4, 1e8, 1e-6), parse_model("gpt-50m"), ranks=64)
    assert of_bytes.recommendation.name not in BASELINES


def test_sizes_of_buckets_leave_out_what_needs_shapes() -> None:
    """PowerSGD's bytes depend on matrices: with sizes alone it is left out, with the reason."""
    made = plan(make_link(), parse_model("25MiB,25MiB,3MiB"), quality="any")
    assert {name for name, _ in made.left_out} == {
        c.name for c in CANDIDATES if c.method.startswith("powersgd")
    }
    assert not any("powersgd" in one.method for one in made.predictions)


def test_cores_that_are_shared_slow_backward() -> None:
    """Coding beside backward costs more where ranks have no core each, and the plan says so."""
    model = parse_model(",".join(["1MiB"] * 20))
    steps = []
    for cores in (64, 2):
        made = plan(make_link(4, 1e9, cores=cores, local_s_per_elem=2e-8), model)
        steps.append(next(p for p in made.predictions if p.name == "quantized:bits=8").step_s.value)
    assert steps[1] > steps[0] * 1.05
    assert any("share 2 cores" in note for note in made.notes)


def test_passes_over_gradients_wait_for_ranks_that_share_the_cores() -> None:
    """Error feedback costs its passes as often as there are ranks to a core."""

    def feedback_s(cores: int) -> float:
        link, buffer = make_link(8, cores=cores), Buffer(2**20, None, 1.0)
        plain, fed = (
            Pricer(link, 8).seconds(f"quantized:bits=8{more}", buffer).total_s()
            for more in ("", ",feedback=true")
        )
        return fed - plain

    passes_s = FEEDBACK_PASSES * 4 * 2**20 * 1e-10
    for cores, ranks_to_a_core in ((16, 1), (8, 1), (4, 2), (2, 4)):
        assert feedback_s(cores) == pytest.approx(ranks_to_a_core * passes_s)


def test_the_further_a_size_is_beyond_the_probe_the_less_is_known() -> None:
    """Of coding, which is carried on; what the closed form says of the link is known."""

    def errors(local_s_per_elem: float) -> list[float]:
        pricer = Pricer(make_link(local_s_per_elem=local_s_per_elem), 4)
        sizes = (2**23, 2**24, 2**26, 2**28)
        return [pricer.seconds("quantized:bits=8", Buffer(n, None, 1.0)).error for n in sizes]

    inside, *beyond = errors(1e-6)  # nearly all of it is coding
    assert inside == pytest.approx(LEAST_ERROR)
    assert beyond == pytest.approx([0.25, 0.75, 1.25], rel=0.1)
    assert errors(0.0)[1:] == pytest.approx([math.hypot(LEAST_ERROR, 0.25)] * 3)


def test_losses_come_with_their_source() -> None:
    """Figures of quality are those of the committed tables, and name them."""
    quantized = losses_of(candidate_of("quantized:bits=8"))
    assert quantized is not None
    assert "benchmarks/ddp_losses.json" in quantized.source
    assert losses_of(candidate_of("quantized:wire=fp16,segments=7")) is None
    local = next(c for c in CANDIDATES if c.name == "local SGD, H=4")
    found = losses_of(local)
    assert found is not None
    assert "local_updates.json" in found.source


def test_the_table_of_losses_is_made_from_the_benchmarks() -> None:
    """``quality.json`` is what ``benchmarks/plan_quality.py`` makes of the committed tables."""
    import runpy

    script = Path(__file__).resolve().parent.parent / "benchmarks" / "plan_quality.py"
    if not script.exists():
        pytest.skip("the benchmarks are not part of this source distribution")
    made = runpy.run_path(str(script))
    assert json.loads(made["TARGET"].read_text()) == made["summary"]()


def test_auto_gives_a_method_to_attach() -> None:
    """What comes back parses, and is what the plan recommends; no compute means none is hidden."""
    link = make_link(4, 20e6, local_s_per_elem=1e-9)
    for model in (GPT, "gpt-5m"):
        method = auto(model, link, step_compute_s=0.3)
        assert method == plan(link).recommendation.method
        parse(method)
    assert auto(GPT, make_link(4, 1e12)) in ("backend", "cast:wire=bf16")
    with pytest.raises(InputError, match="model=3"):
        auto(3, link)  # type: ignore[arg-type]


def test_auto_probes_what_it_may_pick_and_says_why() -> None:
    """``ddp.attach(model, "auto")``: only methods that keep replicas alike are probed, what is
    picked parses, and its exchanges' seconds are there to be compared.
    """
    asked: list[str] = []

    def probe(methods: tuple[str, ...]) -> Link:
        asked.extend(methods)
        return make_link(4, 20e6, methods=methods)

    picked = picked_from(GPT, probe)
    assert {key_of(method) for method in asked} == {
        key_of(c.method) for c in CANDIDATES if c.quality == "every-replica"
    }
    assert parse(picked.method).name in ("quantized", "direct")
    assert picked.method in picked.sentence
    assert picked.plan is not None
    row = next(one for one in picked.plan.predictions if one.name == picked.method)
    assert picked.exchange_s == row.exchange_s > 0
    nothing = picked_from(GPT, lambda methods: make_link(4, 1e12, methods=methods))
    assert nothing.method in ("backend", "cast:wire=bf16")
    assert nothing.exchange_s is not None
    assert nothing.exchange_s > 0


def test_auto_without_a_usable_probe_compresses_nothing() -> None:
    """Times that tell nothing are no reason to stop a run, and none to compress."""

    def probe(methods: tuple[str, ...]) -> Link:
        raise InputError("the times do not grow with size")

    picked = picked_from(GPT, probe)
    assert picked.method == "backend"
    assert "do not grow" in picked.sentence
    assert picked.exchange_s is None


def test_the_page_says_it_all() -> None:
    """The text holds the sentence, every row, and the marks of rows that need one."""
    from rich.console import Console

    made = plan(make_link(4, 50e6), quality="mean", ranks=8)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(made))
    text = console.export_text()
    for word in (
        made.recommendation.sentence[:60],
        *(c.name.split(",")[0] for c in CANDIDATES),
        *("extrapolated", "other algorithm", "needs any", "unmeasured", "ddp_losses.json", "> "),
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [(1.94e9, "1.9 Gbit/s"), (999e6, "1 Gbit/s"), (2.5e5, "250 kbit/s"), (12.0, "12 bit/s")],
)
def test_rates_are_told_to_two_digits(bits_per_s: float, text: str) -> None:
    """A crossover is known to no more."""
    assert rate_text(bits_per_s) == text


def test_a_backend_that_is_no_ring_says_nothing_of_the_link() -> None:
    """A backend three times as fast as a ring could be (a tree, a switch that adds) is taken as
    measured; the link's rate stays what messages showed, and crossovers are counted in that.
    """
    link = make_link(4, 200e6)
    fast = {
        dtype: line(fit.alpha_s.value / 3, fit.beta_s_per_byte.value / 3)
        for dtype, fit in link.all_reduce.items()
    }
    made = plan(replace(link, all_reduce=fast))
    assert made.rate_bits_per_s == pytest.approx(200e6)
    told = Pricer(replace(link, all_reduce=fast), 4).seconds("backend", Buffer(2**20, None, 1.0))
    assert told.total_s() == pytest.approx(fast["fp32"].seconds[3])


def test_rates_are_bits_in_base_10() -> None:
    """A link of 1 GiB in a second carries 8.59 Gbit/s, not 8."""
    made = plan(make_link(4, 8 * 2**30))
    assert made.rate_bits_per_s == pytest.approx(8.589934592e9)
    assert "this link carries 8.6 Gbit/s" in made.recommendation.sentence


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ranks": 1}, InputError, "ranks=1.*nobody to average with"),
        ({"ranks": 0}, InputError, "ranks=0"),
        ({"ranks": 10**7}, InputError, "ranks=10000000"),
        ({"quality": "best"}, InputError, "every-replica, mean, loss, any"),
        ({"methods": "topk"}, InputError, "none of them meets that"),
        ({"methods": "tpok"}, MethodError, "topk"),
        ({"methods": "coded:spread_budget=0.1", "quality": "mean"}, InputError, "give passes"),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    """One clear line says what was wrong and what to do."""
    with pytest.raises(error, match=words):
        plan(make_link(), **options)


def test_a_link_without_the_backends_curve_is_refused() -> None:
    """Without the baseline there is nothing to beat."""
    with pytest.raises(InputError, match="probe it again"):
        plan(replace(make_link(), all_reduce={}))


@pytest.mark.parametrize("step_s", [-1.0, math.nan, math.inf])
def test_compute_must_be_seconds(step_s: float) -> None:
    """Negative and non-finite seconds are refused by name."""
    with pytest.raises(InputError, match="step_s"):
        Compute(step_s)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_backward_is_a_share(share: float) -> None:
    """A share lies between 0 and 1."""
    with pytest.raises(InputError, match="backward_share"):
        Compute(1.0, share)


def test_a_curve_ascends() -> None:
    """A curve of gradients that goes back, or does not end at 1, is refused."""
    for made, at in (((0, 0.5), (0, 1)), ((0, 0.7, 0.5, 1), (0, 0.1, 0.2, 1)), ((0, 1), (0, 0, 1))):
        with pytest.raises(InputError):
            Compute(1.0, 0.5, made, at)


def test_a_link_with_nothing_but_two_sizes_is_enough_and_says_where_it_ends() -> None:
    """A short probe gives a plan; buffers beyond its sizes are marked."""
    short = make_link(elems=(1024, 4096))
    bare = replace(
        short,
        all_reduce={"fp32": line(1e-3, 4e-8, (1024, 4096))},
    )
    made = plan(bare)
    assert all(one.extrapolated for one in made.predictions)
    assert any("measured from" in note for one in made.predictions for note in one.notes)

"""The table of methods against the constructors that it builds."""

from __future__ import annotations

import dataclasses
import inspect
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn import aggregators, collectives, methods
from taciturn.aggregators import Aggregator, Mean
from taciturn.collectives import Backend, CodedRing, Collective, Direct, QuantizedRing, Ring
from taciturn.error_feedback import ErrorFeedback
from taciturn.errors import CodeError, InputError, MethodError
from taciturn.methods import (
    Key,
    Method,
    MethodSpec,
    Value,
    aggregator,
    build,
    describe,
    parse,
    spell,
    table,
)

SPECS = {spec.name: spec for spec in table()}
KEYS = [
    pytest.param(spec, key, id=f"{spec.name}-{key.name}") for spec in table() for key in spec.keys
]
EACH_METHOD = pytest.mark.parametrize("spec", table(), ids=SPECS)
EACH_KEY = pytest.mark.parametrize(("spec", "key"), KEYS)

# What a key needs beside it to have a meaning at all.
BESIDE = {
    ("coded", "passes"): "code=fourier",
    ("coded", "stretch"): "code=fourier",
    ("coded", "nodes"): "code=vandermonde",
    ("coded", "components"): "code=vandermonde",
    ("coded", "block"): "wire=int8",
    ("coded", "rounding"): "wire=bf16",
}


def constructor(spec: MethodSpec) -> Any:
    """The class that the row builds."""
    return getattr({"collectives": collectives, "aggregators": aggregators}[spec.package],
                   spec.constructor)  # fmt: skip


def made(text: str) -> Any:
    """What the method names, without error feedback: a collective or an aggregator."""
    if parse(text).name in {spec.name for spec in table("collectives")}:
        return build(text)
    built = aggregator(text)
    return built.inner if isinstance(built, ErrorFeedback) else built


def fields(spec: MethodSpec) -> dict[str, Any]:
    """Constructor keywords and their defaults; a default that is made anew each time is None."""
    signature = inspect.signature(constructor(spec))
    return {
        name: None if parameter.default is dataclasses._HAS_DEFAULT_FACTORY else parameter.default  # type: ignore[attr-defined]
        for name, parameter in signature.parameters.items()
    }


def write(spec: MethodSpec, key: Key, value: object) -> str:
    """The method with this key, and with what the key needs beside it."""
    beside = BESIDE.get((spec.name, key.name))
    return f"{spec.name}:{key.name}={value}" + (f",{beside}" if beside else "")


@EACH_METHOD
def test_table_is_the_constructors_signatures(spec: MethodSpec) -> None:
    """Keys and defaults are the constructor's keywords and defaults, in one place each."""
    told = {key.name: key.default for key in spec.keys if not key.alias_of}
    told.pop("feedback", None)  # a wrapper around what is built
    assert told == fields(spec)


@pytest.mark.parametrize(
    ("package", "contract"), [(collectives, Collective), (aggregators, Aggregator)]
)
def test_everything_exported_has_a_method(package: Any, contract: type) -> None:
    """The table names all concrete classes that the packages export, and no other."""
    exported = {
        name
        for name in package.__all__
        if inspect.isclass(found := getattr(package, name))
        and issubclass(found, contract)
        and not inspect.isabstract(found)
    }
    own = package.__name__.rpartition(".")[2]
    assert {spec.constructor for spec in table(own)} == exported


@EACH_METHOD
def test_defaults_build(spec: MethodSpec) -> None:
    """A bare name builds the collective with the constructor's defaults."""
    built = made(spec.name)
    assert type(built) is constructor(spec)
    told = {name: value for name, value in fields(spec).items() if name != "over"}
    assert {name: getattr(built, name) for name in told} == told


@EACH_KEY
def test_choices_are_what_the_constructor_takes(spec: MethodSpec, key: Key) -> None:
    """Every choice in the table builds, and no choice of another key would have built."""
    if key.type != "choice":
        assert all(made(write(spec, key, choice)) for choice in key.choices)
        return
    everything = {choice for other in table() for known in other.keys for choice in known.choices}
    for word in sorted({*map(str, everything), "nonsense"}):
        text = f"{spec.name}:{key.name}={word}"
        beside = BESIDE.get((spec.name, key.name), "")
        options = {key.name: word, **dict(pair.split("=") for pair in beside.split(",") if pair)}
        if word in key.choices:
            assert made(write(spec, key, word))
        else:
            with pytest.raises(MethodError):
                parse(text)
            with pytest.raises((InputError, CodeError)):
                constructor(spec)(**options)


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        pytest.param(spec, key, id=f"{spec.name}-{key.name}")
        for spec in table()
        for key in spec.keys
        if key.type in {"int", "float"} and not key.choices
    ],
)
def test_numbers_reach_as_far_as_the_constructor_lets_them(spec: MethodSpec, key: Key) -> None:
    """At a bound in the table a method builds; beyond it table and constructor refuse."""
    step = 1 if key.type == "int" else 1e-3
    beside = BESIDE.get((spec.name, key.name), "")
    needed = dict(pair.split("=") for pair in beside.split(",") if pair)
    for bound, outward in ((key.minimum, -step), (key.maximum, step)):
        if bound is None:
            continue
        inside = bound + step if key.open and outward < 0 else bound
        value = int(inside) if key.type == "int" else inside
        assert made(write(spec, key, value))
        with pytest.raises(MethodError, match="at position"):
            parse(write(spec, key, value + outward))
        with pytest.raises((InputError, CodeError), match=key.name):
            constructor(spec)(**needed, **{key.name: value + outward})


def test_options_reach_the_constructor() -> None:
    """What is written is what is built."""
    built = build("coded: passes=16, code=fourier, stretch=0.7, shuffle=true, wire=bf16, seed=3")
    assert isinstance(built, CodedRing)
    assert (built.passes, built.code, built.stretch) == (16, "fourier", 0.7)
    assert (built.shuffle, built.wire, built.seed) == (True, "bf16", 3)
    assert vars(build("ring:segments=3")) == vars(Ring(segments=3))
    assert vars(build("backend:wire=bf16")) == vars(Backend(wire="bf16"))


def test_aggregators_from_names() -> None:
    """Collectives become means; biased methods get feedback unless told otherwise."""
    assert isinstance(aggregator("quantized:bits=8"), Mean)
    assert isinstance(aggregator("quantized:bits=4,feedback=true"), ErrorFeedback)
    assert isinstance(aggregator("powersgd"), ErrorFeedback)
    assert not isinstance(aggregator("powersgd:feedback=false"), ErrorFeedback)
    nested = aggregator("mean:over=(coded:passes=2)")
    assert isinstance(nested, Mean)
    assert isinstance(nested.over, CodedRing)
    assert nested.over.passes == 2


@pytest.mark.parametrize("text", ["powersgd", "topk:ratio=0.1", "cast", "quantized:feedback=true"])
def test_what_needs_training_is_no_collective(text: str) -> None:
    """A single all-reduce has no step to feed back to, and no factors to warm-start from."""
    with pytest.raises(MethodError, match="training"):
        build(text)


@pytest.mark.parametrize(("bits", "wire"), [(8, "int8"), (4, "int4")])
def test_bits_is_a_shorthand_for_wire(bits: int, wire: str) -> None:
    """``bits=4`` builds what ``wire=int4`` builds, also if both are given."""
    for name, made in (("quantized", QuantizedRing(wire=wire)), ("direct", Direct(wire=wire))):
        for options in (f"bits={bits}", f"wire={wire}", f"wire={wire},bits={bits}"):
            assert vars(build(f"{name}:{options}")) == vars(made)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qantized:bits=8", "did you mean 'quantized'?"),
        ("coded:pases=4", "did you mean 'passes'?"),
        ("coded:passes=0", "it takes whole number, 1 to 128"),
        ("coded:code=furier", "did you mean 'fourier'?"),
        ("coded:wire=int4", "did you mean 'int8'?"),
        ("quantized:bits=8,wire=bf16", "'wire' contradicts 'bits'"),
        ("diloco:steps=16,compress=(quantized:bits=4)", "unknown method 'diloco', at position 1"),
        ("ring:segments=(quantized:bits=4)", "'segments' cannot be a method, at position 15"),
        (
            "powersgd:over=ring",
            "'over' is a method, at position 15; write it in parentheses: over=(ring)",
        ),
    ],
)
def test_wrong_method_strings(text: str, says: str) -> None:
    """A slip of the pen gets its position, and the name that was meant."""
    with pytest.raises(MethodError) as caught:
        build(text)
    assert says in str(caught.value)
    assert "at position" in str(caught.value)


def test_impossible_together_is_the_constructor_s_error() -> None:
    """Options that are possible one by one but not together are refused when building."""
    parsed = parse("coded:eps=0.1,code=fourier")
    with pytest.raises(CodeError, match="eps"):
        build(parsed)


def test_a_method_made_by_hand_must_be_in_the_table() -> None:
    """``build`` and ``describe`` refuse a Method whose name nobody knows."""
    stranger = Method("rong", "rong", {})
    for use in (build, describe):
        with pytest.raises(MethodError, match="did you mean 'ring'"):
            use(stranger)


def values(key: Key) -> st.SearchStrategy[Value]:
    """All that the table lets stand for a key."""
    if key.choices:
        return st.sampled_from(key.choices)
    if key.type == "bool":
        return st.booleans()
    if key.type == "method":
        return st.sampled_from([parse("ring"), parse("coded:passes=2,code=fourier")])
    highest = math.inf if key.maximum is None else key.maximum
    lowest = 0 if key.minimum is None else key.minimum
    if key.type == "int":
        return st.integers(int(lowest), int(min(highest, 10**12)))
    return st.floats(lowest, min(highest, 1e300), exclude_min=key.open)


@st.composite
def written(draw: st.DrawFn) -> tuple[str, str, dict[str, Value]]:
    """A method as text, and what it says."""
    spec = draw(st.sampled_from(table()))
    keys = draw(st.permutations([key for key in spec.keys if not key.alias_of]))
    chosen = keys[: draw(st.integers(0, len(keys)))]
    options = {key.name: draw(values(key)) for key in chosen}
    blank = draw(st.sampled_from(["", " ", "\n "]))
    pairs = [
        f"{name}{blank}={blank}"
        + (
            f"({value.text})"
            if isinstance(value, Method)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
        for name, value in options.items()
    ]
    text = spec.name + (f":{blank}" if pairs else "") + f"{blank},".join(pairs)
    return text, spec.name, options


@given(st.lists(written(), min_size=1, max_size=4))
def test_round_trip(some: list[tuple[str, str, dict[str, Value]]]) -> None:
    """Any options of any method survive writing and reading; the text is kept as it was."""
    texts = [text for text, _, _ in some]
    read = methods.parse_list(" ; ".join(texts))
    assert [(method.name, dict(method.options)) for method in read] == [
        (name, options) for _, name, options in some
    ]
    assert [method.text for method in read] == [text.strip() for text in texts]
    assert [parse(spell(method)) for method in read] == read


def options_of(method: Method) -> dict[str, Value]:
    """What a method says: shorthands written out, defaults left out."""
    keys = {key.name: key for key in SPECS[method.name].keys}
    said = dict(keys[name].written_out(value) for name, value in method.options.items())
    return {name: value for name, value in said.items() if value != keys[name].default}


@pytest.mark.parametrize(
    ("spec", "key"), [param for param in KEYS if param.values[0].package == "collectives"]
)
def test_spelled_methods_build_the_same(spec: MethodSpec, key: Key) -> None:
    """``str`` of a collective is the method that builds it, whatever its options were."""
    if key.name == "feedback":  # of training; no collective has it
        return
    numbers = [n for n in (key.minimum, 1 / 3, 3, key.maximum) if n is not None]
    some: dict[str, list[Any]] = {
        "bool": ["true", "false"],
        "int": [int(n) for n in numbers if n in (key.minimum, key.maximum, 3)],
        "float": [n for n in numbers if n and n <= (key.maximum or n)],
    }
    for value in key.choices or some[key.type]:
        if key.name == "block" and value == 3:
            continue
        method = parse(write(spec, key, value))
        built = build(method)
        spelled = str(built)
        assert options_of(parse(spelled)) == dict(parse(spelled).options) == options_of(method)
        assert built.method == parse(spelled)
        assert repr(build(spelled)) == repr(built)


@pytest.mark.parametrize(
    "text",
    [
        "ring",
        "backend:wire=bf16,check=false",
        "coded:passes=16,code=fourier,stretch=0.7,shuffle=true,seed=3,ranks_per_host=2,wire=int8",
        "coded:components=33,code=vandermonde,eps=1e-05,nodes=roots,decode=least_squares",
        "coded:orthonormal=false,wire=bf16,rounding=stochastic,segments=3,inplace=true",
        "coded:wire=int8,block=64,spread_budget=0.3,mean_error_budget=0.01",
        "quantized:wire=int4,block=64,rounding=stochastic,segments=2,seed=5",
    ],
)
def test_a_collective_is_spelled_as_it_was_written(text: str) -> None:
    """Keys in the table's order, none at its default: the very same text."""
    assert str(build(text)) == text


BUDGETS = ["spread_budget=0.3", "mean_error_budget=0.3", "spread_budget=0.3,mean_error_budget=1"]


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(
    "given",
    [
        "passes=4",
        "passes=8",
        "components=9",
        "code=polynomial",
        "code=fourier",
        "eps=0.1",
        "stretch=1",
        "nodes=near_one",
        "orthonormal=false",
        "decode=least_squares",
    ],
)
def test_what_budgets_choose_is_not_given_too(given: str, budgets: str) -> None:
    """A key beside a budget would be ignored, also at its default: refused, with what to drop."""
    name = given.split("=")[0]
    said = " and ".join(pair.split("=")[0] for pair in budgets.split(","))
    with pytest.raises(InputError, match=f"{name}=.* beside {said}: .* drop {name}, or {said}"):
        build(f"coded:{budgets},{given}")


@pytest.mark.parametrize("budgets", BUDGETS)
def test_what_budgets_heed_is_given_beside_them(budgets: str) -> None:
    """All other keys go with budgets."""
    others = "decode=centred,shuffle=true,seed=1,ranks_per_host=2,wire=int8,block=64,segments=2"
    assert isinstance(
        build(f"coded:{budgets},{others},rounding=stochastic,inplace=true"), CodedRing
    )


@EACH_METHOD
def test_describe_tells_options_and_defaults(spec: MethodSpec) -> None:
    """A description starts with the summary, and names each default that is a value."""
    told = describe(spec.name)
    assert told.startswith(spec.summary)
    for key in spec.keys:
        if key.default is not None:
            assert f"{key.name}={key.default_words}" in told
    assert "\n" not in told


def test_describe_tells_what_was_given_first() -> None:
    """Options stand before the defaults, and shorthands are written out."""
    told = describe("quantized: block=64, bits=4")
    assert told.startswith(f"{SPECS['quantized'].summary}; block=64, wire=int4; default rounding=")


@EACH_KEY
def test_every_key_is_explained(spec: MethodSpec, key: Key) -> None:
    """Each key says what it means, and what holds without it."""
    assert key.meaning
    assert key.default_words


def test_rows_cannot_be_changed_from_outside() -> None:
    """The table is a new list of frozen rows each time."""
    rows = table()
    rows.clear()
    assert table()
    with pytest.raises(dataclasses.FrozenInstanceError):
        table()[0].name = "other"  # type: ignore[misc]


def test_parsing_needs_no_torch() -> None:
    """Names can be checked, listed and described before torch is loaded."""
    code = (
        "import sys; from taciturn.methods import describe, parse_list, table;"
        "[describe(m) for m in parse_list('ring; coded:passes=4')]; table();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

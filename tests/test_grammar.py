"""The grammar, on a table of its own that has a key of every type."""

from __future__ import annotations

import re
import string
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taciturn.errors import MethodError
from taciturn.grammar import Key, Method, MethodSpec, Value, parse, parse_list, spell

WIRE = Key("wire", "choice", None, "format", ("bf16", "int8", "int4"), unset="the buffer's")
BITS = Key("bits", "int", None, "", (8, 4), alias_of="wire", alias_values=("int8", "int4"))
SPECS = (
    MethodSpec("plain", "Nothing to set", "Plain", ()),
    MethodSpec(
        "outer",
        "Everything to set",
        "Outer",
        (
            Key("steps", "int", 4, "how often", minimum=1),
            Key("shift", "int", 0, "any whole number"),
            Key("rate", "float", 0.5, "how fast", minimum=0, maximum=2, open=True),
            Key("fast", "bool", False, "or not"),
            Key("least", "size", 16384, "bytes", minimum=1),
            Key("tag", "choice", "a", "any word"),
            WIRE,
            BITS,
            Key("inner", "method", None, "what it wraps"),
        ),
    ),
)

WORDS = st.text(string.ascii_letters + string.digits + "._+-/", min_size=1, max_size=8)
VALUES: dict[str, st.SearchStrategy[Value]] = {
    "steps": st.integers(1, 10**9),
    "shift": st.integers(-(10**17), 10**17),
    "rate": st.floats(0, 2, exclude_min=True),
    "fast": st.booleans(),
    "least": st.integers(1, 2**40),
    "tag": WORDS,
    "wire": st.sampled_from(["bf16", "int8", "int4"]),
}


def options(inner: st.SearchStrategy[Method]) -> st.SearchStrategy[dict[str, Value]]:
    """Some of the keys, in any order."""
    chosen = st.fixed_dictionaries({}, optional={**VALUES, "inner": inner})
    return chosen.flatmap(lambda found: st.permutations(list(found.items())).map(dict))


METHODS = st.recursive(
    st.just(Method("", "plain", {})),
    lambda inner: options(inner).map(lambda found: Method("", "outer", found)),
    max_leaves=4,
)
BLANKS = st.text(" \t\n", max_size=2)


@given(METHODS, st.data())
def test_round_trip(method: Method, data: st.DataObject) -> None:
    """A method that is spelt out and read again is the same; blanks change only its text."""
    compact = spell(method)
    tokens = re.findall(r"[:;,=()]|[^:;,=()]+", compact)
    spaced = "".join(data.draw(BLANKS) + token for token in tokens) + data.draw(BLANKS)

    assert parse(compact, SPECS) == method
    read = parse(spaced, SPECS)
    assert read == method
    assert list(read.options) == list(method.options)
    assert read.text == spaced.strip()
    assert spell(read) == compact


@given(st.lists(METHODS, min_size=1, max_size=5), BLANKS, st.booleans())
def test_list_round_trip(methods: list[Method], blanks: str, end: bool) -> None:
    """A list is its methods with ``;`` between them, and possibly one more at the end."""
    text = f";{blanks}".join(map(spell, methods)) + (";" if end else "")
    assert parse_list(text, SPECS) == methods


FRAGMENTS = st.sampled_from(
    [*":;,=()", " ", "outer", "plain", "steps", "rate", "inner", "4", "1e400", "-1", "true", "∞"]
)


@st.composite
def nearly_right(draw: st.DrawFn) -> str:
    """A method with one character inserted or replaced."""
    text = spell(draw(METHODS))
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.characters()) + text[at + draw(st.integers(0, 1)) :]


@given(
    st.one_of(st.text(max_size=200), st.lists(FRAGMENTS, max_size=30).map("".join), nearly_right())
)
def test_any_string_parses_or_says_where_it_fails(text: str) -> None:
    """Whatever is given: a method with that text, or an error with a position and a caret."""
    try:
        method = parse(text, SPECS)
    except MethodError as error:
        first, *rest = str(error).split("\n")
        position = int(re.findall(r"at position (\d+)", first)[-1])
        assert 1 <= position <= len(text.strip()) + 1
        if text.strip():
            shown, caret = rest
            column = caret.index("^")
            place = text.strip()[position - 1 : position]
            assert shown[column : column + 1] == (place if place.isprintable() else " ")
    else:
        assert method.text == text.strip()


BAD = [
    ("", 1, "the name of a method is missing"),
    (":", 1, "expected the name of a method, not ':'"),
    ("outr:steps=4", 1, "unknown method 'outr', at position 1; did you mean 'outer'?"),
    ("PLAIN", 1, "did you mean 'plain'?"),
    ("zzz", 1, "known: plain, outer"),
    ("zzz:steps=16,inner=(plain)", 1, "unknown method 'zzz'"),
    ("outer:", 7, "a key of 'outer' is missing"),
    ("outer:steps=4,", 15, "a key of 'outer' is missing"),
    ("outer:=4", 7, "expected a key of 'outer', not '='"),
    ("outer:stpes=4", 7, "did you mean 'steps'?"),
    ("outer: qqq=4", 8, "known: steps, shift, rate, fast, least, tag, wire, bits, inner"),
    ("plain:steps=4", 7, "'plain' has no key 'steps', at position 7; there is none"),
    ("plain:", 7, "a key of 'plain' is missing, at position 7; there is none"),
    ("outer:steps", 12, "write steps=VALUE with whole number >= 1"),
    ("outer:steps=", 13, "it takes whole number >= 1"),
    ("outer:steps==4", 13, "expected a value for 'steps', not '='"),
    ("outer:steps=four", 13, "it takes whole number >= 1"),
    ("outer:steps=4.0", 13, "it takes whole number >= 1"),
    ("outer:steps=0", 13, "it takes whole number >= 1"),
    ("outer:steps=-3", 13, "it takes whole number >= 1"),
    ("outer:shift=1_000", 13, "it takes whole number"),
    ("outer:shift=" + "9" * 5000, 13, "it takes whole number"),
    ("outer:steps=٤", 13, "it takes whole number"),
    ("outer:steps=4,steps=4", 15, "the key 'steps' is there twice"),
    ("outer:rate=0", 12, "it takes number > 0, <= 2"),
    ("outer:rate=2.5", 12, "it takes number > 0, <= 2"),
    ("outer:rate=nan", 12, "it takes number"),
    ("outer:rate=inf", 12, "it takes number"),
    ("outer:rate=1e999", 12, "it takes number"),
    ("outer:fast=True", 12, "did you mean 'true'?"),
    ("outer:fast=1", 12, "it takes true | false"),
    ("outer:least=16XB", 13, "it takes bytes, as 64KiB"),
    ("outer:wire=bf8", 12, "it takes bf16 | int8 | int4"),
    ("outer:wire=INT8", 12, "did you mean 'int8'?"),
    ("outer:bits=3", 12, "it takes 8 | 4"),
    ("outer:bits=8,wire=int4", 14, "'wire' contradicts 'bits'"),
    ("outer:wire=bf16,bits=8", 17, "'bits' contradicts 'wire'"),
    ("outer:steps=(plain)", 13, "'steps' cannot be a method"),
    ("outer:inner=plain", 13, "write it in parentheses: inner=(plain)"),
    ("outer:inner=()", 14, "expected the name of a method, not ')'"),
    ("outer:inner=(plain", 19, "expected ')', at position 19 for the '(' at position 13"),
    ("outer:inner=(plain))", 20, "unexpected ')'"),
    ("outer:inner=(outer:inner=(plan))", 27, "did you mean 'plain'?"),
    ("outer:inner=(" * 22 + "plain" + ")" * 22, 273, "too many methods inside each other"),
    ("outer:inner=(" * 5000, 273, "too many methods inside each other"),
    ("plain plain", 7, "unexpected 'plain'"),
    ("plain;", 6, "unexpected ';'"),
    ("outer:steps=4;plain", 14, "unexpected ';'"),
]


@pytest.mark.parametrize(("text", "position", "says"), BAD, ids=range(len(BAD)))
def test_bad_string(text: str, position: int, says: str) -> None:
    """Each mistake is named with its position, and with what would have been right."""
    with pytest.raises(MethodError) as caught:
        parse(text, SPECS)
    message = str(caught.value)
    assert says in message
    assert f"at position {position}" in message
    assert max(map(len, message.split("\n")[1:]), default=0) <= 80


def test_long_strings_show_only_the_place() -> None:
    """Above the caret stand the characters round the place, with dots for what is left out."""
    text = f"outer:tag={'a' * 100},fats=true,least=64KiB,tag2={'b' * 100}"
    with pytest.raises(MethodError) as caught:
        parse(text, SPECS)
    _, shown, caret = str(caught.value).split("\n")
    assert shown.startswith("  ...")
    assert shown.endswith("...")
    assert shown[caret.index("^") :].startswith("fats=true")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plain; oter; plain", "at position 1 of method 2; did you mean 'outer'?"),
        ("plain; ; plain", "at position 1 of method 2"),
        ("plain;;", "at position 1 of method 2"),
        ("oter;", "at position 1; did you mean 'outer'?"),
        ("", "at position 1"),
        (";", "at position 1"),
        ("plain; outer:inner=(plain; plain", "expected ')', at position 19 of method 2"),
        ("plain); plain", "unexpected ')', at position 6 of method 1"),
    ],
)
def test_bad_list(text: str, says: str) -> None:
    """A list says which of its methods is wrong, and counts positions from that method's start."""
    with pytest.raises(MethodError, match=re.escape(says)):
        parse_list(text, SPECS)


def test_semicolons_in_parentheses_belong_to_the_nested_method() -> None:
    """A list is cut outside parentheses only, so the error names the place inside."""
    with pytest.raises(MethodError, match=re.escape("expected ')', at position 19 for")):
        parse_list("outer:inner=(plain;plain)", SPECS)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("outer:rate=.5", "rate", 0.5),
        ("outer:rate=1.", "rate", 1.0),
        ("outer:rate=1E-3", "rate", 1e-3),
        ("outer:rate=+1", "rate", 1.0),
        ("outer:shift=+07", "shift", 7),
        ("outer:least=64KiB", "least", 65536),
        ("outer:fast=false", "fast", False),
        ("outer:bits=4", "bits", 4),
        ("outer:tag=a/b-c.d", "tag", "a/b-c.d"),
    ],
)
def test_values_have_their_key_s_type(text: str, key: str, value: Value) -> None:
    """A word becomes a number, a truth value, bytes or a word, as its key says."""
    read = parse(text, SPECS).options[key]
    assert read == value
    assert type(read) is type(value)


def test_agreeing_shorthand_is_not_a_contradiction() -> None:
    """``bits=8`` beside ``wire=int8`` says the same thing twice, which is allowed."""
    assert parse("outer:bits=8,wire=int8", SPECS).options == {"bits": 8, "wire": "int8"}


def test_equal_methods_hash_alike_and_nothing_changes_them() -> None:
    """Methods that say the same are one key of a dict, however they are spelt."""
    one, other = parse("outer: steps=4", SPECS), parse("outer:steps=4", SPECS)
    assert one == other
    assert len({one, other}) == 1
    assert one != parse("outer:steps=5", SPECS)
    with pytest.raises(FrozenInstanceError):
        one.name = "plain"  # type: ignore[misc]

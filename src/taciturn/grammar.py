"""The grammar in which a method is named, apart from which methods there are.

::

    list   = method { ";" method }
    method = name [ ":" key "=" value { "," key "=" value } ]
    value  = word | "(" method ")"

Blanks may stand between any two tokens: ``coded: passes=16, code=fourier`` is
``coded:passes=16,code=fourier``. A word is anything without blanks and without ``:;,=()``. Which
keys a method has, and of what type, is in a table of :class:`MethodSpec`.

Law: ``parse(text, specs).text == text.strip()``, and ``parse(spell(method), specs) == method``
(``test_round_trip``).
Law: any string either is a method or raises a :class:`~taciturn.errors.MethodError` that says
where it stops being one (``test_any_string_parses_or_says_where_it_fails``).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, TypeAlias, cast

from taciturn.errors import InputError, MethodError
from taciturn.units import parse_size

__all__ = [
    "Key",
    "Method",
    "MethodSpec",
    "Value",
    "method_of",
    "nearest",
    "parse",
    "parse_list",
    "spell",
    "spell_value",
    "with_option",
]


@dataclass(frozen=True)
class Method:
    """A method as somebody wrote it; :func:`parse` makes them.

    Two methods are equal if they say the same, however they spell it.

    Attributes:
        text: verbatim, without the blanks around it: what tables and files show.
        name: the method's name, for example ``coded``.
        options: the keys that were given, with typed values; a missing key has its default.
    """

    text: str = field(compare=False)
    name: str
    options: Mapping[str, Value] = field(hash=False)


Value: TypeAlias = int | float | bool | str | Method
"""What a key can hold."""


@dataclass(frozen=True)
class Key:
    """One key of a method.

    Attributes:
        name: as written before the ``=``.
        type: ``int``, ``float``, ``bool``, ``choice`` (a word), ``size`` (in bytes, ``64KiB``) or
            ``method`` (nested, in parentheses).
        default: the value if the key is not given; None if it is then worked out.
        meaning: in a few words, which way it pushes and its unit.
        choices: the only values possible; empty if the type says it all.
        minimum: least value of a number.
        maximum: greatest value of a number.
        open: the minimum itself is not possible.
        unset: what a default of None stands for.
        alias_of: this key is a shorthand for that one.
        alias_values: what each of ``choices`` is there, in the same order.
    """

    name: str
    type: Literal["int", "float", "bool", "choice", "size", "method"]
    default: Value | None
    meaning: str
    choices: tuple[int | str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    open: bool = False
    unset: str = ""
    alias_of: str = ""
    alias_values: tuple[str, ...] = ()

    def written_out(self, value: Value) -> tuple[str, Value]:
        """``("wire", "int8")`` for the shorthand ``bits`` at 8; other keys stay as they are."""
        if not self.alias_of:
            return self.name, value
        return self.alias_of, self.alias_values[self.choices.index(cast("int | str", value))]

    @property
    def values(self) -> str:
        """What may stand after the ``=``, in words."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        words = {
            "int": "whole number",
            "float": "number",
            "bool": "true | false",
            "choice": "word",
            "size": "bytes, as 64KiB",
            "method": "(method)",
        }[self.type]
        if self.minimum is not None and self.maximum is not None and not self.open:
            return f"{words}, {self.minimum:g} to {self.maximum:g}"
        if self.minimum is not None:
            words += f" {'>' if self.open else '>='} {self.minimum:g}"
        if self.maximum is not None:
            words += f", <= {self.maximum:g}"
        return words

    @property
    def default_words(self) -> str:
        """The default as it would be written, or what stands in for it."""
        return self.unset if self.default is None else spell_value(self.default)


@dataclass(frozen=True)
class MethodSpec:
    """One row of the table.

    Attributes:
        name: the method's name.
        summary: what it is, for a newcomer; one sentence without the full stop.
        constructor: the class whose keywords are the keys.
        keys: in the order in which they are printed.
        package: of the constructor, within ``taciturn``: ``collectives``, which sum any buffers, or
            ``aggregators``, which average gradients in training.
    """

    name: str
    summary: str
    constructor: str
    keys: tuple[Key, ...]
    package: Literal["collectives", "aggregators"] = "collectives"


def parse(text: str, specs: Sequence[MethodSpec]) -> Method:
    """The method that ``text`` names.

    Args:
        text: one method in the grammar above.
        specs: the table to read it by.

    Raises:
        MethodError: it names none. The first line says what is wrong, at which position (counted
            from 1), and what is nearest; then follow the text and a caret under the place.
    """
    return _Reader(text, specs).read()


def parse_list(text: str, specs: Sequence[MethodSpec]) -> list[Method]:
    """The methods in ``text``, separated by ``;``; one more ``;`` may end it.

    Args:
        text: at least one method.
        specs: the table to read them by.

    Raises:
        MethodError: as :func:`parse`; with several methods it says which of them.
    """
    parts = _split(text)
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    if len(parts) == 1:
        return [parse(parts[0], specs)]
    return [
        _Reader(part, specs, f" of method {number}").read()
        for number, part in enumerate(parts, start=1)
    ]


def spell(method: Method) -> str:
    """The method without blanks, its keys in the order in which they were given."""
    pairs = ",".join(f"{key}={spell_value(value)}" for key, value in method.options.items())
    return f"{method.name}:{pairs}" if pairs else method.name


def method_of(name: str, config: Any) -> Method:
    """The method that a config stands for: its fields are keys, None and defaults are left out.

    Law: what is built from ``parse(spell(method_of(name, config)))`` equals ``config``
    (``test_spelled_methods_build_the_same``).

    Args:
        name: the method's name.
        config: a dataclass whose fields are the method's keys; one that is a method itself stands
            as its own ``method``.
    """
    values = {field: getattr(config, field.name) for field in fields(config) if field.init}
    options = {
        field.name: getattr(value, "method", value)
        for field, value in values.items()
        if value not in (None, field.default)
    }
    method = Method("", name, options)
    return replace(method, text=spell(method))


def with_option(method: Method, key: str, value: Value | None) -> Method:
    """The method with an option set, or without it where the value is None."""
    options = {name: given for name, given in method.options.items() if name != key}
    if value is not None:
        options[key] = value
    changed = replace(method, options=options)
    return replace(changed, text=spell(changed))


def spell_value(value: Value) -> str:
    """The value as it stands after a ``=``."""
    if isinstance(value, Method):
        return f"({spell(value)})"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _names(items: Sequence[MethodSpec] | Sequence[Key]) -> list[str]:
    return [item.name for item in items]


def nearest(word: str, names: Sequence[str]) -> str:
    """The nearest of the names as a question, or all of them if none is near."""
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else _known(names)


def _known(names: Sequence[str]) -> str:
    return f"; known: {', '.join(names)}" if names else "; there is none"


def _convert(word: str, key: Key) -> Value | None:
    """The word as a value of the key, or None if it is not one."""
    number: int | float
    match key.type:
        case "bool":
            return {"true": True, "false": False}.get(word)
        case "choice":
            return word if not key.choices or word in key.choices else None
        case "int" if re.fullmatch(r"[+-]?[0-9]{1,18}", word):
            number = int(word)
        case "float" if re.fullmatch(r"[+-]?([0-9]+\.?|[0-9]*\.[0-9]+)(e[+-]?[0-9]+)?", word, re.I):
            number = float(word)
        case "size":
            try:
                number = parse_size(word)
            except InputError:
                return None
        case _:
            return None
    lowest = -math.inf if key.minimum is None else key.minimum
    highest = math.inf if key.maximum is None else key.maximum
    above = number > lowest if key.open else number >= lowest
    possible = above and number <= highest and math.isfinite(number)
    return number if possible and (not key.choices or number in key.choices) else None


def _split(text: str) -> list[str]:
    """Cuts at each ``;`` outside parentheses."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth = max(0, depth - 1)
        elif character == ";" and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


_TOKEN = re.compile(r"[:;,=()]|[^\s:;,=()]+")
_COLUMNS = 72  # of the text that is shown above a caret
_DEEPEST = 20  # nested methods; far above any sense, far below Python's recursion limit


class _Reader:
    """Recursive descent over the tokens of one method."""

    def __init__(self, text: str, specs: Sequence[MethodSpec], where: str = "") -> None:
        self.text = text.strip()
        self.specs = specs
        self.where = where
        self.tokens = [(match[0], match.start()) for match in _TOKEN.finditer(self.text)]
        self.tokens.append(("", len(self.text)))
        self.index = 0

    def read(self) -> Method:
        method = self.method(depth=0)
        token, at = self.tokens[self.index]
        if token:
            self.fail(f"unexpected {token!r}", at, "; write name:key=value,key=value")
        return method

    def method(self, depth: int) -> Method:
        name, start = self.word("the name of a method", _known(_names(self.specs)))
        spec = next((spec for spec in self.specs if spec.name == name), None)
        if spec is None:
            self.fail(f"unknown method {name!r}", start, nearest(name, _names(self.specs)))
        options: dict[str, Value] = {}
        more = self.accept(":")
        while more:
            self.option(spec, options, depth)
            more = self.accept(",")
        last, at = self.tokens[self.index - 1]
        return Method(self.text[start : at + len(last)], name, options)

    def option(self, spec: MethodSpec, options: dict[str, Value], depth: int) -> None:
        """Reads ``key=value`` and adds it to ``options`` (changed in place)."""
        name, at = self.word(f"a key of {spec.name!r}", _known(_names(spec.keys)))
        key = next((key for key in spec.keys if key.name == name), None)
        if key is None:
            self.fail(f"{spec.name!r} has no key {name!r}", at, nearest(name, _names(spec.keys)))
        if name in options:
            self.fail(f"the key {name!r} is there twice", at, "; drop one of them")
        if not self.accept("="):
            self.fail(f"{name!r} has no value", hint=f"; write {name}=VALUE with {key.values}")
        value = self.value(key, depth)
        target, meant = key.written_out(value)
        for other in spec.keys:
            if other.name in options:
                other_target, other_meant = other.written_out(options[other.name])
                if other_target == target and other_meant != meant:
                    self.fail(f"{name!r} contradicts {other.name!r}", at, "; drop one of them")
        options[name] = value

    def value(self, key: Key, depth: int) -> Value:
        start = self.tokens[self.index][1]
        if self.accept("("):
            if key.type != "method":
                self.fail(f"{key.name!r} cannot be a method", start, f"; it takes {key.values}")
            if depth == _DEEPEST:
                self.fail("too many methods inside each other", start)
            method = self.method(depth + 1)
            if not self.accept(")"):
                self.fail("expected ')'", hint=f" for the '(' at position {start + 1}")
            return method
        word, at = self.word(f"a value for {key.name!r}", f"; it takes {key.values}")
        if key.type == "method":
            self.fail(
                f"{key.name!r} is a method", at, f"; write it in parentheses: {key.name}=({word})"
            )
        value = _convert(word, key)
        if value is None:
            near = difflib.get_close_matches(word.lower(), key.values.split(" | "), n=1)
            hint = f"; did you mean {near[0]!r}? It takes " if near else "; it takes "
            self.fail(f"{key.name!r} cannot be {word!r}", at, hint + key.values)
        return value

    def word(self, what: str, hint: str) -> tuple[str, int]:
        token, at = self.tokens[self.index]
        if token in ("", *":;,=()"):
            problem = f"expected {what}, not {token!r}" if token else f"{what} is missing"
            self.fail(problem, at, hint)
        self.index += 1
        return token, at

    def accept(self, token: str) -> bool:
        found = self.tokens[self.index][0] == token
        self.index += found
        return found

    def fail(self, problem: str, at: int | None = None, hint: str = "") -> NoReturn:
        """Raises the error for the place ``at``, an index into the text; None: the next token."""
        at = self.tokens[self.index][1] if at is None else at
        problem = f"{problem}, at position {at + 1}{self.where}{hint}"
        if not self.text:
            raise MethodError(problem)
        start = max(0, min(at - _COLUMNS // 2, len(self.text) - _COLUMNS))
        shown = self.text[start : start + _COLUMNS]
        shown = "".join(c if c.isprintable() else " " for c in shown)
        left = "..." if start else ""
        right = "..." if start + _COLUMNS < len(self.text) else ""
        raise MethodError(f"{problem}\n  {left}{shown}{right}\n  {' ' * (len(left) + at - start)}^")

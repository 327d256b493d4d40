"""The methods there are: one table that drives parsing, printing and building.

A method is named in one grammar everywhere (:mod:`taciturn.grammar`): ``coded:passes=4``. Which
keys it has, of what type and with which default, is in the table here and nowhere else:
:func:`parse` reads by it, ``taciturn methods`` prints it, :func:`build` builds by it.

Law: keys and defaults are the constructors' own keywords and defaults
(``test_table_is_the_constructors_signatures``).

Importing this module does not import torch; :func:`build` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taciturn import grammar
from taciturn.collectives.codes.limits import LARGEST_EPS, MOST_COMPONENTS, MOST_PASSES
from taciturn.errors import InputError, MethodError
from taciturn.grammar import Key, Method, MethodSpec, Value, nearest, spell, spell_value

if TYPE_CHECKING:
    from taciturn.aggregators import Aggregator
    from taciturn.collectives import Collective

__all__ = [
    "Key",
    "Method",
    "MethodSpec",
    "Value",
    "aggregator",
    "as_aggregator",
    "build",
    "describe",
    "parse",
    "parse_list",
    "spell",
    "table",
]


_FORMATS = ("fp64", "fp32", "fp16", "bf16", "int8", "int4")


def _wire(*choices: str, default: str | None = None) -> Key:
    meaning = "number format of what is sent"
    return Key("wire", "choice", default, meaning, choices, unset="the buffer's")


_BITS = Key(
    "bits",
    "int",
    None,
    "shorthand for wire: int8 or int4",
    choices=(8, 4),
    unset="see wire",
    alias_of="wire",
    alias_values=("int8", "int4"),
)
_BLOCK = Key(
    "block",
    "int",
    128,
    "elements per scale on int wires; a power of two",
    minimum=2,
    maximum=131072,
)
_ROUNDING = Key(
    "rounding",
    "choice",
    "nearest",
    "stochastic: unbiased, but noisier",
    choices=("nearest", "stochastic"),
)
_SEGMENTS = Key(
    "segments",
    "int",
    None,
    "slices of a message, to overlap coding and sending",
    minimum=1,
    maximum=1024,
    unset="by the size",
)
_SEED = Key("seed", "int", 0, "of everything random in it", minimum=0)

_FEEDBACK = Key(
    "feedback",
    "bool",
    None,
    "in training, add what a step leaves out to the next",
    unset="if biased",
)
_OVER = Key("over", "method", None, "collective that sums", unset="by the method")

_TABLE: tuple[MethodSpec, ...] = (
    MethodSpec(
        "backend",
        "The process group's own all_reduce, the baseline",
        "Backend",
        (
            _wire("fp32", "fp16", "bf16"),
            Key("check", "bool", True, "ranks compare lengths and dtypes first; not in a bench"),
        ),
    ),
    MethodSpec(
        "ring",
        "Plain ring, exact: each of N ranks sends 2(N-1)/N buffers",
        "Ring",
        (_SEGMENTS,),
    ),
    MethodSpec(
        "coded",
        "Coded approximate ring (CERAR): each rank sends 1 + (N-2)/(passes N) buffers",
        "CodedRing",
        (
            Key(
                "passes",
                "int",
                None,
                "trips round the ring; more: fewer bytes",
                minimum=1,
                maximum=MOST_PASSES,
                unset="4",
            ),
            Key(
                "components",
                "int",
                None,
                "parts of the buffer, for code=vandermonde",
                minimum=3,
                maximum=MOST_COMPONENTS,
                unset="passes x N",
            ),
            Key(
                "code",
                "choice",
                None,
                "fourier: for many passes and narrow wires",
                choices=("polynomial", "fourier", "clustered", "optimized", "vandermonde"),
                unset="polynomial",
            ),
            Key(
                "eps",
                "float",
                None,
                "nearness of nodes; less: less spread, more rounding noise",
                minimum=0,
                maximum=LARGEST_EPS,
                open=True,
                unset="by the wire",
            ),
            Key(
                "stretch",
                "float",
                None,
                "of code=fourier; less: less spread, worse condition",
                minimum=0,
                maximum=1,
                open=True,
                unset="1",
            ),
            Key(
                "nodes",
                "choice",
                None,
                "of code=vandermonde; roots: better condition",
                choices=("near_one", "roots"),
                unset="near_one",
            ),
            Key(
                "decode",
                "choice",
                "centred",
                "centred: errors cancel in the mean over ranks",
                choices=("centred", "least_squares"),
            ),
            Key("orthonormal", "bool", None, "orthonormalise the table", unset="by the code"),
            Key("shuffle", "bool", False, "draw a new order of the ring in each call"),
            _SEED,
            Key("ranks_per_host", "int", 1, "ranks that a shuffle keeps together", minimum=1),
            _wire(*_FORMATS[:-1]),
            _BLOCK,
            _ROUNDING,
            _SEGMENTS,
            Key("inplace", "bool", False, "store 1 + N/c buffers in all; a bit more spread"),
            Key(
                "spread_budget",
                "float",
                None,
                "most spread allowed; code and passes are then chosen",
                minimum=0,
                open=True,
                unset="none",
            ),
            Key(
                "mean_error_budget",
                "float",
                None,
                "most error of the mean over ranks allowed; the same",
                minimum=0,
                open=True,
                unset="none",
            ),
        ),
    ),
    MethodSpec(
        "quantized",
        "Ring that rounds at each hop; all ranks end bit-identical",
        "QuantizedRing",
        (_wire(*_FORMATS, default="int8"), _BITS, _BLOCK, _ROUNDING, _SEGMENTS, _SEED, _FEEDBACK),
    ),
    MethodSpec(
        "direct",
        "Each rank to each other, two roundings in all; ranks end bit-identical",
        "Direct",
        (_wire(*_FORMATS, default="int8"), _BITS, _BLOCK, _ROUNDING, _SEGMENTS, _SEED, _FEEDBACK),
    ),
    MethodSpec(
        "mean",
        "Average by any collective, given in parentheses",
        "Mean",
        (Key("over", "method", None, "collective that sums", unset="(backend)"), _FEEDBACK),
        "aggregators",
    ),
    MethodSpec(
        "cast",
        "Average in 16 bits by the process group's own all_reduce",
        "Cast",
        (
            Key("wire", "choice", "bf16", "fp16: finer, overflows", choices=("bf16", "fp16")),
            _FEEDBACK,
        ),
        "aggregators",
    ),
    MethodSpec(
        "powersgd",
        "Low-rank average of each matrix, from the last step's (PowerSGD)",
        "PowerSGD",
        (
            Key(
                "rank", "int", 4, "columns of the factors; more: more bytes, less error", minimum=1
            ),
            Key("alternate", "bool", False, "one exchange per step: left and right in turn"),
            Key(
                "min_saving",
                "float",
                2.0,
                "compress what shrinks by this factor at least",
                minimum=0,
            ),
            Key("warm_start", "bool", True, "start from the last step's factors"),
            _SEED,
            _OVER,
            _FEEDBACK,
        ),
        "aggregators",
    ),
    MethodSpec(
        "topk",
        "The largest elements of each rank, gathered by all",
        "TopK",
        (
            Key(
                "ratio",
                "float",
                0.01,
                "share of the elements that is sent",
                minimum=0,
                maximum=1,
                open=True,
            ),
            Key("sample", "int", 65536, "elements from which the threshold is guessed", minimum=1),
            _SEED,
            Key("wire", "choice", "fp32", "number format of the values", choices=("fp32", "bf16")),
            _FEEDBACK,
        ),
        "aggregators",
    ),
)


def table(package: str | None = None) -> list[MethodSpec]:
    """All methods, in the order in which they are printed; those of one package if it is given."""
    return [spec for spec in _TABLE if package in (None, spec.package)]


def parse(text: str) -> Method:
    """The method that ``text`` names.

    Raises:
        MethodError: it names none; the message gives the position and the nearest name.
    """
    return grammar.parse(text, _TABLE)


def parse_list(text: str) -> list[Method]:
    """The methods in ``text``, separated by ``;``; one more ``;`` may end it.

    Raises:
        MethodError: one of them means nothing; the message says which, where and what is nearest.
    """
    return grammar.parse_list(text, _TABLE)


def describe(method: Method | str) -> str:
    """The method in one line: what it is, the keys that were given, and the defaults of others.

    Raises:
        MethodError: no such method.
    """
    method = parse(method) if isinstance(method, str) else method
    spec = _find(method)
    given = _keywords(spec, method)
    said = [f"{name}={spell_value(value)}" for name, value in given.items()]
    defaults = [
        f"{key.name}={key.default_words}"
        for key in spec.keys
        if key.name not in given and key.default is not None
    ]
    parts = [spec.summary, ", ".join(said), f"default {', '.join(defaults)}" if defaults else ""]
    return "; ".join(part for part in parts if part)


def build(method: Method | str) -> Collective:
    """The collective that the method names, with the options given.

    Raises:
        MethodError: no such method, or one that needs a training loop.
        CodeError, InputError: its options are possible one by one, but not together.
    """
    from taciturn import collectives

    method = parse(method) if isinstance(method, str) else method
    spec = _find(method)
    if spec.package != "collectives":
        names = ", ".join(s.name for s in table("collectives"))
        raise MethodError(
            f"{method.text!r} averages gradients step by step in training (taciturn.ddp.attach) "
            f"and is no all-reduce of a buffer; those are {names}"
        )
    if method.options.get("feedback"):
        raise MethodError(
            f"{method.text!r}: feedback adds what one training step leaves out to the next, and a "
            "single all-reduce has no next; leave it out"
        )
    collective: Collective = getattr(collectives, spec.constructor)(**_keywords(spec, method))
    return collective


def as_aggregator(method: str | Aggregator | Collective) -> Aggregator:
    """The aggregator that a name, a collective or an aggregator stands for.

    Raises:
        MethodError: no such method.
        CodeError, InputError: its options are possible one by one, but not together; or it is none
            of these.
    """
    from taciturn.aggregators import Aggregator, Mean
    from taciturn.collectives import Collective

    if isinstance(method, str):
        return aggregator(method)
    if isinstance(method, Collective):
        return Mean(method)
    if isinstance(method, Aggregator):
        return method
    raise InputError(f"method={method!r}: give a name, an aggregator or a collective")


def aggregator(method: Method | str) -> Aggregator:
    """The aggregator that the method names: a collective's average, or one of its own.

    Biased ones come with error feedback unless ``feedback=false`` says otherwise.

    Raises:
        MethodError: no such method.
        CodeError, InputError: its options are possible one by one, but not together.
    """
    from dataclasses import replace

    from taciturn import aggregators
    from taciturn.error_feedback import ErrorFeedback

    method = parse(method) if isinstance(method, str) else method
    spec = _find(method)
    options = dict(method.options)
    feedback = options.pop("feedback", None)
    bare = replace(method, options=options)
    made: Aggregator
    if spec.package == "collectives":
        if spec.name == "backend":  # groups are agreed on before: nothing to find in each call
            bare = replace(bare, options={"check": False, **options})
        made = aggregators.Mean(build(bare))
    else:
        keywords: dict[str, object] = dict(_keywords(spec, bare))
        if isinstance(keywords.get("over"), Method):
            keywords["over"] = build(keywords["over"])  # type: ignore[arg-type]
        made = getattr(aggregators, spec.constructor)(**keywords)
    return ErrorFeedback(made) if (made.biased if feedback is None else feedback) else made


def _find(method: Method) -> MethodSpec:
    found = next((spec for spec in _TABLE if spec.name == method.name), None)
    if found is None:
        raise MethodError(
            f"unknown method {method.name!r}{nearest(method.name, [spec.name for spec in _TABLE])}"
        )
    return found


def _keywords(spec: MethodSpec, method: Method) -> dict[str, Value]:
    """The options as the constructor's keywords: shorthands are written out."""
    keys = {key.name: key for key in spec.keys}
    keywords: dict[str, Value] = {}
    for name, value in method.options.items():
        target, meant = keys[name].written_out(value)
        if target != _FEEDBACK.name:  # a wrapper, not a keyword
            keywords[target] = meant
    return keywords

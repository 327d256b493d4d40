"""What can be compared: DDP itself, every method of a DDP loop, and those that exchange less often.

The grammar is that of :mod:`taciturn.methods`, whose methods are all here, and these beside::

    ddp:wire=bf16,bucket=25MiB          DistributedDataParallel itself, with torch's own hook
    accumulate:windows=4,over=(coded)   several global batches to one step and one exchange
    local_sgd:steps=8                   parameters averaged every 8 steps
    diloco:steps=32,compress=(quantized:bits=4)
    auto:quality=loss                   what ``taciturn plan`` recommends on the regime's link

``auto`` stands for another method in each regime; :func:`named_by_plan` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from taciturn import grammar, methods
from taciturn.errors import InputError, MethodError
from taciturn.grammar import Key, Method, MethodSpec, Value
from taciturn.plan.candidates import QUALITIES, Candidate, Quality

__all__ = [
    "AUTO",
    "BASELINE",
    "Comparable",
    "comparable",
    "named_by_plan",
    "parse",
    "quality_asked",
    "table",
]

AUTO, BASELINE = "auto", "ddp"

_OVER = Key("over", "method", None, "what averages the gradients", unset="(backend)")
_LOCAL = (
    Key(
        "optimizer_state",
        "choice",
        "keep",
        "average: momenta too, at their bytes",
        choices=("keep", "average"),
    ),
)

_TABLE: tuple[MethodSpec, ...] = (
    MethodSpec(
        BASELINE,
        "DistributedDataParallel itself: the baseline",
        "",
        (
            Key(
                "wire",
                "choice",
                "fp32",
                "of the gradients, by torch's own hooks",
                choices=("fp32", "bf16", "fp16"),
            ),
            Key("bucket", "size", 25 * 2**20, "DDP's bucket_cap_mb, in bytes", minimum=1 << 10),
        ),
    ),
    *methods.table(),
    MethodSpec(
        "accumulate",
        "Gradients of several global batches in one step: a larger batch, fewer exchanges",
        "",
        (Key("windows", "int", 4, "global batches to a step", minimum=2), _OVER),
    ),
    MethodSpec(
        "local_sgd",
        "Local steps, then the average of the parameters",
        "",
        (
            Key("steps", "int", 8, "local steps of a round", minimum=1),
            Key("over", "method", None, "what averages the parameters", unset="(ring)"),
            *_LOCAL,
        ),
    ),
    MethodSpec(
        "diloco",
        "Local steps, then an outer Nesterov step by the averaged change",
        "",
        (
            Key("steps", "int", 32, "local steps of a round", minimum=1),
            Key("outer_rate", "float", 0.7, "of the outer step", minimum=0, open=True),
            Key("outer_momentum", "float", 0.9, "of the outer step", minimum=0, maximum=1),
            Key("fragments", "int", 1, "parts with exchanges of their own", minimum=1),
            Key("overlap_steps", "int", 0, "steps beside an exchange", minimum=0),
            Key("compress", "method", None, "what averages the change", unset="(ring)"),
            *_LOCAL,
        ),
    ),
    MethodSpec(
        AUTO,
        "What taciturn plan recommends for the regime's link",
        "",
        (
            Key(
                "quality",
                "choice",
                "loss",
                "what must be right of the average, or of the loss",
                choices=QUALITIES,
            ),
        ),
    ),
)

_INNER = tuple(spec.name for spec in methods.table())


def table() -> tuple[MethodSpec, ...]:
    """All that can be compared, in the order in which they are printed."""
    return _TABLE


@dataclass(frozen=True)
class Comparable:
    """A method as the harness uses it.

    Attributes:
        text: as written.
        name: of its family.
        options: with defaults filled in; nested methods as text.
        period: steps after which its costs repeat: what is timed is a multiple.
        replicas_differ: between exchanges the ranks' parameters are not the same.
    """

    text: str
    name: str
    options: dict[str, Value]
    period: int
    replicas_differ: bool

    @property
    def averages_gradients(self) -> bool:
        """Every step exchanges that step's gradients."""
        return self.name not in ("accumulate", "local_sgd", "diloco")


def parse(text: str) -> Method:
    """The method that ``text`` names.

    Raises:
        MethodError: it names none, or nests one where it cannot be.
    """
    method = grammar.parse(text, _TABLE)
    for key, value in method.options.items():
        if isinstance(value, Method) and value.name not in _INNER:
            raise MethodError(
                f"{text!r}: {key}=({value.text}) averages nothing by itself; inside another method "
                f"stands one of {', '.join(_INNER)}"
            )
    return method


def comparable(text: str) -> Comparable:
    """The method, checked as far as it can be without a model.

    Raises:
        MethodError: no such method, or one inside another where it makes no sense.
        InputError, CodeError: options that do not go together.
    """
    method = parse(text)
    spec = next(s for s in _TABLE if s.name == method.name)
    if method.name in _INNER:
        made = methods.aggregator(method)
        return Comparable(method.text, method.name, {}, 1, not made.bit_identical)
    options: dict[str, Value] = {}
    differ = method.name in ("local_sgd", "diloco")
    for key in spec.keys:
        value = method.options.get(key.name, key.default)
        if isinstance(value, Method):
            differ |= not methods.aggregator(value).bit_identical
            value = value.text
        if value is not None:
            options[key.name] = value
    if method.name == "diloco" and int(options["overlap_steps"]) >= int(options["steps"]):  # type: ignore[arg-type]
        raise InputError(
            f"{text!r}: overlap_steps={options['overlap_steps']} with steps={options['steps']}: an "
            "exchange has to end before the next one of its parameters begins"
        )
    period = int(options.get("steps", options.get("windows", 1)))  # type: ignore[arg-type]
    return Comparable(method.text, method.name, options, period, differ)


def named_by_plan(candidate: Candidate) -> str:
    """The text, here, of what a plan recommends."""
    if candidate.stock:
        wire = parse(candidate.method).options.get("wire", "fp32")
        return f"{BASELINE}:wire={wire}"
    return candidate.method


def quality_asked(text: str) -> Quality:
    """What ``auto`` demands of the average."""
    found: Quality = comparable(text).options["quality"]  # type: ignore[assignment]
    return found

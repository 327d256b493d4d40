"""The methods that a plan weighs, doing nothing among them, and what they do to the average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from taciturn.cost import option
from taciturn.errors import InputError
from taciturn.grammar import Method
from taciturn.methods import parse, parse_list, table

__all__ = [
    "BASELINES",
    "CANDIDATES",
    "QUALITIES",
    "Candidate",
    "Quality",
    "allowed",
    "candidate_of",
    "candidates",
    "check_quality",
    "key_of",
]

Quality = Literal["every-replica", "mean", "loss", "any"]
QUALITIES: tuple[str, ...] = get_args(Quality)
"""What must be right of the average, or of what it leads to, strictest first."""

MOST_LOSS = 1.02
"""Of a run that is as good, over the baseline's: the margin that comparisons take too."""
NEAR_LOSS = 1.01
"""Mean of the committed runs of a method that is taken to be so: half the margin, since another
model's loss is not that of the model that was measured."""


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes:
        name: as people know it.
        method: what averages, in the grammar; also what ``ddp.attach`` takes.
        quality: the strictest demand that it meets. ``every-replica``: all ranks end with the same
            average, up to roundings on the way; ``mean``: the mean over ranks is right, and
            replicas differ from it; ``loss``: a step leaves out much, which error feedback adds to
            later ones, and in the committed tables the loss ends within ``NEAR_LOSS``; ``any``: it
            ends above that or was not measured, or ranks take local steps.
        stock: DDP's own buckets, and its own hook or none, without ours.
        local_steps: optimizer steps to one exchange; more than 1 is another algorithm.
        losses: the row of the committed table of losses that it is; its name if empty.
    """

    name: str
    method: str
    quality: Quality
    stock: bool = False
    local_steps: int = 1
    losses: str = ""


_FEEDBACK4 = "quantized:bits=4,feedback=true"
_FOURIER = "coded:passes=16,code=fourier,shuffle=true"
_WIRES = ("", ",wire=bf16", ",wire=int8")

CANDIDATES: tuple[Candidate, ...] = (
    Candidate("DDP, fp32", "backend", "every-replica", stock=True, losses="ddp fp32"),
    Candidate("DDP, bf16 hook", "cast:wire=bf16", "every-replica", stock=True),
    Candidate(
        "DDP, fp16 hook", "cast:wire=fp16", "every-replica", stock=True, losses="ddp fp16 hook"
    ),
    *(
        Candidate(method, method, "every-replica")
        for method in ("cast:wire=bf16", "ring", "quantized:bits=8", "direct:bits=8")
    ),
    *(
        Candidate(method, method, "mean")
        for method in ("coded:passes=4", *(f"{_FOURIER}{wire}" for wire in _WIRES))
    ),
    *(
        Candidate(method, method, "loss")
        for method in (_FEEDBACK4, "powersgd:rank=8", "powersgd:rank=16")
    ),
    *(
        Candidate(method, method, "any")
        for method in (
            "powersgd:rank=1",
            "powersgd:rank=2",
            "powersgd:rank=4",
            "powersgd:rank=4,alternate=true",
            "topk:ratio=0.01",
        )
    ),
    *(
        Candidate(name, method, "any", local_steps=steps, losses=name)
        for name, method, steps in (
            ("local SGD, H=4", "ring", 4),
            ("local SGD, H=16", "ring", 16),
            ("DiLoCo, H=16", "ring", 16),
            ("DiLoCo, H=64, int4", _FEEDBACK4, 64),
        )
    ),
)

BASELINES = ("DDP, fp32", "DDP, bf16 hook")
"""What a method has to beat, by more than the predictions may err."""


def check_quality(quality: str) -> Quality:
    """The demand that a word stands for.

    Raises:
        InputError: none.
    """
    for known in get_args(Quality):
        if quality == known:
            return known  # type: ignore[no-any-return]
    raise InputError(f"quality={quality!r}: choose one of {', '.join(QUALITIES)}")


def allowed(candidate: Candidate, quality: Quality) -> bool:
    """Whether a candidate meets a demand."""
    return QUALITIES.index(candidate.quality) <= QUALITIES.index(quality)


def candidate_of(text: str) -> Candidate:
    """The candidate that a method in the grammar is.

    Raises:
        MethodError: no such method.
    """
    method = parse(text)
    known = next((c for c in CANDIDATES if not c.stock and c.name == method.text), None)
    return known or Candidate(method.text, method.text, _quality_of(method))


def candidates(methods: str | None) -> tuple[Candidate, ...]:
    """The baselines and the methods asked for, separated by ``;``; all if None.

    Raises:
        MethodError: no such method.
    """
    if methods is None:
        return CANDIDATES
    stock = [c for c in CANDIDATES if c.stock]
    return (*stock, *(candidate_of(method.text) for method in parse_list(methods)))


def _quality_of(method: Method) -> Quality:
    over = option(method, "over") if method.name in ("mean", "powersgd") else None
    inner = _quality_of(over) if isinstance(over, Method) else "every-replica"
    if method.name in ("powersgd", "topk") or method.options.get("feedback") is True:
        return "any"
    if method.name == "coded" or inner != "every-replica":
        return "mean" if inner != "any" else "any"
    if method.name in ("quantized", "direct") and option(method, "wire") == "int4":
        return "any"
    return "every-replica"


_IRRELEVANT = ("feedback", "seed", "bits", "check", "rounding", "shuffle", "ranks_per_host")
"""Keys that change neither bytes nor seconds by much."""


def key_of(text: str) -> tuple[object, ...]:
    """What two spellings of a method have in common if they take the same time."""
    method = parse(text)
    if method.name == "mean":
        over = option(method, "over")
        return key_of(over.text if isinstance(over, Method) else "backend")
    spec = next(spec for spec in table() if spec.name == method.name)
    keys = {key.name: option(method, key.name) for key in spec.keys if key.name not in _IRRELEVANT}
    name = method.name
    if name == "backend" and keys["wire"] in ("bf16", "fp16"):
        name = "cast"  # the same exchange
    if name == "cast":
        keys = {"wire": keys["wire"]}
    if name == "coded":
        keys["passes"] = keys["passes"] or 4
        keys["code"] = keys["code"] or "polynomial"
    values = {k: v.text if isinstance(v, Method) else v for k, v in keys.items()}
    return (name, *sorted((k, v) for k, v in values.items() if v is not None))

"""What the plan says of a regime before anything is run there (rule 15)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taciturn.compare.methods import AUTO, BASELINE, comparable, named_by_plan, quality_asked
from taciturn.errors import TaciturnError
from taciturn.link import Link
from taciturn.plan import CANDIDATES, Candidate, Compute, Model, make_plan
from taciturn.plan.candidates import candidate_of
from taciturn.plan.exchange import Pricer
from taciturn.plan.prediction import Predictor

__all__ = ["candidate_for", "predict", "probed_methods"]


def candidate_for(text: str) -> Candidate:
    """What the plan knows a method as.

    Raises:
        MethodError: no such method, or one that a plan does not price.
    """
    method = comparable(text)
    if method.name == BASELINE:
        wire = method.options["wire"]
        averages = "backend" if wire == "fp32" else f"cast:wire={wire}"
        return next(c for c in CANDIDATES if c.stock and c.method == averages)
    if method.name == "accumulate":
        over, steps = str(method.options.get("over", "backend")), int(method.options["windows"])  # type: ignore[arg-type]
        return Candidate(text, over, "any", local_steps=steps)
    if method.name in ("local_sgd", "diloco"):
        inner = str(method.options.get("compress", method.options.get("over", "ring")))
        return Candidate(text, inner, "any", local_steps=int(method.options["steps"]))  # type: ignore[arg-type]
    return candidate_of(text)


def probed_methods(texts: Iterable[str]) -> tuple[str, ...]:
    """Averages whose speed the probe has to measure, for these methods and for ``auto``."""
    own = [candidate_for(text).method for text in texts if comparable(text).name != AUTO]
    asked = any(comparable(text).name == AUTO for text in texts)
    every = [c.method for c in CANDIDATES if c.local_steps == 1] if asked else []
    return tuple(dict.fromkeys([*own, *every]))


def predict(
    link: Link, model: Model, compute: Compute, texts: Iterable[str], autos: Iterable[str]
) -> dict[str, Any]:
    """The step time of each method, and what ``auto`` stands for.

    Returns:
        ``steps``: seconds by method, with ``low`` and ``high``; ``auto``: for each text of it the
        method and the sentence.
    """
    pricer = Pricer(link, link.ranks)
    steps = {}
    for text in texts:
        try:
            told = Predictor(candidate_for(text), model, pricer, compute).predict()
        except TaciturnError:  # a method that plans do not know
            continue
        steps[text] = {
            "step_s": told.step_s.value,
            "low_s": told.step_s.low,
            "high_s": told.step_s.high,
        }
    chosen = {}
    for text in autos:
        plan = make_plan(model, link, compute, quality=quality_asked(text))
        name = plan.recommendation.name
        candidate = next(c for c in CANDIDATES if c.name == name)
        chosen[text] = {
            "method": named_by_plan(candidate),
            "sentence": plan.recommendation.sentence,
        }
    return {"steps": steps, "auto": chosen}

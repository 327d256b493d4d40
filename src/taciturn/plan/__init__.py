"""Which method would pay on a link that was measured, or that none would; importing needs no torch.

From a link to a sentence: ``model`` (what is exchanged), ``candidates`` (the methods there are, and
what they do to the average), ``timing`` (when gradients are there), ``exchange`` (seconds of one
buffer, with how far to trust them), ``timeline`` (of a step, exchanges beside backward),
``prediction`` (a row of the table), ``choice`` (the recommendation, and where it changes),
``quality`` (what was measured of losses), ``table``; ``auto`` for programs.

::

    from pathlib import Path
    from taciturn.link import Link
    from taciturn.plan import Compute, make_plan, parse_model

    link = Link.read(Path("link.json"))
    plan = make_plan(parse_model("gpt-5m"), link, Compute(0.3))
    print(plan.recommendation.sentence)
"""

from __future__ import annotations

from taciturn.plan.auto import auto
from taciturn.plan.candidates import CANDIDATES, Candidate, Quality
from taciturn.plan.choice import Plan, Recommendation, make_plan
from taciturn.plan.model import Model, parse_model
from taciturn.plan.prediction import Prediction
from taciturn.plan.timing import Compute, read_timing

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Compute",
    "Model",
    "Plan",
    "Prediction",
    "Quality",
    "Recommendation",
    "auto",
    "make_plan",
    "parse_model",
    "read_timing",
]

"""The rules of evidence by number, and which of them a comparison breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from taciturn.compare.outcome import Outcome
from taciturn.compare.verdict import LEAST_RUNS

__all__ = ["RULES", "RuleKept", "State", "rules_kept"]

State = Literal["kept", "broken", "not shown"]

RULES = {
    1: "The primary figure is time to the target, beside the final value at as many examples.",
    2: "The target is fixed before, by the tuned baseline on seeds of its own.",
    3: "The baseline is the faster of tuned DDP in fp32 and with 16-bit gradients, in its best "
    "bucket size.",
    4: "All see the same examples in the same order, and are judged at the same points.",
    5: "Every method has the same number of tuning runs, and the baseline at least as many.",
    6: "Fresh seeds, paired and interleaved: five at least, ten if times vary by more than 5 %.",
    7: "A miss is a miss, and every planned seed counts.",
    8: "The clock starts at the first batch and stops only while a model is judged.",
    9: "The target is reached at the first evaluation there that also holds at the next.",
    10: "Each network is probed before and after; more than 10 % between them voids it.",
    11: "Each network has its own verdict.",
    12: "The interval is of paired runs, with Holm's procedure over all methods.",
    13: "The final value is within the margin; one replica, and averaged weights, stand beside it.",
    14: "Nothing needs far fewer examples than the baseline.",
    15: "What is foretold is stored before anything is run.",
    16: "The time of a step is taken apart.",
    17: "Records are only ever added to, and pooled only if their metadata agree.",
    18: "What small scale and shared cores distort is said.",
}
"""As in ``docs/evidence.md``. Those that no record can break are kept by how the harness works."""


@dataclass(frozen=True)
class RuleKept:
    """One rule.

    Attributes:
        number, text: of the rule.
        state: "not shown" where the runs do not tell, or too few of them.
        details: whole sentences: where, and what is wrong.
    """

    number: int
    text: str
    state: State
    details: tuple[str, ...]


def rules_kept(outcome: Outcome) -> list[RuleKept]:
    """All rules, with what this comparison makes of them."""
    broken: dict[int, list[str]] = {}
    unshown: dict[int, list[str]] = {}
    for regime in outcome.regimes:
        for text in regime.broken:
            _note(broken, text, "")
        for text in regime.notes:
            unshown.setdefault(10, []).append(text)
        for row in regime.rows:
            for text in row.broken:
                if text not in regime.broken:
                    _note(broken, text, f"{regime.name}, {row.method}: ")
            if row.runs < LEAST_RUNS:
                unshown.setdefault(6, []).append(f"{row.runs} seeds in {regime.name}")
            if not row.good_enough:
                text = f"{regime.name}, {row.method}: {_quality(row.final_quality_high)}"
                unshown.setdefault(13, []).append(text)
    made = []
    for number, text in RULES.items():
        state: State = "broken" if number in broken else "kept"
        if state == "kept" and number in unshown:
            state = "not shown"
        details = (*broken.get(number, ()), *unshown.get(number, ()))
        made.append(RuleKept(number, text, state, tuple(dict.fromkeys(details))))
    return made


def _note(broken: dict[int, list[str]], text: str, where: str) -> None:
    """Sort what is wrong by the rule it begins with: ``rule 10, the rate changed``."""
    rule, _, what = text.partition(", ")
    broken.setdefault(int(rule.removeprefix("rule ")), []).append(where + what)


def _quality(high: float | None) -> str:
    if high is None:
        return "its final value is not known well enough"
    return f"its final value may be {high:.3f} of the baseline's"

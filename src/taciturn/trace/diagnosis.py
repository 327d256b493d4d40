"""One sentence on what a step waits for."""

from __future__ import annotations

from taciturn.trace.report import CriticalPath, StepReport, Straggler
from taciturn.units import format_seconds

__all__ = ["diagnose"]

LITTLE = 0.02  # of the step: nobody would notice
ALMOST_ALL = 0.98
_BOUND_BY = {
    "compute_s": "by compute",
    "launch_s": "by the CPU that issues the work",
    "codec_s": "by encoding and decoding",
    "communication_s": "by communication",
    "waiting_s": "by waiting for the rank that comes last",
    "idle_s": "by time in which nothing was recorded",
}


def diagnose(
    mean: StepReport,
    straggler: Straggler | None,
    *,
    alone: float,
    exact: bool,
    doubt: str = "",
) -> str:
    """The sentence.

    Args:
        mean: over steps.
        straggler: if there is one.
        alone: share of the collectives of which one rank of several is known.
        exact: exposures need no bounds.
        doubt: why collectives may be missing although none was found.
    """
    if not mean.collectives and doubt:
        return (
            "What this step waits for cannot be told: no collective was found, but there may have "
            f"been some ({doubt})."
        )
    if not mean.collectives:
        return (
            "There is no collective in this trace: nothing can be saved by sending less, and the "
            f"step is bound {_largest(mean.critical_path)}."
        )
    step = max(mean.completed_s, 1e-12)
    share = mean.exposed_s / step
    saves = f"Removing every byte would save {share:.1%} of the step"
    if not exact:
        saves += f" ({mean.exposed_low_s / step:.1%} to {mean.exposed_high_s / step:.1%})"
    if alone:
        part = "" if alone == 1 else "partly "
        saves += f", waiting for other ranks {part}included"
    if straggler is not None:
        return f"{_late(straggler)} {saves}."
    if share > ALMOST_ALL:
        return f"{saves}: there is hardly anything else in it."
    if share < LITTLE:
        return f"{saves}: it is bound {_largest(mean.critical_path)}."
    return f"{saves}; the rest of it is bound {_largest(mean.critical_path, without=True)}."


def _late(one: Straggler) -> str:
    when = (
        "in the only step"
        if one.of_steps == 1
        else f"in the mean step, the latest in {one.steps} of {one.of_steps}"
    )
    if one.unrecorded:
        why = (
            f" (for {format_seconds(one.excess_s)} more than on the others nothing was recorded "
            f"between {one.excess})"
        )
    elif one.excess:
        why = f" (it spends {format_seconds(one.excess_s)} more than the others in {one.excess!r})"
    else:
        why = ""
    return (
        f"Rank {one.rank} arrives {'at least ' * one.at_least}{format_seconds(one.late_s)} late "
        f"{when}{why}; no compression will help with that."
    )


def _largest(path: CriticalPath, without: bool = False) -> str:
    """What most of the critical path is; ``without`` looks past communication itself."""
    parts = {
        name: seconds
        for name, seconds in vars(path).items()
        if not (without and name == "communication_s")
    }
    return _BOUND_BY[max(parts, key=lambda name: parts[name])]

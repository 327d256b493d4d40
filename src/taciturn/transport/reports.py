"""Who is to blame when an exchange fails, decided from the reports of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from taciturn.errors import MismatchError, PeerError

__all__ = [
    "REPORT_MAX_S",
    "REPORT_SHARE",
    "WAIT_SHARE",
    "Report",
    "Verdict",
    "decide",
    "error_of",
    "report_of",
]

# Shares of ``timeout_s``. A wait gives up early so that the reports of all ranks can be read and
# the error raised before the time-out that the caller was promised.
WAIT_SHARE = 0.8
REPORT_SHARE = 0.15
REPORT_MAX_S = 3.0


class Report(TypedDict):
    """What a rank posts when it cannot go on."""

    kind: Literal["silent", "closed", "error", "mismatch"]
    """No message in time; a connection closed; an exception here; headers that differ."""
    text: str
    suspect: int | None
    """The rank it was waiting for."""
    call: int
    round: int
    """How far it had come."""


class Verdict(TypedDict):
    """Who is to blame."""

    kind: Literal["mismatch", "peer"]
    ranks: list[int]
    text: str


def report_of(error: BaseException, call: int, round: int) -> Report:
    """Return the report of a rank that cannot go on because of its own ``error``."""
    kind: Literal["mismatch", "error"] = "mismatch" if isinstance(error, MismatchError) else "error"
    return {"kind": kind, "text": str(error), "suspect": None, "call": call, "round": round}


def error_of(verdict: Verdict, rank: int, round: int) -> MismatchError | PeerError:
    """Return what ``rank``, which had come to ``round``, raises for a verdict."""
    if verdict["kind"] == "mismatch":
        return MismatchError(verdict["text"])
    text = f"{verdict['text']} (seen by rank {rank} in round {round})"
    return PeerError(text, verdict["ranks"], round)


def decide(reports: Mapping[int, Report], size: int, timeout_s: float) -> Verdict:
    """Decide from the ranks' reports who is to blame. Pure, so that it can be tested."""
    for kind in ("mismatch", "error"):
        for rank in sorted(reports):
            if reports[rank]["kind"] == kind:
                text = reports[rank]["text"]
                if kind == "mismatch":
                    return {"kind": kind, "ranks": [rank], "text": text}
                return {"kind": "peer", "ranks": [rank], "text": f"rank {rank} failed: {text}"}
    missing = [rank for rank in range(size) if rank not in reports]
    suspects = [r["suspect"] for r in reports.values() if r["kind"] == "closed"]
    closed = [rank for rank in missing if rank in suspects]
    if closed:
        return {"kind": "peer", "ranks": closed, "text": f"{_ranks(closed)} died"}
    if missing:
        # The backend's own collectives do not say on whom they waited.
        gone = all(r["kind"] == "closed" and r["suspect"] is None for r in reports.values())
        why = (
            "died"
            if gone
            else f"did not answer within {timeout_s:g} s: dead, stopped or far behind"
        )
        return {"kind": "peer", "ranks": missing, "text": f"{_ranks(missing)} {why}"}
    # Everyone reported: the one that got least far held up the others.
    least = min((r["call"], r["round"]) for r in reports.values())
    behind = [rank for rank, r in sorted(reports.items()) if (r["call"], r["round"]) == least]
    if len(behind) == size:
        return {
            "kind": "peer",
            "ranks": [],
            "text": f"no message arrived for {timeout_s:g} s, on any rank: the network is down, "
            "or timeout_s is too short for this size and rate",
        }
    text = f"{_ranks(behind)} held up the others for {timeout_s:g} s"
    return {"kind": "peer", "ranks": behind, "text": text}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

"""``taciturn probe``: what a link can do, as a file that ``taciturn plan`` reads.

``steps`` says what is measured, ``calls`` times one step in a rank, ``measure`` runs inside the
ranks, ``summary`` and ``fit`` turn what they saw into a :class:`taciturn.link.Link`, ``run`` starts
it all, ``table`` and ``page`` show it.
"""

from __future__ import annotations

from taciturn.probe.measure import Job, probe_link
from taciturn.probe.run import ProbeConfig, probe

__all__ = ["Job", "ProbeConfig", "probe", "probe_link"]

"""What a step waits for, read from the files of torch.profiler; needs no torch.

From file to answer: ``scan`` (bytes to event objects), ``reader`` (columns), ``steps``,
``collectives`` (who meets whom), ``clock`` (one time for all ranks).
"""

from __future__ import annotations

from taciturn.trace.events import Events, Trace
from taciturn.trace.kinds import Kind, parse_kind
from taciturn.trace.reader import read, read_all

__all__ = ["Events", "Kind", "Trace", "parse_kind", "read", "read_all"]

"""What a step waits for, read from the files of torch.profiler; importing needs no torch.

From file to answer: ``scan`` (bytes to event objects), ``reader`` with ``columns`` and ``identity``
(arrays; whose they are), ``steps``, ``collectives`` with ``messages`` and ``pairing`` (who meets
whom), ``clock`` (one time for all ranks), ``view`` (a rank on it), ``graph`` with ``draft``,
``threads`` and ``streams`` (what had to wait for what), ``replay`` (as soon as possible),
``exposure`` and ``path`` (differences of replays, the critical path), ``analysis`` (all of it),
``straggler``, ``diagnosis`` and ``notes`` (in words), ``report`` (plain values), ``whatif``
(predictions) with ``alphabeta``, ``codecs`` and ``probed`` (of link and methods); ``table``,
``page`` with ``picture``, and ``perfetto`` show it. ``recording`` makes such files; only while it
does is torch needed.

::

    from pathlib import Path
    from taciturn.trace import analyse

    analysis = analyse([Path("rank0.json.gz"), Path("rank1.json.gz")])
    print(analysis.report.diagnosis)
"""

from __future__ import annotations

from taciturn.trace.alphabeta import AlphaBeta
from taciturn.trace.analysis import Analysis, analyse, analyse_traces
from taciturn.trace.codecs import CodecCost, read_codecs
from taciturn.trace.events import Events, Trace
from taciturn.trace.kinds import Kind, parse_kind
from taciturn.trace.probed import Probed, read_probed
from taciturn.trace.reader import read, read_all
from taciturn.trace.recording import Recording, record
from taciturn.trace.report import Report
from taciturn.trace.whatif import parse_change, predict

__all__ = [
    "AlphaBeta",
    "Analysis",
    "CodecCost",
    "Events",
    "Kind",
    "Probed",
    "Recording",
    "Report",
    "Trace",
    "analyse",
    "analyse_traces",
    "parse_change",
    "parse_kind",
    "predict",
    "read",
    "read_all",
    "read_codecs",
    "read_probed",
    "record",
]

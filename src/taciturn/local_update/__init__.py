"""Fewer exchanges: several local steps, then one average - local SGD, DiLoCo, streaming DiLoCo.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD" (ICLR 2020: a phase of single steps first); Douillard et al., "DiLoCo"
(arXiv:2311.08105, algorithm 1) and "Streaming DiLoCo with overlapping communication"
(arXiv:2501.18512, algorithm 2: fragments, overlap, mixing).

All are one thing here. A copy of the parameters, the *anchor*, is the same on every rank. After a
round of local steps the ranks average how far each went from it, the *pseudo-gradient* anchor -
parameters; an outer optimizer steps the anchor by it; and the parameters become the anchor. With
outer SGD at rate 1 that is the average of the parameters: local SGD. What is averaged is the
difference and not the parameters, so that any aggregator may be used, with error feedback.

Averaging parameters is not centralised descent: the ranks drift apart within a round, and
``metrics()`` says how far.
"""

from __future__ import annotations

from taciturn.local_update.companions import Buffers, OptimizerState
from taciturn.local_update.diloco import DiLoCo, nesterov
from taciturn.local_update.local_sgd import LocalSGD
from taciturn.local_update.rounds import Period, RoundMetrics

__all__ = [
    "Buffers",
    "DiLoCo",
    "LocalSGD",
    "OptimizerState",
    "Period",
    "RoundMetrics",
    "nesterov",
]

"""Token-exact gradient accumulation: a window of microbatches is one big batch of all ranks.

The gradient of a window is that of the sum of all losses, over all valid tokens of all microbatches
of all ranks, divided by the number of these tokens - whatever their split. Means of means are not:
four microbatches of unequal length, or ranks that run out of data at different times, give another
gradient. Four accumulated microbatches are also not four steps: neither parameters nor optimizer
state move within a window.

Each window has one exchange of gradients, overlapped with the last microbatch's backward where
every rank has one, and one control exchange of a few numbers: tokens, losses, the gradients' norm,
and who has data for another window.
"""

from __future__ import annotations

from taciturn.accumulation.accumulation import Accumulation
from taciturn.accumulation.window import StepResult, Window

__all__ = ["Accumulation", "StepResult", "Window"]

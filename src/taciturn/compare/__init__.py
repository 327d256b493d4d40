"""Prove it: methods against tuned DistributedDataParallel, on the clock, "not shown" by default.

``experiment`` (what is decided before), ``task`` and ``bundled`` (what is trained), ``methods``
(the grammar), ``order`` (which examples when), ``strategies`` (a method in the loop), ``training``
and ``average_errors`` (what a rank measures), ``work`` (one job on its ranks), ``sessions`` (ranks
of our own that wait for jobs) and ``cluster`` (those of torchrun), ``jobs`` and ``conduct`` (what
has to be measured, and when), ``predictions`` (what the plan says before), ``records`` (what was
measured), ``compose``, ``intervals``, ``verdict``, ``outcome``, ``crossover`` and ``rules`` (what
that shows: pure functions of records), ``table`` and ``page`` (with its
figures and tables), ``run``.
"""

from __future__ import annotations

from taciturn.compare.bundled import load_task
from taciturn.compare.experiment import Contender, Experiment, read_experiment
from taciturn.compare.outcome import Outcome, outcome_of
from taciturn.compare.records import Records
from taciturn.compare.task import Task
from taciturn.compare.verdict import Point, Row, Run, judge_runs

__all__ = [
    "Contender",
    "Experiment",
    "Outcome",
    "Point",
    "Records",
    "Row",
    "Run",
    "Task",
    "judge_runs",
    "load_task",
    "outcome_of",
    "read_experiment",
]

"""Ranks that torchrun has started, on one machine or many: rank 0 conducts, the others serve.

Every rank runs the same command. Rank 0 decides on each job, tells the others, and all do it; only
rank 0 reads and writes the folder of records.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from taciturn.compare.bundled import load_task
from taciturn.compare.experiment import Experiment
from taciturn.compare.sessions import Done
from taciturn.compare.training import check_task
from taciturn.compare.work import Job, do_job
from taciturn.errors import InputError, MismatchError, PeerError, TaciturnError, described

__all__ = ["Cluster"]


class Cluster:
    """This rank among those of torchrun, in place of networks of our own. A context manager.

    Args:
        experiment: the same on every rank.

    Raises:
        InputError: another number of ranks than the experiment has, or a task that cannot be
            trained here.
        MismatchError: ranks were given different experiments.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._lost = ""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=experiment.timeout_s))
        self.rank = dist.get_rank()
        try:
            self._check_ranks()
            self.task = load_task(experiment.task)
            check_task(self.task, 0)
        except TaciturnError:  # gloo's threads must not outlive an exit that all ranks make
            dist.destroy_process_group()
            raise

    def _check_ranks(self) -> None:
        """Refuse ranks that disagree, or are too few or too many; on all of them alike."""
        size = dist.get_world_size()
        told = self._gathered(self.experiment.settings())
        for rank, other in enumerate(told):
            if other != told[0]:
                raise MismatchError(
                    f"ranks 0 and {rank} were given different experiments: start all of them with "
                    "the same file"
                )
        if size != self.experiment.ranks:
            raise InputError(
                f"the experiment is of {self.experiment.ranks} ranks, and torchrun has started "
                f"{size}: make them agree"
            )

    def do(self, regime: str, job: Job) -> Done:  # noqa: ARG002 - there is one network
        """Have all ranks do a job; rank 0 calls it.

        Raises:
            PeerError: a rank was lost in a job before.
        """
        if self._lost:
            raise PeerError(
                f"{self._lost}; what was finished is kept: start torchrun again, and it goes on "
                "from there"
            )
        self._told(job)
        return self._attempt(job)

    def serve(self) -> None:
        """Do what rank 0 asks for, until it has no more; the other ranks call it.

        Raises:
            PeerError: a rank was lost.
        """
        while (job := self._told(None)) is not None:
            self._attempt(job)
            if self._lost:
                raise PeerError(self._lost)

    def _attempt(self, job: Job) -> Done:
        """Do a job; a failure that all ranks share leaves them able to go on."""
        try:
            result: dict[str, Any] | None = do_job(self.task, job, self.experiment.timeout_s)
            failure = ""
        except (PeerError, MismatchError) as error:
            self._lost = f"{type(error).__name__} on rank {self.rank}: {error}"
            return Done(None, self._lost)
        except Exception as error:  # the user's code too; where ranks are lost, gathering tells
            result, failure = None, described(error)
        try:
            said = self._gathered(failure)
        except RuntimeError as error:
            self._lost = f"a rank did not end its job as the others did: {error}"
            return Done(None, self._lost)
        wrong = [f"{text} (rank {rank})" for rank, text in enumerate(said) if text]
        return Done(None, wrong[0]) if wrong else Done(result, None)

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _told(self, job: Job | None) -> Job | None:
        """Return rank 0's job."""
        told = [job]
        try:
            dist.broadcast_object_list(told, 0)
        except RuntimeError as error:
            raise PeerError(f"rank 0 is lost: {error}") from error
        return told[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lost or not (kind is None or issubclass(kind, TaciturnError)):
            return  # amid a job nobody listens
        with suppress(TaciturnError, RuntimeError):
            if self.rank == 0:
                self._told(None)  # the others end too
            dist.destroy_process_group()

"""The interface of this package, named as in Determined: ``init`` and ``Trainer.fit``."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from determined import pytorch

from deepspeed_trial.checkpoints.store import AUTO, LocalCheckpoints
from deepspeed_trial.cluster import cluster_info, on_cluster
from deepspeed_trial.context import TrialContext, init
from deepspeed_trial.errors import UnusableCheckpoint, one_line
from deepspeed_trial.local.folder import on_chief
from deepspeed_trial.loop import Loop
from deepspeed_trial.plan import Minutes
from deepspeed_trial.settings import Outcome, Settings

__all__ = ["FitResult", "Minutes", "Trainer", "find_checkpoint", "init"]

NEVER = pytorch.Batch(sys.maxsize)  # a period that never ends

logger = logging.getLogger("deepspeed_trial")


@dataclass(frozen=True)
class FitResult:
    """Results of a training.

    Attributes:
        steps: optimizer steps since the start of training, including steps before a resume.
        epochs: complete epochs in these steps.
        checkpoint: UUID of the checkpoint with the final weights.
        validation: metrics of the last validation, or with ``best_weights`` of the best one; empty on a
            cluster and on ranks other than 0.
        test: metrics of the final test, on rank 0; empty without test data or after an interruption.
        interrupted: whether a signal stopped a local run.
        budget: for a length in minutes, the seconds used and the plans; else empty.
    """

    steps: int
    epochs: int
    checkpoint: str | None
    validation: dict[str, Any]
    test: dict[str, Any]
    interrupted: bool
    budget: dict[str, Any]


class Trainer:
    """Trains a ``DeepSpeedTrial``, with the interface of ``determined.pytorch.deepspeed.Trainer``.

    Args:
        trial: a ``DeepSpeedTrial``, constructed with ``context``.
        context: the context from ``init``.
    """

    def __init__(self, trial: Any, context: TrialContext) -> None:
        self.trial, self.context = trial, context

    def fit(
        self,
        max_length: pytorch.TrainUnit,
        validation_period: pytorch.TrainUnit | None = None,
        checkpoint_period: pytorch.TrainUnit | None = None,
        reporting_period: pytorch.TrainUnit | None = None,
        checkpoint_policy: str = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        best_weights: bool = False,
    ) -> FitResult:
        """Train, validate, save and test.

        Args:
            max_length: ``pytorch.Batch(N)`` optimizer steps, ``pytorch.Epoch(N)``, or ``Minutes(M)``.
            validation_period: steps or epochs between validations; None validates only at the end.
            checkpoint_period: steps or epochs between checkpoints, in addition to ``checkpoint_policy``.
            reporting_period: steps or epochs between reports of training metrics; None means 100 steps.
            checkpoint_policy: ``best`` (by ``searcher.metric``; without a metric ``all``), ``all`` or
                ``none``.
            latest_checkpoint: UUID of the checkpoint to resume from.
            step_zero_validation: whether to validate before the first step.
            test_mode: whether to train, validate and save only one batch.
            profiling_enabled: whether to profile a few steps, and on a cluster to record system metrics.
            best_weights: whether a local run loads the weights of the best validation, by
                ``searcher.metric``, before the test.

        Raises:
            InvalidInput: if the checkpoint cannot be used.
            TrainingStopped: if the training cannot continue.
        """
        context = self.context
        if not isinstance(max_length, pytorch.Batch | pytorch.Epoch) or not isinstance(max_length.value, int):
            raise TypeError(f"max_length: {max_length}: must be pytorch.Batch or Epoch of an int, or Minutes")
        context.resumed_from = self._steps_of(latest_checkpoint)
        policy = "all" if checkpoint_policy == "best" and not context.experiment.metric else checkpoint_policy
        if best_weights and context.distributed.rank == 0 and (on_cluster() or not context.experiment.metric):
            why = "on a cluster" if on_cluster() else "without searcher.metric"
            logger.warning(f"best_weights: {why} the last weights are tested")
        settings = Settings(
            length=max_length,
            validation_period=validation_period or NEVER,
            checkpoint_period=checkpoint_period or NEVER,
            reporting_period=reporting_period or pytorch.Batch(100),
            checkpoint_policy=policy,
            checkpoint=latest_checkpoint,
            step_zero_validation=step_zero_validation,
            test_mode=test_mode,
            profiling=profiling_enabled,
            best_weights=best_weights and not on_cluster(),
        )
        loop = Loop(self.trial, context, settings, context.resumed_from)
        loop.run()
        return self._result(loop)

    def _result(self, loop: Loop) -> FitResult:
        return FitResult(
            steps=loop.steps,
            epochs=loop.state.epochs_trained,
            checkpoint=loop.checkpoint,
            validation=dict(self.context.services.progress.validation),
            test=loop.test,
            interrupted=loop.outcome is Outcome.INTERRUPTED and not on_cluster(),
            budget=loop.budget.summary() if loop.budget else {},
        )

    def _steps_of(self, checkpoint: str | None) -> int:
        """Return the optimizer steps that the trial has done, from the checkpoint or the master."""
        if not checkpoint or on_cluster():
            return int(self.context.get_initial_batch())
        try:
            return int(self.context.core.checkpoint.get_metadata(checkpoint)["steps_completed"])
        except (OSError, ValueError) as error:
            what = f"latest_checkpoint: {checkpoint!r}: not found, or damaged ({one_line(error)})"
            raise UnusableCheckpoint(
                f"{what}; give the UUID of a checkpoint of this run, or its folder"
            ) from error


def find_checkpoint(context: TrialContext, which: str | None) -> str | None:
    """Return the UUID of the checkpoint to resume from, or None to start from scratch.

    Args:
        context: the context from ``init``.
        which: a UUID, ``latest``, ``auto`` (the latest undamaged checkpoint, if any), or None; ignored on a
            cluster, where the master chooses.

    Raises:
        InvalidInput: if the checkpoint is missing or damaged.
    """
    if on_cluster():
        return cluster_info().latest_checkpoint
    if which is None or (which == AUTO and not context.resumes):
        return None
    checkpoints = context.core.checkpoint
    assert isinstance(checkpoints, LocalCheckpoints)
    return on_chief(lambda: checkpoints.find(which), context.distributed)

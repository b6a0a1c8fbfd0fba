"""Settings of a training, and the events that are due after a step."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import determined as det
from determined import pytorch

from deepspeed_trial import time_budget
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.loaders import Data


class Due(enum.Enum):
    """Events after a step, in their order."""

    END = enum.auto()
    VALIDATION = enum.auto()
    CHECKPOINT = enum.auto()
    REPORT = enum.auto()


class Outcome(enum.Enum):
    """Reasons for the end of a training."""

    COMPLETE = "all steps are done"
    STOPPED = "the trial has asked for the end"
    INTERRUPTED = "a signal or the master has asked for the end; another run continues"
    SEARCH_STOPPED = "the search has stopped the trial"
    INVALID = "a callback of a checkpoint has raised InvalidHP"


@dataclass(frozen=True)
class Settings:
    """Arguments of ``Trainer.fit``, with defaults filled in; see ``Trainer.fit``."""

    length: pytorch.TrainUnit
    validation_period: pytorch.TrainUnit
    checkpoint_period: pytorch.TrainUnit
    reporting_period: pytorch.TrainUnit
    checkpoint_policy: str
    checkpoint: str | None
    step_zero_validation: bool
    test_mode: bool
    profiling: bool
    best_weights: bool

    def due(self, steps: int, total: int, epoch: int) -> list[Due]:
        """Return the events that are due.

        Args:
            steps: optimizer steps done.
            total: optimizer steps of the training.
            epoch: optimizer steps in an epoch.
        """
        reached = {
            Due.END: steps >= total or self.test_mode,
            Due.VALIDATION: is_reached(self.validation_period, steps, epoch),
            Due.CHECKPOINT: is_reached(self.checkpoint_period, steps, epoch),
            Due.REPORT: is_reached(self.reporting_period, steps, epoch),
        }
        return [event for event in Due if reached[event]]

    def saves_after(self, validation: Mapping[str, Any], best: float | None, experiment: Experiment) -> bool:
        """Return whether the checkpoint policy saves after a validation.

        Args:
            validation: metrics of the validation by name.
            best: value of the searcher's metric in the best earlier validation; None for the first
                validation.
            experiment: the configuration, which names the searcher's metric.

        Raises:
            InvalidInput: if the searcher's metric is missing or not a number.
        """
        if self.checkpoint_policy != "best":
            return self.checkpoint_policy == "all"
        value: Any = validation.get(experiment.metric)
        if not det.util.is_numerical_scalar(value):
            what = f"searcher.metric: {experiment.metric!r}: must be a number among the validation's metrics"
            raise InvalidInput(f"{what}, {list(validation)}")
        return best is None or bool(value < best if experiment.smaller_is_better else value > best)

    def work(self, data: Data, trained: int, stages: Sequence[tuple[float, float]]) -> time_budget.Work:
        """Return the amount of work besides the steps, which the plan of a length in minutes needs.

        Args:
            data: the trial's data.
            trained: examples per rank and training step.
            stages: the result of ``TrialHooks.stages``.
        """
        validated = data.validation.count * data.validation.size
        tested = data.test.count * data.test.size if data.test else 0
        return time_budget.Work(
            _in_steps(self.validation_period, data.epoch),
            _in_steps(self.checkpoint_period, data.epoch),
            validated / trained / 3,  # a third of a step is the forward pass
            tested / max(1, validated),
            stages,
        )


def is_reached(period: pytorch.TrainUnit, steps: int, epoch: int) -> bool:
    """Return whether a period ends after ``steps`` steps; a period of epochs ends with an epoch."""
    if isinstance(period, pytorch.Epoch):
        epochs, rest = divmod(steps, epoch)
        return not rest and period.should_stop(epochs)
    return steps > 0 and period.should_stop(steps)


def _in_steps(period: pytorch.TrainUnit, epoch: int) -> int | None:
    if not isinstance(period.value, int) or period.value >= sys.maxsize:
        return None
    return max(1, period.value * (epoch if isinstance(period, pytorch.Epoch) else 1))

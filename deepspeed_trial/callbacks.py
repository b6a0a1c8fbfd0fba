"""When training ends before its length: no improvement, or a loss or gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from determined import pytorch
from typing_extensions import override

from deepspeed_trial.errors import Diverged, TrainingStopped


class Patience:
    """Tells when a validation metric has not improved for so many validations.

    Args:
        patience: how many validations to wait for an improvement; for ever if None.
        min_improvement: by how much more than this the metric has to improve.
        smaller_is_better: as of a loss.
    """

    def __init__(
        self, patience: int | None, min_improvement: float = 0.0, smaller_is_better: bool = True
    ) -> None:
        self.patience, self.min_improvement = patience, min_improvement
        self.smaller_is_better = smaller_is_better
        self.best: float | None = None
        self.waited = 0

    @property
    def is_over(self) -> bool:
        """Whether it is time to stop."""
        return self.patience is not None and self.waited >= self.patience

    def update(self, value: float) -> bool:
        """Takes the next validation's metric and says whether it is time to stop."""
        gain = (
            0.0 if self.best is None else self.best - value if self.smaller_is_better else value - self.best
        )
        if self.best is None or gain > self.min_improvement:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.is_over


class EarlyStopping(pytorch.PyTorchCallback):
    """End the training, with a checkpoint, when a validation metric has stopped improving.

    Args:
        context: the trial's, which is asked to stop.
        metric: a validation metric.
        patience: how many validations to wait for an improvement.
        min_improvement: by how much more than this it has to improve.
        smaller_is_better: as of a loss; if None, of ``loss`` alone.
    """

    def __init__(
        self,
        context: Any,
        metric: str,
        patience: int,
        min_improvement: float = 0.0,
        smaller_is_better: bool | None = None,
    ) -> None:
        self.context, self.metric = context, metric
        smaller = metric == "loss" if smaller_is_better is None else smaller_is_better
        self.patience = Patience(patience, min_improvement, smaller)

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if not self.patience.update(metrics[self.metric]):
            return
        self.context.set_stop_requested(True)
        if self.context.distributed.rank == 0:
            waited, best = self.patience.waited, self.patience.best
            print(f"stopping early: {waited} validations without an improvement of {self.metric}, {best:.4g}")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.patience.best, "waited": self.patience.waited}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.patience.best, self.patience.waited = state_dict["best"], state_dict["waited"]
        self.context.set_stop_requested(self.patience.is_over)  # it had stopped already


class NonFiniteLossMonitor(pytorch.PyTorchCallback):
    """Stops the training when the loss, or every gradient, is not finite.

    Args:
        engines: whose counts of skipped steps are watched, too.
        micro_batches: training metrics a step.
        tolerance: bad steps in a row that are let pass; fp16 skips some while its loss scale comes down.

    Raises:
        TrainingStopped: naming the step, the learning rate and the last checkpoint, which is from before.
    """

    def __init__(self, engines: Sequence[Any], micro_batches: int, tolerance: int) -> None:
        self.engines, self.micro_batches, self.tolerance = engines, micro_batches, tolerance
        self.steps = self.bad_steps = self.skips = self.skipped_in_a_row = 0
        self.first_bad = ""
        self.checkpoint: str | None = None

    @override
    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.steps, self.checkpoint = first_batch_idx, checkpoint_uuid

    @override
    def on_training_start(self) -> None:
        self.skips = self._skips()  # of the run that this one resumes

    @override
    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.checkpoint = uuid

    @override
    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        for index in range(0, len(batch_metrics), self.micro_batches):
            self.steps += 1
            self._check_losses(batch_metrics[index : index + self.micro_batches])
        if self.bad_steps > self.tolerance:
            raise self.stopped(self.first_bad)
        skips, self.skips = self._skips() - self.skips, self._skips()
        all_skipped = skips >= len(batch_metrics) // self.micro_batches
        self.skipped_in_a_row = self.skipped_in_a_row + skips if all_skipped else 0
        if self.skipped_in_a_row > self.tolerance:
            since = self.steps - self.skipped_in_a_row + 1
            raise self.stopped(f"no gradient is finite since step {since}{_rate(batch_metrics[-1])}")

    def _skips(self) -> int:
        """Steps that were skipped by every engine."""
        return min(engine.skipped_steps for engine in self.engines)

    def _check_losses(self, step: list[dict[str, Any]]) -> None:
        losses = [float(each["loss"]) for each in step if "loss" in each]
        bad = [loss for loss in losses if not math.isfinite(loss)]
        if not bad:
            self.bad_steps = 0
            return
        if not self.bad_steps:
            self.first_bad = f"the loss is {bad[0]} since step {self.steps}{_rate(step[0])}"
        self.bad_steps += 1

    def stopped(self, reason: str) -> TrainingStopped:
        """The exception that ends the training for a reason."""
        last = (
            f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        )
        return Diverged(f"{reason}; {last}; use a smaller learning rate or clip gradients")


def _rate(metrics: Mapping[str, Any]) -> str:
    return f" (learning rate {metrics['learning_rate']:g})" if "learning_rate" in metrics else ""

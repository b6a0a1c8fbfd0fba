"""When training ends before its length: no improvement, or a loss that is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from determined import pytorch
from typing_extensions import override

from errors import TrainingStopped


class Patience:
    """Tells when a validation metric has not improved for so many validations.

    Args:
        patience: how many validations to wait for an improvement; for ever if None.
        min_improvement: by how much more than this the metric has to improve.
        smaller_is_better: as of a loss.
    """

    def __init__(self, patience: int | None, min_improvement: float = 0.0, smaller_is_better: bool = True) -> None:
        self.patience, self.min_improvement, self.smaller_is_better = patience, min_improvement, smaller_is_better
        self.best: float | None = None
        self.waited = 0

    @property
    def over(self) -> bool:
        """Whether it is time to stop."""
        return self.patience is not None and self.waited >= self.patience

    def stops(self, value: float) -> bool:
        """Takes the next validation's metric."""
        gain = 0.0 if self.best is None else self.best - value if self.smaller_is_better else value - self.best
        if self.best is None or gain > self.min_improvement:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.over


class EarlyStopping(pytorch.PyTorchCallback):
    """Ends the training, with a checkpoint, when ``hyperparameters.early_stopping`` says so.

    Args:
        context: the trial's, which is asked to stop.
        metric: a validation metric; ``loss`` is better when smaller, every other when larger.
        patience: how many validations to wait for an improvement.
        min_improvement: by how much more than this it has to improve.
    """

    def __init__(self, context: Any, metric: str, patience: int, min_improvement: float = 0.0) -> None:
        self.context, self.metric = context, metric
        self.waiting = Patience(patience, min_improvement, smaller_is_better=metric == "loss")

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.waiting.stops(metrics[self.metric]):
            self.context.set_stop_requested(True)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.waiting.best, "waited": self.waiting.waited}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.waiting.best, self.waiting.waited = state_dict["best"], state_dict["waited"]
        self.context.set_stop_requested(self.waiting.over)  # it had stopped already


class LossWatch(pytorch.PyTorchCallback):
    """Stops the training when the loss or every gradient is no finite number; keeps the last checkpoint's UUID.

    Args:
        engine: whose count of skipped steps is watched, too.
        micro_batches: metrics a step.
        tolerance: steps in a row that are borne; fp16 skips some while its scale comes down.

    Raises:
        TrainingStopped: naming the step, the learning rate and the last checkpoint, which is from before.
    """

    def __init__(self, engine: Any, micro_batches: int, tolerance: int) -> None:
        self.engine, self.micro_batches, self.tolerance = engine, micro_batches, tolerance
        self.steps = self.bad_steps = self.skips = self.skipped_in_a_row = 0
        self.first_bad = ""
        self.checkpoint: str | None = None

    @override
    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.steps, self.checkpoint = first_batch_idx, checkpoint_uuid

    @override
    def on_training_start(self) -> None:
        self.skips = self.engine.skipped_steps  # of the run that this one resumes

    @override
    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.checkpoint = uuid

    @override
    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        for index in range(0, len(batch_metrics), self.micro_batches):
            self.steps += 1
            step = batch_metrics[index : index + self.micro_batches]
            losses = [float(each["loss"]) for each in step]
            if all(math.isfinite(loss) for loss in losses):
                self.bad_steps = 0
                continue
            if not self.bad_steps:
                bad = next(loss for loss in losses if not math.isfinite(loss))
                self.first_bad = (
                    f"the loss is {bad} since step {self.steps} (learning rate {step[0]['learning_rate']:g})"
                )
            self.bad_steps += 1
        if self.bad_steps > self.tolerance:
            raise self.stopped(self.first_bad)
        skips, self.skips = self.engine.skipped_steps - self.skips, self.engine.skipped_steps
        every = skips >= len(batch_metrics) // self.micro_batches
        self.skipped_in_a_row = self.skipped_in_a_row + skips if every else 0
        if self.skipped_in_a_row > self.tolerance:
            rate = batch_metrics[-1]["learning_rate"]
            since = self.steps - self.skipped_in_a_row
            raise self.stopped(f"no gradient is finite since step {since + 1} (learning rate {rate:g})")

    def stopped(self, reason: str) -> TrainingStopped:
        """The exception that ends the training for a reason."""
        last = f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        return TrainingStopped(f"{reason}; {last}; use a smaller learning rate or clip gradients")

"""Events of a training: base classes of a trial's callbacks, early stopping, and the check of the loss."""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import determined as det
from determined import pytorch
from torch import Tensor
from typing_extensions import override

from deepspeed_trial.errors import Diverged, InvalidInput, TrainingStopped, nearest
from deepspeed_trial.schedules import learning_rate


@dataclass(frozen=True)
class Code:
    """The code that a local checkpoint copies.

    Attributes:
        folder: the folder to copy, without the paths that its ``.detignore`` lists.
        excluded: more files and folders to leave out, such as images.
    """

    folder: pathlib.Path
    excluded: Sequence[pathlib.Path] = ()


class Callback(pytorch.PyTorchCallback):
    """Determined's callback with four more methods; every rank calls each of them."""

    def on_optimizer_step(self) -> None:
        """Called after every optimizer step, before any report, validation or checkpoint."""

    def on_checkpoint_load_end(self, checkpoint_dir: pathlib.Path) -> None:
        """Called when the engines have loaded a checkpoint.

        Args:
            checkpoint_dir: the checkpoint's folder.
        """

    def on_test_start(self) -> None:
        """Called before the trained network is tested."""

    def on_test_end(self, metrics: dict[str, Any]) -> None:
        """Called after the test and before its report.

        Args:
            metrics: the metrics by name; the report contains the callback's changes.
        """


class TrialHooks(Callback):
    """A callback that also describes its trial. ``build_callbacks`` may return one, under any name.

    To add files to a checkpoint, override Determined's ``on_checkpoint_write_end``; every rank calls it.
    """

    def identity(self) -> Mapping[str, Mapping[str, Any]]:
        """Return settings that must match on resume, in addition to the engine's settings.

        Returns:
            JSON values by their names in error lines, in three groups. ``net``: a difference makes the
            weights useless. ``mode``: a difference requires a conversion of the checkpoint. ``position``: a
            difference loses the place in the data.
        """
        return {}

    def layer_names(self) -> Sequence[str] | None:
        """Return the names that a pipeline's layers have in the network without a pipeline; None for numbers.

        With these names a pipeline can resume from a checkpoint of the network without a pipeline, and the
        reverse.
        """
        return None

    def stages(self) -> Sequence[tuple[float, float]]:
        """Return the stages of a training; all steps of a stage have the same duration.

        Returns:
            For each stage, the fraction of the training at the stage's end, in order up to 1, and the
            duration of the stage's steps, relative to a step in the last stage.
        """
        return ((1.0, 1.0),)

    def averages(self) -> Mapping[Tensor, Tensor]:
        """Return averages to save, keyed by the master weights and buffers that are averaged."""
        return {}

    def advise_on_memory(self) -> str:
        """Return one line of advice on using less memory; it is printed when memory runs out."""
        return "use a smaller micro-batch"

    def code(self) -> Code:
        """Return the code that a local checkpoint copies: by default the working directory."""
        return Code(pathlib.Path.cwd())


def steps_done(context: Any) -> int:
    """Return the optimizer steps done at the last report; accept Determined's context, too."""
    done: int | None = getattr(context, "steps_done", None)
    if done is None:  # Determined's context, which raises an error before the first step
        with contextlib.suppress(det.errors.InternalException):
            done = context.current_train_batch() + 1
    return done or 0


class Patience:
    """Counts consecutive validations without an improvement of a metric.

    Args:
        patience: number of validations to wait for an improvement; None means no limit.
        min_improvement: smaller improvements do not count.
        smaller_is_better: whether smaller values are better, as for a loss.
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
        """Whether the patience is exhausted."""
        return self.patience is not None and self.waited >= self.patience

    def update(self, value: float) -> bool:
        """Record the metric of a validation, and return whether to stop the training."""
        best = value if self.best is None else self.best
        gain = best - value if self.smaller_is_better else value - best
        if self.best is None or gain > self.min_improvement:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.is_over


class EarlyStopping(pytorch.PyTorchCallback):
    """End the training, with a checkpoint, when a validation metric has stopped improving.

    Args:
        context: the trial's context.
        metric: name of a validation metric.
        patience: number of validations to wait for an improvement.
        min_improvement: smaller improvements do not count.
        smaller_is_better: None means true for ``loss`` and false for other metrics.

    Raises:
        InvalidInput: after a validation without the metric.
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
        if self.metric not in metrics:
            reason = f"not in a validation; {nearest(self.metric, metrics)}"
            raise InvalidInput(f"EarlyStopping: {self.metric!r}: {reason}")
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
        best = state_dict["best"]
        self.patience.best = None if best is None else float(best)
        self.patience.waited = int(state_dict["waited"])
        self.context.set_stop_requested(self.patience.is_over)  # the checkpoint's run had stopped


class NonFiniteLossMonitor(pytorch.PyTorchCallback):
    """Stop the training when too many steps in a row have a loss, or gradients, that are not finite.

    Args:
        engines: the engines, which count the steps that they skip because of gradients that are not finite.
        micro_batches: calls of ``train_batch`` per step.
        tolerance: number of consecutive bad steps to accept; fp16 skips steps while its loss scale falls.

    Attributes:
        checkpoint: UUID of the last checkpoint that this run saved or, before that, resumed from.

    Raises:
        TrainingStopped: naming the first bad step, the learning rate and the last checkpoint.
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
        self.skips = self._skips()  # a checkpoint restores the engines' counts

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
            raise self.stopped(f"no gradient has been finite since step {since}{_rate(batch_metrics[-1])}")

    def _skips(self) -> int:
        """Return the number of steps that every engine skipped."""
        return min(engine.skipped_steps for engine in self.engines)

    def _check_losses(self, step: list[dict[str, Any]]) -> None:
        losses = [float(metrics["loss"]) for metrics in step if "loss" in metrics]
        bad = [loss for loss in losses if not math.isfinite(loss)]
        if not bad:
            self.bad_steps = 0
            return
        if not self.bad_steps:
            self.first_bad = f"the loss has been {bad[0]} since step {self.steps}{_rate(step[0])}"
        self.bad_steps += 1

    @contextlib.contextmanager
    def explaining_overflow(self, step: int) -> Iterator[None]:
        """Stop the training with one line when fp16's loss scale cannot fall further."""
        try:
            yield
        except Exception as error:  # DeepSpeed raises a bare Exception
            if "loss scale already at minimum" not in str(error):
                raise
            where = f"in step {step} (learning rate {learning_rate(self.engines[0]):g})"
            raise self.stopped(f"the gradients overflow at the minimum loss scale {where}") from error

    def stopped(self, reason: str) -> TrainingStopped:
        """Return the exception that ends the training."""
        last = (
            f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "no checkpoint was saved"
        )
        return Diverged(f"{reason}; {last}; use a smaller learning rate or clip gradients")


def _rate(metrics: Mapping[str, Any]) -> str:
    return f" (learning rate {metrics['learning_rate']:g})" if "learning_rate" in metrics else ""

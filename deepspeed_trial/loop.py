"""Determined's training loop, patched: periods of any length, and no waiting for the device in a step.

What Determined 0.38 does, and the methods of ``Loop`` that cure it:

- Periods longer than an epoch never come, and a trial always sees epoch 0: ``_train_with_boundaries``.
- Every metric is copied to the host in every micro-batch, and gathered over the ranks in every step:
  ``_train_batch``, ``_aggregate_training_metrics``.
- A resumed trial skips too few micro-batches under gradient accumulation, and ``shuffle=True`` draws from
  torch's global generator, so that ranks may shard different orders, and a resumed trial has another:
  ``_set_data_loaders``.
- A rank that reports no metrics, as of a parallel model, fails in validation, and a validation draws from
  the generators of training: ``_validate``.
- A local checkpoint copies all of the working directory as its code, and every checkpoint has the whole
  configuration, with its keys and passwords: ``_save``.
- A trial that a search has stopped is trained to its end: ``_stop_requested``.
- TensorBoard's files of a trial are uploaded only if Determined writes its own: ``_stop_requested``.
- CUDA is synchronised on a machine without a GPU: ``_sync_device``.

``controller.py`` adds to some of these methods. A Determined that lacks one is refused.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import determined as det
import torch
from deepspeed.accelerator import get_accelerator
from determined import core, pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from deepspeed_trial import redaction
from deepspeed_trial.checkpoints.code import copying
from deepspeed_trial.cluster import on_cluster, search_has_stopped
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.hangs.place import CHECKPOINT, DATA, REPORT, TRAINING, VALIDATION
from deepspeed_trial.hooks import Code
from deepspeed_trial.random_state import State, random_state, set_random_state, shuffled_by_seed

REQUIRED = """_train_with_boundaries _train_batch _aggregate_training_metrics _set_data_loaders _save
    _stop_requested _sync_device _step_batch _on_epoch_start _validate _checkpoint _load _run
    _upload_tb_files""".split()


class Loop(det_ds.DeepSpeedTrialController):
    """Determined's controller with its loop mended; arguments as Determined's."""

    def __init__(self, **kwargs: Any) -> None:
        missing = [name for name in REQUIRED if not hasattr(det_ds.DeepSpeedTrialController, name)]
        if missing:
            raise RuntimeError(f"determined {det.__version__} lacks {', '.join(missing)}; install 0.38.1")
        super().__init__(**kwargs)
        self.start_from_batch: int = kwargs["steps_completed"]
        self.validates_as = VALIDATION
        self.training_randomness: State | None = None  # while a validation runs
        whole_steps = self.context.use_pipeline_parallel or self.context._manual_grad_accumulation
        self.calls_per_step = 1 if whole_steps else self.context.get_num_micro_batches_per_slot()

    @property
    def epoch_length(self) -> int:
        """Optimizer steps in an epoch, once the data is there."""
        assert self.context._epoch_len
        return self.context._epoch_len

    @property
    def steps_done(self) -> int:
        """Optimizer steps since the start of training."""
        return self.state.batches_trained if self.state else 0

    def after_step(self, boundaries: list[pytorch._TrainBoundary]) -> None:
        """Called after every optimizer step; may set a boundary's ``limit_reached``."""

    def code(self) -> Code:
        """What a local checkpoint keeps as its code."""
        return Code(pathlib.Path.cwd())

    @override
    def _set_data_loaders(self) -> None:
        """Converts the position of a resumed run from steps to micro-batches, and shuffles by the seed.

        Raises:
            InvalidInput: if the data is not enough for one optimizer step, or for a batch of the validation.
        """
        steps = self.start_from_batch
        self.start_from_batch = steps * self.context.get_num_micro_batches_per_slot()
        with shuffled_by_seed(self.trial, self.context.get_trial_seed()):
            try:
                super()._set_data_loaders()
            except StopIteration:
                raise InvalidInput("validation data: holds no batch; use more, or smaller batches") from None
        self.start_from_batch = steps
        if not self.context._epoch_len:
            needed = self.context.get_num_micro_batches_per_slot()
            mend = "use more data, fewer processes or a smaller batch"
            raise InvalidInput(
                f"training data: fewer than the {needed} micro-batches of one optimizer step a rank; {mend}"
            )

    @override
    def _train_with_boundaries(
        self, train_boundaries: list[pytorch._TrainBoundary]
    ) -> tuple[list[pytorch._TrainBoundary], list[dict[str, Any]]]:
        """Trains to a boundary or an epoch's end, counting steps and epochs since the start of training."""
        if self.is_chief:
            self.core_context.train.set_status("training")
        for model in self.context.models:
            model.train()
        self.context.reset_reducers()
        assert self.state
        metrics: list[dict[str, Any]] = []
        while True:
            step = self.state.batches_trained
            epoch = step // self.epoch_length
            self.context._current_batch_idx = step
            self.context.place.begin(TRAINING, step + 1)
            if step % self.epoch_length == 0:
                self._on_epoch_start(epoch)
            metrics += self._train_batch(batch_idx=step, epoch_idx=epoch)
            self._step_batch()
            for boundary in train_boundaries:
                boundary.limit_reached = self._is_reached(boundary, step + 1)
            self.after_step(train_boundaries)
            ends_epoch = (step + 1) % self.epoch_length == 0
            if ends_epoch or any(boundary.limit_reached for boundary in train_boundaries):
                return train_boundaries, metrics

    def _is_reached(self, boundary: pytorch._TrainBoundary, steps: int) -> bool:
        if self.test_mode and boundary.step_type == pytorch._TrainBoundaryType.TRAIN:
            return True
        if isinstance(boundary.unit, pytorch.Epoch):
            epochs, rest = divmod(steps, self.epoch_length)
            return not rest and boundary.unit.should_stop(epochs)
        return boundary.unit.should_stop(steps)

    @override
    def _train_batch(self, epoch_idx: int, batch_idx: int) -> list[dict[str, Any]]:
        """One optimizer step. Its scalar metrics stay on the device until they are reported."""
        metrics = []
        for _ in range(self.calls_per_step):
            self.context.place.enter(DATA)
            result = self.trial.train_batch(self.training_iterator, epoch_idx, batch_idx)
            if self.context._mpu.should_report_metrics:
                metrics.append(_kept(result))
        if self.context.profiler:
            self.context.profiler.step()
        engine, whole_step = self.context.models[0], self.context.get_num_micro_batches_per_slot()
        if not self.context.use_pipeline_parallel:
            assert engine.micro_steps % whole_step == 0, "did not train for gradient accumulation steps"
        return metrics

    @override
    def _aggregate_training_metrics(self, training_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Fetches the metrics of all steps since the last report together."""
        with self.context.place.during(REPORT, self.steps_done):
            return super()._aggregate_training_metrics(_fetch(training_metrics))

    @override
    def _validate(self) -> dict[str, Any]:
        """Validates, and leaves the random numbers of training as if it had not.

        So weights do not depend on how often a run validates, and one that is continued beyond its length is
        as if never ended. The metrics are those of the ranks that report any, whichever they are.
        """
        self.training_randomness = random_state(self.context.device)
        with (
            self.context.place.during(self.validates_as, self.steps_done),
            _reducing_what_is_reported(self.context.distributed),
        ):
            metrics = super()._validate()
        self._end_validation()
        return metrics

    @override
    def _checkpoint(self, already_exiting: bool) -> None:
        """Saves; a validation saves what is best before it returns."""
        self._end_validation()
        with self.context.place.during(CHECKPOINT, self.steps_done):
            super()._checkpoint(already_exiting)

    def _end_validation(self) -> None:
        if self.training_randomness:
            set_random_state(self.training_randomness, self.context.device)
            self.training_randomness = None

    @override
    def _save(self, path: pathlib.Path) -> None:
        """Copies the trial's code alone into a local checkpoint; on a cluster there is a clean copy.

        Determined writes the configuration into ``load_data.json``, which therefore gets a redacted one.
        """
        code = copying(self.code()) if self.local_training else contextlib.nullcontext()
        with code, _redacted(self.context):
            super()._save(path)

    @override
    def _stop_requested(self) -> None:
        """Uploads TensorBoard's files after every report; asks after a validation whether it was the last."""
        if on_cluster():
            if not self.context.get_enable_tensorboard_logging():
                self._upload_tb_files()
            validated, steps = self._validation_is_current(), self.steps_done
            if validated and search_has_stopped(self.core_context, self.context.experiment, steps):
                raise pytorch._ShouldExit()
        super()._stop_requested()

    @override
    def _sync_device(self) -> None:
        """Waits for whichever device there is."""
        get_accelerator().synchronize()


@contextlib.contextmanager
def _redacted(context: Any) -> Iterator[None]:
    """Replace the configuration of a context by the one that others may read."""
    config, hyperparameters = context._exp_conf, context._hparams
    context._exp_conf = redaction.experiment(config or {})
    context._hparams = redaction.values(hyperparameters)
    try:
        yield
    finally:
        context._exp_conf, context._hparams = config, hyperparameters


@contextlib.contextmanager
def _reducing_what_is_reported(distributed: core.DistributedContext) -> Iterator[None]:
    """Tells ranks that report no validation metrics the names of the others'; or they fail, or lose them."""
    prepare, reduce = pytorch._prepare_metrics_reducers, pytorch._reduce_metrics
    names: dict[str, None] = {}

    def prepare_for_all(reducer: Any, keys: Any) -> Any:
        for reported in distributed.allgather(list(keys or ())):
            names.update(dict.fromkeys(reported))
        return prepare(reducer, names.keys())

    def reduce_for_all(*args: Any, **kwargs: Any) -> Any:
        return reduce(*args, **{**kwargs, "keys": names.keys()})

    pytorch._prepare_metrics_reducers = prepare_for_all
    pytorch._reduce_metrics = reduce_for_all
    try:
        yield
    finally:
        pytorch._prepare_metrics_reducers, pytorch._reduce_metrics = prepare, reduce


def _kept(metrics: Any) -> dict[str, Any]:
    """Metrics as they are kept until the next report.

    Scalars stay on the device, without the graph that they came from; of other tensors the host gets a copy.

    Raises:
        InvalidExperimentException: as upstream, if they are neither a tensor, the loss, nor a dictionary.
    """
    if isinstance(metrics, torch.Tensor):
        metrics = {"loss": metrics}
    if not isinstance(metrics, dict):
        wanted = "a dictionary mapping string names to Tensor metrics"
        raise det.errors.InvalidExperimentException(f"train_batch must return {wanted}, got {type(metrics)}")
    kept = dict(metrics)
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            kept[name] = value.detach().cpu().numpy() if value.dim() else value.detach().clone()
    return kept


def _fetch(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies the scalar tensors among metrics to the host, one transfer a metric."""
    fetched = [dict(each) for each in metrics]
    for name in metrics[0] if metrics else ():
        having = [each for each in fetched if isinstance(each.get(name), torch.Tensor)]
        if having:
            device = having[0][name].device
            values = torch.stack([each[name].to(device) for each in having]).tolist()
            for each, value in zip(having, values, strict=True):
                each[name] = value
    return fetched

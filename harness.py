"""Runs a trial in Determined's own trainer: on a cluster, on GPUs or on CPU cores.

This is the only file that touches Determined's private names. What it mends in Determined 0.38:

- the context refuses a machine without a GPU;
- periods longer than an epoch never come, and a trial always sees epoch 0;
- every metric is copied to the host in every micro-batch, and gathered over the ranks in every step;
- a checkpoint cannot be loaded with torch 2.6 or later;
- a resumed trial skips too few micro-batches under gradient accumulation, and none off a cluster.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import processes

import deepspeed
import determined as det
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from determined import core, pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from errors import InvalidInput, one_line
from experiment import Experiment
from local_run import LocalPreempt, LocalTrain


class TrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, on the CPU where there is no GPU."""

    output: pathlib.Path  # off a cluster, the run's folder

    @override
    def _init_device(self) -> None:
        if self._num_gpus:
            super()._init_device()
        else:
            self.device = torch.device("cpu")


def on_cluster() -> bool:
    """Whether this process runs in a trial of a Determined cluster."""
    info = det.get_cluster_info()
    return info is not None and info.task_type == "TRIAL"


@contextlib.contextmanager
def trial_context(experiment: Experiment, output: pathlib.Path = pathlib.Path()) -> Iterator[TrialContext]:
    """Sets up processes, seeds and Determined's services, and gives the context for a trial.

    On a cluster, bad configuration ends the trial as an invalid hyperparameter set, and is not tried again.

    Args:
        experiment: the experiment, from the cluster or from a file.
        output: off a cluster, the run's folder; all ranks take the chief's.
    """
    processes.share_out_cores()
    if on_cluster():
        info = det.get_cluster_info()
        assert info is not None
        seed, num_gpus = info.trial.trial_seed, len(info.gpu_uuids)
        steps_completed = info.trial._steps_completed
        distributed = _cluster_processes()
    else:
        seed, num_gpus = experiment.seed, torch.cuda.device_count()
        steps_completed = 0
        distributed = processes.local_processes()
        output = distributed.broadcast(output)
        _make_folder(output)
    processes.seed_everything(seed)
    storage = None if on_cluster() else str(output / "checkpoints")
    tensorboard = core.TensorboardMode.MANUAL
    with core.init(distributed=distributed, checkpoint_storage=storage, tensorboard_mode=tensorboard) as core_context:
        if not on_cluster():
            core_context.train = LocalTrain(output, experiment.metric, experiment.smaller_is_better)
            core_context.preempt = LocalPreempt(core_context.distributed).start()
        context = TrialContext(
            core_context=core_context,
            trial_seed=seed,
            hparams=experiment.hyperparameters,
            slots_per_trial=core_context.distributed.get_size(),
            num_gpus=num_gpus,
            exp_conf=experiment.config,
            steps_completed=steps_completed,
            enable_tensorboard_logging=on_cluster(),
        )
        context.output = output
        with faults_end_the_trial():
            yield context


@contextlib.contextmanager
def faults_end_the_trial() -> Iterator[None]:
    """On a cluster turns ``InvalidInput`` into ``det.InvalidHP``, so that a search goes on with the next trial.

    The faults stay in the trial's log, and the trial is not restarted.
    """
    try:
        yield
    except InvalidInput as error:
        if on_cluster():
            print(error, file=sys.stderr)
            raise det.InvalidHP(str(error)) from error
        raise


def _make_folder(output: pathlib.Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--output: {output}: cannot be made ({one_line(error)}); give another folder") from error


def _cluster_processes() -> core.DistributedContext | None:
    if not det._DistributedBackend().use_deepspeed():
        processes.start_torch_distributed()
        return None
    deepspeed.init_distributed(auto_mpi_discovery=False)
    return core.DistributedContext.from_deepspeed()


# ------------------------------------------------------------------------------------------------- training


def train_unit(period: tuple[str, int] | None, batch_size: int) -> pytorch.TrainUnit:
    """Puts (unit, N) into Determined's terms; None is a period that never ends.

    Args:
        period: ``batches``, ``records`` or ``epochs``, and how many.
        batch_size: images an optimizer step.
    """
    if period is None:
        return pytorch.Batch(sys.maxsize)
    unit, number = period
    if unit == "epochs":
        return pytorch.Epoch(number)
    return pytorch.Batch(number if unit == "batches" else max(number // batch_size, 1))


def fit(
    trial: Any,
    context: TrialContext,
    experiment: Experiment,
    latest_checkpoint: str | None = None,
    test_mode: bool = False,
) -> TrialController:
    """Trains, validates and checkpoints as the experiment says, on a cluster and off it.

    Args:
        trial: a ``CIFARTrial`` made with ``context``.
        context: from ``trial_context``.
        experiment: the lengths, periods and policies.
        latest_checkpoint: the UUID of the checkpoint to go on from.
        test_mode: one batch of everything.

    Returns:
        The controller, whose ``state`` says what was done.
    """
    batch_size = trial.model_engine.train_batch_size()
    controller = TrialController(
        trial_inst=trial,
        context=context,
        max_length=train_unit(experiment.max_length, batch_size),
        validation_period=train_unit(experiment.period("min_validation_period"), batch_size),
        checkpoint_period=train_unit(experiment.period("min_checkpoint_period"), batch_size),
        reporting_period=pytorch.Batch(experiment.scheduling_unit),
        checkpoint_policy=experiment.config.get("checkpoint_policy") or "best",
        step_zero_validation=bool(experiment.config.get("perform_initial_validation")),
        searcher_metric_name=experiment.metric,
        smaller_is_better=experiment.smaller_is_better,
        steps_completed=_steps_completed(context, latest_checkpoint),
        latest_checkpoint=latest_checkpoint,
        local_training=not on_cluster(),
        test_mode=test_mode,
        global_batch_size=batch_size,
        profiling_enabled=on_cluster() and bool((experiment.config.get("profiling") or {}).get("enabled")),
    )
    controller.run()
    return controller


def latest_checkpoint() -> str | None:
    """On a cluster, the checkpoint that a paused or restarted trial goes on from."""
    info = det.get_cluster_info()
    return info.latest_checkpoint if info is not None and on_cluster() else None


def stopped(context: TrialContext) -> bool:
    """Whether a signal stopped the training, off a cluster."""
    preempt = context._core.preempt
    return isinstance(preempt, LocalPreempt) and preempt.requested


def _steps_completed(context: TrialContext, latest_checkpoint: str | None) -> int:
    if latest_checkpoint is None or on_cluster():
        return context.get_initial_batch()
    with context._core.checkpoint.restore_path(latest_checkpoint) as path:
        return int(json.loads((path / "metadata.json").read_text())["steps_completed"])


class LastCheckpoint(pytorch.PyTorchCallback):
    """Remembers the UUID of the last whole checkpoint."""

    uuid: str | None = None

    @override
    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.uuid = uuid


class TrialController(det_ds.DeepSpeedTrialController):
    """Determined's training loop, with periods that mean what they say and no waiting for the device in a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.last_checkpoint = LastCheckpoint()
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {**self.callbacks, "last": self.last_checkpoint}
        self.start_from_batch: int = kwargs["steps_completed"]

    @property
    def local(self) -> LocalTrain | None:
        """On the chief off a cluster, what keeps the metrics."""
        train = self.core_context.train
        return train if isinstance(train, LocalTrain) and self.is_chief else None

    @override
    def _set_data_loaders(self) -> None:
        steps = self.start_from_batch
        self.start_from_batch = steps * self.context.get_num_micro_batches_per_slot()  # the loader skips micro-batches
        super()._set_data_loaders()
        self.start_from_batch = steps
        if self.local:
            length = self.max_length.value
            assert isinstance(length, int)
            sizes = self.trial.train_sampler.step_sizes
            total = length * len(sizes) if isinstance(self.max_length, pytorch.Epoch) else length
            self.local.begin(1 if self.test_mode else total, sizes, steps)

    @override
    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.local:
                self.local.close()

    @override
    def _train_with_boundaries(
        self, train_boundaries: list[pytorch._TrainBoundary]
    ) -> tuple[list[pytorch._TrainBoundary], list[dict[str, Any]]]:
        """Trains until a boundary, counting steps and epochs since the start of training."""
        if self.is_chief:
            self.core_context.train.set_status("training")
        if self.local:
            self.local.restart_clock()
        for model in self.context.models:
            model.train()
        self.context.reset_reducers()
        epoch_len = self.context._epoch_len
        assert self.state and epoch_len
        metrics: list[dict[str, Any]] = []
        while True:
            step = self.state.batches_trained
            epoch = step // epoch_len
            self.context._current_batch_idx = step
            if step % epoch_len == 0:
                self._on_epoch_start(epoch)
            metrics += self._train_batch(batch_idx=step, epoch_idx=epoch)
            self._step_batch()
            if self.local:
                self.local.step()
            for boundary in train_boundaries:
                boundary.limit_reached = self._reached(boundary, step + 1, epoch_len)
            if any(boundary.limit_reached for boundary in train_boundaries):
                return train_boundaries, metrics

    def _reached(self, boundary: pytorch._TrainBoundary, steps: int, epoch_len: int) -> bool:
        if self.test_mode and boundary.step_type == pytorch._TrainBoundaryType.TRAIN:
            return True
        if isinstance(boundary.unit, pytorch.Epoch):
            return steps % epoch_len == 0 and boundary.unit.should_stop(steps // epoch_len)
        return boundary.unit.should_stop(steps)

    @override
    def _train_batch(self, epoch_idx: int, batch_idx: int) -> list[dict[str, Any]]:
        """One optimizer step. The metrics stay on the device; ``_aggregate_training_metrics`` fetches them together."""
        if self.context.profiler:
            return super()._train_batch(epoch_idx=epoch_idx, batch_idx=batch_idx)
        once = self.context.use_pipeline_parallel or self.context._manual_grad_accumulation
        micro_batches = 1 if once else self.context.get_num_micro_batches_per_slot()
        return [self.trial.train_batch(self.training_iterator, epoch_idx, batch_idx) for _ in range(micro_batches)]

    @override
    def _aggregate_training_metrics(self, training_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._aggregate_training_metrics(_fetch(training_metrics))

    @override
    def _load(self, load_path: pathlib.Path) -> None:
        with _numpy_state_allowed():
            super()._load(load_path)

    @override
    def _sync_device(self) -> None:
        get_accelerator().synchronize()


def _fetch(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies the tensors among scalar metrics to the host, one copy a name."""
    fetched = [dict(each) for each in metrics]
    for name in metrics[0] if metrics else ():
        values = [each[name] for each in metrics]
        if all(isinstance(value, torch.Tensor) for value in values):
            for each, value in zip(fetched, torch.stack(values).float().cpu().tolist(), strict=True):
                each[name] = value
    return fetched


def _numpy_state_allowed() -> contextlib.AbstractContextManager[Any]:
    """Lets ``torch.load`` read numpy's RNG state, and nothing else that it would refuse."""
    if not hasattr(torch.serialization, "safe_globals"):  # before torch 2.5, which Determined can still load
        return contextlib.nullcontext()
    array = np.zeros(0, dtype=np.uint32)
    reconstruct: Any = array.__reduce__()[0]
    return torch.serialization.safe_globals([reconstruct, np.ndarray, np.dtype, type(array.dtype)])

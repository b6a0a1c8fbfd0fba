"""Runs a trial in Determined's own trainer: on a cluster, on GPUs, and on CPU cores, which its own context refuses."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import processes

import deepspeed
import determined as det
import filelock
import torch
from determined import core, pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from controller import TrialController
from errors import InvalidInput, TrainingStopped, one_line
from experiment import Experiment, on_cluster
from local_checkpoints import LocalCheckpoints
from local_run import LocalPreempt, LocalTrain, run_fault


class TrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, on the CPU where there is no GPU."""

    output: pathlib.Path  # off a cluster, the run's folder
    resumed_from = 0  # optimizer steps of the run that this one goes on with
    _tbd_writer: Any

    @override
    def _init_device(self) -> None:
        if self._num_gpus:
            super()._init_device()
        else:
            self.device = torch.device("cpu")

    @override
    def get_tensorboard_writer(self) -> Any:
        if self._tbd_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run had written beyond the checkpoint that this one goes on from is not to be seen again.
            self._tbd_writer = SummaryWriter(str(self.get_tensorboard_path()), purge_step=self.resumed_from)
        return self._tbd_writer


@contextlib.contextmanager
def trial_context(
    experiment: Experiment, output: pathlib.Path = pathlib.Path(), resumes: bool = False
) -> Iterator[TrialContext]:
    """Sets up processes, seeds and Determined's services, and gives the context for a trial.

    On a cluster, bad configuration ends the trial as an invalid hyperparameter set, and is not tried again.

    Args:
        experiment: the experiment, from the cluster or from a file.
        output: off a cluster, the run's folder; all ranks take the chief's.
        resumes: whether the run that is there is to go on; another one may not be there.
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
        output = distributed.broadcast(output.resolve())
    processes.seed_everything(seed)
    storage = None if on_cluster() else str(output / "checkpoints")
    tensorboard = core.TensorboardMode.MANUAL
    with (
        contextlib.nullcontext() if on_cluster() else _own_folder(output, distributed, resumes),
        core.init(distributed=distributed, checkpoint_storage=storage, tensorboard_mode=tensorboard) as core_context,
    ):
        if not on_cluster():
            core_context.train = LocalTrain(output, experiment)
            core_context.preempt = LocalPreempt(core_context.distributed, output).start()
            core_context.checkpoint = LocalCheckpoints(
                output / "checkpoints",
                core_context.distributed,
                experiment.keep("save_trial_best"),
                experiment.keep("save_trial_latest"),
                core_context.train.score,
            )
        context = TrialContext(
            core_context=core_context,
            trial_seed=seed,
            hparams=experiment.hyperparameters,
            slots_per_trial=core_context.distributed.get_size(),
            num_gpus=num_gpus,
            exp_conf=experiment.config,
            steps_completed=steps_completed,
            enable_tensorboard_logging=False,  # Determined's own writes in every step; see tensorboard_log.py
        )
        context.output = output
        with faults_end_the_trial():
            if on_cluster():
                _be_the_trial(experiment, distributed)
            yield context


@contextlib.contextmanager
def faults_end_the_trial() -> Iterator[None]:
    """On a cluster turns ``InvalidInput`` into ``det.InvalidHP``, so that a search goes on with the next trial.

    The faults stay in the trial's log, and the trial is not restarted. Nor is one whose loss has diverged.
    """
    try:
        yield
    except (InvalidInput, TrainingStopped) as error:
        if on_cluster():
            print(error, file=sys.stderr)
            raise det.InvalidHP(str(error)) from error
        raise


@contextlib.contextmanager
def _own_folder(output: pathlib.Path, distributed: core.DistributedContext, resumes: bool) -> Iterator[None]:
    """Makes the run's folder and keeps other runs out of it until this one ends, however it ends."""
    fault, lock = None, filelock.FileLock(output / ".lock")
    if distributed.rank == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            fault = run_fault(output, resumes)
        except filelock.Timeout:
            fault = f"--output: {output}: another run is writing there; wait for its end or give another folder"
        except OSError as error:
            fault = f"--output: {output}: cannot be made ({one_line(error)}); give another folder"
    fault = distributed.broadcast(fault)
    if fault:
        raise InvalidInput(fault)
    try:
        yield
    finally:
        lock.release()


def _be_the_trial(experiment: Experiment, distributed: core.DistributedContext | None) -> None:
    """On a cluster, logs from the chief alone, and checks what the master does not."""
    info = det.get_cluster_info()
    assert info is not None
    chief = distributed is None or distributed.rank == 0
    level = logging.DEBUG if info.trial._debug else logging.INFO
    logging.basicConfig(level=level if chief else logging.WARNING, format=det.LOG_FORMAT)
    experiment.check_length()
    slots, size = sum(info.container_slot_counts), distributed.size if distributed else 1
    if slots and size != slots:
        raise InvalidInput(
            f"resources.slots_per_trial: {slots}: but {size} processes were started; keep startup-hook.sh beside the"
            " experiment file, and determined.launch.deepspeed in its entrypoint"
        )


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
    steps = context.get_initial_batch()
    if latest_checkpoint and not on_cluster():
        steps = context._core.checkpoint.get_metadata(latest_checkpoint)["steps_completed"]
    context.resumed_from = steps
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
        steps_completed=steps,
        latest_checkpoint=latest_checkpoint,
        local_training=not on_cluster(),
        test_mode=test_mode,
        global_batch_size=batch_size,
        profiling=experiment.profiling,
        profiling_enabled=on_cluster() and experiment.profiling,
    )
    controller.run()
    return controller


def checkpoint_to_resume(context: TrialContext, which: str | None) -> str | None:
    """Gives the UUID of the checkpoint to go on from, or None.

    Args:
        context: from ``trial_context``.
        which: off a cluster, ``latest`` or a UUID; on one the master says it.

    Raises:
        InvalidInput: if there is no such checkpoint, or it is damaged.
    """
    if on_cluster():
        info = det.get_cluster_info()
        assert info is not None
        return info.latest_checkpoint
    if which is None:
        return None
    found: tuple[str, list[str]] | None = None
    if context.distributed.rank == 0:
        checkpoints = context._core.checkpoint
        assert isinstance(checkpoints, LocalCheckpoints)
        try:
            found = checkpoints.find(which), []
        except InvalidInput as error:
            found = "", error.faults
    name, faults = context.distributed.broadcast(found)
    if faults:
        raise InvalidInput(faults)
    return name


def stopped(context: TrialContext) -> bool:
    """Whether a signal stopped the training, off a cluster."""
    preempt = context._core.preempt
    return isinstance(preempt, LocalPreempt) and preempt.requested

"""The context of a trial, on a cluster or locally; unlike Determined's class, it needs no GPU."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import determined as det
import torch
from determined import core
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from deepspeed_trial import cluster, place, processes
from deepspeed_trial.checkpoints.store import LocalCheckpoints
from deepspeed_trial.checkpoints.stored_run import stored_run
from deepspeed_trial.checkpoints.uploads import Uploads
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.folder import FILES, default_output, own_folder
from deepspeed_trial.local.lost_disk import explain_lost_disk
from deepspeed_trial.local.progress import LocalMetrics
from deepspeed_trial.patches.engine import patch_engine
from deepspeed_trial.plan import Plan
from deepspeed_trial.random_state import seed_everything
from deepspeed_trial.services import ClusterServices, LocalServices, Services
from deepspeed_trial.trackers.tracking import Tracking, tracked, tracking_here, tracking_on_cluster
from deepspeed_trial.watch import watching


class TrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, on a GPU or a CPU.

    Attributes:
        core: Determined's Core API, or its local counterpart.
        services: metrics, checkpoints and stops of the cluster or of the local run.
        output: folder of a local run; None on a cluster.
        experiment: the experiment's configuration.
        resumes: whether a checkpoint's weights will replace the initial weights.
        resumed_from: optimizer steps that were done before this run resumed.
        place: the phase and step of this rank; ``watch`` reports them if the run hangs.
        tracking: the trackers of this run.
        plan: number of steps, and the progress at each step; a trial's schedules may read it.
        place_in_data: index of the current step, from 0, and number of steps in an epoch.
        accumulates: whether the loop calls ``train_batch`` for each micro-batch of a step.
        checks_reproducibility: whether every loader must be a ``determined.pytorch.DataLoader``.
    """

    core: core.Context
    services: Services
    output: pathlib.Path | None = None
    experiment: Experiment
    resumes = False
    resumed_from = 0
    place: place.Place
    tracking = Tracking()
    plan: Plan
    place_in_data: tuple[int, int] | None = None
    accumulates = True
    checks_reproducibility = True
    _mpu_of_trial: det_ds.ModelParallelUnit | None = None
    _hparams_of_trial: dict[str, Any] | None = None
    _writer: Any = None
    _writer_began = 0.0

    @override
    def _init_device(self) -> None:
        if torch.cuda.is_available():
            super()._init_device()
        else:
            self.device = torch.device(processes.device_type())

    # ------------------------------------------------------------------------------------ for the trial

    @override
    def wrap_model_engine(self, model: deepspeed.DeepSpeedEngine) -> deepspeed.DeepSpeedEngine:
        """Register an engine of the trial, and apply the patches that every engine needs."""
        patch_engine(model)
        place.follow(model, self.place)
        if isinstance(model, deepspeed.PipelineEngine) and not self.models:
            self._mpu_of_trial = det_ds.make_deepspeed_mpu(model.mpu)
        return super().wrap_model_engine(model)

    @override
    def set_mpu(self, mpu: det_ds.ModelParallelUnit) -> None:
        super().set_mpu(mpu)
        self._mpu_of_trial = mpu

    @property
    def mpu(self) -> det_ds.ModelParallelUnit:
        """Distribution of the data over the ranks, and the ranks that report."""
        return self._mpu_of_trial or det_ds.make_data_parallel_mpu(self.distributed)

    @override
    def disable_auto_grad_accumulation(self) -> None:
        self.accumulates = False

    @override
    def disable_dataset_reproducibility_checks(self) -> None:
        self.checks_reproducibility = False

    def take_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Replace the trial's hyperparameters, e.g. after a measurement of the best micro-batch size."""
        self._hparams_of_trial = dict(hparams)

    @override
    def get_hparams(self) -> dict[str, Any]:
        return super().get_hparams() if self._hparams_of_trial is None else self._hparams_of_trial

    @override
    def current_train_batch(self) -> int:
        return self._step_and_epoch()[0]

    @override
    def current_train_epoch(self) -> int:
        step, epoch = self._step_and_epoch()
        return step // epoch

    @override
    def is_epoch_start(self) -> bool:
        step, epoch = self._step_and_epoch()
        return step % epoch == 0

    @override
    def is_epoch_end(self) -> bool:
        step, epoch = self._step_and_epoch()
        return step % epoch == epoch - 1

    def _step_and_epoch(self) -> tuple[int, int]:
        if self.place_in_data is None:
            raise det.errors.InternalException("Training hasn't started.")
        return self.place_in_data

    @property
    def steps_done(self) -> int:
        """Optimizer steps done at the last report; before the first report, at the start of this run."""
        return self.resumed_from if self.place_in_data is None else self.place_in_data[0] + 1

    @override
    def get_tensorboard_writer(self) -> Any:
        """Return the writer of TensorBoard's files.

        After a resume the writer hides the events that the killed run wrote after its last checkpoint.
        """
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(self.get_tensorboard_path()), purge_step=self.resumed_from or None
            )
            self._writer_began = time.time()
        return self._writer

    def flush_tensorboard(self) -> None:
        """Write TensorBoard's events to the file; on a cluster, also close the file, at most once a second.

        An object store accepts only closed files. A file's name has its time in seconds, so two files of the
        same second would have the same name.
        """
        if self._writer is None:
            return
        if self.output or int(time.time()) == int(self._writer_began):
            self._writer.flush()
        else:
            self._writer.close()
            self._writer_began = time.time()


def make_context(
    services: Services, seed: int, steps_completed: int = 0, logs_tensorboard: bool = True
) -> TrialContext:
    """Return the context of a trial with one process per slot."""
    core_context, experiment = services.core, services.experiment
    context = TrialContext(
        core_context=core_context,
        trial_seed=seed,
        hparams=dict(experiment.hyperparameters),
        slots_per_trial=core_context.distributed.get_size(),
        num_gpus=torch.cuda.device_count(),
        exp_conf=dict(experiment.config),
        steps_completed=steps_completed,
        enable_tensorboard_logging=logs_tensorboard,
    )
    context.core, context.services, context.experiment = core_context, services, experiment
    context.place, context.plan = place.Place(), Plan()
    return context


@contextlib.contextmanager
def init(
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    *,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
    output: pathlib.Path | None = None,
    resumes: bool | None = False,
    writes: Sequence[str] = (),
) -> Iterator[TrialContext]:
    """Set up processes, seeds and Determined's services, and yield the context for a trial.

    It replaces ``determined.pytorch.deepspeed.init`` and also supports CPUs. Without a cluster, the run
    writes checkpoints and metrics to a folder. On a cluster, the master marks a trial with a bad
    configuration as invalid, and does not restart the trial.

    Args:
        hparams: hyperparameters; on a cluster the master's are used instead.
        exp_conf: experiment configuration; on a cluster the master's is used instead.
        distributed: the ranks, if the process group exists already.
        enable_tensorboard_logging: whether to write every reported metric for TensorBoard. The writer that
            a trial uses itself works in either case.
        output: folder of a local run, by default ``runs/trial-<time>``; all ranks use the chief's.
        resumes: True continues the run in the folder. False requires a folder without a run. None continues
            the run if it has a checkpoint, and otherwise starts one; ``context.resumes`` says which.
        writes: more files that the program writes into the folder.

    Raises:
        InvalidInput: if the folder or the launcher's port cannot be used, or there are more processes than
            GPUs.
    """
    processes.share_cores()
    if experiment := cluster.cluster_experiment():
        joined = distributed or processes.join_cluster_processes(experiment.hang_after)
        with _on_cluster(experiment, joined, enable_tensorboard_logging) as context:
            yield context
        return
    experiment = Experiment(exp_conf or {}, hparams or {})
    ranks = distributed or processes.join_local_processes(experiment.hang_after)
    output = ranks.broadcast(pathlib.Path(os.path.realpath(output or default_output("trial"))))
    stored = stored_run(experiment.storage, output)
    with (
        own_folder(output, ranks, resumes, writes, stored) as goes_on,
        Uploads(stored, output, (*FILES, *writes))
        if stored and ranks.rank == 0
        else contextlib.nullcontext() as uploads,
        locally(experiment, ranks, output, goes_on, enable_tensorboard_logging, uploads) as context,
    ):
        keeps_record = goes_on or resumes is None
        tracking = tracking_here(experiment, ranks.rank == 0, output, keeps_record)
        assert isinstance(context.services, LocalServices)
        signals = context.services.signals
        with (
            tracked(tracking, context.core.train, lambda: signals.requested) as context.tracking,
            watching(ranks, context.place, experiment.hang_after),  # after the trackers, which may take long
        ):
            yield context


@contextlib.contextmanager
def _on_cluster(
    experiment: Experiment, distributed: core.DistributedContext | None, logs_tensorboard: bool
) -> Iterator[TrialContext]:
    info = cluster.cluster_info()
    seed = cluster.trial_seed(experiment)
    seed_everything(seed)
    with (
        cluster.leaves_once_reported(),
        core.init(
            distributed=distributed,
            preempt_mode=core.PreemptMode.ChiefOnly,
            tensorboard_mode=core.TensorboardMode.MANUAL,
        ) as core_context,
    ):
        services = ClusterServices(core_context, experiment)
        context = make_context(services, seed, info.trial._steps_completed, logs_tensorboard)
        context.resumes = info.latest_checkpoint is not None
        with cluster.errors_end_the_trial():
            cluster.log_from_chief(experiment, core_context.distributed.rank == 0)
            cluster.check_slots(core_context.distributed.size)
            ranks = core_context.distributed
            tracking = tracking_on_cluster(experiment, ranks.rank == 0, info)
            with (
                tracked(tracking, core_context.train, lambda: services.is_preempted) as context.tracking,
                watching(ranks, context.place, experiment.hang_after),
                contextlib.closing(services.vote),
            ):
                yield context


@contextlib.contextmanager
def locally(
    experiment: Experiment,
    distributed: core.DistributedContext,
    output: pathlib.Path,
    resumes: bool,
    logs_tensorboard: bool,
    uploads: Uploads | None = None,
) -> Iterator[TrialContext]:
    """Yield the context of a local run, with checkpoints, metrics and progress in a folder."""
    seed_everything(experiment.seed)
    storage, tensorboard = output / "checkpoints", core.TensorboardMode.MANUAL
    with (
        explain_lost_disk(output),
        core.init(
            distributed=distributed, checkpoint_storage=str(storage), tensorboard_mode=tensorboard
        ) as core_context,
    ):
        core_context.train = train = LocalMetrics(output, experiment)
        core_context.checkpoint = LocalCheckpoints(
            storage,
            core_context.distributed,
            experiment.checkpoints_to_keep("save_trial_best"),
            experiment.checkpoints_to_keep("save_trial_latest"),
            train.score,
            uploads,
        )
        services = LocalServices(core_context, experiment, output)
        context = make_context(services, experiment.seed, logs_tensorboard=logs_tensorboard)
        context.output, context.resumes = output, resumes
        with services.signals.handled(), contextlib.closing(services.vote):
            yield context

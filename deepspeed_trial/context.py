"""Determined's trial context, on a cluster, on GPUs, and on CPU cores, which its own refuses."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from determined import core
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from deepspeed_trial import cluster, processes
from deepspeed_trial.checkpoints.store import LocalCheckpoints
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.hangs import place
from deepspeed_trial.hangs.watch import watching
from deepspeed_trial.local.folder import default_output, own_folder
from deepspeed_trial.local.lost_disk import explain_lost_disk
from deepspeed_trial.local.progress import LocalMetrics
from deepspeed_trial.local.signals import LocalPreempt
from deepspeed_trial.patches.engine import patch_engine
from deepspeed_trial.plan import Plan
from deepspeed_trial.random_state import seed_everything
from deepspeed_trial.trackers.tracking import Tracking, tracked, tracking_here, tracking_on_cluster


class TrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, on the CPU where there is no GPU.

    Attributes:
        output: off a cluster, the run's folder.
        experiment: what the experiment configuration says.
        resumes: whether a checkpoint's weights will replace the first ones.
        resumed_from: optimizer steps of the run that this one goes on with.
        place: where this rank is, for those who watch whether it moves.
        tracking: where else the run is written down.
        plan: how many steps the training has, and how far each is; a trial may ask it in its own schedules.
    """

    output: pathlib.Path | None = None
    experiment: Experiment
    resumes = False
    resumed_from = 0
    place: place.Place
    tracking = Tracking()
    plan: Plan
    _tbd_writer: Any

    @override
    def _init_device(self) -> None:
        if self._num_gpus:
            super()._init_device()
        else:
            self.device = torch.device("cpu")

    def take_hyperparameters(self, hparams: Mapping[str, Any]) -> None:
        """Has the trial get others than were known before the ranks had joined."""
        self._hparams = dict(hparams)

    @override
    def wrap_model_engine(self, model: deepspeed.DeepSpeedEngine) -> deepspeed.DeepSpeedEngine:
        """Registers an engine of the trial, and applies what every engine needs of ``patches``."""
        patch_engine(model)
        place.follow(model, self.place)
        return super().wrap_model_engine(model)

    @override
    def get_tensorboard_writer(self) -> Any:
        """The writer of TensorBoard's files.

        What a killed run had written beyond the checkpoint that this one goes on from is not shown again.
        """
        if self._tbd_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder, done = str(self.get_tensorboard_path()), self.resumed_from
            self._tbd_writer = SummaryWriter(folder, purge_step=done or None)
        return self._tbd_writer


def make_context(
    core_context: core.Context,
    experiment: Experiment,
    seed: int,
    num_gpus: int,
    *,
    steps_completed: int = 0,
    enable_tensorboard_logging: bool = True,
) -> TrialContext:
    """Makes the context of a trial, one slot a process."""
    context = TrialContext(
        core_context=core_context,
        trial_seed=seed,
        hparams=dict(experiment.hyperparameters),
        slots_per_trial=core_context.distributed.get_size(),
        num_gpus=num_gpus,
        exp_conf=dict(experiment.config),
        steps_completed=steps_completed,
        enable_tensorboard_logging=enable_tensorboard_logging,
    )
    context.experiment, context.place, context.plan = experiment, place.Place(), Plan()
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
    """Sets up processes, seeds and Determined's services, and gives the context for a trial.

    As ``determined.pytorch.deepspeed.init``, on a CPU as well, and with checkpoints, metrics and progress
    in a folder where there is no cluster. On a cluster, bad configuration ends the trial as an invalid
    hyperparameter set, and is not tried again.

    Args:
        hparams: the hyperparameters; on a cluster the master's, whatever is given.
        exp_conf: the experiment configuration; on a cluster the master's.
        distributed: the ranks, where the program has joined them itself.
        enable_tensorboard_logging: whether every reported metric is written for TensorBoard, as Determined
            does; the trial's own writer works in either case.
        output: off a cluster, the run's folder, by default ``runs/trial-<time>``; all ranks take the chief's.
        resumes: whether the run that is in the folder is to go on; another one may not be there. If None, it
            goes on where it has left a checkpoint, as ``context.resumes`` then says.
        writes: further files that the program writes into the folder.

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
    with (
        own_folder(output, ranks, resumes, writes) as goes_on,
        locally(experiment, ranks, output, goes_on, enable_tensorboard_logging) as context,
    ):
        keeps_record = goes_on or resumes is None
        tracking = tracking_here(experiment, ranks.rank == 0, output, keeps_record)
        preempt = context._core.preempt
        with (
            tracked(tracking, context._core.train, lambda: preempt.requested) as context.tracking,
            watching(ranks, context.place, experiment.hang_after),  # within, for trackers may take long
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
        core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as core_context,
    ):
        context = make_context(
            core_context,
            experiment,
            seed,
            len(info.gpu_uuids),
            steps_completed=info.trial._steps_completed,
            enable_tensorboard_logging=logs_tensorboard,
        )
        context.resumes = info.latest_checkpoint is not None
        with cluster.errors_end_the_trial():
            cluster.log_from_chief(core_context.distributed.rank == 0)
            cluster.check_slots(core_context.distributed.size)
            ranks, preempt = core_context.distributed, core_context.preempt
            tracking = tracking_on_cluster(experiment, ranks.rank == 0, info)
            with (
                tracked(tracking, core_context.train, cluster.was_asked(preempt)) as context.tracking,
                watching(ranks, context.place, experiment.hang_after),
            ):
                yield context


@contextlib.contextmanager
def locally(
    experiment: Experiment,
    distributed: core.DistributedContext,
    output: pathlib.Path,
    resumes: bool,
    logs_tensorboard: bool,
) -> Iterator[TrialContext]:
    """The context of a run whose checkpoints, metrics and progress go into a folder."""
    seed_everything(experiment.seed)
    storage, tensorboard = output / "checkpoints", core.TensorboardMode.MANUAL
    with (
        explain_lost_disk(output),
        core.init(
            distributed=distributed, checkpoint_storage=str(storage), tensorboard_mode=tensorboard
        ) as core_context,
    ):
        core_context.train = train = LocalMetrics(output, experiment)
        core_context.preempt = LocalPreempt(core_context.distributed, output).start()
        core_context.checkpoint = LocalCheckpoints(
            storage,
            core_context.distributed,
            experiment.checkpoints_to_keep("save_trial_best"),
            experiment.checkpoints_to_keep("save_trial_latest"),
            train.score,
        )
        context = make_context(
            core_context,
            experiment,
            experiment.seed,
            torch.cuda.device_count(),
            enable_tensorboard_logging=logs_tensorboard,
        )
        context.output, context.resumes = output, resumes
        yield context

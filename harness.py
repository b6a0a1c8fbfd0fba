"""Runs a trial in Determined's own trainer: on a cluster, on GPUs or on CPU cores.

This is the only file that touches Determined's private names. What it mends in Determined 0.38:

- the context refuses a machine without a GPU;
- periods longer than an epoch never come, and a trial always sees epoch 0;
- every metric is copied to the host in every micro-batch, and gathered over the ranks in every step;
- a checkpoint cannot be loaded with torch 2.6 or later, and is loaded unchecked before;
- a resumed trial skips too few micro-batches under gradient accumulation, and none off a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import processes

import deepspeed
import determined as det
import filelock
import torch
from deepspeed.accelerator import get_accelerator
from determined import core, pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

import engines
import loaders
import memory
import net_file
import resume
import weights
from callbacks import LossWatch
from errors import InvalidInput, TrainingStopped, one_line
from experiment import Experiment
from local_checkpoints import LocalCheckpoints
from local_run import LocalPreempt, LocalTrain, run_fault
from tensorboard_log import TensorBoardLog

PROFILED_AFTER, PROFILED_STEPS = 10, 5  # steps that torch's profiler leaves out, and records


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


def on_cluster() -> bool:
    """Whether this process runs in a trial of a Determined cluster."""
    info = det.get_cluster_info()
    return info is not None and info.task_type == "TRIAL"


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


class TrialController(det_ds.DeepSpeedTrialController):
    """Determined's training loop, with periods that mean what they say and no waiting for the device in a step."""

    def __init__(self, profiling: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.profiling = profiling
        fp16 = self.trial.dtype == torch.float16
        once = self.context.use_pipeline_parallel or self.context._manual_grad_accumulation
        self.micro_batches = 1 if once else self.context.get_num_micro_batches_per_slot()
        self.watch = LossWatch(self.trial.model_engine, self.micro_batches, tolerance=64 if fp16 else 0)
        board = TensorBoardLog(self.trial, lambda: self.state.batches_trained if self.state else 0, self.is_chief)
        self.callbacks: dict[str, pytorch.PyTorchCallback] = {**self.callbacks, "watch": self.watch, "board": board}
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
        if self.context.device.type == "cuda" and not self.trial.train_set.images.is_cuda:
            for name in ("training_loader", "validation_loader"):
                if (loader := getattr(self, name)) is not None:
                    setattr(self, name, loaders.FetchedAhead(loader))

    @override
    def _run(self) -> None:
        preempt = self.core_context.preempt
        try:
            if self.local:
                length = self.max_length.value
                assert isinstance(length, int)
                epoch = len(self.trial.train_sampler.step_sizes)
                total = length * epoch if isinstance(self.max_length, pytorch.Epoch) else length
                self.local.begin(1 if self.test_mode else total, epoch, self.start_from_batch)
            if self.context.get_stop_requested():
                return  # early stopping had ended the run that this one resumes
            with self._profiled(), memory.explained(self.trial, self._in_which_step):
                if not isinstance(preempt, LocalPreempt):
                    return super()._run()
                with preempt.gracefully(), processes.watching_peers(self.context.distributed):
                    super()._run()
        finally:
            if self.local:
                self.local.close()

    def _in_which_step(self) -> str:
        return f"in step {self.state.batches_trained + 1 if self.state else 1}"

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        """Where ``profiling.enabled`` asks for it, records a few steps of the chief with torch's profiler."""
        if not (self.profiling and self.is_chief):
            yield
            return
        schedule = torch.profiler.schedule(wait=PROFILED_AFTER, warmup=2, active=PROFILED_STEPS, repeat=1)
        self.context.set_profiler(schedule=schedule)
        with self.context.profiler as profiler:
            yield
        needed = PROFILED_AFTER + 2 + PROFILED_STEPS
        if self.local and profiler.step_num < needed:
            print(f"no profile: its steps end with the {needed}th, and there were {profiler.step_num}", file=sys.stderr)
        elif self.local:
            table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
            (self.local.output / "profile.txt").write_text(table)

    @override
    def _train_with_boundaries(
        self, train_boundaries: list[pytorch._TrainBoundary]
    ) -> tuple[list[pytorch._TrainBoundary], list[dict[str, Any]]]:
        """Trains until a boundary, counting steps and epochs since the start of training."""
        if self.is_chief:
            self.core_context.train.set_status("training")
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
            self._stop_early(step + 1, train_boundaries)
            if any(boundary.limit_reached for boundary in train_boundaries):
                return train_boundaries, metrics

    def _reached(self, boundary: pytorch._TrainBoundary, steps: int, epoch_len: int) -> bool:
        if self.test_mode and boundary.step_type == pytorch._TrainBoundaryType.TRAIN:
            return True
        if isinstance(boundary.unit, pytorch.Epoch):
            return steps % epoch_len == 0 and boundary.unit.should_stop(steps // epoch_len)
        return boundary.unit.should_stop(steps)

    def _stop_early(self, steps: int, boundaries: list[pytorch._TrainBoundary]) -> None:
        """Off a cluster, has a signal end the training after this step instead of at the next report."""
        preempt = self.core_context.preempt
        if isinstance(preempt, LocalPreempt) and preempt.due(steps):
            for boundary in boundaries:
                if boundary.step_type == pytorch._TrainBoundaryType.REPORT:
                    boundary.limit_reached = True

    @override
    def _train_batch(self, epoch_idx: int, batch_idx: int) -> list[dict[str, Any]]:
        """One optimizer step. The metrics stay on the device; ``_aggregate_training_metrics`` fetches them together."""
        batch = self.trial.train_batch
        try:
            metrics = [batch(self.training_iterator, epoch_idx, batch_idx) for _ in range(self.micro_batches)]
            if self.context.profiler:
                self.context.profiler.step()
            return metrics
        except Exception as error:  # DeepSpeed's for this is a bare Exception
            if "loss scale already at minimum" not in str(error):
                raise
            rate = self.trial.model_engine.get_lr()[0]
            reason = f"the gradients overflow at the least loss scale in step {batch_idx + 1} (learning rate {rate:g})"
            raise self.watch.stopped(reason) from error

    @override
    def _aggregate_training_metrics(self, training_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._aggregate_training_metrics(_fetch(training_metrics))

    @override
    def _validate(self) -> dict[str, Any]:
        engines.share_buffers(self.trial.model_engine)
        metrics = super()._validate()
        if self.local:
            self.local.keep_classification(self.trial.metrics, self.trial.test_set.images)
        return metrics

    @override
    def _stop_requested(self) -> None:
        if on_cluster():  # after every report, validation and checkpoint
            self._upload_tb_files()
        super()._stop_requested()

    @override
    def _save(self, path: pathlib.Path) -> None:
        data_root = pathlib.Path(self.trial.data_config.root).resolve()
        with _copying_code(data_root) if self.local_training else contextlib.nullcontext():
            super()._save(path)
        whole = weights.consolidate(self.trial.model_engine, self.trial.layer_names)  # with all ranks
        if self.is_chief:
            resume.save_identity(self.trial, path)
            net_file.write(path / "net.pt", whole, net_file.describe(self.trial, self.state.batches_trained))

    @override
    def _load(self, load_path: pathlib.Path) -> None:
        name = str(self.latest_checkpoint)
        faults: list[str] = []
        if self.context.distributed.local_rank == 0:
            try:
                resume.check(self.trial, load_path, name, self.trial_id)
            except InvalidInput as error:
                faults = error.faults
        for each in self.context.distributed.allgather(faults):
            if each:
                raise InvalidInput(each)
        kept = resume.keeping_settings(self.trial.model_engine)
        with kept, resume.fitting(self.trial, load_path, name) as fitting, resume.allowed():
            super()._load(fitting)

    @override
    def _sync_device(self) -> None:
        get_accelerator().synchronize()


@contextlib.contextmanager
def _copying_code(data_root: pathlib.Path) -> Iterator[None]:
    """Has Determined copy this package into the checkpoint, but neither images nor runs that are kept within it."""
    here, detignore = pathlib.Path.cwd(), det.util.detignore
    make = detignore.make_shutil_ignore

    def make_shutil_ignore(root: pathlib.Path) -> Any:
        ignored = make(root)

        def ignore(folder: str, names: list[str]) -> set[str]:
            paths = {name: pathlib.Path(folder, name) for name in names}
            kept_out = {
                name for name, path in paths.items() if path.resolve() == data_root or (path / "run.json").exists()
            }
            return kept_out.union(ignored(folder, names))

        return ignore

    os.chdir(pathlib.Path(__file__).parent)
    detignore.make_shutil_ignore = make_shutil_ignore
    try:
        yield
    finally:
        detignore.make_shutil_ignore = make
        os.chdir(here)


def _fetch(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies the tensors among scalar metrics to the host, one copy a name."""
    fetched = [dict(each) for each in metrics]
    for name in metrics[0] if metrics else ():
        values = [each[name] for each in metrics]
        if all(isinstance(value, torch.Tensor) for value in values):
            for each, value in zip(fetched, torch.stack(values).float().cpu().tolist(), strict=True):
                each[name] = value
    return fetched

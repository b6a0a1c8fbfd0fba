"""Determined's training loop, with periods that mean what they say and no waiting for the device in a step.

What it mends in Determined 0.38:

- periods longer than an epoch never come, and a trial always sees epoch 0;
- every metric is copied to the host in every micro-batch, and gathered over the ranks in every step;
- a checkpoint cannot be loaded with torch 2.6 or later, and is loaded unchecked before;
- a resumed trial skips too few micro-batches under gradient accumulation, and none off a cluster.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import processes

import determined as det
import torch
from deepspeed.accelerator import get_accelerator
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

import engines
import loaders
import memory
import net_file
import resume
import weights
from callbacks import LossWatch
from errors import InvalidInput
from experiment import on_cluster
from local_run import LocalPreempt, LocalTrain
from tensorboard_log import TensorBoardLog

PROFILED_AFTER, PROFILED_STEPS = 10, 5  # steps that torch's profiler leaves out, and records


class TrialController(det_ds.DeepSpeedTrialController):
    """Trains, validates and checkpoints a ``CIFARTrial``; ``harness.fit`` makes and runs it."""

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

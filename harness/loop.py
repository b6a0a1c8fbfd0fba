"""Determined's training loop, patched: periods of any length, and no waiting for the device in a step.

What Determined 0.38 does, and the methods of ``Loop`` that cure it:

- Periods longer than an epoch never come, and a trial always sees epoch 0: ``_train_with_boundaries``.
- Every metric is copied to the host in every micro-batch, and gathered over the ranks in every step:
  ``_train_batch``, ``_aggregate_training_metrics``.
- A resumed trial skips too few micro-batches under gradient accumulation: ``_set_data_loaders``.
- A local checkpoint copies all of the working directory as its code: ``_save``.
- TensorBoard's files are uploaded only if Determined's own writer is on, which writes in every step:
  ``_stop_requested``.
- CUDA is synchronised on a machine without a GPU: ``_sync_device``.

``controller.py`` adds to some of these methods. A Determined that lacks one is refused.
"""

from __future__ import annotations

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import determined as det
import torch
from deepspeed.accelerator import get_accelerator
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from typing_extensions import override

from harness.cluster import on_cluster
from harness.hooks import Code

REQUIRED = """_train_with_boundaries _train_batch _aggregate_training_metrics _set_data_loaders _save
    _stop_requested _sync_device _step_batch _on_epoch_start _validate _load _run _upload_tb_files""".split()


class Loop(det_ds.DeepSpeedTrialController):
    """Determined's controller with its loop mended; arguments as Determined's."""

    def __init__(self, **kwargs: Any) -> None:
        missing = [name for name in REQUIRED if not hasattr(det_ds.DeepSpeedTrialController, name)]
        if missing:
            raise RuntimeError(f"determined {det.__version__} lacks {', '.join(missing)}; install 0.38.1")
        super().__init__(**kwargs)
        self.start_from_batch: int = kwargs["steps_completed"]
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
        """Converts the position of a resumed run from steps to micro-batches."""
        steps = self.start_from_batch
        self.start_from_batch = steps * self.context.get_num_micro_batches_per_slot()
        super()._set_data_loaders()
        self.start_from_batch = steps

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
        assert self.state
        metrics: list[dict[str, Any]] = []
        while True:
            step = self.state.batches_trained
            epoch = step // self.epoch_length
            self.context._current_batch_idx = step
            if step % self.epoch_length == 0:
                self._on_epoch_start(epoch)
            metrics += self._train_batch(batch_idx=step, epoch_idx=epoch)
            self._step_batch()
            for boundary in train_boundaries:
                boundary.limit_reached = self._is_reached(boundary, step + 1)
            self.after_step(train_boundaries)
            if any(boundary.limit_reached for boundary in train_boundaries):
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
        """One optimizer step. Its metrics stay on the device until they are reported."""
        train_batch = self.trial.train_batch
        metrics = [
            train_batch(self.training_iterator, epoch_idx, batch_idx) for _ in range(self.calls_per_step)
        ]
        if self.context.profiler:
            self.context.profiler.step()
        return metrics

    @override
    def _aggregate_training_metrics(self, training_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Fetches the metrics of all steps since the last report together."""
        return super()._aggregate_training_metrics(_fetch(training_metrics))

    @override
    def _save(self, path: pathlib.Path) -> None:
        """Copies the trial's code alone into a local checkpoint; on a cluster there is a clean copy."""
        with _copying(self.code()) if self.local_training else contextlib.nullcontext():
            super()._save(path)

    @override
    def _stop_requested(self) -> None:
        """Uploads TensorBoard's files first, after every report, validation and checkpoint."""
        if on_cluster():
            self._upload_tb_files()
        super()._stop_requested()

    @override
    def _sync_device(self) -> None:
        """Waits for whichever device there is."""
        get_accelerator().synchronize()


@contextlib.contextmanager
def _copying(code: Code) -> Iterator[None]:
    """Has Determined copy this code into a checkpoint instead of the working directory.

    Left out are what ``.detignore`` names, runs, which hold the checkpoints, and ``code.excluded``.
    """
    excluded = {path.resolve() for path in code.excluded}
    by_detignore = det.util.detignore.make_shutil_ignore(code.folder)

    def ignore(folder: str, names: list[str]) -> set[str]:
        paths = {name: pathlib.Path(folder, name) for name in names}
        more = {name for name, path in paths.items() if path.resolve() in excluded or _is_run(path)}
        return more.union(by_detignore(folder, names))

    def write_user_code(path: pathlib.Path, is_managed: bool) -> None:
        shutil.copytree(code.folder, path / "code", ignore=ignore)

    upstream = det.util.write_user_code
    det.util.write_user_code = write_user_code
    try:
        yield
    finally:
        det.util.write_user_code = upstream


def _is_run(path: pathlib.Path) -> bool:
    return (path / "run.json").exists()


def _fetch(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies the tensors among scalar metrics to the host, one transfer a metric."""
    fetched = [dict(each) for each in metrics]
    for name in metrics[0] if metrics else ():
        values = [each[name] for each in metrics]
        if all(isinstance(value, torch.Tensor) for value in values):
            for each, value in zip(fetched, torch.stack(values).float().cpu().tolist(), strict=True):
                each[name] = value
    return fetched

"""A ``DeepSpeedTrial`` without images: it fits a line to points, in every form of a trial."""

import collections
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import deepspeed_trial  # noqa: F401 - before deepspeed

# isort: split
import deepspeed
import numpy as np
import torch
from determined import pytorch
from determined.pytorch.deepspeed import DeepSpeedTrial
from torch import nn
from torch.utils.data import DataLoader, Dataset

from deepspeed_trial.trainer import FitResult, Trainer, init

POINTS, MICRO_BATCH, ACCUMULATION = 48, 4, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
}


class Points(Dataset):
    """x and 3x + 1, with noise from the global generators, as augmentation draws it."""

    def __len__(self):
        return POINTS

    def __getitem__(self, index):
        x = torch.tensor([index / POINTS])
        return x, 3 * x + 1 + float(np.random.normal()) / 10 + torch.rand(1) / 10


class Calls(pytorch.PyTorchCallback):
    """Counts the calls of each hook, and keeps the epochs and the metrics that the hooks get."""

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.epochs, self.workloads = [], []

    def on_training_epoch_start(self, epoch_idx):
        self.epochs.append(epoch_idx)

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        self.workloads.append((avg_metrics, batch_metrics))


for hook in """trial_startup training_start training_epoch_end validation_start validation_end
    checkpoint_write_end checkpoint_upload_end trial_shutdown""".split():
    setattr(Calls, f"on_{hook}", lambda self, *_, hook=hook, **__: self.counts.update([hook]))


class LineTrial(DeepSpeedTrial):
    """Its hyperparameters are ``form`` and ``deepspeed_config``: changes to ``CONFIG``."""

    def __init__(self, context):
        self.context = context
        hparams = context.get_hparams()
        self.form = hparams.get("form", "plain")
        self.calls, self.seen, self.places = Calls(), [], []
        self.reducer = context.wrap_reducer(
            lambda values: 2 * float(np.mean(values)), "twice", for_training=False
        )
        if self.form == "own loader":
            context.disable_dataset_reproducibility_checks()
        if self.form == "manual":
            context.disable_auto_grad_accumulation()
        config = {**CONFIG, **hparams.get("deepspeed_config", {})}
        self.engines = [self._engine(config) for _ in range(2 if self.form == "two engines" else 1)]

    def _engine(self, config):
        layers = [nn.Linear(1, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1)]
        net = nn.Sequential(*layers)
        if self.form == "pipeline":
            net = deepspeed.PipelineModule(layers=layers, loss_fn=nn.MSELoss(), num_stages=1)
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        return self.context.wrap_model_engine(engine)

    def build_callbacks(self):
        return {"calls": self.calls}

    def build_training_data_loader(self):
        if self.form == "own loader":
            return deepspeed.runtime.dataloader.RepeatingLoader(DataLoader(Points(), MICRO_BATCH))
        return pytorch.DataLoader(Points(), MICRO_BATCH, shuffle=True)

    def build_validation_data_loader(self):
        if self.form == "own loader":
            return DataLoader(Points(), MICRO_BATCH)
        return pytorch.DataLoader(Points(), MICRO_BATCH)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.places.append((epoch_idx, batch_idx))
        if self.form == "pipeline":
            return {"loss": self.engines[0].train_batch(dataloader_iter)}
        for _ in range(ACCUMULATION if self.form == "manual" else 1):
            x, y = self.context.to_device(next(dataloader_iter))
            self.seen.append((x[:, 0] * POINTS).round().int())
            losses = [nn.functional.mse_loss(engine(x), y) for engine in self.engines]
            for engine, loss in zip(self.engines, losses, strict=True):
                engine.backward(loss)
                engine.step()
        if self.form == "tensor":
            return losses[0]
        return {f"loss{number or ''}": loss for number, loss in enumerate(losses)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        if self.form == "pipeline":
            error = self.engines[0].eval_batch(dataloader_iter)
        else:
            x, y = self.context.to_device(next(dataloader_iter))
            error = nn.functional.mse_loss(self.engines[0](x), y)
        self.reducer.update(error.item())
        return {"error": error}

    def weights(self):
        return [weight.clone() for engine in self.engines for weight in engine.module.state_dict().values()]


def train_on_a_cpu(det_ds: Any) -> None:
    """Let Determined's own context and trainer do without a GPU; DeepSpeed need not compile its operator."""
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        det_ds.DeepSpeedTrialContext._init_device = lambda context: setattr(context, "device", cpu)
        det_ds.DeepSpeedTrialController._sync_device = lambda controller: None
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


HPARAMS = ("form", "deepspeed_config")
KEEP: dict[str, Any] = {"checkpoint_storage": {"save_trial_latest": 99}}
KEEP["reproducibility"] = {"experiment_seed": 3}


@contextlib.contextmanager
def saving_fast() -> Iterator[None]:
    """Spare checkpoints the copy of the code and the wait for the disk."""
    with tempfile.TemporaryDirectory() as empty, mock.patch.object(os, "fsync"):
        before = os.getcwd()
        os.chdir(empty)
        try:
            yield
        finally:
            os.chdir(before)


def fit(
    output: pathlib.Path,
    trial_class: type[LineTrial] = LineTrial,
    resumes: bool = False,
    config: dict[str, Any] = KEEP,
    **arguments: Any,
) -> tuple[Any, FitResult]:
    """Train in this process for 20 steps, unless ``arguments`` says otherwise."""
    hparams: dict[str, Any] = {key: arguments.pop(key) for key in HPARAMS if key in arguments}
    with saving_fast(), init(hparams, config, output=output, resumes=resumes) as context:
        trial = trial_class(context)
        arguments = {"max_length": pytorch.Batch(20), "checkpoint_policy": "none", **arguments}
        return trial, Trainer(trial, context).fit(**arguments)

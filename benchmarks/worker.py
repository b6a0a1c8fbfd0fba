"""Run one contender, which trains a segment of steps at each turn that ``benchmarks.steps`` gives it.

    python3 -m benchmarks.worker CONTENDER REQUEST

- ``pytorch``: a bare PyTorch loop over float tensors in memory;
- ``engine``: a bare DeepSpeed loop over the same tensors;
- ``trial``: this package's trial in `deepspeed_trial`'s trainer, with reports and TensorBoard;
- ``example``: the style of Determined's own examples: its stock trainer, a PIL dataset and 2 workers;
- ``recipe``: a recipe as a bare PyTorch loop, with its images' order and augmentation.

``REQUEST`` is JSON. For each line on stdin the contender trains ``steps`` steps, then prints the
number of images and the seconds of these steps.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from deepspeed_trial.trainer import Trainer, init

# isort: split
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from determined import core, pytorch
from determined.pytorch import deepspeed as det_ds
from torch.nn import functional as F
from typing_extensions import override

import data
from benchmarks import bare_recipe
from benchmarks.peers import Pictures
from classify.config import experiment_file
from classify.engine.optimizer_rules import ADAM_SWITCHES, optimizer_class
from classify.engine.trial_config import TrialConfig
from classify.models import registry
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.experiment import Experiment
from model_def import CIFARTrial

FOREVER = pytorch.Batch(10**9)
Fetch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class EndOfTurns(Exception):
    """Ends a contender after its last turn."""


class Turns:
    """Measures segments of steps at this contender's turns.

    Args:
        steps: the number of steps in a segment.
        distributed: the context of the ranks.
    """

    def __init__(self, steps: int, distributed: core.DistributedContext) -> None:
        self.steps, self.distributed = steps, distributed
        self.done = self.images = 0
        self.since: float | None = None

    def before_step(self, images: int) -> None:
        """Count a step that begins now; at the start of a segment, first wait for the turn.

        Args:
            images: the number of images in the step.

        Raises:
            EndOfTurns: if there is no further turn.
        """
        if self.done % self.steps == 0:
            self._end_segment()
            if not self.distributed.broadcast(sys.stdin.readline() if self.distributed.rank == 0 else ""):
                raise EndOfTurns
            torch.distributed.barrier()
            self.since, self.images = time.perf_counter(), 0
        self.done += 1
        self.images += images

    def _end_segment(self) -> None:
        get_accelerator().synchronize()
        if self.since is not None and self.distributed.rank == 0:
            print("trained", self.images, time.perf_counter() - self.since, flush=True)


def main(contender: str, request: dict[str, Any]) -> None:
    """Run a contender with a request: ``config``, ``overrides`` and ``steps``."""
    experiment = experiment_file.load(request["config"], request["overrides"])
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder)
        with init(
            experiment.hyperparameters,
            experiment.config,
            output=output,
            enable_tensorboard_logging=contender == "example",  # the trial writes its own logs
        ) as context:
            turns = Turns(request["steps"], context.distributed)
            try:
                CONTENDERS[contender](context, experiment, turns)
            except EndOfTurns:
                return


def resolve(context: Any, experiment: Experiment) -> TrialConfig:
    """Return the trial's configuration for the ranks and the device of a context."""
    size, device = context.distributed.size, context.device.type
    return TrialConfig.resolve(experiment.hyperparameters, experiment.config, size, device)


# -------------------------------------------------------------------------------------------- the contenders


def bare_pytorch(context: Any, experiment: Experiment, turns: Turns) -> None:
    """Train in a minimal PyTorch loop with the trial's optimizer."""
    config = resolve(context, experiment)
    fetch = fetch_from_memory(context, config)
    net = registry.build(config.net).to(context.device, config.dtype)
    if context.distributed.size > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
    kind, params = config.deepspeed["optimizer"]["type"], config.deepspeed["optimizer"]["params"]
    cls = optimizer_class(kind)
    if cls is None:
        raise InvalidInput(f"optimizer.type: {kind!r}: PyTorch has no such optimizer; choose another")
    optimizer = cls(
        net.parameters(), **{key: value for key, value in params.items() if key not in ADAM_SWITCHES}
    )
    while True:
        turns.before_step(config.deepspeed["train_batch_size"])
        inputs, labels = fetch()
        optimizer.zero_grad()
        F.cross_entropy(registry.logits(net(inputs)), labels).backward()
        optimizer.step()


def bare_engine(context: Any, experiment: Experiment, turns: Turns) -> None:
    """Train in a minimal DeepSpeed loop with the trial's configuration."""
    config = resolve(context, experiment)
    fetch = fetch_from_memory(context, config)
    net = registry.build(config.net)
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config.deepspeed
    )
    while True:
        turns.before_step(engine.train_batch_size())
        inputs, labels = fetch()
        engine.backward(F.cross_entropy(registry.logits(engine(inputs)), labels))
        engine.step()


def fetch_from_memory(context: Any, config: TrialConfig) -> Fetch:
    """Return a function that fetches random micro-batches of normalised images in memory.

    The images have the engine's dtype and the trial's memory format, so that a step converts nothing.
    """
    source = config.source.load("train")
    size = config.micro_batch
    form = torch.channels_last if config.channels_last else torch.contiguous_format
    inputs = data.as_inputs(source.images).to(context.device, config.dtype).contiguous(memory_format=form)
    labels = source.labels.to(context.device)
    order, at = torch.randperm(len(labels), device=context.device), 0

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal at
        at = 0 if at + 2 * size > len(labels) else at + size
        chosen = order[at : at + size]
        return inputs[chosen], labels[chosen]

    return fetch


def trial(context: Any, experiment: Experiment, turns: Turns) -> None:
    """Train this package's trial with `deepspeed_trial`'s trainer."""

    class Timed(CIFARTrial):
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            turns.before_step(self.train_sampler.step_size(batch_idx))
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    reports = pytorch.Batch(experiment.scheduling_unit)
    Trainer(Timed(context), context).fit(FOREVER, reporting_period=reports, checkpoint_policy="none")


class ExampleTrial(det_ds.DeepSpeedTrial):
    """A trial in the style of Determined's examples: it loads one image at a time."""

    def __init__(self, context: Any, config: TrialConfig, turns: Turns) -> None:
        self.context, self.dtype, self.turns = context, config.dtype, turns
        self.source = config.source.load("train")
        net = registry.build(config.net)
        engine, _, _, _ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=config.deepspeed
        )
        self.model_engine = context.wrap_model_engine(engine)

    @override
    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.model_engine.train_micro_batch_size_per_gpu()
        pixels = self.source.images.permute(0, 2, 3, 1).contiguous().numpy()
        pictures = Pictures(pixels, self.source.labels.tolist())
        return pytorch.DataLoader(pictures, batch_size=size, shuffle=True, num_workers=2, drop_last=True)

    @override
    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()  # never used

    @override
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.turns.before_step(self.model_engine.train_batch_size())
        inputs, labels = self.context.to_device(next(dataloader_iter))
        loss = F.cross_entropy(registry.logits(self.model_engine(inputs.to(self.dtype))), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss.float()}  # Determined converts it to numpy, which has no bf16

    @override
    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise NotImplementedError


def example(context: Any, experiment: Experiment, turns: Turns) -> None:
    """Train ``ExampleTrial`` with Determined's own trainer, which prints its reports."""
    made = ExampleTrial(context, resolve(context, experiment), turns)
    reports = pytorch.Batch(experiment.scheduling_unit)
    det_ds.DeepSpeedTrialController._sync_device = lambda self: get_accelerator().synchronize()
    det_ds.Trainer(made, context).fit(max_length=FOREVER, reporting_period=reports, checkpoint_policy="none")


def recipe(context: Any, experiment: Experiment, turns: Turns) -> None:
    """Train in the loop of ``benchmarks/bare_recipe.py``."""
    config = resolve(context, experiment)
    losses = bare_recipe.losses(config)
    while True:
        turns.before_step(config.batch)
        next(losses)


CONTENDERS = {
    "pytorch": bare_pytorch,
    "engine": bare_engine,
    "trial": trial,
    "example": example,
    "recipe": recipe,
}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text()))

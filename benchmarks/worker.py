"""One contender in the processes of its own, which trains a segment whenever ``benchmarks.steps`` says that it may.

    python3 -m benchmarks.worker CONTENDER REQUEST

- ``pytorch``: a bare PyTorch loop over float tensors in memory;
- ``engine``: a bare DeepSpeed loop over the same;
- ``trial``: this package's trial in Determined's trainer, with reports and TensorBoard;
- ``example``: the style of Determined's own examples: its stock trainer, a PIL dataset and 2 workers.

For each line that it reads it trains so many steps as ``REQUEST``, JSON, says, and prints how long they took and how
many images they had.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from torch.nn import functional as F
from typing_extensions import override

import data
import engine_config
import experiment
import harness
import nets
from benchmarks.peers import Pictures
from controller import TrialController
from engine_rules import dtype_name
from errors import InvalidInput
from model_def import DTYPES, CIFARTrial
from optimizer_rules import ADAM_SWITCHES, optimizer_class

Run = Callable[[int], int]  # trains so many steps, and gives the images in them, over all ranks


def main(contender: str, request: dict[str, Any]) -> None:
    """Runs a contender as a request says: ``config``, ``overrides``, ``steps``."""
    loaded = experiment.load(request["config"], request["overrides"])
    with tempfile.TemporaryDirectory() as folder, harness.trial_context(loaded, pathlib.Path(folder)) as context:
        steps, distributed = request["steps"], context.distributed

        def take_turns(run: Run) -> None:
            while distributed.broadcast(sys.stdin.readline() if distributed.rank == 0 else ""):
                torch.distributed.barrier()
                since = time.perf_counter()
                images = run(steps)
                get_accelerator().synchronize()
                if distributed.rank == 0:
                    print("trained", images, time.perf_counter() - since, flush=True)

        if contender in BARE:
            take_turns(BARE[contender](context, loaded))
        else:
            trial, kind = TRIALS[contender]
            controller(trial(context), context, loaded, lambda made: take_turns(made.segment), kind)


def resolved(context: Any, loaded: experiment.Experiment) -> dict[str, Any]:
    """What the engines are configured with."""
    return engine_config.resolve(
        loaded.hyperparameters, context.distributed.size, context.device.type, lambda *_: 10**6
    )


def build(hparams: Mapping[str, Any], source: data.ImageSet) -> torch.nn.Module:
    """The trial's network."""
    size = source.images.shape[2], source.images.shape[3]
    return nets.build(hparams.get("net", "net"), len(source.classes), size, hparams.get("net_args"))


def bare_pytorch(context: Any, loaded: experiment.Experiment) -> Run:
    """A loop as short as PyTorch allows, with the trial's optimizer."""
    config, source = resolved(context, loaded), training_set(loaded)
    fetch = in_memory(context, loaded, config, source)
    net = build(loaded.hyperparameters, source).to(context.device, DTYPES[dtype_name(config)])
    if context.distributed.size > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
    kind, params = config["optimizer"]["type"], config["optimizer"]["params"]
    cls = optimizer_class(kind)
    if cls is None:
        raise InvalidInput(f"optimizer.type: {kind!r}: plain PyTorch has none of that name; choose another")
    optimizer = cls(net.parameters(), **{key: value for key, value in params.items() if key not in ADAM_SWITCHES})

    def run(steps: int) -> int:
        for _ in range(steps):
            inputs, labels = fetch()
            optimizer.zero_grad()
            F.cross_entropy(nets.logits(net(inputs)), labels).backward()
            optimizer.step()
        return steps * config["train_batch_size"]

    return run


def bare_engine(context: Any, loaded: experiment.Experiment) -> Run:
    """A loop as short as DeepSpeed allows, with the trial's configuration."""
    config, source = resolved(context, loaded), training_set(loaded)
    fetch = in_memory(context, loaded, config, source)
    net = build(loaded.hyperparameters, source)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)

    def run(steps: int) -> int:
        for _ in range(steps):
            inputs, labels = fetch()
            engine.backward(F.cross_entropy(nets.logits(engine(inputs)), labels))
            engine.step()
        return steps * config["train_batch_size"]

    return run


def training_set(loaded: experiment.Experiment) -> data.ImageSet:
    """The training images."""
    return data.load(data.DataConfig.parse(loaded.config.get("data")), "train")


def in_memory(
    context: Any, loaded: experiment.Experiment, config: Mapping[str, Any], source: data.ImageSet
) -> Callable[[], tuple[Any, Any]]:
    """What fetches random micro-batches of normalised images that lie in memory already, in the engine's dtype.

    In PyTorch's own memory format, unless ``channels_last`` is asked for.
    """
    size, dtype = config["train_micro_batch_size_per_gpu"], DTYPES[dtype_name(config)]
    form = torch.channels_last if loaded.hyperparameters.get("channels_last") else torch.contiguous_format
    inputs, labels = data.as_inputs(source.images).to(context.device, dtype), source.labels.to(context.device)
    order, at = torch.randperm(len(labels), device=context.device), 0

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal at
        at = 0 if at + 2 * size > len(labels) else at + size
        chosen = order[at : at + size]
        return inputs[chosen].contiguous(memory_format=form), labels[chosen]

    return fetch


class ExampleTrial(det_ds.DeepSpeedTrial):
    """A trial as Determined's examples are written: an image at a time, the engine as DeepSpeed makes it."""

    def __init__(self, context: Any) -> None:
        self.context = context
        loaded = experiment.Experiment(context.get_experiment_config(), context.get_hparams())
        self.source = training_set(loaded)
        net = build(loaded.hyperparameters, self.source)
        config = resolved(context, loaded)
        self.dtype = DTYPES[dtype_name(config)]
        engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        self.model_engine = context.wrap_model_engine(engine)

    @override
    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.model_engine.train_micro_batch_size_per_gpu()
        pictures = Pictures(self.source.images.permute(0, 2, 3, 1).contiguous().numpy(), self.source.labels.tolist())
        return pytorch.DataLoader(pictures, batch_size=size, shuffle=True, num_workers=2, drop_last=True)

    @override
    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.build_training_data_loader()  # which is never asked

    @override
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, labels = self.context.to_device(next(dataloader_iter))
        loss = F.cross_entropy(nets.logits(self.model_engine(inputs.to(self.dtype))), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss.float()}  # which Determined makes an array, and numpy has no bf16

    @override
    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise NotImplementedError


def controller(trial: Any, context: Any, loaded: Any, measure: Callable[..., None], kind: type) -> None:
    """Makes Determined's controller as ``harness.fit`` does, and measures in its training loop."""
    how: dict[str, Any] = {"profiling": False} if kind is TrialTiming else {}
    made = kind(
        trial_inst=trial,
        context=context,
        max_length=pytorch.Batch(10**9),
        validation_period=pytorch.Batch(10**9),
        checkpoint_period=pytorch.Batch(10**9),
        reporting_period=pytorch.Batch(loaded.scheduling_unit),
        checkpoint_policy="none",
        step_zero_validation=False,
        searcher_metric_name="accuracy",
        smaller_is_better=False,
        steps_completed=0,
        latest_checkpoint=None,
        local_training=True,
        test_mode=False,
        global_batch_size=trial.model_engine.train_batch_size(),
        profiling_enabled=False,
        **how,
    )
    made.measure = measure
    made.run()


class Timing:
    """Trains in segments of so many steps, each with its reports, and leaves out validation and checkpoints."""

    measure: Callable[[Any], None]
    counts_from_start: bool  # of training, or of each call

    def _run(self: Any) -> None:
        if self.is_chief:
            self.core_context.train.begin(10**9, 10**9, 0)
        self.measure(self)

    def segment(self: Any, steps: int) -> int:
        """Trains so many steps, and gives the images in them."""
        since = self.state.batches_trained
        until = since + steps
        while (done := self.state.batches_trained) < until:
            last = until if self.counts_from_start else until - done
            units = [pytorch.Batch(self.reporting_period.value), pytorch.Batch(last)]
            kinds = [pytorch._TrainBoundaryType.REPORT, pytorch._TrainBoundaryType.TRAIN]
            boundaries = [pytorch._TrainBoundary(kind, unit) for kind, unit in zip(kinds, units, strict=True)]
            _, collected = self._train_with_boundaries(boundaries)
            metrics = self.context.distributed.broadcast(self._aggregate_training_metrics(collected))
            for callback in self.callbacks.values():
                callback.on_training_workload_end(metrics["avg_metrics"], metrics["batch_metrics"])
            self._stop_requested()
        assert self.state.batches_trained == until
        sizes = self.step_sizes()
        return sum(sizes[step % len(sizes)] for step in range(since, until))


class TrialTiming(Timing, TrialController):
    """This package's controller."""

    counts_from_start = True

    def step_sizes(self) -> list[int]:
        """The images in each step of an epoch."""
        return self.trial.train_sampler.step_sizes


class StockTiming(Timing, det_ds.DeepSpeedTrialController):
    """Determined's own, which counts the batches of each call anew."""

    counts_from_start = False

    def step_sizes(self) -> list[int]:
        """As much: what is left over is dropped."""
        return [self.trial.model_engine.train_batch_size()]


BARE = {"pytorch": bare_pytorch, "engine": bare_engine}
TRIALS: dict[str, tuple[type, type]] = {"trial": (CIFARTrial, TrialTiming), "example": (ExampleTrial, StockTiming)}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text()))

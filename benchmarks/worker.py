"""One contender in the processes of its own, which trains a segment whenever ``benchmarks.steps`` says that it may.

    python3 -m benchmarks.worker CONTENDER REQUEST

- ``pytorch``: a bare PyTorch loop over float tensors in memory;
- ``engine``: a bare DeepSpeed loop over the same;
- ``trial``: this package's trial in Determined's trainer, with reports and TensorBoard;
- ``example``: the style of Determined's own examples: its stock trainer, a PIL dataset and 2 workers.

For each line that it reads it trains so many steps as ``REQUEST``, JSON, says, and prints how long one took.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from determined import pytorch
from determined.pytorch import deepspeed as det_ds
from torch.nn import functional as F
from typing_extensions import override

import data
import engine_config
import experiment
import harness
from benchmarks.peers import Pictures
from model_def import CIFARTrial
from net import Net


def main(contender: str, request: dict[str, Any]) -> None:
    """Runs a contender as a request says: ``config``, ``overrides``, ``steps``."""
    loaded = experiment.load(request["config"], request["overrides"])
    with tempfile.TemporaryDirectory() as folder, harness.trial_context(loaded, pathlib.Path(folder)) as context:
        steps, distributed = request["steps"], context.distributed

        def take_turns(run: Callable[[int], None]) -> None:
            while distributed.broadcast(sys.stdin.readline() if distributed.rank == 0 else ""):
                torch.distributed.barrier()
                since = time.perf_counter()
                run(steps)
                harness.get_accelerator().synchronize()
                if distributed.rank == 0:
                    print("seconds", (time.perf_counter() - since) / steps, flush=True)

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


def bare_pytorch(context: Any, loaded: experiment.Experiment) -> Callable[[int], None]:
    """A loop as short as PyTorch allows, with the trial's optimizer."""
    fetch, classes = in_memory(context, loaded)
    net: torch.nn.Module = Net(classes).to(context.device)
    if context.distributed.size > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, labels = fetch()
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()

    return run


def bare_engine(context: Any, loaded: experiment.Experiment) -> Callable[[int], None]:
    """A loop as short as DeepSpeed allows, with the trial's configuration."""
    fetch, classes = in_memory(context, loaded)
    net = Net(classes)
    config = resolved(context, loaded)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, labels = fetch()
            engine.backward(F.cross_entropy(engine(inputs), labels))
            engine.step()

    return run


def in_memory(context: Any, loaded: experiment.Experiment) -> tuple[Callable[[], tuple[Any, Any]], int]:
    """What fetches random micro-batches of normalised float32 images that lie in memory already; how many classes."""
    source = data.load(data.DataConfig.parse(loaded.config.get("data")), "train")
    size = resolved(context, loaded)["train_micro_batch_size_per_gpu"]
    inputs, labels = data.as_inputs(source.images).to(context.device), source.labels.to(context.device)
    order, at = torch.randperm(len(labels), device=context.device), 0

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal at
        at = 0 if at + 2 * size > len(labels) else at + size
        chosen = order[at : at + size]
        return inputs[chosen], labels[chosen]

    return fetch, len(source.classes)


class ExampleTrial(det_ds.DeepSpeedTrial):
    """A trial as Determined's examples are written: an image at a time, the engine as DeepSpeed makes it."""

    def __init__(self, context: Any) -> None:
        self.context = context
        loaded = experiment.Experiment(context.get_experiment_config(), context.get_hparams())
        self.source = data.load(data.DataConfig.parse(loaded.config.get("data")), "train")
        net = Net(len(self.source.classes))
        config = resolved(context, loaded)
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
        loss = F.cross_entropy(self.model_engine(inputs), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

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

    def segment(self: Any, steps: int) -> None:
        """Trains so many steps."""
        until = self.state.batches_trained + steps
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


class TrialTiming(Timing, harness.TrialController):
    """This package's controller."""

    counts_from_start = True


class StockTiming(Timing, det_ds.DeepSpeedTrialController):
    """Determined's own, which counts the batches of each call anew."""

    counts_from_start = False


BARE = {"pytorch": bare_pytorch, "engine": bare_engine}
TRIALS: dict[str, tuple[type, type]] = {"trial": (CIFARTrial, TrialTiming), "example": (ExampleTrial, StockTiming)}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text()))

"""Times contenders in turn, in the processes that ``benchmarks`` starts, and writes the times as JSON.

- ``pytorch``: a bare PyTorch loop over float tensors in memory;
- ``engine``: a bare DeepSpeed loop over the same;
- ``trial``: this package's trial in Determined's trainer, with reports and TensorBoard;
- ``example``: the style of Determined's own examples: its stock trainer, a PIL dataset and 2 workers.
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


def main(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Runs the contenders of a request: ``config``, ``overrides``, ``contenders``, ``steps``, ``repeats``."""
    loaded = experiment.load(request["config"], request["overrides"])
    times: dict[str, list[float]] = {name: [] for name in request["contenders"]}
    with harness.trial_context(loaded, pathlib.Path(tempfile.mkdtemp())) as context:
        example = "example" in request["contenders"]
        trial = (ExampleTrial if example else CIFARTrial)(context)
        segments: dict[str, Callable[[int], None]] = {}
        if not example:
            segments = {"pytorch": bare_pytorch(trial), "engine": bare_engine(trial, loaded)}

        def measure(made: Any) -> None:
            every = {**segments, "example" if example else "trial": made.segment}
            for repeat in range(request["repeats"] + 1):  # the first warms up
                for name, run in every.items():
                    torch.distributed.barrier()
                    since = time.perf_counter()
                    run(request["steps"])
                    harness.get_accelerator().synchronize()
                    if repeat:
                        times[name].append((time.perf_counter() - since) / request["steps"])

        controller(trial, context, loaded, measure, StockTiming if example else TrialTiming)
        images = trial.model_engine.train_batch_size()
        if context.distributed.rank == 0:
            answer.write_text(json.dumps({"seconds_per_step": times, "images_per_step": images}))


def bare_pytorch(trial: CIFARTrial) -> Callable[[int], None]:
    """A loop as short as PyTorch allows, with this trial's optimizer."""
    device, net = trial.context.device, Net(len(trial.train_set.classes)).to(trial.context.device)
    wrapped = torch.nn.parallel.DistributedDataParallel(net) if trial.context.distributed.size > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7)
    fetch = in_memory(trial, device)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, labels = fetch()
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()

    return run


def bare_engine(trial: CIFARTrial, loaded: experiment.Experiment) -> Callable[[int], None]:
    """A loop as short as DeepSpeed allows, with this trial's configuration."""
    device, net = trial.context.device, Net(len(trial.train_set.classes))
    config = engine_config.resolve(loaded.hyperparameters, trial.context.distributed.size, device.type, lambda *_: 1000)
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    fetch = in_memory(trial, device)

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, labels = fetch()
            engine.backward(F.cross_entropy(engine(inputs), labels))
            engine.step()

    return run


def in_memory(trial: CIFARTrial, device: torch.device) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Gives random micro-batches of normalised float32 images that lie in memory already."""
    size = trial.model_engine.train_micro_batch_size_per_gpu()
    inputs, labels = data.as_inputs(trial.train_set.images).contiguous().to(device), trial.train_set.labels.to(device)
    order, at = torch.randperm(len(labels), device=device), 0

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal at
        at = 0 if at + 2 * size > len(labels) else at + size
        chosen = order[at : at + size]
        return inputs[chosen], labels[chosen]

    return fetch


class ExampleTrial(CIFARTrial):
    """The trial with the loader and the batches of Determined's examples."""

    @override
    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.model_engine.train_micro_batch_size_per_gpu()
        pixels = self.train_set.images.permute(0, 2, 3, 1).contiguous().numpy()
        pictures = Pictures(pixels, self.train_set.labels.tolist())
        return pytorch.DataLoader(pictures, batch_size=size, shuffle=True, num_workers=2, drop_last=True)

    @override
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, labels = self.context.to_device(next(dataloader_iter))
        loss = F.cross_entropy(self.model_engine(inputs), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}


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
            self.core_context.train.begin(10**9, len(self.trial.train_sampler.step_sizes), 0)
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


if __name__ == "__main__":
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2]))

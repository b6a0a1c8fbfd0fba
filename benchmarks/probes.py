"""Measure a validation of the trial, or the memory of its decoded images.

python3 -m benchmarks.probes validation|images REQUEST ANSWER
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_trial.trainer import Trainer, init

# isort: split
import psutil
import torch
from deepspeed.accelerator import get_accelerator
from determined import pytorch
from typing_extensions import override

import data
from classify.config import experiment_file
from classify.models import registry
from model_def import CIFARTrial

BATCHES = (100, 250, 500, 1000, 2000)


@contextmanager
def context_of(request: dict[str, Any]) -> Iterator[Any]:
    """Yield a context for the experiment that a request names."""
    experiment = experiment_file.load(request["config"], request["overrides"])
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder)
        with init(experiment.hyperparameters, experiment.config, output=output) as context:
            yield context


class Stopwatch(pytorch.PyTorchCallback):
    """Times validations by the trial, and bare forward passes over float tensors in memory, in turn.

    Args:
        trial: the trial whose validations and network are timed.
    """

    def __init__(self, trial: CIFARTrial) -> None:
        images, device, dtype = trial.images, trial.context.device, trial.config.dtype
        self.inputs = data.as_inputs(images.test.images).contiguous().to(device, dtype)
        self.net = registry.build(trial.config.net).to(device, dtype).eval()
        self.seconds: dict[str, list[float]] = {"trial": [], **{str(size): [] for size in BATCHES}}

    @override
    def on_validation_start(self) -> None:
        get_accelerator().synchronize()
        self.since = time.perf_counter()

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._stop("trial")
        for size in BATCHES:
            self.since = time.perf_counter()
            with torch.no_grad():
                for part in self.inputs.split(size):
                    self.net(part)  # in eval mode a network returns only logits
            self._stop(str(size))

    def _stop(self, name: str) -> None:
        get_accelerator().synchronize()
        self.seconds[name].append(time.perf_counter() - self.since)


def validation(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Write the seconds of a validation after each step; the first validation warms up and is left out."""

    class Timed(CIFARTrial):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"stopwatch": stopwatch}

    with context_of(request) as context:
        trial = Timed(context)
        stopwatch = Stopwatch(trial)
        length = pytorch.Batch(request["repeats"] + 1)
        Trainer(trial, context).fit(length, validation_period=pytorch.Batch(1), checkpoint_policy="none")
        seconds = {name: times[1:] for name, times in stopwatch.seconds.items()}
        answer.write_text(json.dumps({"seconds": seconds, "images": len(stopwatch.inputs)}))


def images(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Write the bytes of the files of decoded images, and the ranks' proportional set size of them."""
    with context_of(request) as context:
        trial = CIFARTrial(context)
        touched = sum(int(each.images.sum()) for each in (trial.images.train, trial.images.test))
        context.distributed.allgather(touched)  # all ranks have read all pixels
        shares = {
            each.path: each.pss for each in psutil.Process().memory_maps() if each.path.endswith(".raw")
        }
        everyones = context.distributed.gather(shares)
        if context.distributed.rank == 0:
            files = {path: pathlib.Path(path).stat().st_size for path in everyones[0]}
            held = sum(sum(each.values()) for each in everyones)
            answer.write_text(
                json.dumps({"files": sum(files.values()), "held": held, "ranks": len(everyones)})
            )
        context.distributed.allgather(None)


if __name__ == "__main__":
    probe = {"validation": validation, "images": images}[sys.argv[1]]
    probe(json.loads(pathlib.Path(sys.argv[2]).read_text()), pathlib.Path(sys.argv[3]))

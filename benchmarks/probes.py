"""What a run costs besides its steps: its start, its validation, its memory.

python3 -m benchmarks.probes startup|validation|images REQUEST ANSWER
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from functools import partial
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

import data
import experiment
import harness
from benchmarks.worker import TrialTiming, build, controller
from model_def import CIFARTrial

IMPORTED = time.time()
BATCHES = (100, 250, 500, 1000, 2000)


def startup(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Trains one step as ``train.py`` does; gives the seconds of the imports, and from there to the end of the step."""
    began = psutil.Process().create_time()

    class OneStep(CIFARTrial):
        def train_batch(self, *args: Any) -> dict[str, Any]:
            metrics = super().train_batch(*args)
            get_accelerator().synchronize()
            answer.write_text(json.dumps({"imports": IMPORTED - began, "first_step": time.time() - IMPORTED}))
            return metrics

    loaded = experiment.load(request["config"], request["overrides"])
    with harness.trial_context(loaded, pathlib.Path(tempfile.mkdtemp())) as context:
        harness.fit(OneStep(context), context, loaded, test_mode=True)


def validation(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Times validations by the trial, and bare forward passes over float tensors in memory, in turn."""
    loaded = experiment.load(request["config"], request["overrides"])
    with harness.trial_context(loaded, pathlib.Path(tempfile.mkdtemp())) as context:
        trial = CIFARTrial(context)
        inputs = data.as_inputs(trial.test_set.images).contiguous().to(context.device, trial.dtype)
        net = build(loaded.hyperparameters, trial.test_set).to(context.device, trial.dtype).eval()
        times: dict[str, list[float]] = {"trial": [], **{str(size): [] for size in BATCHES}}

        @torch.no_grad()
        def forward(size: int) -> None:
            for part in inputs.split(size):
                net(part)  # which in eval mode gives logits alone

        def measure(made: Any) -> None:
            made.segment(1)
            contenders = {"trial": made._validate, **{str(size): partial(forward, size) for size in BATCHES}}
            for repeat in range(request["repeats"] + 1):  # the first warms up
                for name, run in contenders.items():
                    since = time.perf_counter()
                    run()
                    get_accelerator().synchronize()
                    if repeat:
                        times[name].append(time.perf_counter() - since)

        controller(trial, context, loaded, measure, TrialTiming)
        answer.write_text(json.dumps({"seconds": times, "images": len(inputs)}))


def images(request: dict[str, Any], answer: pathlib.Path) -> None:
    """Gives what the ranks' mappings of the decoded images weigh together, and the size of those files."""
    loaded = experiment.load(request["config"], request["overrides"])
    with harness.trial_context(loaded, pathlib.Path(tempfile.mkdtemp())) as context:
        trial = CIFARTrial(context)
        touched = int(trial.train_set.images.sum()) + int(trial.test_set.images.sum())
        context.distributed.allgather(touched)  # all have read all of it
        shares = {each.path: each.pss for each in psutil.Process().memory_maps() if each.path.endswith(".raw")}
        everyones = context.distributed.gather(shares)
        if context.distributed.rank == 0:
            files = {path: pathlib.Path(path).stat().st_size for path in everyones[0]}
            held = sum(sum(each.values()) for each in everyones)
            answer.write_text(json.dumps({"files": sum(files.values()), "held": held, "ranks": len(everyones)}))
        context.distributed.allgather(None)


if __name__ == "__main__":
    probe = {"startup": startup, "validation": validation, "images": images}[sys.argv[1]]
    probe(json.loads(pathlib.Path(sys.argv[2]).read_text()), pathlib.Path(sys.argv[3]))

"""Times whole programs, from the start of the process until they reach an accuracy."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import joblib
import numpy as np
import psutil
import torch

import data
from classify.config import experiment_file
from classify.config.project import PROJECT
from classify.engine.trial_config import TrialConfig
from deepspeed_trial.processes import device_type

FAST = "experiments/cifar10-67.yaml"
PEERS = {
    "PyTorch tutorial": "SGD, batch 4, 2 epochs, PIL dataset with 2 workers",
    "DeepSpeed tutorial": "`cifar10_deepspeed.py`, fp32, ZeRO 0, batch 16, 1 epoch, started by `deepspeed`",
    "plain loop": "bare PyTorch loop with `cifar10-67.yaml`'s recipe, images in memory",
    "trial": "`python3 train.py --config experiments/cifar10-67.yaml`",
}
ACCURACY = re.compile(r"validation .*?\baccuracy (\d\.\d+)")
LEVELS = (0.60, 0.66)  # accuracies to compare at, in addition to the tutorials'


@dataclass
class Watched:
    """One execution of a program.

    Attributes:
        seconds: the time from the start of the process to its end.
        reached: pairs of the seconds since the start of the process and the accuracy, for each validation.
        training: the seconds from the start of the process to the start of the training.
        memory: the maximum of the summed proportional set sizes of its processes, in bytes.
    """

    seconds: float = 0.0
    reached: list[tuple[float, float]] = field(default_factory=list)
    training: float = 0.0
    memory: int = 0

    def time_to(self, accuracy: float, since_training: bool = False) -> float | None:
        """Return the seconds to the first validation with at least this accuracy; None without one."""
        since = self.training if since_training else 0.0
        return next((seconds - since for seconds, reached in self.reached if reached >= accuracy), None)


def watch(command: Sequence[str], environment: dict[str, str], folder: pathlib.Path) -> Watched:
    """Run a program; return its times, accuracies and peak memory, or end this process if it fails."""
    watched, began, wall = Watched(), time.perf_counter(), time.time()
    with open(folder / "stderr.txt", "w+") as errors:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        sampler = threading.Thread(target=_sample, args=(process, watched), daemon=True)
        sampler.start()
        assert process.stdout
        for line in process.stdout:
            now = time.perf_counter() - began
            if line.startswith("training"):
                watched.training = now
            if found := ACCURACY.search(line):
                watched.reached.append((now, float(found[1])))
        process.wait()
        watched.seconds = time.perf_counter() - began
        sampler.join()
        if process.returncode:
            errors.seek(0)
            sys.exit(f"benchmarks: {' '.join(command)} failed:\n{errors.read()[-3000:]}")
    if (folder / "run/run.json").exists():
        watched.training = json.loads((folder / "run/run.json").read_text())["started"] - wall
    return watched


def _sample(process: subprocess.Popen, watched: Watched) -> None:
    """Sample the memory twice a second, and keep the maximum."""
    while process.poll() is None:
        total = 0
        try:
            parent = psutil.Process(process.pid)
            for each in [parent, *parent.children(recursive=True)]:
                total += each.memory_full_info().pss
        except (psutil.Error, OSError):  # a process has just ended
            total = 0
        watched.memory = max(watched.memory, total)
        time.sleep(0.5)


def measure(overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Run the programs in turn.

    Args:
        overrides: the values of ``--set`` that name the data.
        repeats: the number of runs of each program.
    """
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment.setdefault("OMP_NUM_THREADS", str(joblib.cpu_count()))
    runs: dict[str, list[Watched]] = {name: [] for name in PEERS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_inputs(overrides, folder)
        peer = ["-m", "benchmarks.peers"]
        with socket.socket() as probe:  # not the launcher's fixed port, which another training may hold
            probe.bind(("127.0.0.1", 0))
            port = f"--master_port={probe.getsockname()[1]}"
        launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus=1", port, "--module", "benchmarks.peers"]
        settings = [part for each in overrides for part in ("--set", each)]
        commands = {
            "PyTorch tutorial": [*peer, "pytorch-tutorial", name],
            "DeepSpeed tutorial": [*launcher, "deepspeed-tutorial", name],
            "plain loop": [*peer, "plain-loop", name],
            "trial": ["train.py", "--config", FAST, *settings, "--output", f"{name}/run"],
        }
        for _ in range(repeats):
            for program, command in commands.items():
                subprocess.run(["rm", "-rf", f"{name}/run"], check=True)
                runs[program].append(watch([sys.executable, *command], environment, folder))
                print(line(program, runs[program][-1]), flush=True)
    return {program: [vars(each) for each in watched] for program, watched in runs.items()}


def write_inputs(overrides: Sequence[str], folder: pathlib.Path) -> None:
    """Write the decoded images and the recipe of ``cifar10-67.yaml`` for the peers."""
    experiment = experiment_file.load(str(PROJECT / FAST), overrides)
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, 1, device_type())
    splits = {split: config.source.load(split) for split in ("train", "test")}
    for split, source in splits.items():
        pixels = source.images.permute(0, 2, 3, 1).contiguous().numpy()
        np.savez(folder / f"{split}.npz", pixels=pixels, labels=source.labels.numpy())
    params = config.deepspeed["optimizer"]["params"]
    period = experiment.period("min_validation_period")
    assert period and period[0] == "batches"
    recipe = {
        "seed": config.seed,
        "classes": config.net.num_classes,
        "batch": config.deepspeed["train_batch_size"],
        "clip": config.deepspeed["gradient_clipping"],
        "channels_last": config.channels_last,
        "epochs": experiment.hyperparameters["max_length"]["epochs"],
        "optimizer": {key: value for key, value in params.items() if key != "torch_adam"},
        "scheduler": config.deepspeed["scheduler"],
        "normalization": data.Images(config.source, config.seed, torch.device("cpu")).normalization,
        "augment": vars(config.data.augment),
        "validate_every": period[1],
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))


def line(program: str, watched: Watched) -> str:
    """Describe one execution in a line."""
    best = max((accuracy for _, accuracy in watched.reached), default=0.0)
    return f"{program}: {watched.seconds:.1f} s, accuracy {best:.4f}, peak {watched.memory / 2**20:,.0f} MiB"


def times(
    runs: dict[str, list[Watched]], program: str, accuracy: float, since_training: bool = False
) -> float | None:
    """Return the median of a program's seconds to an accuracy; None if a run did not reach it."""
    found = [each.time_to(accuracy, since_training) for each in runs[program]]
    reached = [each for each in found if each is not None]
    return statistics.median(reached) if len(reached) == len(found) else None


def reached_by(runs: dict[str, list[Watched]], program: str) -> float:
    """Return the median, over a program's runs, of the last accuracy."""
    return statistics.median(each.reached[-1][1] for each in runs[program])


def parsed(measured: dict[str, Any]) -> dict[str, list[Watched]]:
    """Parse the result of ``measure``, or its JSON."""
    return {program: [Watched(**each) for each in watched] for program, watched in measured.items()}


def lines(measured: dict[str, Any]) -> list[str]:
    """Return a sentence for each comparison."""
    runs = parsed(measured)
    found = []
    for peer in ("PyTorch tutorial", "DeepSpeed tutorial"):
        accuracy = reached_by(runs, peer)
        theirs, ours = statistics.median(each.seconds for each in runs[peer]), times(runs, "trial", accuracy)
        trained = times(runs, "trial", accuracy, since_training=True)
        if ours and trained:
            began = statistics.median(
                each.training for each in runs[peer]
            )  # after compiling an operator, maybe
            found.append(
                f"{peer}: {accuracy:.1%} in {theirs:.1f} s, with training from {began:.1f} s on; the"
                f" trial reaches it in {ours:.1f} s: {theirs / ours:.1f} times as fast, and"
                f" {(theirs - began) / trained:.1f} times by training time alone."
            )
        else:
            found.append(f"{peer}: {accuracy:.1%} in {theirs:.1f} s; the trial did not reach it.")
    for level in LEVELS:
        ours, plain = (
            times(runs, program, level, since_training=True) for program in ("trial", "plain loop")
        )
        if ours and plain:
            ratio = f"{ours / plain:.2f} times the plain loop's {plain:.1f} s"
            found.append(f"Training time to {level:.0%}: {ours:.1f} s, {ratio}.")
        else:
            missing = [
                name for name, seconds in (("the trial", ours), ("the plain loop", plain)) if not seconds
            ]
            found.append(f"Training time to {level:.0%}: not reached by {' and '.join(missing)}.")
    return found

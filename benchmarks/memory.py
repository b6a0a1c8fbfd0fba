"""The forecast of memory beside what runs took.

    python3 -m benchmarks.memory                                      all rows: ten minutes on two cores
    python3 -m benchmarks.memory --rows 0 5

A row is a launch of ``train.py`` on random images. Measured is the most memory that the first rank had in its
steps, as Linux counts it (``VmHWM``), set back before the first of them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

STEPS, CLASSES = 3, 2


class Row(NamedTuple):
    """A configuration.

    Attributes:
        net: its name.
        size: of the images, in pixels.
        micro_batch: images.
        processes: how many train.
        zero: the section ``zero_optimization``.
        deepspeed: more of the DeepSpeed configuration.
        hyper: more hyperparameters.
    """

    net: str
    size: int
    micro_batch: int
    processes: int
    zero: dict[str, Any]
    deepspeed: dict[str, Any] = {}
    hyper: dict[str, Any] = {}


BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
RECOMPUTED = {"checkpoint_activations": True}
ROWS = [
    Row("net", 32, 1024, 1, {"stage": 0}),
    Row("net", 32, 512, 2, {"stage": 2}),
    Row("resnet18", 224, 16, 1, {"stage": 0}),
    Row("resnet18", 224, 16, 1, {"stage": 0}, BF16),
    Row("resnet18", 224, 8, 1, {"stage": 0}, {"gradient_accumulation_steps": 4}),
    Row("resnet18", 64, 128, 2, {"stage": 1}),
    Row("resnet50", 224, 8, 1, {"stage": 0}),
    Row("resnet50", 224, 16, 1, {"stage": 0}),
    Row("resnet50", 224, 8, 1, {"stage": 0}, {}, RECOMPUTED),
    Row("resnet50", 224, 8, 1, {"stage": 3}),
    Row("resnet50", 224, 8, 2, {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 10_000_000}),
    Row("vit_b_16", 224, 4, 1, {"stage": 0}),
    Row("vit_b_16", 224, 8, 1, {"stage": 0}),
    Row("vit_b_16", 224, 4, 1, {"stage": 0}, {}, RECOMPUTED),
    Row("vit_b_16", 224, 4, 1, {"stage": 0}, {}, {"weight_average": {"decay": 0.99}}),
    Row("vit_b_16", 224, 4, 1, {"stage": 1}),
    Row("vit_b_16", 224, 4, 1, {"stage": 2}, BF16),
    Row("vit_b_16", 224, 4, 1, {"stage": 3, **OFFLOAD}),
    Row("vit_b_16", 224, 4, 2, {"stage": 0}),
    Row("vit_b_16", 224, 4, 2, {"stage": 1}),
    Row("vit_b_16", 224, 4, 2, {"stage": 1}, BF16),
    Row("vit_b_16", 224, 4, 2, {"stage": 2}),
    Row("vit_b_16", 224, 4, 2, {"stage": 3}),
]


def make_images(folder: pathlib.Path, training: int) -> None:
    """Fills a folder with small random images, so many to train on."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", training), ("test", 8)):
        for index in range(count):
            file = folder / split / str(index % CLASSES) / f"{index}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)


def batch(row: Row) -> int:
    """The images of an optimizer step."""
    return row.micro_batch * row.processes * row.deepspeed.get("gradient_accumulation_steps", 1)


def settings(row: Row, images: pathlib.Path) -> list[str]:
    """What replaces values of ``experiments/photos.yaml``."""
    deepspeed = {"train_batch_size": batch(row), "zero_optimization": row.zero, **row.deepspeed}
    chosen = {
        "data": {"dataset": "imagefolder", "root": str(images), "image_size": row.size},
        "hyperparameters.net": row.net,
        "hyperparameters.weights": None,
        "hyperparameters.max_length": {"batches": STEPS},
        "hyperparameters.overwrite_deepspeed_args": deepspeed,
        **{f"hyperparameters.{key}": value for key, value in row.hyper.items()},
    }
    return [f"{key}={json.dumps(value)}" for key, value in chosen.items()]


def worker(arguments: list[str]) -> int:
    """Trains as ``train.py`` does, and prints what the first rank had; a process of several."""
    import train
    from model_def import CIFARTrial

    before, train_batch = status("VmRSS"), CIFARTrial.train_batch
    passes = 0

    def measured(trial: CIFARTrial, *rest: Any) -> dict[str, Any]:
        nonlocal passes
        if not passes:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        metrics = train_batch(trial, *rest)
        passes += 1
        if passes == STEPS * trial.accumulation and trial.context.distributed.rank == 0:
            print(json.dumps({"imported": before, "peak": status("VmHWM")}), file=sys.__stdout__, flush=True)
        return metrics

    setattr(CIFARTrial, "train_batch", measured)  # noqa: B010
    return train.main(arguments)


def status(field: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    found = re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def measure(row: Row, images: pathlib.Path) -> dict[str, int]:
    """Bytes that the first rank had after its imports, and at most in the steps."""
    launch = [sys.executable]
    if row.processes > 1:
        launch += "-m torch.distributed.run --master-port=29879 --nproc-per-node".split()
        launch.append(str(row.processes))
    launch += "-m benchmarks.memory --worker --config experiments/photos.yaml".split()
    launch += [part for each in settings(row, images) for part in ("--set", each)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as output:
        command = [*launch, "--output", output]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"imported"')]
    if not lines:
        raise RuntimeError(f"{row}: {done.stderr[-2000:]}")
    return json.loads(lines[0])


def line(row: Row, images: pathlib.Path) -> str:
    """A row of the table: the configuration, forecast and measured MiB, and how far they are apart."""
    from classify.config import experiment_file
    from classify.engine.memory_forecast import MIB, forecast
    from classify.engine.trial_config import TrialConfig

    experiment = experiment_file.load("experiments/photos.yaml", settings(row, images))
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, row.processes, "cpu")
    foreseen, measured = forecast(config).total, measure(row, images)
    mode = [f"ZeRO {row.zero['stage']}", *(key for key in row.zero if key != "stage")]
    cells = [f"`{row.net}`", row.size, row.micro_batch, row.processes]
    cells += [", ".join([*mode, *row.deepspeed, *row.hyper])]
    cells += [f"{each / MIB:,.0f}" for each in (foreseen, measured["peak"])]
    for before in (0, measured["imported"]):
        cells.append(f"{(foreseen - before) / (measured['peak'] - before) - 1:+.0%}")
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: list[str]) -> int:
    """Measures the rows and prints the table."""
    if argv[:1] == ["--worker"]:
        return worker(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=range(len(ROWS)), help="which, from 0")
    args = parser.parse_args(argv)
    print(
        "| net | pixels | micro-batch | processes | mode | forecast | measured | apart | after the imports |"
    )
    print(f"|{'---|' * 9}")
    for index in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            make_images(pathlib.Path(folder), STEPS * batch(ROWS[index]))
            print(line(ROWS[index], pathlib.Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measures costs of a run other than its steps: start, validation, images in memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.steps import most_processes, run, spread

LIBRARIES = "import torch, deepspeed, determined"


def measure(config: str, overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure every cost in new processes.

    Returns:
        ``start``: for each repeat, the wall and processor seconds of three durations: ``libraries`` (a
        process that only imports the libraries), ``imports`` (``train.py`` until the end of its imports) and
        ``first_step`` (``train.py`` until the end of its first step, without cached compiled operators).
        ``validation``: the seconds of the trial's validations, and of bare forward passes by batch size.
        ``images``: the bytes of the ``files`` of decoded images (0 without files), and the ranks'
        proportional set size of them (``held``).
    """
    request = {"config": config, "overrides": list(overrides), "repeats": repeats}
    doubled = [*overrides, "hyperparameters.overwrite_deepspeed_args.train_batch_size=16", "data.device=cpu"]
    return {
        "start": [start(request) for _ in range(min(5, repeats))],
        "validation": run(["benchmarks.probes", "validation"], request),
        "images": run(["benchmarks.probes", "images"], {**request, "overrides": doubled}, most_processes()),
    }


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Time a process that imports only the libraries, and the start of ``train.py``."""
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", LIBRARIES], stderr=subprocess.DEVNULL)
    used = os.wait4(process.pid, 0)[2]
    libraries = time.time() - began, used.ru_utime + used.ru_stime
    names = ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cold:
        caches, request = dict.fromkeys(names, cold), {**request, "began": time.time()}
        return {"libraries": libraries, **run(["benchmarks.start"], request, environment=caches)}


def validation_ratio(costs: dict[str, Any]) -> tuple[float, int, float]:
    """Compare the trial's validation with the fastest bare forward pass.

    Returns:
        The ratio of their seconds, the batch size of that pass, and the spread of the trial's seconds.
    """
    seconds = {name: statistics.median(times) for name, times in costs["validation"]["seconds"].items()}
    trial = seconds.pop("trial")
    best = min(seconds, key=lambda name: seconds[name])
    return trial / seconds[best], int(best), spread(costs["validation"]["seconds"]["trial"])


def start_line(costs: dict[str, Any]) -> str:
    """Return a sentence about the duration of the start."""

    def times(name: str) -> str:
        seconds, of_processor = (
            statistics.median(each) for each in zip(*(row[name] for row in rows), strict=True)
        )
        return f"{seconds:.1f} s ({of_processor:.1f} s of the processor)"

    rows = costs["start"]
    over = [statistics.median(row["first_step"][at] / row["libraries"][at] for row in rows) for at in (0, 1)]
    return (
        f"Start: `python3 -c '{LIBRARIES}'` takes {times('libraries')}; `python3 train.py` ends its"
        f" imports after {times('imports')}, and its first step, with no operator ever compiled, after"
        f" {times('first_step')}: {over[0]:.2f} times as long ({over[1]:.2f} times by the processor's time)."
    )


def lines(costs: dict[str, Any]) -> list[str]:
    """Return a sentence about each cost."""
    ratio, batch, width = validation_ratio(costs)
    validation, images = costs["validation"], costs["images"]
    seconds = statistics.median(validation["seconds"]["trial"])
    held, mapped = images["held"] / 2**20, images["files"] / 2**20
    kept = (
        f"{held:.0f} MiB between them (proportional set size) of {mapped:.0f} MiB of files"
        if mapped
        else "their own"
    )
    copies = f": {held / mapped:.2f} copies" if mapped else "; no file holds them"
    return [
        start_line(costs),
        f"Validation of {validation['images']:,} images: {seconds:.2f} s, {ratio:.2f} times the best bare"
        f" forward pass over float tensors in memory (batches of {batch}); spread {width:.0%}.",
        f"Decoded images: {images['ranks']} ranks hold {kept}{copies}.",
    ]

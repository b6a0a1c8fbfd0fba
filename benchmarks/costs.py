"""What a run costs besides its steps: its start, its validation, and its images in memory."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.steps import most_processes, run, spread


def measure(config: str, overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measures each in processes of its own.

    Returns:
        ``startup``: seconds of ``imports``, and from their end to that of the ``first_step``, one a repeat,
        each with empty caches of compiled operators; ``validation``: the seconds of the trial's, and of
        bare forward passes by batch size; ``images``: bytes of the cache files, none of embedded images,
        and, proportionally, of what the ranks hold of them.
    """
    request = {"config": config, "overrides": list(overrides), "repeats": repeats}
    startup = []
    for _ in range(min(3, repeats)):
        with tempfile.TemporaryDirectory() as cold:
            caches = dict.fromkeys(
                ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), cold
            )
            startup.append(run(["benchmarks.probes", "startup"], request, environment=caches))
    doubled = [*overrides, "hyperparameters.overwrite_deepspeed_args.train_batch_size=16", "data.device=cpu"]
    return {
        "startup": {key: [each[key] for each in startup] for key in startup[0]},
        "validation": run(["benchmarks.probes", "validation"], request),
        "images": run(["benchmarks.probes", "images"], {**request, "overrides": doubled}, most_processes()),
    }


def validation_ratio(costs: dict[str, Any]) -> tuple[float, int, float]:
    """The trial's seconds over the best bare forward pass's, that one's batch size, the trial's spread."""
    seconds = {name: statistics.median(times) for name, times in costs["validation"]["seconds"].items()}
    trial = seconds.pop("trial")
    best = min(seconds, key=lambda name: seconds[name])
    return trial / seconds[best], int(best), spread(costs["validation"]["seconds"]["trial"])


def lines(costs: dict[str, Any]) -> list[str]:
    """What was measured, as text."""
    startup = {key: statistics.median(times) for key, times in costs["startup"].items()}
    ratio, batch, width = validation_ratio(costs)
    validation, images = costs["validation"], costs["images"]
    seconds = statistics.median(validation["seconds"]["trial"])
    held, mapped = images["held"] / 2**20, images["files"] / 2**20
    kept = (
        f"{held:.0f} MiB between them (proportional set size) of {mapped:.0f} MiB of files"
        if mapped
        else "their own"
    )
    copies = f": {held / mapped:.2f} copies" if mapped else ", for they are in no file"
    return [
        f"Start with no operator ever compiled: imports {startup['imports']:.1f} s, from there to the end of"
        f" the first step {startup['first_step']:.1f} s.",
        f"Validation of {validation['images']:,} images: {seconds:.2f} s, {ratio:.2f} times the best bare"
        f" forward pass over float tensors in memory (batches of {batch}); spread {width:.0%}.",
        f"Decoded images: {images['ranks']} ranks hold {kept}{copies}.",
    ]

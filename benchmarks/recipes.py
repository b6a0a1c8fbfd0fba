"""Train recipes for CIFAR-10 with several seeds, and write their results to benchmarks/RECIPES.md.

    python3 -m benchmarks.recipes                                      an hour on two cores
    python3 -m benchmarks.recipes cifar10-90 --seeds 0 --set data.dataset=imagefolder --set data.root=FOLDER

To compare speeds, the trial and a bare PyTorch loop alternate. Both reuse freed memory.
After an interruption the same command continues: it skips the runs whose results --output holds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import steps
from classify.config import experiment_file
from classify.config.project import PROJECT
from classify.engine.trial_config import TrialConfig
from classify.models import flops, registry
from classify.reports import summary
from deepspeed_trial import machine
from deepspeed_trial.errors import InvalidInput, print_errors

RECIPES = ("cifar10-90", "cifar10-94")
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}  # as the trial does
COLUMNS = (
    "recipe | seeds | accuracy (TTA) | without TTA | training, s | program, s"
    " | trial's images/s over a bare loop's, at first | GFLOP/s, at first"
)
EXPLANATION = """\
`python3 -m benchmarks.recipes` runs `python3 train.py --config experiments/NAME.yaml` for each seed, and
writes this page. Accuracies are of the last weights on the test images, with test-time augmentation (TTA:
mirror, shifts of a pixel) and without: the mean over the seeds (minimum to maximum). Seconds are means: of
the training with its validations, and of the whole program.
""".split("\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("recipes", nargs="*", default=RECIPES, help=f"files of experiments/ ({' '.join(RECIPES)})")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    add(
        "--repeats", type=int, default=5, metavar="N", help="repeats of the comparison with the bare loop (5)"
    )
    add("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides", help="as in train.py")
    add("--output", type=pathlib.Path, default=pathlib.Path("runs/recipes"), help="(%(default)s)")
    add("--results", type=pathlib.Path, default=PROJECT / "benchmarks/RECIPES.md", help="(%(default)s)")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.recipes:
            measure(name, args)
    except InvalidInput as error:
        return print_errors("benchmarks", error)
    found = lines(read(args.output))
    print(*found, sep="\n")
    args.results.write_text("\n".join(["# Recipes", "", *found, ""]))
    return 0


def measure(name: str, args: argparse.Namespace) -> None:
    """Train a recipe with every seed and time its steps; skip results that the output holds."""
    file = f"experiments/{name}.yaml"
    experiment = experiment_file.load(str(PROJECT / file), args.overrides)
    config = TrialConfig.resolve(experiment.hyperparameters, experiment.config, 1, "cpu")
    for seed in args.seeds:
        train(file, f"{name}-seed{seed}", seed, args)
    kept = args.output / f"{name}-speed.json"
    if not kept.exists():
        found = {
            **speeds(file, config.batch, args),
            "operations": flops.training(registry.on_meta_device(config.net), config.input_size(0)),
            "what": f"width {(config.hyper.net_args or {}).get('width')}, batch {config.batch},"
            f" {experiment.hyperparameters['max_length']['epochs']} epochs",
        }
        kept.write_text(json.dumps(found, indent=2) + "\n")


def read(output: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Read the measurements of all recipes.

    Returns:
        By the recipe's name: ``runs`` with the accuracies and seconds of each seed; the images a second of
        the ``trial`` and of the bare loop (``recipe``); and the other results of ``measure``.
    """
    found = {}
    for file in sorted(output.glob("*-speed.json")):
        name = file.name.removesuffix("-speed.json")
        runs = [json.loads(each.read_text()) for each in sorted(output.glob(f"{name}-seed*.json"))]
        found[name] = {"runs": runs, **json.loads(file.read_text())}
    return found


def train(file: str, run: str, seed: int, args: argparse.Namespace) -> None:
    """Run ``train.py`` with a seed, unless its result exists, and store accuracies and seconds."""
    kept, folder = args.output / f"{run}.json", args.output / run
    if not kept.exists():
        settings = [*args.overrides, f"reproducibility.experiment_seed={seed}"]
        options = [part for each in settings for part in ("--set", each)]
        command = [sys.executable, "train.py", "--config", file, *options, "--output", str(folder.resolve())]
        threads = {"OMP_NUM_THREADS": str(machine.describe()["cores"])}
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=PROJECT, env={**threads, **os.environ}, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            sys.exit(f"benchmarks: {' '.join(command)} failed:\n{done.stderr[-3000:]}")
        whole = time.perf_counter() - began
        found = json.loads((folder / summary.FILE).read_text())
        of_run = {
            "seed": seed,
            "whole": whole,
            "seconds": found["seconds"],
            "validation": found["validation"],
            "weights_sha256": found["weights_sha256"],
            "machine": machine.describe(),
        }
        kept.write_text(json.dumps(of_run, indent=2) + "\n")


def speeds(file: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure the first steps of the trial and of its recipe's bare loop, alternately, in images per second.

    ``ratio`` is the median of the ratios of the turns.
    """
    own = {"config": str(PROJECT / file), "overrides": args.overrides, "steps": max(4, 5000 // batch)}
    os.environ.update(KEEPS_MEMORY)
    rates = steps.take_turns({"trial": ("trial", own), "recipe": ("recipe", own)}, 1, args.repeats)
    ratio = [one / other for one, other in zip(rates["trial"], rates["recipe"], strict=True)]
    middle = {name: statistics.median(each) for name, each in rates.items()}
    return {**middle, "ratio": statistics.median(ratio), "peak": multiplications()}


def multiplications(size: int = 3000, times: int = 10) -> float:
    """Measure the FLOP/s of a bf16 matrix product on all cores."""
    torch.set_num_threads(machine.describe()["cores"])
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16)
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        torch.mm(a, b)
        taken.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(taken)


def lines(measured: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table of the measurements, with its explanation."""
    made = [
        *EXPLANATION,
        f"| {COLUMNS} |",
        f"|{'---|' * (COLUMNS.count('|') + 1)}",
    ]
    for name, each in measured.items():
        runs = each["runs"]

        def of(key: str, runs: Any = runs) -> list[float]:
            return [run["validation"][key] for run in runs]

        seconds, whole = ([run[key] for run in runs] for key in ("seconds", "whole"))
        speed = each["operations"] * each["trial"]
        cells = [
            f"`{name}.yaml`: {each['what']}",
            " ".join(str(run["seed"]) for run in runs),
            accuracy(of("accuracy_tta")),
            accuracy(of("accuracy")),
            f"{statistics.mean(seconds):,.0f}",
            f"{statistics.mean(whole):,.0f}",
            f"{each['ratio']:.3f}",
            f"{speed / 1e9:.0f}, {speed / each['peak']:.0%} of a bf16 matrix product's",
        ]
        made.append(f"| {' | '.join(cells)} |")
    described = next(iter(measured.values()))["runs"][-1]["machine"]
    versions = ", ".join(f"{package} {described[package]}" for package in ("python", *machine.PACKAGES))
    return [
        *made,
        "",
        f"Machine: {described['cores']} cores, {described['processor']}, one process with a thread on each;"
        f" {versions}.",
    ]


def accuracy(values: Sequence[float]) -> str:
    """Format the mean, minimum and maximum."""
    spread = f" ({min(values):.2%} to {max(values):.2%})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2%}{spread}"


if __name__ == "__main__":
    sys.exit(main())

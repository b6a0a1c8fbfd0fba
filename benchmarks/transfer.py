"""What fine-tuning gives: a network of five classes of CIFAR-10, trained on few images of the other five.

    python3 -m benchmarks.transfer --images FOLDER          15 minutes on two cores
    ... --count 20 --seeds 0 1                              images a class; which of them

FOLDER holds train/<class>/* and test/<class>/* of CIFAR-10. Every way of fine-tuning has a few learning
rates, of which held-out validation images choose one; the test images are looked at once, at a run's end.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report, runs
from classify.images.sources.cifar10 import Cifar10
from deepspeed_trial import machine

SECTION = "Fine-tuning"
EPOCHS = 30
RATES = (0.0005, 0.002, 0.008, 0.03)
WAYS: dict[str, dict[str, Any]] = {  # hyperparameters of each; all but the first start from the weights
    "from scratch": {},
    "head alone": {"head_only": True},
    "whole network": {},
    "rates by layer": {"layer_decay": 0.65},
    "head first, then rates by layer": {"head_only": {"epochs": 5}, "layer_decay": 0.65},
}
COLUMNS = ("training", "test accuracy", "over scratch, points", "seconds")
EXPLANATION = """\
By `python3 -m benchmarks.transfer`: {steps}
Test accuracy is the mean over the seeds, with the least and the largest; each draws other training images.
Seconds are the median of a run of {epochs} epochs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints every run, and writes the table into the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=pathlib.Path, required=True, help="folder of CIFAR-10's images")
    add("--count", type=int, default=100, metavar="N", help="training images a class (%(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="(0 1)")
    add("--width", type=int, default=32, help="of the network, airbench (%(default)s)")
    add("--epochs", type=int, default=8, help="of the five classes' training (%(default)s)")
    add("--run", type=pathlib.Path, help="folder of an earlier training on the five classes (trains on them)")
    add("--results", type=pathlib.Path, default=runs.PROJECT / "benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    first, others = Cifar10.classes[:5], Cifar10.classes[5:]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        link(args.images, root / "first", first)
        weights, before = pretrained(root, args)
        accuracies: dict[str, list[float]] = {way: [] for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in args.seeds:
            link(args.images, root / f"few{seed}", others, args.count, seed)
            for way in WAYS:
                tested, took = fine_tuned(root, weights, way, seed, args.width)
                accuracies[way].append(tested)
                seconds[way] += took
                print(f"seed {seed}: {way}: {tested:.4f}", flush=True)
    steps = (
        f"`airbench` of width {args.width}, trained for {args.epochs} epochs on {', '.join(first)}"
        " without label smoothing"
        f" (validation {before:.1%}), then on {args.count} images each of {', '.join(others)}, a fifth of"
        f" them held out to choose among the rates {', '.join(map(str, RATES))}."
    )
    scratch = statistics.mean(accuracies["from scratch"])
    rows = []
    for way, found in accuracies.items():
        mean = statistics.mean(found)
        shown = f"{mean:.1%} ({min(found):.1%} to {max(found):.1%})"
        rows.append((way, shown, f"{100 * (mean - scratch):+.1f}", f"{statistics.median(seconds[way]):.0f}"))
    table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    text = [*textwrap.wrap(EXPLANATION.format(steps=steps, epochs=EPOCHS), 110), ""]
    text += [f"| {' | '.join(map(str, cells))} |" for cells in table]
    where = machine.describe()
    threads = f"{where['threads']} thread{'s' * (where['threads'] != 1)}"
    text += ["", f"Machine: {where['cores']} cores, {where['processor']}, {threads}."]
    report.put_section(args.results, SECTION, "\n".join(text))
    print(*text, sep="\n")
    return 0


def link(
    images: pathlib.Path, root: pathlib.Path, classes: Sequence[str], count: int | None = None, seed: int = 0
) -> None:
    """Makes a folder of some classes: links to all training images, or so many, and to those of the test."""
    for part in ("train", "test"):
        for name in classes:
            files = sorted((images / part / name).iterdir())
            if part == "train" and count:
                chosen = np.random.default_rng((seed, count)).permutation(len(files))[:count]
                files = [files[index] for index in chosen]
            (root / part / name).mkdir(parents=True)
            for file in files:
                (root / part / name / file.name).symlink_to(file.resolve())


def sections(root: pathlib.Path, width: int, epochs: int, **more: Any) -> dict[str, Any]:
    """What all runs have in common."""
    return {
        "data.dataset": "imagefolder",
        "data.root": str(root),
        "hyperparameters.net_args.width": width,
        "hyperparameters.max_length": {"epochs": epochs},
        "hyperparameters.progressive_resizing": None,
        "hyperparameters.test_time_augmentation": None,
        "hyperparameters.overwrite_deepspeed_args.torch_autocast": None,
        "min_validation_period": {"epochs": epochs},
        "searcher.metric": "accuracy",
        **more,
    }


def pretrained(root: pathlib.Path, args: argparse.Namespace) -> tuple[pathlib.Path, float]:
    """The weights of a network of the first five classes, trained if need be, and its accuracy."""
    made = args.run.resolve() if args.run else root / "before"
    if not args.run:
        # Smoothed labels make features that transfer worse: https://arxiv.org/abs/2010.16402
        more = {
            "hyperparameters.label_smoothing": 0,
            "hyperparameters.overwrite_deepspeed_args.train_batch_size": 500,
            "hyperparameters.overwrite_deepspeed_args.optimizer": {"params": {"lr": 0.15, "adam_lr": 0.04}},
        }
        inputs = sections(root / "first", args.width, args.epochs, **more)
        runs.trained("experiments/cifar10-90.yaml", inputs, made)
    summary = json.loads((made / "summary.json").read_text())
    return made / "net.pt", summary["validation"]["accuracy"]


def fine_tuned(
    root: pathlib.Path, weights: pathlib.Path, way: str, seed: int, width: int
) -> tuple[float, list[float]]:
    """The test accuracy at the rate that the validation images choose, and the seconds of each run."""
    found = []
    for rate in RATES:
        hyperparameters = {f"hyperparameters.{key}": value for key, value in WAYS[way].items()}
        if way != "from scratch":
            hyperparameters["hyperparameters.weights"] = str(weights)
        deepspeed = {
            "train_batch_size": 50,
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.05}},
        }
        more = {
            "hyperparameters.parameter_groups": None,
            "hyperparameters.overwrite_deepspeed_args": deepspeed,
            "data.validation": 0.2,
            "data.split_seed": seed,
            "reproducibility.experiment_seed": seed,
            **hyperparameters,
        }
        made = sections(root / f"few{seed}", width, EPOCHS, **more)
        name = f"{seed}-{way}-{rate}".replace(" ", "-")
        found.append(runs.trained("experiments/cifar10-90.yaml", made, root / name))
    best = max(found, key=lambda each: each["validation"]["accuracy"])
    return best["test"]["accuracy"], [each["seconds"] for each in found]


if __name__ == "__main__":
    sys.exit(main())

"""What a guided search gives: tpe against random, with as many trials, on CIFAR-10's images.

    python3 -m benchmarks.searches --images FOLDER --run OUTPUT        half an hour on two cores
    ... --seeds 0 1 --trials 12                                        of the searches; of each

FOLDER holds train/<class>/* and test/<class>/* of CIFAR-10. The two searches of a seed run side by side, each
a trial at a time on one thread. OUTPUT keeps them: the same command goes on with those that are there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks import report, runs
from benchmarks.transfer import link
from classify.images.sources.cifar10 import Cifar10
from deepspeed_trial import machine

SECTION = "Searches"
SEARCHERS = ("random", "tpe")
IMAGES, HELD_OUT, EPOCHS = 1000, 0.4, 6  # a class, with those held out; which part; of a trial
RANGES: dict[str, dict[str, Any]] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
    "momentum": {"type": "double", "minval": 0, "maxval": 0.99},
    "weight_decay": {"type": "log", "base": 10, "minval": -6, "maxval": -1},
    "label_smoothing": {"type": "double", "minval": 0, "maxval": 0.4},
    "micro-batch": {"type": "categorical", "vals": [16, 32, 64, 128, 256]},
}
EXPLANATION = """\
By `python3 -m benchmarks.searches`: {trials} trials a search; the PyTorch tutorial's net, SGD, {epochs}
epochs of {trained:,} of CIFAR-10's images, a rate that rises for a tenth of the steps and then falls to 0.
Searched: learning rate (1e-4 to 1, log), momentum (0 to 0.99), weight decay (1e-6 to 0.1, log), label
smoothing (0 to 0.4), micro-batch (16 to 256). Trials are chosen by the accuracy on {held:,} other training
images; test accuracy is that of each search's best trial alone. {seeds} seeds: the mean, with the least and
the largest. The two searches of a seed ran side by side, each a trial at a time on one thread; a trial
took {seconds:.0f} s (median, with the program's start).
"""
COLUMNS = (
    "searcher",
    "best held-out accuracy",
    "after half the trials",
    "best so far, mean over the trials",
    "test accuracy of the best",
    "median trial",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Searches, prints every search, and writes the table into the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=pathlib.Path, required=True, help="folder of CIFAR-10's images")
    add("--run", type=pathlib.Path, required=True, metavar="OUTPUT", help="folder of the searches")
    add("--trials", type=int, default=20, metavar="N", help="of each search (%(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    add("--results", type=pathlib.Path, default=runs.PROJECT / "benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    root = args.run.resolve()
    if not (root / "images").exists():
        link(args.images, root / "images", Cifar10.classes, IMAGES)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SEARCHERS}
    for seed in args.seeds:
        folders = {name: root / f"{name}-{seed}" for name in SEARCHERS}
        going = [start(root, folder, name, seed, args.trials) for name, folder in folders.items()]
        codes = [process.wait() for process in going]
        if any(codes):
            raise RuntimeError(f"a search of seed {seed} failed; its lines are above")
        for name, folder in folders.items():
            found[name].append(result(folder))
            shown = {key: value for key, value in found[name][-1].items() if key != "seconds"}
            print(f"seed {seed}: {name}: {shown}", flush=True)
    text = described(found, args.trials)
    report.put_section(args.results, SECTION, "\n".join(text))
    print(*text, sep="\n")
    return 0


def start(
    root: pathlib.Path, folder: pathlib.Path, searcher: str, seed: int, trials: int
) -> subprocess.Popen[bytes]:
    """Starts a search, or goes on with it."""
    ranges = dict(RANGES)
    micro_batch, smoothing = ranges.pop("micro-batch"), ranges.pop("label_smoothing")
    experiment = {
        "name": f"{searcher}, seed {seed}",
        "data": {"dataset": "imagefolder", "root": str(root / "images"), "validation": HELD_OUT},
        "hyperparameters": {
            "max_length": {"epochs": EPOCHS},
            "label_smoothing": smoothing,
            "train_micro_batch_size_per_gpu": micro_batch,
            "optimizer": {"type": "SGD", "params": ranges},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0.1}},
        },
        "searcher": {
            "name": searcher,
            "metric": "accuracy",
            "smaller_is_better": False,
            "max_trials": trials,
        },
        "reproducibility": {"experiment_seed": seed},
        "min_validation_period": {"epochs": EPOCHS // 2},
        "checkpoint_policy": "none",
    }
    file = root / f"{folder.name}.yaml"
    file.write_text(json.dumps(experiment, indent=2))  # JSON is YAML
    command = [sys.executable, "search.py", "--config", str(file), "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(root / f"{folder.name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=runs.PROJECT, stdout=log, env=environment)


def result(folder: pathlib.Path) -> dict[str, Any]:
    """What a search has found, by its trials in their order."""
    with open(folder / "trials.csv") as file:
        rows = list(csv.DictReader(file))
    scores = [float(row["accuracy"] or 0) if row["outcome"] == "complete" else 0.0 for row in rows]
    best_so_far = list(itertools.accumulate(scores, max))
    best = rows[scores.index(best_so_far[-1])]
    summary = json.loads((folder / best["folder"] / "summary.json").read_text())
    return {
        "best": best_so_far[-1],
        "half": best_so_far[(len(rows) - 1) // 2],
        "mean of best so far": statistics.mean(best_so_far),
        "test": summary["test"]["accuracy"],
        "median": statistics.median(scores),
        "failed": sum(row["outcome"] != "complete" for row in rows),
        "seconds": [float(row["seconds"]) for row in rows],
    }


def described(found: dict[str, list[dict[str, Any]]], trials: int) -> list[str]:
    """The explanation and the table, line by line."""
    every = [each for results in found.values() for each in results]
    explanation = EXPLANATION.format(
        trials=trials,
        epochs=EPOCHS,
        trained=round(10 * IMAGES * (1 - HELD_OUT)),
        held=round(10 * IMAGES * HELD_OUT),
        seeds=len(found["tpe"]),
        seconds=statistics.median(seconds for each in every for seconds in each["seconds"]),
    )
    rows = []
    for name, results in found.items():
        cells = [name]
        for key in ("best", "half", "mean of best so far", "test", "median"):
            values = [each[key] for each in results]
            cells.append(f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})")
        rows.append(cells)
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]
    where = machine.describe()
    failed = sum(each["failed"] for each in every)
    lost = f" {failed} of all trials failed, as diverging ones do, and count as 0." if failed else ""
    place = f"Machine: {where['cores']} cores, {where['processor']}, in use by others, too."
    return [*textwrap.wrap(explanation, 110), "", *table, "", place + lost]


if __name__ == "__main__":
    sys.exit(main())

"""``train.py --folds K``: cross-validation by K trainings, each tested on a different K-th of the images.

Each fold is a run of train.py in OUTPUT/folds/NUMBER. OUTPUT also holds folds.html, and folds.csv with a row
for each fold. After an interrupt the same command with the same OUTPUT trains the remaining folds.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from classify.config import metric_table
from classify.config.command_line import typed
from classify.engine.trial_config import TrialConfig
from classify.reports.summary import value_of
from deepspeed_trial.errors import InvalidInput, TrainingStopped, printable
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local.folder import locked_folder, shown
from deepspeed_trial.processes import device_type
from workbench.reports import page
from workbench.search.trial_run import TrialRun, as_files, stopping

CONFIG, TABLE, PAGE = "folds.yaml", "folds.csv", "folds.html"
TEMPLATE = pathlib.Path(__file__).with_name("folds.html.jinja")
POLL = 0.1  # seconds between two checks of a training


@dataclass(frozen=True)
class Fold:
    """A finished fold.

    Attributes:
        number: the fold's number, from 1.
        score: the experiment's metric on the fold's images.
        per_class: the accuracy of each class.
        images: the number of the fold's images.
        epochs: the epochs of the training.
        seconds: the duration of the training.
        folder: the run's folder, relative to the cross-validation's folder.
    """

    number: int
    score: float
    per_class: dict[str, float | None]
    images: int
    epochs: float
    seconds: float
    folder: str


def run(experiment: Experiment, folds: int, slots: int, output: pathlib.Path) -> None:
    """Train the folds that have not finished, one after another, and write the table and the page.

    Args:
        experiment: the experiment.
        folds: the number of folds.
        slots: the number of processes of each training.
        output: the folder of the cross-validation.

    Raises:
        InvalidInput: if the configuration or the data is wrong, or the folder has another cross-validation.
        TrainingStopped: if a training fails.
    """
    metric = experiment.metric
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        remedy = f"run {typed('train', '--folds', 'K', '--slots', 'N')}"
        raise InvalidInput(f"--folds: {folds}: starts the processes itself; {remedy}")
    section = {**(experiment.config.get("data") or {}), "fold": [1, folds]}
    config = {**experiment.config, "data": section}
    plan = TrialConfig.resolve(experiment.hyperparameters, config, slots, device_type()).source
    part = "test" if plan.cut.splits[0] == "test" and plan.has_test else "validation"
    with locked_folder(output, "cross-validation"):
        file, (text, whole) = output / CONFIG, as_files(config)
        if file.exists() and file.read_text() != text:
            raise InvalidInput(f"--output: {output}: holds another cross-validation; give another folder")
        file.write_text(text)
        for split in plan.names:  # decode once for all folds
            plan.load(split)
        done = list[Fold]()
        for number in range(1, folds + 1):
            which, folder = f"fold {number} of {folds}", output / "folds" / str(number)
            training = TrialRun(folder, file, [f"data.fold=[{number}, {folds}]"], slots, whole)
            print(printable(f"{which}: trains in {shown(folder)}"), flush=True)
            done.append(_fold(number, training, part, metric))
            print(printable(f"{which}: {metric} {metric_table.shown(metric, done[-1].score)}"), flush=True)
        page.write(page.as_csv(_rows(done, metric)), output / TABLE)
        page.write(page.render(TEMPLATE, _values(done, part, experiment, output)), output / PAGE)
    Console(markup=False, emoji=False).print(_table(done, metric))
    print(f"table {printable(shown(output / TABLE))}; page {printable(shown(output / PAGE))}")
    print(
        printable(f"{metric} {_mean_and_spread(done, metric)} (mean and standard deviation of {folds} folds)")
    )


def _fold(number: int, training: TrialRun, part: str, metric: str) -> Fold:
    """Train a fold, or resume it; return its result at once if it has finished."""
    with stopping([training]):
        training.start({})
        while not training.has_ended:
            time.sleep(POLL)
    summary = training.summary
    found = summary.get(part) or {}
    score = value_of(found, metric)
    if score is None:
        damaged = f"summary.json has no {metric}; remove {training.folder}, and run the same command again"
        outcome, reason = training.failure() if training.process else ("failed", damaged)
        raise (InvalidInput if outcome == "invalid" else TrainingStopped)(f"fold {number}: {reason}")
    return Fold(
        number,
        score,
        found.get("per_class_accuracy") or {},
        found.get("images") or 0,
        summary.get("epochs") or 0,
        summary.get("seconds") or 0,
        f"folds/{number}",
    )


def _mean_and_spread(done: list[Fold], metric: str) -> str:
    scores = [fold.score for fold in done]
    return " ± ".join(metric_table.shown(metric, of(scores)) for of in (statistics.mean, statistics.stdev))


def _rows(done: list[Fold], metric: str) -> list[list[object]]:
    """Return the rows of ``folds.csv``: the heading, and a row for each fold."""
    rows: list[list[object]] = [["fold", metric, "images", "epochs", "seconds", "folder"]]
    return rows + [[f.number, f.score, f.images, f.epochs, f.seconds, f.folder] for f in done]


def _table(done: list[Fold], metric: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("fold", metric, "images", "epochs", "seconds"):
        table.add_column(printable(name), justify="right")
    for fold in done:
        cells = f"{fold.images:,}", f"{fold.epochs:.4g}", f"{fold.seconds:,.1f}"
        table.add_row(str(fold.number), metric_table.shown(metric, fold.score), *cells)
    return table


def _values(done: list[Fold], part: str, experiment: Experiment, output: pathlib.Path) -> dict[str, Any]:
    """Return the values of the page's template."""
    classes = dict[str, list[float]]()
    for fold in done:
        for name, value in fold.per_class.items():
            classes.setdefault(name, []).extend([] if value is None else [value])
    metric = experiment.metric
    shown_scores = {fold.number: metric_table.shown(metric, fold.score) for fold in done}
    ranked = sorted(done, key=lambda fold: fold.score)
    return {
        "title": f"Cross-validation: {experiment.config.get('name') or output.resolve().name}",
        "metric": metric,
        "score": _mean_and_spread(done, metric),
        "scores": shown_scores,
        "part": part,
        "lowest": shown_scores[ranked[0].number],
        "highest": shown_scores[ranked[-1].number],
        "images": sum(fold.images for fold in done),
        "seconds": sum(fold.seconds for fold in done),
        "folds": done,
        "classes": [
            (name, statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
            for name, values in classes.items()
            if values
        ],
        "config": page.as_yaml(experiment.shown),
    }

"""One self-contained HTML page about runs of ``train.py``, side by side, during a training or after it."""

from __future__ import annotations

import base64
import itertools
import os
import pathlib
import shlex
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from classify.config import metric_table
from classify.config.metric_table import MAP_METRIC, METRICS, Counts
from classify.images.decode import decode
from classify.models import net_file
from classify.reports import classification_log, summary
from classify.reports.figures import in_words
from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput, one_line, printable
from deepspeed_trial.local import metrics_log
from workbench.publish import heat_maps, network
from workbench.reports import page, plots
from workbench.reports.recorded_run import RecordedRun, picture_of

TEMPLATE = pathlib.Path(__file__).with_name("report.html.jinja")
TRACKED = (*net_file.NAMES, summary.FILE, metrics_log.FILE, "run.json")
MATRIX = 40  # the maximum classes of a confusion matrix
PAIRS = 20  # the number of pairs of classes in the table that replaces a larger matrix
REFRESH = 5  # seconds after which the page of a training run is written again


def write(folders: Sequence[pathlib.Path], target: pathlib.Path, refresh: int = 0) -> bool:
    """Write the page.

    Args:
        folders: the folders of the runs.
        target: the page's file.
        refresh: the interval in seconds at which the page of a running training reloads; 0 for never.

    Returns:
        Whether at least one run is still training.

    Raises:
        InvalidInput: if a folder is not the folder of a run; then nothing is written.
    """
    runs = [RecordedRun.read(folder) for folder in folders]
    trains = any(not run.is_finished and run.is_training for run in runs)
    names = _names(runs)
    values = {
        "title": f"Report: {', '.join(names)}",
        "refresh": refresh if trains else 0,
        "runs": [_shown(run, name, target) for run, name in zip(runs, names, strict=True)],
        "curves": _curves(runs, names),
        "figures": _figures(runs),
        "per_class": _per_class(runs) if len(runs) > 1 else [],
    }
    page.write(page.render(TEMPLATE, values), target)
    return trains


def follow(folders: Sequence[pathlib.Path], target: pathlib.Path) -> None:
    """Write the page every ``REFRESH`` seconds while a run trains; the browser reloads it."""
    while write(folders, target, REFRESH):
        time.sleep(REFRESH)


def tracked_files(output: pathlib.Path) -> list[pathlib.Path]:
    """Write the report of a local run; return the files for trackers, without a report that failed."""
    report, files = output / "report.html", [output / name for name in TRACKED]
    try:
        write([output], report)
    except Exception as error:  # e.g. of the disk; a finished training must not fail because of its report
        print(printable(f"note: {report}: not written ({one_line(error)})"), file=sys.stderr)
        return files
    return [report, *files]


def _names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a different name for each run: the shortest end of its path that no other run has."""
    paths = [run.folder.resolve().parts[-3:] or (run.name,) for run in runs]
    for length in range(1, 4):
        names = [
            run.name if length == 1 else "/".join(path[-length:])
            for run, path in zip(runs, paths, strict=True)
        ]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _shown(run: RecordedRun, name: str, target: pathlib.Path) -> dict[str, Any]:
    """Return the values of a run for the template."""
    classes, classified = run.classification.get("classes", []), run.classified
    mistakes = classified.get("mistakes", [])
    return {
        "name": name,
        "headline": _headline(run),
        "data": f"dataset {(run.described['config'].get('data') or {}).get('dataset', 'cifar10')}",
        "part": f"{run.part} images" if run.part == "test" else run.chosen_on,
        "classes": _class_table(run),
        "splits": list(run.classification.get("images") or {}),
        "confusion": _confusion(classified, classes) if classified else {},
        "several": _gives_several(classified),
        "calibration": _calibration(classified),
        "mistakes": _tiles(mistakes, classes, target, _heat(run, mistakes)),
        "unsure": _tiles(classified.get("unsure") or [], classes, target),
        "augmented": [
            (each["picture"], in_words(each["labels"], classes))
            for each in run.classification.get("augmented") or []
        ],
        "command": _typed(redaction.command(run.described["command"])),
        "groups": run.summary.get("parameter_groups") or [],
        "config": page.as_yaml(redaction.experiment(run.described["config"])),
        "machine": page.as_yaml(run.described["machine"]),
    }


def _headline(run: RecordedRun) -> dict[str, Any]:
    """Return the score in the headline (of the test, if there is one) and the lines below the score."""
    if "validation" not in run.summary:
        return {"score": "-", "lines": [f"no validation yet, after {run.summary['steps']:,} steps"]}
    value, when = _score(run, *run.last)
    best = _score(run, *run.best)
    suffix = "" if best[0] == value else f"; best {' '.join(best)}"
    images = run.summary["validation"]["images"]
    if run.part == "validation":
        state = "" if run.is_finished else ", so far"
        return {
            "score": value,
            "lines": [f"{run.metric} of {images:,} {run.chosen_on} {when}{state}{suffix}"],
        }
    test = run.summary["test"]
    tested = _score(run, summary.value_of(test, run.metric) or 0.0, 0)[0]
    lines = [
        f"{run.metric} on {test.get('images') or 0:,} held-out test images",
        f"validation {value} of {images:,} images {when}{suffix}",
    ]
    return {"score": tested, "lines": lines}


def _class_table(run: RecordedRun) -> list[dict[str, Any]]:
    """Return precision, recall and F1 of each class, and the number of its images in each split."""
    if not run.classified:
        return []
    matrix = np.array(run.classified["confusion"])
    counts = Counts(matrix, 0.0, None, None, np.zeros((3, 1)))
    scores = [counts.of_classes(score).tolist() for score in ("precision", "recall", "f1")]
    if _gives_several(run.classified):
        found = (run.summary.get(run.part) or {}).get("per_class_average_precision") or {}
        scores.append([found.get(name) for name in run.classification["classes"]])
    counted = matrix[:, 1].sum(1) if matrix.ndim == 3 else matrix.sum(1)
    images = list((run.classification.get("images") or {}).values()) or [counted.tolist()]
    rows = zip(
        run.classification["classes"], zip(*scores, strict=True), zip(*images, strict=True), strict=True
    )
    return [{"name": name, "scores": of_class, "images": images} for name, of_class, images in rows]


def _typed(command: Sequence[str]) -> str:
    """Return a command line; the first word, e.g. ``classify train``, is not quoted."""
    return " ".join([*command[:1], *map(shlex.quote, command[1:])])


def _gives_several(classified: Mapping[str, Any]) -> bool:
    """Return whether an image may have any number of labels."""
    return bool(classified) and np.ndim(classified["confusion"]) == 3


def _confusion(classified: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the confusion matrix with shares of each row, or for many classes the most frequent confusions.

    The result is empty for several labels an image: there a label does not exclude another label.
    """
    if _gives_several(classified):
        return {}
    matrix = np.array(classified["confusion"], dtype=np.int64)
    if len(classes) <= MATRIX:
        shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
        return {
            "rows": [
                list(zip(*row, strict=True)) for row in zip(matrix.tolist(), shares.tolist(), strict=True)
            ]
        }
    wrong = matrix - np.diag(matrix.diagonal())
    places = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [(int(place // len(classes)), int(place % len(classes))) for place in places]
    return {
        "pairs": [
            (classes[label], classes[taken], int(wrong[label, taken]))
            for label, taken in pairs
            if wrong[label, taken]
        ]
    }


def _calibration(classified: Mapping[str, Any]) -> dict[str, Any] | None:
    """Plot the accuracy in each confidence bin over the bin's mean confidence."""
    if not classified.get("bins"):
        return None
    images, confidence, right = np.array(classified["bins"])
    filled = images > 0
    xs, ys = (confidence / images.clip(1))[filled].tolist(), (right / images.clip(1))[filled].tolist()
    lines = [
        plots.Line("perfect calibration", [0, 1], [0, 1], 7, is_thin=True),
        plots.Line("network", xs, ys),
    ]
    return plots.plot("Accuracy by confidence", lines, "confidence", plots.percent, plots.percent)


def _tiles(
    images: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    target: pathlib.Path,
    heat: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the pictures, text and link of each classified image."""
    tiles = []
    for each, hot in itertools.zip_longest(images, heat):
        predicted, label = (in_words(each[key], classes) for key in ("predicted", "label"))
        sure = f" {each['probability']:.0%}" if "probability" in each else ""
        file = each.get("file")
        link = None
        if file and os.path.isfile(file):
            link = urllib.parse.quote(os.path.relpath(file, target.parent.resolve()))
        lines = (
            [f"labelled {label}, loss {each['loss']:.2f}"]
            if predicted != label
            else [f"loss {each['loss']:.2f}"]
        )
        tiles.append(
            {
                "pictures": [picture_of(each), *([hot] if hot else [])],
                "heading": f"{predicted}{sure}",
                "lines": [
                    *lines,
                    "/".join(pathlib.PurePath(file).parts[-2:]) if file else f"image {each['image']:,}",
                ],
                "link": link,
            }
        )
    return tiles


def _heat(run: RecordedRun, images: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a heat map of each image's predicted class; empty if the network has no heat maps."""
    file = run.folder / net_file.NAMES[0]
    if not images or not run.is_finished or not file.exists() or _gives_several(run.classified):
        return []
    try:
        classifier = network.read_weights(file)
        size = tuple(classifier.description["input"]["resize"])
        pixels = [decode(base64.b64decode(picture_of(each)), size, "picture") for each in images]
        predicted = torch.tensor([each["predicted"] for each in images])
        drawn = heat_maps.drawn(classifier, torch.from_numpy(np.stack(pixels)), predicted)
        return [classification_log.picture(heat) for _, heat in drawn]
    except (InvalidInput, RuntimeError) as error:  # RuntimeError: a layer without gradients
        print(printable(f"note: {file}: no heat maps ({one_line(error)})"), file=sys.stderr)
        return []


def _best(run: RecordedRun) -> str:
    return f"{run.metric}: {' '.join(_score(run, *run.best))}" if "validation" in run.summary else "-"


def _figures(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of numbers: a label and a cell for every run."""

    def scores(part: str, suffix: str) -> list[tuple[str, list[str]]]:
        rows = []
        for metric in METRICS.values():
            values = [(run.summary.get(part) or {}).get(metric.name) for run in runs]
            if set(values) != {None}:
                cells = ["-" if value is None else f"{value:.4f}" for value in values]
                rows.append((f"{metric.label}{suffix}", cells))
        return rows

    def row(label: str, text: Any) -> tuple[str, list[str]]:
        cells = []
        for run in runs:
            try:
                cells.append(text(run.summary, run.described["machine"]))
            except KeyError:  # the run has not finished
                cells.append("-")
        return label, cells

    mfu = [run.summary.get("mfu") for run in runs]
    cells = ["-" if share is None else f"{share:.0%}" for share in mfu]
    utilisation = [("share of the GPUs' peak (MFU)", cells)] if set(mfu) != {None} else []
    return [
        *scores("test", " of the test at the end"),
        ("images of the validations", [run.chosen_on for run in runs]),
        ("best validation", [_best(run) for run in runs]),
        *scores("validation", ""),
        row("epochs", lambda s, m: f"{s['epochs']}"),
        row("optimizer steps", lambda s, m: f"{s['steps']:,}"),
        row("time of training and validation", lambda s, m: f"{s['seconds']:,.1f} s"),
        row("images a second while training", lambda s, m: f"{s['images_per_second']:,.0f}"),
        row("operations a second while training", lambda s, m: _operations(s.get("flops_per_second"))),
        *utilisation,
        row("peak memory of a process", lambda s, m: f"{max(s['peak_memory_mib']):,.0f} MiB"),
        row("processes", lambda s, m: f"{s['world_size']}"),
        row("ZeRO stage", lambda s, m: f"{s['zero_stage']}"),
        row("precision", lambda s, m: s["dtype"]),
        row("processor", lambda s, m: ", ".join(m["gpus"]) or f"{m['cores']} cores, {m['processor']}"),
    ]


def _score(run: RecordedRun, value: float, step: int) -> tuple[str, str]:
    """Format a value of the run's metric and its step."""
    return metric_table.shown(run.metric, value), f"after {step:,} steps"


def _operations(a_second: float | None) -> str:
    return "-" if a_second is None else f"{a_second / 1e9:,.3g} GFLOP/s"


def _per_class(runs: Sequence[RecordedRun]) -> list[tuple[str, list[float | None]]]:
    """Return each class's recall in each run."""
    recalls = [(run.summary.get(run.part) or {}).get("per_class_accuracy") or {} for run in runs]
    names = list(dict.fromkeys(name for of_run in recalls for name in of_run))
    return [(name, [of_run.get(name) for of_run in recalls]) for name in names]


def _curves(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[dict[str, Any]]:
    """Plot loss, accuracy, the chosen metric and learning rate over the optimizer steps."""
    several = [MAP_METRIC for run in runs if _gives_several(run.classified)]
    metrics = [*several, *(run.metric for run in runs)]
    chosen = list(dict.fromkeys(metric for metric in metrics if metric not in ("loss", "accuracy")))
    curves = []
    for metric in ("loss", "accuracy", *chosen, "learning_rate"):
        lines = []
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            alone, training = len(runs) == 1, "training" if len(runs) == 1 else f"{name}, training"
            if metric in ("loss", "learning_rate"):
                label = training if metric == "loss" or alone else name
                lines.append(plots.Line(label, *run.series("training", metric), number, is_thin=True))
            if metric != "learning_rate":
                lines.append(
                    plots.Line("validation" if alone else name, *run.series("validation", metric), number)
                )
        text = plots.percent if metric_table.is_share(metric) else plots.number
        curves.append(plots.plot(metric.replace("_", " "), lines, y_text=text))
    return curves

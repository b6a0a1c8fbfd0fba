"""A run, read from its folder and checked, during its training or after it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import filelock

from classify.config.metric_table import METRICS
from classify.config.rules import (
    BOOL,
    MAPPING,
    NUMBER,
    TEXT,
    Rule,
    errors_in,
    is_count,
    list_of,
    mapping_of,
    optional,
    whole,
)
from classify.images.decode import open_image
from classify.reports import summary as summaries
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import metrics_log
from deepspeed_trial.local.folder import LOCK

MOST_PIXELS = 2**24  # the maximum pixels of a picture in a run's file


def _is_picture(value: Any) -> bool:
    try:
        with open_image(io.BytesIO(base64.b64decode(value, validate=True))) as image:
            if image.width * image.height > MOST_PIXELS or image.format not in ("PNG", "JPEG"):
                return False
            image.verify()
    except Exception:  # Pillow's formats raise different classes
        return False
    return True


def _is_classified(value: Any) -> bool:
    if not isinstance(value, dict) or not is_count(value.get("image"), 0):
        return False
    if not all(list_of(whole(0)).is_valid(labels_of(value, key)) for key in ("predicted", "label")):
        return False
    numbers = NUMBER.is_valid(value.get("loss")) and NUMBER.is_valid(value.get("probability", 1.0))
    return numbers and optional(TEXT).is_valid(value.get("file")) and _is_picture(picture_of(value))


def _is_augmented(value: Any) -> bool:
    labels = value.get("labels") if isinstance(value, dict) else None
    return list_of(whole(0)).is_valid(labels) and _is_picture(value.get("picture"))


def labels_of(classified: Mapping[str, Any], key: str) -> list[int]:
    """Return ``predicted`` or ``label`` of an image of ``classification.json`` as a list."""
    value: Any = classified.get(key)
    return value if isinstance(value, list) else [value]


def picture_of(classified: Mapping[str, Any]) -> str:
    """Return the PNG or JPEG file of an image of ``classification.json`` in base64."""
    return classified.get("picture") or classified.get("png", "")  # "png": the key of an earlier version


_SHOWN = list_of(Rule(_is_classified, "must have image, predicted, label, loss and picture"))
_COUNTS = Rule(
    lambda value: any(list_of(list_of(each)).is_valid(value) for each in (whole(0), list_of(whole(0), 2))),
    "must be a matrix of counts, or a 2x2 matrix of counts for each label",
)
# The values that the page needs; summaries of older releases lack the optional ones
FILES: dict[str, dict[str, Rule]] = {
    summaries.FILE: {
        **{f"{part}.{name}": optional(NUMBER) for part in ("validation", "test") for name in METRICS},
        "validation.accuracy": NUMBER,
        "validation.loss": NUMBER,
        "chosen_on": optional(TEXT),
        "test.images": optional(whole(0)),
        "validation.images": whole(0),
        "validation.per_class_accuracy": mapping_of(NUMBER),
        **dict.fromkeys(("steps", "epochs", "zero_stage"), whole(0)),
        **dict.fromkeys(("seconds", "images_per_second"), NUMBER),
        **dict.fromkeys(("flops_per_second", "mfu"), optional(NUMBER)),
        "peak_memory_mib": Rule(
            lambda value: bool(value) and list_of(NUMBER).is_valid(value), "must be a list of numbers"
        ),
        "world_size": whole(1),
        "dtype": TEXT,
        "parameter_groups": optional(list_of(TEXT)),
    },
    "run.json": {
        "config": MAPPING,
        "config.data": optional(MAPPING),
        "config.searcher": optional(MAPPING),
        "config.searcher.metric": optional(TEXT),
        "config.searcher.smaller_is_better": optional(BOOL),
        "command": list_of(TEXT),
        "machine.gpus": list_of(TEXT),
        "machine.cores": whole(1),
        "machine.processor": TEXT,
    },
    summaries.CLASSIFICATION: {
        "classes": list_of(TEXT),
        "images": optional(mapping_of(list_of(whole(0)))),
        "augmented": optional(list_of(Rule(_is_augmented, "must have picture and labels"))),
        "test": optional(MAPPING),
        "confusion": _COUNTS,
        "mistakes": _SHOWN,
        "test.confusion": optional(_COUNTS),
        **{
            f"{part}{name}": optional(_SHOWN)
            for part in ("", "test.")
            for name in ("unsure", "mistakes")
            if part + name != "mistakes"
        },
        **{f"{part}bins": optional(list_of(list_of(NUMBER), 3)) for part in ("", "test.")},
    },
}


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run, which may still train.

    Attributes:
        name: the name of the run's folder.
        summary: the content of ``summary.json``; until the run writes that file, only ``steps`` and the last
            ``validation``, if any.
        described: the content of ``run.json``: configuration, command and machine.
        classification: the content of ``classification.json``; empty before the first validation.
        metrics: the lines of ``metrics.jsonl``.
        folder: the run's folder.
        is_finished: whether the run has a ``summary.json``.
    """

    name: str
    summary: dict[str, Any]
    described: dict[str, Any]
    classification: dict[str, Any]
    metrics: list[dict[str, Any]]
    folder: pathlib.Path = pathlib.Path()
    is_finished: bool = True

    @classmethod
    def read(cls, folder: pathlib.Path) -> RecordedRun:
        """Read a run's folder.

        Raises:
            InvalidInput: if the folder is not the folder of a run, or a file is damaged.
        """
        if not (folder / metrics_log.FILE).exists():
            what = "is not the folder of a run" if folder.is_dir() else "no such folder"
            raise InvalidInput(f"{folder}: {what}; give the folder of a run")
        is_finished = (folder / summaries.FILE).exists()
        files, errors = dict[str, dict[str, Any]](), []
        for name, rules in FILES.items():
            if not is_finished and name != "run.json" and not (folder / name).exists():
                files[name] = {}
                continue
            try:
                files[name] = json.loads((folder / name).read_text())
                wrong = errors_in(files[name], rules)
                if name == summaries.CLASSIFICATION and not wrong:
                    wrong = _class_errors(files[name])
            except (OSError, ValueError, RecursionError) as error:
                wrong = [f"cannot be read ({one_line(error)})"]
            errors += [f"{folder / name}: {line}; train again" for line in wrong]
        if errors:
            raise InvalidInput(errors)
        metrics = metrics_log.read(folder)
        summary = files[summaries.FILE] or _summary_so_far(metrics, files[summaries.CLASSIFICATION])
        described, classification = files["run.json"], files[summaries.CLASSIFICATION]
        return cls(folder.resolve().name, summary, described, classification, metrics, folder, is_finished)

    @property
    def is_training(self) -> bool:
        """Whether a process trains the run now, i.e. has locked the folder."""
        lock = filelock.FileLock(self.folder / LOCK)
        try:
            with lock.acquire(timeout=0):
                return False
        except filelock.Timeout:
            return True
        except OSError:  # a folder that this user cannot write
            return not self.is_finished

    @property
    def part(self) -> str:
        """The part of the summary for the headline: ``test`` if the run has a test, else ``validation``."""
        return (
            "test"
            if summaries.value_of(self.summary.get("test") or {}, self.metric) is not None
            else "validation"
        )

    @property
    def classified(self) -> dict[str, Any]:
        """The confusion matrix, bins and images of ``part``; empty before the first validation."""
        return self.classification.get(self.part, self.classification)

    @property
    def chosen_on(self) -> str:
        """A description of the images on which validations compare checkpoints and trials."""
        return self.summary.get("chosen_on") or "test images"

    def series(self, group: str, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps and the values of a metric; ``group`` is ``training`` or ``validation``."""
        entries = [entry for entry in self.metrics if entry["group"] == group and metric in entry]
        return [entry["steps_completed"] for entry in entries], [entry[metric] for entry in entries]

    @property
    def metric(self) -> str:
        """The metric that compares checkpoints; ``accuracy`` if no validation has that metric."""
        chosen = Experiment(self.described["config"], {}).metric
        return chosen if self.series("validation", chosen)[0] else "accuracy"

    @property
    def last(self) -> tuple[float, int]:
        """The validation metric of the final weights, and the step of these weights."""
        value = summaries.value_of(self.summary["validation"], self.metric)
        steps, values = self.series("validation", self.metric)
        if value is None:  # summary.json has no images_per_second of a validation
            value = values[-1]
        of_value = [step for step, each in zip(steps, values, strict=True) if each == value]
        return value, of_value[-1] if of_value else self.summary["steps"]

    @property
    def best(self) -> tuple[float, int]:
        """The best value of the metric in all validations, and the first step that had it."""
        steps, values = self.series("validation", self.metric)
        experiment = Experiment(self.described["config"], {})
        sign = -1 if self.metric == experiment.metric and experiment.smaller_is_better else 1
        scores = [*zip(values, steps, strict=True), self.last]
        return max(scores, key=lambda score: (sign * score[0], -score[1]))


def _summary_so_far(
    metrics: Sequence[Mapping[str, Any]], classification: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary of a run that has not finished."""
    summary: dict[str, Any] = {"steps": max((each["steps_completed"] for each in metrics), default=0)}
    validations = [each for each in metrics if each["group"] == "validation"]
    if validations and classification:
        with contextlib.suppress(KeyError):  # a class is missing: the files are from different validations
            summary["validation"] = summaries.metrics_summary(validations[-1], classification["classes"])
    return summary


def _class_errors(classification: dict[str, Any]) -> list[str]:
    """Return an error for each matrix, count and image that does not fit the classes."""
    count = len(classification["classes"])
    errors = []
    for prefix, part in {"": classification, "test.": classification.get("test") or {}}.items():
        matrix = part.get("confusion")
        shapes = [count] * count, [2] * count  # the second: with several labels an image
        if matrix is not None and [len(row) for row in matrix] not in shapes:
            errors.append(f"{prefix}confusion: must have a row and a column for each of {count} classes")
        if len({len(row) for row in part.get("bins") or []}) > 1:
            errors.append(f"{prefix}bins: must be three lists of the same length")
        for name in ("mistakes", "unsure"):
            shown = part.get(name) or []
            numbers = (labels_of(each, key) for each in shown for key in ("predicted", "label"))
            if any(max(labels, default=0) >= count for labels in numbers):
                errors.append(f"{prefix}{name}: predicted and label must be numbers of classes")
    if any(len(counts) != count for counts in (classification.get("images") or {}).values()):
        errors.append(f"images: must have a number for each of {count} classes")
    if any(max(each["labels"], default=0) >= count for each in classification.get("augmented") or []):
        errors.append("augmented: labels must be numbers of classes")
    return errors


class Result(NamedTuple):
    """Metrics of a network on a split.

    Attributes:
        split: ``test`` or ``validation``.
        images: a description of the images.
        metrics: the metrics by name.
    """

    split: str
    images: str
    metrics: dict[str, float]


def results(folder: pathlib.Path, provenance: Mapping[str, Any]) -> list[Result]:
    """Return the results of a run's checkpoint, the test first; empty without a finished run.

    Args:
        folder: the run's folder.
        provenance: the ``provenance`` of the checkpoint's network; see ``net_file.read_description``.
    """
    try:
        run = RecordedRun.read(folder)
    except InvalidInput:
        return []
    if not run.is_finished:
        return []
    summary, images = run.summary, run.summary["validation"]["images"]
    split = "validation" if run.chosen_on.startswith("validation") else "test"
    words = f"{images:,} {run.chosen_on}"
    if split == "test":
        words += ", which also validated the training"
    if provenance.get("checkpoint") in (None, summary.get("checkpoint")):  # None: the run's net.pt
        tested = summary.get("test") or {}
        found = [Result(split, words, _known(summary["validation"]))]
        if "accuracy" in tested:
            words = f"{tested['images']:,} held-out test images"
            found.insert(0, Result("test", words, _known(tested)))
        return found
    of_step = [
        each
        for each in run.metrics
        if each["group"] == "validation" and each["steps_completed"] == provenance["steps"]
    ]
    return [Result(split, words, _known(each)) for each in of_step[-1:] if "accuracy" in each]


def _known(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in METRICS if metrics.get(name) is not None}

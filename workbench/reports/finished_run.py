"""A finished run, read from its folder and checked."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from dataclasses import dataclass
from typing import Any

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


def _is_mistake(value: Any) -> bool:
    keys = ("image", "predicted", "label")
    if not isinstance(value, dict) or not all(is_count(value.get(key), 0) for key in keys):
        return False
    try:
        open_image(io.BytesIO(base64.b64decode(value["png"]))).verify()
    except Exception:  # PIL raises nearly anything
        return False
    return NUMBER.is_valid(value.get("loss"))


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
        "confusion": list_of(list_of(whole(0))),
        "mistakes": list_of(Rule(_is_mistake, "must have image, predicted, label, loss and png")),
    },
}


@dataclass(frozen=True)
class FinishedRun:
    """The files of a run.

    Attributes:
        name: the folder's.
        summary: its ``summary.json``.
        described: its ``run.json``: configuration, command and machine.
        classification: its ``classification.json``: confusion matrix and hardest mistakes.
        metrics: the lines of its ``metrics.jsonl``.
    """

    name: str
    summary: dict[str, Any]
    described: dict[str, Any]
    classification: dict[str, Any]
    metrics: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: pathlib.Path) -> FinishedRun:
        """Read a run's folder.

        Raises:
            InvalidInput: if the folder is no run's, the run has not finished, or a file is damaged.
        """
        if not (folder / metrics_log.FILE).exists():
            what = "is not the folder of a run" if folder.is_dir() else "no such folder"
            raise InvalidInput(f"{folder}: {what}; give the --output of train.py")
        if not (folder / summaries.FILE).exists():
            remedy = f"run train.py --resume latest --output {folder}"
            raise InvalidInput(f"{folder}: the run has not finished, its summary.json is missing; {remedy}")
        files, errors = {}, []
        for name, rules in FILES.items():
            try:
                files[name] = json.loads((folder / name).read_text())
                wrong = errors_in(files[name], rules)
                if name == summaries.CLASSIFICATION and not wrong:
                    wrong = _class_errors(files[name])
            except (OSError, ValueError, RecursionError) as error:
                wrong = [f"cannot be read ({one_line(error)})"]
            errors += [f"{folder / name}: {line}; run train.py again" for line in wrong]
        if errors:
            raise InvalidInput(errors)
        summary, described, classification = files.values()
        name, metrics = folder.resolve().name, metrics_log.read(folder)
        return cls(name, summary, described, classification, metrics)

    @property
    def chosen_on(self) -> str:
        """The images that compared checkpoints and trials, in words."""
        return self.summary.get("chosen_on") or "test images"

    def series(self, group: str, metric: str) -> tuple[list[int], list[float]]:
        """Return the steps and the values of a metric; ``group`` is ``training`` or ``validation``."""
        entries = [entry for entry in self.metrics if entry["group"] == group and metric in entry]
        return [entry["steps_completed"] for entry in entries], [entry[metric] for entry in entries]

    @property
    def metric(self) -> str:
        """The metric that compared checkpoints; accuracy if no validation has that metric."""
        chosen = Experiment(self.described["config"], {}).metric
        return chosen if self.series("validation", chosen)[0] else "accuracy"

    @property
    def last(self) -> tuple[float, int]:
        """The metric after the last step, and that step."""
        value = summaries.value_of(self.summary["validation"], self.metric)
        if value is None:  # summary.json has no images_per_second of a validation
            value = self.series("validation", self.metric)[1][-1]
        return value, self.summary["steps"]

    @property
    def best(self) -> tuple[float, int]:
        """The best value of the metric in all validations, and the first step that had it."""
        steps, values = self.series("validation", self.metric)
        experiment = Experiment(self.described["config"], {})
        sign = -1 if self.metric == experiment.metric and experiment.smaller_is_better else 1
        scores = [*zip(values, steps, strict=True), self.last]
        return max(scores, key=lambda score: (sign * score[0], -score[1]))


def _class_errors(classification: dict[str, Any]) -> list[str]:
    """Name a confusion matrix or mistakes that do not fit the classes."""
    count = len(classification["classes"])
    errors = []
    if [len(row) for row in classification["confusion"]] != [count] * count:
        errors.append(f"confusion: must have a row and a column for each of {count} classes")
    if any(max(mistake["predicted"], mistake["label"]) >= count for mistake in classification["mistakes"]):
        errors.append("mistakes: predicted and label must be numbers of classes")
    return errors

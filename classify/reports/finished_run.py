"""A finished run, read from its folder and checked."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from dataclasses import dataclass
from typing import Any

from classify.config.metric_names import METRICS
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


# What the page needs of a run's files.
FILES: dict[str, dict[str, Rule]] = {
    "summary.json": {
        **{f"validation.{name}": optional(NUMBER) for name in METRICS},  # of which older runs lack some
        "validation.accuracy": NUMBER,
        "validation.loss": NUMBER,
        "chosen_on": optional(TEXT),
        **{f"test.{name}": optional(NUMBER) for name in METRICS},
        "test.images": optional(whole(0)),
        "validation.images": whole(0),
        "validation.per_class_accuracy": mapping_of(NUMBER),
        "steps": whole(0),
        "epochs": whole(0),
        "seconds": NUMBER,
        "images_per_second": NUMBER,
        "flops_per_second": optional(NUMBER),
        "mfu": optional(NUMBER),
        "peak_memory_mib": Rule(
            lambda value: bool(value) and list_of(NUMBER).is_valid(value), "must be a list of numbers"
        ),
        "world_size": whole(1),
        "zero_stage": whole(0),
        "dtype": TEXT,
        "parameter_groups": optional(list_of(TEXT)),  # which runs of before it was written lack
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
    "classification.json": {
        "classes": list_of(TEXT),
        "confusion": list_of(list_of(whole(0))),
        "mistakes": list_of(Rule(_is_mistake, "must have image, predicted, label, loss and png")),
    },
}


@dataclass(frozen=True)
class FinishedRun:
    """What a run's folder says.

    Attributes:
        name: what to call it.
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
        """Reads a run's folder; raises ``InvalidInput`` if it is none, or the run has not finished."""
        if not (folder / metrics_log.FILE).exists():
            what = "is not the folder of a run" if folder.is_dir() else "no such folder"
            raise InvalidInput(f"{folder}: {what}; give the --output of train.py")
        if not (folder / "summary.json").exists():
            mend = f"go on with train.py --resume latest --output {folder}"
            raise InvalidInput(f"{folder}: the run has not finished, its summary.json is missing; {mend}")
        held, errors = {}, []
        for name, rules in FILES.items():
            try:
                held[name] = json.loads((folder / name).read_text())
                wrong = errors_in(held[name], rules)
            except (OSError, ValueError, RecursionError) as error:
                wrong = [f"cannot be read ({one_line(error)})"]
            errors += [f"{folder / name}: {each}; run train.py again" for each in wrong]
        if errors:
            raise InvalidInput(errors)
        summary, described, classification = held.values()
        count = len(classification["classes"])
        if [len(row) for row in classification["confusion"]] != [count] * count:
            what = f"confusion: must have a row and a column for each of {count} classes"
            raise InvalidInput(f"{folder / 'classification.json'}: {what}; run train.py again")
        if any(max(each["predicted"], each["label"]) >= count for each in classification["mistakes"]):
            what = "mistakes: predicted and label must be numbers of classes"
            raise InvalidInput(f"{folder / 'classification.json'}: {what}; run train.py again")
        metrics = metrics_log.read(folder)
        return cls(folder.resolve().name, summary, described, classification, metrics)

    @property
    def chosen_on(self) -> str:
        """On which images checkpoints and trials were compared, in words."""
        return self.summary.get("chosen_on") or "test images"

    def series(self, group: str, metric: str) -> tuple[list[int], list[float]]:
        """A metric over the steps: of the reports of ``training``, or of ``validation``."""
        entries = [each for each in self.metrics if each["group"] == group and metric in each]
        return [each["steps_completed"] for each in entries], [each[metric] for each in entries]

    @property
    def metric(self) -> str:
        """The chosen metric, which compared checkpoints; accuracy where no validation has it."""
        chosen = Experiment(self.described["config"], {}).metric
        return chosen if self.series("validation", chosen)[0] else "accuracy"

    @property
    def last(self) -> tuple[float, int]:
        """The metric after the last step, and that step."""
        found = summaries.value_of(self.summary["validation"], self.metric)
        if found is None:  # one of the validations' alone, such as their speed
            found = self.series("validation", self.metric)[1][-1]
        return found, self.summary["steps"]

    @property
    def best(self) -> tuple[float, int]:
        """The best value of the metric in all validations, and the first step that had it."""
        steps, values = self.series("validation", self.metric)
        experiment = Experiment(self.described["config"], {})
        sign = -1 if self.metric == experiment.metric and experiment.smaller_is_better else 1
        found = [*zip(values, steps, strict=True), self.last]
        return max(found, key=lambda each: (sign * each[0], -each[1]))

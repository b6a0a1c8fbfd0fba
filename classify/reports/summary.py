"""What a finished run leaves: ``summary.json``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from classify.config.metric_names import METRICS, TTA_METRIC
from classify.models import net_file
from classify.reports import classification

FILE = "summary.json"
RUN_FILES = (*net_file.NAMES, classification.FILE)  # beside those of every run of the harness


def metrics_summary(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The part ``validation`` or ``test``, from the metrics that ``ClassificationMetrics`` gives."""
    return {
        **{name: metrics[name] for name in METRICS if name in metrics},
        "per_class_accuracy": {name: metrics[f"accuracy/{name}"] for name in classes},
        "per_class_precision": {name: metrics[f"precision/{name}"] for name in classes},
        "images": metrics["images"],
    }


def test_summary(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The part ``test`` by that name, or nothing where there was no test."""
    return {"test": metrics_summary(metrics, classes)} if metrics else {}


def write(output: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes a run's summary and prints its accuracies; those of the test before those of the validation."""
    (output / FILE).write_text(json.dumps(summary, indent=2) + "\n")
    tested = accuracies(summary["test"], "test ") if "test" in summary else []
    validated = accuracies(summary["validation"], "validation " if tested else "")
    print(*tested, *validated, sep="\n")


def accuracies(metrics: Mapping[str, Any], which: str = "") -> list[str]:
    """The accuracy as a line, the last, and before it that by test-time augmentation, where there is one."""
    return [f"{which}{key} {metrics[key]:.4f}" for key in (TTA_METRIC, "accuracy") if key in metrics]

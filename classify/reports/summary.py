"""What a finished run leaves: ``summary.json``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from classify.config.options import TTA_METRIC
from classify.models import net_file
from classify.reports import classification

FILE = "summary.json"
RUN_FILES = (*net_file.NAMES, classification.FILE)  # beside those of every run of the harness


def validation_summary(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The part ``validation``, from the metrics that ``ClassificationMetrics`` gives."""
    by_views = {TTA_METRIC: metrics[TTA_METRIC]} if TTA_METRIC in metrics else {}
    return {
        "accuracy": metrics["accuracy"],
        **by_views,
        "loss": metrics["loss"],
        "per_class_accuracy": {name: metrics[f"accuracy/{name}"] for name in classes},
        "images": metrics["images"],
    }


def write(output: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes a run's summary and prints its accuracy, or both."""
    (output / FILE).write_text(json.dumps(summary, indent=2) + "\n")
    print(*accuracies(summary["validation"]), sep="\n")


def accuracies(validation: Mapping[str, Any]) -> list[str]:
    """The accuracy as a line, the last, and before it that by test-time augmentation, where there is one."""
    return [f"{key} {validation[key]:.4f}" for key in (TTA_METRIC, "accuracy") if key in validation]

"""What a finished run leaves: ``summary.json``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from classify.models import net_file
from classify.reports import classification

FILE = "summary.json"
RUN_FILES = (*net_file.NAMES, classification.FILE)  # beside those of every run of the harness


def validation_summary(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """The part ``validation``, from the metrics that ``ClassificationMetrics`` gives."""
    return {
        "accuracy": metrics["accuracy"],
        "loss": metrics["loss"],
        "per_class_accuracy": {name: metrics[f"accuracy/{name}"] for name in classes},
        "images": metrics["images"],
    }


def write(output: pathlib.Path, summary: Mapping[str, Any]) -> None:
    """Writes a run's summary and prints its accuracy."""
    (output / FILE).write_text(json.dumps(summary, indent=2) + "\n")
    print(f"accuracy {summary['validation']['accuracy']:.4f}")

"""Reads a run's ``metrics.jsonl``, which has a line for each report."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import determined as det
import torch

FILE = "metrics.jsonl"


def read(run: pathlib.Path) -> list[dict[str, Any]]:
    """Return a run's reports of training, validation and test, in order.

    Args:
        run: folder of the run; the result is empty without the file.

    Raises:
        OSError: if the file cannot be read.
    """
    file = run / FILE
    return parse(file.read_text(errors="replace")) if file.exists() else []


def parse(text: str) -> list[dict[str, Any]]:
    """Return the reports in a file's text; skip other lines, e.g. a last line that a kill has cut off."""
    reports = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if _is_report(entry):
                reports.append(entry)
    return reports


def scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are single numbers, as Python's numbers."""
    numbers = {name: value.item() if _is_tensor(value) else value for name, value in metrics.items()}
    return {
        name: value.item() if hasattr(value, "item") else value
        for name, value in numbers.items()
        if det.util.is_numerical_scalar(value)
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _is_report(entry: Any) -> bool:
    if not isinstance(entry, dict) or type(entry.get("steps_completed")) is not int:
        return False
    return "group" in entry and all(isinstance(v, (int, float)) for k, v in entry.items() if k != "group")

"""Which classes a run takes for which, and its hardest mistakes, kept in its folder for the report."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

from PIL import Image
from typing_extensions import override

from classify.config.metric_names import SPEED_METRIC
from classify.images.image_set import ImageSet
from classify.reports.metrics import ClassificationMetrics
from deepspeed_trial.events import Callback

FILE = "classification.json"


class ClassificationLog(Callback):
    """Writes ``OUTPUT/classification.json`` after every validation, and keeps a test from changing it.

    Args:
        output: the run's folder, on the chief off a cluster; None where nothing is to be written.
        metrics: of the validation.
        validated: gives the validated images.
    """

    def __init__(
        self,
        output: pathlib.Path | None,
        metrics: ClassificationMetrics,
        validated: Callable[[], ImageSet],
    ) -> None:
        self.output, self.metrics, self.validated = output, metrics, validated

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.output is None:
            return
        mistakes = []
        for mistake in self.metrics.mistakes:
            png = io.BytesIO()
            Image.fromarray(self.validated().pixels(mistake["image"])).save(png, "png")
            mistakes.append({**mistake, "png": base64.b64encode(png.getvalue()).decode()})
        confusion = self.metrics.confusion.tolist()
        kept = {"classes": self.metrics.classes, "confusion": confusion, "mistakes": mistakes}
        (self.output / FILE).write_text(json.dumps(kept))

    @override
    def on_test_start(self) -> None:
        self._kept = self.metrics.order, self.metrics.confusion, self.metrics.mistakes
        self.metrics.order = None

    @override
    def on_test_end(self, metrics: dict[str, Any]) -> None:
        self.metrics.order, self.metrics.confusion, self.metrics.mistakes = self._kept
        metrics.pop(SPEED_METRIC, None)  # for nothing was trained

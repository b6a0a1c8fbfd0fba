"""Which classes a run takes for which, and its hardest mistakes, kept in its folder for the report."""

from __future__ import annotations

import base64
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

from determined import pytorch
from PIL import Image
from typing_extensions import override

from classify.images.image_set import ImageSet
from classify.reports.metrics import ClassificationMetrics

FILE = "classification.json"


class ClassificationLog(pytorch.PyTorchCallback):
    """Writes ``OUTPUT/classification.json`` after every validation.

    Args:
        output: the run's folder, on the chief off a cluster; None where nothing is to be written.
        metrics: of the validation.
        test_set: gives the validated images.
    """

    def __init__(
        self,
        output: pathlib.Path | None,
        metrics: ClassificationMetrics,
        test_set: Callable[[], ImageSet],
    ) -> None:
        self.output, self.metrics, self.test_set = output, metrics, test_set

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.output is None:
            return
        mistakes = []
        for mistake in self.metrics.mistakes:
            png = io.BytesIO()
            pixels = self.test_set().images[mistake["image"]].permute(1, 2, 0).cpu().numpy()
            Image.fromarray(pixels).save(png, "png")
            mistakes.append({**mistake, "png": base64.b64encode(png.getvalue()).decode()})
        confusion = self.metrics.confusion.tolist()
        kept = {"classes": self.metrics.classes, "confusion": confusion, "mistakes": mistakes}
        (self.output / FILE).write_text(json.dumps(kept))

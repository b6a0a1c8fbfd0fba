"""A trial's callbacks: TensorBoard, the confusion matrix of its run, early stopping."""

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

from classify.config.experiment_fields import experiment_of
from classify.config.metric_table import METRICS, SPEED_METRIC
from classify.engine.trial_config import TrialConfig
from classify.images.pixels import ImageSet
from classify.reports.metrics import ClassificationMetrics
from classify.reports.summary import CLASSIFICATION
from classify.reports.tensorboard import TensorBoardLog
from deepspeed_trial.events import Callback, EarlyStopping
from deepspeed_trial.experiment import Experiment


def make_callbacks(
    context: Any,
    engine: Any,
    metrics: ClassificationMetrics,
    validated: Callable[[], ImageSet],
    config: TrialConfig,
) -> dict[str, pytorch.PyTorchCallback]:
    """Return the trial's callbacks by name.

    Args:
        context: the trial's.
        engine: its engine.
        metrics: of its validation.
        validated: returns the validated images.
        config: the trial's.
    """
    is_chief = context.distributed.rank == 0
    output = getattr(context, "output", None) if is_chief else None  # Determined's context has no folder
    callbacks: dict[str, pytorch.PyTorchCallback] = {
        "classification": ClassificationLog(output, metrics, validated),
        "tensorboard": TensorBoardLog(context, engine, metrics, validated, config),
    }
    if stopping := config.hyper.early_stopping:
        searched = Experiment(experiment_of(context), {})
        metric = searched.metric or stopping.get("metric", "loss")
        is_smaller_better = metric in METRICS and METRICS[metric].smaller_is_better
        smaller = searched.smaller_is_better if searched.metric else is_smaller_better
        callbacks["early_stopping"] = EarlyStopping(
            context, **{**stopping, "metric": metric, "smaller_is_better": smaller}
        )
    return callbacks


class ClassificationLog(Callback):
    """Write the confusion matrix and the hardest mistakes of every validation for the report.

    A test leaves ``OUTPUT/classification.json`` as the last validation wrote it.

    Args:
        output: the run's folder on the chief of a local run; else None, and the log writes nothing.
        metrics: of the validation.
        validated: returns the validated images.
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
            Image.fromarray(self.validated().image(mistake["image"])).save(png, "png")
            mistakes.append({**mistake, "png": base64.b64encode(png.getvalue()).decode()})
        confusion = self.metrics.confusion.tolist()
        log = {"classes": self.metrics.classes, "confusion": confusion, "mistakes": mistakes}
        (self.output / CLASSIFICATION).write_text(json.dumps(log))

    @override
    def on_test_start(self) -> None:
        self._of_validation = self.metrics.order, self.metrics.confusion, self.metrics.mistakes
        self.metrics.order = None

    @override
    def on_test_end(self, metrics: dict[str, Any]) -> None:
        self.metrics.order, self.metrics.confusion, self.metrics.mistakes = self._of_validation
        metrics.pop(SPEED_METRIC, None)  # a test trains nothing

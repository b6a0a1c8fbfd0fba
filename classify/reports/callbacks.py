"""What a trial reports beside its metrics, and whether they end the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined import pytorch

from classify.config.metric_names import SMALLER_IS_BETTER
from classify.engine.trial_config import TrialConfig
from classify.images.image_set import ImageSet
from classify.reports.classification import ClassificationLog
from classify.reports.metrics import ClassificationMetrics
from classify.reports.tensorboard import TensorBoardLog
from harness.callbacks import EarlyStopping


def make_callbacks(
    context: Any,
    engine: Any,
    metrics: ClassificationMetrics,
    validated: Callable[[], ImageSet],
    config: TrialConfig,
) -> dict[str, pytorch.PyTorchCallback]:
    """The callbacks that write TensorBoard's files and the run's confusion matrix, and early stopping.

    Args:
        context: the trial's.
        engine: its engine.
        metrics: of its validation.
        validated: gives the images that it validates.
        config: the trial's.
    """
    is_chief = context.distributed.rank == 0
    output = getattr(context, "output", None) if is_chief else None  # a stock context has no folder
    callbacks: dict[str, pytorch.PyTorchCallback] = {
        "classification": ClassificationLog(output, metrics, validated),
        "tensorboard": TensorBoardLog(context, engine, metrics, validated, config),
    }
    if stopping := config.hyper.early_stopping:
        smaller = stopping.get("metric", "loss") in SMALLER_IS_BETTER
        settings = {"metric": "loss", **stopping, "smaller_is_better": smaller}
        callbacks["early_stopping"] = EarlyStopping(context, **settings)
    return callbacks

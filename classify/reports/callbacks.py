"""A trial's callbacks: classification log, TensorBoard, early stopping."""

from __future__ import annotations

from typing import Any

from determined import pytorch

from classify.config.experiment_fields import experiment_of
from classify.config.metric_table import METRICS
from classify.engine.trial_config import TrialConfig
from classify.reports.classification_log import ClassificationLog
from classify.reports.metrics import ClassificationMetrics
from classify.reports.tensorboard import TensorBoardLog
from deepspeed_trial.events import EarlyStopping
from deepspeed_trial.experiment import Experiment


def make_callbacks(
    context: Any,
    engine: Any,
    metrics: ClassificationMetrics,
    images: Any,
    config: TrialConfig,
) -> dict[str, pytorch.PyTorchCallback]:
    """Return the trial's callbacks by name.

    Args:
        context: the trial's context.
        engine: the trial's engine.
        metrics: the validation's metrics.
        images: the trial's images, ``data.Images``.
        config: the trial's configuration.
    """
    is_chief = context.distributed.rank == 0
    output = getattr(context, "output", None) if is_chief else None  # Determined's context has no folder
    experiment = Experiment(experiment_of(context), {})
    callbacks: dict[str, pytorch.PyTorchCallback] = {
        "classification": ClassificationLog(output, metrics, images, config, experiment),
        "tensorboard": TensorBoardLog(context, engine, metrics, lambda: images.validation, config),
    }
    if stopping := config.hyper.early_stopping:
        metric = experiment.metric or stopping.get("metric", "loss")
        is_smaller_better = metric in METRICS and METRICS[metric].smaller_is_better
        smaller = experiment.smaller_is_better if experiment.metric else is_smaller_better
        callbacks["early_stopping"] = EarlyStopping(
            context, **{**stopping, "metric": metric, "smaller_is_better": smaller}
        )
    return callbacks

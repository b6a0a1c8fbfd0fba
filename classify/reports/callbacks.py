"""What a trial reports beside its metrics, and whether they end the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined import pytorch

from classify.config.experiment_fields import experiment_of
from classify.config.metric_names import SMALLER_IS_BETTER
from classify.engine.trial_config import TrialConfig
from classify.images.image_set import ImageSet
from classify.reports.classification import ClassificationLog
from classify.reports.metrics import ClassificationMetrics
from classify.reports.tensorboard import TensorBoardLog
from deepspeed_trial.events import EarlyStopping
from deepspeed_trial.experiment import Experiment


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
        searched = Experiment(experiment_of(context), {})
        metric = searched.metric or stopping.get("metric", "loss")
        smaller = searched.smaller_is_better if searched.metric else metric in SMALLER_IS_BETTER
        callbacks["early_stopping"] = EarlyStopping(
            context, **{**stopping, "metric": metric, "smaller_is_better": smaller}
        )
    return callbacks

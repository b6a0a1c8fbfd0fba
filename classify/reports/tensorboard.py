"""TensorBoard's scalars and figures of a run."""

from __future__ import annotations

import time
from typing import Any

import deepspeed
from typing_extensions import override

from classify.config.metric_table import tagged
from classify.engine.trial_config import TrialConfig
from classify.reports import figures
from classify.reports.metrics import ClassificationMetrics
from deepspeed_trial.engines import loss_scale
from deepspeed_trial.events import Callback, steps_done

FIGURES_SHARE = 20  # figures take at most a twentieth of the time
FIRST_FIGURES = 3.0  # seconds of the first figures, which import matplotlib


class TensorBoardLog(Callback):
    """Write scalars with every report and validation, and figures with validations.

    Figures take half a second, as long as a validation of small images. A validation therefore draws them
    only if 20 times the duration of the last drawing has passed. The trial's end draws the figures of the
    last validation.

    Args:
        context: the trial's context.
        engine: the trial's engine.
        metrics: the reducer of the validations.
        images: the trial's images, ``data.Images``.
        config: the trial's configuration, with the parameter groups.
    """

    def __init__(
        self,
        context: Any,
        engine: deepspeed.DeepSpeedEngine,
        metrics: ClassificationMetrics,
        images: Any,
        config: TrialConfig,
    ) -> None:
        self.context = context
        self.engine, self.metrics, self.images = engine, metrics, images
        trained = [group for group in config.groups if not group.frozen]
        self.groups = trained if len(trained) > 1 else []
        self.config = config
        self.is_chief = context.distributed.rank == 0
        self._drawn_step = self._validated_step = -1
        self._drawn_at, self._took = time.monotonic(), FIRST_FIGURES

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter`` of Determined's context."""
        return self.context.get_tensorboard_writer()

    @override
    def on_training_start(self) -> None:
        self._drawn_at = time.monotonic()

    @override
    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]
    ) -> None:
        super().on_training_workload_end(avg_metrics, batch_metrics)
        if not self.is_chief:
            return
        rate = batch_metrics[-1].get("learning_rate") if batch_metrics else None
        flops = self.config.training_flops
        self._add(
            {
                **{f"learning_rate_of/{each.name}": rate and rate * each.lr_factor for each in self.groups},
                "loss/train": avg_metrics.get("loss"),
                "learning_rate": rate,
                "images_per_second": avg_metrics.get("images_per_second"),
                "flops_per_second": flops and flops * avg_metrics.get("images_per_second", 0),
                "gradient_norm": self.engine.get_global_grad_norm(),
                "loss_scale": loss_scale(self.engine),
            }
        )

    @override
    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if not self.is_chief:
            return
        self._add(tagged(metrics, "validation"))
        self._add({f"accuracy_of_class/{name}": metrics[f"accuracy/{name}"] for name in self.metrics.classes})
        self._validated_step = steps_done(self.context)
        if time.monotonic() - self._drawn_at >= FIGURES_SHARE * self._took:
            self._draw()
        self.writer.flush()

    @override
    def on_test_end(self, metrics: dict[str, Any]) -> None:
        if self.is_chief:
            self._add(tagged(metrics, "test"))

    @override
    def on_trial_shutdown(self) -> None:
        if self.is_chief and self._validated_step > self._drawn_step:
            self._draw()
            self.writer.flush()

    def _add(self, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            if value is not None:
                self.writer.add_scalar(name, float(value), steps_done(self.context))

    def _draw(self) -> None:
        since = time.monotonic()
        metrics, source = self.metrics, self.images.validation
        images = [source.image(mistake["image"]) for mistake in metrics.mistakes]
        drawn = {"hardest_mistakes": figures.mistakes_figure(metrics.mistakes, images, metrics.classes)}
        if metrics.confusion.ndim == 2:  # one label an image
            drawn["confusion_matrix"] = figures.confusion_figure(metrics.confusion, metrics.classes)
        for name, figure in drawn.items():
            self.writer.add_figure(name, figure, self._validated_step)
        self._drawn_step, self._drawn_at = self._validated_step, time.monotonic()
        self._took = self._drawn_at - since

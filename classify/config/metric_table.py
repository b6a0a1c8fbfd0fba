"""The table of a validation's metrics.

The terminal, TensorBoard, ``summary.json``, the HTML report, searches and trackers use the table's names.
To add a metric that can be computed from ``Counts``, add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TTA_METRIC = "accuracy_tta"
MAP_METRIC = "mean_average_precision"  # only with several labels an image
TOP5_METRIC = "top5_accuracy"
ERROR, SCALED_ERROR = "calibration_error", "calibration_error_scaled"
TEMPERATURE, THRESHOLD = "temperature", "confidence_threshold"  # fitted on validation images alone
SPEED_METRIC = "images_per_second"  # the training's speed since the last validation


@dataclass(frozen=True)
class Counts:
    """Counts of a validation, summed over all ranks.

    Attributes:
        confusion: the confusion matrix, int64 (C, C); rows are true classes. With several labels an image, a
            matrix for each label, int64 (C, 2, 2); rows are the true answers no and yes.
        loss: the cross-entropy, summed over the images.
        right_by_views: the number of images that the mean of the views' scores classifies correctly; None
            without views.
        in_top5: the number of images whose class is among the five with the highest scores; None with at most
            five classes.
        bins: float64 (3, B): for each bin of confidence, the number of images, their summed confidence, and
            the number of correctly classified images.
        scaled_bins: the same as ``bins``, with temperature scaling; None without a temperature.
        temperature: the temperature that was fitted on these images; None if none was fitted.
        threshold: the confidence below which the answer is "unknown"; None without a temperature.
        all_right: the number of images whose labels are all right; None with one label an image.
        average_precision: the average precision of each label, float64 (C,); None with one label an image.
        thresholds: for each label, the lowest probability that gives an image the label, float64 (C,); None
            with one label an image.
    """

    confusion: np.ndarray
    loss: float
    right_by_views: int | None
    in_top5: int | None
    bins: np.ndarray
    scaled_bins: np.ndarray | None = None
    temperature: float | None = None
    threshold: float | None = None
    all_right: int | None = None
    average_precision: np.ndarray | None = None
    thresholds: np.ndarray | None = None

    @property
    def images(self) -> int:
        """The number of images."""
        return int((self.confusion[0] if self.confusion.ndim == 3 else self.confusion).sum())

    @property
    def right_images(self) -> int:
        """The number of images with the right class, or with every label right."""
        return int(self.confusion.trace()) if self.all_right is None else self.all_right

    def mean(self, summed: float | None) -> float | None:
        """Return a sum divided by the number of images: 0 without images, None for None."""
        return None if summed is None else summed / max(self.images, 1)

    def of_classes(self, score: str) -> np.ndarray:
        """Return ``f1``, ``recall``, ``precision`` or ``average_precision`` of every class, (C,).

        A score is 0 where its divisor is 0.
        """
        if score == "average_precision" and self.average_precision is not None:
            return self.average_precision
        right, predicted, true = self._of_each
        if score == "f1":
            return 2 * right / np.maximum(predicted + true, 1)
        return right / np.maximum(true if score == "recall" else predicted, 1)

    def macro(self, score: str) -> float:
        """Return the mean of a score over the classes that have images."""
        is_there = self._of_each[2] > 0
        return float(self.of_classes(score)[is_there].mean()) if is_there.any() else 0.0

    @property
    def _of_each(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each class, (C,): right images, images predicted as the class, images of the class."""
        cells = self.confusion
        if cells.ndim == 3:
            return cells[:, 1, 1].astype(np.float64), cells[:, :, 1].sum(1), cells[:, 1].sum(1)
        return cells.diagonal().astype(np.float64), cells.sum(0), cells.sum(1)


def _mean_average_precision(counts: Counts) -> float | None:
    return None if counts.average_precision is None else counts.macro("average_precision")


def _calibration_error(bins: np.ndarray | None) -> float | None:
    """Return the mean distance between confidence and accuracy: https://arxiv.org/abs/1706.04599."""
    if bins is None:
        return None
    images, confidence, right = bins
    return float(np.abs(confidence - right).sum() / max(images.sum(), 1))


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        name: the metric's name in ``metrics.jsonl``, ``summary.json``, ``searcher.metric`` and the trackers.
        label: the metric's name in the HTML report.
        formula: a function that computes the value; None if the counts that it needs are missing.
        tag: the metric's tag in TensorBoard, by default ``name/{}``; ``{}`` stands for ``validation`` or
            ``test``.
        in_percent: whether reports show the value in percent.
        smaller_is_better: whether early stopping prefers smaller values.
    """

    name: str
    label: str
    formula: Callable[[Counts], float | None]
    tag: str = ""
    in_percent: bool = False
    smaller_is_better: bool = False


_TABLE = (
    Metric("accuracy", "accuracy", lambda c: c.mean(c.right_images), in_percent=True),
    Metric(MAP_METRIC, "mean average precision (mAP)", _mean_average_precision, in_percent=True),
    Metric(TTA_METRIC, "accuracy (TTA)", lambda c: c.mean(c.right_by_views), "accuracy/{}_tta", True),
    Metric(TOP5_METRIC, "top-5 accuracy", lambda c: c.mean(c.in_top5), "accuracy/{}_top5", True),
    Metric("macro_f1", "macro F1", lambda c: c.macro("f1")),
    Metric("macro_recall", "macro recall", lambda c: c.macro("recall")),
    Metric("macro_precision", "macro precision", lambda c: c.macro("precision")),
    Metric(ERROR, "calibration error", lambda c: _calibration_error(c.bins), smaller_is_better=True),
    Metric(
        SCALED_ERROR,
        "calibration error at the temperature",
        lambda c: _calibration_error(c.scaled_bins),
        "calibration_error/{}_scaled",
        smaller_is_better=True,
    ),
    Metric(TEMPERATURE, "temperature", lambda c: c.temperature),
    Metric(THRESHOLD, 'confidence threshold of the answer "unknown"', lambda c: c.threshold),
    Metric("loss", "loss", lambda c: c.mean(c.loss), smaller_is_better=True),
)
METRICS = {metric.name: metric for metric in _TABLE}
# The metrics that compare checkpoints and trials; the others describe the fit of the temperature
COMPARED = [name for name in METRICS if name not in (SCALED_ERROR, TEMPERATURE, THRESHOLD)]
# The prefixes of metrics of single classes, PREFIX + CLASS, and the score that each metric shows
PREFIXES = {"accuracy/": "recall", "precision/": "precision"}
OF_LABELS = {"average_precision/": "average_precision"}  # only with several labels an image
LABEL_THRESHOLD = "threshold/"  # fitted on validation images alone
UNFITTED = 0.5  # the threshold of a label without images, or before a validation


def computed(counts: Counts, classes: Sequence[str]) -> dict[str, float]:
    """Return every metric of the table whose counts exist, then the metrics of each class."""
    values = {name: metric.formula(counts) for name, metric in METRICS.items()}
    metrics = {name: value for name, value in values.items() if value is not None}
    of_classes = {prefix: counts.of_classes(score) for prefix, score in PREFIXES.items()}
    if counts.average_precision is not None:
        of_classes.update((prefix, counts.of_classes(score)) for prefix, score in OF_LABELS.items())
    if counts.thresholds is not None:
        of_classes[LABEL_THRESHOLD] = counts.thresholds
    for prefix, of_each in of_classes.items():
        metrics.update(zip([f"{prefix}{name}" for name in classes], of_each.tolist(), strict=True))
    return metrics


def tagged(metrics: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Return TensorBoard's scalars of the metrics in the table; ``split`` is ``validation`` or ``test``."""
    tags = {name: (metric.tag or f"{name}/{{}}").format(split) for name, metric in METRICS.items()}
    return {tags[name]: value for name, value in metrics.items() if name in tags}


def is_metric(value: object) -> bool:
    """Return whether some validation may report a metric of this name."""
    return isinstance(value, str) and (value in COMPARED or value.startswith((*PREFIXES, *OF_LABELS)))


def is_share(metric: str) -> bool:
    """Return whether reports show a metric in percent."""
    return METRICS[metric].in_percent if metric in METRICS else metric.startswith((*PREFIXES, *OF_LABELS))


def shown(metric: str, value: float) -> str:
    """Format the value of a metric for a report, a search or a cross-validation."""
    if is_share(metric):
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if metric == SPEED_METRIC else f"{value:.4f}"


def metrics_for(classes: Sequence[str], has_views: bool, several_labels: bool = False) -> list[str]:
    """Return the names of the metrics that a validation reports.

    Args:
        classes: the names of the classes.
        has_views: whether the validation uses test-time augmentation.
        several_labels: whether an image may have any number of labels.
    """
    count, bins = len(classes), np.zeros((3, 1))
    if several_labels:
        cells, of_each = np.zeros((count, 2, 2)), np.zeros(count)
        nothing = Counts(cells, 0.0, None, None, bins, all_right=0, average_precision=of_each)
    else:
        views, top5 = 0 if has_views else None, 0 if count > 5 else None
        nothing = Counts(np.zeros((count, count)), 0.0, views, top5, bins)
    return list(computed(nothing, classes))

"""Metrics of images with several labels: average precision, and a threshold for each label.

An image gets a label if the label's probability, the sigmoid of its logit, reaches the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from classify.config.metric_table import MAP_METRIC, UNFITTED, Counts
from classify.reports.metrics import BINS, SHOWN, ClassificationMetrics, Throughput


class LabelMetrics(ClassificationMetrics):
    """Keeps the logits of a validation; the chief computes exact metrics from the logits of all ranks.

    The logits and the labels of an evaluation take 5 bytes for each image and class.

    Args:
        classes: the names of the labels.
        throughput: the training's throughput; see ``ClassificationMetrics``.
        thresholds: the threshold of each label; None to use the best F1 on the evaluated images.

    Attributes:
        confusion: a confusion matrix for each label in the last evaluation, on the chief: int64 (C, 2, 2).
            Rows are true labels (no, yes), columns are given ones.
        mistakes: the images with the largest loss among the images with a wrong label in the last evaluation,
            on the chief. Each has ``loss``, ``image``, and the lists of labels ``predicted`` and ``label``.
        unsure: the same for images whose labels are all right.
        bins: float64 (3, B): for each bin of probability, the number of pairs of an image and a label, their
            summed probability, and the number of true pairs.
    """

    def __init__(
        self,
        classes: Sequence[str],
        throughput: Throughput | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(classes, throughput)
        self.thresholds = thresholds

    @override
    def reset(self) -> None:
        nothing = torch.zeros(0, len(self.classes))
        self._counted: list[tuple[Tensor, Tensor]] = [(nothing, nothing.byte())]

    @override
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            logits: (B, C) float32.
            labels: (B, C) uint8, 0 and 1.
        """
        self._counted.append((logits.detach(), labels))

    @override
    def per_slot_reduce(self) -> tuple[Any, ...]:
        """Return this rank's images: indices int64 (N,), logits float32 (N, C), labels uint8 (N, C)."""
        of_kind = ([each.cpu() for each in parts] for parts in zip(*self._counted, strict=True))
        logits, labels = (torch.cat(parts).numpy() for parts in of_kind)
        places = np.arange(len(labels)) if self.order is None else self.order[: len(labels)].numpy()
        return places, logits, labels

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Return the metrics of ``classify/config/metric_table.py`` and ``images``, as numbers."""
        from sklearn.metrics import average_precision_score  # takes a second to import

        places, logits, labels = map(np.concatenate, zip(*per_slot_metrics, strict=True))
        order = np.argsort(places)  # the same images in the same order for any number of ranks
        places, labels = places[order], labels[order]
        scores = np.nan_to_num(logits[order].astype(np.float64))
        losses = (np.logaddexp(0, scores) - labels * scores).mean(1)  # binary cross-entropy
        if not np.isfinite(logits).all():
            losses += np.nan
        probabilities = np.exp(-np.logaddexp(0, -scores))  # sigmoid
        thresholds = fit(probabilities, labels)
        if self.thresholds is not None:
            thresholds = np.array([self.thresholds[name] for name in self.classes])
        given = probabilities >= thresholds
        true, is_right = labels == 1, (given == labels).all(1)
        self.mistakes, self.unsure = (
            _hardest(rows, places, given, labels, losses)
            for rows in (np.flatnonzero(~is_right), np.flatnonzero(is_right))
        )
        cells = np.array([[~given & ~true, given & ~true], [~given & true, given & true]])
        self.confusion = np.moveaxis(cells.sum(2), -1, 0)
        place = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1).ravel()
        weights = (np.ones_like(scores), probabilities, labels)
        self.bins = np.array([np.bincount(place, each.ravel(), BINS) for each in weights])
        precision = np.zeros(len(self.classes))
        for label in np.flatnonzero(true.any(0)):
            precision[label] = average_precision_score(labels[:, label], scores[:, label])
        counts = Counts(
            self.confusion,
            loss=float(losses.sum()),
            right_by_views=None,
            in_top5=None,
            bins=self.bins,
            all_right=int(is_right.sum()),
            average_precision=precision,
            thresholds=thresholds,
        )
        return self._reported(counts, MAP_METRIC, "accuracy", "loss")


def fit(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return for each label the threshold with the largest F1, float64 (C,).

    A threshold is in the middle between two probabilities, so that rounding changes no label.

    Args:
        probabilities: (N, C) float64.
        labels: (N, C), 0 and 1.
    """
    from sklearn.metrics import precision_recall_curve  # takes a second to import

    thresholds = np.full(labels.shape[1], UNFITTED)
    for label in np.flatnonzero(labels.any(0)):
        precision, recall, reached = precision_recall_curve(labels[:, label], probabilities[:, label])
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        best = int(f1[:-1].argmax())
        thresholds[label] = (reached[best] + (reached[best - 1] if best else 0.0)) / 2
    return thresholds


def _hardest(
    rows: np.ndarray, places: np.ndarray, given: np.ndarray, labels: np.ndarray, losses: np.ndarray
) -> list[dict[str, Any]]:
    """Return the images with the largest losses among some rows."""
    return [
        {
            "loss": float(losses[row]),
            "image": int(places[row]),
            "predicted": np.flatnonzero(given[row]).tolist(),
            "label": np.flatnonzero(labels[row]).tolist(),
        }
        for row in rows[np.argsort(-losses[rows], kind="stable")][:SHOWN]
    ]

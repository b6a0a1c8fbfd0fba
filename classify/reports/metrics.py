"""Classification metrics from counts, exact however the images are split into micro-batches and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from determined import pytorch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from classify.config.metric_names import CALIBRATION_METRIC, SPEED_METRIC, TOP5_METRIC, TTA_METRIC
from classify.config.options import TestTimeAugmentation
from classify.images.views import view_scores
from classify.reports import scores


class Throughput(pytorch.MetricReducer):
    """Images trained a second of wall time, over all ranks; validations and checkpoints are left out.

    Determined resets it when training starts or goes on, and reduces it when it reports, after the losses
    have been fetched: the steps that were only queued on the device count, too.
    """

    def __init__(self) -> None:
        self.images = self.seconds = 0.0  # of this run
        self._validated = 0.0, 0.0  # what they were at the last validation
        self.reset()

    @override
    def reset(self) -> None:
        self._counted, self._since = 0.0, time.perf_counter()

    def update(self, images: float) -> None:
        """Counts images, of all ranks together."""
        self._counted += images

    @override
    def per_slot_reduce(self) -> float:
        images, seconds = self._counted, time.perf_counter() - self._since
        self.images, self.seconds = self.images + images, self.seconds + seconds
        self.reset()
        return _rate(images, seconds)

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> dict[str, float]:
        """Gives ``images_per_second``; ranks go in step."""
        return {"images_per_second": per_slot_metrics[0]}

    def of_run(self) -> float:
        """The rate of the whole run so far, in images a second."""
        return _rate(self.images, self.seconds)

    def since_validation(self) -> float:
        """The rate since this was last asked, in images a second; 0 if nothing was trained."""
        images, seconds = self._validated
        self._validated = self.images, self.seconds
        return _rate(self.images - images, self.seconds - seconds)


def _rate(images: float, seconds: float) -> float:
    return images / max(seconds, 1e-9) if images else 0.0


class LearningRate(pytorch.MetricReducer):
    """The learning rate of the last step; Determined would report the mean over the steps of a report.

    Attributes:
        now: the rate.
    """

    now = 0.0

    @override
    def reset(self) -> None:
        pass

    @override
    def per_slot_reduce(self) -> float:
        return self.now

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> dict[str, float]:
        """Return ``learning_rate``; all ranks have the same."""
        return {"learning_rate": per_slot_metrics[0]}


MISTAKES = 16  # how many of the hardest are kept


class Counted(NamedTuple):
    """What a rank has counted; see ``ClassificationMetrics``."""

    confusion: np.ndarray
    loss: float
    mistakes: list[dict[str, Any]]
    right_by_views: int
    in_top5: int
    bins: np.ndarray


class ClassificationMetrics(pytorch.MetricReducer):
    """Accumulates a confusion matrix, the summed loss, confidence and the hardest mistakes on the device.

    Args:
        classes: the class names.
        throughput: of the training, to be reported with every validation, so that a search can go by it.
        how: views, by whose mean scores ``classify`` counts each image once more.

    Attributes:
        order: int64 (N,), the images in the order in which this rank sees them; the mistakes are told by it.
        confusion: of the last validation, on the chief: int64 (C, C), rows are true classes.
        mistakes: of the last validation, on the chief: the wrongly classified images of the largest loss,
            the hardest first, each with ``loss``, ``image`` (its index), ``predicted`` and ``label``.
    """

    def __init__(
        self,
        classes: Sequence[str],
        throughput: Throughput | None = None,
        how: TestTimeAugmentation | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.throughput, self.how = throughput, how
        self.order: Tensor | None = None
        self.confusion = np.zeros((len(self.classes),) * 2, dtype=np.int64)
        self.mistakes: list[dict[str, Any]] = []
        self.reset()

    @override
    def reset(self) -> None:
        self._counts: Tensor | None = None
        self._seen = 0
        self._right_by_views: Tensor | int = 0

    def classify(self, net: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> None:
        """Classifies a batch and adds it.

        Args:
            net: gives logits (B, C) float32 of inputs.
            inputs: (B, 3, H, W), normalised.
            labels: (B,) int64.
        """
        logits, by_views = view_scores(net, inputs, self.how)
        self.update(logits, labels)
        if self.how:
            self._right_by_views = self._right_by_views + (by_views.argmax(1) == labels).sum()

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            logits: (B, C) float32.
            labels: (B,) int64.
        """
        if self._counts is None:
            self._counts = torch.zeros(len(self.classes) ** 2, dtype=torch.int64, device=logits.device)
            self._loss = torch.zeros((), dtype=torch.float64, device=logits.device)
            self._in_top5 = torch.zeros((), dtype=torch.int64, device=logits.device)
            self._bins = torch.zeros((3, scores.BINS), dtype=torch.float64, device=logits.device)
            self._hardest = torch.full(
                (MISTAKES,), -1.0, device=logits.device
            )  # losses; below 0 there is none
            self._which = torch.zeros((3, MISTAKES), dtype=torch.int64, device=logits.device)
        predicted = logits.argmax(1)
        cells = labels * len(self.classes) + predicted
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))
        losses = F.cross_entropy(logits, labels, reduction="none")
        self._loss += losses.sum()
        self._bins += scores.bins(logits, labels)
        if len(self.classes) > 5:
            self._in_top5 += (logits.topk(5).indices == labels.unsqueeze(1)).sum()
        places = torch.arange(self._seen, self._seen + len(labels), device=logits.device)
        self._seen += len(labels)
        losses = torch.cat([self._hardest, losses.masked_fill(predicted == labels, -1.0)])
        which = torch.cat([self._which, torch.stack([places, predicted, labels])], dim=1)
        self._hardest, chosen = losses.topk(MISTAKES)
        self._which = which[:, chosen]

    @override
    def per_slot_reduce(self) -> tuple[Any, ...]:
        if self._counts is None:
            nothing = np.zeros((len(self.classes),) * 2, dtype=np.int64)
            return tuple(Counted(nothing, 0.0, [], 0, 0, np.zeros((3, scores.BINS))))
        counts = self._counts.view(len(self.classes), -1).cpu().numpy()
        mistakes = []
        for loss, place, *names in zip(self._hardest.tolist(), *self._which.tolist(), strict=True):
            if loss >= 0:
                image = place if self.order is None else int(self.order[place])
                mistakes.append({"loss": loss, "image": image, "predicted": names[0], "label": names[1]})
        bins, views, top5 = self._bins.cpu().numpy(), int(self._right_by_views), int(self._in_top5)
        return counts, self._loss.item(), mistakes, views, top5, bins

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Gives the metrics of ``classify/config/metric_names.py`` and ``images``, as numbers.

        ``accuracy_tta``, that by the mean scores of views, where there are views; ``accuracy/<class>`` is the
        same as its recall.
        """
        counted = [Counted(*each) for each in per_slot_metrics]
        self.confusion = confusion = np.sum([each.confusion for each in counted], axis=0)
        everyones = [mistake for each in counted for mistake in each.mistakes]
        self.mistakes = sorted(everyones, key=lambda each: (-each["loss"], each["image"]))[:MISTAKES]
        images = int(confusion.sum())
        metrics: dict[str, Any] = {
            "accuracy": int(confusion.trace()) / max(images, 1),
            "loss": sum(each.loss for each in counted) / max(images, 1),
            "images": images,
        }
        if self.how:
            metrics[TTA_METRIC] = sum(each.right_by_views for each in counted) / max(images, 1)
        if len(self.classes) > 5:
            metrics[TOP5_METRIC] = sum(each.in_top5 for each in counted) / max(images, 1)
        metrics.update(scores.macro(confusion))
        bins = np.sum([each.bins for each in counted], axis=0)
        metrics[CALIBRATION_METRIC] = scores.calibration_error(bins)
        of_classes = scores.of_classes(confusion)
        for prefix, score in (("accuracy", "recall"), ("precision", "precision")):
            names = (f"{prefix}/{name}" for name in self.classes)
            metrics.update(zip(names, of_classes[score].tolist(), strict=True))
        if self.throughput:
            metrics[SPEED_METRIC] = self.throughput.since_validation()
        return metrics

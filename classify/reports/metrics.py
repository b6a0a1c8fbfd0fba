"""Classification metrics from counts, exact however the images are split into micro-batches and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from classify.config.options import TTA_METRIC, TestTimeAugmentation
from classify.images.views import view_scores


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


MISTAKES = 16  # how many of the hardest are kept


class ClassificationMetrics(pytorch.MetricReducer):
    """Accumulates a confusion matrix, the summed loss and the hardest mistakes on the device.

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
            self._hardest = torch.full(
                (MISTAKES,), -1.0, device=logits.device
            )  # losses; below 0 there is none
            self._which = torch.zeros((3, MISTAKES), dtype=torch.int64, device=logits.device)
        predicted = logits.argmax(1)
        cells = labels * len(self.classes) + predicted
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))
        losses = F.cross_entropy(logits, labels, reduction="none")
        self._loss += losses.sum()
        places = torch.arange(self._seen, self._seen + len(labels), device=logits.device)
        self._seen += len(labels)
        losses = torch.cat([self._hardest, losses.masked_fill(predicted == labels, -1.0)])
        which = torch.cat([self._which, torch.stack([places, predicted, labels])], dim=1)
        self._hardest, chosen = losses.topk(MISTAKES)
        self._which = which[:, chosen]

    @override
    def per_slot_reduce(self) -> tuple[np.ndarray, float, list[dict[str, Any]], int]:
        if self._counts is None:
            return np.zeros((len(self.classes),) * 2, dtype=np.int64), 0.0, [], 0
        counts = self._counts.view(len(self.classes), -1).cpu().numpy()
        mistakes = []
        for loss, place, *names in zip(self._hardest.tolist(), *self._which.tolist(), strict=True):
            if loss >= 0:
                image = place if self.order is None else int(self.order[place])
                mistakes.append({"loss": loss, "image": image, "predicted": names[0], "label": names[1]})
        return counts, self._loss.item(), mistakes, int(self._right_by_views)

    @override
    def cross_slot_reduce(
        self, per_slot_metrics: list[tuple[np.ndarray, float, list[dict[str, Any]], int]]
    ) -> dict[str, Any]:
        """Gives ``accuracy``, ``loss``, ``images``, ``accuracy/<class>`` and the throughput, as numbers.

        With views also ``accuracy_tta``, that by their mean scores.
        """
        self.confusion = confusion = np.sum([counts for counts, *_ in per_slot_metrics], axis=0)
        everyones = [each for _, _, mistakes, _ in per_slot_metrics for each in mistakes]
        self.mistakes = sorted(everyones, key=lambda each: (-each["loss"], each["image"]))[:MISTAKES]
        images = int(confusion.sum())
        metrics: dict[str, Any] = {
            "accuracy": int(confusion.trace()) / max(images, 1),
            "loss": sum(loss for _, loss, *_ in per_slot_metrics) / max(images, 1),
            "images": images,
        }
        if self.how:
            metrics[TTA_METRIC] = sum(right for *_, right in per_slot_metrics) / max(images, 1)
        for name, row, right in zip(self.classes, confusion.sum(1), confusion.diagonal(), strict=True):
            metrics[f"accuracy/{name}"] = int(right) / max(int(row), 1)
        if self.throughput:
            metrics["images_per_second"] = self.throughput.since_validation()
        return metrics

"""Metrics that are exact for any split of the images over ranks and micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from classify.config.metric_table import SPEED_METRIC, Counts, computed
from classify.config.options import TestTimeAugmentation
from classify.images.views import view_scores
from classify.reports import confidence

BINS = 15  # of confidence, as in https://arxiv.org/abs/1706.04599
SHOWN = 16  # images of each kind in the report


class Throughput(pytorch.MetricReducer):
    """Training images per second of wall time, over all ranks, without validations and checkpoints.

    The trainer resets the reducer whenever training starts or continues. It fetches the losses before it
    reduces metrics, so the time includes all queued steps of the device.
    """

    def __init__(self) -> None:
        self.images = self.seconds = 0.0  # of this run
        self._at_validation = 0.0, 0.0  # both at the last validation
        self.reset()

    @override
    def reset(self) -> None:
        self._counted, self._since = 0.0, time.perf_counter()

    def update(self, images: float) -> None:
        """Count images of all ranks."""
        self._counted += images

    @override
    def per_slot_reduce(self) -> float:
        images, seconds = self._counted, time.perf_counter() - self._since
        self.images, self.seconds = self.images + images, self.seconds + seconds
        self.reset()
        return _rate(images, seconds)

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> dict[str, float]:
        """Return rank 0's ``images_per_second``, because all ranks train at the same speed."""
        return {"images_per_second": per_slot_metrics[0]}

    def of_run(self) -> float:
        """Return the rate of the whole run, in images a second."""
        return _rate(self.images, self.seconds)

    def since_validation(self) -> float:
        """Return the rate since the last call, in images a second; 0 without training."""
        images, seconds = self._at_validation
        self._at_validation = self.images, self.seconds
        return _rate(self.images - images, self.seconds - seconds)


def _rate(images: float, seconds: float) -> float:
    return images / max(seconds, 1e-9) if images else 0.0


class LearningRate(pytorch.MetricReducer):
    """The learning rate of the last step, instead of the mean over the steps of a report.

    Attributes:
        now: the current learning rate.
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
        """Return ``learning_rate``, the same on all ranks."""
        return {"learning_rate": per_slot_metrics[0]}


class ClassificationMetrics(pytorch.MetricReducer):
    """Counts a validation's confusion matrix, loss, confidence and top losses on the device.

    Args:
        classes: the class names.
        throughput: the training's throughput; every validation reports it, so that a search can compare it.
        how: views of test-time augmentation; with them, ``classify`` also counts the images that the views'
            mean scores classify correctly.
        temperature: the temperature of a second calibration error; None to fit one on the images.
        fitted: the number of images of a validation that fits the temperature; 0 to fit none.

    Attributes:
        order: int64 (N,), the indices of this rank's images, in order. Without them no temperature is fitted,
            and ``image`` below is a position.
        order_of_test: the same for the test.
        thresholds: the threshold of each label; only ``LabelMetrics`` uses it.
        confusion: the confusion matrix of the last validation, on the chief: int64 (C, C), rows are true
            classes.
        mistakes: the wrongly classified images with the largest losses in the last validation, on the chief,
            the largest first. Each has ``loss``, ``image`` (its index), ``predicted``, ``label`` and
            ``probability`` (of the predicted class).
        unsure: the same for correctly classified images.
        bins: confidence bins of the last validation, on the chief; see ``Counts``.
    """

    thresholds: Mapping[str, float] | None = None

    def __init__(
        self,
        classes: Sequence[str],
        throughput: Throughput | None = None,
        how: TestTimeAugmentation | None = None,
        temperature: float | None = None,
        fitted: int = 0,
    ) -> None:
        self.classes = tuple(classes)
        self.throughput, self.how, self.temperature = throughput, how, temperature
        # The fit of the temperature reads every ``spacing``-th image; 0: no fit
        self.spacing = math.ceil(fitted * len(self.classes) / confidence.MOST)
        self.order: Tensor | None = None
        self.order_of_test: Tensor | None = None
        self.confusion = np.zeros((len(self.classes),) * 2, dtype=np.int64)
        self.mistakes: list[dict[str, Any]] = []
        self.unsure: list[dict[str, Any]] = []
        self.bins = np.zeros((3, BINS))
        self.reset()

    @override
    def reset(self) -> None:
        self._counts: Tensor | None = None
        self._seen = 0
        self._right_by_views: Tensor | int = 0
        self._fitted: list[tuple[Tensor, Tensor, Tensor]] = []  # indices, logits, labels

    def classify(self, net: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor) -> None:
        """Classify a batch and count it.

        Args:
            net: maps inputs to logits (B, C) float32.
            inputs: (B, 3, H, W), normalised.
            labels: (B,) int64.
        """
        logits, by_views = view_scores(net, inputs, self.how)
        self.update(logits, labels)
        if self.how:
            self._right_by_views = self._right_by_views + (by_views.argmax(1) == labels).sum()

    def _start(self, device: torch.device) -> None:
        self._counts = torch.zeros(len(self.classes) ** 2, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._in_top5 = torch.zeros((), dtype=torch.int64, device=device)
        self._bins = torch.zeros((3, BINS), dtype=torch.float64, device=device)
        self._scaled_bins = torch.zeros_like(self._bins)
        # Mistakes, and correct images. Rows: loss (-1: no image), position, predicted, label, probability
        self._hardest = [torch.full((5, SHOWN), -1.0, dtype=torch.float64, device=device)] * 2

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            logits: (B, C) float32.
            labels: (B,) int64.
        """
        if logits.device.type == "mps":  # which has no float64
            logits, labels = logits.cpu(), labels.cpu()
        if self._counts is None:
            self._start(logits.device)
        assert self._counts is not None
        predicted = logits.argmax(1)
        certainty = logits.softmax(1).amax(1)
        cells = labels * len(self.classes) + predicted
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))
        losses = F.cross_entropy(logits, labels, reduction="none")
        self._loss += losses.sum()
        self._bins += _bins(logits, labels)
        if self.temperature:
            self._scaled_bins += _bins(logits / self.temperature, labels)
        if self.order is not None and self.spacing:
            images = self.order[self._seen : self._seen + len(labels)]
            chosen = (images % self.spacing == 0).nonzero().squeeze(1)
            there = chosen.to(logits.device)
            self._fitted.append((images[chosen], logits[there], labels[there]))
        if len(self.classes) > 5:
            self._in_top5 += (logits.topk(5).indices == labels.unsqueeze(1)).sum()
        places = torch.arange(self._seen, self._seen + len(labels), device=logits.device)
        self._seen += len(labels)
        for kind, others in enumerate((predicted == labels, predicted != labels)):
            ranked = losses.masked_fill(others, -1.0)
            columns = torch.stack([each.double() for each in (ranked, places, predicted, labels, certainty)])
            columns = torch.cat([self._hardest[kind], columns], dim=1)
            self._hardest[kind] = columns[:, columns[0].topk(SHOWN).indices]

    @override
    def per_slot_reduce(self) -> tuple[Any, ...]:
        """Return this rank's counts: numbers, lists and arrays."""
        if self._counts is None:
            self._start(torch.device("cpu"))
        assert self._counts is not None
        counts = self._counts.view(len(self.classes), -1).cpu().numpy()
        mistakes, unsure = (self._described(columns.T.tolist()) for columns in self._hardest)
        views, top5 = int(self._right_by_views), int(self._in_top5)
        bins, scaled = self._bins.cpu().numpy(), self._scaled_bins.cpu().numpy()
        fitted = [torch.cat(parts).cpu().numpy() for parts in zip(*self._fitted, strict=True)]
        return counts, self._loss.item(), mistakes, unsure, views, top5, bins, scaled, fitted

    def _described(self, rows: list[list[float]]) -> list[dict[str, Any]]:
        """Return ``mistakes`` or ``unsure`` of this rank."""
        shown = []
        for loss, *numbers, probability in rows:
            if loss >= 0:
                place, predicted, label = map(int, numbers)
                image = place if self.order is None else int(self.order[place])
                which = {"image": image, "predicted": predicted, "label": label}
                shown.append({"loss": loss, **which, "probability": probability})
        return shown

    @override
    def cross_slot_reduce(self, per_slot_metrics: list[tuple[Any, ...]]) -> dict[str, Any]:
        """Return the metrics of ``classify/config/metric_table.py`` and ``images``, as numbers."""
        confusions, losses, mistakes, unsure, views, top5, bins, scaled, fitted = zip(
            *per_slot_metrics, strict=True
        )
        self.confusion, self.bins = np.sum(confusions, axis=0), np.sum(bins, axis=0)
        self.mistakes, self.unsure = _hardest(mistakes), _hardest(unsure)
        counts = Counts(
            self.confusion,
            loss=sum(losses),
            right_by_views=sum(views) if self.how else None,
            in_top5=sum(top5) if len(self.classes) > 5 else None,
            bins=self.bins,
            **({"scaled_bins": np.sum(scaled, axis=0)} if self.temperature else _fit(fitted)),
        )
        return self._reported(counts, "accuracy", "loss")

    def _reported(self, counts: Counts, *first: str) -> dict[str, Any]:
        """Return the metrics of the counts; a terminal's line shows the metrics named ``first``."""
        values = computed(counts, self.classes)
        metrics = {**{name: values[name] for name in first}, "images": counts.images, **values}
        if self.throughput:
            metrics[SPEED_METRIC] = self.throughput.since_validation()
        return metrics


def _hardest(of_ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the images with the largest losses over all ranks."""
    images = [image for of_rank in of_ranks for image in of_rank]
    return sorted(images, key=lambda image: (-image["loss"], image["image"]))[:SHOWN]


def _fit(of_ranks: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    """Return the fields of ``Counts`` about a temperature; empty if no temperature can be fitted.

    Args:
        of_ranks: indices (N,), logits (N, C) and labels (N,) of each rank's images; empty for a rank without
            images.
    """
    if not any(of_ranks):
        return {}
    places, logits, labels = map(np.concatenate, zip(*filter(None, of_ranks), strict=True))
    order = np.argsort(places)  # the same images in the same order for any number of ranks
    logits, labels = logits[order], labels[order]
    if (found := confidence.fit(logits, labels)) is None:
        return {}
    temperature, threshold = found
    scaled = _bins(torch.from_numpy(logits / temperature), torch.from_numpy(labels)).numpy()
    return {"scaled_bins": scaled, "temperature": temperature, "threshold": threshold}


def _bins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return float64 (3, BINS): each bin's number of images, summed confidence, number of correct images."""
    certainty, predicted = logits.softmax(1).max(1)
    place = (certainty * BINS).long().clamp(max=BINS - 1)
    counted = torch.stack([torch.ones_like(certainty), certainty, (predicted == labels).float()]).double()
    return torch.zeros(3, BINS, dtype=torch.float64, device=logits.device).index_add_(1, place, counted)

"""Scores of a classifier, from counts alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of confidence, as in the paper on calibration


def of_classes(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """F1, recall and precision of each class, (C,); 0 where nothing was predicted, or there is no image.

    Args:
        confusion: int64 (C, C), rows are true classes.
    """
    right = confusion.diagonal().astype(np.float64)
    predicted, true = confusion.sum(0), confusion.sum(1)
    return {
        "f1": 2 * right / np.maximum(predicted + true, 1),
        "recall": right / np.maximum(true, 1),
        "precision": right / np.maximum(predicted, 1),
    }


def macro(confusion: np.ndarray) -> dict[str, float]:
    """The mean of each score over the classes that have images, as ``macro_precision`` and so on."""
    is_there = confusion.sum(1) > 0
    scores = of_classes(confusion).items()
    return {f"macro_{name}": float(each[is_there].mean()) if is_there.any() else 0.0 for name, each in scores}


def bins(logits: Tensor, labels: Tensor) -> Tensor:
    """What the calibration error needs of a batch, to be summed over batches.

    Args:
        logits: (B, C) float32.
        labels: (B,) int64.

    Returns:
        For each bin of confidence its images, their summed confidence, and how many are right: float64
        (3, BINS).
    """
    confidence, predicted = logits.softmax(1).max(1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    counted = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).float()]).double()
    return torch.zeros(3, BINS, dtype=torch.float64, device=logits.device).index_add_(1, place, counted)


def calibration_error(summed: np.ndarray) -> float:
    """The expected calibration error: how far confidence and accuracy are apart, a mean over the images.

    Source: https://arxiv.org/abs/1706.04599, in bins of equal width.

    Args:
        summed: of ``bins``, over all batches.
    """
    images, confidence, right = summed
    return float(np.abs(confidence - right).sum() / max(images.sum(), 1))

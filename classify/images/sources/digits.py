"""scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.settings import DataSettings

TESTED = 360  # the number of test images, of 1,797 images


class Digits:
    """1,797 handwritten digits (8x8, 17 grey values), enlarged; 1,437 to train and 360 to test.

    Source: https://archive.ics.uci.edu/dataset/80, in the copy of ``sklearn.datasets.load_digits``.
    """

    classes = tuple("0123456789")
    parts = ("train", "test")

    def __init__(self, settings: DataSettings) -> None:
        pass

    def count(self, part: str) -> int:
        """Return the number of digits in a part."""
        return {"train": 1797 - TESTED, "test": TESTED}[part]

    def class_counts(self, part: str) -> list[int]:
        """Return the number of a part's images of each digit."""
        return np.bincount(_chosen(part)[1]).tolist()

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return enlarged images (N, 3, H, W) uint8 and labels (N,) int64."""
        images, labels = _chosen(part)
        grey = torch.from_numpy(images).float().unsqueeze(1) * (255 / 16)
        large = torch.nn.functional.interpolate(grey, size=size, mode="bilinear", align_corners=False)
        images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
        return images, torch.from_numpy(labels).long()


def _chosen(part: str) -> tuple[Any, Any]:
    """Return a part's images (N, 8, 8) with values from 0 to 16, and its labels (N,)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    everything = np.arange(len(bunch.target))
    train, test = train_test_split(everything, test_size=TESTED, random_state=0, stratify=bunch.target)
    chosen = np.sort(train if part == "train" else test)
    return bunch.images[chosen], bunch.target[chosen]

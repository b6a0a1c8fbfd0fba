"""scikit-learn's handwritten digits, which need no download."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TESTED = 360  # of 1,797


class Digits:
    """1,797 handwritten digits (8x8, 16 greys), enlarged; 1,437 to train and 360 to test.

    Source: https://archive.ics.uci.edu/dataset/80, as shipped in ``sklearn.datasets.load_digits``.
    """

    classes = tuple("0123456789")

    def count(self, split: str) -> int:
        """How many digits a split has."""
        return {"train": 1797 - TESTED, "test": TESTED}[split]

    def load(self, split: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Enlarges a split: images (N, 3, H, W) uint8 and labels (N,) int64."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        bunch = load_digits()
        everything = np.arange(len(bunch.target))
        train, test = train_test_split(everything, test_size=TESTED, random_state=0, stratify=bunch.target)
        chosen = np.sort(train if split == "train" else test)
        grey = torch.from_numpy(bunch.images[chosen]).float().unsqueeze(1) * (255 / 16)
        large = torch.nn.functional.interpolate(grey, size=size, mode="bilinear", align_corners=False)
        images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
        return images, torch.from_numpy(bunch.target[chosen]).long()

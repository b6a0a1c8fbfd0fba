"""Random flips, crops and cutouts of whole micro-batches, drawn for each image and epoch from the seed alone.

So an image is changed in the same way for any number of processes, any accumulation, and after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from errors import InvalidInput, nearest


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image; nothing by default.

    Attributes:
        flip: mirror half of the images.
        crop: shift by up to so many pixels in each direction; zeros come in at the edge.
        cutout: put zeros in a square of so many pixels at a random place (https://arxiv.org/abs/1708.04552).
    """

    flip: bool = False
    crop: int = 0
    cutout: int = 0

    @classmethod
    def parse(cls, section: Mapping[str, Any] | None, size: int) -> Augmentation:
        """Checks ``data.augment`` for images of a size in pixels, and raises ``InvalidInput`` for all its faults."""
        section = {} if section is None else section
        if not isinstance(section, Mapping):
            raise InvalidInput(f"data.augment: {section!r}: must be a mapping, e.g. {{flip: true, crop: 4}}")
        faults = []
        for key, value in section.items():
            if key not in cls.__annotations__:
                faults.append(f"data.augment.{key}: {value!r}: unknown key; {nearest(key, cls.__annotations__)}")
            elif key == "flip" and not isinstance(value, bool):
                faults.append(f"data.augment.flip: {value!r}: must be true or false")
            elif key != "flip" and (type(value) is not int or not 0 <= value <= size):
                faults.append(f"data.augment.{key}: {value!r}: must be a whole number of pixels from 0 to {size}")
        if faults:
            raise InvalidInput(faults)
        return cls(**section)


class Augmenter:
    """Augments the images of one training set.

    Args:
        augmentation: what to do.
        count: the images of the set.
        size: their height and width in pixels.
        seed: the experiment's.
    """

    def __init__(self, augmentation: Augmentation, count: int, size: int, seed: int) -> None:
        self.augmentation, self.count, self.size, self.seed = augmentation, count, size, seed
        self._epoch = -1

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Gives images (B, 3, H, W) uint8 changed, where ``indices`` (B,) say which of the set they are."""
        if epoch != self._epoch:
            self._draw(epoch, images.device)
        chosen = self.augmentation
        if chosen.flip:
            images = torch.where(self._flips[indices].view(-1, 1, 1, 1), images.flip(3), images)
        if chosen.crop:
            padded = F.pad(images, (chosen.crop,) * 4)
            windows = padded.unfold(2, self.size, 1).unfold(3, self.size, 1)  # (B, 3, shifts, shifts, H, W)
            down, right = self._shifts[:, indices]
            images = windows[torch.arange(len(images), device=images.device), :, down, right]
        if chosen.cutout:
            place = torch.arange(self.size, device=images.device)
            inside = (place - self._corners[:, indices].unsqueeze(2) < chosen.cutout) & (
                place >= self._corners[:, indices].unsqueeze(2)
            )  # (2, B, size): rows, and columns
            hole = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
            images = images.masked_fill(hole.unsqueeze(1), 0)
        return images

    def _draw(self, epoch: int, device: torch.device) -> None:
        """Draws for every image of the set, in a fixed order, so that what a batch gets does not depend on batches."""
        random, chosen = np.random.default_rng((self.seed, epoch, 1)), self.augmentation
        self._epoch = epoch
        self._flips = torch.from_numpy(random.random(self.count) < 0.5).to(device)
        self._shifts = torch.from_numpy(random.integers(0, 2 * chosen.crop + 1, (2, self.count))).to(device)
        low, high = -(chosen.cutout // 2), self.size - (chosen.cutout + 1) // 2 + 1
        self._corners = torch.from_numpy(random.integers(low, high, (2, self.count))).to(device)

"""Random changes of training images; the seed, the epoch and the image determine the draws.

The changes of an image do not depend on the number of processes or the accumulation, and stay the same after
a resume. Flips, crops and cutouts process whole micro-batches, torchvision's transforms one image at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from classify.config.rules import Rule, elsewhere, is_number, one_of
from classify.config.sections import Keyed, key
from classify.images import transforms
from deepspeed_trial.errors import ErrorList, InvalidInput

OLDEST_KEYS = ("flip", "crop", "resized_crop", "cutout")  # keys that every checkpoint has
PIXELS = elsewhere("a whole number of pixels, at most the image's smaller side")


def _is_range(value: Any) -> bool:
    """Return whether the value is null or two ascending numbers above 0, at most 1."""
    if value is None:
        return True
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2 and all(is_number(v) for v in value)
    return is_pair and 0 < value[0] <= value[1] <= 1


@dataclass(frozen=True)
class Augmentation(Keyed):
    """The random changes of a training image; none by default.

    To add an augmentation, add a key here, a step in ``Augmenter.__call__``, and a random draw at the end of
    ``Augmenter._draw``: the other draws then stay unchanged.
    """

    flip: bool | str = key(
        False,
        one_of(False, True, "alternating"),
        "Mirrors a random half of the images in each epoch; `alternating`: each image in every other epoch"
        " (https://arxiv.org/abs/2404.00498).",
    )
    crop: int = key(
        0,
        PIXELS,
        "The largest random shift in each direction; images that `data.resize` enlarged are always cropped at"
        " a random place.",
        unit="pixels",
    )
    edge: str = key(
        "zeros",
        one_of("zeros", "reflection"),
        "The pixels that a shift by `crop` brings in: zeros, or the image's reflection.",
    )
    resized_crop: tuple[float, float] | None = key(
        None,
        Rule(_is_range, "must be the smallest and the largest share of the area, e.g. [0.08, 1]"),
        "Crops a random part with an aspect ratio from 3:4 to 4:3, and scales it to the image's size"
        " (https://arxiv.org/abs/1409.4842).",
    )
    cutout: int = key(
        0,
        PIXELS,
        "The side of a square of zeros at a random place (https://arxiv.org/abs/1708.04552).",
        unit="pixels",
    )
    transforms: tuple[transforms.Entry, ...] = key(
        (),
        elsewhere(transforms.FORM.removeprefix("must be ").replace("a name", "a list of names", 1)),
        "Transforms of torchvision.transforms.v2, which run after crops and before `cutout`.",
    )

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that must stay the same on resume.

        A key that is not in ``OLDEST_KEYS`` is left out at its default, because older checkpoints lack it.
        """
        values = {
            name: getattr(self, name)
            for name, each in self.keys().items()
            if name in OLDEST_KEYS or getattr(self, name) != each.default
        }
        return json.loads(json.dumps(values))

    @classmethod
    def parse(cls, section: Mapping[str, Any] | None, sides: tuple[int, int]) -> Augmentation:
        """Check ``data.augment`` for images of a height and width.

        Raises:
            InvalidInput: with a line for each error.
        """
        section = {} if section is None else section
        if not isinstance(section, Mapping):
            raise InvalidInput(f"data.augment: {section!r}: must be a mapping, e.g. {{flip: true, crop: 4}}")
        size, errors = min(sides), ErrorList()
        values = cls.read("data.augment.", section, errors)

        def refuse(name: str, reason: str) -> None:
            errors.lines.append(f"data.augment.{name}: {values[name]!r}: {reason}")

        for name in ("crop", "cutout"):
            value = values.get(name, 0)
            if type(value) is not int or not 0 <= value <= size:
                refuse(name, f"must be a whole number of pixels from 0 to {size}")
        entries = values.pop("transforms", None)
        with errors.collecting():
            if entries is not None:
                values["transforms"] = transforms.parse("data.augment.transforms", entries, sides)
        if "edge" in values and not values.get("crop"):
            refuse("edge", "has no effect without crop; set crop, too")
        if values.get("edge") == "reflection" and values.get("crop") == size:
            most = f"reflection can pad an image of {size} pixels by at most {size - 1}"
            refuse("crop", f"{most}; use less, or edge: zeros")
        if values.get("crop") and values.get("resized_crop"):
            refuse("crop", "resized_crop also crops; remove one of the two")
        errors.raise_any()
        part = values.get("resized_crop")
        return cls(**{**values, "resized_crop": tuple(part) if part else None})


class Augmenter:
    """Augments the images of one training set.

    Args:
        augmentation: the random changes.
        count: the number of images in the set.
        stored: height and width of the stored images, in pixels.
        size: the height and width that the network sees.
        seed: the experiment's seed.
    """

    def __init__(
        self,
        augmentation: Augmentation,
        count: int,
        stored: tuple[int, int],
        size: tuple[int, int],
        seed: int,
    ) -> None:
        self.augmentation, self.count, self.seed = augmentation, count, seed
        self.size, self.transform = size, transforms.make(augmentation.transforms)
        # the last row and column at which a crop may begin in the padded image
        self.room = [side + 2 * augmentation.crop - seen for side, seen in zip(stored, size, strict=True)]
        self._epoch = -1

    def __call__(self, images: Tensor, draws: Tensor, epoch: int) -> Tensor:
        """Return the augmented images of a micro-batch.

        Args:
            images: the stored images, (B, 3, h, w) uint8.
            draws: (B,) int64, the index of each image's random draw in the epoch: the image's index, or its
                position in the epoch if images repeat.
            epoch: the epoch, from 0.

        Returns:
            Images (B, 3, H, W) uint8, of the size that the network sees.
        """
        if epoch != self._epoch:
            self._draw(epoch, images.device)
            self._epoch = epoch
        chosen = self.augmentation
        if chosen.resized_crop:
            grid = F.affine_grid(self._parts[draws], [len(images), 3, *self.size], align_corners=False)
            images = F.grid_sample(images.float(), grid, align_corners=False, padding_mode="border")
            images = images.round_().to(torch.uint8)
        elif chosen.flip or any(self.room):
            images = self._crops(images, draws)
        if self.transform:
            images = transforms.transform_each(self.transform, images, self._seeds[draws])
        if chosen.cutout:
            rows, columns = (
                _within(side, corners, chosen.cutout)
                for side, corners in zip(self.size, self._corners[:, draws], strict=True)
            )
            hole = rows.unsqueeze(2) & columns.unsqueeze(1)
            images = images.masked_fill(hole.unsqueeze(1), 0)
        return images

    def _crops(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop each padded image, or its mirror image.

        ``index_select`` copies whole rows, which is several times faster than indexing each pixel.
        """
        padded = _padded(images, self.augmentation.crop, self.augmentation.edge)
        either = torch.cat([padded, padded.flip(3)]) if self.augmentation.flip else padded
        (height, width), (seen, across) = padded.shape[2:], self.size
        down, right = self._shifts.index_select(1, draws)
        first = self._flips.index_select(0, draws) * padded.numel() + down * width + right
        planes = torch.arange(len(images) * 3, device=images.device).view(-1, 3, 1) * (height * width)
        rows = first.view(-1, 1, 1) + planes + torch.arange(seen, device=images.device) * width  # (B, 3, H)
        return (
            either.reshape(-1).unfold(0, across, 1).index_select(0, rows.view(-1)).view(-1, 3, seen, across)
        )

    def _draw(self, epoch: int, device: torch.device) -> None:
        """Draw the random numbers of every image of the set, in a fixed order."""
        random, chosen = np.random.default_rng((self.seed, epoch, 1)), self.augmentation
        flips = (random.random(self.count) < 0.5) & bool(chosen.flip)
        if chosen.flip == "alternating":
            first = np.random.default_rng((self.seed, 0, 1)).random(self.count) < 0.5
            flips = first if epoch % 2 == 0 else ~first
        self._flips = torch.from_numpy(flips).to(device)
        self._shifts = self._places(random, [0, 0], self.room).to(device)
        low, half = -(chosen.cutout // 2), (chosen.cutout + 1) // 2
        self._corners = self._places(random, [low, low], [side - half for side in self.size]).to(device)
        if chosen.resized_crop:
            area = random.uniform(*chosen.resized_crop, self.count)
            # The largest ln(width / height) at which no side exceeds the image
            most = np.minimum(np.log(4 / 3), -np.log(area))
            ratio = np.exp(random.uniform(-most, most))
            width, height = np.sqrt(area * ratio), np.sqrt(area / ratio)
            right, down = (random.uniform(-1, 1, self.count) * (1 - side) for side in (width, height))
            zero, sign = np.zeros(self.count), np.where(flips, -1, 1)
            parts = np.stack([np.stack([sign * width, zero, right], 1), np.stack([zero, height, down], 1)], 1)
            self._parts = torch.from_numpy(parts).float().to(device)  # (N, 2, 3), as affine_grid takes them
        if self.transform:
            self._seeds = torch.from_numpy(random.integers(2**63, size=self.count))

    def _places(self, random: np.random.Generator, least: list[int], most: list[int]) -> Tensor:
        """Draw a row and a column for every image, (2, N)."""
        pairs = zip(least, most, strict=True)
        return torch.from_numpy(np.stack([random.integers(a, b + 1, self.count) for a, b in pairs]))


def _within(side: int, starts: Tensor, size: int) -> Tensor:
    """Return a mask, bool (B, side), that is true at the ``size`` positions from each start on."""
    offsets = torch.arange(side, device=starts.device) - starts.unsqueeze(1)
    return (offsets >= 0) & (offsets < size)


def _padded(images: Tensor, border: int, edge: str) -> Tensor:
    """Return images (B, 3, h, w) uint8 with a border of zeros, or of each image's reflection."""
    if edge == "zeros" or not border:
        return F.pad(images, (border,) * 4)
    for axis in (2, 3):
        last = images.shape[axis] - 1
        places = torch.arange(-border, last + border + 1, device=images.device).abs()
        images = images.index_select(axis, last - (last - places).abs())
    return images

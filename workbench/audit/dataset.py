"""All images of an experiment as one sequence, in the order of their splits."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.listing import ListedSource
from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.images.sources.left_out import image_names
from classify.reports import classification_log
from deepspeed_trial.errors import InvalidInput

CHUNK = 64  # the maximum number of images in a batch


@dataclass(frozen=True)
class Dataset:
    """The images of all splits.

    Attributes:
        plan: the plan of the data.
        sets: the images of each split.
        names: the name of each image, in the form of ``data.exclude``.
        splits: the split of each image.
        labels: int64 (N,), indices into the plan's classes.
    """

    plan: DataPlan
    sets: Mapping[str, ImageSet]
    names: list[str]
    splits: np.ndarray
    labels: np.ndarray

    @classmethod
    def open(cls, section: Mapping[str, Any], size: tuple[int, int] | None = None) -> Dataset:
        """Open the images of the ``data`` section of an experiment file.

        Args:
            section: the section ``data``.
            size: height and width of the decoded images, in pixels; None for the section's size.

        Raises:
            InvalidInput: if a setting is wrong, or the data is missing or damaged.
        """
        if size is not None:
            section = {**section, "image_size": list(size), "resize": None}
        settings = DataSettings.parse(section)
        if settings.several_labels is not None:
            reason = "audits and heads need one label for each image; give other data"
            raise InvalidInput(f"data.several_labels: {settings.several_labels!r}: {reason}")
        plan = DataPlan.resolve(settings)
        sets, names, splits, labels = {}, list[str](), [], []
        for split in plan.names:
            images = sets[split] = plan.load(split)
            of_part = list(image_names(plan.source, plan.part_of(split)))
            names += of_part if images.rows is None else [of_part[row] for row in images.rows.tolist()]
            splits += [split] * len(images)
            labels.append(images.labels.numpy())
        return cls(plan, sets, names, np.array(splits), np.concatenate(labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self.plan.classes

    def rows(self, split: str) -> np.ndarray:
        """Return the indices of a split's images, int64 (M,)."""
        return np.flatnonzero(self.splits == split)

    def select(self, indices: np.ndarray) -> Tensor:
        """Return the images of indices (B,) in one split: (B, 3, h, w) uint8, cropped as in validation."""
        split = self.splits[indices[0]]
        images = self.sets[split]
        return images.center_crop(images.select(torch.from_numpy(indices - self.rows(split)[0])))

    def chunks(self) -> list[np.ndarray]:
        """Return the indices of all images in parts of at most 64, each of one split."""
        parts = []
        for split in self.sets:
            rows = self.rows(split)
            parts += np.split(rows, range(CHUNK, len(rows), CHUNK))
        return parts

    def batches(self) -> Iterator[Tensor]:
        """Yield all images in order, (B, 3, h, w) uint8."""
        yield from map(self.select, self.chunks())

    def picture(self, index: int) -> str:
        """Return an image as a PNG or JPEG file in base64."""
        (image,) = self.select(np.array([index]))
        return classification_log.picture(image.permute(1, 2, 0).numpy())

    def link(self, index: int) -> str | None:
        """Return the URL of an image's file; None if the image is in a shard or was never a file."""
        source, name = self.plan.source, self.names[index]
        if (
            not isinstance(source, ListedSource)
            or source.listing(self.plan.part_of(self.splits[index])).shards
        ):
            return None
        return pathlib.Path(source.base, name).absolute().as_uri()

    def digest(self) -> str:
        """Return the SHA-256 digest of the images, their size and their order; this reads all images."""
        digest = hashlib.sha256()
        for images in self.batches():
            digest.update(repr(tuple(images.shape)).encode())
            digest.update(images.numpy().tobytes())
        return digest.hexdigest()

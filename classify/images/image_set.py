"""One split of a dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from classify.images.settings import DataSettings
from classify.images.streamed import StreamedImages
from deepspeed_trial.errors import InvalidInput


@dataclass(frozen=True)
class ImageSet:
    """One split of a dataset: decoded, in memory or in a file that is mapped into it, or streamed.

    Attributes:
        held: images (N, 3, h, w) uint8, RGB, 0 to 255; or what decodes them when they are asked for.
        labels: int64 (M,), indices into ``classes``.
        classes: the class names.
        crop: height and width of what a network sees of each; all of it if None.
        rows: int64 (M,), which of the images are in the split; all of them, in their order, if None.
    """

    held: Tensor | StreamedImages
    labels: Tensor
    classes: tuple[str, ...]
    crop: tuple[int, int] | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> Tensor:
        """Images (B, 3, h, w) of the split, as they are kept, by their indices in it, (B,) int64."""
        return self.held.index_select(0, indices if self.rows is None else self.rows[indices])

    @property
    def images(self) -> Tensor:
        """Images (N, 3, h, w) uint8 that are not streamed, those of other splits with them."""
        assert isinstance(self.held, Tensor)
        return self.held

    @property
    def is_streamed(self) -> bool:
        """Whether images are decoded when they are asked for."""
        return not isinstance(self.held, Tensor)

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.held.device

    def prepare(self, indices: Tensor) -> bool:
        """Has streamed images (B,) decoded and kept; gives whether that is so, and ``select`` only reads."""
        rows = indices if self.rows is None else self.rows[indices]
        return isinstance(self.held, StreamedImages) and self.held.prepare(rows)

    def pixels(self, index: int) -> np.ndarray:
        """One image, uint8 (h, w, 3)."""
        return self.select(torch.tensor([index], device=self.device))[0].permute(1, 2, 0).cpu().numpy()

    def to(self, device: torch.device) -> ImageSet:
        """The same set in a device's memory, with no other images."""
        images = self.images if self.rows is None else self.images.index_select(0, self.rows)
        return dataclasses.replace(self, held=images.to(device), labels=self.labels.to(device), rows=None)

    def center_crop(self, images: Tensor) -> Tensor:
        """The middle of images (B, 3, h, w), as validation sees them."""
        if self.crop is None or tuple(images.shape[2:]) == self.crop:
            return images
        return functional.center_crop(images, list(self.crop))


def places(sizes: Sequence[int], settings: DataSettings, device: torch.device) -> list[torch.device]:
    """Where ``data.device`` wants sets: in the memory of the device that trains, or in the host's.

    Args:
        sizes: their bytes, of the training images first; these stay on the host where they are transformed.
        settings: the checked ``data`` section.
        device: the one that trains.

    Raises:
        InvalidInput: if they have to be on the device and do not fit.
    """
    chosen = [torch.device("cpu")] * len(sizes)
    if device.type == "cpu" or settings.device == "cpu":
        return chosen
    free = torch.cuda.mem_get_info(device)[0]
    for index, size in enumerate(sizes):
        if index == 0 and settings.augment.transforms:
            continue
        if settings.device == "cuda" and size > free:
            shown = f"{size / 2**20:,.0f} MiB of images, but {free / 2**20:,.0f} MiB are free on the GPU"
            raise InvalidInput(f"data.device: 'cuda': {shown}; use auto")
        if settings.device == "cuda" or size < free / 2:
            chosen[index], free = device, free - size
    return chosen

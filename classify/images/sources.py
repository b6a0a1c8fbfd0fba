"""Where images come from: one class a dataset, by the name in ``data.dataset``.

A new source is one more class with these members, in a file of its own, and one more row in ``SOURCES``.
Every rank calls ``load``: what takes long is done once a host by ``harness.host_lock`` and kept by
``cache``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from classify.images.cifar10 import Cifar10
from classify.images.digits import Digits
from classify.images.image_folder import ImageFolder


class Source(Protocol):
    """A dataset with a split ``train`` and a split ``test``.

    Members raise ``InvalidInput`` where the data is missing, damaged or not usable, naming the folder or
    file.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        ...

    def count(self, split: str) -> int:
        """How many images a split has, without decoding them."""
        ...

    def load(self, split: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decodes a split: images (N, 3, H, W) uint8 of this height and width, and labels (N,) int64."""
        ...


# Each makes a source from data.root and data.download.
SOURCES: dict[str, Callable[[pathlib.Path, bool], Source]] = {
    "cifar10": Cifar10,
    "digits": lambda root, download: Digits(),
    "imagefolder": lambda root, download: ImageFolder(root),
}

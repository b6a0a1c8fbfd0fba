"""Where images come from: one class a dataset, by the name in ``data.dataset``.

A new source is one more class with these members, in a file of its own, and one more row in ``SOURCES``.
Every rank calls ``load``: what takes long is done once a host by ``harness.host_lock`` and kept by
``cache``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from classify.images.cifar10 import Cifar10
from classify.images.digits import Digits
from classify.images.image_folder import ImageFolder


class Source(Protocol):
    """A dataset with a part ``train`` and a part ``test`` or ``val``, or all in one part.

    Which images of them train, validate and test is the business of ``splits.py``. Members raise
    ``InvalidInput`` where the data is missing, damaged or not usable, naming the folder or file.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or ``all`` alone."""
        ...

    def count(self, part: str) -> int:
        """How many images a part has, without decoding them."""
        ...

    def class_counts(self, part: str) -> Sequence[int]:
        """How many images of each class a part has."""
        ...

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decodes a part: images (N, 3, H, W) uint8 of this height and width, and labels (N,) int64."""
        ...


# Each makes a source from data.root and data.download.
SOURCES: dict[str, Callable[[pathlib.Path, bool], Source]] = {
    "cifar10": Cifar10,
    "digits": lambda root, download: Digits(),
    "imagefolder": lambda root, download: ImageFolder(root),
}

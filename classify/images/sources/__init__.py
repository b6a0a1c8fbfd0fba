"""Where images come from: one class a kind of dataset, by the name in ``data.dataset``.

A new kind is one more class with the members of ``Source``, in a file of its own, and one more row in
``SOURCES``; of encoded images it has only to give those of ``EncodedSource``. Every rank calls ``load``: what
takes long is done once a host by ``deepspeed_trial.host_lock`` and kept by ``cache``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from classify.config import rules
from classify.images.sources.cifar10 import Cifar10
from classify.images.sources.digits import Digits
from classify.images.sources.encoded import EncodedImages, Location
from classify.images.sources.image_folder import ImageFolder
from classify.images.sources.listed import own, table
from classify.images.sources.tar_shards import TarShards
from deepspeed_trial.errors import InvalidInput, one_line


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

    def encoded(self, part: str) -> EncodedImages | None:
        """The encoded images of a part; None of a source that decodes its own."""
        ...

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decodes a part: images (N, 3, H, W) uint8 of this height and width, and labels (N,) int64."""
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of dataset.

    Attributes:
        make: gives the source at a location.
        of_any_size: whether its images have no size of their own.
        most_pixels: of the side of an image as it is decoded.
    """

    make: Callable[[Location], Source]
    of_any_size: bool = True
    most_pixels: int = rules.MOST_PIXELS


def _parquet(location: Location) -> Source:
    try:
        from classify.images.sources.parquet_shards import ParquetShards  # whose library takes a while
    except ImportError as error:
        what = f"needs pyarrow ({one_line(error)}); pip install pyarrow"
        raise InvalidInput(f"data.dataset: 'parquet': {what}") from error
    return ParquetShards(location)


SOURCES = {
    "cifar10": Kind(Cifar10, of_any_size=False),
    "digits": Kind(Digits, of_any_size=False, most_pixels=512),  # which are enlarged in memory
    "imagefolder": Kind(ImageFolder),
    "webdataset": Kind(TarShards),
    "parquet": Kind(_parquet),
    "table": Kind(table),
}


def kind_of(dataset: str) -> Kind | None:
    """The kind that ``data.dataset`` names: one of ``SOURCES``, or a file of one's own; None of any other."""
    if dataset.endswith(".py"):
        return Kind(functools.partial(own, dataset))
    return SOURCES.get(dataset)

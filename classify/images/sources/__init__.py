"""Sources of images: a class for each kind of dataset, by the name in ``data.dataset``.

To add a kind, write a class in a module, and add its name to ``SOURCES`` and ``DATASETS``. The class derives
from ``ListedSource`` if its images are encoded (JPEG, PNG ...), or has the members of ``DecodedSource``.
Every rank calls ``load``, which does long work once per host, under ``deepspeed_trial.host_lock``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from classify.images.listing import ListedSource
from classify.images.settings import DataSettings
from classify.images.sources.cifar10 import Cifar10
from classify.images.sources.digits import Digits
from classify.images.sources.image_folder import ImageFolder
from classify.images.sources.listed import own_source, table
from classify.images.sources.tar_shards import TarShards
from deepspeed_trial.errors import InvalidInput, one_line


class DecodedSource(Protocol):
    """A source that decodes its images.

    If the data is missing, damaged or unusable, all members raise ``InvalidInput`` with the folder or file.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: ``train`` with ``test``, ``val`` or both; or only ``all``."""

    def count(self, part: str) -> int:
        """Return the number of images in a part, without decoding them."""

    def class_counts(self, part: str) -> Sequence[int]:
        """Return the number of a part's images in each class."""

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return images (N, 3, H, W) uint8 of the given height and width, and labels (N,) int64."""


Source = ListedSource | DecodedSource


def _parquet(settings: DataSettings) -> Source:
    try:
        from classify.images.sources.parquet_shards import ParquetShards  # pyarrow takes a while to import
    except ImportError as error:
        reason = f"needs pyarrow ({one_line(error)}); pip install pyarrow"
        raise InvalidInput(f"data.dataset: 'parquet': {reason}") from error
    return ParquetShards(settings)


SOURCES: dict[str, Callable[[DataSettings], Source]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "imagefolder": ImageFolder,
    "webdataset": TarShards,
    "parquet": _parquet,
    "table": table,
}


def open_source(settings: DataSettings) -> Source:
    """Open the dataset of ``data.dataset``: a name in ``SOURCES``, or a user's file."""
    return own_source(settings) if settings.dataset.endswith(".py") else SOURCES[settings.dataset](settings)

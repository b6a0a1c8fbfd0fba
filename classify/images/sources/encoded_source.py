"""A source of encoded images: what all of them have in common."""

from __future__ import annotations

import abc
import functools
import pathlib

from torch import Tensor

from classify.images import cache
from classify.images.growing_cache import GrowingCache
from classify.images.sources import shard_cache
from classify.images.sources.decode_once import decode_all
from classify.images.sources.encoded import EncodedImages, Fetch, Location, ShardFile
from classify.images.sources.remote import is_remote
from classify.images.streamed import StreamedImages

_CACHE_FORMAT = 6  # of what is kept decoded; another one is decoded anew


class EncodedSource(abc.ABC):
    """A source of encoded images: what it gives besides follows from ``encoded``.

    Args:
        location: of the dataset.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    @property
    @abc.abstractmethod
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or ``all`` alone."""

    @abc.abstractmethod
    def encoded(self, part: str) -> EncodedImages:
        """The images of a part, listed once."""

    def count(self, part: str) -> int:
        """How many images a part has."""
        return len(self.encoded(part).labels)

    def class_counts(self, part: str) -> list[int]:
        """How many images of each class a part has."""
        return self.encoded(part).labels.bincount(minlength=len(self.classes)).tolist()

    def shard_file(self, fetch: Fetch) -> ShardFile:
        """What gives the local file of a shard: itself, or what was fetched, once a host.

        Args:
            fetch: of the images that the shards hold.
        """
        folder = self.location.cache_folder / shard_cache.FOLDER
        kept = shard_cache.ShardCache(folder, self.location.limit)
        return lambda shard: kept.file(shard, fetch) if is_remote(shard.url) else pathlib.Path(shard.url)

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decodes a part, or takes it from the cache where that is still true to the dataset.

        Args:
            part: one of ``parts``.
            size: height and width to scale to, in pixels; other shapes are cropped in the middle.

        Returns:
            Images (N, 3, H, W) uint8, labels (N,) int64.

        Raises:
            InvalidInput: if something is missing, empty, damaged or not readable.
        """
        images = self.encoded(part)
        kept, fingerprint = self._cache(part, size)
        fill = functools.partial(decode_all, images, self.shard_file(images.fetch), size, part)
        return kept.read(fingerprint, images.labels) or kept.write(fingerprint, images.labels, fill)

    def stream(self, part: str, size: tuple[int, int], keeps: bool) -> tuple[Tensor | StreamedImages, Tensor]:
        """The same, but images are decoded when they are asked for, unless the cache has them already.

        Args:
            part: one of ``parts``.
            size: height and width to scale to, in pixels; other shapes are cropped in the middle.
            keeps: whether the cache takes in what is decoded.
        """
        images = self.encoded(part)
        kept, fingerprint = self._cache(part, size)
        if whole := kept.read(fingerprint, images.labels):
            return whole
        growing = GrowingCache(kept, fingerprint, images.labels) if keeps else None
        return StreamedImages(images, self.shard_file(images.fetch), size, growing), images.labels

    def _cache(self, part: str, size: tuple[int, int]) -> tuple[cache.Cache, str]:
        """Where a part is kept decoded, and what it is decoded from."""
        kept = cache.Cache(self.location.folder, f"images-{part}", size)
        return kept, f"{_CACHE_FORMAT} {size} {self.encoded(part).fingerprint}"

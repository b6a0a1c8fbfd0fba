"""A source without the images that the file of ``data.exclude`` names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.listing import ListedSource, WithoutSome
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.input_files import parsed, refused, small_file

LONGEST = 2**26  # the maximum bytes of the file
_SHOWN = 20  # the maximum of error lines; a count of the others follows


def image_names(source: Any, part: str) -> Iterator[str]:
    """Yield the names of a part's images, in the order of their indices.

    A file's name is its path relative to ``data.root``. The name of an image in a shard is the shard and the
    image's position in it, from 0: ``train-000.tar#17``. The name of an image of a ``DecodedSource`` is the
    part and the index: ``train/17``.

    Args:
        source: a ``ListedSource`` or ``DecodedSource``.
        part: the name of a part.
    """
    if not isinstance(source, ListedSource):
        yield from (f"{part}/{index}" for index in range(source.count(part)))
        return
    listing, root = source.listing(part), os.path.join(source.location.base, "")
    if not listing.shards:
        yield from (listing.name(index).removeprefix(root) for index in range(len(listing.labels)))
        return
    places = listing.places_of(np.arange(len(listing.labels)))
    for place, number in zip(places.tolist(), listing.shards_of(places).tolist(), strict=True):
        shard = listing.shards[number]
        yield f"{shard.url.removeprefix(root)}#{place - shard.start}"


def excluding(source: Any, file: str, size: tuple[int, int]) -> tuple[Any, str | None]:
    """Return a source without some images, and the record of these images in checkpoints.

    A training is the same as with a dataset that never had these images.

    Args:
        source: a ``ListedSource`` or ``DecodedSource``.
        file: a UTF-8 text file with a name per line; blank lines and lines that begin with ``#`` are ignored.
        size: height and width of decoded images, in pixels.

    Raises:
        InvalidInput: if the file cannot be read, or a class of a part would have no images; with a line for
            each of the first 20 names that the dataset lacks.
    """
    lines = _lines(file)
    left_out, known = dict[str, list[int]](), set[str]()
    for part in source.parts:
        found = {index: name for index, name in enumerate(image_names(source, part)) if name in lines}
        left_out[part] = list(found)
        known.update(found.values())
    errors = [
        f"data.exclude: {file}, line {number}: {printable(name)}: the dataset has no such image; remove it"
        for name, number in lines.items()
        if name not in known
    ]
    if len(errors) > _SHOWN:
        more = f"{len(errors) - _SHOWN:,} more lines do not name an image; write the list again"
        errors = [*errors[:_SHOWN], f"data.exclude: {file}: {more}"]
    if errors:
        raise InvalidInput(errors)
    is_listed = isinstance(source, ListedSource)
    excluded: Any = WithoutSome(source, left_out) if is_listed else ExcludedPixels(source, left_out, size)
    for part in source.parts:
        counts = zip(source.classes, source.class_counts(part), excluded.class_counts(part), strict=True)
        errors += [
            f"data.exclude: {file}: leaves no image of the class {name!r} in {part!r}; remove some lines"
            for name, before, after in counts
            if before and not after
        ]
    if errors:
        raise InvalidInput(errors)
    return excluded, _identity(left_out)


def _lines(file: str) -> dict[str, int]:
    """Return the names in a file, and the number of each line."""
    remedy = "give a text file with the name of an image in each line"
    with refused(f"data.exclude: {file}", remedy):
        content = small_file(file, LONGEST)
    with parsed(f"data.exclude: {file}: is not text in UTF-8", remedy):
        text = content.decode("utf-8-sig")
    numbered = ((line.strip("\r"), number) for number, line in enumerate(text.split("\n"), 1))
    return {line.removeprefix("./"): number for line, number in numbered if line.strip() and line[0] != "#"}


class ExcludedPixels:
    """A source of decoded images without some of them; see ``DecodedSource``.

    Args:
        source: the source with all its images.
        left_out: the indices of the excluded images in each part.
        size: height and width of decoded images, in pixels.
    """

    def __init__(self, source: Any, left_out: Mapping[str, list[int]], size: tuple[int, int]) -> None:
        self._source, self._left_out, self._size = source, left_out, size
        self.classes, self.parts = source.classes, source.parts

    def count(self, part: str) -> int:
        """Return the number of images in a part."""
        return self._source.count(part) - len(self._left_out[part])

    def class_counts(self, part: str) -> list[int]:
        """Return the number of a part's images in each class."""
        if not self._left_out[part]:
            return list(self._source.class_counts(part))
        labels = self.load(part, self._size)[1]
        return labels.bincount(minlength=len(self.classes)).tolist()

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return images (N, 3, H, W) uint8 of this height and width, and labels (N,) int64."""
        images, labels = self._source.load(part, size)
        rows = torch.from_numpy(np.delete(np.arange(len(labels)), self._left_out[part]))
        return (images[rows], labels[rows]) if self._left_out[part] else (images, labels)


def _identity(left_out: Mapping[str, list[int]]) -> str | None:
    """Return the record of the excluded images in checkpoints; None if there are none."""
    if not any(left_out.values()):
        return None
    digest = hashlib.sha256(repr(sorted(left_out.items())).encode()).hexdigest()[:8]
    return f"excluded: {sum(map(len, left_out.values())):,}, digest {digest}"

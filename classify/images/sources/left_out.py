"""The images that a run leaves out: by ``data.exclude``, or because they cannot be decoded."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.decode import UnreadableImage
from classify.images.listing import ListedSource, Listing, Shard, raise_some
from classify.images.pixel_files import remove_images
from classify.images.pixels import file_of, fingerprint_of, try_all
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.host_lock import stand_in
from deepspeed_trial.input_files import parsed, refused, small_file

LONGEST = 2**26  # the maximum bytes of the file of ``data.exclude``


class Subset(Listing):
    """A listing without some of its images.

    Args:
        images: the listing of all images.
        without: the indices of the images to leave out.
    """

    def __init__(self, images: Listing, without: Iterable[int]) -> None:
        self._images, self._without = images, sorted(without)
        self._rows = np.delete(np.arange(len(images.labels)), self._without)
        self.labels = images.labels[self._rows]
        self.column = images.column and [images.column[row] for row in self._rows.tolist()]
        every = images.places_of(self._rows)
        ordered = np.sort(every)
        self.places = np.searchsorted(ordered, every) if images.shards else None
        bounds = [np.searchsorted(ordered, (shard.start, shard.stop)).tolist() for shard in images.shards]
        self.shards: Sequence[Shard] = [
            dataclasses.replace(shard, start=start, stop=stop)
            for shard, (start, stop) in zip(images.shards, bounds, strict=True)
            if start < stop
        ]

    @property
    def fingerprint(self) -> str:
        """A digest that changes if an image, a label or the order changes."""
        return hashlib.sha256(repr((self._images.fingerprint, self._without)).encode()).hexdigest()

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of an image; raise ``InvalidInput`` with its name if it is unreadable."""
        return self._images.read(int(self._rows[index]))

    def name(self, index: int) -> str:
        """Return the name of an image in error lines."""
        return self._images.name(int(self._rows[index]))

    def local_file(self, shard: Shard) -> pathlib.Path:
        """Return the file of a shard, fetched if it is remote."""
        return self._images.local_file(shard)


class WithoutSome(ListedSource):
    """A source without some of its images.

    Args:
        source: the source with all its images.
        left_out: the indices of the images to leave out, by part.
    """

    classes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    passed_over: Mapping[str, int] = {}

    def __init__(self, source: ListedSource, left_out: Mapping[str, Collection[int]]) -> None:
        super().__init__(source.location)
        self.classes, self.parts, self.passed_over = source.classes, source.parts, source.passed_over
        self._listings = {part: source.listing(part) for part in source.parts}
        for part, rows in left_out.items():
            self._listings[part] = Subset(self._listings[part], rows) if rows else self._listings[part]

    def listing(self, part: str) -> Listing:
        """Return the remaining images of a part."""
        return self._listings[part]


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
    raise_some(errors, "lines do not name an image; write the list again", f"data.exclude: {file}")
    is_listed = isinstance(source, ListedSource)
    excluded: Any = WithoutSome(source, left_out) if is_listed else ExcludedPixels(source, left_out, size)
    errors = [
        f"data.exclude: {file}: leaves no image of the class {name!r} in {part!r}; remove some lines"
        for name, part, _ in _emptied(source, excluded)
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


def without_unreadable(
    source: ListedSource, settings: DataSettings, keeps: bool
) -> tuple[ListedSource, dict[str, dict[int, str]]]:
    """Return a source without its unreadable images, and these images, as ``unreadable`` does.

    Raises:
        InvalidInput: if a file is missing or cannot be fetched, or all images of a class are unreadable.
    """
    left_out = unreadable(source, settings, keeps)
    readable = WithoutSome(source, left_out)
    for name, part, count in _emptied(source, readable):
        reason = f"none of the {count:,} images of the class {name!r} in {part!r} can be read"
        raise InvalidInput(f"data.unreadable: 'skip': {reason}; replace some, or remove the class")
    return readable, left_out


def unreadable(
    source: ListedSource, settings: DataSettings, keeps: bool = False
) -> dict[str, dict[int, str]]:
    """Return the unreadable images of each part: their indices, and an error line for each.

    One process of a host decodes all images of a part once, and stores the list next to the decoded images.
    The list depends only on the part's files and the size. So it is the same for any number of processes and
    after a resume.

    Args:
        source: the source of the images.
        settings: the settings that give the images' size and fit.
        keeps: whether to store the decoded images, too, for ``open_pixels``.

    Raises:
        InvalidInput: if a file is missing or cannot be fetched.
    """
    return {part: _of_part(source, part, settings, keeps) for part in source.parts}


def _of_part(source: ListedSource, part: str, settings: DataSettings, keeps: bool) -> dict[int, str]:
    images = source.listing(part)
    fingerprint = images.fingerprint  # raises if a file is missing
    file = file_of(source, part, settings)
    for folder in (file.root, stand_in(file.root)):
        if (lines := _read(file.path(folder, "unreadable"), images)) is not None:
            return lines
    with file.lock() as folder:
        target = file.path(folder, "unreadable")
        if (lines := _read(target, images)) is not None:  # another process was first
            return lines
        found = dict[int, str]()

        def fill(pixels: pathlib.Path | None) -> tuple[str, Tensor]:
            name = part if keeps else f"{part} to find unreadable"
            errors = try_all(images, settings, name, pixels)
            others = [error for error in errors.values() if not isinstance(error, UnreadableImage)]
            raise_some([line for error in others for line in error.errors])
            found.update((index, error.errors[0]) for index, error in sorted(errors.items()))
            if pixels:
                remove_images(pixels, len(images.labels), list(found))
            others_left = Subset(images, found) if found else images
            return fingerprint_of(others_left, settings), others_left.labels

        if file.read(fingerprint_of(images, settings), images.labels) is not None:
            pass  # all images have been decoded
        elif keeps:
            file.write(folder, len(images.labels), fill)
        else:
            fill(None)
        with refused(str(target)):
            partial = target.with_suffix(".partial")
            partial.write_text(json.dumps({"fingerprint": fingerprint, "lines": found}))
            partial.replace(target)
    return found


def _emptied(source: Any, left: Any) -> Iterator[tuple[str, str, int]]:
    """Yield each class of a part that has no image left: class, part, and its number of images before."""
    for part in source.parts:
        counts = zip(source.classes, source.class_counts(part), left.class_counts(part), strict=True)
        yield from ((name, part, before) for name, before, after in counts if before and not after)


def _read(file: pathlib.Path, images: Listing) -> dict[int, str] | None:
    """Return a stored list; None if there is none, or it lists other images."""
    with contextlib.suppress(Exception):  # a damaged file fails in many ways, and a new list replaces it
        kept = json.loads(file.read_bytes())
        lines = {int(index): str(line) for index, line in kept["lines"].items()}
        if kept["fingerprint"] == images.fingerprint and all(
            0 <= each < len(images.labels) for each in lines
        ):
            return lines
    return None

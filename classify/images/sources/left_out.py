"""The images that a run leaves out: by ``data.exclude``, or because they cannot be decoded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.decode import UnreadableImage
from classify.images.listing import ALL, ListedSource, Rows, counts_of, raise_some
from classify.images.pixels import file_of, fingerprint_of, try_all
from classify.images.settings import SKIP, DataSettings
from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.host_lock import stand_in
from deepspeed_trial.input_files import parsed, refused, small_file
from deepspeed_trial.output_files import replacing

LONGEST = 2**26  # the maximum bytes of the file of ``data.exclude``


def labels_of(source: Any, part: str, rows: Rows, settings: DataSettings) -> Tensor:
    """Return the labels of images of a part, int64 (M,), or uint8 (M, C) of 0 and 1.

    The labels of a whole part of a ``DecodedSource`` are in the order of the classes; this loads no image.
    """
    if isinstance(source, ListedSource):
        return source.listing(part).labels[rows]
    if isinstance(rows, slice):
        return torch.arange(len(source.classes)).repeat_interleave(torch.tensor(source.class_counts(part)))
    return source.load(part, settings.stored_size)[1][rows]


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
    listing, root = source.listing(part), os.path.join(source.base, "")
    if not listing.shards:
        yield from (listing.name(index).removeprefix(root) for index in range(len(listing.labels)))
        return
    places = listing.places_of(np.arange(len(listing.labels)))
    for place, number in zip(places.tolist(), listing.shards_of(places).tolist(), strict=True):
        shard = listing.shards[number]
        yield f"{shard.url.removeprefix(root)}#{place - shard.start}"


def excluding(source: Any, settings: DataSettings) -> tuple[Mapping[str, Rows], str | None]:
    """Return the images that ``data.exclude`` keeps, and the record of the others in checkpoints.

    A training is the same as with a dataset that never had the others.

    Args:
        source: a ``ListedSource`` or ``DecodedSource``.
        settings: ``exclude`` is a UTF-8 text file with a name per line; blank lines and lines that begin with
            ``#`` are ignored.

    Raises:
        InvalidInput: if the file cannot be read, or a class of a part would have no images; with a line for
            each of the first 20 names that the dataset lacks.
    """
    everything: dict[str, Rows] = dict.fromkeys(source.parts, ALL)
    if (file := settings.exclude) is None:
        return everything, None
    lines, left_out, known = _lines(file), dict[str, list[int]](), set[str]()
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
    kept = _without(source, everything, left_out)
    errors = [
        f"data.exclude: {file}: leaves no image of the class {name!r} in {part!r}; remove some lines"
        for name, part, _ in _emptied(source, everything, kept, settings)
    ]
    if errors:
        raise InvalidInput(errors)
    return kept, _identity("excluded", left_out, sorted(left_out.items()))


def _lines(file: str) -> dict[str, int]:
    """Return the names in a file, and the number of each line."""
    remedy = "give a text file with the name of an image in each line"
    with refused(f"data.exclude: {file}", remedy):
        content = small_file(file, LONGEST)
    with parsed(f"data.exclude: {file}: is not text in UTF-8", remedy):
        text = content.decode("utf-8-sig")
    numbered = ((line.strip("\r"), number) for number, line in enumerate(text.split("\n"), 1))
    return {line.removeprefix("./"): number for line, number in numbered if line.strip() and line[0] != "#"}


def _without(
    source: Any, kept: Mapping[str, Rows], left_out: Mapping[str, Collection[int]]
) -> Mapping[str, Rows]:
    """Return the kept images of each part without some others."""
    fewer = {part: np.arange(source.count(part))[kept[part]] for part, rows in left_out.items() if rows}
    return {**kept, **{part: np.setdiff1d(rows, list(left_out[part])) for part, rows in fewer.items()}}


def _identity(verb: str, left_out: Mapping[str, list[int]], listed: object) -> str | None:
    """Return the record of left-out images in checkpoints; None if there are none."""
    digest = hashlib.sha256(repr(listed).encode()).hexdigest()[:8]
    count = sum(map(len, left_out.values()))
    return f"{verb}: {count:,}, digest {digest}" if count else None


def without_unreadable(
    source: Any, settings: DataSettings, kept: Mapping[str, Rows], keeps: bool
) -> tuple[Mapping[str, Rows], list[str], str | None]:
    """Return the images that ``data.unreadable`` keeps, an error line for each other, and their record.

    ``unreadable`` describes the arguments.

    Raises:
        InvalidInput: if a file is missing or cannot be fetched, or all images of a class are unreadable.
    """
    if settings.unreadable != SKIP:
        return kept, [], None
    if not isinstance(source, ListedSource):
        raise InvalidInput(f"data.unreadable: 'skip': {settings.dataset} has no image files; remove it")
    left_out, places = unreadable(source, settings, kept, keeps), dict[str, list[int]]()
    readable = _without(source, kept, left_out)
    for name, part, count in _emptied(source, kept, readable, settings):
        reason = f"none of the {count:,} images of the class {name!r} in {part!r} can be read"
        raise InvalidInput(f"data.unreadable: 'skip': {reason}; replace some, or remove the class")
    for part, lines in left_out.items():  # counted without the excluded images
        places[part] = np.searchsorted(np.arange(source.count(part))[kept[part]], list(lines)).tolist()
    every = [line for lines in left_out.values() for line in lines.values()]
    return readable, every, _identity("left out", places, places)


def unreadable(
    source: ListedSource, settings: DataSettings, kept: Mapping[str, Rows], keeps: bool = False
) -> dict[str, dict[int, str]]:
    """Return the unreadable images of each part: their indices, and an error line for each.

    One process of a host decodes all images once, and stores the list next to the decoded images. The list
    depends only on the files and the size. So it is the same for any number of processes and after a resume.

    Args:
        source: the source of the images.
        settings: the settings that give the images' size and fit.
        kept: the images of each part.
        keeps: whether to store the decoded images, too, for ``open_pixels``.

    Raises:
        InvalidInput: if a file is missing or cannot be fetched.
    """
    return {part: _of_part(source, part, settings, rows, keeps) for part, rows in kept.items()}


def _of_part(
    source: ListedSource, part: str, settings: DataSettings, rows: Rows, keeps: bool
) -> dict[int, str]:
    images = source.listing(part)
    fingerprint = images.digest(rows)  # raises if a file is missing
    file = file_of(source, part, settings)
    for folder in (file.root, stand_in(file.root)):
        if (lines := _read(file.path(folder, "unreadable"), fingerprint)) is not None:
            return lines
    with file.lock() as folder:
        target = file.path(folder, "unreadable")
        if (lines := _read(target, fingerprint)) is not None:  # another process was first
            return lines
        found = dict[int, str]()

        def fill(pixels: pathlib.Path | None) -> tuple[str, Tensor, int]:
            name = part if keeps else f"{part} to find unreadable"
            errors = try_all(images, settings, name, pixels, rows)
            others = [error for error in errors.values() if not isinstance(error, UnreadableImage)]
            raise_some([line for error in others for line in error.errors])
            found.update((index, error.errors[0]) for index, error in sorted(errors.items()))
            left = _without(source, {part: rows}, {part: found})[part]
            return fingerprint_of(images, left, settings), images.labels, len(images.labels[left])

        if file.read(fingerprint_of(images, rows, settings), images.labels) is not None:
            pass  # all images have been decoded
        elif keeps:
            file.write(folder, len(images.labels[rows]), fill)
        else:
            fill(None)
        with refused(str(target)), replacing(target) as partial:
            partial.write_text(json.dumps({"fingerprint": fingerprint, "lines": found}))
    return found


def _emptied(
    source: Any, before: Mapping[str, Rows], after: Mapping[str, Rows], settings: DataSettings
) -> Iterator[tuple[str, str, int]]:
    """Yield each class of a part that has no image left: class, part, and its number of images before."""
    for part in source.parts:
        labels = (labels_of(source, part, rows[part], settings) for rows in (before, after))
        counts = (counts_of(each, len(source.classes)) for each in labels)
        named = zip(source.classes, *counts, strict=True)
        yield from ((name, part, was) for name, was, now in named if was and not now)


def _read(file: pathlib.Path, fingerprint: str) -> dict[int, str] | None:
    """Return a stored list; None if there is none, or it lists other images."""
    with contextlib.suppress(Exception):  # a damaged file fails in many ways, and a new list replaces it
        kept = json.loads(file.read_bytes())
        if kept["fingerprint"] == fingerprint:
            return {int(index): str(line) for index, line in kept["lines"].items()}
    return None

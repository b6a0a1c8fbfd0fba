"""Finds the images that cannot be decoded, which ``data.unreadable: skip`` leaves out."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping

from torch import Tensor

from classify.images.decode import UnreadableImage
from classify.images.listing import ListedSource, Listing, Subset, counts_of, raise_some
from classify.images.pixel_files import remove_images
from classify.images.pixels import file_of, fingerprint_of, try_all
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import stand_in
from deepspeed_trial.input_files import refused


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


def refuse_empty_classes(source: ListedSource, left_out: Mapping[str, Mapping[int, str]]) -> None:
    """Raise ``InvalidInput`` if all images of a class in a part are unreadable."""
    for part, lines in left_out.items():
        lost = counts_of(source.listing(part).labels[list(lines)], len(source.classes))
        for name, count, without in zip(source.classes, source.class_counts(part), lost, strict=True):
            if count and count == without:
                reason = f"none of the {count:,} images of the class {name!r} in {part!r} can be read"
                raise InvalidInput(f"data.unreadable: 'skip': {reason}; replace some, or remove the class")


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

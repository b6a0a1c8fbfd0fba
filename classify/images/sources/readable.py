"""A source without the images that cannot be decoded, which ``data.unreadable: skip`` leaves out."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib

from classify.images.decode import UnreadableImage
from classify.images.listing import ListedSource, Listing, Subset, raise_some
from classify.images.pixel_files import PixelFile
from classify.images.pixels import try_all
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import stand_in
from deepspeed_trial.input_files import refused


class Readable(ListedSource):
    """A source without the images that cannot be decoded.

    One process of a host decodes all images of a part once, and keeps the list of unreadable ones in the
    cache's folder. The list is a function of the part's files and the size alone, and so the same for any
    number of processes and after a resume.

    Args:
        source: the source with all its images.
        size: height and width of the decoded images, in pixels.
    """

    def __init__(self, source: ListedSource, size: tuple[int, int]) -> None:
        super().__init__(source.location)
        self.source, self._size = source, size
        self._parts: dict[str, Subset] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self.source.classes

    @property
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or only ``all``."""
        return self.source.parts

    @functools.cached_property
    def left_out(self) -> dict[str, dict[int, str]]:
        """The unreadable images of each part: their indices, and an error line for each."""
        return {part: self._unreadable(part) for part in self.parts}

    def listing(self, part: str) -> Listing:
        """Return the readable images of a part.

        Raises:
            InvalidInput: if a class has none, or a file cannot be fetched.
        """
        if part not in self._parts:
            images = self.source.listing(part)
            subset = Subset(images, self.left_out[part])
            counts = images.labels.bincount(minlength=len(self.classes)).tolist()
            for name, count, label in zip(self.classes, counts, range(len(counts)), strict=True):
                if count and not (subset.labels == label).any():
                    reason = f"none of the {count:,} images of the class {name!r} in {part!r} can be read"
                    raise InvalidInput(
                        f"data.unreadable: 'skip': {reason}; replace some, or remove the class"
                    )
            self._parts[part] = subset
        return self._parts[part]

    def _unreadable(self, part: str) -> dict[int, str]:
        images = self.source.listing(part)
        fingerprint = images.fingerprint  # raises if a file is missing
        file = PixelFile(self.location.folder, f"images-{part}", self._size)
        for folder in (file.root, stand_in(file.root)):
            if (lines := _read(folder / f".{file.name}.unreadable", images)) is not None:
                return lines
        with file.lock() as folder:
            target = folder / f".{file.name}.unreadable"
            if (lines := _read(target, images)) is not None:  # another process was first
                return lines
            errors = try_all(images, self._size, f"{part} to find unreadable")
            others = [error for error in errors.values() if not isinstance(error, UnreadableImage)]
            raise_some([line for error in others for line in error.errors])
            lines = {index: error.errors[0] for index, error in sorted(errors.items())}
            with refused(str(target)):
                partial = target.with_suffix(".partial")
                partial.write_text(json.dumps({"fingerprint": fingerprint, "lines": lines}))
                partial.replace(target)
        return lines


def _read(file: pathlib.Path, images: Listing) -> dict[int, str] | None:
    """Return a kept list; None if there is none, or one of other images."""
    with contextlib.suppress(Exception):  # a damaged file fails in many ways, and a new list replaces it
        kept = json.loads(file.read_bytes())
        lines = {int(index): str(line) for index, line in kept["lines"].items()}
        if kept["fingerprint"] == images.fingerprint and all(
            0 <= each < len(images.labels) for each in lines
        ):
            return lines
    return None

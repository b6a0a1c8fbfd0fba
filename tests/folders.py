"""Small real image folders and their contents."""

import os
import pathlib

import pytest
import torch
from PIL import Image

from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings

LEFT, RIGHT = (200, 40, 30), (240, 230, 90)
TRAIN = [(10, 0), (20, 0), (30, 1), (40, 1)]


def table(arguments: str, /, **rows):
    """Parametrise a test by name=(value, ...)."""
    return pytest.mark.parametrize(arguments, [pytest.param(*row, id=name) for name, row in rows.items()])


def failing(number: int):
    """A function that fails with an error of the system."""

    def fail(*_) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def save(path: pathlib.Path, image: Image.Image | int, **options) -> pathlib.Path:
    """Write an image, or one of a single grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.new("L", (32, 32), image) if isinstance(image, int) else image).save(path, **options)
    return path


def read(root: pathlib.Path, split: str = "train") -> ImageSet:
    return DataPlan.resolve(DataSettings("imagefolder", str(root))).load(split)


def greys(kept: ImageSet) -> list[tuple[int, int]]:
    """A (grey, label) for each image of a single grey."""
    images = kept.select(torch.arange(len(kept)))
    assert (images == images[:, :1, :1, :1]).all()
    return list(zip(images[:, 0, 0, 0].tolist(), kept.labels.tolist(), strict=True))


def caches(place: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each cache."""
    assert [path for path in place.rglob(".*") if path.suffix in (".partial", ".progress", ".sidecar")] == []
    found = {str(path): path.stat() for path in place.rglob("*.pt")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}

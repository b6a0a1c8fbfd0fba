"""Folders of image files: ``ROOT/train/<class>/*`` and ``ROOT/test/<class>/*``, in any common format."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from classify.images import cache, decode
from harness.errors import ErrorList, InvalidInput, one_line
from harness.input_files import refused

SPLITS = ("train", "test")
_CACHE_FORMAT = 3
_EXTENSIONS = ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif".split()
Files = list[tuple[str, int]]  # path and label


class ImageFolder:
    """An image folder, listed once.

    Args:
        root: the folder with ``train`` and ``test`` in it.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self._files: dict[str, Files] = {}

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The class names, which must be the same in both splits."""
        with refused(f"data.root: {self.root}"):
            return tuple(_find_classes(self.root))

    def count(self, split: str) -> int:
        """How many image files a split has."""
        return len(self.files(split))

    def files(self, split: str) -> Files:
        """The (path, label) of every image file, in a fixed order."""
        if split not in self._files:
            with refused(f"data.root: {self.root}"):
                self._files[split] = _find_files(self.root / split, self.classes)
        return self._files[split]

    def load(self, split: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decodes a split, or takes it from the cache where that is still true to the folder.

        Args:
            split: ``train`` or ``test``.
            size: height and width to scale to, in pixels; other shapes are cropped in the middle.

        Returns:
            Images (N, 3, H, W) uint8, labels (N,) int64.

        Raises:
            InvalidInput: if a folder is missing or empty, the splits' classes differ, or a file is not
                readable.
        """
        files = self.files(split)
        kept = cache.Cache(self.root, f"images-{split}", size)
        fingerprint = _fingerprint(self.root / split, files, self.classes, size)
        labels = torch.tensor([label for _, label in files])
        fill = functools.partial(decode.decode_files, [path for path, _ in files], size, split)
        return kept.read(fingerprint, labels) or kept.write(fingerprint, labels, fill)


def find_images(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The image files that paths name: a file by itself, a folder by all it holds.

    Raises:
        InvalidInput: for each path that does not exist, or cannot be read, or is a folder without an image.
    """
    files: list[pathlib.Path] = []
    errors = ErrorList()
    mend = "give image files or folders of them"
    for path in paths:
        with errors.collecting(), refused(str(path), mend):
            try:
                is_folder = stat.S_ISDIR(path.stat().st_mode)
            except FileNotFoundError:
                raise InvalidInput(f"{path}: no such file or folder; {mend}") from None
            held = sorted(map(pathlib.Path, _images_in(path))) if is_folder else [path]
            if not held:
                raise InvalidInput(f"{path}: holds no image ({' '.join(_EXTENSIONS)}); give another folder")
            files += held
    errors.raise_any()
    return files


def _images_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """The images in a folder, at any depth, that are not hidden.

    Raises:
        OSError: if it cannot be read, or holds a link to a folder that it lies in itself.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(link := os.path.join(place, name)) and _lies_in(link, place, folder):
                raise OSError(errno.ELOOP, "a link to a folder that it lies in", link)
        for name in names:
            if name.lower().endswith(tuple(_EXTENSIONS)) and not name.startswith("."):
                yield os.path.join(place, name)


def _lies_in(link: str, place: str, folder: str | os.PathLike[str]) -> bool:
    """Whether a link leads to a folder on the way to its own place, or to one around those."""
    target = pathlib.Path(link).resolve()
    way = [pathlib.Path(place), *pathlib.Path(place).parents]
    way = way[: way.index(pathlib.Path(folder)) + 1]
    return any(each.resolve().is_relative_to(target) for each in way)


def _find_classes(root: pathlib.Path) -> list[str]:
    for split in SPLITS:
        if not (root / split).is_dir():
            needs = "it needs train/<class>/* and test/<class>/*"
            raise InvalidInput(f"data.root: {root}: has no folder {split!r}; {needs}")
    train, test = (_subfolders(root / split) for split in SPLITS)
    for name in train:
        if name != name.encode(errors="replace").decode():
            mend = f"holds the folder {name!r}, no UTF-8 name; rename it"
            raise InvalidInput(f"data.root: {root / 'train'}: {mend}")
    if len(train) < 2:
        found = f"only the class {train[0]!r}" if train else "no class folder"
        needs = "it needs a folder each for two classes or more"
        raise InvalidInput(f"data.root: {root / 'train'}: holds {found}; {needs}")
    if train != test:
        here, there = sorted(set(train) - set(test)), sorted(set(test) - set(train))
        raise InvalidInput(
            f"data.root: {root}: the classes of test differ from those of train (only in train: "
            f"{', '.join(here) or 'none'}; only in test: {', '.join(there) or 'none'}); make them the same"
        )
    return train


def _subfolders(folder: pathlib.Path) -> list[str]:
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def _find_files(folder: pathlib.Path, classes: Iterable[str]) -> Files:
    index = {name: label for label, name in enumerate(classes)}
    files = sorted((path, label) for name, label in index.items() for path in _images_in(folder / name))
    held = {label for _, label in files}
    empty = [name for name, label in index.items() if label not in held]
    if empty:
        mend = f"holds no image ({' '.join(_EXTENSIONS)}); add some or remove the folder"
        raise InvalidInput(f"data.root: {folder / empty[0]}: {mend}")
    return files


def _fingerprint(folder: pathlib.Path, files: Files, classes: Iterable[str], size: tuple[int, int]) -> str:
    """Changes if a file is added, removed, renamed or written, or the cache would be made in another way."""
    digest = hashlib.sha256(repr((_CACHE_FORMAT, size, list(classes))).encode())
    start = len(str(folder))
    for path, label in files:
        try:
            status = os.stat(path)
        except OSError as error:  # such as a link to nowhere
            raise InvalidInput(f"data.root: {path}: {one_line(error)}; mend or remove it") from error
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"data.root: {path}: is no file; remove it")
        digest.update(
            repr((path[start:], label, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()
        )
    return digest.hexdigest()

"""Folders of image files: ``ROOT/train/<class>/*`` and ``ROOT/test/<class>/*``, in any common format."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import stat
from collections.abc import Iterable

import torch
from torch import Tensor
from torchvision.datasets.folder import make_dataset

from classify.images import cache, decode
from harness.errors import InvalidInput, one_line
from harness.host_lock import host_lock

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
        return tuple(_find_classes(self.root))

    def count(self, split: str) -> int:
        """How many image files a split has."""
        return len(self.files(split))

    def files(self, split: str) -> Files:
        """The (path, label) of every image file, in a fixed order."""
        if split not in self._files:
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
        fingerprint = _fingerprint(self.root / split, files, self.classes, size)
        with host_lock(self.root, "images", "data.root") as folder:
            file = folder / f".images-{split}-{size[0]}x{size[1]}.pt"
            kept = cache.read(file, fingerprint)
            if kept is None:
                labels = torch.tensor([label for _, label in files])
                fill = functools.partial(decode.decode_files, [path for path, _ in files], size, split)
                kept = cache.write(file, fingerprint, (len(files), 3, *size), labels, fill)
        return kept


def find_images(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The image files that paths name: a file by itself, a folder by all it holds.

    Raises:
        InvalidInput: if a path does not exist or a folder holds no image.
    """
    files: list[pathlib.Path] = []
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"{path}: no such file or folder; give image files or folders of them")
        if not path.is_dir():
            files.append(path)
            continue
        held = [
            each for each in sorted(path.rglob("*")) if each.suffix.lower() in _EXTENSIONS and each.is_file()
        ]
        held = [each for each in held if not _is_hidden(f"{os.sep}{each.relative_to(path)}")]
        if not held:
            raise InvalidInput(f"{path}: holds no image ({' '.join(_EXTENSIONS)}); give another folder")
        files += held
    return files


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


def _is_hidden(path: str) -> bool:
    """Whether a part of a path that begins with a separator begins with a dot."""
    return f"{os.sep}." in path


def _find_files(folder: pathlib.Path, classes: Iterable[str]) -> Files:
    index = {name: label for label, name in enumerate(classes)}
    found = make_dataset(str(folder), index, extensions=tuple(_EXTENSIONS), allow_empty=True)
    start = len(str(folder))
    files = sorted((path, label) for path, label in found if not _is_hidden(path[start:]))
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

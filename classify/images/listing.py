"""Listings of encoded images (JPEG, PNG ...), created before any image is decoded."""

from __future__ import annotations

import abc
import functools
import hashlib
import os
import pathlib
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.images.decode import content_of
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.host_lock import stand_ins

PARTS = ("train", "val", "test")
WHOLE = "all"  # the part of a dataset without parts
SHOWN = 20  # error lines; a line about the others follows
NOT_THERE = "files are not readable; replace or remove these first"
NOT_READABLE = f"{NOT_THERE}, or set data.unreadable to skip"
Rows = np.ndarray | slice  # some images of a part: their indices, sorted, int64 (M,); or ``ALL``
ALL = slice(None)
EXTENSIONS = (
    ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif .heic .heif .hif"
).split()


@dataclass(frozen=True)
class Shard:
    """A file with many images.

    Attributes:
        url: a URL for fsspec, or a local path.
        size: the file's size in bytes.
        start: the position of its first image among the images of all shards.
        stop: the position after its last image.
        sha256: the checksum of its bytes; empty if unknown.
        version: the server's identifier of this version of the file, e.g. an ETag; empty if there is none.
    """

    url: str
    size: int
    start: int
    stop: int
    sha256: str = ""
    version: str = ""

    @property
    def identity(self) -> tuple[str, str | int]:
        """The URL, and the checksum or else the version or size: they show that the bytes have changed."""
        return self.url, self.sha256 or self.version or self.size


class Listing(abc.ABC):
    """The encoded images of one part of a dataset, read by index.

    Attributes:
        labels: int64 (N,), the class of each image; with ``data.several_labels`` uint8 (N, C) of 0 and 1.
            The index of an image is its row.
        shards: the shards, in the order of their images; empty if every image is a file.
        places: int64 (N,), the position of each image among the images of all shards, as ``Shard.start``
            counts; None without shards.
        column: the value of each image in the column that ``data.group`` names; None if it names no column.
    """

    labels: Tensor
    shards: Sequence[Shard] = ()
    places: np.ndarray | None = None
    column: Sequence[str] | None = None

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes if an image, a label or the order changes."""

    @abc.abstractmethod
    def read(self, index: int) -> bytes:
        """Return the encoded bytes of an image; raise ``InvalidInput`` with its name if it is unreadable."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image in error lines: its path, or its shard and position in the shard."""

    def places_of(self, indices: Any) -> Any:
        """Return the positions of images, int64 (B,), among the images of all shards; or of one image."""
        return indices if self.places is None else self.places[indices]

    def shards_of(self, places: Any) -> Any:
        """Return the index of the shard at each position, (B,); or at one position."""
        return np.searchsorted(self._starts, places, side="right") - 1

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        return np.array([shard.start for shard in self.shards])

    def shards_with(self, rows: Rows) -> Sequence[Shard]:
        """Return the shards that have these images, in order."""
        if isinstance(rows, slice) or not self.shards:
            return self.shards
        return [self.shards[number] for number in np.unique(self.shards_of(self.places_of(rows))).tolist()]

    def digest(self, rows: Rows) -> str:
        """Return the fingerprint of these images; raise the errors of ``fingerprint``."""
        if isinstance(rows, slice):
            return self.fingerprint
        return hashlib.sha256(self.fingerprint.encode() + rows.tobytes()).hexdigest()

    def local_file(self, shard: Shard) -> pathlib.Path:
        """Return the file of a shard, fetched if it is remote.

        Raises:
            InvalidInput: if it cannot be fetched, after several attempts.
        """
        return pathlib.Path(shard.url)


class FileListing(Listing):
    """Images that are files.

    Args:
        paths: the path of each file.
        labels: the label of each image, (N,), or its labels, (N, C) of 0 and 1.
        classes: the class names; the fingerprint depends on them.
        root: the common beginning of the paths; the fingerprint ignores it.
    """

    def __init__(
        self, paths: list[str], labels: Sequence[int] | np.ndarray, classes: Sequence[str], root: str
    ) -> None:
        dtype = torch.uint8 if np.ndim(labels) == 2 else torch.int64
        self.paths, self.labels = paths, torch.tensor(labels, dtype=dtype)
        self._classes, self._root = classes, root

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest that changes if a file is added, removed, renamed or written.

        Raises:
            InvalidInput: with a line for each missing file.
        """
        digest, errors = hashlib.sha256(repr(self._classes).encode()), list[str]()
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            try:
                status = os.stat(path)
            except (OSError, ValueError) as error:  # such as a dangling link
                errors.append(f"data.root: {path}: cannot be used ({one_line(error)}); replace or remove it")
                continue
            if not stat.S_ISREG(status.st_mode):
                errors.append(f"data.root: {path}: is not a file; remove it")
            version = status.st_size, status.st_mtime_ns, status.st_ctime_ns
            digest.update(repr((path.removeprefix(self._root), label, *version)).encode())
        raise_some(errors)
        return digest.hexdigest()

    def read(self, index: int) -> bytes:
        """Return the bytes of a file; raise ``InvalidInput`` with its path if it is unreadable."""
        return content_of(self.paths[index])

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self.paths[index]


class ListedSource(abc.ABC):
    """A source that lists encoded images.

    Args:
        settings: the settings of the dataset.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self._listings = dict[str, Listing]()

    @property
    def is_pattern(self) -> bool:
        """Whether the root names files, possibly with ``{0..9}`` and ``*``, instead of a folder."""
        root = self.settings.root
        names = re.search(r"[{*]", root) or root.endswith((".tar", ".parquet"))
        return bool(names) and not os.path.isdir(root)

    @property
    def base(self) -> str:
        """The folder or prefix of the files."""
        head = re.split(r"[{*]", self.settings.root)[0]
        return (head.rpartition("/")[0] or ".") if self.is_pattern else self.settings.root

    @property
    def folder(self) -> pathlib.Path:
        """The folder for decoded images and indices: the dataset's folder; for a remote one, in the cache."""
        root = self.settings.root
        if is_remote(root):
            return self.cache_folder / hashlib.sha256(root.encode()).hexdigest()[:16]
        return pathlib.Path(self.base)

    @property
    def cache_folder(self) -> pathlib.Path:
        """The folder for all remote data."""
        folder = self.settings.cache.folder
        return pathlib.Path(folder) if folder else stand_ins()

    @property
    @abc.abstractmethod
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: ``train`` with ``test``, ``val`` or both; or only ``all``."""

    def listing(self, part: str) -> Listing:
        """Return the images of a part; the first call lists them.

        Raises:
            InvalidInput: if the part is missing, damaged or not usable.
        """
        if part not in self._listings:
            self._listings[part] = self.list_part(part)
        return self._listings[part]

    @abc.abstractmethod
    def list_part(self, part: str) -> Listing:
        """List the images of a part; raise the errors of ``listing``."""

    @property
    def passed_over(self) -> Mapping[str, int]:
        """The number of ignored files (not images of a class) in the folder, by extension."""
        return {}

    def count(self, part: str) -> int:
        """Return the number of images in a part."""
        return len(self.listing(part).labels)

    def class_counts(self, part: str) -> list[int]:
        """Return the number of a part's images in each class."""
        return counts_of(self.listing(part).labels, len(self.classes))


def counts_of(labels: Tensor, classes: int) -> list[int]:
    """Count the images of each class, from labels (N,), or (N, C) of 0 and 1."""
    counts = labels.sum(0) if labels.dim() == 2 else labels.bincount(minlength=classes)
    return counts.tolist()


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def raise_some(errors: Sequence[str], others: str = NOT_THERE, key: str = "data.root") -> None:
    """Raise ``InvalidInput`` with the first 20 errors, if there are any, and the number of the others."""
    if len(errors) > SHOWN:
        errors = [*errors[:SHOWN], f"{key}: {len(errors) - SHOWN:,} more {others}"]
    if errors:
        raise InvalidInput(errors)

"""Decoded images in a file that fills up while a training goes on, and at last is the cache of ``cache.py``.

``.NAME.growing`` has the images at their places, with holes where none was decoded yet; ``.NAME.filled`` says
which are there: a head, and a byte an image. An image is marked after it was written, so a process may be
killed at any moment. What the system had not written to the disk when the whole machine went down is not
known, so half-filled files of an earlier start of the machine are begun anew.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from classify.images.cache import Cache
from deepspeed_trial.errors import one_line, printable
from deepspeed_trial.input_files import refused

_HEAD = 4096  # bytes of ``.filled`` before the marks
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class GrowingCache:
    """The images of one part that are decoded already, shared by all processes of the host.

    Args:
        cache: what it becomes.
        fingerprint: of what the images are decoded from.
        labels: int64 (N,).

    Attributes:
        has_room: whether this process goes on to keep images.

    Raises:
        InvalidInput: if the files cannot be made.
    """

    def __init__(self, cache: Cache, fingerprint: str, labels: Tensor) -> None:
        self._cache, self._fingerprint, self._labels = cache, fingerprint, labels
        shape = (len(labels), 3, *cache.size)
        self._bytes = math.prod(shape[1:])
        head: dict[str, object] = {"fingerprint": fingerprint, "shape": list(shape), "boot": _boot()}
        with cache.lock() as folder:
            images, marks = (folder / f".{cache.name}.{kind}" for kind in ("growing", "filled"))
            with refused(str(images)):
                size = math.prod(shape)
                is_whole = images.exists() and images.stat().st_size == size
                if not is_whole or not _begins_with(marks, head):
                    _begin(images, marks, head, size, len(labels))
                self._file = os.open(images, os.O_RDWR)
            self._path, self._marks_path = images, marks
            self._images = np.memmap(images, np.uint8, "r", shape=shape)
            self._marks = np.memmap(marks, np.uint8, "r+", offset=_HEAD, shape=(len(labels),))
        self.has_room = True
        self._inode = os.fstat(self._file).st_ino

    def has(self, indices: np.ndarray) -> np.ndarray:
        """Which of the images are there, bool (B,)."""
        return self._marks[indices].astype(bool)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Images (B, 3, H, W) uint8 that are there."""
        return np.take(self._images, indices, axis=0)

    def write(self, indices: np.ndarray, images: Iterable[np.ndarray]) -> None:
        """Keeps images (3, H, W) uint8, as long as the disk has room; the last ones complete the cache."""
        if not self.has_room:
            return
        try:
            for index, image in zip(indices.tolist(), images, strict=True):
                os.pwrite(self._file, image.data, index * self._bytes)
                self._marks[index] = 1
            if self._marks.all():
                self._complete()
        except OSError as error:
            self.has_room = False
            what = f"no more decoded images are kept ({one_line(error)}); each epoch decodes those anew"
            print(printable(f"{self._path}: {what}"), file=sys.stderr)

    def _complete(self) -> None:
        with self._cache.lock():
            if self._path.exists() and self._path.stat().st_ino == self._inode:
                os.fsync(self._file)
                self._cache.adopt(self._path, self._fingerprint, self._labels)
                self._marks_path.unlink(missing_ok=True)


def _begin(
    images: pathlib.Path, marks: pathlib.Path, head: Mapping[str, object], size: int, count: int
) -> None:
    for file in (marks, images):
        file.unlink(missing_ok=True)  # another run may go on with those
    with open(images, "wb") as made:
        os.truncate(made.fileno(), size)
    begun = marks.with_suffix(".begun")
    begun.write_bytes(json.dumps(head).encode().ljust(_HEAD, b" ") + bytes(count))
    os.replace(begun, marks)


def _begins_with(marks: pathlib.Path, head: Mapping[str, object]) -> bool:
    try:
        with open(marks, "rb") as opened:
            return json.loads(opened.read(_HEAD)) == head
    except (OSError, ValueError):
        return False


def _boot() -> str:
    """Which start of the machine this is."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""

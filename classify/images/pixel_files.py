"""Decoded images in files, which the ranks of a host map into memory, so that they share one copy.

``PixelFile`` is a complete file: ``.NAME.raw`` has the images at their positions, with holes for images that
a run leaves out. Its sidecar ``.NAME.pt`` has their labels and the fingerprint of their source, and is
written last.

``GrowingFile`` fills up during a training and then becomes a ``PixelFile``. ``.NAME.growing`` has the images
at their positions, with holes for missing images. ``.NAME.filled`` has a header and a mark (one byte) for
each image. A mark is written after its image, so a process may be killed at any moment. After a crash of the
machine the disk may lack marked images, so growing files of an earlier boot are discarded.

All files are in ``data.root`` or, if that is read-only, in the user's cache.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import filelock
import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from classify.config.command_line import typed
from classify.images.listing import Rows
from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line, printable
from deepspeed_trial.host_lock import host_lock, lock_of, stand_in
from deepspeed_trial.input_files import refused, regular_file

LARGE = 2**28  # bytes: a larger file is announced before it is written
CHUNK = 500  # images written at a time
_HEAD = 4096  # bytes of ``.filled`` before the marks
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
_ENDINGS = ("pt", "raw", "partial", "sidecar", "growing", "filled", "begun", "unreadable")
_LABELS = (torch.int64, torch.uint8)  # one label an image, or rows of 0 and 1
_FILE = re.compile(
    rf"\.((?:cifar10|images)-(?:train|val|test|all)(?:-pad|-stretch)?-\d+x\d+)\.(?:{'|'.join(_ENDINGS)})"
)
_REMEDIES = {
    **dict.fromkeys(DISK_FULL, "free some disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "free memory, or end other processes"),
}  # by the ``errno`` of an OSError


class PixelFile:
    """The decoded images of one part of a dataset, in one size.

    Args:
        root: the dataset's folder.
        name: the part's name, the start of the file's name.
        size: height and width of the images, in pixels.
    """

    def __init__(self, root: pathlib.Path, name: str, size: tuple[int, int]) -> None:
        self.root, self.size, self.name = root, size, f"{name}-{size[0]}x{size[1]}"

    def lock(self) -> AbstractContextManager[pathlib.Path]:
        """Return the lock for writers; as a context it yields the folder of the files."""
        return host_lock(self.root, self.name, "data.root")

    def path(self, folder: pathlib.Path, ending: str) -> pathlib.Path:
        """Return the file with an ending in a folder."""
        return folder / f".{self.name}.{ending}"

    def read(self, fingerprint: str, labels: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Return memory-mapped images (N, 3, H, W) uint8 and labels (N,) int64.

        Return None if the file is absent, outdated or damaged. The call never waits for a writer.

        Args:
            fingerprint: the fingerprint of the images' source.
            labels: int64 (N,), if known; a file with other labels is outdated.
        """
        for folder in (self.root, stand_in(self.root)):
            with contextlib.suppress(Exception):  # a damaged file fails in many ways; decoding replaces it
                whole = self._read(folder, fingerprint)
                if whole is not None and (labels is None or torch.equal(whole[1], labels)):
                    return whole
        return None

    def _read(self, folder: pathlib.Path, fingerprint: str) -> tuple[Tensor, Tensor] | None:
        raw, sidecar = (self.path(folder, ending) for ending in ("raw", "pt"))
        before = sidecar.stat()
        about = torch.load(regular_file(sidecar), map_location="cpu", weights_only=True)
        labels, shape = about["labels"], tuple(about["shape"])
        is_whole = shape == (len(labels), 3, *self.size)
        is_whole = is_whole and regular_file(raw).stat().st_size == math.prod(shape)
        if about["fingerprint"] != fingerprint or not is_whole or labels.dtype not in _LABELS:
            return None
        pixels = np.memmap(raw, dtype=np.uint8, mode="r", shape=shape)  # may be larger than memory
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the tensor is not writable
            images = torch.from_numpy(pixels)
        # A writer removes the sidecar first: the same inode means the same pixels
        after = sidecar.stat()
        is_same = (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        return (images, labels) if is_same else None

    def write(
        self, folder: pathlib.Path, count: int, fill: Callable[[pathlib.Path], tuple[str, Tensor, int]]
    ) -> tuple[Tensor, Tensor]:
        """Write the file with at most ``count`` images, and return the same as ``read``.

        The caller holds the lock.

        Args:
            folder: the folder that ``lock`` yields.
            count: the number of images to check the disk space for.
            fill: writes images into an empty file; returns the fingerprint of their source, their labels, and
                the number of images in the file, which may have holes for others.

        Raises:
            InvalidInput: if the disk has too little room or refuses the file, or an image cannot be decoded.
            TrainingStopped: if the system kills a process that decodes.
        """
        endings = ("raw", "pt", "partial", "sidecar")
        raw, sidecar, partial, new_sidecar = (self.path(folder, ending) for ending in endings)
        try:
            for file in (sidecar, raw, partial, new_sidecar):
                if file.is_dir():
                    what = "is a folder, where a file of decoded images belongs"
                    raise InvalidInput(f"{file}: {what}; move it")
                file.unlink(missing_ok=True)  # an old file, whose room the new images may need
            self._check_room(raw, count)
            partial.write_bytes(b"")
            fingerprint, labels, count = fill(partial)
            with open(partial, "rb+") as written:
                os.fsync(written.fileno())
            self.adopt(partial, fingerprint, labels)
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "check the disk")
            reason = f"the decoded images could not be written ({one_line(error)})"
            raise InvalidInput(f"{sidecar}: {reason}; {remedy}") from error
        finally:
            with contextlib.suppress(OSError):  # keep the first error
                partial.unlink(missing_ok=True)
                new_sidecar.unlink(missing_ok=True)
        whole = self.read(fingerprint, labels)
        if whole is None:
            raise InvalidInput(f"{sidecar}: cannot be read back after writing; check the disk")
        where = f"{raw} ({in_bytes(self._bytes(count))})"
        remove = f"to remove this file: {typed('checkpoint', 'caches', self.root, '--clear')}"
        shown = f"{self._in_words(count)} are stored decoded in {where}; {remove}"
        print(printable(shown), file=sys.stderr)
        return whole

    def adopt(self, file: pathlib.Path, fingerprint: str, labels: Tensor) -> None:
        """Make a file of images this file: rename it, and write its sidecar. The caller holds the lock.

        Raises:
            OSError: if a file cannot be written or renamed.
        """
        raw, sidecar, partial = (self.path(file.parent, ending) for ending in ("raw", "pt", "sidecar"))
        content = io.BytesIO()
        shape = [len(labels), 3, *self.size]
        torch.save({"fingerprint": fingerprint, "shape": shape, "labels": labels}, content)
        partial.write_bytes(content.getvalue())  # torch's own error would not name the reason
        sidecar.unlink(missing_ok=True)
        os.replace(file, raw)
        os.replace(partial, sidecar)

    def _check_room(self, raw: pathlib.Path, count: int) -> None:
        """Raise ``InvalidInput`` if the disk has too little room; print a note about a large file."""
        needed, free = self._bytes(count), shutil.disk_usage(raw.parent).free
        images = self._in_words(count)
        if needed > free:
            raise InvalidInput(
                f"{raw}: {images} need {in_bytes(needed)}, but the disk has only {in_bytes(free)} free; make"
                " room, use a smaller data.image_size, or link data.root to a larger disk"
            )
        if needed > LARGE:
            where = f"{printable(raw)}: needs {in_bytes(needed)}, {in_bytes(free)} are free"
            print(f"decoding {images} into {where}", file=sys.stderr)

    def _bytes(self, count: int) -> int:
        return count * 3 * math.prod(self.size)

    def _in_words(self, count: int) -> str:
        return f"{count:,} images of {self.size[0]}x{self.size[1]}"


class GrowingFile:
    """The images of one part that any process of the host has decoded so far.

    Args:
        whole: the complete file that this file will become.
        fingerprint: the fingerprint of the images' source.
        labels: int64 (N,), or uint8 (N, C) of 0 and 1.
        rows: the images that the file needs; all others are marked as if it had them.

    Attributes:
        has_room: whether all writes have succeeded; if False, this process writes no more images.

    Raises:
        InvalidInput: if the files cannot be created.
    """

    def __init__(self, whole: PixelFile, fingerprint: str, labels: Tensor, rows: Rows) -> None:
        self._whole, self._fingerprint, self._labels = whole, fingerprint, labels
        shape = (len(labels), 3, *whole.size)
        self._bytes = math.prod(shape[1:])
        marks = np.ones(len(labels), np.uint8)
        marks[rows] = 0
        head: dict[str, object] = {"fingerprint": fingerprint, "shape": list(shape), "boot": _boot()}
        with whole.lock() as folder:
            endings = ("growing", "filled", "begun")
            self._path, self._marks_path, begun = (whole.path(folder, ending) for ending in endings)
            with refused(str(self._path)):
                fits = self._path.exists() and self._path.stat().st_size == math.prod(shape)
                if not fits or not _begins_with(self._marks_path, head):
                    for file in (self._marks_path, self._path):
                        file.unlink(missing_ok=True)  # another run may still have these open
                    with open(self._path, "wb") as created:
                        os.truncate(created.fileno(), math.prod(shape))
                    begun.write_bytes(json.dumps(head).encode().ljust(_HEAD, b" ") + marks.tobytes())
                    os.replace(begun, self._marks_path)
                self._file = os.open(self._path, os.O_RDWR)
            self._images = np.memmap(self._path, np.uint8, "r", shape=shape)
            self._marks = np.memmap(self._marks_path, np.uint8, "r+", offset=_HEAD, shape=(len(labels),))
        self.has_room = True
        self._inode = os.fstat(self._file).st_ino

    def has(self, indices: np.ndarray) -> np.ndarray:
        """Return whether each image is in the file: bool (B,)."""
        return self._marks[indices].astype(bool)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return images (B, 3, H, W) uint8 that are in the file."""
        return np.take(self._images, indices, axis=0)

    def write(self, indices: np.ndarray, images: Iterable[np.ndarray]) -> None:
        """Write images (3, H, W) uint8 unless the disk is full; finish the file when it has every image."""
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
            reason = (
                f"cannot store more decoded images ({one_line(error)}); each epoch decodes the others again"
            )
            print(printable(f"{self._path}: {reason}"), file=sys.stderr)

    def _complete(self) -> None:
        with self._whole.lock():
            if self._path.exists() and self._path.stat().st_ino == self._inode:
                os.fsync(self._file)
                self._whole.adopt(self._path, self._fingerprint, self._labels)
                self._marks_path.unlink(missing_ok=True)


def find(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return the files of decoded images in a folder: each path without its ending, and its size in bytes."""
    sizes: dict[pathlib.Path, int] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if (match := _FILE.fullmatch(entry.name)) and entry.is_file():
            path = folder / f".{match[1]}"
            sizes[path] = sizes.get(path, 0) + entry.stat().st_size
    return dict(sorted(sizes.items()))


def clear(path: pathlib.Path) -> bool:
    """Remove the files of a path that ``find`` returned; return False if a process is writing them.

    A training that uses the files continues; the disk space is freed when it ends.
    """
    try:
        with lock_of(path.parent, path.name.removeprefix(".")).acquire(timeout=0):
            for ending in _ENDINGS:
                path.with_name(f"{path.name}.{ending}").unlink(missing_ok=True)
    except filelock.Timeout:
        return False
    return True


def write_resized(images: Tensor, size: tuple[int, int], target: pathlib.Path) -> None:
    """Write square images, uint8 (N, 3, S, S), scaled and cropped to ``size``."""
    with open(target, "rb+") as file:
        for part in images.split(CHUNK):
            if tuple(part.shape[2:]) != size:
                part = functional.resize(part, [max(size)], antialias=True)
                part = functional.center_crop(part, list(size))
            file.write(part.contiguous().numpy().data)


def in_bytes(count: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _begins_with(marks: pathlib.Path, head: Mapping[str, object]) -> bool:
    try:
        with open(marks, "rb") as opened:
            return json.loads(opened.read(_HEAD)) == head
    except (OSError, ValueError):
        return False


def _boot() -> str:
    """Return the identity of the machine's current boot, empty if unknown."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""

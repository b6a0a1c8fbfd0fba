"""Decoded images in a file that the ranks of a host map into memory, and so hold once between them.

The images lie in ``.NAME.raw`` one after the other; ``.NAME.pt`` has the labels and what they were decoded
from, and is written last. Both are in ``data.root`` or, where that is read-only, in the user's cache.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import filelock
import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line, printable
from deepspeed_trial.host_lock import host_lock, lock_of, stand_in
from deepspeed_trial.input_files import regular_file

LARGE = 2**28  # bytes, from which on the place and the size are said before anything is written, too
CHUNK = 500  # images in memory written at a time
_ENDINGS = ("pt", "raw", "partial", "sidecar", "growing", "filled", "begun", "unreadable")
_FILE = re.compile(rf"\.((?:cifar10|images)-(?:train|val|test|all)-\d+x\d+)\.(?:{'|'.join(_ENDINGS)})")
_REMEDIES = {
    **dict.fromkeys(DISK_FULL, "free some disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "allow writing there"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "free memory, or end other processes"),
}  # of what keeps decoded images from being written
Kept = tuple[Tensor, Tensor]  # images (N, 3, H, W) uint8, mapped into memory, and labels (N,) int64


class Cache:
    """The decoded images of one split of a dataset, in one size.

    Args:
        root: the folder that holds the dataset.
        name: of the split, for the file's name.
        size: height and width of the images, in pixels.
    """

    def __init__(self, root: pathlib.Path, name: str, size: tuple[int, int]) -> None:
        self.root, self.size, self.name = root, size, f"{name}-{size[0]}x{size[1]}"

    def lock(self) -> AbstractContextManager[pathlib.Path]:
        """Held by who writes the files; gives their folder."""
        return host_lock(self.root, self.name, "data.root")

    def adopt(self, file: pathlib.Path, fingerprint: str, labels: Tensor) -> None:
        """Makes a file of decoded images, which is whole on the disk, the cache; its lock is to be held.

        Raises:
            OSError: if that cannot be written.
        """
        _adopt(file, file.with_suffix(".pt"), fingerprint, (len(labels), 3, *self.size), labels)

    def read(self, fingerprint: str, labels: Tensor | None = None) -> Kept | None:
        """What is kept, or None if that is nothing, or of other files, or damaged; waits for nobody.

        Args:
            fingerprint: of what the images must have been decoded from.
            labels: int64 (N,), where they are known.
        """
        for folder in (self.root, stand_in(self.root)):
            kept = _read(folder / f".{self.name}.pt", fingerprint, self.size)
            if kept is not None and (labels is None or torch.equal(kept[1], labels)):
                return kept
        return None

    def write(self, fingerprint: str, labels: Tensor, fill: Callable[[pathlib.Path], None]) -> Kept:
        """Decodes and keeps, or takes what another process of this host has kept meanwhile.

        Only who wants the same split in the same size waits. The files are either whole or not there.

        Args:
            fingerprint: of what the images are decoded from.
            labels: int64 (N,).
            fill: writes the images into a file that is there and empty.

        Raises:
            InvalidInput: if the disk is too small, or does not take it, or an image cannot be decoded.
            TrainingStopped: if the system kills a process that decodes.
        """
        with self.lock() as folder:
            if (kept := self.read(fingerprint, labels)) is not None:
                return kept
            shape = (len(labels), 3, *self.size)
            kept = _write(folder / f".{self.name}.pt", fingerprint, shape, labels, fill)
        where = f"{folder / f'.{self.name}.raw'} ({in_bytes(math.prod(shape))})"
        mend = f"python3 checkpoint.py caches {shlex.quote(str(self.root))} --clear removes it"
        print(printable(f"{_in_words(shape)} are kept decoded in {where}; {mend}"), file=sys.stderr)
        return kept


def find(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """The caches in a folder: the path of each without its ending, and the bytes of its files."""
    found: dict[pathlib.Path, int] = {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if (named := _FILE.fullmatch(entry.name)) and entry.is_file():
            path = folder / f".{named[1]}"
            found[path] = found.get(path, 0) + entry.stat().st_size
    return dict(sorted(found.items()))


def clear(path: pathlib.Path) -> bool:
    """Removes a cache that ``find`` has found, unless it is being written; gives whether it is gone.

    A training that uses it is not disturbed: the disk's room comes free at its end.
    """
    try:
        with lock_of(path.parent, path.name.removeprefix(".")).acquire(timeout=0):
            for ending in _ENDINGS:
                path.with_name(f"{path.name}.{ending}").unlink(missing_ok=True)
    except filelock.Timeout:
        return False
    return True


def _read(cache: pathlib.Path, fingerprint: str, size: Sequence[int]) -> Kept | None:
    raw = cache.with_suffix(".raw")
    try:
        before = _version(cache)
        kept = torch.load(regular_file(cache), map_location="cpu", weights_only=True)
        labels, shape = kept["labels"], tuple(kept["shape"])
        is_whole = shape == (len(labels), 3, *size) and regular_file(raw).stat().st_size == math.prod(shape)
        if kept["fingerprint"] != fingerprint or not is_whole or labels.dtype != torch.int64:
            return None
        images = _map(raw, shape)
        # Who writes it anew removes the .pt file first: if that is still the same one, so are the images
        return (images, labels) if _version(cache) == before else None
    except Exception:  # a damaged file fails in many ways, and decoding again mends them all
        return None


def _version(file: pathlib.Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _map(raw: pathlib.Path, shape: Sequence[int]) -> Tensor:
    """Maps a file for reading only; mapped pages count against no limit, so it may be larger than memory."""
    pixels = np.memmap(raw, dtype=np.uint8, mode="r", shape=tuple(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the tensor cannot be written to
        return torch.from_numpy(pixels)


def _write(
    cache: pathlib.Path,
    fingerprint: str,
    shape: Sequence[int],
    labels: Tensor,
    fill: Callable[[pathlib.Path], None],
) -> Kept:
    raw, partial, sidecar = (cache.with_suffix(f".{kind}") for kind in ("raw", "partial", "sidecar"))
    try:
        for file in (cache, raw, partial, sidecar):
            if file.is_dir():
                raise InvalidInput(f"{file}: is a folder, where decoded images are to be kept; move it")
            file.unlink(missing_ok=True)  # of other images; its room may be needed
        _check_room(raw, shape)
        partial.write_bytes(b"")
        fill(partial)
        with open(partial, "rb+") as written:
            os.fsync(written.fileno())
        _adopt(partial, cache, fingerprint, shape, labels)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk")
        what = f"the decoded images could not be written ({one_line(error)})"
        raise InvalidInput(f"{cache}: {what}; {remedy}") from error
    finally:
        with contextlib.suppress(OSError):  # or the cause of the first error would be lost
            partial.unlink(missing_ok=True)
            sidecar.unlink(missing_ok=True)
    mapped = _read(cache, fingerprint, shape[2:])
    if mapped is None:
        raise InvalidInput(f"{cache}: cannot be read back after writing; check the disk")
    return mapped


def _adopt(
    file: pathlib.Path, cache: pathlib.Path, fingerprint: str, shape: Sequence[int], labels: Tensor
) -> None:
    sidecar, content = cache.with_suffix(".sidecar"), io.BytesIO()
    torch.save({"fingerprint": fingerprint, "shape": list(shape), "labels": labels}, content)
    sidecar.write_bytes(content.getvalue())  # an OSError says why that fails, and torch's own would not
    cache.unlink(missing_ok=True)
    os.replace(file, cache.with_suffix(".raw"))
    os.replace(sidecar, cache)


def write_resized(images: Tensor, size: tuple[int, int], target: pathlib.Path) -> None:
    """Writes square images that are in memory, uint8 (N, 3, S, S), scaled and cropped to ``size``."""
    with open(target, "rb+") as file:
        for part in images.split(CHUNK):
            if tuple(part.shape[2:]) != size:
                part = functional.resize(part, [max(size)], antialias=True)
                part = functional.center_crop(part, list(size))
            file.write(part.contiguous().numpy().data)


def _check_room(raw: pathlib.Path, shape: Sequence[int]) -> None:
    """Says what will be written where, if it is much, and refuses where there is no room for it."""
    needed, free = math.prod(shape), shutil.disk_usage(raw.parent).free
    what = _in_words(shape)
    if needed > free:
        raise InvalidInput(
            f"{raw}: {what} need {in_bytes(needed)} there, but only {in_bytes(free)} are free; make room, use"
            " a smaller data.image_size, or link data.root to a larger disk"
        )
    if needed > LARGE:
        where = f"{printable(raw)} ({in_bytes(needed)} of {in_bytes(free)} free)"
        print(f"decoding {what} into {where}", file=sys.stderr)


def _in_words(shape: Sequence[int]) -> str:
    return f"{shape[0]:,} images of {shape[2]}x{shape[3]}"


def in_bytes(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

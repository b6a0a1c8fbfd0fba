"""Decoded images in a file that the ranks of a host map into memory, and so hold once between them.

The images lie in ``NAME.raw`` one after the other; ``NAME.pt`` has the labels and what they were decoded from, and is
written last. While it is being made, ``NAME.partial`` grows and ``NAME.progress`` says how far it is good.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchvision.transforms.v2 import functional

from errors import InvalidInput, one_line

LARGE = 2**28  # bytes, from which on the place and the size are said before anything is written
CHUNK = 500  # images in memory written at a time
Fill = Callable[[pathlib.Path, int, Callable[[int], None]], None]


def read(cache: pathlib.Path, fingerprint: str) -> dict[str, Any] | None:
    """What the cache holds, its images mapped into memory; None if it is of no use.

    Args:
        cache: its ``.pt`` file.
        fingerprint: of what the images must have been decoded from.
    """
    raw = cache.with_suffix(".raw")
    if not (cache.exists() and raw.exists()):
        return None
    try:
        kept = torch.load(cache, map_location="cpu", weights_only=True)
        size = math.prod(kept["shape"])
        if kept["fingerprint"] != fingerprint or raw.stat().st_size != size:
            return None
        return {**kept, "images": _mapped(raw, kept["shape"])}
    except Exception:  # a damaged file fails in many ways, and decoding again mends them all
        return None


def _mapped(raw: pathlib.Path, shape: Sequence[int]) -> torch.Tensor:
    """Maps a file for reading only, which counts against no limit of memory, so that it may be larger than memory."""
    pixels = np.memmap(raw, dtype=np.uint8, mode="r", shape=tuple(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the tensor cannot be written to
        return torch.from_numpy(pixels)


def write(
    cache: pathlib.Path,
    fingerprint: str,
    shape: Sequence[int],
    labels: torch.Tensor,
    classes: Sequence[str],
    fill: Fill,
) -> dict[str, Any]:
    """Writes the cache so that it is either whole or not there, and gives it as ``read`` does.

    Goes on where an earlier attempt at the same was interrupted.

    Args:
        cache: its ``.pt`` file.
        fingerprint: of what the images are decoded from.
        shape: of the images, (N, 3, H, W).
        labels: int64 (N,).
        classes: the class names.
        fill: writes the images, called with the file, the number of images that it has already, and a function to tell
            how many it has from time to time.

    Raises:
        InvalidInput: if the disk is too small, or does not take it.
    """
    partial, progress = cache.with_suffix(".partial"), cache.with_suffix(".progress")
    for file in (cache, cache.with_suffix(".raw"), partial, progress):
        if file.is_dir():
            raise InvalidInput(f"{file}: is a folder, where decoded images are to be kept; move it")
    for old in (cache, cache.with_suffix(".raw")):
        old.unlink(missing_ok=True)  # of other images; its room may be needed
    done = _done(partial, progress, fingerprint, shape)
    if not done:
        partial.unlink(missing_ok=True)
    _check_room(cache, shape, done)
    try:
        if not done:
            partial.write_bytes(b"")
        fill(partial, done, _Progress(partial, progress, fingerprint))
        with open(partial, "rb+") as written:
            os.fsync(written.fileno())
        kept = {"fingerprint": fingerprint, "shape": list(shape), "labels": labels, "classes": list(classes)}
        sidecar = progress.with_suffix(".sidecar")
        torch.save(kept, sidecar)
        os.replace(partial, cache.with_suffix(".raw"))
        os.replace(sidecar, cache)
        progress.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        for file in (partial, progress, progress.with_suffix(".sidecar")):
            file.unlink(missing_ok=True)
        raise InvalidInput(
            f"{cache}: the decoded images could not be written ({one_line(error)}); free some disk space"
        ) from error
    except InvalidInput:  # of an image file
        for file in (partial, progress):
            file.unlink(missing_ok=True)
        raise
    mapped = read(cache, fingerprint)
    if mapped is None:
        raise InvalidInput(f"{cache}: cannot be read back after writing; check the disk")
    return mapped


def fill_from(images: torch.Tensor, size: tuple[int, int]) -> Fill:
    """A ``fill`` of square images that are in memory, uint8 (N, 3, S, S), scaled and cropped to ``size``."""

    def fill(file: pathlib.Path, start: int, done: Callable[[int], None]) -> None:
        with open(file, "rb+") as target:
            target.seek(start * 3 * size[0] * size[1])
            for at in range(start, len(images), CHUNK):
                part = images[at : at + CHUNK]
                if tuple(part.shape[2:]) != size:
                    part = functional.resize(part, [max(size)], antialias=True)
                    part = functional.center_crop(part, list(size))
                target.write(part.contiguous().numpy().data)
                target.flush()
                done(at + len(part))

    return fill


class _Progress:
    """Notes how many images of a file are on the disk for good, once in a while."""

    def __init__(self, partial: pathlib.Path, progress: pathlib.Path, fingerprint: str) -> None:
        self.partial, self.progress, self.fingerprint = partial, progress, fingerprint
        self._noted = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._noted < 1:
            return
        with open(self.partial, "rb+") as file:
            os.fsync(file.fileno())
        new = self.progress.with_suffix(".sidecar")
        new.write_text(json.dumps({"fingerprint": self.fingerprint, "done": done}))
        os.replace(new, self.progress)
        self._noted = time.monotonic()


def _done(partial: pathlib.Path, progress: pathlib.Path, fingerprint: str, shape: Sequence[int]) -> int:
    """How many images an interrupted attempt has left; 0 if it is of other images."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(progress.read_text())
        if said["fingerprint"] == fingerprint and partial.stat().st_size >= said["done"] * math.prod(shape[1:]):
            return int(said["done"])
    return 0


def _check_room(cache: pathlib.Path, shape: Sequence[int], done: int) -> None:
    """Says what will be written where, if it is much, and refuses where there is no room for it."""
    needed = (shape[0] - done) * math.prod(shape[1:])
    free = shutil.disk_usage(cache.parent).free
    raw, what = cache.with_suffix(".raw"), f"{shape[0]:,} images of {shape[2]}x{shape[3]}"
    if needed > free:
        raise InvalidInput(
            f"{raw}: {what} need {_size(needed)} there, but only {_size(free)} are free; make room, use a smaller"
            " data.image_size, or link data.root to a larger disk"
        )
    if needed > LARGE:
        print(f"decoding {what} into {raw} ({_size(needed)} of {_size(free)} free)", file=sys.stderr)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

"""Decoded images in a file that the ranks of a host map into memory, and so hold once between them.

The images lie in ``NAME.raw`` one after the other; ``NAME.pt`` has the labels and what they were decoded
from, and is written last.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from harness.errors import InvalidInput, one_line

LARGE = 2**28  # bytes, from which on the place and the size are said before anything is written
CHUNK = 500  # images in memory written at a time


def read(cache: pathlib.Path, fingerprint: str) -> tuple[Tensor, Tensor] | None:
    """The images, mapped into memory, and labels that a cache holds; None if it is of no use.

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
        return _map(raw, kept["shape"]), kept["labels"]
    except Exception:  # a damaged file fails in many ways, and decoding again mends them all
        return None


def _map(raw: pathlib.Path, shape: Sequence[int]) -> Tensor:
    """Maps a file for reading only; mapped pages count against no limit, so it may be larger than memory."""
    pixels = np.memmap(raw, dtype=np.uint8, mode="r", shape=tuple(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the tensor cannot be written to
        return torch.from_numpy(pixels)


def write(
    cache: pathlib.Path,
    fingerprint: str,
    shape: Sequence[int],
    labels: Tensor,
    fill: Callable[[pathlib.Path], None],
) -> tuple[Tensor, Tensor]:
    """Writes the cache so that it is either whole or not there, and gives it as ``read`` does.

    Args:
        cache: its ``.pt`` file.
        fingerprint: of what the images are decoded from.
        shape: of the images, (N, 3, H, W).
        labels: int64 (N,).
        fill: writes the images into a file that is there and empty.

    Raises:
        InvalidInput: if the disk is too small, or does not take it, or an image cannot be decoded.
    """
    raw, partial, sidecar = (cache.with_suffix(f".{kind}") for kind in ("raw", "partial", "sidecar"))
    for file in (cache, raw, partial):
        if file.is_dir():
            raise InvalidInput(f"{file}: is a folder, where decoded images are to be kept; move it")
        file.unlink(missing_ok=True)  # of other images; its room may be needed
    _check_room(raw, shape)
    try:
        partial.write_bytes(b"")
        fill(partial)
        with open(partial, "rb+") as written:
            os.fsync(written.fileno())
        torch.save({"fingerprint": fingerprint, "shape": list(shape), "labels": labels}, sidecar)
        os.replace(partial, raw)
        os.replace(sidecar, cache)
    except (OSError, RuntimeError) as error:
        reason = f"the decoded images could not be written ({one_line(error)}); free some disk space"
        raise InvalidInput(f"{cache}: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
        sidecar.unlink(missing_ok=True)
    mapped = read(cache, fingerprint)
    if mapped is None:
        raise InvalidInput(f"{cache}: cannot be read back after writing; check the disk")
    return mapped


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
    what = f"{shape[0]:,} images of {shape[2]}x{shape[3]}"
    if needed > free:
        raise InvalidInput(
            f"{raw}: {what} need {_size(needed)} there, but only {_size(free)} are free; make room, use a"
            " smaller data.image_size, or link data.root to a larger disk"
        )
    if needed > LARGE:
        print(f"decoding {what} into {raw} ({_size(needed)} of {_size(free)} free)", file=sys.stderr)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

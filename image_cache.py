"""Decoded images in a file that the ranks of a host map into memory, and so hold once between them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from errors import InvalidInput, one_line


def read(cache: pathlib.Path, fingerprint: str) -> dict[str, Any] | None:
    """What the cache holds, mapped into memory; None if it is of no use."""
    if not cache.exists():
        return None
    try:
        kept = torch.load(cache, map_location="cpu", mmap=True, weights_only=True)
        return kept if kept["fingerprint"] == fingerprint else None
    except Exception:  # a damaged file fails in many ways, and decoding again mends them all
        return None


def write(
    cache: pathlib.Path, fingerprint: str, images: torch.Tensor, labels: torch.Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Writes the cache so that it is either whole or not there, and gives it as ``read`` does.

    Args:
        cache: the file.
        fingerprint: of what the images were decoded from.
        images: uint8 (N, 3, H, W).
        labels: int64 (N,).
        classes: the class names.

    Raises:
        InvalidInput: if the disk does not take it.
    """
    partial = cache.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            kept = {"fingerprint": fingerprint, "images": images, "labels": labels, "classes": list(classes)}
            torch.save(kept, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, cache)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise InvalidInput(
            f"{cache}: the decoded images could not be written ({one_line(error)}); free some disk space"
        ) from error
    mapped = read(cache, fingerprint)
    if mapped is None:
        raise InvalidInput(f"{cache}: cannot be read back after writing; check the disk")
    return mapped

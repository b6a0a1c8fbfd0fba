"""Torchvision's CIFAR10: found, unpacked or downloaded once a host, and kept decoded.

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import http.client
import os
import pathlib
import shutil

import torch
import torchvision
from torch import Tensor

import image_cache
from errors import InvalidInput, one_line
from host_lock import host_lock

_CIFAR = torchvision.datasets.CIFAR10
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def load(root: pathlib.Path, split: str, may_download: bool, size: tuple[int, int]) -> tuple[Tensor, Tensor, list[str]]:
    """Reads one split: 50,000 images to train, 10,000 to test.

    However many ranks or trials of a host start at once, one downloads and the others wait for it.

    Args:
        root: the folder that holds the dataset.
        split: ``train`` or ``test``.
        may_download: whether it may be downloaded where it is missing.
        size: height and width to scale to, in pixels.

    Returns:
        Images (N, 3, H, W) uint8, labels (N,) int64 and the class names.

    Raises:
        InvalidInput: if the dataset is missing or damaged and cannot be had.
    """
    with host_lock(root, "cifar10") as folder:
        fingerprint = f"{_fingerprint(root)} {size}"
        cache = folder / f".cifar10-{split}-{size[0]}x{size[1]}.pt"
        kept = image_cache.read(cache, fingerprint)
        if kept is None:
            dataset = _on_disk(root, split)
            if dataset is None:
                _fetch(root, may_download)
                dataset = _on_disk(root, split)
            if dataset is None:
                what = f"{_CIFAR.base_folder} is damaged again after unpacking"
                raise InvalidInput(f"data.root: {root}: {what}; check the disk")
            images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
            fill = image_cache.fill_from(images, size)
            shape = (len(images), 3, *size)
            fingerprint = f"{_fingerprint(root)} {size}"
            kept = image_cache.write(cache, fingerprint, shape, torch.tensor(dataset.targets), dataset.classes, fill)
    return kept["images"], kept["labels"], kept["classes"]


def _fingerprint(root: pathlib.Path) -> str:
    """Changes whenever a file of the dataset does; what torchvision has checked once is not read again."""
    files = sorted((root / _CIFAR.base_folder).glob("*"))
    return repr([(each.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for each in files for s in [each.stat()]])


def _on_disk(root: pathlib.Path, split: str) -> torchvision.datasets.CIFAR10 | None:
    """The dataset, or None if its files are missing or fail their checksums."""
    try:
        return _CIFAR(str(root), train=split == "train", download=False)
    except RuntimeError:
        return None
    except OSError as error:
        raise InvalidInput(f"data.root: {root}: cannot be read ({one_line(error)}); give another folder") from error


def _fetch(root: pathlib.Path, may_download: bool) -> None:
    """Unpacks or downloads CIFAR-10 beside its final place and moves it there whole."""
    archive, unpacked, partial = root / _CIFAR.filename, root / _CIFAR.base_folder, root / ".cifar10-partial"
    mend = f"put {_CIFAR.filename} (MD5 {_CIFAR.tgz_md5}) there, or use data.dataset: imagefolder or digits"
    what = f"{unpacked} is {'damaged' if unpacked.exists() else 'missing'}"
    usable = archive.exists() and torchvision.datasets.utils.check_integrity(str(archive), _CIFAR.tgz_md5)
    if archive.exists() and not usable:
        what += f" and {archive} is truncated or another file"
    if not usable and not may_download:
        raise InvalidInput(f"data.root: {root}: {what}, and data.download is false; {mend}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        if usable:  # what is in the right place already is not downloaded again
            (partial / _CIFAR.filename).symlink_to(archive.resolve())
        _CIFAR(str(partial), download=True)
        if unpacked.exists():
            shutil.rmtree(unpacked)
        os.replace(partial / _CIFAR.base_folder, unpacked)
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # RuntimeError: torchvision's for a checksum
        raise InvalidInput(f"data.root: {root}: {what}, and getting it failed ({one_line(error)}); {mend}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

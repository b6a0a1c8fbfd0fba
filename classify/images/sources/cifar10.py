"""Torchvision's CIFAR10: found, unpacked or downloaded once a host, and kept decoded.

Source: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import functools
import http.client
import os
import pathlib
import shutil

import torch
import torchvision
from torch import Tensor

from classify.images import cache
from classify.images.sources.encoded import Location
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.host_lock import host_lock
from deepspeed_trial.input_files import refused

_CIFAR = torchvision.datasets.CIFAR10


class Cifar10:
    """CIFAR-10: 50,000 images to train, 10,000 to test.

    However many ranks or trials of a host start at once, one downloads and the others wait for it.

    Args:
        location: the folder that holds the dataset, and whether it may be downloaded where it is missing.
    """

    classes = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
    parts = ("train", "test")

    def __init__(self, location: Location) -> None:
        self.root, self.may_download = pathlib.Path(location.root), location.download

    def count(self, part: str) -> int:
        """How many images a part has."""
        return {"train": 50_000, "test": 10_000}[part]

    def class_counts(self, part: str) -> list[int]:
        """How many images of each class a part has: as many of all."""
        return [self.count(part) // len(self.classes)] * len(self.classes)

    def encoded(self, part: str) -> None:
        """None: the images are decoded already."""

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Reads a part: images (N, 3, H, W) uint8 and labels (N,) int64.

        Raises:
            InvalidInput: if the dataset is missing or damaged and cannot be had.
        """
        with refused(f"data.root: {self.root}"):
            kept = cache.Cache(self.root, f"cifar10-{part}", size)
            if (found := kept.read(f"{_fingerprint(self.root)} {size}")) is not None:
                return found
            with host_lock(self.root, "cifar10", "data.root"):
                dataset = self._dataset(part)
            images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
            fill = functools.partial(cache.write_resized, images, size)
            fingerprint = f"{_fingerprint(self.root)} {size}"
            return kept.write(fingerprint, torch.tensor(dataset.targets), fill)

    def _dataset(self, part: str) -> torchvision.datasets.CIFAR10:
        dataset = _on_disk(self.root, part)
        if dataset is None:
            _fetch(self.root, self.may_download)
            dataset = _on_disk(self.root, part)
        if dataset is None:
            what = f"{_CIFAR.base_folder} is damaged again after unpacking"
            raise InvalidInput(f"data.root: {self.root}: {what}; check the disk")
        return dataset


def _fingerprint(root: pathlib.Path) -> str:
    """Changes whenever a file of the dataset does; what torchvision has checked once is not read again."""
    files = sorted((root / _CIFAR.base_folder).glob("*"))
    return repr(
        [(each.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for each in files for s in [each.stat()]]
    )


def _on_disk(root: pathlib.Path, part: str) -> torchvision.datasets.CIFAR10 | None:
    """The dataset, or None if its files are missing or fail their checksums."""
    try:
        return _CIFAR(str(root), train=part == "train", download=False)
    except RuntimeError:
        return None
    except OSError as error:
        reason = f"cannot be read ({one_line(error)}); give another folder"
        raise InvalidInput(f"data.root: {root}: {reason}") from error


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
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # RuntimeError: for a wrong checksum
        reason = f"{what}, and getting it failed ({one_line(error)}); {mend}"
        raise InvalidInput(f"data.root: {root}: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

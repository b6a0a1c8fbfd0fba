"""CIFAR-10, which torchvision downloads and unpacks once per host, in a file of decoded images.

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

from classify.images.pixel_files import PixelFile, write_resized
from classify.images.settings import DataSettings
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.host_lock import host_lock
from deepspeed_trial.input_files import refused

_CIFAR = torchvision.datasets.CIFAR10


class Cifar10:
    """CIFAR-10: 50,000 images to train, 10,000 to test.

    If several ranks or trials of a host start together, one downloads the dataset and the others wait.

    Args:
        settings: the dataset's folder, and whether a missing dataset may be downloaded.
    """

    classes = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
    parts = ("train", "test")

    def __init__(self, settings: DataSettings) -> None:
        self.root, self.may_download = pathlib.Path(settings.root), settings.download

    def count(self, part: str) -> int:
        """Return the number of images in a part."""
        return {"train": 50_000, "test": 10_000}[part]

    def class_counts(self, part: str) -> list[int]:
        """Return the number of a part's images in each class."""
        return [self.count(part) // len(self.classes)] * len(self.classes)

    def load(self, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return images (N, 3, H, W) uint8 and labels (N,) int64.

        Raises:
            InvalidInput: if the dataset is missing or damaged and cannot be downloaded.
        """
        with refused(f"data.root: {self.root}"):
            file = PixelFile(self.root, f"cifar10-{part}", size)
            if (whole := file.read(f"{_fingerprint(self.root)} {size}")) is not None:
                return whole
            with host_lock(self.root, "cifar10", "data.root"):
                dataset = _on_disk(self.root, part) or _fetched(self.root, part, self.may_download)
            images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
            about = f"{_fingerprint(self.root)} {size}", torch.tensor(dataset.targets)

            def fill(target: pathlib.Path) -> tuple[str, Tensor, int]:
                write_resized(images, size, target)
                return *about, len(images)

            with file.lock() as folder:  # another process may have been first
                return file.read(*about) or file.write(folder, len(images), fill)


def _fingerprint(root: pathlib.Path) -> str:
    """Return the sizes and times of the dataset's files; checksums are computed only after a change."""
    files = sorted((root / _CIFAR.base_folder).glob("*"))
    stats = [(file.name, file.stat()) for file in files]
    return repr([(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats])


def _on_disk(root: pathlib.Path, part: str) -> torchvision.datasets.CIFAR10 | None:
    """Return the dataset; None if files are missing or fail their checksums."""
    try:
        return _CIFAR(str(root), train=part == "train", download=False)
    except RuntimeError:
        return None


def _fetched(root: pathlib.Path, part: str, may_download: bool) -> torchvision.datasets.CIFAR10:
    """Download or unpack CIFAR-10 in a temporary folder, and move it to its final place when complete."""
    archive, unpacked, partial = root / _CIFAR.filename, root / _CIFAR.base_folder, root / ".cifar10-partial"
    file = f"{_CIFAR.filename} with the MD5 checksum {_CIFAR.tgz_md5}"
    remedy = f"put {file} into {root}, or use data.dataset: imagefolder or digits"
    missing = f"{unpacked} is {'damaged' if unpacked.exists() else 'missing'}"
    usable = archive.exists() and torchvision.datasets.utils.check_integrity(str(archive), _CIFAR.tgz_md5)
    if archive.exists() and not usable:
        missing += f" and {archive} is truncated, or is not CIFAR-10's archive"
    if not usable and not may_download:
        raise InvalidInput(f"data.root: {root}: {missing}, and data.download is false; {remedy}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        if usable:  # saves the download
            (partial / _CIFAR.filename).symlink_to(archive.resolve())
        _CIFAR(str(partial), download=True)
        if unpacked.exists():
            shutil.rmtree(unpacked)
        os.replace(partial / _CIFAR.base_folder, unpacked)
        return _CIFAR(str(root), train=part == "train")
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # RuntimeError: for a wrong checksum
        reason = f"{missing}, and the download failed ({one_line(error)}); {remedy}"
        raise InvalidInput(f"data.root: {root}: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)

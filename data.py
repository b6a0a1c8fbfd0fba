"""Images on disk -> uint8 tensors in memory -> loaders that give a whole micro-batch at a time.

``load`` reads one split of one dataset; ``data_loader`` makes the ``determined.pytorch.DataLoader`` of it. Decoding is
in ``image_folder.py``.
"""

from __future__ import annotations

import dataclasses
import http.client
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchvision
from determined import pytorch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset

import image_cache
import image_folder
from augment import Augmentation, Augmenter
from errors import InvalidInput, nearest, one_line
from host_lock import host_lock

IMAGE_SIZE = 32  # what Net takes, in pixels
DEVICES = ("auto", "cpu", "cuda")
MEAN = STD = [0.5, 0.5, 0.5]  # of what 0 to 255 becomes as 0 to 1, so that inputs are in [-1, 1]


@dataclass(frozen=True)
class ImageSet:
    """One split of a dataset, decoded and in memory.

    Attributes:
        images: uint8 (N, 3, 32, 32), RGB, 0 to 255.
        labels: int64 (N,), indices into ``classes``.
        classes: the class names.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageSet:
        """The same set in a device's memory."""
        return ImageSet(self.images.to(device), self.labels.to(device), self.classes)


# ------------------------------------------------------------------------------------------------- datasets


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` section of an experiment file.

    Attributes:
        dataset: ``cifar10``, ``imagefolder`` or ``digits``.
        root: the folder that holds the dataset (``digits`` needs none).
        download: whether ``cifar10`` may be downloaded when ``root`` lacks it.
        image_size: height and width of the images in pixels; ``Net`` takes 32.
        device: where the decoded images are kept: ``cpu``, ``cuda``, or ``auto``, a GPU's memory if they fit in half.
        augment: random changes of training images; see ``augment.py``.
    """

    dataset: str = "cifar10"
    root: str = "data"
    download: bool = True
    image_size: int = IMAGE_SIZE
    device: str = "auto"
    augment: Augmentation = dataclasses.field(default_factory=Augmentation)

    @classmethod
    def parse(cls, section: Mapping[str, Any] | None) -> DataConfig:
        """Checks the section and fills in the defaults.

        Raises:
            InvalidInput: for every key, type or value that cannot be meant, all at once.
        """
        section = {} if section is None else section
        if not isinstance(section, Mapping):
            raise InvalidInput(f"data: {section!r}: must be a mapping with the keys {', '.join(cls.__annotations__)}")
        faults = []
        for key, value in section.items():
            if key not in cls.__annotations__:
                faults.append(f"data.{key}: {value!r}: unknown key; {nearest(key, cls.__annotations__)}")
        parsed = cls(**{k: v for k, v in section.items() if k in cls.__annotations__})
        if not isinstance(parsed.dataset, str) or parsed.dataset not in DATASETS:
            faults.append(f"data.dataset: {parsed.dataset!r}: unknown dataset; use one of {', '.join(DATASETS)}")
        if not isinstance(parsed.root, str) or not parsed.root or "\0" in parsed.root:
            faults.append(f"data.root: {parsed.root!r}: must be a folder's path")
        if not isinstance(parsed.download, bool):
            faults.append(f"data.download: {parsed.download!r}: must be true or false")
        if type(parsed.image_size) is not int or parsed.image_size != IMAGE_SIZE:
            faults.append(f"data.image_size: {parsed.image_size!r}: Net takes {IMAGE_SIZE}; use {IMAGE_SIZE}")
        if parsed.device not in DEVICES:
            faults.append(f"data.device: {parsed.device!r}: must be one of {', '.join(DEVICES)}")
        elif parsed.device == "cuda" and not torch.cuda.is_available():
            faults.append("data.device: 'cuda': this machine has no GPU; use auto")
        augmentation = Augmentation()
        try:
            augmentation = Augmentation.parse(section.get("augment"), IMAGE_SIZE)
        except InvalidInput as error:
            faults += error.faults
        if faults:
            raise InvalidInput(faults)
        return dataclasses.replace(parsed, augment=augmentation)


def placed(source: ImageSet, config: DataConfig, device: torch.device) -> ImageSet:
    """The set where ``data.device`` wants it: in the memory of the device that trains, or in the host's."""
    if device.type == "cpu" or config.device == "cpu":
        return source
    fits = source.images.nbytes < torch.cuda.mem_get_info(device)[0] / 2
    return source.to(device) if fits or config.device == "cuda" else source


def load(config: DataConfig, split: str) -> ImageSet:
    """Reads one split of the dataset that ``config`` names.

    Args:
        config: the checked ``data`` section.
        split: ``train`` or ``test``.

    Raises:
        InvalidInput: if the data is missing, damaged or not usable; the line names the folder or file.
    """
    return DATASETS[config.dataset](config, split)


def _digits(config: DataConfig, split: str) -> ImageSet:
    """scikit-learn's 1,797 handwritten digits (8x8, 16 greys), enlarged; 1,437 to train and 360 to test.

    Source: https://archive.ics.uci.edu/dataset/80, as shipped in ``sklearn.datasets.load_digits``.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train, test = train_test_split(np.arange(len(bunch.target)), test_size=360, random_state=0, stratify=bunch.target)
    chosen = np.sort(train if split == "train" else test)
    grey = torch.from_numpy(bunch.images[chosen]).float().unsqueeze(1) * (255 / 16)
    large = torch.nn.functional.interpolate(grey, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    labels = torch.from_numpy(bunch.target[chosen]).long()
    return ImageSet(images, labels, tuple(str(name) for name in bunch.target_names))


def _cifar10(config: DataConfig, split: str) -> ImageSet:
    """Torchvision's CIFAR10: 50,000 images to train, 10,000 to test.

    However many ranks or trials of a host start at once, one downloads and the others wait for it.
    """
    root = pathlib.Path(config.root)
    with host_lock(root, "cifar10") as folder:
        cache = folder / f".cifar10-{split}.pt"
        kept = image_cache.read(cache, _cifar10_fingerprint(root))
        if kept is None:
            dataset = _cifar10_on_disk(root, split)
            if dataset is None:
                _fetch_cifar10(root, config.download)
                dataset = _cifar10_on_disk(root, split)
            if dataset is None:
                what = f"{_CIFAR.base_folder} is damaged again after unpacking"
                raise InvalidInput(f"data.root: {root}: {what}; check the disk")
            images = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
            labels = torch.tensor(dataset.targets)
            kept = image_cache.write(cache, _cifar10_fingerprint(root), images, labels, dataset.classes)
    return ImageSet(kept["images"], kept["labels"], tuple(kept["classes"]))


_CIFAR = torchvision.datasets.CIFAR10


def _cifar10_fingerprint(root: pathlib.Path) -> str:
    """Changes whenever a file of the dataset does; what torchvision has checked once is not read again."""
    files = sorted((root / _CIFAR.base_folder).glob("*"))
    return repr([(each.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for each in files for s in [each.stat()]])


def _cifar10_on_disk(root: pathlib.Path, split: str) -> torchvision.datasets.CIFAR10 | None:
    """The dataset, or None if its files are missing or fail their checksums."""
    try:
        return _CIFAR(str(root), train=split == "train", download=False)
    except RuntimeError:
        return None
    except OSError as error:
        raise InvalidInput(f"data.root: {root}: cannot be read ({one_line(error)}); give another folder") from error


def _fetch_cifar10(root: pathlib.Path, may_download: bool) -> None:
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


def _image_folder(config: DataConfig, split: str) -> ImageSet:
    return ImageSet(*image_folder.load(pathlib.Path(config.root), split, config.image_size))


def count(config: DataConfig, split: str) -> int:
    """How many images a split has, without decoding them.

    Raises:
        InvalidInput: as ``load`` does for an image folder.
    """
    if config.dataset == "imagefolder":
        return image_folder.count(pathlib.Path(config.root), split)
    return {"cifar10": {"train": 50_000, "test": 10_000}, "digits": {"train": 1437, "test": 360}}[config.dataset][split]


DATASETS: dict[str, Callable[[DataConfig, str], ImageSet]] = {
    "cifar10": _cifar10,
    "digits": _digits,
    "imagefolder": _image_folder,
}


# -------------------------------------------------------------------------------------------------- loaders


def as_inputs(images: Tensor) -> Tensor:
    """Makes inputs (B, 3, H, W) float32 of images (B, 3, H, W) uint8, on whichever device they are.

    Normalised to [-1, 1], bit for bit as torchvision's ``ToTensor`` and ``Normalize(0.5, 0.5)`` do.
    """
    return torch.div(images, 127.5).sub_(1)  # (x / 255 - 0.5) / 0.5: doubling is exact


class Batches(Dataset):
    """Images fetched a whole micro-batch at a time, from wherever they are kept.

    Args:
        source: the images.
        sampler: whose epoch the augmentation is for.
        augmenter: of training images.
    """

    def __init__(
        self, source: ImageSet, sampler: MicroBatchSampler | None = None, augmenter: Augmenter | None = None
    ) -> None:
        self.source, self.sampler, self.augmenter = source, sampler, augmenter

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gives images (B, 3, 32, 32) uint8 and labels (B,) int64 for indices (B,) int64."""
        indices = indices.to(self.source.images.device, non_blocking=True)
        images, labels = self.source.images.index_select(0, indices), self.source.labels.index_select(0, indices)
        if self.augmenter and self.sampler:
            images = self.augmenter(images, indices, self.sampler.begun - 1)
        return images, labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__(torch.tensor([index]))
        return images[0], labels[0]


class MicroBatchSampler(BatchSampler):
    """Cuts every epoch into global batches, and each of those evenly into micro-batches.

    Micro-batch ``(step * gradient_accumulation_steps + a) * ranks + rank`` is the ``a``-th of a step on a rank: so does
    ``determined.pytorch`` deal batches out to ranks. So the images of a step are the same for any number of
    processes and any accumulation (but for an uneven end of the epoch), ranks see disjoint images, and an epoch is a
    whole number of optimizer steps. The last step takes what is left over; if that is too little to give every
    micro-batch an image, it shares with the step before.

    Args:
        size: how many images there are.
        batch_size: images a step, over all ranks and accumulated micro-batches.
        parts: micro-batches a step: ranks times gradient accumulation steps.
        seed: shuffle by (seed, epoch); in order if None.

    Raises:
        InvalidInput: if there are fewer images than micro-batches in one step.
    """

    def __init__(self, size: int, batch_size: int, parts: int, seed: int | None = None) -> None:
        self.size, self.parts, self.seed = size, parts, seed
        self.epoch = self.begun = 0
        self.step_sizes = step_sizes(size, batch_size, parts)

    def __len__(self) -> int:
        return len(self.step_sizes) * self.parts

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the next one, as in ``torch.utils.data.DistributedSampler``."""
        self.epoch = epoch

    def order(self, epoch: int) -> Tensor:
        """The order of the images in an epoch, (N,) int64: a function of the seed and the epoch alone."""
        if self.seed is None:
            return torch.arange(self.size)
        return torch.from_numpy(np.random.default_rng((self.seed, epoch)).permutation(self.size))

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)[: sum(self.step_sizes)]
        self.epoch += 1
        self.begun = self.epoch
        for step in order.split(self.step_sizes):
            yield from step.tensor_split(self.parts)


def step_sizes(size: int, batch_size: int, parts: int) -> list[int]:
    """The images in each optimizer step of an epoch; see ``MicroBatchSampler``."""
    if size < parts:
        raise InvalidInput(
            f"train_batch_size: {batch_size}: one step is {parts} micro-batches, but there are only {size} images;"
            " use fewer processes or accumulation steps"
        )
    steps, left = divmod(size, batch_size)
    sizes = [batch_size] * steps
    if left >= parts:
        sizes.append(left)
    elif left and sizes and batch_size + left >= 2 * parts:
        both = sizes.pop() + left
        sizes += [both - both // 2, both // 2]
    # else: micro-batches of one image and fewer left than ranks: these few rest for one epoch
    return sizes


def as_fetched(batch: Any) -> Any:
    """Collates nothing: ``Batches`` gives whole micro-batches."""
    return batch


def data_loader(source: ImageSet, sampler: MicroBatchSampler, augmenter: Augmenter | None = None) -> pytorch.DataLoader:
    """Makes the loader that Determined shards, repeats and skips in.

    Args:
        source: the images.
        sampler: which images make a micro-batch.
        augmenter: of training images.
    """
    batches = Batches(source, sampler, augmenter)
    pinned = torch.cuda.is_available() and not source.images.is_cuda  # so that copies to the GPU need no waiting
    return pytorch.DataLoader(batches, batch_sampler=sampler, collate_fn=as_fetched, pin_memory=pinned)

"""The ``data`` section of an experiment file -> uint8 images in memory, or in a file that is mapped into it.

``load`` reads one split of one dataset; micro-batches of it are made in ``loaders.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

import cifar10
import image_folder
from augment import Augmentation
from errors import InvalidInput, nearest
from rules import is_count, is_number

IMAGE_SIZE = 32  # what Net takes, in pixels
MOST_PIXELS = {"digits": 512, "": 8192}  # of a side; digits are enlarged in memory
DEVICES = ("auto", "cpu", "cuda")
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that take 0 to 255 to [-1, 1]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as torchvision's pretrained weights take them
NORMALIZATIONS = ("half", "dataset", "imagenet", "weights")
SAMPLE = 10_000  # images of which a dataset's statistics are taken


@dataclass(frozen=True)
class ImageSet:
    """One split of a dataset, decoded and in memory.

    Attributes:
        images: uint8 (N, 3, h, w), RGB, 0 to 255.
        labels: int64 (N,), indices into ``classes``.
        classes: the class names.
        crop: height and width of what a network sees of each; all of it if None.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    crop: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> ImageSet:
        """The same set in a device's memory."""
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def cropped(self, images: Tensor) -> Tensor:
        """The middle of images (B, 3, h, w), as validation sees them."""
        if self.crop is None or tuple(images.shape[2:]) == self.crop:
            return images
        return functional.center_crop(images, list(self.crop))


# ------------------------------------------------------------------------------------------------- datasets


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` section of an experiment file.

    Attributes:
        dataset: ``cifar10``, ``imagefolder`` or ``digits``.
        root: the folder that holds the dataset (``digits`` needs none).
        download: whether ``cifar10`` may be downloaded when ``root`` lacks it.
        image_size: height and width of the images that the network sees, in pixels; ``Net`` takes 32.
        resize: the shorter side, in pixels, to which images are scaled before they are cropped to ``image_size``: in
            the middle, and for training at random places. As ``image_size`` if None.
        normalize: ``half`` (inputs in [-1, 1]), ``dataset`` (by its own mean and standard deviation), ``imagenet``,
            ``weights`` (as the pretrained weights want it), or a mapping with ``mean`` and ``std`` of 0 to 1, a number
            a channel.
        device: where the decoded images are kept: ``cpu``, ``cuda``, or ``auto``, a GPU's memory if they fit in half.
        augment: random changes of training images; see ``augment.py``.
    """

    dataset: str = "cifar10"
    root: str = "data"
    download: bool = True
    image_size: Any = (IMAGE_SIZE, IMAGE_SIZE)
    resize: int | None = None
    normalize: Any = "half"
    device: str = "auto"
    augment: Augmentation = dataclasses.field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        if is_count(self.image_size, 1):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        elif isinstance(self.image_size, list):
            object.__setattr__(self, "image_size", tuple(self.image_size))

    @property
    def canvas(self) -> tuple[int, int]:
        """Height and width of the images that are kept: ``image_size``, or as much larger as ``resize`` says."""
        height, width = self.image_size
        if self.resize is None:
            return height, width
        scale = self.resize / min(height, width)
        return round(height * scale), round(width * scale)

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
        sides = parsed.image_size
        most = MOST_PIXELS.get(str(parsed.dataset), MOST_PIXELS[""])
        if not (isinstance(sides, tuple) and len(sides) == 2 and all(is_count(s, 1) and s <= most for s in sides)):
            must = f"must be a whole number of pixels of at most {most:,}, or [height, width]"
            faults.append(f"data.image_size: {section['image_size']!r}: {must}")
            sides = (IMAGE_SIZE, IMAGE_SIZE)
        if parsed.resize is not None and not (is_count(parsed.resize, min(sides)) and parsed.resize <= most):
            must = f"must be a whole number of pixels from image_size ({min(sides)}) to {most:,}"
            faults.append(f"data.resize: {parsed.resize!r}: {must}")
        faults += _normalize_faults(parsed.normalize)
        if parsed.device not in DEVICES:
            faults.append(f"data.device: {parsed.device!r}: must be one of {', '.join(DEVICES)}")
        elif parsed.device == "cuda" and not torch.cuda.is_available():
            faults.append("data.device: 'cuda': this machine has no GPU; use auto")
        augmentation = Augmentation()
        try:
            augmentation = Augmentation.parse(section.get("augment"), min(sides))
        except InvalidInput as error:
            faults += error.faults
        if faults:
            raise InvalidInput(faults)
        return dataclasses.replace(parsed, augment=augmentation)


def placed(source: ImageSet, config: DataConfig, device: torch.device) -> ImageSet:
    """The set where ``data.device`` wants it: in the memory of the device that trains, or in the host's.

    Raises:
        InvalidInput: if it has to be on the device and does not fit.
    """
    if device.type == "cpu" or config.device == "cpu":
        return source
    size, free = source.images.nbytes, torch.cuda.mem_get_info(device)[0]
    if config.device == "cuda" and size > free:
        sizes = f"{size / 2**20:,.0f} MiB of images, but {free / 2**20:,.0f} MiB are free on the GPU"
        raise InvalidInput(f"data.device: 'cuda': {sizes}; use auto")
    return source.to(device) if config.device == "cuda" or size < free / 2 else source


def load(config: DataConfig, split: str) -> ImageSet:
    """Reads one split of the dataset that ``config`` names.

    Args:
        config: the checked ``data`` section.
        split: ``train`` or ``test``.

    Raises:
        InvalidInput: if the data is missing, damaged or not usable; the line names the folder or file.
    """
    images, labels, classes = DATASETS[config.dataset](config, split)
    return ImageSet(images, labels, tuple(classes), config.image_size)


def _normalize_faults(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        good = value.keys() == {"mean", "std"} and all(
            isinstance(each, (list, tuple)) and len(each) == 3 and all(is_number(n) and n <= 1 for n in each)
            for each in value.values()
        )
        if good and all(value["std"]):
            return []
    elif value in NORMALIZATIONS:
        return []
    must = "{mean: [R, G, B], std: [R, G, B]} of 0 to 1"
    return [f"data.normalize: {value!r}: must be one of {', '.join(NORMALIZATIONS)}, or {must}"]


Loaded = tuple[Tensor, Tensor, Sequence[str]]  # images, labels and class names


def _cifar10(config: DataConfig, split: str) -> Loaded:
    return cifar10.load(pathlib.Path(config.root), split, config.download, config.canvas)


def _digits(config: DataConfig, split: str) -> Loaded:
    """scikit-learn's 1,797 handwritten digits (8x8, 16 greys), enlarged; 1,437 to train and 360 to test.

    Source: https://archive.ics.uci.edu/dataset/80, as shipped in ``sklearn.datasets.load_digits``.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train, test = train_test_split(np.arange(len(bunch.target)), test_size=360, random_state=0, stratify=bunch.target)
    chosen = np.sort(train if split == "train" else test)
    grey = torch.from_numpy(bunch.images[chosen]).float().unsqueeze(1) * (255 / 16)
    large = torch.nn.functional.interpolate(grey, size=config.canvas, mode="bilinear", align_corners=False)
    images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    return images, torch.from_numpy(bunch.target[chosen]).long(), [str(name) for name in bunch.target_names]


def _image_folder(config: DataConfig, split: str) -> Loaded:
    return image_folder.load(pathlib.Path(config.root), split, config.canvas)


def count(config: DataConfig, split: str) -> int:
    """How many images a split has, without decoding them.

    Raises:
        InvalidInput: as ``load`` does for an image folder.
    """
    if config.dataset == "imagefolder":
        return image_folder.count(pathlib.Path(config.root), split)
    return {"cifar10": {"train": 50_000, "test": 10_000}, "digits": {"train": 1437, "test": 360}}[config.dataset][split]


def classes(config: DataConfig) -> list[str]:
    """The names of the dataset's classes; raises as ``count`` does."""
    if config.dataset == "imagefolder":
        return image_folder.classes_of(pathlib.Path(config.root))
    return list(cifar10.CLASSES) if config.dataset == "cifar10" else [str(digit) for digit in range(10)]


DATASETS: dict[str, Callable[[DataConfig, str], Loaded]] = {
    "cifar10": _cifar10,
    "digits": _digits,
    "imagefolder": _image_folder,
}


def normalization(config: DataConfig, train_set: ImageSet) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels from 0 to 1, by which inputs are normalised.

    Args:
        config: which says whose; not ``weights``, for those know themselves (``nets.normalization``).
        train_set: of whose images the statistics are taken, evenly spaced ones if there are many.
    """
    if isinstance(config.normalize, Mapping):
        return tuple(config.normalize["mean"]), tuple(config.normalize["std"])
    if config.normalize == "imagenet":
        return IMAGENET
    if config.normalize == "half":
        return HALF, HALF
    chosen = train_set.images[:: -(-len(train_set) // SAMPLE)]
    sums, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    for part in chosen.split(256):
        pixels = part.cpu().double() / 255
        sums, squares = sums + pixels.sum((0, 2, 3)), squares + pixels.square().sum((0, 2, 3))
        count += pixels[:, 0].numel()
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1e-6).sqrt()  # images of one colour have none
    return tuple(round(each, 6) for each in mean.tolist()), tuple(round(each, 6) for each in std.tolist())


def as_inputs(images: Tensor, mean: Sequence[float] = HALF, std: Sequence[float] = HALF) -> Tensor:
    """Makes inputs (B, 3, H, W) float32 of images (B, 3, H, W) uint8, on whichever device they are.

    Normalised by default to [-1, 1], bit for bit as torchvision's ``ToTensor`` and ``Normalize(0.5, 0.5)`` do.

    Args:
        images: RGB, 0 to 255.
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel.
    """
    if tuple(mean) == tuple(std) == HALF:
        return images.float().div_(127.5).sub_(1)  # (x / 255 - 0.5) / 0.5: doubling is exact
    scale, shift = _constants(tuple(mean), tuple(std), images.device)
    return images.float().div_(scale).sub_(shift)


@functools.lru_cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """By what pixels are divided, and what is taken off them: made once, for a copy to a GPU waits for it."""
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    return (255 * spread).to(device), (middle / spread).to(device)

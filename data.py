"""The trial's images: from the data plan to image sets, normalised inputs and loaders.

``classify/images/plan.py`` opens the dataset and splits it, ``augment.py`` and ``mixup.py`` change training
images.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from classify.images.augment import Augmentation, Augmenter
from classify.images.loader import MicroBatchLoader
from classify.images.order import Order
from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan, devices
from classify.images.settings import BALANCED

HALF = (0.5, 0.5, 0.5)  # the mean and the standard deviation that give inputs in [-1, 1]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of torchvision's pretrained weights
SAMPLE = 10_000  # the number of images for a dataset's statistics
FOR_WEIGHTS = 5_000  # the number of images for a network that initialises its weights from the data

Normalization = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


class Images:
    """The images of a trial: its splits, as image sets, inputs and loaders.

    A split is decoded at its first use, so that all other errors are found first.

    Args:
        plan: the opened dataset and its splits.
        seed: the seed of all random numbers.
        device: the training device.

    Attributes:
        gpu_bytes: the bytes of GPU memory that the decoded images will take.

    Raises:
        InvalidInput: if ``data.device`` is ``cuda`` and the images do not fit.
    """

    def __init__(self, plan: DataPlan, seed: int, device: torch.device) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        splits, decoded = ("train", plan.validation), torch.device("cpu") if plan.streams else device
        places = devices([plan.bytes(split) for split in splits], plan.settings, decoded)
        self._devices = dict(zip(splits, places, strict=True))
        self.gpu_bytes = sum(plan.bytes(split) for split, at in self._devices.items() if at.type == "cuda")
        augment, stored, seen = plan.settings.augment, plan.settings.stored_size, plan.settings.image_size
        self.augmenter: Augmenter | None = None
        if augment != Augmentation() or stored != seen:
            self.augmenter = Augmenter(augment, plan.count("train"), stored, seen, seed)

    @functools.cached_property
    def train(self) -> ImageSet:
        """The training images; raises the same errors as ``DataPlan.load``."""
        return self._load("train")

    @functools.cached_property
    def validation(self) -> ImageSet:
        """The validation images; without a validation split, the test images."""
        return self._load(self.plan.validation)

    @functools.cached_property
    def test(self) -> ImageSet:
        """The test images, on the host."""
        return self.plan.load("test")

    def _load(self, split: str) -> ImageSet:
        images, device = self.plan.load(split), self._devices[split]
        return images if device.type == "cpu" else images.to(device)

    @functools.cached_property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each channel; ``dataset`` decodes the training images."""
        chosen = self.plan.settings.normalize  # ``weights`` has become a mean and a standard deviation
        if isinstance(chosen, Mapping):
            return tuple(chosen["mean"]), tuple(chosen["std"])
        if chosen == "dataset":
            return statistics(self.train, self._spread(SAMPLE))
        return IMAGENET if chosen == "imagenet" else (HALF, HALF)

    def inputs(self, images: Tensor, channels_last: bool, size: tuple[int, int] | None = None) -> Tensor:
        """Scale and normalise images (B, 3, H, W) uint8 to inputs (B, 3, h, w) float32, on the device."""
        inputs = as_inputs(self.on_device(images), *self.normalization)
        if size and size != inputs.shape[2:]:
            inputs = F.interpolate(inputs, size, mode="bilinear", align_corners=False, antialias=True)
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

    def on_device(self, batch: Tensor) -> Tensor:
        """Copy a batch to the training device.

        The copy to a Mac's GPU is synchronous: an asynchronous copy could read freed memory. Source:
        https://github.com/pytorch/pytorch/issues/189690
        """
        return batch.to(self.device, non_blocking=self.device.type == "cuda")

    def sample(self) -> Tensor:
        """Return inputs (N, 3, H, W) float32 on the CPU, from at most 5,000 evenly spaced training images."""
        images, chosen = self.train, self._spread(FOR_WEIGHTS)
        return as_inputs(images.center_crop(images.select(chosen)).cpu(), *self.normalization)

    def _spread(self, most: int) -> Tensor:
        """Return indices (N,) int64 of at most ``most`` evenly spaced training images.

        With a window of shards, they are images of the first window.
        """
        windows = self.plan.windows("train")
        indices = torch.from_numpy(windows.first()) if windows else torch.arange(len(self.train))
        return indices[:: -(-len(indices) // most)].to(self.train.device)

    def augmented(self, most: int) -> tuple[Tensor, Tensor]:
        """Return evenly spaced training images (B, 3, H, W) uint8, augmented as in epoch 0, and labels (B,).

        Args:
            most: the maximum of B.
        """
        images, chosen = self.train, self._spread(most)
        pixels = images.select(chosen)
        if self.augmenter is None:
            return images.center_crop(pixels), images.labels[chosen]
        apart = copy.copy(self.augmenter)  # the original keeps its epoch
        return apart(pixels, chosen, 0), images.labels[chosen]

    def training_order(self, batch_size: int, micro_batches_per_step: int) -> Order:
        """Return the order of the training images, determined by (seed, epoch)."""
        labels = self.train.labels.cpu() if self.plan.settings.sampling == BALANCED else None
        count, windows = self.plan.count("train"), self.plan.windows("train")
        return Order(count, batch_size, micro_batches_per_step, self.seed, labels, windows)

    def training_loader(self, order: Order) -> MicroBatchLoader:
        """Return a loader of training images (B, 3, H, W) uint8 and labels (B,) int64."""
        workers = self.plan.workers(self.train, bool(self.plan.settings.augment.transforms))
        return MicroBatchLoader(self.train, order, self.augmenter, workers)

    def validation_loader(self, micro_batch: int, micro_batches_per_step: int) -> MicroBatchLoader:
        """Return a loader of the validation images, in order, every image once.

        Args:
            micro_batch: the number of images in a micro-batch.
            micro_batches_per_step: the number of ranks times the micro-batches that a rank processes at a
                time.
        """
        return self._in_order(self.plan.validation, self.validation, micro_batch, micro_batches_per_step)

    def test_loader(self, micro_batch: int, micro_batches_per_step: int) -> MicroBatchLoader | None:
        """Return a loader of the test images; None if there are none, or if validations use them."""
        if not self.plan.has_test:
            return None
        return self._in_order("test", self.test, micro_batch, micro_batches_per_step)

    def _in_order(self, split: str, images: ImageSet, micro_batch: int, parts: int) -> MicroBatchLoader:
        order = Order(len(images), micro_batch * parts, parts, windows=self.plan.windows(split))
        return MicroBatchLoader(images, order, None, self.plan.workers(images))


def statistics(images: ImageSet, chosen: Tensor) -> Normalization:
    """Return mean and standard deviation of each channel, for pixels from 0 to 1, over chosen images (N,)."""
    sums, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    for part in chosen.split(256):
        pixels = images.select(part).cpu().double() / 255
        sums, squares = sums + pixels.sum((0, 2, 3)), squares + pixels.square().sum((0, 2, 3))
        count += pixels[:, 0].numel()
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1e-6).sqrt()  # it is 0 if all images have one colour
    return tuple(round(v, 6) for v in mean.tolist()), tuple(round(v, 6) for v in std.tolist())


def as_inputs(images: Tensor, mean: Sequence[float] = HALF, std: Sequence[float] = HALF) -> Tensor:
    """Normalise images (B, 3, H, W) uint8 to inputs (B, 3, H, W) float32, on the images' device.

    By default inputs are in [-1, 1], bit-identical to torchvision's ``ToTensor`` and ``Normalize(0.5, 0.5)``.

    Args:
        images: RGB images with values from 0 to 255.
        mean: mean of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel, for pixels from 0 to 1.
    """
    if tuple(mean) == tuple(std) == HALF:
        return images.float().div_(127.5).sub_(1)  # (x / 255 - 0.5) / 0.5: doubling is exact
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)
    return images.float().div_(scale).sub_(shift)


@functools.lru_cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the divisor and the subtrahend of pixels; a cache avoids a synchronous copy in each step."""
    means, deviations = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (255 * deviations).to(device), (means / deviations).to(device)

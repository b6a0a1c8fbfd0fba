"""Images to train, validate and test: the ``data`` section -> image sets -> normalised inputs -> loaders.

Where images come from is in ``classify/images/sources/``, how training images are changed in
``augment.py`` and ``mixup.py`` there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from classify.images.augment import Augmentation, Augmenter
from classify.images.image_set import ImageSet, places
from classify.images.loader import MicroBatchLoader
from classify.images.order import Order, Windows
from classify.images.settings import BALANCED, MOST_WORKERS, DataSettings
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.files import NOT_READABLE, raise_some
from classify.images.sources.readable import Readable
from classify.images.splits import Splits
from classify.images.streaming import Streaming

HALF = (0.5, 0.5, 0.5)  # mean and standard deviation that take 0 to 255 to [-1, 1]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as torchvision's pretrained weights take them
SAMPLE = 10_000  # images of which a dataset's statistics are taken
FOR_WEIGHTS = 5_000  # images from which a network may initialise itself

Normalization = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


class Images:
    """The images of a trial: its splits, how they become inputs, and their loaders.

    A split is decoded when it is first asked for, so that all else can be refused before.

    Args:
        settings: the checked ``data`` section.
        source: the dataset, and which of its images train, validate and test.
        seed: of everything random.
        device: the one that trains.

    Attributes:
        gpu_bytes: the bytes of images in a GPU's memory, once they are decoded.

    Raises:
        InvalidInput: if the data is missing, damaged or not usable; the line names the folder or file.
    """

    def __init__(self, settings: DataSettings, source: Splits, seed: int, device: torch.device) -> None:
        self.settings, self.source = settings, source
        self.seed, self.device = seed, device
        pixels = math.prod(settings.stored_size)
        splits = ("train", source.validation)
        sizes = [3 * pixels * source.count(split) for split in splits]
        self.streaming = Streaming.resolve(settings, source)
        host = torch.device("cpu")
        kept_in = places(sizes, settings, host if self.streaming.streams else device)
        self._places = dict(zip(splits, kept_in, strict=True))
        pairs = zip(sizes, self._places.values(), strict=True)
        self.gpu_bytes = sum(size for size, place in pairs if place.type == "cuda")
        self.augmenter: Augmenter | None = None
        stored, seen = settings.stored_size, settings.image_size
        if settings.augment != Augmentation() or stored != seen:
            self.augmenter = Augmenter(settings.augment, source.count("train"), stored, seen, seed)

    @functools.cached_property
    def train(self) -> ImageSet:
        """The training images; raises as ``load`` does."""
        return self._load("train")

    @functools.cached_property
    def validation(self) -> ImageSet:
        """Those of the validations, which are the test images where no others are held out."""
        return self._load(self.source.validation)

    @functools.cached_property
    def test(self) -> ImageSet:
        """Those by which the trained network is judged at the end, on the host."""
        return load(self.settings, "test", self.source, self.streaming)

    def _load(self, split: str) -> ImageSet:
        images, place = load(self.settings, split, self.source, self.streaming), self._places[split]
        return images if place.type == "cpu" else images.to(place)

    def _windows(self, split: str) -> Windows | None:
        """Return the windows of a split's shards; None if all shards are shuffled together."""
        window = self.streaming.window
        return self.source.windows(split, window) if window else None

    def _fetch_ahead(self, split: str) -> Callable[[Sequence[int]], None] | None:
        """Return a function that fetches shards by their numbers; None if no shard is fetched."""
        return self.source.fetching_ahead(split) if self.streaming.streams else None

    @functools.cached_property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each channel; the dataset's own need its images."""
        return normalization(self.settings, lambda: self.train, self._spread)

    def inputs(self, images: Tensor, channels_last: bool, size: tuple[int, int] | None = None) -> Tensor:
        """Inputs (B, 3, h, w) float32 on the device of images (B, 3, H, W) uint8, scaled to a size."""
        inputs = as_inputs(images.to(self.device, non_blocking=True), *self.normalization)
        if size and size != inputs.shape[2:]:
            inputs = F.interpolate(inputs, size, mode="bilinear", align_corners=False, antialias=True)
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

    def sample(self) -> Tensor:
        """Inputs (N, 3, H, W) float32 on the CPU of at most 5,000 training images, evenly spaced."""
        images, chosen = self.train, self._spread(FOR_WEIGHTS)
        return as_inputs(images.center_crop(images.select(chosen)).cpu(), *self.normalization)

    def _spread(self, most: int) -> Tensor:
        """Indices (N,) int64 of so many training images, evenly spaced; of shards in windows in the first."""
        windows = self._windows("train")
        every = torch.from_numpy(windows.first()) if windows else torch.arange(len(self.train))
        return every[:: -(-len(every) // most)].to(self.train.device)

    def training_order(self, batch_size: int, micro_batches_per_step: int) -> Order:
        """Return the order of the training images, drawn by (seed, epoch)."""
        labels = self.train.labels.cpu() if self.settings.sampling == BALANCED else None
        count, parts = self.source.count("train"), micro_batches_per_step
        return Order(count, batch_size, parts, self.seed, labels, self._windows("train"))

    def training_loader(self, order: Order) -> MicroBatchLoader:
        """Micro-batches of training images (B, 3, H, W) uint8 and labels (B,) int64."""
        workers = self._workers(self.train, bool(self.settings.augment.transforms))
        return MicroBatchLoader(self.train, order, self.augmenter, workers, self._fetch_ahead("train"))

    def _workers(self, images: ImageSet, transforms: bool = False) -> int:
        """How many processes of this rank prepare images."""
        if not (images.is_streamed or transforms):
            return 0
        workers = self.settings.workers
        return min(torch.get_num_threads(), MOST_WORKERS) if workers == "auto" else int(workers)

    def validation_loader(self, micro_batch: int, micro_batches_per_step: int) -> MicroBatchLoader:
        """Micro-batches of the validation's images, in order, every image once.

        Args:
            micro_batch: images each.
            micro_batches_per_step: ranks, which take turns, times the micro-batches that each takes together.
        """
        return self._in_order(self.source.validation, self.validation, micro_batch, micro_batches_per_step)

    def test_loader(self, micro_batch: int, micro_batches_per_step: int) -> MicroBatchLoader | None:
        """The same of the test images; None where validations are of these, or there are none."""
        if not self.source.has_test:
            return None
        return self._in_order("test", self.test, micro_batch, micro_batches_per_step)

    def _in_order(self, split: str, images: ImageSet, micro_batch: int, parts: int) -> MicroBatchLoader:
        order = Order(len(images), micro_batch * parts, parts, windows=self._windows(split))
        return MicroBatchLoader(images, order, None, self._workers(images), self._fetch_ahead(split))


def load(
    settings: DataSettings, split: str, source: Splits | None = None, how: Streaming | None = None
) -> ImageSet:
    """Reads one split of a dataset.

    Args:
        settings: the checked ``data`` section.
        split: ``train``, ``val`` or ``test``.
        source: the dataset, if it is open already.
        how: its images are decoded, if that is resolved already.

    Raises:
        InvalidInput: if the data is missing, damaged or not usable; the line names the folder or file.
    """
    source = source or settings.open_source()
    how = how or Streaming.resolve(settings, source)
    images, labels, rows = source.load(split, settings.stored_size, how.decode)
    return ImageSet(images, labels, tuple(source.classes), settings.image_size, rows)


def check_images(settings: DataSettings, source: Splits) -> None:
    """Decode every image once.

    Raises:
        InvalidInput: with a line for each image that cannot be decoded, unless such images are left out.
    """
    if isinstance(source.source, EncodedSource) and not isinstance(source.source, Readable):
        left_out = Readable(source.source, settings.stored_size).left_out.values()
        raise_some([line for lines in left_out for line in lines.values()], NOT_READABLE)


def normalization(
    settings: DataSettings,
    train_set: Callable[[], ImageSet],
    spread: Callable[[int], Tensor] | None = None,
) -> Normalization:
    """Mean and standard deviation of each channel, of pixels from 0 to 1, by which inputs are normalised.

    Args:
        settings: which say whose; for ``weights`` their numbers stand there already.
        train_set: gives the images of which statistics are taken.
        spread: gives the indices of at most so many of them; evenly spaced ones by default.
    """
    if isinstance(settings.normalize, Mapping):
        return tuple(settings.normalize["mean"]), tuple(settings.normalize["std"])
    if settings.normalize == "imagenet":
        return IMAGENET
    if settings.normalize == "half":
        return HALF, HALF
    images = train_set()
    step = -(-len(images) // SAMPLE)
    chosen = spread(SAMPLE) if spread else torch.arange(0, len(images), step, device=images.device)
    sums, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    for part in chosen.split(256):
        pixels = images.select(part).cpu().double() / 255
        sums, squares = sums + pixels.sum((0, 2, 3)), squares + pixels.square().sum((0, 2, 3))
        count += pixels[:, 0].numel()
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=1e-6).sqrt()  # images of one colour have none
    return tuple(round(each, 6) for each in mean.tolist()), tuple(round(each, 6) for each in std.tolist())


def as_inputs(images: Tensor, mean: Sequence[float] = HALF, std: Sequence[float] = HALF) -> Tensor:
    """Makes inputs (B, 3, H, W) float32 of images (B, 3, H, W) uint8, on whichever device they are.

    Normalised by default to [-1, 1], bit for bit as torchvision's ``ToTensor`` and ``Normalize(0.5, 0.5)``
    do.

    Args:
        images: RGB, 0 to 255.
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel.
    """
    if tuple(mean) == tuple(std) == HALF:
        return images.float().div_(127.5).sub_(1)  # (x / 255 - 0.5) / 0.5: doubling is exact
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)
    return images.float().div_(scale).sub_(shift)


@functools.lru_cache
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """By what pixels are divided, and what is then subtracted; kept, for a copy to a GPU makes it wait."""
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    return (255 * spread).to(device), (middle / spread).to(device)

"""Decoded images: in memory, mapped from a file, in a file that grows in the training, or not stored."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import joblib
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms.v2 import functional
from tqdm import tqdm

from classify.config.rules import CROP
from classify.images.decode import MissingPackage, decode
from classify.images.listing import NOT_READABLE, ListedSource, Listing, raise_some
from classify.images.pixel_files import GrowingFile, PixelFile
from deepspeed_trial.errors import InvalidInput, TrainingStopped, UnreadableData

CHUNK = 64  # images that a thread or a process decodes at a time
AHEAD = 4  # shards that are fetched at the same time
_FILE_FORMAT = 6  # of a file of decoded images; one in another format is replaced


class State(enum.Enum):
    """The place where decoded images are stored."""

    MEMORY = "memory"  # a tensor in the memory of the host or of a GPU
    MAPPED = "mapped"  # all in one file, decoded before the first step; the ranks of a host map it
    GROWING = "growing"  # decoded when a step needs them, and then in a file
    NONE = "none"  # decoded whenever a step needs them


class Pixels:
    """Images (N, 3, h, w) uint8, RGB, 0 to 255, in one state.

    Args:
        state: ``MEMORY`` and ``MAPPED`` need ``images``, ``GROWING`` and ``NONE`` a ``listing``.
        images: (N, 3, h, w) uint8.
        listing: the images to decode.
        size: height and width to scale to, in pixels.
        file: stores the decoded images in the state ``GROWING``.
        fit: treatment of other aspect ratios; see ``decode``.
    """

    def __init__(
        self,
        state: State,
        images: Tensor | None = None,
        listing: Listing | None = None,
        size: tuple[int, int] = (0, 0),
        file: GrowingFile | None = None,
        fit: str = CROP,
    ) -> None:
        self.state, self.images, self._listing, self._size, self._file = state, images, listing, size, file
        self._fit = fit

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return torch.device("cpu") if self.images is None else self.images.device

    def select(self, indices: Tensor) -> Tensor:
        """Return images (B, 3, h, w) uint8 by their indices, int64 (B,).

        Raises:
            UnreadableData: with the name of the first unreadable image or shard.
        """
        if self.images is not None:
            return self.images.index_select(0, indices)
        if self._file is not None and self.prepare(indices):
            return torch.from_numpy(self._file.read(indices.numpy()))
        return default_collate(self._decode(indices.numpy()))  # into memory that a worker shares

    def prepare(self, indices: Tensor) -> bool:
        """Decode missing images (B,) into the growing file; return whether the file now has all of them.

        Raises:
            UnreadableData: as in ``select``.
        """
        if self._file is None:
            return False
        wanted = indices.numpy()
        missing = wanted[~self._file.has(wanted)]
        for part in np.array_split(missing, -(-len(missing) // CHUNK) or 1):
            if self._file.has_room:
                self._file.write(part, [image.numpy() for image in self._decode(part)])
        return bool(self._file.has(wanted).all())

    def _decode(self, indices: np.ndarray) -> list[Tensor]:
        """Decode images with torch's number of threads, which is 1 in a loader's worker."""
        assert self._listing is not None
        # Neighbours in a shard in turn: they may lie in one block
        places = indices if self._listing.places is None else self._listing.places.numpy()[indices]
        order = places.argsort()
        parts = np.array_split(order, -(-len(indices) // CHUNK) or 1)
        threads = min(torch.get_num_threads(), len(parts))
        try:
            if threads < 2:
                decoded = [self._decode_some(indices[part]) for part in parts]
            else:
                with ThreadPoolExecutor(threads) as pool:
                    decoded = list(pool.map(self._decode_some, (indices[part] for part in parts)))
        except InvalidInput as error:
            raise UnreadableData(error.errors) from error
        images = [image for part in decoded for image in part]
        return [images[place] for place in order.argsort()]

    def _decode_some(self, indices: np.ndarray) -> list[Tensor]:
        assert self._listing is not None
        contents = self._listing.read(indices.tolist())
        return [
            torch.from_numpy(
                decode(content, self._size, functools.partial(self._listing.name, index), self._fit)
            )
            for index, content in zip(indices.tolist(), contents, strict=True)
        ]


@dataclass(frozen=True)
class ImageSet:
    """One split of a dataset.

    Attributes:
        pixels: all images of the part from which the split is drawn.
        labels: int64 (M,), indices into ``classes``.
        classes: the class names.
        crop: height and width that a network sees, in pixels; the whole image if None.
        rows: int64 (M,), the indices of the split's images in ``pixels``; None means all, in order.
    """

    pixels: Pixels
    labels: Tensor
    classes: tuple[str, ...]
    crop: tuple[int, int] | None = None
    rows: Tensor | None = None

    @classmethod
    def in_memory(cls, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> ImageSet:
        """Return a set of images (N, 3, h, w) uint8 with labels (N,) int64."""
        return cls(Pixels(State.MEMORY, images), labels, classes)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> Tensor:
        """Return images (B, 3, h, w) uint8, not cropped, by their indices in the split, int64 (B,)."""
        return self.pixels.select(indices if self.rows is None else self.rows[indices])

    @property
    def images(self) -> Tensor:
        """The images (N, 3, h, w) uint8 of the whole part, which must be decoded."""
        assert self.pixels.images is not None
        return self.pixels.images

    @property
    def is_streamed(self) -> bool:
        """Whether images are decoded when a step needs them."""
        return self.pixels.images is None

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.pixels.device

    def prepare(self, indices: Tensor) -> bool:
        """Decode missing images (B,) into the growing file; return whether the file now has all of them."""
        return self.pixels.prepare(indices if self.rows is None else self.rows[indices])

    def image(self, index: int) -> np.ndarray:
        """Return one image, uint8 (h, w, 3)."""
        return self.select(torch.tensor([index], device=self.device))[0].permute(1, 2, 0).cpu().numpy()

    def to(self, device: torch.device) -> ImageSet:
        """Return the split in a device's memory, without the part's other images."""
        images = self.images if self.rows is None else self.images.index_select(0, self.rows)
        pixels = Pixels(State.MEMORY, images.to(device))
        return dataclasses.replace(self, pixels=pixels, labels=self.labels.to(device), rows=None)

    def center_crop(self, images: Tensor) -> Tensor:
        """Crop images (B, 3, h, w) in the middle, as validation does."""
        if self.crop is None or tuple(images.shape[2:]) == self.crop:
            return images
        return functional.center_crop(images, list(self.crop))


def open_pixels(
    source: ListedSource, part: str, size: tuple[int, int], state: State, fit: str = CROP
) -> Pixels:
    """Return the pixels of a part; they are mapped if the part has been decoded before.

    Args:
        source: the dataset.
        part: the name of a part.
        size: height and width to scale to, in pixels.
        state: ``MAPPED``, ``GROWING`` or ``NONE``.
        fit: treatment of other aspect ratios; see ``decode``.

    Raises:
        InvalidInput: if data is missing, empty, damaged or not readable.
        TrainingStopped: if the system kills a process that decodes.
    """
    listing = source.listing(part)
    file, fingerprint = file_of(source, part, size, fit), fingerprint_of(listing, size)
    whole = file.read(fingerprint, listing.labels)
    if whole is None and state is State.MAPPED:
        fill = functools.partial(decode_all, listing, size, part, fit=fit)
        whole = file.write(fingerprint, listing.labels, fill)
    if whole is not None:
        return Pixels(State.MAPPED, whole[0])
    growing = GrowingFile(file, fingerprint, listing.labels) if state is State.GROWING else None
    return Pixels(state, None, listing, size, growing, fit)


def file_of(source: ListedSource, part: str, size: tuple[int, int], fit: str) -> PixelFile:
    """Return the file of a part's decoded images."""
    name = f"images-{part}" if fit == CROP else f"images-{part}-{fit}"
    return PixelFile(source.location.folder, name, size)


def fingerprint_of(listing: Listing, size: tuple[int, int]) -> str:
    """Return the fingerprint of decoded images in their file."""
    return f"{_FILE_FORMAT} {size} {listing.fingerprint}"


def decode_all(
    listing: Listing, size: tuple[int, int], name: str, target: pathlib.Path, fit: str = CROP
) -> None:
    """Decode images into ``target``, on all cores, with a progress bar.

    Args:
        listing: the encoded images.
        size: height and width to scale to, in pixels.
        name: the images' name in the progress bar and in errors.
        target: an empty file.
        fit: treatment of other aspect ratios; see ``decode``.

    Raises:
        InvalidInput: with a line for each unreadable file, after trying all files.
        TrainingStopped: if the system kills a process that decodes.
    """
    errors = try_all(listing, size, name, target, fit)
    raise_some([line for error in errors.values() for line in error.errors], NOT_READABLE)


def try_all(
    listing: Listing, size: tuple[int, int], name: str, target: pathlib.Path | None = None, fit: str = CROP
) -> dict[int, InvalidInput]:
    """Decode images like ``decode_all``, with or without a file; return the errors by index."""
    count = len(listing.labels)
    order = np.arange(count) if listing.places is None else listing.places.argsort().numpy()
    # The workers compute with one thread each, so a fork, which copies nothing, is safe despite threads here
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers = min(joblib.cpu_count(), -(-count // CHUNK))
    bar = tqdm(total=count, desc=f"decoding {name}", unit=" images", disable=not sys.stderr.isatty())
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _start, ((listing, target, size, fit),))
    errors: dict[int, InvalidInput] = {}
    running: collections.deque[concurrent.futures.Future[_Errors]] = collections.deque()

    def finish(most: int) -> None:
        while len(running) > most:
            errors.update(running.popleft().result())
            bar.update(min(CHUNK, count - bar.n))

    with bar, pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork despite threads
        pool.submit(int).result()  # starts all workers, before a thread fetches
        processes = multiprocessing.active_children()
        try:
            for start, stop in _shards_fetched_ahead(listing):
                before = len(running)
                for begin in range(start, stop, CHUNK):
                    running.append(pool.submit(_decode_chunk, order[begin : min(begin + CHUNK, stop)]))
                finish(len(running) - before)  # few shards are needed at a time
            finish(0)
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise TrainingStopped(_why_broken(processes, name)) from error
            raise
    return errors


def _why_broken(processes: Iterable[multiprocessing.process.BaseProcess], name: str) -> str:
    """Return why a decoding process ended, by its signal."""
    signals = {-(process.exitcode or 0) for process in processes}
    if signal.SIGKILL in signals:
        reason = "was killed, as the system does when memory runs out"
        remedy = "give the machine or the container more memory, or end other programs"
    else:
        names = [each.name for each in signal.Signals if each in signals - {signal.SIGTERM}]  # the pool's
        reason = f"crashed ({', '.join(names) or 'without a signal'})"
        remedy = "an image may make its decoder crash; look at images of unknown origin first"
    return f"data.root: a process that decoded the images of {name} {reason}; {remedy}"


def _shards_fetched_ahead(listing: Listing) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each shard once it is local, while threads fetch the next shards."""
    if not listing.shards:
        yield 0, len(listing.labels)
        return
    with ThreadPoolExecutor(AHEAD) as pool:
        fetched = collections.deque(pool.submit(listing.local_file, each) for each in listing.shards[:AHEAD])
        for number, shard in enumerate(listing.shards):
            fetched.popleft().result()
            later = listing.shards[number + AHEAD :][:1]
            fetched.extend(pool.submit(listing.local_file, each) for each in later)
            yield shard.start, shard.stop


_Errors = list[tuple[int, InvalidInput]]  # by the index of an image
_Task = tuple[Listing, "pathlib.Path | None", tuple[int, int], str]
_task: _Task  # of this worker


def _start(task: _Task) -> None:
    """Store the task of all chunks; forks inherit it without a copy."""
    global _task
    _task = task
    torch.set_num_threads(1)


def _decode_chunk(indices: np.ndarray) -> _Errors:
    """Decode images, write them to a file if there is one, and return the errors of unreadable images."""
    listing, target, size, fit = _task
    errors: _Errors = []
    with open(target or os.devnull, "rb+") as written:
        for index in indices.tolist():
            image = np.zeros((3, *size), dtype=np.uint8)
            try:
                (content,) = listing.read([index])
                image = decode(content, size, functools.partial(listing.name, index), fit)
            except MissingPackage:
                raise  # of all such images at once
            except InvalidInput as error:
                errors.append((index, error))
            written.seek(index * image.nbytes)
            written.write(image.data)
    return errors

"""Decoded images: in memory, mapped from a file, or decoded when a step needs them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms.v2 import functional
from tqdm import tqdm

from classify.config.rules import CROP
from classify.images.decode import MissingPackage, decode
from classify.images.listing import ALL, NOT_READABLE, ListedSource, Listing, Rows, Shard, raise_some
from classify.images.pixel_files import GrowingFile, PixelFile
from classify.images.settings import DataSettings
from classify.images.sources.remote import AHEAD, ShardsAhead
from deepspeed_trial.errors import InvalidInput, TrainingStopped, UnreadableData

CHUNK = 64  # images that a thread or a process decodes at a time
_FILE_FORMAT = 6  # the version of files of decoded images; a file of another version is replaced


@dataclass(frozen=True, eq=False)
class Streamed:
    """Images (N, 3, h, w) uint8, RGB, that are decoded when a step selects them.

    Attributes:
        listing: the images to decode.
        settings: the settings that give the images' size and fit.
        file: the file that stores decoded images; None to decode them again in each epoch.
        shards: the shards of the images that the run uses.
    """

    listing: Listing
    settings: DataSettings
    file: GrowingFile | None
    shards: Sequence[Shard]

    @functools.cached_property
    def shards_ahead(self) -> ShardsAhead:
        """The prefetcher of the images' shards."""
        return ShardsAhead(self.listing.local_file)

    def fetch(self, numbers: Sequence[int], indices: np.ndarray) -> None:
        """Fetch shards, without a shard whose images, among the given int64 (N,), are all decoded."""
        shards = [self.shards[number] for number in numbers]
        if self.file is not None:
            needed = self.listing.shards_with(indices[~self.file.has(indices)])
            shards = [shard for shard in shards if shard in needed]
        self.shards_ahead.fetch(shards)

    def select(self, indices: Tensor) -> Tensor:
        """Return images (B, 3, h, w) uint8 by their indices, int64 (B,).

        Raises:
            UnreadableData: with the name of the first unreadable image or shard.
        """
        if self.file is not None and self.prepare(indices):
            return torch.from_numpy(self.file.read(indices.numpy()))
        return default_collate(self._decode(indices.numpy()))  # into memory that a worker shares

    def prepare(self, indices: Tensor) -> bool:
        """Decode those images (B,) that the growing file lacks; return whether it now has all (B,).

        Raises:
            UnreadableData: in the same cases as ``select``.
        """
        if self.file is None:
            return False
        wanted = indices.numpy()
        missing = wanted[~self.file.has(wanted)]
        for part in np.array_split(missing, -(-len(missing) // CHUNK) or 1):
            if self.file.has_room:
                self.file.write(part, self._decode(part))
        return bool(self.file.has(wanted).all())

    def _decode(self, indices: np.ndarray) -> list[np.ndarray]:
        """Decode images with torch's number of threads, which is 1 in a loader's worker."""
        # In the order of the shards, because neighbours may be in one row group of a Parquet file
        order = self.listing.places_of(indices).argsort()
        parts = np.array_split(indices[order], -(-len(indices) // CHUNK) or 1)
        threads = min(torch.get_num_threads(), len(parts))

        def decode_some(part: np.ndarray) -> list[np.ndarray]:
            return [_decoded(self.listing, index, self.settings) for index in part.tolist()]

        try:
            if threads < 2:
                decoded = list(map(decode_some, parts))
            else:
                with ThreadPoolExecutor(threads) as pool:
                    decoded = list(pool.map(decode_some, parts))
        except InvalidInput as error:
            raise UnreadableData(error.errors) from error
        images = [image for part in decoded for image in part]
        return [images[place] for place in order.argsort()]


def _decoded(listing: Listing, index: int, settings: DataSettings) -> np.ndarray:
    name = functools.partial(listing.name, index)
    return decode(listing.read(index), settings.stored_size, name, settings.fit)


@dataclass(frozen=True)
class ImageSet:
    """One split of a dataset.

    Attributes:
        pixels: all images of the part that contains the split: (N, 3, h, w) uint8, RGB, in memory, mapped
            from a file, or streamed.
        labels: int64 (M,), indices into ``classes``; or uint8 (M, C) of 0 and 1.
        classes: the class names.
        crop: height and width that a network sees, in pixels; the whole image if None.
        rows: int64 (M,), the indices of the split's images in ``pixels``; None means all, in order.
    """

    pixels: Tensor | Streamed
    labels: Tensor
    classes: tuple[str, ...]
    crop: tuple[int, int] | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> Tensor:
        """Return images (B, 3, h, w) uint8, not cropped, by their indices in the split, int64 (B,)."""
        indices = indices if self.rows is None else self.rows[indices]
        if isinstance(self.pixels, Streamed):
            return self.pixels.select(indices)
        return self.pixels.index_select(0, indices)

    def prepare(self, indices: Tensor) -> bool:
        """Decode those images (B,) that the growing file lacks; return whether it now has all (B,)."""
        indices = indices if self.rows is None else self.rows[indices]
        return isinstance(self.pixels, Streamed) and self.pixels.prepare(indices)

    def fetch(self, shards: Sequence[int]) -> None:
        """Fetch shards, by their indices, before images in them are selected; decoded images need none."""
        if isinstance(self.pixels, Streamed):
            rows = torch.arange(len(self)) if self.rows is None else self.rows
            self.pixels.fetch(shards, rows.numpy())

    @property
    def images(self) -> Tensor:
        """The images (N, 3, h, w) uint8 of the whole part, which must be decoded."""
        assert isinstance(self.pixels, Tensor)
        return self.pixels

    @property
    def is_streamed(self) -> bool:
        """Whether images are decoded when a step needs them."""
        return isinstance(self.pixels, Streamed)

    @property
    def device(self) -> torch.device:
        """The device of the images and their labels."""
        return self.labels.device

    def image(self, index: int) -> np.ndarray:
        """Return one image, uint8 (h, w, 3)."""
        return self.select(torch.tensor([index], device=self.device))[0].permute(1, 2, 0).cpu().numpy()

    def to(self, device: torch.device) -> ImageSet:
        """Return the split in a device's memory, without the part's other images."""
        images = self.images if self.rows is None else self.images.index_select(0, self.rows)
        return dataclasses.replace(self, pixels=images.to(device), labels=self.labels.to(device), rows=None)

    def center_crop(self, images: Tensor) -> Tensor:
        """Crop images (B, 3, h, w) in the middle, as validation does."""
        if self.crop is None or tuple(images.shape[2:]) == self.crop:
            return images
        return functional.center_crop(images, list(self.crop))


def open_pixels(
    source: ListedSource, part: str, rows: Rows, settings: DataSettings, streams: bool, keeps: bool
) -> Tensor | Streamed:
    """Return the images of a part; they are mapped if they have been decoded before.

    Args:
        source: the dataset.
        part: the name of a part.
        rows: the images to decode; a file has holes for the others.
        settings: the settings that give the images' size and fit.
        streams: whether images are decoded when a step needs them, instead of all now.
        keeps: whether to store streamed images in a file.

    Raises:
        InvalidInput: if data is missing or empty; if files are unreadable, with a line for each of the first.
        TrainingStopped: if the system kills a process that decodes.
    """
    listing = source.listing(part)
    file, fingerprint = file_of(source, part, settings), fingerprint_of(listing, rows, settings)
    count = len(listing.labels[rows])

    def fill(target: pathlib.Path) -> tuple[str, Tensor, int]:
        errors = try_all(listing, settings, part, target, rows)
        raise_some([line for error in errors.values() for line in error.errors], NOT_READABLE)
        return fingerprint, listing.labels, count

    whole = file.read(fingerprint, listing.labels)
    if whole is None and not streams:
        with file.lock() as folder:  # another process may have been first
            whole = file.read(fingerprint, listing.labels) or file.write(folder, count, fill)
    if whole is not None:
        return whole[0]
    growing = GrowingFile(file, fingerprint, listing.labels, rows) if keeps else None
    return Streamed(listing, settings, growing, listing.shards_with(rows))


def file_of(source: ListedSource, part: str, settings: DataSettings) -> PixelFile:
    """Return the file of a part's decoded images."""
    name = f"images-{part}" if settings.fit == CROP else f"images-{part}-{settings.fit}"
    return PixelFile(source.folder, name, settings.stored_size)


def fingerprint_of(listing: Listing, rows: Rows, settings: DataSettings) -> str:
    """Return the fingerprint that the file of decoded images stores: identity and size of the images."""
    return f"{_FILE_FORMAT} {settings.stored_size} {listing.digest(rows)}"


def try_all(
    listing: Listing, settings: DataSettings, name: str, target: pathlib.Path | None, rows: Rows = ALL
) -> dict[int, InvalidInput]:
    """Decode images on all cores, with a progress bar; return the errors by index.

    Args:
        listing: the encoded images.
        settings: the settings that give the images' size and fit.
        name: the images' name in the progress bar and in errors.
        target: an empty file for the images of the part; None to decode them without a file.
        rows: the images to decode; the file has holes for the others, and for unreadable images.

    Raises:
        InvalidInput: if a shard cannot be fetched, or a package is missing.
        TrainingStopped: if the system kills a process that decodes.
    """
    order = np.arange(len(listing.labels))[rows]
    order, count = order[listing.places_of(order).argsort()], len(order)
    start = "fork" if sys.platform == "linux" else None
    workers = min(joblib.cpu_count(), -(-count // CHUNK))
    bar = tqdm(total=count, desc=f"decoding {name}", unit=" images", disable=not sys.stderr.isatty())
    decode_chunk = functools.partial(_decode_chunk, listing, settings, target)
    errors: dict[int, InvalidInput] = {}
    with bar, workers_for(decode_chunk, workers, start) as pool:
        pool.submit(int).result()  # starts all workers, before a thread fetches
        processes = multiprocessing.active_children()
        try:
            for future in _submitted(pool, listing, order):
                errors.update(future.result())
                bar.update(min(CHUNK, count - bar.n))
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise TrainingStopped(_why_broken(processes, name)) from error
            raise
    if target:
        os.truncate(target, len(listing.labels) * 3 * math.prod(settings.stored_size))
    return errors


def _submitted(
    pool: concurrent.futures.Executor, listing: Listing, order: np.ndarray
) -> Iterator[concurrent.futures.Future[dict[int, InvalidInput]]]:
    """Submit each shard's chunks once it is local, and then yield the futures of the previous shard.

    Threads fetch the next shards meanwhile. So the decoding needs few local shards at a time.
    """
    shards, before = listing.shards_with(order), list[concurrent.futures.Future[dict[int, InvalidInput]]]()
    with ThreadPoolExecutor(AHEAD) as threads:
        fetched = collections.deque(threads.submit(listing.local_file, each) for each in shards[:AHEAD])
        ends = np.searchsorted(listing.places_of(order), [shard.stop for shard in shards]).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise([0, *(ends or [len(order)])])):
            if shards:
                fetched.popleft().result()
            fetched.extend(threads.submit(listing.local_file, each) for each in shards[number + AHEAD :][:1])
            chunks = (order[begin : min(begin + CHUNK, stop)] for begin in range(start, stop, CHUNK))
            running = [pool.submit(work_on, chunk) for chunk in chunks]
            yield from before
            before = running
        yield from before


def _why_broken(processes: Iterable[multiprocessing.process.BaseProcess], name: str) -> str:
    """Return why a decoding process ended, by its signal."""
    signals = {-(process.exitcode or 0) for process in processes}
    if signal.SIGKILL in signals:
        reason = "was killed, as the system does when memory runs out"
        remedy = "give the machine or the container more memory, or end other programs"
    else:
        signals.discard(signal.SIGTERM)  # the pool sends it
        names = [each.name for each in signal.Signals if each in signals]
        reason = f"crashed ({', '.join(names) or 'without a signal'})"
        remedy = "an image may make its decoder crash; look at images of unknown origin first"
    return f"data.root: a process that decoded the images of {name} {reason}; {remedy}"


def _decode_chunk(
    listing: Listing, settings: DataSettings, target: pathlib.Path | None, indices: np.ndarray
) -> dict[int, InvalidInput]:
    """Decode images, write them to a file if there is one, and return the errors of unreadable images."""
    errors: dict[int, InvalidInput] = {}
    with open(target or os.devnull, "rb+") as written:
        for index in indices.tolist():
            try:
                image = _decoded(listing, index, settings)
                written.seek(index * image.nbytes)
                written.write(image.data)
            except MissingPackage:
                raise  # one line stands for all images of the format
            except InvalidInput as error:
                errors[index] = error
    return errors


_work: Callable[[Any], Any]  # of this worker


@contextlib.contextmanager
def workers_for(
    work: Callable[[Any], Any], count: int, start: str | None = "fork"
) -> Iterator[concurrent.futures.Executor]:
    """Yield ``count`` processes that share a function: ``work_on`` calls it there.

    A fork copies nothing. It is safe despite the threads of this process: a worker computes with one thread.
    """
    context = multiprocessing.get_context(start)
    with (
        concurrent.futures.ProcessPoolExecutor(count, context, _start, (work,)) as pool,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork despite threads
        yield pool


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    torch.set_num_threads(1)


def work_on(part: Any) -> Any:
    """Return the result of the function of ``workers_for``, in one of its processes."""
    return _work(part)

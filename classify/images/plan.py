"""Resolves a run's data once: the images, their splits, and the place of decoded images."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classify.config.rules import CROP
from classify.images.listing import (
    ALL,
    NOT_READABLE,
    PARTS,
    ListedSource,
    Listing,
    Rows,
    Shard,
    counts_of,
    is_remote,
    raise_some,
)
from classify.images.order import Windows
from classify.images.pixel_files import in_bytes
from classify.images.pixels import ImageSet, open_pixels
from classify.images.settings import AUTO, BALANCED, MOST_WORKERS, ONCE, SKIP, STREAM, DataSettings
from classify.images.sources import Source, open_source
from classify.images.sources.left_out import excluding, labels_of, unreadable, without_unreadable
from classify.images.sources.remote import AHEAD
from classify.images.splits import Cut, groups_of
from deepspeed_trial.errors import InvalidInput

UNREADABLE = "unreadable.txt"  # in a run's folder: a line for each image that the run leaves out
LARGE = 2**33  # bytes of decoded images; a dataset with more is streamed by default
WINDOW = 16  # shards that are shuffled together, by default if streamed shards are remote
TEST_SHARE = 0.2  # the default share of the test images in a dataset without parts
VALIDATION_SHARE = 0.1  # for ``auto`` without a part ``val``


@dataclass(frozen=True, eq=False)
class DataPlan:
    """The images of a run, their splits, and the place of decoded images.

    Validations use the split ``val``: the share ``data.validation`` of the training images, or the dataset's
    part ``val``. Without either they use ``test``. Shares are drawn from each class, and are the same in all
    runs with the same ``data.split_seed``. No image is decoded yet, unless ``data.unreadable`` is ``skip``:
    then one process of the host decodes every image once.

    Attributes:
        settings: the checked ``data`` section.
        source: the dataset.
        kept: the images of each part that ``data.exclude`` and ``data.unreadable`` do not leave out.
        labels: the labels of these images; see ``labels_of``.
        cut: the splits that are held out of the training part.
        streams: whether images are decoded when a step needs them, instead of all before the first step.
        keeps: whether a file stores streamed images after their first decoding.
        window: the number of shards that are shuffled together; None for all.
        excluded_identity: the record of the images that ``data.exclude`` names, in checkpoints; None if there
            are none.
        left_out: an error line for each unreadable image that ``data.unreadable: skip`` leaves out.
        left_out_identity: the record of these images in checkpoints; None if there are none.
    """

    settings: DataSettings
    source: Source
    kept: Mapping[str, Rows]
    labels: Mapping[str, Tensor]
    cut: Cut
    streams: bool
    keeps: bool
    window: int | None
    excluded_identity: str | None
    left_out: Sequence[str]
    left_out_identity: str | None

    @classmethod
    def resolve(cls, settings: DataSettings) -> DataPlan:
        """Open the dataset; choose its splits, the place of decoded images and the attribute ``window``.

        Raises:
            InvalidInput: if the data is missing, damaged or not usable; if settings do not fit the dataset,
                with a line for each.
        """
        source = open_source(settings)
        shares = _shares(source, settings)
        every, excluded = excluding(source, settings)
        keeps = not _is_streamed(source, every, settings)
        kept, left_out, left_out_identity = without_unreadable(source, settings, every, keeps)
        labels = {part: labels_of(source, part, rows, settings) for part, rows in kept.items()}
        part = _training_part(source)
        cut = _cut(source, shares, kept[part], labels[part], settings)
        pixels = 3 * math.prod(settings.stored_size) * sum(map(len, labels.values()))
        remote = [e.size for e in dict.fromkeys(_shards(source, kept)) if is_remote(e.url)]
        streams = _is_streamed(source, kept, settings)
        window = WINDOW if settings.window is None and streams and remote else settings.window
        if not isinstance(window, int) or len(_shards(source, {part: kept[part]})) <= window:
            window = None
        needed = sum(remote)  # bytes of shards that must be local at a time
        if window or not streams:  # a window, and the next one, which is fetched meanwhile
            needed = sum(sorted(remote)[-2 * max(window or 0, AHEAD) :])
        keeps = streams and _has_room(source, settings, pixels + needed)
        others = excluded, left_out, left_out_identity
        plan = cls(settings, source, kept, labels, cut, streams, keeps, window, *others)
        if errors := plan._setting_errors(needed, pixels):
            raise InvalidInput(errors)
        return plan

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self.source.classes

    @property
    def names(self) -> tuple[str, ...]:
        """The splits: ``train``, and ``val``, ``test`` or both."""
        splits = {*self.cut.splits, *self.source.parts}
        return tuple(name for name in PARTS if name in splits)

    @property
    def validation(self) -> str:
        """The split that validates: ``val`` or ``test``."""
        return "val" if "val" in self.names else "test"

    @property
    def has_test(self) -> bool:
        """Whether there are test images that no validation uses."""
        return self.names == PARTS

    @property
    def chosen_on(self) -> str:
        """A description of the images on which validations compare checkpoints and trials."""
        return "validation images" if self.validation == "val" else "test images"

    @property
    def has_several_labels(self) -> bool:
        """Whether an image has any number of labels, as a row (C,) of 0 and 1."""
        return self.settings.several_labels is not None

    @property
    def passed_over(self) -> Mapping[str, int]:
        """The number of ignored files (not images of a class) in the folder, by extension."""
        return self.source.passed_over if isinstance(self.source, ListedSource) else {}

    @property
    def shards(self) -> list[Shard]:
        """The shards of all parts that have kept images."""
        return _shards(self.source, self.kept)

    def count(self, split: str) -> int:
        """Return the number of images in a split."""
        return len(self._labels(split))

    def class_counts(self, split: str) -> list[int]:
        """Return the number of a split's images in each class."""
        return counts_of(self._labels(split), len(self.classes))

    def file_names(self, split: str, indices: Sequence[int]) -> list[str | None]:
        """Return the names of a split's images in error lines; all None if the source decodes its images."""
        listing = self.listing(split)
        if listing is None:
            return [None] * len(indices)
        if indices and (rows := self._rows(split, listing.labels)) is not None:
            indices = rows[list(indices)].tolist()
        return [listing.name(index) for index in indices]

    def bytes(self, split: str) -> int:
        """Return the bytes of a split's decoded images."""
        return 3 * math.prod(self.settings.stored_size) * self.count(split)

    def load(self, split: str) -> ImageSet:
        """Return a split; decode it unless its images are streamed.

        Args:
            split: one of ``names``.

        Raises:
            InvalidInput: if images are missing or damaged; each line names a file.
        """
        part, settings = self.part_of(split), self.settings
        if isinstance(self.source, ListedSource):
            pixels = open_pixels(self.source, part, self.kept[part], settings, self.streams, self.keeps)
            labels = self.source.listing(part).labels
        else:
            pixels, labels = self.source.load(part, settings.stored_size)
        rows = self._rows(split, labels)
        if rows is not None:
            labels = labels[rows]
        return ImageSet(pixels, labels, self.classes, settings.image_size, rows)

    def windows(self, split: str) -> Windows | None:
        """Return the windows of a split's shards; None if all its shards are shuffled together."""
        listing = self.listing(split)
        shards = listing.shards_with(self.kept[self.part_of(split)]) if listing else ()
        if not self.window or listing is None or len(shards) <= self.window:
            return None
        rows = self._rows(split, listing.labels)
        places = listing.places_of(np.arange(len(listing.labels)) if rows is None else rows.numpy())
        numbers = np.searchsorted([shard.start for shard in shards], places, side="right") - 1
        are_remote = any(is_remote(shard.url) for shard in shards)
        return Windows(places, numbers.astype(np.int32), self.window, are_remote)

    def workers(self, images: ImageSet, has_transforms: bool = False) -> int:
        """Return the number of processes of this rank that prepare images; see ``data.workers``."""
        if not (images.is_streamed or has_transforms):
            return 0
        workers = self.settings.workers
        return min(torch.get_num_threads(), MOST_WORKERS) if workers == "auto" else int(workers)

    def check_images(self) -> None:
        """Decode every image once.

        Raises:
            InvalidInput: with a line for each of the first 20 unreadable images, unless the run leaves them
                out.
        """
        if isinstance(self.source, ListedSource) and self.settings.unreadable != SKIP:
            left_out = unreadable(self.source, self.settings, self.kept).values()
            raise_some([line for lines in left_out for line in lines.values()], NOT_READABLE)

    def part_of(self, split: str) -> str:
        """Return the part of the source that a split is in."""
        return split if split in self.source.parts else _training_part(self.source)

    def listing(self, split: str) -> Listing | None:
        """Return the images of the part that a split is in; None if the source decodes them."""
        return self.source.listing(self.part_of(split)) if isinstance(self.source, ListedSource) else None

    def _labels(self, split: str) -> Tensor:
        """Return the labels of a split, as ``labels`` has them."""
        part = self.part_of(split)
        return self.labels[part][self.cut.rows(split) if part == _training_part(self.source) else ALL]

    def _rows(self, split: str, labels: Tensor) -> Tensor | None:
        """Return the indices of a split's images in its part with these labels; None for the whole part."""
        part, cut = self.part_of(split), self.cut
        rows = torch.arange(len(labels))[self.kept[part]]
        if part == _training_part(self.source):
            if not isinstance(self.source, ListedSource):  # only its counts were known
                cut = dataclasses.replace(cut, labels=labels[rows].numpy())
            rows = rows[cut.rows(split)]
        return rows if len(rows) < len(labels) else None

    def _setting_errors(self, shards: int, pixels: int) -> list[str]:
        """Return a line for each setting that does not fit the dataset.

        Args:
            shards: bytes of shards that must be local at a time.
            pixels: bytes of all decoded images.
        """
        settings, errors, limit = self.settings, list[str](), self.settings.cache_limit
        if not isinstance(self.source, ListedSource):
            no_files = f"{settings.dataset} has no image files"
            if settings.decode == STREAM:
                errors.append(f"data.decode: 'stream': {no_files}; use once")
            if settings.fit != CROP:
                errors.append(f"data.fit: {settings.fit!r}: {no_files}; remove it")
        if isinstance(settings.window, int) and not self.shards:
            errors.append(f"data.window: {settings.window}: the dataset has no shards; remove it")
        if self.window and settings.sampling == BALANCED:
            reason = "takes images of all shards at any time; set data.window: all"
            errors.append(f"data.sampling: {BALANCED!r}: {reason}")
        if self.streams and settings.device == "cuda":
            errors.append("data.device: 'cuda': images that are streamed are on the host; use auto")
        reason = ""
        if limit is not None and shards > limit:
            reason = f"{in_bytes(shards)} of shards must be in the cache at a time; raise the limit"
            reason += ", or set a smaller data.window"
        elif limit is not None and settings.decode == ONCE and pixels > limit:
            reason = (
                f"the decoded images need {in_bytes(pixels)}; raise the limit, or set data.decode: stream"
            )
        return [*errors, f"data.cache.limit: {settings.cache.limit!r}: {reason}"] if reason else errors


def devices(sizes: Sequence[int], settings: DataSettings, device: torch.device) -> list[torch.device]:
    """Return the device for each set of images, by ``data.device``.

    With ``augment.transforms``, the training images stay on the host, which computes the transforms.

    Args:
        sizes: the bytes of each set, training images first.
        settings: the checked ``data`` section.
        device: the training device.

    Raises:
        InvalidInput: if ``data.device`` is ``cuda`` and the images do not fit.
    """
    chosen = [torch.device("cpu")] * len(sizes)
    if device.type != "cuda" or settings.device == "cpu":  # a Mac's GPU shares the host's memory
        return chosen
    free = torch.cuda.mem_get_info(device)[0]
    for number, size in enumerate(sizes):
        if number == 0 and settings.augment.transforms:
            continue
        if settings.device == "cuda" and size > free:
            shown = f"{size / 2**20:,.0f} MiB of images, but {free / 2**20:,.0f} MiB are free on the GPU"
            raise InvalidInput(f"data.device: 'cuda': {shown}; use auto")
        if settings.device == "cuda" or size < free / 2:
            chosen[number], free = device, free - size
    return chosen


def _is_streamed(source: Source, kept: Mapping[str, Rows], settings: DataSettings) -> bool:
    """Return whether images are decoded when a step needs them."""
    if not isinstance(source, ListedSource):
        return False
    if settings.decode is not None:
        return settings.decode == STREAM
    counts = [len(source.listing(part).labels[rows]) for part, rows in kept.items()]
    pixels = 3 * math.prod(settings.stored_size) * sum(counts)
    return pixels > (LARGE if settings.cache_limit is None else min(LARGE, settings.cache_limit))


def _training_part(source: Source) -> str:
    return "train" if "train" in source.parts else source.parts[0]


def _shards(source: Source, kept: Mapping[str, Rows]) -> list[Shard]:
    """Return the shards of the given images."""
    if not isinstance(source, ListedSource):
        return []
    return [shard for part, rows in kept.items() for shard in source.listing(part).shards_with(rows)]


def _cut(
    source: Source, shares: Mapping[str, float], rows: Rows, labels: Tensor, settings: DataSettings
) -> Cut:
    """Return the splits of the training part's images with these rows and labels.

    Raises:
        InvalidInput: if classes have too few images or groups, with a line for each.
    """
    groups, part = None, _training_part(source)
    if settings.group:
        groups = groups_of(source.listing(part) if isinstance(source, ListedSource) else None, rows, settings)
    elif settings.several_labels:
        groups = np.arange(len(labels))
    cut = Cut(shares, labels.numpy(), settings.split_seed, settings.fold, groups, settings.group)
    cut.check(source.classes)
    return cut


def _shares(source: Source, settings: DataSettings) -> dict[str, float]:
    """Return the share of each split that is held out of the training part.

    Raises:
        InvalidInput: if a share conflicts with the dataset's parts, or there are groups but no share.
    """
    shares: dict[str, float] = {}
    validation, test = settings.validation, settings.test
    if settings.fold:
        held = "validation" if "train" in source.parts else "test"
        if getattr(settings, held) not in (None, AUTO):
            reason = f"data.fold holds out the {held} images; remove one of the two"
            raise InvalidInput(f"data.{held}: {getattr(settings, held)}: {reason}")
        if "val" in source.parts:
            reason = "the dataset already has a part val; remove this key"
            raise InvalidInput(f"data.fold: {list(settings.fold)}: {reason}")
        if held == "validation" and test is None:
            return {"val": 1 / settings.fold[1]}
        test = test or 1 / settings.fold[1]
    if "train" not in source.parts:
        shares["test"] = TEST_SHARE if test is None else test
    elif test is not None:
        raise InvalidInput(f"data.test: {test}: the dataset already has a part test; remove this key")
    if validation == AUTO:
        validation = None if "val" in source.parts else VALIDATION_SHARE
    if validation is not None and "val" in source.parts:
        reason = "the dataset already has a part val; use auto, or remove this key"
        raise InvalidInput(f"data.validation: {validation}: {reason}")
    if validation is not None:
        shares["val"] = float(validation)
    if settings.group and not shares:
        reason = "the dataset has fixed splits, so none is drawn; set data.validation, or remove this key"
        raise InvalidInput(f"data.group: {settings.group!r}: {reason}")
    return shares


def _has_room(source: Any, settings: DataSettings, needed: int) -> bool:
    """Return whether ``data.cache.limit``, or else the disk, has room for decoded images and shards."""
    if settings.cache_limit is not None:
        return needed <= settings.cache_limit
    folder = source.folder
    height, width = settings.stored_size
    if any(folder.glob(f".images-*-{height}x{width}.growing")):
        return True  # the disk had room when a run began the file
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return needed <= shutil.disk_usage(folder).free

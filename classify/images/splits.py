"""Which images train, which validate and which test: folders of their own, or shares of others."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from classify.images.order import Windows
from classify.images.sources import Source
from classify.images.sources.decode_once import AHEAD
from classify.images.sources.encoded import Shard
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.readable import Readable
from classify.images.sources.remote import is_remote
from classify.images.sources.shard_cache import ShardsAhead
from classify.images.streamed import StreamedImages
from deepspeed_trial.errors import InvalidInput

SPLITS = ("train", "val", "test")
UNREADABLE = "unreadable.txt"  # of a run: a line for each image that it leaves out
TEST_SHARE = 0.2  # of a source of one part, where nothing is said
AUTO, VALIDATION_SHARE = "auto", 0.1  # the share where there is no folder
_DRAW = 17  # which keeps these draws apart from others of the same seed

Decode = Callable[[Source, str, tuple[int, int]], tuple[Tensor | StreamedImages, Tensor]]


def decode_now(source: Source, part: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) uint8 of a part, in memory or mapped into it, and labels (N,) int64."""
    return source.load(part, size)


class Splits:
    """A dataset's images to train, to validate and to test.

    Validations are of the split ``val``: what ``data.validation`` holds out of the training images, or what
    the source has of its own. Without either they are of ``test``. Shares are of each class, and the same for
    all runs with the same ``data.split_seed``.

    Args:
        source: the dataset.
        validation: the share of the training images that is held out; ``auto`` for a tenth, if the source has
            none of its own.
        test: the share of all images that tests, of a source that has but one part.
        seed: of which images are held out.

    Raises:
        InvalidInput: if a share is given of what the source has already, or a class is too small for them.
    """

    def __init__(
        self,
        source: Source,
        validation: float | str | None = None,
        test: float | None = None,
        seed: int = 0,
    ) -> None:
        self.source, self.seed, parts = source, seed, source.parts
        self.shares: dict[str, float] = {}
        is_whole = "train" not in parts
        self._trains = parts[0] if is_whole else "train"  # the part that holds the training images
        if is_whole:
            self.shares["test"] = TEST_SHARE if test is None else test
        elif test is not None:
            raise InvalidInput(f"data.test: {test}: the dataset has test images of its own; remove it")
        if validation == AUTO:
            validation = None if "val" in parts else VALIDATION_SHARE
        if validation is not None and "val" in parts:
            what = "the dataset has validation images of its own (val); use auto, or remove it"
            raise InvalidInput(f"data.validation: {validation}: {what}")
        if validation is not None:
            self.shares["val"] = float(validation)
        self.names = tuple(name for name in SPLITS if name == "train" or name in (*parts, *self.shares))
        if self.shares:
            _check(self._sizes, source.classes, len(self.shares) + 1)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self.source.classes

    @property
    def validation(self) -> str:
        """The split by which runs are judged while they train: ``val`` or ``test``."""
        return "val" if "val" in self.names else "test"

    @property
    def has_test(self) -> bool:
        """Whether there are test images by which nothing is chosen."""
        return self.names == SPLITS

    @property
    def chosen_on(self) -> str:
        """On which images a best checkpoint or trial is chosen, in words."""
        return "validation images" if self.validation == "val" else "test images"

    @property
    def left_out(self) -> list[str]:
        """An error line for each unreadable image that ``data.unreadable: skip`` leaves out."""
        parts = self.source.left_out if isinstance(self.source, Readable) else {}
        return [line for lines in parts.values() for line in lines.values()]

    @property
    def left_out_identity(self) -> str | None:
        """The images that are left out, as checkpoints name them; None if none are."""
        if not self.left_out:
            return None
        assert isinstance(self.source, Readable)
        indices = {part: list(lines) for part, lines in self.source.left_out.items()}
        digest = hashlib.sha256(repr(indices).encode()).hexdigest()[:8]
        return f"left out: {len(self.left_out):,}, digest {digest}"

    def count(self, split: str) -> int:
        """How many images a split has, without decoding them."""
        part = self._part(split)
        if self._is_cut(part):
            return sum(_taken(size, self.shares)[split] for size in self._sizes)
        return self.source.count(part)

    def load(
        self, split: str, size: tuple[int, int], decode: Decode = decode_now
    ) -> tuple[Tensor | StreamedImages, Tensor, Tensor | None]:
        """Gives what a split is in.

        Args:
            split: one of ``names``.
            size: height and width of the images, in pixels.
            decode: of a part: now, or when images of it are asked for.

        Returns:
            Images (N, 3, H, W) uint8 of this height and width; the split's labels (M,) int64; and which of
            the images it is, (M,) int64, or None for all of them.

        Raises:
            InvalidInput: if the data is missing, damaged or not usable; the line names the folder or file.
        """
        part = self._part(split)
        images, labels = decode(self.source, part, size)
        if not self._is_cut(part):
            return images, labels, None
        rows = self._rows(split, labels)
        return images, labels[rows], rows

    def windows(self, split: str, size: int) -> Windows | None:
        """The shards of a split, in windows of ``size``; None if there are no more than these."""
        part = self._part(split)
        images = self.source.encoded(part)
        if images is None or len(images.shards) <= size:
            return None
        places = np.arange(len(images.labels)) if images.places is None else images.places.numpy()
        if self._is_cut(part):
            places = places[self._rows(split, images.labels).numpy()]
        starts = [shard.start for shard in images.shards]
        shards = np.searchsorted(starts, places, side="right").astype(np.int32) - 1
        return Windows(places, shards, size, any(is_remote(shard.url) for shard in images.shards))

    def shards(self, split: str) -> Sequence[Shard]:
        """The shards of the part that a split is in."""
        images = self.source.encoded(self._part(split))
        return images.shards if images else ()

    def fetching_ahead(self, split: str) -> Callable[[Sequence[int]], None] | None:
        """What has threads fetch shards of a split, by their numbers; None if none are remote."""
        images = self.source.encoded(self._part(split))
        if images is None or not isinstance(self.source, EncodedSource):
            return None
        shards = [shard if is_remote(shard.url) else None for shard in images.shards]
        if not any(shards):
            return None
        ahead = ShardsAhead(self.source.shard_file(images.fetch), AHEAD)
        return lambda numbers: ahead.want([each for number in numbers if (each := shards[number])])

    @functools.cached_property
    def _sizes(self) -> Sequence[int]:
        """The images of each class in the part that is cut."""
        return self.source.class_counts(self._trains)

    def _part(self, split: str) -> str:
        return split if split in self.source.parts else self._trains

    def _is_cut(self, part: str) -> bool:
        return part == self._trains and bool(self.shares)

    def _rows(self, split: str, labels: Tensor) -> Tensor:
        """Which images a split has, drawn for each class by the seed, in their order."""
        random, chosen = np.random.default_rng((self.seed, _DRAW)), []
        for label in range(len(self.classes)):
            places = random.permutation(np.flatnonzero(labels.numpy() == label))
            taken, start = _taken(len(places), self.shares), 0
            for name, size in taken.items():
                if name == split:
                    chosen.append(places[start : start + size])
                start += size
        return torch.from_numpy(np.sort(np.concatenate(chosen)))


def _taken(size: int, shares: dict[str, float]) -> dict[str, int]:
    """How many images of a class each split has: at least one; ``train`` what the others leave."""
    taken: dict[str, int] = {}
    left = size
    for name, share in shares.items():
        others = len(shares) - len(taken)  # which need an image each after this one, ``train`` among them
        taken[name] = max(1, min(round(left * share), left - others))
        left -= taken[name]
    return {**taken, "train": left}


def _check(sizes: Sequence[int], classes: Sequence[str], splits: int) -> None:
    small = {name: size for name, size in zip(classes, sizes, strict=True) if size < splits}
    errors = [
        f"data.root: the class {name!r} has {size} image{'s' * (size != 1)}, too few for {splits} splits; add"
        " some, or set data.validation to null"
        for name, size in small.items()
    ]
    if errors:
        raise InvalidInput(errors)

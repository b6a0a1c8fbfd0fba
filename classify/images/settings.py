"""The ``data`` section of an experiment file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from classify.config import rules
from classify.config.rules import is_count, is_number, size_in_bytes
from classify.images.augment import Augmentation
from classify.images.sources import SOURCES, Kind, kind_of
from classify.images.sources.encoded import Location
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.readable import Readable
from classify.images.splits import AUTO, Splits
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput, nearest

IMAGE_SIZE = 32  # what Net takes, in pixels
MOST_WORKERS = 64  # of a rank
DEVICES = ("auto", "cpu", "cuda")
NORMALIZATIONS = ("half", "dataset", "imagenet", "weights")
BALANCED = "balanced"
SAMPLINGS = ("shuffle", BALANCED)
ONCE, STREAM = "once", "stream"
FAIL, SKIP = "fail", "skip"
ALL = "all"
_LEFT_OUT = "stands for what was not written into this file"


@dataclass(frozen=True)
class DataSettings:
    """The ``data`` section of an experiment file.

    Attributes:
        dataset: ``cifar10``, ``imagefolder`` or another name in ``SOURCES``.
        root: the folder that holds the dataset (``digits`` needs none), or a URL or pattern of shards.
        download: whether ``cifar10`` may be downloaded when ``root`` lacks it.
        image_size: height and width of the images that the network sees, in pixels; ``Net`` takes 32. If
            not given, 32, or for a folder of images what timm's network was made for.
        resize: the shorter side, in pixels, to which images are scaled before they are cropped to
            ``image_size``: in the middle, and for training at random places. As ``image_size`` if None.
        normalize: ``half`` (inputs in [-1, 1]), ``dataset`` (by its own mean and standard deviation),
            ``imagenet``, ``weights`` (as the pretrained weights want it), or a mapping with ``mean`` and
            ``std`` of 0 to 1, a number a channel.
        device: where the decoded images are kept: ``cpu``, ``cuda``, or ``auto``, a GPU's memory if they
            fit in half of what is free.
        augment: random changes of training images; see ``augment.py``.
        sampling: ``shuffle`` for each training image once an epoch, or ``balanced`` for as many images of
            each class: some of large classes, those of small ones several times.
        validation: the share of each class of the training images that is held out for validations; if None,
            these are of the folder ``val`` where there is one, and else of the test images; ``auto`` for
            that folder, or where there is none a tenth.
        test: the share of each class that tests, of a folder without ``train`` and ``test``; 0.2 if None.
        split_seed: of which images are held out, the same for all runs that are to be compared.
        decode: ``once`` for all images before the first step, into a file that every run maps; ``stream`` for
            each when a step needs it, kept for later epochs where there is room; if None, ``stream`` where
            there are more than 8 GiB of decoded images.
        window: how many shards are shuffled together; ``all``; if None, 16 where remote ones are streamed.
        workers: how many processes each rank has to decode streamed images, or to transform images, ahead of
            the step; 0 for none, ``auto`` for as many as the rank has threads.
        storage: fsspec's storage options, where ``root`` is a URL.
        unreadable: ``fail`` for images that cannot be decoded to end the run, ``skip`` to leave them out.
        cache: the ``folder`` for what is kept of remote data, on a disk of this machine, and the ``limit`` of
            what is kept there and decoded, e.g. 100GB.
    """

    dataset: str = "cifar10"
    root: str = "data"
    download: bool = True
    image_size: Any = (IMAGE_SIZE, IMAGE_SIZE)
    resize: int | None = None
    normalize: Any = "half"
    device: str = "auto"
    augment: Augmentation = dataclasses.field(default_factory=Augmentation)
    decode: str | None = None
    window: int | str | None = None
    workers: int | str = "auto"
    sampling: str = "shuffle"
    validation: float | str | None = None
    test: float | None = None
    split_seed: int = 0
    unreadable: str = FAIL
    storage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if is_count(self.image_size, 1):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        elif isinstance(self.image_size, list):
            object.__setattr__(self, "image_size", tuple(self.image_size))

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width of the decoded images: ``image_size``, or as much larger as ``resize`` says."""
        height, width = self.image_size
        if self.resize is None:
            return height, width
        scale = self.resize / min(height, width)
        return round(height * scale), round(width * scale)

    @property
    def kind(self) -> Kind:
        """What is known of the dataset before it is opened; of an unknown one what goes for most."""
        return kind_of(str(self.dataset)) or SOURCES["imagefolder"]

    def open_source(self) -> Splits:
        """Open the dataset that the section names.

        Nothing is decoded yet, except where ``unreadable`` is ``skip``: then all images are, once.

        Raises:
            InvalidInput: as ``Splits`` does, or if a dataset without image files is to skip some.
        """
        folder, limit = self.cache.get("folder"), self.cache_limit
        source = self.kind.make(Location(self.root, self.download, self.storage, folder, limit))
        if self.unreadable == SKIP:
            if not isinstance(source, EncodedSource):
                raise InvalidInput(f"data.unreadable: 'skip': {self.dataset} has no image files; remove it")
            source = Readable(source, self.stored_size)
        return Splits(source, self.validation, self.test, self.split_seed)

    @property
    def cache_limit(self) -> int | None:
        """Bytes that may be kept; None for no limit."""
        limit = self.cache.get("limit")
        return None if limit is None else size_in_bytes("data.cache.limit", limit)

    @classmethod
    def parse(
        cls, section: Mapping[str, Any] | None, net_size: tuple[int, int] | None = None
    ) -> DataSettings:
        """Checks the section and fills in the defaults.

        Args:
            section: of the experiment file.
            net_size: height and width for which the network was made, if it says: the default for images
                that have no size of their own.

        Raises:
            InvalidInput: for every key, type or value that cannot be meant, all at once.
        """
        section = {} if section is None else section
        keys = cls.__annotations__
        if not isinstance(section, Mapping):
            raise InvalidInput(f"data: {section!r}: must be a mapping with the keys {', '.join(keys)}")
        errors = ErrorList()
        unknown = {key: value for key, value in section.items() if key not in keys}
        errors.lines += [
            f"data.{k}: {redaction.shown(f'data.{k}', v)}: unknown key; {nearest(k, keys)}"
            for k, v in unknown.items()
        ]
        parsed = cls(**{key: value for key, value in section.items() if key in keys})
        if net_size and "image_size" not in section and parsed.kind.of_any_size:
            parsed = dataclasses.replace(parsed, image_size=net_size)
        errors.lines += parsed._errors()
        errors.lines += parsed._size_errors(section)
        sides = parsed.image_size
        if not _are_sides(sides) or max(sides) > rules.MOST_PIXELS:
            sides = (IMAGE_SIZE, IMAGE_SIZE)
        augmentation = Augmentation()
        with errors.collecting():
            augmentation = Augmentation.parse(section.get("augment"), sides)
        errors.raise_any()
        if not augmentation.transforms and parsed.decode != STREAM and parsed.workers != "auto":
            what = "does nothing without data.augment.transforms or data.decode: stream; remove it"
            errors.lines.append(f"data.workers: {parsed.workers!r}: {what}")
        elif augmentation.transforms and parsed.device == "cuda":
            what = "data.augment.transforms run on the host, where the images have to be; use auto"
            errors.lines.append(f"data.device: 'cuda': {what}")
        errors.raise_any()
        return dataclasses.replace(parsed, augment=augmentation)

    def _errors(self) -> list[str]:
        errors = []
        if not isinstance(self.dataset, str) or not kind_of(self.dataset):
            known = f"use one of {', '.join(SOURCES)}, or a file FILE.py of your own"
            errors.append(f"data.dataset: {self.dataset!r}: unknown dataset; {known}")
        if not isinstance(self.root, str) or not self.root or "\0" in self.root:
            errors.append(f"data.root: {self.root!r}: must be a folder's path or a URL")
        if not isinstance(self.download, bool):
            errors.append(f"data.download: {self.download!r}: must be true or false")
        for key in ("storage", "cache"):
            if not isinstance(value := getattr(self, key), Mapping):
                shown = redaction.shown(f"data.{key}", value)
                errors.append(f"data.{key}: {shown}: must be a mapping")
        options = self.storage if isinstance(self.storage, Mapping) else {}
        places = {"root": self.root, **{f"storage.{key}": value for key, value in options.items()}}
        for key, value in places.items():
            if isinstance(value, str) and redaction.MARK in value:
                mend = f"give it by --set data.{key}=VALUE"
                errors.append(f"data.{key}: {value!r}: {redaction.MARK} {_LEFT_OUT}; {mend}")
        if isinstance(self.cache, Mapping):
            for key, value in self.cache.items():
                if key == "limit":
                    try:
                        size_in_bytes("data.cache.limit", value)
                    except InvalidInput as error:
                        errors += error.errors
                elif key != "folder":
                    errors.append(f"data.cache.{key}: {value!r}: unknown key; use folder or limit")
                elif not isinstance(value, str) or not value or "\0" in value:
                    errors.append(f"data.cache.folder: {value!r}: must be a folder's path")
        if not _is_normalization(self.normalize):
            own = "{mean: [R, G, B], std: [R, G, B]} of 0 to 1"
            must = f"must be one of {', '.join(NORMALIZATIONS)}, or {own}"
            errors.append(f"data.normalize: {self.normalize!r}: {must}")
        if self.device not in DEVICES:
            errors.append(f"data.device: {self.device!r}: must be one of {', '.join(DEVICES)}")
        elif self.device == "cuda" and not torch.cuda.is_available():
            errors.append("data.device: 'cuda': this machine has no GPU; use auto")
        if self.sampling not in SAMPLINGS:
            errors.append(f"data.sampling: {self.sampling!r}: must be one of {', '.join(SAMPLINGS)}")
        for key, word in (("validation", AUTO), ("test", None)):
            share = getattr(self, key)
            if share not in (None, word) and not (is_number(share) and 0 < share < 1):
                either = f"{word} or " if word else ""
                errors.append(f"data.{key}: {share!r}: must be {either}a share between 0 and 1, e.g. 0.1")
        if not (is_count(self.split_seed, 0) and self.split_seed < 2**31):
            must = "must be a whole number from 0 to 2147483647"
            errors.append(f"data.split_seed: {self.split_seed!r}: {must}")
        if self.unreadable not in (FAIL, SKIP):
            errors.append(f"data.unreadable: {self.unreadable!r}: must be {FAIL} or {SKIP}")
        if self.decode not in (None, ONCE, STREAM):
            errors.append(f"data.decode: {self.decode!r}: must be {ONCE} or {STREAM}")
        if self.window not in (None, ALL) and not is_count(self.window, 1):
            errors.append(f"data.window: {self.window!r}: must be {ALL} or a number of shards")
        if self.workers != "auto" and not (is_count(self.workers, 0) and int(self.workers) <= MOST_WORKERS):
            must = f"must be auto or a whole number from 0 to {MOST_WORKERS}"
            errors.append(f"data.workers: {self.workers!r}: {must}")
        return errors

    def _size_errors(self, section: Mapping[str, Any]) -> list[str]:
        errors, sides = [], self.image_size
        most = self.kind.most_pixels
        if not _are_sides(sides) or max(sides) > most:
            must = f"must be a whole number of pixels of at most {most:,}, or [height, width]"
            errors.append(f"data.image_size: {section['image_size']!r}: {must}")
            sides = (IMAGE_SIZE, IMAGE_SIZE)
        if self.resize is not None and not (is_count(self.resize, min(sides)) and self.resize <= most):
            must = f"must be a whole number of pixels from image_size ({min(sides)}) to {most:,}"
            errors.append(f"data.resize: {self.resize!r}: {must}")
        return errors


def _are_sides(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(is_count(side, 1) for side in value)


def _is_normalization(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value in NORMALIZATIONS
    return (
        value.keys() == {"mean", "std"}
        and all(
            isinstance(each, (list, tuple)) and len(each) == 3 and all(is_number(n) and n <= 1 for n in each)
            for each in value.values()
        )
        and all(value["std"])
    )

"""The ``data`` section of an experiment file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from classify.config import rules
from classify.config.command_line import MOST_FOLDS
from classify.config.rules import (
    BOOL,
    CROP,
    FITS,
    MAPPING,
    PAD,
    PATH,
    SIZE,
    STRETCH,
    Rule,
    elsewhere,
    is_count,
    is_number,
    one_of,
    optional,
    size_in_bytes,
    whole,
)
from classify.config.sections import Keyed, Section, key
from classify.images.augment import Augmentation
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput

DATASETS = ("cifar10", "digits", "imagefolder", "webdataset", "parquet", "table")
OF_ONE_SIZE = ("cifar10", "digits")  # the datasets whose images have one size
MOST_OF_DIGITS = 512  # pixels; they are enlarged in memory
IMAGE_SIZE = 32  # pixels: the height and width for ``Net``
MOST_WORKERS = 64  # for each rank
NORMALIZATIONS = ("half", "dataset", "imagenet", "weights")
BALANCED = "balanced"
ONCE, STREAM = "once", "stream"
FAIL, SKIP = "fail", "skip"
ALL = "all"
PARENT = "parent"
AUTO = "auto"


SHARE = Rule(lambda value: is_number(value) and 0 < value < 1, "must be a share between 0 and 1, e.g. 0.1")
SHARDS = Rule(lambda value: is_count(value, 1), "must be a number of shards")


def _or(word: str, rule: Rule) -> Rule:
    """Return a rule that allows a word, and the values of another rule."""
    return Rule(lambda value: value == word or rule.is_valid(value), f"must be {word} or {rule.values}")


def _is_group(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, str) and value != "" and re.compile(value).groups <= 1)
    except (re.error, RecursionError, OverflowError):
        return False


def _gives_several_labels(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return value is None or (isinstance(value, str) and value.strip() != "")
    are_names = all(isinstance(name, str) and name != "" for name in value)
    return are_names and len(set(value)) == len(value) >= 2


def _is_fold(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(is_count(number, 1) for number in value)
        and value[0] <= value[1]
        and 2 <= value[1] <= MOST_FOLDS
    )


def _is_normalization(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value in NORMALIZATIONS
    return (
        value.keys() == {"mean", "std"}
        and all(
            isinstance(three, (list, tuple))
            and len(three) == 3
            and all(is_number(n) and n <= 1 for n in three)
            for three in value.values()
        )
        and all(value["std"])
    )


@dataclass(frozen=True)
class CacheSettings(Section):
    """The ``data.cache`` section of an experiment file."""

    EXAMPLE = "{folder: /mnt/cache, limit: 200GB}"

    folder: str | None = key(None, PATH, "The local folder for copies of remote shards.")
    limit: str | None = key(None, SIZE, "The maximum bytes of shard copies; the same for decoded images.")


@dataclass(frozen=True)
class DataSettings(Keyed):
    """The ``data`` section of an experiment file."""

    dataset: str = key(
        "cifar10",
        Rule(
            lambda value: isinstance(value, str) and (value in DATASETS or value.endswith(".py")),
            f"must be one of {', '.join(DATASETS)}, or a file FILE.py of yours",
        ),
        "The dataset.",
    )
    root: str = key(
        "data",
        PATH._replace(message="must be a folder's path or a URL"),
        "The dataset's folder (`digits` needs none), or a URL or pattern of shards.",
    )
    download: bool = key(True, BOOL, "`cifar10` is downloaded if `root` lacks it.")
    image_size: Any = key(
        (IMAGE_SIZE, IMAGE_SIZE),
        elsewhere("a whole number of pixels, or [height, width]"),
        "Height and width of the network's images; `Net` requires 32. For image files the default with a"
        " timm network is that network's size.",
        unit="pixels",
    )
    resize: int | None = key(
        None,
        elsewhere("a whole number of pixels, at least image_size"),
        "The shorter side before a crop to `image_size`, at a random place in training and in the middle in"
        " validation; by default there is no crop.",
        unit="pixels",
    )
    fit: str = key(
        CROP,
        one_of(*FITS),
        f"The fit of images with another aspect ratio; `{CROP}`: the middle of the image, `{PAD}`: the whole"
        f" image with a grey border, `{STRETCH}`: the whole image, distorted.",
    )
    normalize: Any = key(
        "half",
        Rule(
            _is_normalization,
            f"must be one of {', '.join(NORMALIZATIONS)}, or {{mean: [R, G, B], std: [R, G, B]}} with values"
            " from 0 to 1",
        ),
        "The normalization; `half`: inputs in [-1, 1], `dataset`: mean and standard deviation of the training"
        " images, `weights`: the normalization of the pretrained weights.",
    )
    device: str = key(
        "auto",
        one_of("auto", "cpu", "cuda"),
        "The memory for decoded images; `auto`: the GPU's, if less than half of its free memory is enough.",
    )
    augment: Augmentation = key(
        Augmentation, elsewhere("a mapping"), "Random changes of training images.", section=Augmentation
    )
    decode: str | None = key(
        None,
        Rule(lambda value: value in (None, ONCE, STREAM), f"must be {ONCE} or {STREAM}"),
        f"`{ONCE}` decodes all images before the first step, into a file that every run maps; `{STREAM}`"
        f" decodes each image when a step needs it; by default `{STREAM}` above 8 GiB of decoded images.",
    )
    window: int | str | None = key(
        None,
        optional(_or(ALL, SHARDS)),
        "The number of shards whose images are shuffled together; by default 16 for streamed remote shards,"
        " else all.",
        unit="shards",
    )
    workers: int | str = key(
        "auto",
        _or("auto", whole(0, MOST_WORKERS + 1)),
        "Data-loading processes of each rank; `auto`: one for each thread of the rank.",
        unit="processes",
    )
    sampling: str = key(
        "shuffle",
        one_of("shuffle", BALANCED),
        "`shuffle`: each training image once an epoch; `balanced`: equally many images of each class, by"
        " oversampling small classes and undersampling large ones.",
    )
    validation: float | str | None = key(
        None,
        optional(_or(AUTO, SHARE)),
        "The share of each class's training images that validations use; by default validations use the"
        f" folder `val`, or without it the test images; `{AUTO}`: the folder `val`, or without it 0.1 of the"
        " training images.",
    )
    test: float | None = key(
        None,
        optional(SHARE),
        "The share of each class in the test split, for a folder without `train` and `test`; by default 0.2.",
    )
    split_seed: int = key(0, whole(0, 2**31), "The seed that chooses the held-out images.")
    exclude: str | None = key(
        None,
        optional(PATH._replace(message="must be the path of a file")),
        "A text file with the name of an image per line; the run ignores these images.",
    )
    group: str | None = key(
        None,
        Rule(
            _is_group,
            f"must be {PARENT}, a table's column, or a regular expression with one group, e.g. '/(.+)-[0-9]'",
        ),
        "The group of each image, e.g. a person; all images of a group are in one split."
        f" `{PARENT}`: the name of the image's folder; or a column of a table; or a regular expression that"
        " finds one group in the path.",
    )
    several_labels: str | tuple[str, ...] | None = key(
        None,
        Rule(
            _gives_several_labels,
            "must be the separator of the labels in a cell, e.g. ';', or a list of two or more columns",
        ),
        "For a `table` with any number of labels an image: the separator of the labels in a cell, e.g. `;`,"
        " or the labels' columns of 0 and 1, e.g. `[red, round]`.",
    )
    fold: tuple[int, int] | None = key(
        None,
        Rule(
            lambda value: value is None or _is_fold(value),
            "must be [K, N], the number of a fold and of all folds, e.g. [1, 5]",
        ),
        "The fold that is held out, e.g. `[2, 5]`: the second of five. It replaces the test split, or the"
        " validation split if the dataset has test images.",
    )
    unreadable: str = key(
        FAIL,
        Rule(lambda value: value in (FAIL, SKIP), f"must be {FAIL} or {SKIP}"),
        f"`{FAIL}`: images that cannot be decoded end the run; `{SKIP}`: the run leaves them out.",
    )
    storage: Mapping[str, Any] = key(dict, MAPPING, "fsspec's storage options for a `root` that is a URL.")
    cache: CacheSettings = key(
        CacheSettings,
        Rule(lambda value: value is not None, f"must be a mapping, e.g. {CacheSettings.EXAMPLE}"),
        "The cache of remote data.",
        section=CacheSettings,
    )

    def __post_init__(self) -> None:
        if is_count(self.image_size, 1):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        for name in ("image_size", "fold", "several_labels"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width of decoded images in pixels: ``image_size``, or larger because of ``resize``."""
        height, width = self.image_size
        if self.resize is None:
            return height, width
        scale = self.resize / min(height, width)
        return round(height * scale), round(width * scale)

    @property
    def group_column(self) -> str | None:
        """The column of a table that ``group`` names; None if it names none."""
        is_column = self.group is not None and self.group != PARENT and not re.compile(self.group).groups
        return self.group if is_column else None

    @property
    def cache_limit(self) -> int | None:
        """Maximum bytes of fetched shards and decoded images; None for no limit."""
        limit = self.cache.limit
        return None if limit is None else size_in_bytes("data.cache.limit", limit)

    @classmethod
    def parse(
        cls, section: Mapping[str, Any] | None, net_size: tuple[int, int] | None = None
    ) -> DataSettings:
        """Check the section, and fill in the defaults.

        Args:
            section: the section ``data`` of the experiment file.
            net_size: the network's preferred height and width; the default size if the images may differ in
                size.

        Raises:
            InvalidInput: with a line for each invalid key, type or value.
        """
        section = {} if section is None else section
        if not isinstance(section, Mapping):
            raise InvalidInput(f"data: {section!r}: must be a mapping with the keys {', '.join(cls.keys())}")
        errors = ErrorList()
        values = cls.read("data.", {**section, "augment": None}, errors, redaction.shown)
        errors.lines += _left_out_errors(values)
        parsed = cls(**{**values, "augment": Augmentation()})
        if net_size and "image_size" not in section and parsed.dataset not in OF_ONE_SIZE:
            parsed = dataclasses.replace(parsed, image_size=net_size)
        errors.lines += parsed._errors(section)
        sides = parsed.image_size
        if not _are_sides(sides) or max(sides) > rules.MOST_PIXELS:
            sides = (IMAGE_SIZE, IMAGE_SIZE)
        augmentation = Augmentation()
        with errors.collecting():
            augmentation = Augmentation.parse(section.get("augment"), sides)
        errors.raise_any()
        if not augmentation.transforms and parsed.decode != STREAM and parsed.workers != "auto":
            what = "has no effect without data.augment.transforms or data.decode: stream; remove it"
            errors.lines.append(f"data.workers: {parsed.workers!r}: {what}")
        elif augmentation.transforms and parsed.device == "cuda":
            what = "data.augment.transforms need the images on the host; use auto"
            errors.lines.append(f"data.device: 'cuda': {what}")
        errors.raise_any()
        return dataclasses.replace(parsed, augment=augmentation)

    def _errors(self, section: Mapping[str, Any]) -> list[str]:
        """Return a line for each size that is invalid, and for each value that does not fit the others."""
        most = MOST_OF_DIGITS if self.dataset == "digits" else rules.MOST_PIXELS
        errors, sides = [], self.image_size
        if self.device == "cuda" and not torch.cuda.is_available():
            errors.append("data.device: 'cuda': this machine has no GPU with CUDA; use auto")
        if not _are_sides(sides) or max(sides) > most:
            must = f"must be a whole number of pixels of at most {most:,}, or [height, width]"
            errors.append(f"data.image_size: {section['image_size']!r}: {must}")
            sides = (IMAGE_SIZE, IMAGE_SIZE)
        if self.resize is not None and not (is_count(self.resize, min(sides)) and self.resize <= most):
            must = f"must be a whole number of pixels from {min(sides)}, as in image_size, to {most:,}"
            errors.append(f"data.resize: {self.resize!r}: {must}")
        if self.several_labels is not None and self.dataset != "table":
            reason = f"{self.dataset} gives an image one label; set data.dataset: table, or remove this key"
            errors.append(f"data.several_labels: {self.several_labels!r}: {reason}")
        if self.several_labels is not None and self.sampling == BALANCED:
            reason = "needs one label for each image; use hyperparameters.class_weights: balanced"
            errors.append(f"data.sampling: {BALANCED!r}: {reason}")
        return errors


def _are_sides(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(is_count(side, 1) for side in value)


def _left_out_errors(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that stands for a removed secret."""
    storage = values.get("storage")
    options = storage if isinstance(storage, Mapping) else {}
    places = {"root": values.get("root"), **{f"storage.{name}": value for name, value in options.items()}}
    left_out = [name for name, value in places.items() if isinstance(value, str) and redaction.MARK in value]
    what = f"{redaction.MARK} stands for a secret"
    return [f"data.{n}: {places[n]!r}: {what}; give the secret by --set data.{n}=VALUE" for n in left_out]

"""Torchvision's transforms by name, with separate random draws for each image.

Source: https://docs.pytorch.org/vision/stable/transforms.html
"""

from __future__ import annotations

import copy
import enum
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from classify.config.rules import is_number, one_of
from classify.config.sections import unknown_keys
from deepspeed_trial.errors import ErrorList, InvalidInput, nearest, one_line

TRANSFORMS: dict[str, type[v2.Transform]] = {
    name: each
    for name, each in vars(v2).items()
    if isinstance(each, type) and issubclass(each, v2.Transform) and each is not v2.Transform
}
INSTEAD = {  # remedies for transforms of batches or of floats
    "MixUp": "set hyperparameters.mixup",
    "CutMix": "set hyperparameters.cutmix",
    "Normalize": "set data.normalize",
    "ToDtype": "remove it; images become floats afterwards",
    "ConvertImageDtype": "remove it; images become floats afterwards",
}
FORM = "must be a name, or a name with its arguments, e.g. {ColorJitter: {brightness: 0.2}}"
TRIES = 4  # runs of a transform on random pixels, to check it

Entry = Mapping[str, Mapping[str, Any]]  # a name and its arguments


def parse(path: str, value: Any, size: tuple[int, int]) -> tuple[Entry, ...]:
    """Check a list of transforms, and try each transform.

    Args:
        path: the list's path in error lines.
        value: names, or mappings of a name to its arguments.
        size: height and width of the images.

    Returns:
        The transforms, as mappings.

    Raises:
        InvalidInput: with a line for each transform that is unknown, cannot be created, fails, changes the
            image's size or type, or does nothing.
    """
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(f"{path}: {value!r}: must be a list, e.g. [RandAugment]")
    errors, entries = ErrorList(), []
    for index, each in enumerate(value):
        with errors.collecting():
            entries.append(_entry(f"{path}[{index}]", each, size))
    errors.raise_any()
    return tuple(entries)


def make(entries: Sequence[Entry]) -> v2.Compose | None:
    """Compose transforms; return None for an empty list."""
    return v2.Compose([_made(entry) for entry in entries]) if entries else None


def transform_each(transform: v2.Transform, images: Tensor, seeds: Tensor) -> Tensor:
    """Transform every image with its own seed; torch's generator keeps its state.

    Args:
        transform: the result of ``make``.
        images: (B, 3, H, W) uint8, on the CPU.
        seeds: (B,) int64.

    Returns:
        Images of the same shape and type.
    """
    transformed = []
    with torch.random.fork_rng(devices=[]):
        for image, seed in zip(images, seeds.tolist(), strict=True):
            torch.default_generator.manual_seed(seed)
            transformed.append(transform(image))
    return torch.stack(transformed)


def _entry(path: str, value: Any, size: tuple[int, int]) -> Entry:
    entry = {value: {}} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise InvalidInput(f"{path}: {value!r}: {FORM}")
    ((name, given),) = entry.items()
    if name not in TRANSFORMS:
        which = f"no such transform in torchvision.transforms.v2; {nearest(name, TRANSFORMS)}"
        raise InvalidInput(f"{path}: {name!r}: {which}")
    path, arguments = f"{path}.{name}", {} if given is None else given
    if name in INSTEAD:
        raise InvalidInput(f"{path}: does not work on a single uint8 image; {INSTEAD[name]}")
    if not isinstance(arguments, Mapping):
        raise InvalidInput(f"{path}: {arguments!r}: must be a mapping of arguments, or nothing")
    known, errors, checked = inspect.signature(TRANSFORMS[name]).parameters, ErrorList(), {}
    errors.lines += unknown_keys(f"{path}.", arguments, known, "no such argument", no_keys="it takes none")
    for key, argument in arguments.items():
        if key not in known:
            continue
        with errors.collecting():
            kind = type(known[key].default)
            if issubclass(kind, enum.Enum):
                choices = one_of(*(each.value for each in kind))
                if not choices.is_valid(argument):
                    raise InvalidInput(f"{path}.{key}: {argument!r}: {choices.message}")
            nested = key == "transforms"
            checked[key] = parse(f"{path}.{key}", argument, size) if nested else argument
    required = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    missing = [key for key in required if key not in arguments]
    errors.lines += [f"{path}.{key}: missing; give that argument" for key in missing]
    errors.raise_any()
    if reason := _refusal(name, checked, size):
        raise InvalidInput(f"{path}: {dict(arguments)!r}: {reason}")
    return {name: checked}


def _made(entry: Entry) -> v2.Transform:
    ((name, arguments),) = entry.items()
    values: dict[str, Any] = {}
    for key, parameter in inspect.signature(TRANSFORMS[name]).parameters.items():
        if key in arguments:
            value, default = arguments[key], parameter.default
            if key == "transforms":
                value = [_made(each) for each in value]
            values[key] = type(default)(value) if isinstance(default, enum.Enum) else value
    return TRANSFORMS[name](**values)


def _refusal(name: str, arguments: Mapping[str, Any], size: tuple[int, int]) -> str | None:
    """Try a transform on images of high and low contrast; return the reason if it is unusable, else None."""
    remedy = "change or remove it"
    if name == "RandomErasing" and isinstance(arguments.get("value"), str):
        return "random values are for images of floats; give a number from 0 to 255, or one for each channel"
    noise = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    changes, shown = False, f"an image of {size[0]}x{size[1]} pixels"
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            transform = _always(_made({name: arguments}))
        except Exception as error:  # the transforms raise different classes
            return f"cannot be created ({one_line(error)}); {remedy}"
        for number in range(TRIES):
            image = noise if number % 2 else noise // 4 + 96
            torch.default_generator.manual_seed(number)
            try:
                after = transform(image.clone())
            except Exception as error:
                return f"fails on {shown} ({one_line(error)}); {remedy}"
            if type(after) is not Tensor or after.dtype != image.dtype:
                kind = after.dtype if type(after) is Tensor else type(after).__name__
                return f"turns an image, a tensor of torch.uint8, into {kind}; {remedy}"
            if after.shape != image.shape:
                return f"turns an image of shape {list(image.shape)} into {list(after.shape)}; {remedy}"
            changes |= not torch.equal(after, image)
    return None if changes else f"does nothing to an image; {remedy}"


def _always(transform: v2.Transform) -> v2.Transform:
    """Return a copy of a transform with all its probabilities 1."""
    certain = copy.deepcopy(transform)
    for each in certain.modules():
        if is_number(getattr(each, "p", None)):
            vars(each)["p"] = 1.0
    return certain

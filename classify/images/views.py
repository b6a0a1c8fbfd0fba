"""Test-time augmentation: an image is classified by the mean of the scores of several views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from classify.config.options import TestTimeAugmentation
from deepspeed_trial.errors import InvalidInput


def views(inputs: Tensor, how: TestTimeAugmentation) -> Iterator[tuple[Tensor, float]]:
    """Gives views of images, and the weight of each view's scores; the images themselves come first.

    With shifts the views that are not shifted weigh half of all, as in airbench94. Source:
    https://github.com/KellerJordan/cifar10-airbench

    Args:
        inputs: (B, 3, H, W), normalised; ``how.shift`` is less than H and W.
        how: which views.

    Returns:
        Pairs of inputs (B, 3, H, W) and a weight; the weights sum to 1.
    """
    height, width = inputs.shape[2:]
    places = [(inputs, 1.0)]
    if how.shift:
        padded, far = F.pad(inputs, (how.shift,) * 4, mode="reflect"), 2 * how.shift
        up_left, down_right = padded[..., far:, far:], padded[..., :height, :width]
        places = [(inputs, 0.5), (up_left, 0.25), (down_right, 0.25)]
    for place, weight in places:
        if not how.mirror:
            yield place, weight
            continue
        yield place, weight / 2
        yield place.flip(-1), weight / 2


def view_scores(
    classify: Callable[[Tensor], Tensor], inputs: Tensor, how: TestTimeAugmentation | None
) -> tuple[Tensor, Tensor]:
    """Classifies images, and by their views where these are asked for.

    What the further views draw of random numbers is given back, so that they change nothing else.

    Args:
        classify: gives logits (B, C) float32 of inputs.
        inputs: (B, 3, H, W), normalised.
        how: which views.

    Returns:
        Logits (B, C) of the images alone, and the weighted mean of those of all views.
    """
    plain = classify(inputs)
    if how is None:
        return plain, plain
    (_, weight), *others = views(inputs, how)
    mean = weight * plain
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        for view, weight in others:
            mean += weight * classify(view)
    return plain, mean


def check_shift(path: str, how: TestTimeAugmentation, size: tuple[int, int]) -> None:
    """Raises ``InvalidInput`` where images of this height and width are too small to be shifted so far."""
    if how.shift >= min(size):
        what = f"images have {min(size)} pixels; use at most {min(size) - 1}"
        raise InvalidInput(f"{path}.shift: {how.shift}: {what}")


def parse(text: str, path: str) -> TestTimeAugmentation:
    """Reads views as a command line has them.

    Args:
        text: e.g. ``mirror,shift=1``.
        path: what to call it in an error line.

    Raises:
        InvalidInput: with a line for each key or value that is wrong.
    """
    section: Mapping[str, Any] = {
        key: (int(value) if value.isdecimal() else value) if equals else True
        for key, equals, value in (part.strip().partition("=") for part in text.split(","))
    }
    return TestTimeAugmentation.parse(path, section)

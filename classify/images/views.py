"""Test-time augmentation: an image's class is the one with the highest mean score over several views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from classify.config.options import TestTimeAugmentation
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.random_state import randomness_kept


def views(inputs: Tensor, chosen: TestTimeAugmentation) -> Iterator[tuple[Tensor, float]]:
    """Yield views of images, and the weight of each view's scores; the first view is the unchanged images.

    With shifts, the unshifted views have half of the total weight, as in airbench94. Source:
    https://github.com/KellerJordan/cifar10-airbench

    Args:
        inputs: (B, 3, H, W), normalised; ``chosen.shift`` is less than H and W.
        chosen: the views.

    Returns:
        Pairs of inputs (B, 3, H, W) and a weight; the weights sum to 1.
    """
    height, width = inputs.shape[2:]
    places = [(inputs, 1.0)]
    if chosen.shift:
        padded, far = F.pad(inputs, (chosen.shift,) * 4, mode="reflect"), 2 * chosen.shift
        up_left, down_right = padded[..., far:, far:], padded[..., :height, :width]
        places = [(inputs, 0.5), (up_left, 0.25), (down_right, 0.25)]
    each = 1 + chosen.mirror
    for place, weight in places:
        yield place, weight / each
        if chosen.mirror:
            yield place.flip(-1), weight / each


def view_scores(
    classify: Callable[[Tensor], Tensor], inputs: Tensor, chosen: TestTimeAugmentation | None
) -> tuple[Tensor, Tensor]:
    """Classify images without and with test-time augmentation.

    The views do not change the states of random generators.

    Args:
        classify: a function that returns the logits (B, C) float32 of inputs.
        inputs: (B, 3, H, W), normalised.
        chosen: the views; None for the images alone.

    Returns:
        Logits (B, C) of the images, and the weighted mean of the logits of all views.
    """
    plain = classify(inputs)
    if chosen is None:
        return plain, plain
    (_, weight), *others = views(inputs, chosen)
    mean = weight * plain
    with randomness_kept(inputs.device):
        for view, weight in others:
            mean += weight * classify(view)
    return plain, mean


def check_shift(path: str, chosen: TestTimeAugmentation, size: tuple[int, int]) -> None:
    """Raise ``InvalidInput`` if images of this height and width are too small for the shift."""
    if chosen.shift >= min(size):
        reason = f"the shorter side of the images has {min(size)} pixels; use at most {min(size) - 1}"
        raise InvalidInput(f"{path}.shift: {chosen.shift}: {reason}")


def parse(text: str, path: str) -> TestTimeAugmentation:
    """Parse the views of a command line.

    Args:
        text: the views, e.g. ``mirror,shift=1``.
        path: the name of the text in error lines.

    Raises:
        InvalidInput: with a line for each wrong key or value.
    """
    section: Mapping[str, Any] = {
        key: (int(value) if value.isdecimal() else value) if equals else True
        for key, equals, value in (part.strip().partition("=") for part in text.split(","))
    }
    return TestTimeAugmentation.parse(path, section)

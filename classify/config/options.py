"""Hyperparameters that are sections, i.e. mappings."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from classify.config.rules import BETWEEN_0_AND_1, BOOL, number, whole
from classify.config.sections import Section, key


@dataclass(frozen=True)
class WeightAverage(Section):
    """A moving average of the weights: average = decay * average + (1 - decay) * weights."""

    EXAMPLE = "{decay: 0.999}"

    decay: float = key(0.999, number(0, 1), "The factor of the old average in an update.")
    every: int = key(1, whole(1), "The interval between updates.", unit="optimizer steps")
    lookahead: bool = key(
        False,
        BOOL,
        "After each update, training continues from the average (https://arxiv.org/abs/1907.08610).",
    )
    rising: bool = key(
        False,
        BOOL,
        "The decay of lookahead rises as decay * (steps done / all steps)^3"
        " (https://github.com/KellerJordan/cifar10-airbench).",
    )

    @override
    def contradiction(self) -> str | None:
        if self.rising and not self.lookahead:
            return ".rising: True: needs lookahead; set lookahead: true, or remove rising"
        return None

    def decay_after(self, steps: float, total: int) -> float:
        """Return the decay of the update after a number of optimizer steps.

        Without lookahead the decay rises at the start, so that the initial weights soon leave the average.
        Source: https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage

        Args:
            steps: optimizer steps done since the start of training.
            total: optimizer steps of the complete training.
        """
        if self.lookahead:
            return self.decay * min(1.0, steps / total) ** 3 if self.rising else self.decay
        updates = steps // self.every - 1  # the number of earlier updates
        return min(self.decay, (1 + updates) / (10 + updates))


@dataclass(frozen=True)
class TestTimeAugmentation(Section):
    """Views of an image; the network's scores are averaged over them."""

    EXAMPLE = "{mirror: true, shift: 1}"

    mirror: bool = key(False, BOOL, "Adds the mirror image.")
    shift: int = key(
        0,
        whole(0),
        "Adds two views: one is shifted by this distance up and left, the other down and right.",
        unit="pixels",
    )

    @override
    def contradiction(self) -> str | None:
        if not (self.mirror or self.shift):
            return ": adds no view to the image; set mirror: true or shift: 1, or remove the section"
        return None

    def __str__(self) -> str:
        return ", ".join(["mirror"] * self.mirror + [f"shift {self.shift}"] * bool(self.shift))


@dataclass(frozen=True)
class ProgressiveResizing(Section):
    """Smaller images in the first part of a training, which a network processes faster.

    Source: https://docs.mosaicml.com/projects/composer/en/stable/method_cards/progressive_resizing.html
    """

    EXAMPLE = "{scale: 0.75, until: 0.5}"

    scale: float = key(0.75, BETWEEN_0_AND_1, "Height and width as a fraction of the full size.")
    until: float = key(
        0.5, BETWEEN_0_AND_1, "The share of the training's steps, from the first, that use smaller images."
    )

    def size(self, full: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the smaller images, in pixels, given the full size."""
        height, width = (max(1, round(side * self.scale)) for side in full)
        return height, width

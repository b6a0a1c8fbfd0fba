"""Hyperparameters that are mappings: each option once, with its default, rule and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self, override

from classify.config.rules import BOOL, Rule, is_number, number, whole
from deepspeed_trial.errors import InvalidInput, nearest


class Options:
    """A dataclass that is read from a mapping.

    Attributes:
        EXAMPLE: what such a mapping looks like.
        RULES: those of its values.
    """

    EXAMPLE: ClassVar[str]
    RULES: ClassVar[Mapping[str, Rule]]

    @classmethod
    def parse(cls, path: str, section: Any) -> Self:
        """Checks a mapping and fills in the defaults.

        Args:
            path: what to call it in an error line.
            section: the mapping.

        Raises:
            InvalidInput: with a line for each key or value that is wrong.
        """
        if not isinstance(section, Mapping):
            raise InvalidInput(f"{path}: {section!r}: must be a mapping, e.g. {cls.EXAMPLE}")
        errors = []
        for key, value in section.items():
            if key not in cls.RULES:
                errors.append(f"{path}.{key}: {value!r}: unknown key; {nearest(key, cls.RULES)}")
            elif not cls.RULES[key].is_valid(value):
                errors.append(f"{path}.{key}: {value!r}: {cls.RULES[key].message}")
        if errors:
            raise InvalidInput(errors)
        parsed = cls(**section)
        if reason := parsed.contradiction():
            raise InvalidInput(f"{path}{reason}")
        return parsed

    def contradiction(self) -> str | None:
        """What of valid values does not go together: the rest of an error line after the mapping's path."""
        return None


@dataclass(frozen=True)
class WeightAverage(Options):
    """An average of the weights that training goes through: average = decay average + (1 - decay) weights."""

    EXAMPLE = "{decay: 0.999}"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "decay": number(0, 1),
        "every": whole(1),
        "lookahead": BOOL,
        "rising": BOOL,
    }

    decay: float = 0.999
    """How much of the average is kept at each update."""
    every: int = 1
    """Optimizer steps from one update to the next."""
    lookahead: bool = False
    """Whether training goes on from the average after each update (https://arxiv.org/abs/1907.08610)."""
    rising: bool = False
    """Whether lookahead's decay rises with the steps done as decay (done / all)^3
    (https://github.com/KellerJordan/cifar10-airbench)."""

    @override
    def contradiction(self) -> str | None:
        if self.rising and not self.lookahead:
            return ".rising: True: is of lookahead alone; set lookahead: true, or remove it"
        return None

    def decay_after(self, steps: float, total: int) -> float:
        """The decay of the update after so many optimizer steps.

        Without lookahead it rises at the start, so that the first weights are soon forgotten. Source:
        https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage

        Args:
            steps: done since the start of training.
            total: of the whole training.
        """
        if self.lookahead:
            return self.decay * min(1.0, steps / total) ** 3 if self.rising else self.decay
        updates = steps // self.every - 1  # before this one
        return min(self.decay, (1 + updates) / (10 + updates))


@dataclass(frozen=True)
class TestTimeAugmentation(Options):
    """Views of each image that is classified, whose scores are averaged."""

    EXAMPLE = "{mirror: true, shift: 1}"
    RULES: ClassVar[Mapping[str, Rule]] = {"mirror": BOOL, "shift": whole(0)}

    mirror: bool = False
    """The image and its mirror image."""
    shift: int = 0
    """The image, and the same shifted by so many pixels up and left, and down and right."""

    @override
    def contradiction(self) -> str | None:
        if not (self.mirror or self.shift):
            return ": has no view but the image itself; set mirror: true, or shift: 1, or remove it"
        return None

    def __str__(self) -> str:
        return ", ".join(["mirror"] * self.mirror + [f"shift {self.shift}"] * bool(self.shift))


@dataclass(frozen=True)
class ProgressiveResizing(Options):
    """Smaller images in the first part of a training, for which a network takes less time.

    Source: https://docs.mosaicml.com/projects/composer/en/stable/method_cards/progressive_resizing.html
    """

    EXAMPLE = "{scale: 0.75, until: 0.5}"
    RULES: ClassVar[Mapping[str, Rule]] = {
        key: Rule(lambda value: is_number(value) and 0 < value < 1, "must be a number between 0 and 1")
        for key in ("scale", "until")
    }

    scale: float = 0.75
    """Of height and width."""
    until: float = 0.5
    """The share of the training's steps that have smaller images."""

    def size(self, full: tuple[int, int]) -> tuple[int, int]:
        """The height and width of the smaller images, in pixels, given the full ones."""
        height, width = (max(1, round(side * self.scale)) for side in full)
        return height, width

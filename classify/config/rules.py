"""Rules for single values: a test, and the reason and remedy for invalid values."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed_trial.errors import InvalidInput

MOST = 2**53  # floats represent every whole number below it
MOST_PIXELS = 8192  # the largest side of an image
CROP, PAD, STRETCH = "crop", "pad", "stretch"
FITS = (CROP, PAD, STRETCH)  # the ways to fit an image to another shape
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Rule(NamedTuple):
    """The valid values of a key.

    Attributes:
        is_valid: tests a value.
        message: the reason and the remedy in an error line: ``must be`` and the valid values.
    """

    is_valid: Callable[[Any], bool]
    message: str

    @property
    def values(self) -> str:
        """The valid values as text."""
        return self.message.removeprefix("must be ").removesuffix("; put it in quotes")


def is_count(value: Any, least: int) -> bool:
    """Return whether the value is a whole number of at least ``least``, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST


def is_number(value: Any, least: float = 0.0, below: float = float("inf")) -> bool:
    """Return whether the value is a number from ``least`` to less than ``below``, and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def is_finite(value: Any) -> bool:
    """Return whether the value is a number between -1e300 and 1e300, and not a boolean."""
    return is_number(value, -1e300, 1e300)


def size_in_bytes(key: str, text: object) -> int:
    """Return the number of bytes of a size such as ``100MB``.

    Args:
        key: the size's key or option, for an error line.
        text: the size.

    Raises:
        InvalidInput: if the text is not a size above 0.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(text).strip(), re.I)
    if not size or size[2].upper() not in _UNITS or not float(size[1]):
        raise InvalidInput(f"{key}: {text!r}: {SIZE_MESSAGE}")
    return round(float(size[1]) * _UNITS[size[2].upper()])


def _is_size(value: Any) -> bool:
    try:
        return size_in_bytes("", value) > 0
    except InvalidInput:
        return False


def one_of(*choices: Any) -> Rule:
    """Return the rule that a value is one of the choices."""
    kinds = [(type(choice), choice) for choice in choices]  # True equals 1
    shown = ", ".join(dict.fromkeys("null" if choice is None else str(choice) for choice in choices))
    return Rule(lambda value: (type(value), value) in kinds, f"must be one of {shown}")


def whole(least: int, below: int = MOST) -> Rule:
    """Return the rule of whole numbers from ``least`` to less than ``below``."""
    message = f"of at least {least}" if below == MOST else f"from {least} to {below - 1}"
    return Rule(lambda value: is_count(value, least) and value < below, f"must be a whole number {message}")


def number(least: float, below: float) -> Rule:
    """Return the rule of numbers from ``least`` to less than ``below``."""
    message = f"must be a number >= {least:g} and < {below:g}"
    return Rule(lambda value: is_number(value, least, below), message)


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """Return a rule for lists whose values all pass another rule.

    Args:
        rule: the rule of each value.
        length: the required length of the list; None allows any.
    """

    def is_valid(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(rule.is_valid, value))

    return Rule(
        is_valid, f"must be a list{f' of {length} values' if length else ''}; each value {rule.message}"
    )


def mapping_of(rule: Rule) -> Rule:
    """Return a rule for mappings whose values all pass another rule."""
    return Rule(
        lambda value: isinstance(value, Mapping) and all(map(rule.is_valid, value.values())),
        f"must be a mapping; each value {rule.message}",
    )


def optional(rule: Rule) -> Rule:
    """Return a rule that also allows null."""
    return Rule(lambda value: value is None or rule.is_valid(value), rule.message)


def elsewhere(values: str) -> Rule:
    """Return a rule that only documents valid values; another check tests them."""
    return Rule(lambda value: True, f"must be {values}")


SIZE_MESSAGE = "must be a size, e.g. 100MB or 50GB"
BOOL = Rule(lambda value: isinstance(value, bool), "must be true or false")
TEXT = Rule(lambda value: isinstance(value, str), "must be text; put it in quotes")
PATH = Rule(
    lambda value: isinstance(value, str) and value != "" and "\0" not in value, "must be a folder's path"
)
SIZE = Rule(_is_size, SIZE_MESSAGE)
NUMBER = Rule(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "must be a number"
)
RATE = Rule(lambda value: is_number(value) and value <= 1e6, "must be a number from 0 to 1e6")
BETWEEN_0_AND_1 = Rule(lambda value: is_number(value) and 0 < value < 1, "must be a number between 0 and 1")
MAPPING = Rule(lambda value: isinstance(value, Mapping), "must be a mapping")
ANY = Rule(lambda value: True, "")


def errors_in(described: Any, rules: Mapping[str, Rule]) -> list[str]:
    """Check the content of a parsed JSON file.

    Args:
        described: the parsed content.
        rules: the rule of each key; nested keys have dotted paths.

    Returns:
        A line for each invalid value, or one line if the content is not a mapping.
    """
    if not isinstance(described, Mapping) or not described:
        return [f"{_shortened(described)}: must be a mapping with {', '.join(rules)}"]
    errors = []
    for path, rule in rules.items():
        value: Any = described
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if not rule.is_valid(value):
            errors.append(f"{path}: {_shortened(value)}: {rule.message}")
    return errors


def _shortened(value: Any) -> str:
    return textwrap.shorten(repr(value), 80, placeholder=" ...")

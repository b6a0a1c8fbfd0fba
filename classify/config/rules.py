"""Rules for single values: when a value is valid, and what to say when it is not."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed_trial.errors import InvalidInput

MOST = 2**53  # up to which every whole number is a float, too
MOST_PIXELS = 8192  # of an image's side
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Rule(NamedTuple):
    """When a value is valid, and what to say of one that is not."""

    is_valid: Callable[[Any], bool]
    message: str


def is_count(value: Any, least: int) -> bool:
    """Whether the value is a whole number of at least ``least``, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST


def is_number(value: Any, least: float = 0.0, below: float = float("inf")) -> bool:
    """Whether the value is a number from ``least`` to less than ``below``, and not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def is_finite(value: Any) -> bool:
    """Whether the value is a number, and not a boolean, far enough from infinity to be computed with."""
    return is_number(value, -1e300, 1e300)


def size_in_bytes(key: str, text: object) -> int:
    """The bytes of a size such as ``100MB``; raises ``InvalidInput`` that names the key."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B?)", str(text).strip(), re.I)
    if not found or found[2].upper() not in _UNITS or not float(found[1]):
        raise InvalidInput(f"{key}: {text!r}: must be a size, e.g. 100MB or 50GB")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def is_bool(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def one_of(*choices: Any) -> Rule:
    """The value is one of the choices."""
    kinds = [(type(choice), choice) for choice in choices]  # for True equals 1
    shown = ", ".join(dict.fromkeys("null" if each is None else str(each) for each in choices))
    return Rule(lambda value: (type(value), value) in kinds, f"must be one of {shown}")


def whole(least: int) -> Rule:
    """The value is a whole number of at least ``least``."""
    return Rule(lambda value: is_count(value, least), f"must be a whole number of at least {least}")


def number(least: float, below: float) -> Rule:
    """Return the rule of numbers from ``least`` to less than ``below``."""
    message = f"must be a number from {least:g} to below {below:g}"
    return Rule(lambda value: is_number(value, least, below), message)


RATE = Rule(lambda value: is_number(value) and value <= 1e6, "must be a number from 0 to 1e6")


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """The value is a list of valid values, of that length if one is given."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(rule.is_valid, value))

    return Rule(is_valid, f"must be a list{f' of {length}' if length else ''}, of which each {rule.message}")


def mapping_of(rule: Rule) -> Rule:
    """The value is a mapping to valid values."""
    return Rule(
        lambda value: isinstance(value, Mapping) and all(map(rule.is_valid, value.values())),
        f"must be a mapping, of which each value {rule.message}",
    )


BOOL = Rule(is_bool, "must be true or false")
TEXT = Rule(lambda value: isinstance(value, str), "must be text; put it in quotes")
NUMBER = Rule(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool), "must be a number"
)
MAPPING = Rule(lambda value: isinstance(value, Mapping), "must be a mapping")
ANY = Rule(lambda value: True, "")


def optional(rule: Rule) -> Rule:
    """The same rule for a value that may be null."""
    return Rule(lambda value: value is None or rule.is_valid(value), rule.message)


def errors_in(described: Any, rules: Mapping[str, Rule]) -> list[str]:
    """Checks what a JSON file says.

    Args:
        described: what it holds.
        rules: for values by their keys, those of mappings within mappings joined by dots.

    Returns:
        A line for each that is not valid; one where there is nothing.
    """
    if not isinstance(described, Mapping) or not described:
        return [f"{_shown(described)}: must be a mapping with {', '.join(rules)}"]
    errors = []
    for path, rule in rules.items():
        value: Any = described
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if not rule.is_valid(value):
            errors.append(f"{path}: {_shown(value)}: {rule.message}")
    return errors


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), 80, placeholder=" ...")

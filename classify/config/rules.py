"""Rules for single values: when a value is valid, and what to say when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MOST = 2**53  # up to which every whole number is a float, too


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


def is_bool(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def one_of(*choices: Any) -> Rule:
    """The value is one of the choices."""
    kinds = [(type(choice), choice) for choice in choices]  # for True equals 1
    return Rule(lambda value: (type(value), value) in kinds, f"must be one of {', '.join(map(str, choices))}")


def whole(least: int) -> Rule:
    """The value is a whole number of at least ``least``."""
    return Rule(lambda value: is_count(value, least), f"must be a whole number of at least {least}")


def number(least: float, below: float, shown_below: str | None = None) -> Rule:
    """The value is a number in a range."""
    upper = shown_below or f"below {below:g}"
    return Rule(lambda value: is_number(value, least, below), f"must be a number from {least:g} to {upper}")


BOOL = Rule(is_bool, "must be true or false")
TEXT = Rule(lambda value: isinstance(value, str), "must be text")
ANY = Rule(lambda value: True, "")


def optional(rule: Rule) -> Rule:
    """The same rule for a value that may be null."""
    return Rule(lambda value: value is None or rule.is_valid(value), rule.message)

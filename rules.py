"""What holds of a good value, and what to say of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = tuple[Callable[[Any], bool], str]  # what holds of a good value, and what to say of another

MOST = 2**53  # up to which every whole number is a float, too


def is_count(value: Any, least: int) -> bool:
    """Whether the value is a whole number of at least ``least``, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < MOST


def is_number(value: Any, least: float = 0.0, below: float = float("inf")) -> bool:
    """Whether the value is a number from ``least`` to less than ``below``, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


def is_finite(value: Any) -> bool:
    """Whether the value is a number, and no truth value, whose like can be added up."""
    return is_number(value, -1e300, 1e300)


def is_bool(value: Any) -> bool:
    """Whether the value is true or false."""
    return isinstance(value, bool)


def one_of(*choices: Any) -> Rule:
    """The rule that a value is one of the choices."""
    return lambda value: value in choices, f"must be one of {', '.join(map(str, choices))}"

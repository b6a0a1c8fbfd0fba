"""The entries of ``hyperparameters.parameter_groups``, and the checks that need no network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from classify.config.rules import BOOL, RATE, Rule
from classify.config.sections import Keyed, key, key_errors

KEY = "hyperparameters.parameter_groups"
EXAMPLE = "[{match: bias, lr_factor: 2}]"
PATTERN = "a regular expression, searched in the parameters' names"


def is_pattern(text: Any) -> bool:
    """Return whether the text is a valid regular expression and not empty."""
    try:
        return isinstance(text, str) and bool(text) and re.compile(text) is not None
    except (re.error, RecursionError, OverflowError):
        return False


@dataclass(frozen=True)
class ParameterGroup(Keyed):
    """An entry of ``hyperparameters.parameter_groups``."""

    match: str = key("", Rule(is_pattern, f"must be {PATTERN}"), "The parameters of the group. Required.")
    lr_factor: float = key(1.0, RATE, "The group's learning rate as a multiple of the optimizer's.")
    weight_decay: float | None = key(None, RATE, "The group's weight decay instead of the optimizer's.")
    frozen: bool = key(False, BOOL, "The group is not trained.")
    muon: bool | None = key(
        None,
        BOOL,
        "Muon (true) or AdamW (false) trains the group; by default Muon trains hidden weight matrices. Needs"
        " the optimizer Muon.",
    )


def entry_errors(value: Any) -> list[str]:
    """Return a line for each error within an entry; an empty list for null."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        return [f"{KEY}: {value!r}: must be a list of mappings, e.g. {EXAMPLE}"]
    return [error for index, entry in enumerate(value) for error in _errors_of(f"{KEY}[{index}]", entry)]


def _errors_of(path: str, entry: Any) -> list[str]:
    keys = ParameterGroup.keys()
    changes = ", ".join(name for name in keys if name != "match")
    if not isinstance(entry, Mapping):
        return [f"{path}: {entry!r}: must be a mapping with match and one or more of {changes}"]
    errors = key_errors(f"{path}.", entry, keys)
    given = [name for name in keys if name in entry]
    if "match" not in entry:
        errors.append(f"{path}.match: missing; give {PATTERN}")
    if entry.get("frozen") is True:
        idle = [name for name in given if name not in ("match", "frozen")]
        errors += [
            f"{path}.{name}: {entry[name]!r}: has no effect on frozen parameters; remove it" for name in idle
        ]
    elif given == ["match"] and not errors:
        errors.append(f"{path}: {dict(entry)!r}: changes nothing; give one or more of {changes}")
    return errors

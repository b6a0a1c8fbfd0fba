"""The entries of ``hyperparameters.parameter_groups``, each checked by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from classify.config.rules import BOOL, RATE, Rule
from deepspeed_trial.errors import nearest

KEY = "hyperparameters.parameter_groups"


def is_pattern(text: Any) -> bool:
    """Whether it is a regular expression, and not empty."""
    try:
        return isinstance(text, str) and bool(text) and re.compile(text) is not None
    except (re.error, RecursionError, OverflowError):
        return False


RULES = {
    "match": Rule(is_pattern, "must be a regular expression, searched in the parameters' names"),
    "lr_factor": RATE,
    "weight_decay": RATE,
    "frozen": BOOL,
    "muon": BOOL,
}


def entry_errors(value: Any) -> list[str]:
    """A line for each thing that is wrong with an entry by itself; none for null."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        return [f"{KEY}: {value!r}: must be a list of mappings, e.g. [{{match: bias, lr_factor: 2}}]"]
    return [error for index, entry in enumerate(value) for error in _errors_of(f"{KEY}[{index}]", entry)]


def _errors_of(at: str, entry: Any) -> list[str]:
    if not isinstance(entry, Mapping):
        return [f"{at}: {entry!r}: must be a mapping with match and {', '.join(list(RULES)[1:])}"]
    errors = [
        f"{at}.{k}: {v!r}: unknown key; {nearest(k, RULES)}" for k, v in entry.items() if k not in RULES
    ]
    known = {key: value for key, value in entry.items() if key in RULES}
    errors += [f"{at}.{k}: {v!r}: {RULES[k].message}" for k, v in known.items() if not RULES[k].is_valid(v)]
    if "match" not in entry:
        errors.append(f"{at}.match: missing; give a regular expression, searched in the parameters' names")
    if entry.get("frozen") is True:
        more = [key for key in known if key not in ("match", "frozen")]
        errors += [
            f"{at}.{key}: {entry[key]!r}: does nothing to frozen parameters; remove it" for key in more
        ]
    elif len(known) == 1 and "match" in known and not errors:
        errors.append(f"{at}: {dict(entry)!r}: changes nothing; give {', '.join(list(RULES)[1:])}")
    return errors

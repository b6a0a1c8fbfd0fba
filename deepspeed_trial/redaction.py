"""Redaction of configurations, commands and texts before files, pages and logs show them.

A list names the fields that are shown. ``MARK`` replaces the value of every other field, e.g. of storage
options, environment variables and registry credentials. In URLs the parts that may be a credential are
removed: the user, the password, the query and the fragment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "***"
SET = "--set"  # the option of every program of this project that reads an experiment file

# Fields of an experiment configuration, or of a section of it, that are shown; `values` redacts credentials.
_FIELDS = frozenset(
    """checkpoint_policy debug description hyperparameters labels max_restarts min_checkpoint_period
    min_validation_period name optimizations perform_initial_validation preemption_timeout profiling project
    records_per_epoch reproducibility scheduling_unit searcher workspace""".split()
)
_SECTIONS = {
    "checkpoint_storage": frozenset("save_experiment_best save_trial_best save_trial_latest type".split()),
    "data": frozenset(
        """augment cache dataset decode device download exclude fit fold group image_size normalize resize
        root sampling several_labels split_seed test unreadable validation window workers""".split()
    ),
    "resources": frozenset(
        "is_single_node max_slots priority resource_pool shm_size slots slots_per_trial weight".split()
    ),
}
_ENTRYPOINT = re.compile(
    r"python[\d.]*|-[mu]|[\w./-]+\.py|model_def:\w+|(deepspeed_trial|determined)\.[\w.]+|--"
)
# Keys of credentials in fields that are shown, such as DeepSpeed's comet.api_key.
_CREDENTIAL = re.compile(
    r"(^|[^a-z])(key|secret|passwd|password|token|auth|authorization|credentials?)$", re.IGNORECASE
)
# A user ends at the last @ before the path; a password with a slash in it ends at the last @ of all.
_URL = re.compile(
    r"""(?P<scheme>[A-Za-z][\w+.-]{0,30}://)
    (?P<user>[^\s/?\#]*@|[^\s/:@]*:(?!\d*(?:[/?\#'"\s]|$))\S*@)?
    (?P<path>[^\s?\#]*)
    (?P<query>[?\#]\S*?(?=['")\]>}.,;:]*(?:\s|$)))?""",
    re.VERBOSE,
)


def text(value: str) -> str:
    """Remove user, password, query and fragment from all URLs in a text."""
    return _URL.sub(_shown_url, value) if "://" in value else value


def _shown_url(found: re.Match[str]) -> str:
    user, query = f"{MARK}@" if found["user"] else "", f"?{MARK}" if found["query"] else ""
    return f"{found['scheme']}{user}{found['path']}{query}"


def values(value: Any) -> Any:
    """Return JSON values with redacted URLs, and without the values of keys such as ``password``."""
    if isinstance(value, Mapping):
        return {key: MARK if _is_credential(key, inner) else values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [values(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float)) else text(str(value))


def _is_credential(key: object, value: Any) -> bool:
    is_number = value is None or isinstance(value, (bool, int, float))  # e.g. class_token: false
    return not is_number and bool(_CREDENTIAL.search(str(key)))


def experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment configuration without credentials."""
    return {name: field(name, value) for name, value in config.items()}


def field(name: str, value: Any) -> Any:
    """Return a field of an experiment configuration, such as ``data``, without credentials."""
    if value is None or name in _FIELDS:
        return values(value)
    if name in _SECTIONS and isinstance(value, Mapping):
        known = _SECTIONS[name]
        return {
            key: values({key: each})[key] if key in known else _names(each) for key, each in value.items()
        }
    words = value if isinstance(value, list) else str(value).split()
    is_plain = name == "entrypoint" and all(_ENTRYPOINT.fullmatch(str(word)) for word in words)
    return value if is_plain else _names(value)


def _names(value: Any) -> Any:
    return dict.fromkeys(value, MARK) if isinstance(value, Mapping) else MARK


def shown(path: str, value: Any) -> str:
    """Return the value at a dotted path of an experiment configuration as an error line shows it."""
    return repr(_at(path, value))


def _at(path: str, value: Any) -> Any:
    name, *keys = path.split(".")
    if not keys:
        return field(name, value)
    if name in _FIELDS or keys[0] in _SECTIONS.get(name, ()):
        return MARK if any(_is_credential(key, value) for key in keys) else values(value)
    return _names(value) if name in _SECTIONS and len(keys) == 1 else MARK


def override(argument: str) -> str:
    """Return ``PATH=VALUE``, an argument of ``--set``, with a redacted value."""
    from ruamel.yaml import YAML  # here, because error lines use this module before libraries are imported

    path, equals, given = argument.partition("=")
    try:
        value = YAML(typ="safe", pure=True).load(given)
    except Exception:  # the parser raises Python's own errors, too
        return f"{path}{equals}{MARK}"
    found = _at(path, value)
    if found == value:
        return argument
    return f"{path}={found if isinstance(found, str) else json.dumps(found, default=str)}"


def command(words: Sequence[str]) -> list[str]:
    """Return the words of a command without credentials."""
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, rest = word.partition("=")
        if _is_set(before):
            found.append(override(word))
        elif equals and _is_set(option):
            found.append(f"{option}={override(rest)}")
        else:
            found.append(text(word))
    return found


def _is_set(option: str) -> bool:
    """Return whether argparse reads an option as ``--set``: argparse accepts abbreviations."""
    return len(option) > 2 and SET.startswith(option)

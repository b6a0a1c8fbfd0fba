"""Reads a Determined experiment file on this machine, and sets the values of ``--set``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from classify.config.command_line import NO_FILE
from classify.config.experiment_fields import check
from classify.config.project import PROJECT
from deepspeed_trial import redaction
from deepspeed_trial.errors import ErrorList, InvalidInput, one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.input_files import regular_file

# The parser raises Python's errors for a tagged value such as "!!int x", and for deep nesting
YAML_ERRORS = (YAMLError, ValueError, KeyError, RecursionError)
RECORD = "run.json"  # a run's record, which holds its experiment configuration
DEEPEST, MOST = 100, 10_000  # limits of nested levels, and of values with aliases expanded


def load(path: str, overrides: Iterable[str] = (), search: bool = False) -> Experiment:
    """Read an experiment file for training on this machine, and check its fields.

    Args:
        path: the file, in the working directory or else in the project's folder.
        overrides: texts ``PATH=VALUE``; VALUE (YAML) replaces the value at the dotted PATH.
        search: whether to accept ranges; ``workbench/search/space.py`` checks them.

    Raises:
        InvalidInput: if the file or an override cannot be read, or with a line for each invalid field.
    """
    return check(read(path, overrides), search)


def read(
    path: str, overrides: Iterable[str] = (), more: Callable[[Any], Iterable[str]] = lambda _: ()
) -> dict[str, Any]:
    """Return the content of an experiment file, with overrides, without a check of its fields.

    Args:
        path: the file, in the working directory or else in the project's folder; or a run's ``RECORD``.
        overrides: texts ``PATH=VALUE``; ``load`` describes them.
        more: a function that returns further overrides, given the hyperparameters with the first overrides.

    Raises:
        InvalidInput: if the file or an override cannot be read, or if JSON cannot represent a value.
    """
    try:
        file = path if os.path.exists(path) else PROJECT / path
        config = _yaml(regular_file(file).read_text())
    except FileNotFoundError:
        raise InvalidInput(NO_FILE.format(path)) from None
    except (OSError, *YAML_ERRORS) as error:
        raise InvalidInput(
            f"--config: {path}: cannot be read as YAML ({_reason(error)}); fix the file, or give another file"
        ) from error
    if os.path.basename(path) == RECORD and isinstance(config, dict):
        config = config.get("config")
    if not isinstance(config, dict):
        raise InvalidInput(
            f"--config: {path}: is not an experiment configuration; see const.yaml for an example"
        )
    errors = ErrorList()
    for given in (lambda _: overrides, more):
        for override in given(config.get("hyperparameters")):
            with errors.collecting():
                _override(config, override)
        errors.raise_any()
    try:
        json.dumps(config)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"--config: {path}: has a value that JSON cannot represent ({one_line(error)}); change the value"
        ) from error
    return config


class _Constructor(SafeConstructor):
    """A YAML constructor that reads dates as text: Determined's master stores JSON, which has no dates."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def _yaml(text: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    _check_size(yaml.parse(text))
    return yaml.load(text)


def _check_size(events: Iterable[Any]) -> None:
    """Raise ``ValueError`` for a text that would take minutes to parse: deep nesting, or nested aliases."""
    known: dict[str, int] = {}  # the number of values under each anchor
    # The anchor and the number of values of each open list or mapping
    inner: list[tuple[str | None, int]] = [(None, 0)]
    for event in events:
        if isinstance(event, CollectionStartEvent):
            inner.append((event.anchor, 1))
            if len(inner) > DEEPEST:
                raise ValueError(f"nested more than {DEEPEST} levels deep")
            continue
        if isinstance(event, AliasEvent):
            anchor, values = None, known.get(event.anchor, MOST)  # an alias inside its own anchor is unknown
        elif isinstance(event, CollectionEndEvent):
            anchor, values = inner.pop()
        else:
            anchor, values = getattr(event, "anchor", None), 1
        if anchor:
            known[anchor] = values
        inner[-1] = inner[-1][0], inner[-1][1] + values
        if inner[-1][1] > MOST:
            raise ValueError(f"more than {MOST:,} values with all aliases expanded")


def _reason(error: Exception) -> str:
    """Return the error and its line, but not the file's text, which may contain a password."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return one_line(error)
    return f"{problem.partition(' with value')[0]} in line {mark.line + 1}, column {mark.column + 1}"


def _override(config: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys) or len(keys) > DEEPEST:
        raise InvalidInput(f"--set: {path + equals!r}: must be PATH=VALUE, e.g. data.dataset=digits")
    try:
        value = _yaml(text)
    except YAML_ERRORS as error:
        shown = redaction.shown(path, text)
        raise InvalidInput(f"--set {path}: {shown}: not YAML ({_reason(error)}); quote the value") from error
    inner = config
    for depth, key in enumerate(keys[:-1], 1):
        if inner.get(key) is None:
            inner[key] = {}
        inner = inner[key]
        if not isinstance(inner, dict):
            parent = ".".join(keys[:depth])
            shown = redaction.shown(parent, inner)
            raise InvalidInput(f"--set {path}: {parent} is {shown}, which has no keys; correct the path")
    inner[keys[-1]] = value

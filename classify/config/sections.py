"""Keys of an experiment file's sections: default, rule, unit and documentation of each key.

``key_errors`` checks every section of an experiment file. ``reference.py`` documents the same keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from typing_extensions import Self

from classify.config.rules import Rule
from deepspeed_trial.errors import ErrorList, InvalidInput, nearest


class Key(NamedTuple):
    """A key of a section.

    Attributes:
        rule: the rule of the value, independent of other keys.
        about: one sentence for the reference.
        default: the value if the file sets none.
        unit: the unit of a number; empty without one.
        section: the keys of a mapping or of a list of mappings; a ``Section`` also parses the mapping.
        repeated: whether the value must stay the same on resume.
    """

    rule: Rule
    about: str
    default: Any = None
    unit: str = ""
    section: type[Keyed] | None = None
    repeated: bool = False


def key(default: Any, rule: Rule, about: str, **more: Any) -> Any:
    """Return a dataclass field that describes a section's key; see ``Key``.

    Args:
        default: the value if the file sets none, or a class that creates it.
        rule: the rule of the value.
        about: one sentence for the reference.
        more: further attributes of ``Key``.
    """
    is_class = isinstance(default, type)
    metadata = {"key": Key(rule, about, default() if is_class else default, **more)}
    if is_class:
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def plain(path: str, value: Any) -> str:
    """Format a value for an error line; ``redaction.shown`` also hides possible credentials."""
    return repr(value)


def nearest_or(name: object, known: Iterable[object], other: str) -> str:
    """Return an error line's remedy: the nearest known name, or a default remedy."""
    hint = nearest(name, known)
    return f"{hint} Or {other}" if hint.endswith("?") else f"{hint}, or {other}"


def unknown_keys(
    path: str,
    section: Mapping[Any, Any],
    known: Iterable[object],
    reason: str = "unknown key",
    shown: Callable[[str, Any], str] = plain,
    no_keys: str = "remove it",
    prefixes: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a line for each unknown key of a section, with the nearest known key.

    Args:
        path: the prefix of a key in its error line, with the dot.
        section: the keys and their values.
        known: the keys that the section may have.
        reason: the reason in the line.
        shown: a function that formats the value at a path.
        no_keys: the remedy if no key is known.
        prefixes: the path of another section, by each of its keys.
    """
    names, others = list(known), prefixes or {}
    unknown = {key: value for key, value in section.items() if key not in names}
    return [
        f"{path}{key}: {shown(f'{path}{key}', value)}: {reason};"
        f" {nearest(key, [*names, *others], others) if names else no_keys}"
        for key, value in unknown.items()
    ]


def key_errors(
    path: str,
    section: Mapping[Any, Any],
    keys: Mapping[str, Key],
    shown: Callable[[str, Any], str] = plain,
    prefixes: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a line for each unknown key of a section and for each invalid value.

    Args:
        path: the prefix of a key in its error line, with the dot.
        section: the keys and their values.
        keys: the keys that the section may have.
        shown: a function that formats the value at a path.
        prefixes: the path of another section, by each of its keys.
    """
    return unknown_keys(path, section, keys, shown=shown, prefixes=prefixes) + [
        f"{path}{name}: {shown(f'{path}{name}', section[name])}: {key.rule.message}"
        for name, key in keys.items()
        if name in section and not key.rule.is_valid(section[name])
    ]


class Keyed:
    """A frozen dataclass whose fields are the keys of a mapping; ``key`` makes each field."""

    @classmethod
    def keys(cls) -> dict[str, Key]:
        """Return the section's keys by name."""
        fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
        return {field.name: field.metadata["key"] for field in fields if "key" in field.metadata}

    def repeated(self) -> dict[str, Any]:
        """Return the values that must stay the same on resume, by key; None for a default.

        A checkpoint may be older than a key. A resume then assumes the default.
        """
        keys = {name: key for name, key in self.keys().items() if key.repeated}
        values = {name: getattr(self, name) for name in keys}
        return {name: None if value == keys[name].default else value for name, value in values.items()}

    @classmethod
    def read(
        cls,
        path: str,
        section: Mapping[Any, Any],
        errors: ErrorList,
        shown: Callable[[str, Any], str] = plain,
    ) -> dict[str, Any]:
        """Check each key separately and return the values of the known keys, with nested sections parsed.

        Args:
            path: the prefix of a key in an error line, with the dot.
            section: the mapping.
            errors: the list to which the method adds a line for each unknown key and invalid value.
            shown: a function that formats the value at a path.
        """
        keys = cls.keys()
        errors.lines += key_errors(path, section, keys, shown)
        values = {name: section[name] for name in keys if name in section}
        for name, value in values.items():
            nested = keys[name].section
            if nested and issubclass(nested, Section) and value is not None:
                with errors.collecting():
                    values[name] = nested.parse(f"{path}{name}", value)
        return values


class Section(Keyed):
    """A mapping whose keys are checked independently of other sections.

    Attributes:
        EXAMPLE: a valid mapping, for error lines.
    """

    EXAMPLE: ClassVar[str]

    @classmethod
    def parse(cls, path: str, section: Any) -> Self:
        """Check a mapping and fill in the defaults.

        Args:
            path: the mapping's name in an error line.
            section: the mapping.

        Raises:
            InvalidInput: with a line for each unknown key and invalid value.
        """
        if not isinstance(section, Mapping):
            raise InvalidInput(f"{path}: {section!r}: must be a mapping, e.g. {cls.EXAMPLE}")
        errors = ErrorList()
        values = cls.read(f"{path}.", section, errors)
        errors.raise_any()
        parsed = cls(**values)
        if reason := parsed.contradiction():
            raise InvalidInput(f"{path}{reason}")
        return parsed

    def contradiction(self) -> str | None:
        """Return the error of values that conflict, without the section's path; None if none do."""
        return None

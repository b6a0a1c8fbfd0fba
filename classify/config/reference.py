"""The reference of every key: as text, as Markdown for ``docs/reference.md``, and as a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from classify.config.sections import Key

Sections = Mapping[str, Mapping[str, Key]]

_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_DETERMINED = (
    "https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst"
)
_INTRODUCTION = f"""# Reference of the keys

`python3 train.py --keys` prints every key of an experiment file; `--keys markdown` makes this page.
[Configure](configure.md) explains how the keys work together.
All other hyperparameters are keys of [DeepSpeed's configuration]({_DEEPSPEED}),
and all other fields are [Determined's]({_DETERMINED}).
"""


def _rows(path: str, keys: Mapping[str, Key]) -> Iterator[tuple[str, Key, str]]:
    """Yield the path of each documented key, the key, and its default as text."""
    for name, key in keys.items():
        if not key.about:
            continue
        shown = (
            key.default if isinstance(key.default, str) else json.dumps(key.default, default=lambda _: None)
        )
        yield f"{path}{name}", key, "" if shown == "null" else shown
        if key.section:
            entry = "[]" if isinstance(key.default, tuple) else ""
            yield from _rows(f"{path}{name}{entry}.", key.section.keys())


def text(sections: Sections) -> str:
    """Return the reference as text, with two lines per key."""
    lines = []
    for section, keys in sections.items():
        for path, key, shown in _rows(section, keys):
            default = f"; default {shown}" if shown else ""
            unit = f"; in {key.unit}" if key.unit else ""
            lines += [f"{path}: {key.rule.values}{default}{unit}", f"    {key.about}"]
    return "\n".join(lines)


def markdown(sections: Sections) -> str:
    """Return the page ``docs/reference.md``, with a table for each section."""
    parts = [_INTRODUCTION]
    for section, keys in sections.items():
        parts += [f"## {f'`{section[:-1]}`' if section else 'Fields'}\n"]
        parts += ["| key | values | default | unit | meaning |\n|---|---|---|---|---|"]
        for path, key, shown in _rows("", keys):
            cells = (f"`{path}`", key.rule.values, shown and f"`{shown}`", key.unit, key.about)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def json_schema(sections: Sections) -> str:
    """Return the JSON Schema ``docs/schema.json``: with it, an editor completes and explains keys.

    The schema restricts no values, because a search may replace any value with a range.
    """
    root = _properties(sections[""])
    for section, keys in sections.items():
        if section:
            root[section[:-1]] = {"type": "object", "properties": _properties(keys)}
    schema = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": schema, "type": "object", "properties": root}, indent=2)


def _properties(keys: Mapping[str, Key]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, key in keys.items():
        values = f" Values: {key.rule.values}." if key.about else ""
        properties[name] = {"description": f"{key.about}{values}"}
        if key.section:
            inner = {"properties": _properties(key.section.keys())}
            properties[name] |= {"items": inner} if isinstance(key.default, tuple) else inner
    return properties


FORMS: dict[str, Callable[[Sections], str]] = {"text": text, "markdown": markdown, "json": json_schema}

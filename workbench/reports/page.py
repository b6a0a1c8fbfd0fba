"""A self-contained HTML page in the style of all reports."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from markupsafe import Markup
from ruamel.yaml import YAML

from deepspeed_trial.errors import InvalidInput, printable
from deepspeed_trial.output_files import replacing

BASE = pathlib.Path(__file__).with_name("page.html.jinja")


def render(template: pathlib.Path, values: dict[str, Any]) -> str:
    """Render a template that extends ``page.html.jinja``; values are escaped.

    Args:
        template: the template's file; it may import ``parts.html.jinja`` and use the filter ``data_uri``.
        values: the template's variables, with ``title``; ``refresh`` is the seconds until the page reloads.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, BASE.parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_without_control_characters,
    )
    environment.filters["data_uri"] = data_uri
    return environment.get_template(template.name).render(values)


def write(page: str, target: pathlib.Path) -> None:
    """Write the text of a page or of a table, atomically.

    Raises:
        InvalidInput: if the target is not the name of a file.
    """
    check_name(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as partial:
        partial.write_text(page)


def check_name(target: pathlib.Path, option: str = "--output", example: str = "report.html") -> None:
    """Raise ``InvalidInput`` if the target is not the name of a file."""
    if not target.name or target.is_dir():
        raise InvalidInput(f"{option}: {target}: must be the name of a file, e.g. {example}")


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as the text of a CSV file; bytes that are not UTF-8, in names of files, become escapes."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode(errors="backslashreplace").decode()


def data_uri(content: str) -> str:
    """Return the data URI of a picture: a PNG, JPEG or WebP file in base64."""
    kind = {"iV": "png", "/9": "jpeg"}.get(content[:2], "webp")
    return f"data:image/{kind};base64,{content}"


def as_yaml(value: Any) -> str:
    """Format a configuration as YAML."""
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 100
    yaml.dump(value, out)
    return out.getvalue()


def _without_control_characters(value: Any) -> Any:
    """Escape control characters in a value: a browser may act on them, e.g. in the name of a file."""
    if isinstance(value, Markup) or not isinstance(value, str):  # a macro has escaped its values
        return value
    return "\n".join(map(printable, value.split("\n")))

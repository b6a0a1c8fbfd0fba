"""A self-contained HTML page in the style of all reports."""

from __future__ import annotations

import base64
import io
import os
import pathlib
from typing import Any

import jinja2
from markupsafe import Markup
from ruamel.yaml import YAML

from deepspeed_trial.errors import InvalidInput, printable

BASE = pathlib.Path(__file__).with_name("page.html.jinja")


def render(template: pathlib.Path, values: dict[str, Any]) -> str:
    """Render a template that extends ``page.html.jinja``; values are escaped.

    Args:
        template: may import the macros of ``parts.html.jinja``; its filter ``data_uri`` shows a picture.
        values: ``title`` and the template's own; ``refresh``: seconds until it loads again.
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
    """Write a page, whole or not at all.

    Raises:
        InvalidInput: if the target is not the name of a file.
    """
    if not target.name or target.is_dir():
        raise InvalidInput(f"--output: {target}: must be the name of a file, e.g. report.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}")
    try:
        partial.write_text(page)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def inline(png: bytes) -> str:
    """Encode a picture for a page."""
    return base64.b64encode(png).decode()


def data_uri(content: str) -> str:
    """Return the address of a picture, a PNG, JPEG or WebP file in base64, that a page holds itself."""
    kind = {"iV": "png", "/9": "jpeg"}.get(content[:2], "webp")
    return f"data:image/{kind};base64,{content}"


def as_yaml(value: Any) -> str:
    """Format a configuration for a page."""
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 100
    yaml.dump(value, out)
    return out.getvalue()


def _without_control_characters(value: Any) -> Any:
    """Escape control characters of a value: a browser may act on those in names of files and classes."""
    if isinstance(value, Markup) or not isinstance(value, str):  # a macro has escaped its values
        return value
    return "\n".join(map(printable, value.split("\n")))

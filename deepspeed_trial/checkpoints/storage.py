"""The storage that ``checkpoint_storage`` configures, for runs without a cluster.

Its fields are Determined's:
https://github.com/determined-ai/determined/blob/v0.38.1/docs/reference/experiment-config-reference.rst
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_trial import redaction
from deepspeed_trial.errors import InvalidInput, one_line

SECTION = "checkpoint_storage"
# By type: fsspec's protocol, the field that must be given, the field of a folder below it, and the library
TYPES = {
    "s3": ("s3", "bucket", "prefix", "s3fs"),
    "gcs": ("gcs", "bucket", "prefix", "gcsfs"),
    "shared_fs": ("file", "host_path", "storage_path", "fsspec"),
    "directory": ("file", "container_path", "", "fsspec"),
}
OF_CLUSTERS = ("azure",)
OFF = f"keep checkpoints in the run's folder only: --set {SECTION}.type=null"
SILENCE = 30  # seconds without an answer after which a request fails


@dataclass(frozen=True)
class Storage:
    """A folder of a file system of fsspec.

    Attributes:
        kind: a key of ``TYPES``.
        base: a bucket or a folder, which must exist.
        root: the folder of all runs: ``base`` or a folder in it.
        options: fsspec's storage options, with credentials.
    """

    kind: str
    base: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The folder as error lines show it."""
        return redaction.text(f"{TYPES[self.kind][0]}://{self.root}")

    def open(self) -> Any:
        """Return the file system.

        Raises:
            InvalidInput: if the library for this ``kind`` is not installed, or rejects the options.
        """
        protocol, _, _, library = TYPES[self.kind]
        try:
            import fsspec  # an extra of this package

            return fsspec.filesystem(protocol, skip_instance_cache=True, **self.options)
        except ImportError as error:
            remedy = f"needs {library}; run `pip install {library}`, or {OFF}"
            raise InvalidInput(f"{SECTION}.type: {self.kind}: {remedy}") from error
        except (ValueError, TypeError) as error:
            reason = f"cannot be opened ({one_line(error)})"
            raise InvalidInput(f"{SECTION}: {self.url}: {reason}; correct its fields, or {OFF}") from error


def errors(section: Mapping[str, Any]) -> list[str]:
    """Return an error line for each invalid field; a section without ``type`` configures no storage."""
    kind = section.get("type")
    if kind is None or kind in OF_CLUSTERS:
        return []
    if kind not in TYPES:
        known = ", ".join([*TYPES, *OF_CLUSTERS])
        return [f"{SECTION}.type: {_shown('type', kind)}: must be one of {known}, or null"]
    _, place, below, _ = TYPES[kind]
    lines = []
    if not _is_text(section.get(place)):
        shown = _shown(place, section.get(place))
        lines.append(f"{SECTION}.{place}: {shown}: must be a text without '..', as type {kind} needs it")
    if section.get(below) is not None and not _is_text(section[below]):
        lines.append(f"{SECTION}.{below}: {_shown(below, section[below])}: must be a text without '..'")
    elif below == "storage_path" and not lines and not _path(section, kind).is_relative_to(section[place]):
        where = f"{SECTION}.{place}"
        lines.append(f"{SECTION}.{below}: {_shown(below, section[below])}: must be a folder in {where}")
    given = [key for key in ("access_key", "secret_key") if section.get(key)]
    if kind == "s3" and len(given) == 1:
        lines.append(f"{SECTION}.{given[0]}: is given alone; give access_key and secret_key, or neither")
    return lines


def storage_of(section: Mapping[str, Any]) -> Storage | None:
    """Return the storage of a run without a cluster; None if the section has no ``type``.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    kind = section.get("type")
    if lines := errors(section):
        raise InvalidInput(lines)
    if kind in OF_CLUSTERS:
        others = ", ".join(TYPES)
        raise InvalidInput(
            f"{SECTION}.type: {kind!r}: only a cluster uploads there; use one of {others}, or {OFF}"
        )
    if kind is None:
        return None
    protocol, place, below, _ = TYPES[kind]
    if protocol == "file":
        return Storage(kind, os.path.abspath(section[place]), os.path.abspath(_path(section, kind)))
    bucket, prefix = section[place].strip("/"), str(section.get(below) or "").strip("/")
    root = f"{bucket}/{prefix}" if prefix else bucket
    return Storage(kind, bucket, root, {"use_listings_cache": False, **_options(kind, section)})


def _path(section: Mapping[str, Any], kind: str) -> pathlib.Path:
    _, place, below, _ = TYPES[kind]
    return pathlib.Path(section[place], section.get(below) or "")


def _options(kind: str, section: Mapping[str, Any]) -> dict[str, Any]:
    if kind != "s3":
        return {}
    named = {"endpoint_url": "endpoint_url", "key": "access_key", "secret": "secret_key"}
    given = {option: str(section[key]) for option, key in named.items() if section.get(key)}
    limits = {"connect_timeout": SILENCE, "read_timeout": SILENCE, "retries": {"max_attempts": 1}}
    return {**given, "config_kwargs": limits}


def _shown(key: str, value: Any) -> str:
    return repr(None) if value is None else redaction.shown(f"{SECTION}.{key}", value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and ".." not in value.split("/")

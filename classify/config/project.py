"""The project's folder: networks, experiment files and programs."""

from __future__ import annotations

import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "project"  # the wheel has a copy there

PROJECT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent

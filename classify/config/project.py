"""The project's folder."""

from __future__ import annotations

import pathlib

PROJECT = pathlib.Path(__file__).resolve().parents[2]

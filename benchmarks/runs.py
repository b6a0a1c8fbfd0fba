"""Runs of ``train.py`` and ``checkpoint.py`` in this process, one after the other: starting takes seconds."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import train
from classify.config.project import PROJECT


def quiet(program: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> tuple[int, str]:
    """A program's exit code, and what it said on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = program(arguments)
        except Exception as error:  # which would be a traceback
            code = 1
            said.write(repr(error))
    return code, said.getvalue()


def trained(
    config: str, sections: Mapping[str, Any], output: pathlib.Path, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Trains, and gives the summary.

    Args:
        config: the experiment file.
        sections: what replaces values of it, by their paths.
        output: the run's folder.
        more: further options.

    Raises:
        RuntimeError: with the last line that the run said, if it failed.
    """
    command = ["--config", str(PROJECT / config), "--output", str(output)]
    for path, value in sections.items():
        command += ["--set", f"{path}={json.dumps(value)}"]
    code, said = quiet(train.main, [*command, *more])
    if code:
        raise RuntimeError(said.splitlines()[-1] if said else f"exit code {code}")
    return json.loads((output / "summary.json").read_text())

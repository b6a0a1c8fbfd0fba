"""Loads a user's networks and losses: ``net.py`` in the working directory of the command ``classify``."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import sys

import net
from classify.config.project import PROJECT
from deepspeed_trial.errors import InvalidInput, one_line

VARIABLE = "CLASSIFY_NET"  # holds the path of the file; child processes inherit it
MODULE = "own_net"
_REGISTERS = re.compile(r"^\s*@(\w+\.)?register(_loss)?\(", re.MULTILINE)


def choose(file: pathlib.Path) -> bool:
    """Select a file to load in this process and its children; return whether there is one to load.

    The function ignores the project's ``net.py``, and a file that registers no network and no loss.

    Raises:
        InvalidInput: if the file cannot be imported.
    """
    if file.resolve() == PROJECT / "net.py":
        return False
    try:
        registers = bool(_REGISTERS.search(file.read_text(errors="replace")))
    except OSError:  # missing or not readable
        return False
    if registers:
        os.environ[VARIABLE] = str(file.resolve())
        load()
    return registers


def load() -> None:
    """Run the selected file, which registers its networks and losses; do nothing without a file.

    If the file is a copy of the project's ``net.py``, it registers in its own ``NETS`` and ``LOSSES``. The
    function copies these into the project's.

    Raises:
        InvalidInput: if the file cannot be imported.
    """
    path = os.environ.get(VARIABLE)
    if not path or MODULE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec and spec.loader
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        del sys.modules[MODULE]
        raise InvalidInput(
            f"{path}: cannot be imported ({type(error).__name__}: {one_line(error)}); correct it"
        ) from error
    net.NETS.update(getattr(module, "NETS", {}))
    net.LOSSES.update(getattr(module, "LOSSES", {}))

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

VARIABLE = "CLASSIFY_NET"  # the command's processes inherit the path of the file
MODULE = "own_net"
_REGISTERS = re.compile(r"^\s*@(\w+\.)?register(_loss)?\(", re.MULTILINE)


def choose(file: pathlib.Path) -> bool:
    """Select a file to load in this process and its children; return whether there is one to load.

    A file that registers neither a network nor a loss is ignored, as is the project's ``net.py``.

    Raises:
        InvalidInput: if the file cannot be imported.
    """
    if file.resolve() == PROJECT / "net.py":
        return False
    try:
        registers = bool(_REGISTERS.search(file.read_text(errors="replace")))
    except OSError:  # none, or not readable
        return False
    if registers:
        os.environ[VARIABLE] = str(file.resolve())
        load()
    return registers


def load() -> None:
    """Run the selected file, which registers its networks and losses; do nothing without a file.

    A copy of the project's ``net.py`` has its own ``register``. The function adds the networks and losses
    that are registered there, too.

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

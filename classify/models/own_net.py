"""The ``net.py`` in the working directory of the command ``classify``: a person's networks and losses."""

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
    """Load a file in this process and the processes that it starts; return whether it is one to load.

    A file that registers neither a network nor a loss is not loaded, and the project's own is already.

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
    """Run the chosen file, which registers its networks and losses; do nothing without one.

    A copy of the project's ``net.py`` has its own ``register``; its networks and losses are added.

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
    except Exception as error:  # the person's code
        del sys.modules[MODULE]
        raise InvalidInput(
            f"{path}: cannot be imported ({type(error).__name__}: {one_line(error)}); correct it"
        ) from error
    net.NETS.update(getattr(module, "NETS", {}))
    net.LOSSES.update(getattr(module, "LOSSES", {}))

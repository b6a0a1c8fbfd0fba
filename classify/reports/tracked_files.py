"""The network of a cluster's trial, a file that trackers store."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from classify.models import net_file
from deepspeed_trial.errors import one_line, printable


def of_trial(write_network: Callable[[pathlib.Path], Any], is_chief: bool) -> list[pathlib.Path]:
    """Write the network into a temporary folder; every rank calls it, as all hold parts of the weights.

    Args:
        write_network: writes the network on the chief.
        is_chief: whether this rank is the chief.
    """
    folder = tempfile.mkdtemp() if is_chief else ""  # the tracker sends its files later
    net = pathlib.Path(folder) / net_file.NAMES[0]
    try:
        write_network(net)
    except OSError as error:
        print(printable(f"note: {net}: not written ({one_line(error)})"), file=sys.stderr)
        return []
    return [net, net_file.beside(net)]

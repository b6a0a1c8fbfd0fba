"""The exceptions that are reported in one line each, without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class InvalidInput(ValueError):
    """Bad configuration or data: the user can mend it.

    Every fault is one line that names the key or file, its value and what to do. ``train.py`` prints the lines on
    stderr and exits with code 2; on a cluster they end the trial as an invalid hyperparameter set.

    Args:
        faults: one line, or several when more than one thing is wrong.
    """

    def __init__(self, faults: str | Iterable[str]) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class TrainingStopped(RuntimeError):
    """Training cannot go on: a full disk, a loss that is no number any more. The line says why and what was saved.

    ``train.py`` prints it on stderr and exits with code 1.
    """


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks; with its type if it has none, or is a key alone."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__} {text}".strip() if not text or isinstance(error, KeyError) else text


def unloadable(error: BaseException) -> str:
    """Why ``torch.load`` takes a file for unsafe or damaged, without its advice to load it all the same."""
    text = one_line(error)
    reason = r"(?:WeightsUnpickler error: |trusted source\. )(?!Please|\(2\))(.*?)\.?(?= Check the doc| Please use|$)"
    found = re.search(reason, text)
    if found:
        return found[1]
    return text if isinstance(error, (OSError, RuntimeError, ValueError)) else "no file of torch.save"


def nearest(key: object, known: Iterable[object]) -> str:
    """Says which of the known keys a mistyped one may be, for an error line."""
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of {', '.join(names)}" if len(names) <= 16 else "remove it"

"""Errors that are reported in one line each, without a traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class InvalidInput(ValueError):
    """Bad configuration or data, which the user can mend.

    Every error is one line that names the key or file, its value and what to do. Programs print the lines on
    stderr and exit with code 2; on a cluster they end the trial as an invalid hyperparameter set.

    Args:
        errors: one line, or several when more than one thing is wrong; made ``printable``.
    """

    def __init__(self, errors: str | Iterable[str]) -> None:
        self.errors = [printable(each) for each in ([errors] if isinstance(errors, str) else errors)]
        super().__init__("\n".join(self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class UnreadableData(InvalidInput):
    """Data that cannot be read in the middle of a training, as one rank alone may find.

    On a cluster the trial is started again: a server may be back by then.
    """


class UnusableCheckpoint(InvalidInput, AssertionError):
    """A checkpoint from which the trial cannot go on.

    An ``AssertionError`` as well, which Determined raises where engines cannot load theirs.
    """


class TrainingStopped(RuntimeError):
    """Training cannot go on, e.g. because the disk is full or the loss is NaN.

    The message is one line that says why and what was saved. Programs print it and exit with code 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class LostRank(TrainingStopped):
    """Another rank is gone, which is not this one's fault: on a cluster the trial is started again."""


class ErrorList:
    """Collects the errors of several checks, so that all are reported at once.

    Attributes:
        lines: the errors so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Keeps the lines of an ``InvalidInput`` that is raised inside, and goes on after the block."""
        try:
            yield
        except InvalidInput as error:
            self.lines += error.errors

    def raise_any(self) -> None:
        """Raises all errors, each once, as one ``InvalidInput``."""
        if self.lines:
            raise InvalidInput(dict.fromkeys(self.lines))


def add_new(errors: Iterable[str], more: Iterable[str]) -> list[str]:
    """The errors, and of more those whose key has not been named yet, nor one within or around it."""
    found = list(errors)
    named = [_path(each) for each in found]
    return found + [each for each in more if not any(_overlap(_path(each), other) for other in named)]


def _path(line: str) -> list[str]:
    """The path of the key that a line begins with; DeepSpeed's keys are named with and without a head."""
    key = line.split(": ")[0].removeprefix("hyperparameters.").removeprefix("overwrite_deepspeed_args.")
    return key.split(".")


def _overlap(one: list[str], other: list[str]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def print_errors(program: str, error: InvalidInput) -> int:
    """Prints every error as a line on stderr, on rank 0 alone, and gives the exit code 2."""
    is_own = isinstance(error, UnreadableData)
    if is_own or int(os.environ.get("RANK", 0)) == 0:  # every rank finds the same errors, but for these
        for line in error.errors:
            print(f"{program}: {line}", file=sys.stderr)
    return 2


def printable(text: object) -> str:
    """A name as a terminal or page may show it: what is no character to be seen is written as in Python."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; with its type if it has none, or is a key alone."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # a folder's copy: of every file
        error = OSError(error.args[0][0][2])
    text = printable(" ".join(str(error).split()))
    return f"{type(error).__name__} {text}".strip() if not text or isinstance(error, KeyError) else text


def why_unloadable(error: BaseException) -> str:
    """Why ``torch.load`` refuses a file, without its advice to load it all the same."""
    text = one_line(error)
    before, after = r"(?:WeightsUnpickler error: |trusted source\. )", r"(?= Check the doc| Please use|$)"
    found = re.search(rf"{before}(?!Please|\(2\))(.*?)\.?{after}", text)
    if found:
        return found[1]
    return text if isinstance(error, (OSError, RuntimeError, ValueError)) else "no file of torch.save"


def nearest(key: object, known: Iterable[object], prefixes: Mapping[str, str] | None = None) -> str:
    """Says which of the known keys a mistyped one may be, for an error line.

    Args:
        key: the mistyped one.
        known: the keys that there are.
        prefixes: what to write before those of them that stand elsewhere.
    """
    names = sorted(str(k) for k in known)
    close = difflib.get_close_matches(str(key), names, n=1)
    if close:
        return f"did you mean {(prefixes or {}).get(close[0], '') + close[0]!r}?"
    return f"use one of {', '.join(names)}" if len(names) <= 20 else "remove it"

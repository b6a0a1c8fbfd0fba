"""Paths from a user: checked before they are read, and named in error lines."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator

from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line


def regular_file(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a regular file.

    Raises:
        OSError: if the file is missing or not accessible, or if it is a folder, a pipe or a device. Reading a
            pipe or a device may never end.
        ValueError: if the path contains a null character.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError("is a folder")
    if not stat.S_ISREG(mode):
        raise OSError("is a pipe or a device")
    return pathlib.Path(path)


@contextlib.contextmanager
def refused(what: str, remedy: str = "give another folder") -> Iterator[None]:
    """Raise ``InvalidInput`` if the operating system refuses a path inside the block.

    Args:
        what: start of the error line: the key or option with its value, or the path.
        remedy: advice in the error line, unless the disk is full.
    """
    try:
        yield
    except OSError as error:
        advice = "free some disk space" if error.errno in DISK_FULL else remedy
        raise InvalidInput(f"{what}: cannot be used ({one_line(error)}); {advice}") from error


def small_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: if the file is missing, is not a regular file, or has more than ``most`` bytes.
    """
    file = regular_file(path)
    if (size := file.stat().st_size) > most:
        raise OSError(f"has {size:,} bytes, more than {most:,}")
    return file.read_bytes()


@contextlib.contextmanager
def parsed(what: str, remedy: str) -> Iterator[None]:
    """Turn every exception in the block, which parses untrusted bytes, into ``InvalidInput``.

    Args:
        what: start of the error line, e.g. ``FILE: not a readable table``.
        remedy: advice in the error line.
    """
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:  # a parser fails in any way, and for lack of memory
        raise InvalidInput(f"{what} ({one_line(error)}); {remedy}") from error

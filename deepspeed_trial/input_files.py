"""Paths that a user names: looked at before they are read, and named where they cannot be."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator

from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line


def regular_file(path: str | os.PathLike[str]) -> pathlib.Path:
    """Gives the path back if it is a file's, which can be read to its end.

    Raises:
        OSError: if there is none, or it may not be looked at; also for a pipe, which may wait for ever, and a
            device, which may never end.
        ValueError: if no file can have such a name.
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
        what: the key or option and its value, or the path.
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
        OSError: if there is none, or it is not regular, or has more than ``most`` bytes.
    """
    file = regular_file(path)
    if (size := file.stat().st_size) > most:
        raise OSError(f"has {size:,} bytes, more than {most:,}")
    return file.read_bytes()


@contextlib.contextmanager
def parsed(what: str, remedy: str) -> Iterator[None]:
    """Turn every exception of a parser of foreign bytes into ``InvalidInput``.

    Args:
        what: the file's name, and which kind of file it fails to be.
        remedy: what to do.
    """
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:  # a parser fails in any way, and for lack of memory
        raise InvalidInput(f"{what} ({one_line(error)}); {remedy}") from error

"""Paths that a user names: looked at before they are read, and named where they cannot be."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator

from harness.errors import InvalidInput, one_line


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
def refused(what: str, mend: str = "give another folder") -> Iterator[None]:
    """Raises ``InvalidInput`` for a path that the operating system refuses within.

    Args:
        what: the key or option and its value, or the path.
        mend: what to do.
    """
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{what}: cannot be used ({one_line(error)}); {mend}") from error

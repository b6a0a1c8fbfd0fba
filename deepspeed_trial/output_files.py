"""Files that are written in one piece: a reader finds the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(target: pathlib.Path, flush: bool = False, shared: bool = False) -> Iterator[pathlib.Path]:
    """Yield the path of a file to write; it replaces ``target`` if the block ends without an error.

    Args:
        target: the file to create or to replace.
        flush: whether the new file is on the disk before it replaces the target.
        shared: whether several processes may write the target at the same time.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex if shared else 'partial'}")
    partial.unlink(missing_ok=True)  # it may be a link
    try:
        yield partial
        if flush:
            sync(partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Flush a file, or a folder's directory entries, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

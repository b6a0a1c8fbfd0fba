"""One process of a host at a time prepares a data folder; the others wait and find it ready."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterator

import appdirs
import filelock

from harness.errors import InvalidInput, one_line


def _writable_folder(root: pathlib.Path) -> pathlib.Path:
    """``root`` itself or, if it is read-only, a folder of its own in the user's cache."""
    if os.access(root, os.W_OK):
        return root
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    folder = pathlib.Path(appdirs.user_cache_dir("cifar-deepspeed-trial")) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def host_lock(root: pathlib.Path, name: str, key: str) -> Iterator[pathlib.Path]:
    """Holds the lock ``name`` of ``root``, which ``key`` sets; gives the folder for what is prepared.

    The operating system releases the lock when its holder dies, however it dies.

    Raises:
        InvalidInput: if no lock can be made in ``root`` nor in the user's cache.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = _writable_folder(root)
        lock = filelock.FileLock(folder / f".{name}.lock", mode=0o666)
        try:
            lock.acquire(timeout=5)
        except filelock.Timeout:
            print(f"waiting for another process that prepares {root}", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise InvalidInput(
            f"{key}: {root}: cannot be used ({one_line(error)}); give another folder"
        ) from error
    try:
        yield folder
    finally:
        lock.release()

"""A lock per data folder: one process of a host prepares the folder while the others wait."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterator

import appdirs
import filelock

from deepspeed_trial.errors import printable
from deepspeed_trial.input_files import refused


def stand_ins() -> pathlib.Path:
    """Return the folder in the user's cache that has the substitutes of read-only folders."""
    return pathlib.Path(appdirs.user_cache_dir("cifar-deepspeed-trial"))


def stand_in(root: pathlib.Path) -> pathlib.Path:
    """Return the folder in the user's cache that substitutes ``root`` if ``root`` is read-only."""
    return stand_ins() / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


def writable_folder(root: pathlib.Path, key: str) -> pathlib.Path:
    """Return ``root``, created if necessary; if it is read-only, its substitute in the user's cache.

    Raises:
        InvalidInput: if neither can be created; ``key`` names the setting of ``root``.
    """
    with refused(f"{key}: {root}"):
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
        folder = stand_in(root)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextlib.contextmanager
def host_lock(root: pathlib.Path, name: str, key: str) -> Iterator[pathlib.Path]:
    """Acquire the lock ``name`` in ``root``, the value of ``key``, and yield the folder to write to.

    The operating system releases the lock if its process is killed.

    Raises:
        InvalidInput: if a lock file can be created neither in ``root`` nor in the user's cache.
    """
    folder = writable_folder(root, key)
    lock = lock_of(folder, name)
    with refused(f"{key}: {root}"):
        try:
            lock.acquire(timeout=5)
        except filelock.Timeout:
            print(f"waiting for another process that prepares {name} in {printable(root)}", file=sys.stderr)
            lock.acquire()
    try:
        yield folder
    finally:
        lock.release()


def lock_of(folder: pathlib.Path, name: str) -> filelock.BaseFileLock:
    """Return the lock ``name`` in a writable folder."""
    return filelock.FileLock(folder / f".{name}.lock", mode=0o666)

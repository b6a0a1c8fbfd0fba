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

from deepspeed_trial.errors import printable
from deepspeed_trial.input_files import refused


def stand_ins() -> pathlib.Path:
    """The folder in the user's cache that holds what would stand in read-only folders."""
    return pathlib.Path(appdirs.user_cache_dir("cifar-deepspeed-trial"))


def stand_in(root: pathlib.Path) -> pathlib.Path:
    """The folder in the user's cache for what would stand in ``root``, if that is read-only."""
    return stand_ins() / hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]


def writable_folder(root: pathlib.Path, key: str) -> pathlib.Path:
    """``root`` itself, which ``key`` sets and which is made, or its stand-in.

    Raises:
        InvalidInput: if neither can be made.
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
    """Hold the lock ``name`` in ``root``, the value of ``key``, and yield the folder to write to.

    The operating system releases the lock when its holder dies, however it dies.

    Raises:
        InvalidInput: if no lock can be made in ``root`` nor in the user's cache.
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
    """The lock ``name`` of a folder that can be written to."""
    return filelock.FileLock(folder / f".{name}.lock", mode=0o666)

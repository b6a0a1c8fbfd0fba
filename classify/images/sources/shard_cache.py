"""Local copies of remote shards, each fetched once per host, within a size limit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import filelock

from classify.images.listing import Shard, is_remote
from classify.images.pixel_files import in_bytes
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import lock_of, writable_folder
from deepspeed_trial.input_files import refused

SHARE = 0.9  # of the disk's free space, which shards may fill if no limit is given
PAUSE = 0.1  # seconds between attempts to reserve space
_KEY = "data.cache.folder"
FOLDER = "shards"  # the subfolder of the folder for all remote data
_ROOM = "room"  # the lock of a folder of shards
_FILE = re.compile(r"[0-9a-f]{24}(?:\.(\d+)\.partial)?")


class ShardCache:
    """A folder of fetched shards that all processes and runs of a host share.

    A shard's file is always complete. The least recently used shards are evicted for new shards; a reader
    that still needs an evicted shard fetches it again.

    Args:
        folder: the folder, which is created if it is missing.
        limit: the maximum total size of the shards in bytes; None for ``SHARE`` of the disk's free space.
    """

    def __init__(self, folder: pathlib.Path, limit: int | None = None) -> None:
        self._wanted, self.limit = folder, limit

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """The folder with the shards: the given one, or its substitute if that is read-only."""
        return writable_folder(self._wanted, _KEY)

    def file(self, shard: Shard, fetch: Callable[[Shard, pathlib.Path], None]) -> pathlib.Path:
        """Return the local file of a shard; fetch a remote shard that is not in the folder.

        Args:
            shard: a shard.
            fetch: a function that downloads a shard to a local file.

        Raises:
            InvalidInput: from ``fetch``, or if there is too little disk space.
        """
        if not is_remote(shard.url):
            return pathlib.Path(shard.url)
        target = self.folder / hashlib.sha256(repr(shard.identity).encode()).hexdigest()[:24]
        if not _used(target):
            with refused(f"{_KEY}: {self.folder}"), lock_of(self.folder, target.name):
                if not _used(target):
                    self._add(shard, fetch, target)
        return target

    def _add(self, shard: Shard, fetch: Callable[[Shard, pathlib.Path], None], target: pathlib.Path) -> None:
        partial = target.with_name(f"{target.name}.{shard.size}.partial")
        try:
            while not self._reserve(shard, partial):
                time.sleep(PAUSE)
            fetch(shard, partial)
            with self._room():  # a process that counts shards must see this one under one of its names
                if not shard.size:  # the server did not say the size
                    self._make_room(shard.url, partial.stat().st_size, partial)
                os.replace(partial, target)
        except BaseException:
            with self._room():
                partial.unlink(missing_ok=True)
            raise

    def _reserve(self, shard: Shard, partial: pathlib.Path) -> bool:
        """Reserve space for a new shard; return False while shards in transfer occupy the space."""
        with self._room():
            has_room = self._make_room(shard.url, shard.size, partial, waits=True)
            if has_room:
                partial.touch()
        return has_room

    def _room(self) -> AbstractContextManager[object]:
        """Return the lock that protects counting, adding and removing shards."""
        return lock_of(self.folder, _ROOM)

    def _make_room(self, url: str, size: int, partial: pathlib.Path, waits: bool = False) -> bool:
        """Evict the least recently used shards until a new shard fits; return True.

        With ``waits``, return False if the new shard fits only when shards in transfer can be evicted, too.

        Raises:
            InvalidInput: if the new shard cannot fit.
        """
        held = self._held(partial)
        limit = self.limit
        if limit is None:
            there = sum(file.stat().st_size for file in (*held, *([partial] if partial.exists() else [])))
            limit = int(SHARE * (shutil.disk_usage(self.folder).free + there))
        excess = sum(each for _, each in held.values()) + size - limit
        for file in sorted(held, key=lambda each: held[each]):
            if excess > 0 and file.suffix != ".partial":
                file.unlink()
                excess -= held[file][1]
        if waits and excess > 0 and size <= limit and any(file.suffix == ".partial" for file in held):
            return False
        if excess > 0:
            what = f"{url} has {in_bytes(size)}"
            if self.limit is None:
                place = f"{_KEY}: {self.folder}: has room for {in_bytes(limit)} of shards"
                raise InvalidInput(f"{place}, but {what}; free some room, or give another folder")
            raise InvalidInput(f"data.cache.limit: {in_bytes(limit)}: {what}; raise it")
        return True

    def _held(self, but: pathlib.Path) -> dict[pathlib.Path, tuple[int, int]]:
        """Return each shard's time of last use in ns, and its size; for a partial shard its final size."""
        held = {}
        for file in self.folder.iterdir():
            named = _FILE.fullmatch(file.name)
            if not named or file == but:
                continue
            if named[1] and self._is_left_over(file):
                file.unlink(missing_ok=True)
                continue
            status = file.stat()
            held[file] = status.st_mtime_ns, max(int(named[1] or 0), status.st_size)
        return held

    def _is_left_over(self, partial: pathlib.Path) -> bool:
        """Return whether a partial shard is left over from a killed process."""
        lock = lock_of(self.folder, partial.name.partition(".")[0])
        with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=0):
            return True
        return False


def find(folders: Iterable[pathlib.Path]) -> dict[pathlib.Path, tuple[int, int]]:
    """Return the number and total bytes of the fetched shards in each folder and its subfolder ``shards``."""
    found = {}
    for place in (place for folder in folders for place in (folder, folder / FOLDER)):
        if (place / f".{_ROOM}.lock").is_file():
            sizes = [entry.stat().st_size for entry in os.scandir(place) if _FILE.fullmatch(entry.name)]
            found[place] = len(sizes), sum(sizes)
    return found


def clear(folder: pathlib.Path) -> None:
    """Remove the shards in a folder that ``find`` returned, except shards in transfer.

    A training that still needs a shard fetches it again.
    """
    kept = ShardCache(folder)
    with kept._room():
        for file in kept._held(folder):
            if file.suffix != ".partial":
                file.unlink()


def _used(file: pathlib.Path) -> bool:
    """Return whether a file exists, and mark it as recently used."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)
        return True
    return False

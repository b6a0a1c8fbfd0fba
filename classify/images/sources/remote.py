"""Files on web servers and in object stores, which fsspec reads with retries; local copies of shards."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import filelock
import fsspec
import tenacity
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from classify.images.listing import Shard, is_remote
from classify.images.pixel_files import in_bytes
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line
from deepspeed_trial.host_lock import lock_of, writable_folder
from deepspeed_trial.input_files import refused

AHEAD = 4  # shards that are fetched at the same time
ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds before the second attempt; the wait doubles with each further attempt
TIMEOUT = 30  # seconds without a byte, after which an attempt has failed
MOST_OF_A_FILE = 2**29  # the maximum bytes of an index, a table or a file of class names
MOST_OF_A_SHARD = 2**32  # the maximum bytes of a shard whose server does not say its size
SHARE = 0.9  # of the disk's free space, which shards may fill if no limit is given
PAUSE = 0.1  # seconds between attempts to reserve space
_KEY = "data.cache.folder"
FOLDER = "shards"  # the subfolder of the folder for all remote data
_ROOM = "room"  # the lock of a folder of shards
_FILE = re.compile(r"[0-9a-f]{24}(?:\.(\d+)\.partial)?")
_ASKED = 16  # requests for sizes and versions at the same time
# Names of a file's version in the answers of web servers and object stores
_VERSIONS = "ETag etag Content-MD5 Digest md5Hash Last-Modified LastModified last_modified updated".split()
_CREDENTIALS = "give credentials in the environment, as docs/sources.md says"
_REFUSALS = ("NoCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "DefaultCredentialsError")
_Result = TypeVar("_Result")
# These references are never deleted. In a fork, fsspec drops its file systems. Deleting one there would
# remove its connections from the selector that the parent shares, and the parent would wait forever.
_opened: dict[int, fsspec.AbstractFileSystem] = {}


@dataclass(frozen=True)
class Storage:
    """Lists, reads and fetches remote files.

    Attributes:
        options: fsspec's storage options, ``data.storage``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def filesystem(self, url: str) -> fsspec.AbstractFileSystem:
        """Return the file system of a URL.

        Raises:
            InvalidInput: if the protocol is unknown, or its library is not installed.
        """
        protocol = url.partition("://")[0]
        try:
            made = fsspec.filesystem(protocol, **_merged(_options(protocol), self.options))
            return _opened.setdefault(id(made), made)
        except ImportError as error:
            library = known_implementations[protocol]["class"].split(".")[0]
            library = "fsspec[http]" if library == "fsspec" else library
            what = f"{protocol}:// needs {library}; pip install {library}"
            raise InvalidInput(f"data.root: {url}: {what}") from error
        except (ValueError, TypeError) as error:
            remedy = "correct data.root or data.storage"
            raise InvalidInput(f"data.root: {url}: cannot be opened ({one_line(error)}); {remedy}") from error

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """Download a shard to a local file, and check its size and, if known, its checksum."""
        most = shard.size or MOST_OF_A_SHARD

        def work() -> None:
            try:
                size = self._download(shard.url, target, most)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                remedy = "free some disk space, set data.cache.limit, or give another folder"
                what = f"no room for {shard.url} ({one_line(error)})"
                raise InvalidInput(f"data.cache.folder: {target.parent}: {what}; {remedy}") from error
            if shard.size not in (0, size):
                raise OSError(f"{size:,} bytes arrived; the index says {shard.size:,}")
            if shard.sha256 and shard.sha256 != sha256(target):
                raise OSError("its bytes differ from the bytes that its index describes")

        _attempt(shard.url, work)

    def read(self, url: str, most: int = MOST_OF_A_FILE) -> bytes | None:
        """Return the bytes of a small file; None if there is no such file.

        Raises:
            InvalidInput: if the file cannot be read, or has more than ``most`` bytes.
        """
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder, "file")
            try:
                _attempt(url, lambda: self._download(url, target, most))
            except InvalidInput as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return None
                raise
            return target.read_bytes()

    def _download(self, url: str, target: pathlib.Path, most: int) -> int:
        """Download a file of at most ``most`` bytes to a local file; return its size."""

        def stop(_: int | None, received: int, **__: object) -> None:
            if received > most:
                what = f"the server sends more than {most:,} bytes"
                raise InvalidInput(f"{url}: {what}; check the file on the server")

        self.filesystem(url).get_file(url, str(target), callback=Callback(hooks={"stop": stop}))
        return target.stat().st_size

    def about(self, url: str) -> tuple[int, str]:
        """Return a file's size in bytes (0 if the server does not send it) and its version."""
        return _attempt(url, lambda: _about(self.filesystem(url).info(url)))

    def about_all(self, urls: Sequence[str]) -> dict[str, tuple[int, str]]:
        """Return the sizes and the versions of many files."""
        with ThreadPoolExecutor(_ASKED) as pool:
            return dict(zip(urls, pool.map(self.about, urls), strict=True))

    def find(self, root: str) -> dict[str, tuple[int, str]]:
        """Return the files below a prefix: the size and the version of each URL."""
        files = self.filesystem(root)
        found = _attempt(root, lambda: files.find(root, maxdepth=2, detail=True))
        return {files.unstrip_protocol(name): _about(answer) for name, answer in found.items()}


class ShardCache:
    """A folder of fetched shards that all processes and runs of a host share.

    A shard's file is always complete. The least recently used shards are evicted for new shards; a reader
    that still needs an evicted shard fetches it again.

    Args:
        folder: the folder, which is created if it is missing.
        fetch: a function that downloads a shard to a local file.
        limit: the maximum total size of the shards in bytes; None for ``SHARE`` of the disk's free space.
    """

    def __init__(
        self, folder: pathlib.Path, fetch: Callable[[Shard, pathlib.Path], None], limit: int | None = None
    ) -> None:
        self._wanted, self._fetch, self.limit = folder, fetch, limit

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """The folder with the shards: the given one, or its substitute if that is read-only."""
        return writable_folder(self._wanted, _KEY)

    def path(self, shard: Shard) -> pathlib.Path:
        """Return the path of a shard's local file, which may be missing."""
        if not is_remote(shard.url):
            return pathlib.Path(shard.url)
        return self.folder / hashlib.sha256(repr(shard.identity).encode()).hexdigest()[:24]

    def file(self, shard: Shard) -> pathlib.Path:
        """Return the local file of a shard; fetch a remote shard that is not in the folder.

        Raises:
            InvalidInput: if the shard cannot be fetched, or there is too little disk space.
        """
        target = self.path(shard)
        if is_remote(shard.url) and not _used(target):
            with refused(f"{_KEY}: {self.folder}"), lock_of(self.folder, target.name):
                if not _used(target):
                    self._add(shard, target)
        return target

    def _add(self, shard: Shard, target: pathlib.Path) -> None:
        partial = target.with_name(f"{target.name}.{shard.size}.partial")
        try:
            while not self._reserve(shard, partial):
                time.sleep(PAUSE)
            self._fetch(shard, partial)
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
            raise InvalidInput(f"data.cache.limit: {in_bytes(limit)}: {what}; raise the limit")
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


class ShardsAhead:
    """Prefetches shards in threads of this process.

    A failed fetch raises no error: the reader of the shard fetches it again.

    Args:
        local_file: a function that fetches a shard.
        threads: the number of shards to fetch at the same time.
    """

    def __init__(self, local_file: Callable[[Shard], pathlib.Path], threads: int = AHEAD) -> None:
        self._local_file, self._not_started = local_file, threads
        self._wanted: collections.deque[Shard] = collections.deque()
        self._changed = threading.Condition()

    def fetch(self, shards: Iterable[Shard]) -> None:
        """Replace the queue by these shards, in the order of reading; transfers in progress are completed."""
        with self._changed:
            self._wanted = collections.deque(shards)
            self._changed.notify_all()
            for _ in range(self._not_started):
                threading.Thread(target=self._work, daemon=True).start()
            self._not_started = 0

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                shard = self._wanted.popleft()
            with contextlib.suppress(Exception):  # the reader's attempts fail in the same way
                self._local_file(shard)


def find_fetched(folders: Iterable[pathlib.Path]) -> dict[pathlib.Path, tuple[int, int]]:
    """Return the number and total bytes of the fetched shards in each folder and its subfolder ``shards``."""
    found = {}
    for place in (place for folder in folders for place in (folder, folder / FOLDER)):
        if (place / f".{_ROOM}.lock").is_file():
            sizes = [entry.stat().st_size for entry in os.scandir(place) if _FILE.fullmatch(entry.name)]
            found[place] = len(sizes), sum(sizes)
    return found


def clear_fetched(folder: pathlib.Path) -> None:
    """Remove the shards in a folder that ``find_fetched`` returned, except shards in transfer.

    A training that still needs a shard fetches it again.
    """
    kept = ShardCache(folder, Storage().fetch)
    with kept._room():
        for file in kept._held(folder):
            if file.suffix != ".partial":
                file.unlink()


def _about(answer: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size and the version of a file, from the server's answer."""
    version = next((str(answer[key]) for key in _VERSIONS if answer.get(key)), "")
    return int(answer.get("size") or 0), version


def _attempt(url: str, work: Callable[[], _Result]) -> _Result:
    """Call ``work`` and return its result; retry after a delay if the failure may be temporary.

    Raises:
        InvalidInput: with the URL, after the last failure.
    """
    again = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential(multiplier=FIRST_WAIT) + tenacity.wait_random(0, FIRST_WAIT),
        retry=tenacity.retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        return again(work)
    except InvalidInput:
        raise
    except FileNotFoundError as error:
        raise InvalidInput(f"{url}: no such file; correct data.root, or put the file there") from error
    except Exception as error:  # each file system raises other classes
        if isinstance(error, PermissionError) or type(error).__name__ in _REFUSALS:
            what = f"is refused ({one_line(error)}); {_CREDENTIALS}"
        else:
            times = f" in {ATTEMPTS} attempts" if _may_pass(error) else ""
            is_late = isinstance(error, (TimeoutError, asyncio.TimeoutError))  # one class from Python 3.11 on
            reason = f"no byte arrived in {TIMEOUT} s" if is_late else one_line(error)
            what = f"cannot be read{times} ({reason}); check that the server has the file, and start again"
        raise InvalidInput(f"{url}: {what}") from error


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed; False if the server has refused the request."""
    lasting = (InvalidInput, FileNotFoundError, PermissionError, ImportError, TypeError, AttributeError)
    status = getattr(error, "status", None)
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    is_error = isinstance(error, Exception) and not isinstance(error, lasting)
    return is_error and not is_refused and type(error).__name__ not in _REFUSALS


def _options(protocol: str) -> dict[str, Any]:
    """Return storage options that set time limits, and let ``_download`` count each received byte."""
    if protocol in ("http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
        headers = {"Accept-Encoding": "identity"}
        return {"client_kwargs": {"timeout": limits, "auto_decompress": False, "headers": headers}}
    if protocol in ("s3", "s3a"):  # by default it has several ranges of any length in memory
        times = {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT}
        return {"config_kwargs": times, "max_concurrency": 1}
    return {}


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested options; the user's options have precedence."""
    merged = {**ours, **theirs}
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], Mapping) and isinstance(theirs[key], Mapping):
            merged[key] = _merged(ours[key], theirs[key])
    return merged


def _used(file: pathlib.Path) -> bool:
    """Return whether a file exists, and mark it as recently used."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(file)
        return True
    return False

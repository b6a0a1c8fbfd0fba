"""Files on web servers and in object stores: listed, read and fetched by fsspec, with retries."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fsspec
import tenacity
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from classify.images.listing import Shard
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line

ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds before the second attempt; the wait doubles with each further attempt
TIMEOUT = 30  # seconds without a byte, after which an attempt has failed
MOST_OF_A_FILE = 2**29  # the maximum bytes of an index, a table or a file of class names
MOST_OF_A_SHARD = 2**32  # the maximum bytes of a shard whose server does not say its size
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
        raise InvalidInput(f"{url}: no such file; correct data.root, or put it there") from error
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
    refused = (InvalidInput, FileNotFoundError, PermissionError, ImportError, TypeError, AttributeError)
    status = getattr(error, "status", None)
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    is_error = isinstance(error, Exception) and not isinstance(error, refused)
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

"""Files on web servers and in object stores: listed, read and fetched by fsspec, with retries."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import fsspec
import tenacity
from fsspec.registry import known_implementations

from classify.images.sources.encoded import Shard
from harness.errors import DISK_FULL, InvalidInput, one_line

ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds, which double with each further attempt
TIMEOUT = 30  # seconds without a byte, after which an attempt has failed
_CREDENTIALS = "give credentials in the environment, as docs/sources.md says"
_REFUSALS = ("NoCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "DefaultCredentialsError")
_SECRETS = re.compile(r"key|secret|passw|token|connection_string", re.I)  # in fsspec's options
_WAYS = ("anon", "cache", "cloud", "google_default")  # of gcsfs, which names them in "token"
_Result = TypeVar("_Result")


def is_remote(path: str) -> bool:
    """Whether a path is a URL, not one of this machine."""
    return "://" in path


@dataclass(frozen=True)
class Storage:
    """What reads remote files.

    Attributes:
        options: fsspec's storage options, ``data.storage``.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def filesystem(self, url: str) -> fsspec.AbstractFileSystem:
        """The file system of a URL.

        Raises:
            InvalidInput: if there is none, or its library is not installed.
        """
        protocol = url.partition("://")[0]
        try:
            return fsspec.filesystem(protocol, **{**_time_outs(protocol), **self.options})
        except ImportError as error:
            library = known_implementations[protocol]["class"].split(".")[0]
            library = "fsspec[http]" if library == "fsspec" else library
            what = f"{protocol}:// needs {library}; pip install {library}"
            raise InvalidInput(f"data.root: {url}: {what}") from error
        except (ValueError, TypeError) as error:
            mend = "mend data.root or data.storage"
            raise InvalidInput(f"data.root: {url}: cannot be opened ({one_line(error)}); {mend}") from error

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """Writes a shard to a local file, and checks its size and, if it is known, its digest."""
        files = self.filesystem(shard.url)

        def work() -> None:
            try:
                files.get_file(shard.url, str(target))
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                mend = "free some, set data.cache.limit, or give another folder"
                what = f"no room for {shard.url} ({one_line(error)})"
                raise InvalidInput(f"data.cache.folder: {target.parent}: {what}; {mend}") from error
            size = target.stat().st_size
            if shard.size not in (0, size):
                raise OSError(f"{size:,} bytes came of {shard.size:,} that its index names")
            if shard.sha256 and shard.sha256 != digest(target):
                raise OSError("its bytes differ from those that its index was made of")

        _attempt(shard.url, work)

    def read(self, url: str) -> bytes:
        """The bytes of a small file; raises ``InvalidInput``."""
        return _attempt(url, lambda: self.filesystem(url).cat_file(url))

    def read_if_there(self, url: str) -> bytes | None:
        """The bytes of a small file, None if there is no such file."""
        try:
            return self.read(url)
        except InvalidInput as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def size(self, url: str) -> int:
        """The size of a file in bytes, 0 if the server does not say."""
        return int(_attempt(url, lambda: self.filesystem(url).info(url)).get("size") or 0)

    def find(self, root: str) -> dict[str, int]:
        """The URLs and sizes of the files below a prefix."""
        files = self.filesystem(root)
        found = _attempt(root, lambda: files.find(root, maxdepth=2, detail=True))
        return {files.unstrip_protocol(name): int(about["size"]) for name, about in found.items()}


def secrets_in(options: Mapping[str, Any], path: str = "") -> list[str]:
    """The keys of storage options, within others as ``a.b``, that hold credentials."""
    found = []
    for key, value in options.items():
        if isinstance(value, Mapping):
            found += secrets_in(value, f"{path}{key}.")
        elif value and _SECRETS.search(str(key)) and value not in _WAYS:
            found.append(f"{path}{key}")
    return found


def digest(file: pathlib.Path) -> str:
    """The SHA-256 of a file."""
    counted = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(2**20):
            counted.update(block)
    return counted.hexdigest()


def _attempt(url: str, work: Callable[[], _Result]) -> _Result:
    """Does the work, again after a while where a failure may pass.

    Raises:
        InvalidInput: that names the URL, once it has failed for good.
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
        raise InvalidInput(f"{url}: no such file; mend data.root, or put it there") from error
    except Exception as error:  # each file system has its own
        if isinstance(error, PermissionError) or type(error).__name__ in _REFUSALS:
            what = f"is refused ({one_line(error)}); {_CREDENTIALS}"
        else:
            times = f" in {ATTEMPTS} attempts" if _may_pass(error) else ""
            is_late = isinstance(error, (TimeoutError, asyncio.TimeoutError))  # one class from Python 3.11 on
            reason = f"not a byte in {TIMEOUT} s" if is_late else one_line(error)
            what = f"cannot be read{times} ({reason}); see whether the server has it, and start again"
        raise InvalidInput(f"{url}: {what}") from error


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed: not where the server has understood and refused."""
    refused = (InvalidInput, FileNotFoundError, PermissionError, ImportError, TypeError, AttributeError)
    status = getattr(error, "status", None)
    is_refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    is_error = isinstance(error, Exception) and not isinstance(error, refused)
    return is_error and not is_refused and type(error).__name__ not in _REFUSALS


def _time_outs(protocol: str) -> dict[str, Any]:
    """The storage options by which a server that is silent is given up."""
    if protocol in ("http", "https"):
        try:
            aiohttp = importlib.import_module("aiohttp")
        except ImportError:  # which the file system says
            return {}
        limits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
        return {"client_kwargs": {"timeout": limits}}
    if protocol in ("s3", "s3a"):
        return {"config_kwargs": {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT}}
    return {}

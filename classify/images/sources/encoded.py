"""What a source of encoded images gives: files that are read by index, alone or many in a shard."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from classify.images import decode
from deepspeed_trial.host_lock import stand_ins

MOST_OF_AN_IMAGE = decode.MOST_BYTES


@dataclass(frozen=True)
class Shard:
    """A file that holds many images.

    Attributes:
        url: what fsspec opens, or a local path.
        size: in bytes.
        start: the place of its first image among those of all shards.
        stop: the place after its last one.
        sha256: of its bytes; empty if it is not known.
        version: its server's name for these bytes, such as an ETag; empty if there is none.
    """

    url: str
    size: int
    start: int
    stop: int
    sha256: str = ""
    version: str = ""

    @property
    def identity(self) -> tuple[str, str | int]:
        """Changes when its bytes do, as far as its index or its server tells."""
        return self.url, self.sha256 or self.version or self.size


ShardFile = Callable[[Shard], pathlib.Path]  # gives the local file that holds a shard's bytes
Fetch = Callable[[Shard, pathlib.Path], None]  # writes a remote shard to a local file


class EncodedImages(Protocol):
    """One part of a dataset, as encoded image files (JPEG, PNG ...) that can be read by index.

    Attributes:
        labels: int64 (N,), in the order of the dataset, which is that of all indices.
        shards: in the order of their images; () where every image is a file of its own.
        places: int64 (N,), where each image lies among those of all shards, as ``Shard.start`` counts them;
            None where it lies at its index.
    """

    labels: Tensor
    shards: Sequence[Shard]
    places: Tensor | None

    @property
    def fingerprint(self) -> str:
        """Changes when an image, a label or their order does."""
        ...

    def read(self, indices: Sequence[int], shard_file: ShardFile) -> list[bytes]:
        """Reads images; raises ``InvalidInput`` that names what cannot be read."""
        ...

    def name(self, index: int) -> str:
        """What an error line calls an image: its path, or its shard and its name in it."""
        ...

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """Writes a remote shard to a local file; raises ``InvalidInput`` after several attempts."""
        ...


@dataclass(frozen=True)
class Location:
    """Where a dataset lies, and how it is reached.

    Attributes:
        root: ``data.root``: a folder, a URL or a pattern of file names.
        download: whether a missing dataset may be downloaded.
        storage: fsspec's storage options.
        cache: the folder for what is kept of remote data; None for the user's cache.
        limit: bytes of what may be kept on this machine; None for no limit.
    """

    root: str
    download: bool = True
    storage: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    limit: int | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is a URL."""
        return "://" in self.root

    @property
    def is_pattern(self) -> bool:
        """Whether it names files, with or without ``{0..9}`` and ``*``, and no folder."""
        names = re.search(r"[{*]", self.root) or self.root.endswith((".tar", ".parquet"))
        return bool(names) and not os.path.isdir(self.root)

    @property
    def base(self) -> str:
        """The folder or prefix: of file names the one that holds them."""
        head = re.split(r"[{*]", self.root)[0]
        return (head.rpartition("/")[0] or ".") if self.is_pattern else self.root

    @property
    def folder(self) -> pathlib.Path:
        """Where decoded images and indices are kept: the dataset's own folder, if it is of this machine."""
        if self.is_remote:
            return self.cache_folder / hashlib.sha256(self.root.encode()).hexdigest()[:16]
        return pathlib.Path(self.base)

    @property
    def cache_folder(self) -> pathlib.Path:
        """What is kept of all remote data."""
        return pathlib.Path(self.cache) if self.cache else stand_ins()

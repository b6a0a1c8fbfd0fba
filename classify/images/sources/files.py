"""Images that are files of their own."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import stat
from collections.abc import Sequence

import torch
from torch import Tensor

from classify.images.decode import content_of
from classify.images.sources.encoded import Shard, ShardFile
from classify.images.sources.remote import Storage, is_remote
from harness.errors import InvalidInput, one_line

EXTENSIONS = ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif".split()


class FileImages:
    """Images that are files of their own.

    Args:
        paths: of the files, or their URLs.
        labels: of each.
        names: what else the images depend on, such as the class names.
        root: the folder from which on paths count.
        storage: of URLs, of which each image is fetched whenever it is read.
    """

    shards: Sequence[Shard] = ()
    places: Tensor | None = None

    def __init__(
        self,
        paths: list[str],
        labels: Sequence[int],
        names: object,
        root: str,
        storage: Storage | None = None,
    ) -> None:
        self.paths, self.labels = paths, torch.tensor(labels, dtype=torch.int64)
        self._names, self._root, self._storage = names, root, storage or Storage()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes if a file is added, removed, renamed or written."""
        digest = hashlib.sha256(repr(self._names).encode())
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            if is_remote(path):
                digest.update(repr((path, label)).encode())
                continue
            try:
                status = os.stat(path)
            except OSError as error:  # such as a link to nowhere
                raise InvalidInput(f"data.root: {path}: {one_line(error)}; mend or remove it") from error
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(f"data.root: {path}: is no file; remove it")
            name = path.removeprefix(self._root)
            digest.update(
                repr((name, label, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()
            )
        return digest.hexdigest()

    def read(self, indices: Sequence[int], shard_file: ShardFile) -> list[bytes]:
        """Reads files; raises ``InvalidInput`` for the first that cannot be read."""
        paths = [self.paths[index] for index in indices]
        return [self._storage.read(path) if is_remote(path) else content_of(path) for path in paths]

    def name(self, index: int) -> str:
        """The path of a file."""
        return self.paths[index]

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """There are no shards."""
        raise NotImplementedError

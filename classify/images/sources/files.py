"""Images that are local files of their own."""

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
from harness.errors import InvalidInput, one_line

EXTENSIONS = ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif".split()


class FileImages:
    """Images that are local files of their own.

    Args:
        paths: of the files.
        labels: of each.
        names: what else the images depend on, such as the class names.
        root: the folder from which on paths count.
    """

    shards: Sequence[Shard] = ()
    places: Tensor | None = None

    def __init__(self, paths: list[str], labels: Sequence[int], names: object, root: str) -> None:
        self.paths, self.labels = paths, torch.tensor(labels, dtype=torch.int64)
        self._names, self._root = names, root

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes if a file is added, removed, renamed or written."""
        digest = hashlib.sha256(repr(self._names).encode())
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
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
        return [content_of(self.paths[index]) for index in indices]

    def name(self, index: int) -> str:
        """The path of a file."""
        return self.paths[index]

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """There are no shards."""
        raise NotImplementedError

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
from classify.images.sources.encoded import MOST_OF_AN_IMAGE, Shard, ShardFile
from classify.images.sources.remote import Storage, is_remote
from deepspeed_trial.errors import InvalidInput, one_line

NOT_READABLE = "replace or remove these first, or set data.unreadable to skip"  # the remedy
SHOWN = 20  # files that are named where more cannot be read
EXTENSIONS = ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif".split()


def raise_some(errors: Sequence[str], remedy: str = "replace or remove these first") -> None:
    """Raise ``InvalidInput`` with errors of a line a file, if there are any: the first 20, and a count."""
    if len(errors) > SHOWN:
        more = f"{len(errors) - SHOWN:,} more files are not readable; {remedy}"
        errors = [*errors[:SHOWN], f"data.root: {more}"]
    if errors:
        raise InvalidInput(errors)


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
        """Return a digest that changes if a file is added, removed, renamed or written.

        Raises:
            InvalidInput: with a line for each local file that is not there or no file.
        """
        digest, errors = hashlib.sha256(repr(self._names).encode()), list[str]()
        versions = self._storage.about_all([path for path in self.paths if is_remote(path)])
        for path, label in zip(self.paths, self.labels.tolist(), strict=True):
            if is_remote(path):
                digest.update(repr((path, label, versions[path])).encode())
                continue
            try:
                status = os.stat(path)
            except (OSError, ValueError) as error:  # such as a link to nowhere
                errors.append(f"data.root: {path}: cannot be used ({one_line(error)}); replace or remove it")
                continue
            if not stat.S_ISREG(status.st_mode):
                errors.append(f"data.root: {path}: is no file; remove it")
            name = path.removeprefix(self._root)
            digest.update(
                repr((name, label, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()
            )
        raise_some(errors)
        return digest.hexdigest()

    def read(self, indices: Sequence[int], shard_file: ShardFile) -> list[bytes]:
        """Reads files; raises ``InvalidInput`` for the first that cannot be read."""
        fetch = functools.partial(self._storage.read, most=MOST_OF_AN_IMAGE)
        paths = [self.paths[index] for index in indices]
        return [fetch(path) if is_remote(path) else content_of(path) for path in paths]

    def name(self, index: int) -> str:
        """The path of a file."""
        return self.paths[index]

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """There are no shards."""
        raise NotImplementedError

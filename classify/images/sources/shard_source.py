"""A dataset in shards: its index, read once and kept, and the images of its parts."""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from classify.images.sources import shard_files, shard_index
from classify.images.sources.decode_once import AHEAD
from classify.images.sources.encoded import Location, Shard, ShardFile
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.remote import MOST_OF_A_FILE, Storage, is_remote
from classify.images.sources.shard_index import Index, Part, Scanned
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import host_lock
from deepspeed_trial.input_files import refused, small_file
from deepspeed_trial.redaction import text


class ShardImages(abc.ABC):
    """The images of one part, in shards: arrays of numbers alone, about 40 bytes an image.

    Args:
        part: of the index, with whole URLs.
        classes: their names.
        storage: of the remote ones.

    Attributes:
        local: the files of the shards from which this process has read.
    """

    def __init__(self, part: Part, classes: Sequence[str], storage: Storage) -> None:
        self.shards, self.entries, self._classes, self._storage = part.shards, part.entries, classes, storage
        positions = part.entries["position"].astype(np.int64)
        is_sorted = bool((positions == np.arange(len(positions))).all())
        self.places: Tensor | None = None if is_sorted else torch.from_numpy(np.argsort(positions))
        labels = np.empty(len(positions), np.int64)
        labels[positions] = part.entries["label"]
        self.labels = torch.from_numpy(labels)
        self._starts = np.array([shard.start for shard in part.shards])
        self.local: dict[str, pathlib.Path] = {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when a shard, a label or the order does."""
        counted = hashlib.sha256(repr(tuple(self._classes)).encode())
        counted.update(self.entries.data)
        for shard in self.shards:
            known = os.path.basename(shard.url), shard.size, shard.sha256, shard.version
            counted.update(repr(known).encode())
            if not is_remote(shard.url):
                counted.update(repr(os.stat(shard.url).st_mtime_ns).encode())
        return counted.hexdigest()

    def read(self, indices: Sequence[int], shard_file: ShardFile) -> list[bytes]:
        """Reads images; raises ``InvalidInput`` where a shard is not what its index says."""
        return [self._read(*self.find(index), shard_file) for index in indices]

    def _read(self, shard: Shard, place: int, shard_file: ShardFile) -> bytes:
        while True:
            file = shard_file(shard)
            try:
                return self.read_one(shard, place, file)
            except InvalidInput:
                if file.exists() or not is_remote(shard.url):
                    raise
            # Another process has made room of it meanwhile

    @abc.abstractmethod
    def read_one(self, shard: Shard, place: int, file: pathlib.Path) -> bytes:
        """Reads the image at a place among those of all shards, which lies in this one.

        Args:
            shard: that holds it.
            place: of the image.
            file: the shard's local one.
        """

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """What an error line calls an image."""

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """Writes a remote shard to a local file."""
        self._storage.fetch(shard, target)

    def find(self, index: int) -> tuple[Shard, int]:
        """The shard of an image, and its place among those of all shards."""
        place = index if self.places is None else int(self.places[index])
        return self.shards[int(np.searchsorted(self._starts, place, side="right")) - 1], place


def _at(index: Index, urls: Mapping[str, Sequence[str]]) -> Index:
    """Return an index with other URLs: those of a kept one have no credentials."""
    parts = {
        name: replace(
            part, shards=[replace(s, url=url) for s, url in zip(part.shards, urls[name], strict=True)]
        )
        for name, part in index.parts.items()
    }
    return replace(index, parts=parts)


class ShardSource(EncodedSource):
    """A dataset in shards.

    Attributes:
        ending: of the files' names.
        images: makes the images of a part.
        scan: reads what a local file holds, which an error line calls by a name.
    """

    ending: str
    images: type[ShardImages]
    scan: Callable[[pathlib.Path, str], Scanned]

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self.storage = Storage(location.storage)
        self._encoded: dict[str, ShardImages] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self._index.classes

    @property
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or ``all`` alone."""
        return tuple(self._index.parts)

    def encoded(self, part: str) -> ShardImages:
        """The images of a part, in the order that the index gives them, or in that of the shards."""
        if part not in self._encoded:
            self._encoded[part] = self.images(self._index.parts[part], self.classes, self.storage)
        return self._encoded[part]

    @functools.cached_property
    def _index(self) -> Index:
        return self.read_index()

    def read_index(self) -> Index:
        """Reads the shards' contents, of remote ones after they were fetched; what is found is kept.

        Raises:
            InvalidInput: if there are no shards, or one cannot be read, or a label is no class.
        """
        parts = shard_files.find(self.location, self.ending)
        stamps = [
            (shard.url, shard.size, shard.version if is_remote(shard.url) else os.stat(shard.url).st_mtime_ns)
            for shards in parts.values()
            for shard in shards
        ]
        names = self.names()
        source = hashlib.sha256(repr((stamps, names)).encode()).hexdigest()
        with host_lock(self.location.folder, "shards-index", "data.root") as folder:
            file = folder / f".index-of{self.ending}.npz"
            with contextlib.suppress(OSError, InvalidInput, LookupError, ValueError):  # or it is made anew
                if (kept := Index.read(small_file(file, MOST_OF_A_FILE), str(file))).source == source:
                    return _at(kept, {name: [each.url for each in shards] for name, shards in parts.items()})
            index = self._scan_all(parts, names, source)
            shown = {name: [text(each.url) for each in part.shards] for name, part in index.parts.items()}
            with refused(str(file)):
                _at(index, shown).save(file)
        return index

    def _scan_all(self, parts: Mapping[str, Sequence[Shard]], names: list[str] | None, source: str) -> Index:
        files = self.shard_file(self.storage.fetch)

        def scan(shard: Shard) -> tuple[Scanned, Shard]:
            file = files(shard)
            return type(self).scan(file, shard.url), replace(shard, size=file.stat().st_size)

        with ThreadPoolExecutor(AHEAD) as pool:
            found = {part: list(pool.map(scan, shards)) for part, shards in parts.items()}
        every = [pair for pairs in found.values() for pair in pairs]
        texts = {text: each.name for each, _ in every for text in each.texts}
        classes = shard_index.classes_of(texts, names or self.names(files(every[0][1])))
        joined = {part: shard_index.join(pairs, classes) for part, pairs in found.items()}
        return Index(classes, joined, source)

    def names(self, file: pathlib.Path | None = None) -> list[str] | None:
        """The class names that the dataset gives its numbers: beside the shards, or in the first of them."""
        return None

    def beside(self, name: str, most: int = MOST_OF_A_FILE) -> bytes | None:
        """Return the content of a file beside the shards, at most ``most`` bytes; None if there is none."""
        file = shard_files.join(self.location.base, name)
        if self.location.is_remote:
            return self.storage.read_if_there(file, most)
        with refused(f"data.root: {file}"):
            return small_file(file, most) if os.path.isfile(file) else None

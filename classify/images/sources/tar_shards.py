"""Tar shards, as WebDataset has them: ``train-000000.tar`` with ``KEY.jpg`` and ``KEY.cls`` or ``KEY.json``.

Source: https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from classify.images.sources import shard_files, tar_index
from classify.images.sources.decode_once import AHEAD
from classify.images.sources.encoded import Location, Shard, ShardFile
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.remote import Storage, is_remote
from classify.images.sources.tar_index import Index, Part
from harness.errors import InvalidInput, one_line
from harness.host_lock import host_lock
from harness.input_files import refused

_BLOCK = 512  # bytes of a member's header
_SCANNED = ".shards-index.npz"  # what was read out of shards that have no index


class TarImages:
    """The images of one part, in tar shards.

    Args:
        part: of the index, with whole URLs.
        classes: their names.
        storage: of the remote ones.
    """

    def __init__(self, part: Part, classes: Sequence[str], storage: Storage) -> None:
        self.shards, self._entries, self._classes, self.storage = part.shards, part.entries, classes, storage
        positions = part.entries["position"].astype(np.int64)
        is_sorted = bool((positions == np.arange(len(positions))).all())
        self.places: Tensor | None = None if is_sorted else torch.from_numpy(np.argsort(positions))
        labels = np.empty(len(positions), np.int64)
        labels[positions] = part.entries["label"]
        self.labels = torch.from_numpy(labels)
        self._starts = np.array([shard.start for shard in part.shards])
        self._local: dict[str, pathlib.Path] = {}  # of the shards read

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes when a shard, a label or the order does."""
        counted = hashlib.sha256(repr(tuple(self._classes)).encode() + self._entries.tobytes())
        for shard in self.shards:
            counted.update(repr((os.path.basename(shard.url), shard.size, shard.sha256)).encode())
            if not is_remote(shard.url):
                counted.update(repr(os.stat(shard.url).st_mtime_ns).encode())
        return counted.hexdigest()

    def read(self, indices: Sequence[int], shard_file: ShardFile) -> list[bytes]:
        """Reads images; raises ``InvalidInput`` where a shard is not what its index says."""
        return [self._read(*self._find(index), shard_file) for index in indices]

    def name(self, index: int) -> str:
        """The shard and the member; of a remote shard that was not read, the byte at which it begins."""
        shard, place = self._find(index)
        offset = int(self._entries["offset"][place])
        if file := self._local.get(shard.url):
            with open(file, "rb") as opened:
                opened.seek(offset - _BLOCK)
                header = tarfile.TarInfo.frombuf(opened.read(_BLOCK), "utf-8", "surrogateescape")
            return f"{shard.url}, member {header.name}"
        return f"{shard.url}, byte {offset:,}"

    def fetch(self, shard: Shard, target: pathlib.Path) -> None:
        """Writes a remote shard to a local file."""
        self.storage.fetch(shard, target)

    def _find(self, index: int) -> tuple[Shard, int]:
        place = index if self.places is None else int(self.places[index])
        return self.shards[int(np.searchsorted(self._starts, place, side="right")) - 1], place

    def _read(self, shard: Shard, place: int, shard_file: ShardFile) -> bytes:
        offset, size = int(self._entries["offset"][place]), int(self._entries["size"][place])
        mend = "the shard and its index differ; write both anew"
        try:
            self._local[shard.url] = file = shard_file(shard)
            descriptor = os.open(file, os.O_RDONLY)
            try:
                content = os.pread(descriptor, size + _BLOCK, max(0, offset - _BLOCK))
            finally:
                os.close(descriptor)
            header = tarfile.TarInfo.frombuf(content[:_BLOCK], "utf-8", "surrogateescape")
            if header.size == size == len(content) - _BLOCK:
                return content[_BLOCK:]
            reason = f"{header.size:,} bytes where its index says {size:,}"
        except (OSError, tarfile.TarError) as error:
            reason = one_line(error)
        raise InvalidInput(f"{shard.url}: no image of {size:,} bytes at byte {offset:,} ({reason}); {mend}")


class TarShards(EncodedSource):
    """A dataset in tar shards.

    Args:
        location: their folder or prefix, or their names.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._storage = Storage(location.storage)
        self._encoded: dict[str, TarImages] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self._index.classes

    @property
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or ``all`` alone."""
        return tuple(self._index.parts)

    def encoded(self, part: str) -> TarImages:
        """The images of a part, in the order that the index gives them, or in that of the shards."""
        if part not in self._encoded:
            self._encoded[part] = TarImages(self._index.parts[part], self.classes, self._storage)
        return self._encoded[part]

    @functools.cached_property
    def _index(self) -> Index:
        root = self.location.root
        file = shard_files.join(root, tar_index.FILE)
        if self.location.is_pattern:
            return self._scan()
        if is_remote(root):
            content = self._storage.read_if_there(file)
        else:
            with refused(f"data.root: {root}"):
                content = pathlib.Path(file).read_bytes() if os.path.isfile(file) else None
        if content is None:
            return self._scan()
        index = Index.read(content, file)
        return replace(index, parts={name: self._placed(part, file) for name, part in index.parts.items()})

    def _placed(self, part: Part, index: str) -> Part:
        """A part whose shards have whole URLs, those of this machine having the sizes of the index."""
        shards = [
            replace(shard, url=shard_files.join(self.location.root, shard.url)) for shard in part.shards
        ]
        for shard in shards if not self.location.is_remote else ():
            with refused(f"data.root: {shard.url}", "put it there, or write the shards anew"):
                size = os.stat(shard.url).st_size
            if size != shard.size:
                what = f"has {size:,} bytes, but its index {index} says {shard.size:,}"
                raise InvalidInput(f"{shard.url}: {what}; write or fetch both anew")
        return replace(part, shards=shards)

    def _scan(self) -> Index:
        """Reads the shards' headers, of remote ones after they were fetched; what is found is kept."""
        parts = shard_files.find(self.location, ".tar")
        text = self._classes_file()
        stamps = [
            (shard.url, shard.size, None if is_remote(shard.url) else os.stat(shard.url).st_mtime_ns)
            for shards in parts.values()
            for shard in shards
        ]
        source = hashlib.sha256(repr((stamps, text)).encode()).hexdigest()
        with host_lock(self.location.folder, "shards-index", "data.root") as folder:
            file = folder / _SCANNED
            with contextlib.suppress(OSError, InvalidInput):  # or it is made anew
                if (kept := Index.read(file.read_bytes(), str(file))).source == source:
                    return kept
            index = self._scanned(parts, text, source)
            with refused(str(file)):
                index.save(file)
        return index

    def _scanned(self, parts: Mapping[str, Sequence[Shard]], text: str | None, source: str) -> Index:
        files = self.shard_file(self._storage.fetch)

        def scan(shard: Shard) -> tuple[tar_index.Scanned, Shard]:
            file = files(shard)
            return tar_index.Scanned(file, shard.url), replace(shard, size=file.stat().st_size)

        with ThreadPoolExecutor(AHEAD) as pool:
            found = {part: list(pool.map(scan, shards)) for part, shards in parts.items()}
        names = None if text is None else [line.strip() for line in text.splitlines() if line.strip()]
        classes = tar_index.classes_of([each for pairs in found.values() for each, _ in pairs], names)
        joined = {part: tar_index.join(pairs, classes) for part, pairs in found.items()}
        return Index(classes, joined, source)

    def _classes_file(self) -> str | None:
        """The names in ``classes.txt`` beside the shards, a line each, where there is one."""
        if self.location.is_pattern:
            return None
        file = shard_files.join(self.location.root, "classes.txt")
        if self.location.is_remote:
            content = self._storage.read_if_there(file)
        else:
            content = pathlib.Path(file).read_bytes() if os.path.isfile(file) else None
        return None if content is None else content.decode(errors="replace")

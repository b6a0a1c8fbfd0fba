"""Datasets in shards: finds the shards by folder, prefix or pattern, and reads the index and the images."""

from __future__ import annotations

import abc
import contextlib
import functools
import glob
import hashlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from classify.images.listing import PARTS, WHOLE, ListedSource, Listing, Shard, is_remote
from classify.images.settings import DataSettings
from classify.images.sources import shard_index
from classify.images.sources.remote import AHEAD, FOLDER, MOST_OF_A_FILE, ShardCache, Storage
from classify.images.sources.shard_index import Index, Part, Scanned
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.host_lock import host_lock
from deepspeed_trial.input_files import refused, regular_file, small_file
from deepspeed_trial.redaction import text

_SYNONYMS = {"training": "train", "validation": "val", "valid": "val", "testing": "test"}
_PART = re.compile(rf"({'|'.join((*PARTS, WHOLE, *_SYNONYMS))})(?=[-_./\d])", re.I)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class ShardListing(Listing):
    """The images of one part, in shards. The index takes about 40 bytes of memory per image.

    Args:
        part: the part of the index, with complete URLs.
        source: the dataset.
    """

    def __init__(self, part: Part, source: ShardSource) -> None:
        self.shards, self.entries, self._source = part.shards, part.entries, source
        positions = part.entries["position"].astype(np.int64)
        self.places = np.argsort(positions)
        self.labels = torch.from_numpy(part.entries["label"].astype(np.int64)[self.places])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest that changes if a shard, a label or the order changes."""
        digest = hashlib.sha256(repr(self._source.classes).encode())
        digest.update(self.entries.data)
        for shard in self.shards:
            known = os.path.basename(shard.url), shard.size, shard.sha256, shard.version
            digest.update(repr(known).encode())
            if not is_remote(shard.url):
                digest.update(repr(os.stat(shard.url).st_mtime_ns).encode())
        return digest.hexdigest()

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of an image; raise ``InvalidInput`` if its shard contradicts the index."""
        shard, offset, size = self._find(index)
        while True:
            file = self.local_file(shard)
            try:
                return self._source.read(file, shard.url, offset, size)
            except InvalidInput:
                if file.exists() or not is_remote(shard.url):
                    raise
            # Another process has evicted the shard in the meantime

    def name(self, index: int) -> str:
        """Return the name of an image: its shard, and its member, byte or row."""
        shard, offset, _ = self._find(index)
        return self._source.name(self._source.cache.path(shard), shard.url, offset)

    def local_file(self, shard: Shard) -> pathlib.Path:
        """Return the local file of a shard; a remote shard is fetched once per host."""
        return self._source.cache.file(shard)

    def _find(self, index: int) -> tuple[Shard, int, int]:
        """Return an image's shard, and its offset and size in the index."""
        place = self.places_of(index)
        entry = self.entries[place]
        return self.shards[self.shards_of(place)], int(entry["offset"]), int(entry["size"])


class ShardSource(ListedSource):
    """A dataset in shards; a subclass reads the files of one format.

    Attributes:
        ending: the ending of the files' names.
        cache: the local files of the shards.
    """

    ending: str

    def __init__(self, settings: DataSettings) -> None:
        super().__init__(settings)
        fetch = Storage(settings.storage).fetch
        self.cache = ShardCache(self.cache_folder / FOLDER, fetch, settings.cache_limit)

    @staticmethod
    @abc.abstractmethod
    def scan(file: pathlib.Path, url: str) -> Scanned:
        """Find the images and the labels in a shard.

        Args:
            file: the shard's local file.
            url: the shard's name in error lines.

        Raises:
            InvalidInput: if the shard is damaged or incomplete, or an image has no label.
        """

    @staticmethod
    @abc.abstractmethod
    def read(file: pathlib.Path, url: str, offset: int, size: int) -> bytes:
        """Return the bytes of an image by its entry in the index; raise ``InvalidInput`` if it is absent."""

    @staticmethod
    @abc.abstractmethod
    def name(file: pathlib.Path, url: str, offset: int) -> str:
        """Return the name of an image in error lines; the file may be missing."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the labels."""
        return self.index.classes

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: ``train`` with ``test``, ``val`` or both; or only ``all``."""
        return tuple(self.index.parts)

    def list_part(self, part: str) -> ShardListing:
        """List the images of a part, in the order of the index."""
        return ShardListing(self.index.parts[part], self)

    @functools.cached_property
    def index(self) -> Index:
        """The index of the shards. The first call on a host fetches all shards, and stores the index.

        Raises:
            InvalidInput: if there are no shards, a shard cannot be read, or a label is not a class.
        """
        parts = find(self, self.ending)
        stamps = [
            (shard.url, shard.size, shard.version if is_remote(shard.url) else os.stat(shard.url).st_mtime_ns)
            for shards in parts.values()
            for shard in shards
        ]
        names = self.class_names()
        source = hashlib.sha256(repr((stamps, names)).encode()).hexdigest()
        with host_lock(self.folder, "shards-index", "data.root") as folder:
            file = folder / f".index-of{self.ending}.npz"
            with contextlib.suppress(OSError, InvalidInput, LookupError, ValueError):  # writes a new one
                if (old := Index.read(small_file(file, MOST_OF_A_FILE), str(file))).source == source:
                    return _with_urls(old, {name: [s.url for s in shards] for name, shards in parts.items()})
            index = self._scan_all(parts, names, source)
            redacted = {name: [text(s.url) for s in part.shards] for name, part in index.parts.items()}
            with refused(str(file)):
                _with_urls(index, redacted).save(file)
        return index

    def _scan_all(self, parts: Mapping[str, Sequence[Shard]], names: list[str] | None, source: str) -> Index:
        def scan(shard: Shard) -> tuple[Scanned, Shard]:
            file = self.cache.file(shard)
            contents = self.scan(file, shard.url)
            if not len(contents.entries):
                raise InvalidInput(f"{shard.url}: holds no image; remove it")
            return contents, replace(shard, size=file.stat().st_size)

        with ThreadPoolExecutor(AHEAD) as pool:
            scanned = {part: list(pool.map(scan, shards)) for part, shards in parts.items()}
        pairs = [pair for part in scanned.values() for pair in part]
        labels = {label: shard.url for contents, shard in pairs for label in contents.texts}
        classes = shard_index.classes_of(labels, names or pairs[0][0].classes)
        joined = {name: shard_index.join(part, classes) for name, part in scanned.items()}
        return Index(classes, joined, source)

    def class_names(self) -> list[str] | None:
        """Return the class names from the dataset's folder; None if there are none."""
        return None


def find(source: ListedSource, ending: str) -> dict[str, list[Shard]]:
    """Return the shards of each part, sorted by name; their ``start`` and ``stop`` are still 0.

    The name of a file, or of its folder, begins with the name of its part. If no name begins with a part, or
    all names begin with ``train``, the files are the part ``all``.

    Args:
        source: its root is a folder, a prefix, or file names with ``{000..099}``, ``{a,b}`` and ``*``.
        ending: the ending of the files' names.

    Raises:
        InvalidInput: if there are no files, or no training images.
    """
    root = source.settings.root
    files = dict(sorted(_files(source, ending).items()))
    if not files:
        needs = (
            f"holds no *{ending}; give the folder of such files, or names such as train-{{000..099}}{ending}"
        )
        raise InvalidInput(f"data.root: {root}: {needs}")
    parts: dict[str, list[Shard]] = {}
    for url, (size, version) in files.items():
        if not size and not version and is_remote(url):
            reason = "the server reports no size, ETag or modification time, so a change would go unnoticed"
            raise InvalidInput(f"{url}: {reason}; use a server that reports one of them, or a folder")
        parts.setdefault(_part(url, source), []).append(Shard(url, size, 0, 0, version=version))
    if len(parts) == 1 and parts.keys() <= {"train", WHOLE}:
        return {WHOLE: next(iter(parts.values()))}
    if "train" not in parts or WHOLE in parts:
        shown = ", ".join(shards[0].url.rpartition("/")[2] for shards in parts.values())
        needs = "name all files train-*, val-* or test-*, or put them into folders train, val and test"
        raise InvalidInput(f"data.root: {root}: holds {shown}; {needs}")
    return {part: parts[part] for part in PARTS if part in parts}


def join(root: str, name: str) -> str:
    """Return the path or URL of a file in a folder or below a prefix."""
    return f"{root.rstrip('/')}/{name}" if is_remote(root) else os.path.join(root, name)


def expand(pattern: str) -> Iterator[str]:
    """Yield the names that ``{000..099}`` and ``{a,b}`` expand to."""
    if not (braces := _BRACES.search(pattern)):
        yield pattern
        return
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = numbers.groups()
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = braces[1].split(",")
    for choice in choices:
        yield from expand(pattern[: braces.start()] + choice + pattern[braces.end() :])


def _with_urls(index: Index, urls: Mapping[str, Sequence[str]]) -> Index:
    """Return the index with the given URLs; a stored index has URLs without credentials."""
    parts = {}
    for name, part in index.parts.items():
        shards = [replace(shard, url=url) for shard, url in zip(part.shards, urls[name], strict=True)]
        parts[name] = replace(part, shards=shards)
    return replace(index, parts=parts)


def _files(source: ListedSource, ending: str) -> dict[str, tuple[int, str]]:
    """Return the size and the version of each file."""
    root, storage = source.settings.root, Storage(source.settings.storage)
    if not is_remote(root):
        remedy = "give the names of existing files" if source.is_pattern else "give another folder"
        with refused(f"data.root: {root}", remedy):
            if source.is_pattern:
                paths = [path for name in expand(root) for path in glob.glob(name) or [name]]
            else:
                folders = [root, *(entry.path for entry in os.scandir(root) if entry.is_dir())]
                entries = (entry for folder in folders for entry in os.scandir(folder) if entry.is_file())
                paths = [e.path for e in entries if e.name.endswith(ending) and not e.name.startswith(".")]
            return {path: (regular_file(path).stat().st_size, "") for path in paths}
    if source.is_pattern:
        names = list(expand(root))
        if "*" in root:
            files = storage.filesystem(root)
            names = [files.unstrip_protocol(path) for name in names for path in files.glob(name)]
        return storage.about_all(names)
    if root.startswith(("http://", "https://")):
        remedy = f"give the names, such as {join(root, 'train-{000..099}' + ending)}"
        remedy += ", or upload the folder of shards.py, with its index.npz" if ending == ".tar" else ""
        raise InvalidInput(f"data.root: {root}: a web server does not list its files; {remedy}")
    return {url: about for url, about in storage.find(root).items() if url.endswith(ending)}


def _part(url: str, source: ListedSource) -> str:
    """Return the part whose name begins a file's name, or else its folder's name; ``all`` without one."""
    folder, _, name = url.rpartition("/")
    if source.is_pattern:
        within = folder.rpartition("/")[2]
    else:
        within = folder.removeprefix(source.settings.root.rstrip("/")).strip("/")
    match = _PART.match(name) or _PART.match(f"{within}/")
    part = match[1].lower() if match else WHOLE
    return _SYNONYMS.get(part, part)

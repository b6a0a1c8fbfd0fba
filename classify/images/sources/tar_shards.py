"""Tar shards, as WebDataset has them: ``train-000000.tar`` with ``KEY.jpg`` and ``KEY.cls`` or ``KEY.json``.

Source: https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tarfile
from dataclasses import replace

import numpy as np

from classify.images.sources import shard_files
from classify.images.sources.encoded import Shard
from classify.images.sources.files import EXTENSIONS
from classify.images.sources.shard_index import ENTRY, FILE, Index, Part, Scanned
from classify.images.sources.shard_source import ShardImages, ShardSource
from harness.errors import InvalidInput, one_line
from harness.input_files import refused

_BLOCK = 512  # bytes of a member's header
_KEYS = ("class", "class_name", "cls", "label")  # of a member KEY.json


class TarImages(ShardImages):
    """The images of one part, in tar shards."""

    def name(self, index: int) -> str:
        """The shard and the member; of a remote shard that was not read, the byte at which it begins."""
        shard, place = self.find(index)
        offset = int(self.entries["offset"][place])
        with contextlib.suppress(OSError, tarfile.TarError, KeyError):  # or gone by now
            with open(self.local[shard.url], "rb") as opened:
                opened.seek(max(0, offset - _BLOCK))
                header = tarfile.TarInfo.frombuf(opened.read(_BLOCK), "utf-8", "surrogateescape")
            return f"{shard.url}, member {header.name}"
        return f"{shard.url}, byte {offset:,}"

    def read_one(self, shard: Shard, place: int, file: pathlib.Path) -> bytes:
        """Reads the bytes after a header that says as many."""
        offset, size = int(self.entries["offset"][place]), int(self.entries["size"][place])
        mend = "the shard and its index differ; write both anew"
        self.local[shard.url] = file
        try:
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


class TarShards(ShardSource):
    """A dataset in tar shards."""

    ending = ".tar"
    images = TarImages
    scan = staticmethod(lambda file, name: scan(file, name))

    def read_index(self) -> Index:
        """The index that lies beside the shards, or what is read out of them."""
        if self.location.is_pattern:
            return super().read_index()
        file = shard_files.join(self.location.root, FILE)
        if (content := self.beside(FILE)) is None:
            return super().read_index()
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

    def names(self, file: pathlib.Path | None = None) -> list[str] | None:
        """The class names in ``classes.txt`` beside the shards, a line each, where there is one."""
        content = self.beside("classes.txt")
        if content is None:
            return None
        return [line.strip() for line in content.decode(errors="replace").splitlines() if line.strip()]


def scan(file: pathlib.Path, name: str) -> Scanned:
    """Reads the headers of a tar.

    Raises:
        InvalidInput: if it is no whole tar, or a member has no label or no image.
    """
    texts: dict[str, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    key, image, text = "", (0, 0), ""

    def finish() -> None:
        if not key:
            return
        if not image[0]:
            held = f"{name}: the member {key} has no image ({' '.join(EXTENSIONS)})"
            raise InvalidInput(f"{held}; add it, or remove the rest")
        if not text:
            mend = "add KEY.cls with its class, or KEY.json with the key label"
            raise InvalidInput(f"{name}: the member {key} has no label; {mend}")
        rows.append((*image, texts.setdefault(text, len(texts)), 0))

    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # or it keeps them all
                folder, base = os.path.split(member.name)
                stem, _, ending = base.partition(".")
                if not member.isfile() or not stem:
                    continue
                if key != (new := os.path.join(folder, stem)):
                    finish()
                    key, image, text = new, (0, 0), ""
                ending = f".{ending.rpartition('.')[2].lower()}"
                if ending in EXTENSIONS:
                    image = member.offset_data, member.size
                elif ending in (".cls", ".json"):
                    opened = tar.extractfile(member)
                    text = _label(opened.read() if opened else b"", ending) or text
            finish()
    except (tarfile.TarError, OSError, EOFError) as error:
        mend = "is it whole? write or fetch it again"
        raise InvalidInput(f"{name}: not a readable tar ({one_line(error)}); {mend}") from error
    return Scanned(name, texts, np.array(rows, ENTRY))


def _label(content: bytes, ending: str) -> str | None:
    """A label as it is written, or None."""
    text = content.decode(errors="replace").strip()
    if ending == ".cls":
        return text or None
    try:
        about = json.loads(text)
    except ValueError:
        return None
    found = [about[key] for key in _KEYS if key in about] if isinstance(about, dict) else []
    return str(found[0]) if found else None

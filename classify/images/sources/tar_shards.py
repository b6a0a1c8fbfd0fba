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
from classify.images.sources.encoded import MOST_OF_AN_IMAGE, Shard
from classify.images.sources.files import EXTENSIONS
from classify.images.sources.shard_index import (
    ENTRY,
    FILE,
    MOST_CLASSES,
    Index,
    Part,
    Scanned,
    check_length,
)
from classify.images.sources.shard_source import ShardImages, ShardSource
from classify.images.sources.tar_members import BLOCK, members
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import refused, regular_file

_MOST_OF_TEXT = 2**16  # bytes of a member KEY.cls or KEY.json
_MOST_OF_NAMES = 2**26  # bytes of all class names
_KEYS = ("class", "class_name", "cls", "label")  # of a member KEY.json


class TarImages(ShardImages):
    """The images of one part, in tar shards."""

    def name(self, index: int) -> str:
        """The shard and the member; of a remote shard that was not read, the byte at which it begins."""
        shard, place = self.find(index)
        offset = int(self.entries["offset"][place])
        with contextlib.suppress(OSError, tarfile.TarError, KeyError):  # or gone by now
            with open(self.local[shard.url], "rb") as opened:
                opened.seek(max(0, offset - BLOCK))
                header = tarfile.TarInfo.frombuf(opened.read(BLOCK), "utf-8", "surrogateescape")
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
                content = os.pread(descriptor, size + BLOCK, max(0, offset - BLOCK))
            finally:
                os.close(descriptor)
            header = tarfile.TarInfo.frombuf(content[:BLOCK], "utf-8", "surrogateescape")
            if header.size == size == len(content) - BLOCK:
                return content[BLOCK:]
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
        """Return a part whose shards have whole URLs, and on this machine the sizes that the index says."""
        for shard in part.shards:
            if os.path.basename(shard.url) != shard.url or "\0" in shard.url:
                what = f"names the shard {shard.url!r}, which is not in its folder"
                raise InvalidInput(f"{index}: {what}; do not use this file")
        shards = [
            replace(shard, url=shard_files.join(self.location.root, shard.url)) for shard in part.shards
        ]
        for shard in shards if not self.location.is_remote else ():
            with refused(f"data.root: {shard.url}", "put it there, or write the shards anew"):
                size = regular_file(shard.url).stat().st_size
            if size != shard.size:
                what = f"has {size:,} bytes, but its index {index} says {shard.size:,}"
                raise InvalidInput(f"{shard.url}: {what}; write or fetch both anew")
        return replace(part, shards=shards)

    def names(self, file: pathlib.Path | None = None) -> list[str] | None:
        """The class names in ``classes.txt`` beside the shards, a line each, where there is one."""
        content = self.beside("classes.txt", _MOST_OF_NAMES)
        if content is None:
            return None
        if content.count(b"\n") > MOST_CLASSES:
            where = shard_files.join(self.location.base, "classes.txt")
            raise InvalidInput(f"{where}: names more than {MOST_CLASSES:,} classes; is it the right file?")
        return [line.strip() for line in content.decode(errors="replace").split("\n") if line.strip()]


def scan(file: pathlib.Path, name: str) -> Scanned:
    """Read the names and the labels of the members of a tar.

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
        check_length(text, f"{name}: the member {key}")
        rows.append((*image, texts.setdefault(text, len(texts)), 0))
        if len(texts) > MOST_CLASSES:
            raise InvalidInput(f"{name}: has more than {MOST_CLASSES:,} classes; name fewer")

    with refused(name), open(file, "rb") as opened:
        for member, offset, size in members(file, name):
            folder, base = os.path.split(member)
            stem, _, ending = base.partition(".")
            if not stem:
                continue
            if key != (new := os.path.join(folder, stem)):
                finish()
                key, image, text = new, (0, 0), ""
            ending = f".{ending.rpartition('.')[2].lower()}"
            is_image = ending in EXTENSIONS
            if not is_image and ending not in (".cls", ".json"):
                continue
            if size > (most := MOST_OF_AN_IMAGE if is_image else _MOST_OF_TEXT):
                what = f"the member {member} has {size:,} bytes, more than {most:,}"
                raise InvalidInput(f"{name}: {what}; remove or shorten it")
            if is_image:
                image = offset, size
            else:
                text = _label(os.pread(opened.fileno(), size, offset), ending) or text
        finish()
    return Scanned(name, texts, np.array(rows, ENTRY))


def _label(content: bytes, ending: str) -> str | None:
    """A label as it is written, or None."""
    text = content.decode(errors="replace").strip()
    if ending == ".cls":
        return text or None
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = [about[key] for key in _KEYS if key in about] if isinstance(about, dict) else []
    return str(found[0]) if found and isinstance(found[0], (str, int, float)) else None

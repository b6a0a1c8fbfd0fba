"""Tar shards in WebDataset's format: ``train-000000.tar`` with ``KEY.jpg`` and ``KEY.cls`` or ``KEY.json``.

Source: https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import numpy as np

from classify.images.decode import MOST_BYTES
from classify.images.listing import EXTENSIONS, Shard, is_remote
from classify.images.sources.shard_index import (
    ENTRY,
    FILE,
    MOST_CLASSES,
    Index,
    Part,
    Scanned,
    check_length,
)
from classify.images.sources.shards import ShardListing, ShardSource, join
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import parsed, refused, regular_file

BLOCK = 512  # bytes of a member's header
_MOST_OF_A_HEADER = 2**14  # bytes of a pax header or a long name
_MOST_HEADERS = 5  # before one member
_MOST_GLOBAL = 100  # keys of the pax headers for all members
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MOST_OF_TEXT = 2**16  # bytes of a member KEY.cls or KEY.json
_MOST_OF_NAMES = 2**26  # bytes of all class names
_LABEL_KEYS = ("class", "class_name", "cls", "label")  # of a member KEY.json


class TarListing(ShardListing):
    """The images of one part, in tar shards."""

    def name(self, index: int) -> str:
        """Return the name of an image: shard and member; if the shard is not local, its first byte."""
        shard, place = self.find(index)
        offset = int(self.entries["offset"][place])
        with contextlib.suppress(OSError, tarfile.TarError, KeyError):  # the shard may be gone
            with open(self.local[shard.url], "rb") as opened:
                opened.seek(max(0, offset - BLOCK))
                header = tarfile.TarInfo.frombuf(opened.read(BLOCK), "utf-8", "surrogateescape")
            return f"{shard.url}, member {header.name}"
        return f"{shard.url}, byte {offset:,}"

    def read_one(self, shard: Shard, place: int, file: pathlib.Path) -> bytes:
        """Return the bytes of a member, if its header has the size from the index."""
        offset, size = int(self.entries["offset"][place]), int(self.entries["size"][place])
        remedy = "the shard and its index differ; write both again"
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
        raise InvalidInput(f"{shard.url}: no image of {size:,} bytes at byte {offset:,} ({reason}); {remedy}")


class TarShards(ShardSource):
    """A dataset in tar shards."""

    ending = ".tar"
    part_listing = TarListing
    scan = staticmethod(lambda file, name: scan(file, name))

    def read_index(self) -> Index:
        """Return the index in the shards' folder; without one, scan the shards."""
        if self.location.is_pattern:
            return super().read_index()
        file = join(self.location.root, FILE)
        if (content := self.beside(FILE)) is None:
            return super().read_index()
        index = Index.read(content, file)
        return replace(index, parts={name: self._placed(part, file) for name, part in index.parts.items()})

    def _placed(self, part: Part, index: str) -> Part:
        """Return a part with complete URLs; check that local shards have the sizes in the index."""
        for shard in part.shards:
            if os.path.basename(shard.url) != shard.url or "\0" in shard.url:
                what = f"names the shard {shard.url!r}, which is not in its folder"
                raise InvalidInput(f"{index}: {what}; do not use this file")
        shards = [replace(shard, url=join(self.location.root, shard.url)) for shard in part.shards]
        for shard in shards if not is_remote(self.location.root) else ():
            with refused(f"data.root: {shard.url}", "put it there, or write the shards again"):
                size = regular_file(shard.url).stat().st_size
            if size != shard.size:
                what = f"has {size:,} bytes, but its index {index} says {shard.size:,}"
                raise InvalidInput(f"{shard.url}: {what}; write or fetch both again")
        return replace(part, shards=shards)

    def names(self, file: pathlib.Path | None = None) -> list[str] | None:
        """Return the class names, the lines of ``classes.txt`` in the folder; None without that file."""
        content = self.beside("classes.txt", _MOST_OF_NAMES)
        if content is None:
            return None
        if content.count(b"\n") > MOST_CLASSES:
            where = join(self.location.base, "classes.txt")
            raise InvalidInput(f"{where}: names more than {MOST_CLASSES:,} classes; is it the right file?")
        return [line.strip() for line in content.decode(errors="replace").split("\n") if line.strip()]


def scan(file: pathlib.Path, name: str) -> Scanned:
    """Read the names and the labels of the members of a tar.

    Raises:
        InvalidInput: if the tar is incomplete, or a member has no label or no image.
    """
    texts: dict[str, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    key, image, text = "", (0, 0), ""

    def finish() -> None:
        if not key:
            return
        if not image[0]:
            reason = f"the sample {key} has no image ({' '.join(EXTENSIONS)})"
            raise InvalidInput(f"{name}: {reason}; add one, or remove the sample's other files")
        if not text:
            remedy = "add KEY.cls with its class, or KEY.json with the key label"
            raise InvalidInput(f"{name}: the sample {key} has no label; {remedy}")
        check_length(text, f"{name}: the sample {key}")
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
            if size > (most := MOST_BYTES if is_image else _MOST_OF_TEXT):
                what = f"the member {member} has {size:,} bytes, more than {most:,}"
                raise InvalidInput(f"{name}: {what}; remove or shorten it")
            if is_image:
                image = offset, size
            else:
                text = _label(os.pread(opened.fileno(), size, offset), ending) or text
        finish()
    return Scanned(name, texts, np.array(rows, ENTRY))


def _label(content: bytes, ending: str) -> str | None:
    """Return a label as written; None without one."""
    text = content.decode(errors="replace").strip()
    if ending == ".cls":
        return text or None
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        return None
    labels = [about[key] for key in _LABEL_KEYS if key in about] if isinstance(about, dict) else []
    return str(labels[0]) if labels and isinstance(labels[0], (str, int, float)) else None


class _Tar(tarfile.TarFile):
    """A tar file that counts the extended headers before a member."""

    headers = 0


class _Member(tarfile.TarInfo):
    """A tar member; refuses sparse files, and headers that are too large or too many."""

    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        """Check a header before tarfile reads the bytes that follow."""
        is_extended = self.type in _EXTENDED
        tar.headers = tar.headers + 1 if is_extended else 0
        if self.size < 0 or (is_extended and self.size > _MOST_OF_A_HEADER):
            raise tarfile.ReadError(f"a header announces {self.size:,} bytes")
        if tar.headers > _MOST_HEADERS or len(tar.pax_headers) > _MOST_GLOBAL:
            raise tarfile.ReadError("too many headers before a member")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a member is a sparse file; run tar without --sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


def members(file: pathlib.Path, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first byte and the size of each regular file in a tar, in order.

    Args:
        file: the tar.
        name: the tar's name in error lines.

    Raises:
        InvalidInput: if the tar is damaged or incomplete.
    """
    with parsed(f"{name}: not a readable tar", "is it whole? write or fetch it again"):
        end, whole = -1, file.stat().st_size
        with _Tar.open(file, "r:", tarinfo=_Member) as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it keeps them all
                is_inside = 0 <= member.size <= whole - member.offset_data
                if member.isfile() and not is_inside:
                    raise tarfile.ReadError("unexpected end of data")
                if tar.offset <= end:
                    raise tarfile.ReadError("its members overlap")
                end = tar.offset
                if member.isfile():
                    yield member.name, member.offset_data, member.size
        with open(file, "rb") as opened:
            opened.seek(tar.offset)
            if opened.read(BLOCK).strip(b"\0"):  # where tarfile ends without a word
                raise tarfile.ReadError(f"no header at byte {tar.offset:,}")

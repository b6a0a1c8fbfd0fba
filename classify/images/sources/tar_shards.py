"""Tar shards in WebDataset's format: ``train-000000.tar`` with ``KEY.jpg``, and ``KEY.cls`` or ``KEY.json``.

Source: https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pathlib
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from tarfile import BLOCKSIZE
from typing import BinaryIO, NoReturn

import numpy as np

from classify.images.decode import MOST_BYTES
from classify.images.listing import EXTENSIONS, is_remote
from classify.images.sources.remote import MOST_OF_A_FILE, Storage
from classify.images.sources.shard_index import (
    ENTRY,
    FILE,
    MOST_CLASSES,
    Index,
    Part,
    Scanned,
    number_of,
)
from classify.images.sources.shards import ShardSource, join
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import parsed, refused, regular_file, small_file

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


class TarShards(ShardSource):
    """A dataset in tar shards."""

    ending = ".tar"

    @staticmethod
    def scan(file: pathlib.Path, url: str) -> Scanned:
        """Find the images and the labels in a tar."""
        texts: dict[str, int] = {}
        rows: list[tuple[int, int, int, int]] = []
        damaged = parsed(f"{url}: not a readable tar", "it may be incomplete; write or fetch it again")
        with damaged, refused(url), open(file, "rb") as opened:
            shown = (member for member in _members(opened) if os.path.basename(_key(member)))
            for key, files in itertools.groupby(shown, _key):
                image, text = None, None
                for member, offset, size in files:
                    ending = os.path.splitext(member)[1].lower()
                    is_image = ending in EXTENSIONS
                    if not is_image and ending not in (".cls", ".json"):
                        continue
                    if size > (most := MOST_BYTES if is_image else _MOST_OF_TEXT):
                        what = f"the member {member} has {size:,} bytes, more than {most:,}"
                        raise InvalidInput(f"{url}: {what}; remove or shorten it")
                    if is_image:
                        image = offset, size
                    else:
                        text = _label(os.pread(opened.fileno(), size, offset), ending) or text
                if not image:
                    reason = f"the sample {key} has no image ({' '.join(EXTENSIONS)})"
                    raise InvalidInput(f"{url}: {reason}; add one, or remove the sample's other files")
                if not text:
                    remedy = "add KEY.cls with its class, or KEY.json with the key label"
                    raise InvalidInput(f"{url}: the sample {key} has no label; {remedy}")
                rows.append((*image, number_of(text, texts, f"{url}: the sample {key}"), 0))
        return Scanned(texts, np.array(rows, ENTRY))

    @staticmethod
    def read(file: pathlib.Path, url: str, offset: int, size: int) -> bytes:
        """Return the bytes of a member; raise ``InvalidInput`` if its size differs from the index."""
        try:
            header, content = _member(file, offset, size)
            if header.size == size == len(content):
                return content
            reason = f"its header says {header.size:,} bytes, its index {size:,}"
        except (OSError, tarfile.TarError) as error:
            reason = one_line(error)
        remedy = "the shard and its index differ; write both again"
        raise InvalidInput(f"{url}: no image of {size:,} bytes at byte {offset:,} ({reason}); {remedy}")

    @staticmethod
    def name(file: pathlib.Path, url: str, offset: int) -> str:
        """Return an image's shard and member, or its first byte if the shard is not local."""
        with contextlib.suppress(OSError, tarfile.TarError):
            header, _ = _member(file, offset)
            return f"{url}, member {header.name}"
        return f"{url}, byte {offset:,}"

    @functools.cached_property
    def index(self) -> Index:
        """The index in the shards' folder; without an index there, the result of a scan."""
        content = None if self.is_pattern else self._beside(FILE, MOST_OF_A_FILE)
        if content is None:
            return super().index
        file = join(self.settings.root, FILE)
        index = Index.read(content, file)
        return replace(index, parts={name: self._placed(part, file) for name, part in index.parts.items()})

    def _placed(self, part: Part, index: str) -> Part:
        """Return a part with complete URLs; check that local shards have the sizes in the index."""
        shards = []
        for shard in part.shards:
            if os.path.basename(shard.url) != shard.url or "\0" in shard.url:
                what = f"names the shard {shard.url!r}, which is not in its folder"
                raise InvalidInput(f"{index}: {what}; do not use this file")
            shard = replace(shard, url=join(self.settings.root, shard.url))
            if not is_remote(shard.url):
                with refused(f"data.root: {shard.url}", "put it there, or write the shards again"):
                    size = regular_file(shard.url).stat().st_size
                if size != shard.size:
                    what = f"has {size:,} bytes, but its index {index} says {shard.size:,}"
                    raise InvalidInput(f"{shard.url}: {what}; write or fetch both again")
            shards.append(shard)
        return replace(part, shards=shards)

    def class_names(self) -> list[str] | None:
        """Return the class names, the lines of ``classes.txt`` in the folder; None without that file."""
        content = self._beside("classes.txt", _MOST_OF_NAMES)
        if content is None:
            return None
        if content.count(b"\n") > MOST_CLASSES:
            where = join(self.base, "classes.txt")
            raise InvalidInput(f"{where}: names more than {MOST_CLASSES:,} classes; name fewer")
        return [line.strip() for line in content.decode(errors="replace").split("\n") if line.strip()]

    def _beside(self, name: str, most: int) -> bytes | None:
        """Return the bytes of a file in the shards' folder; None if it does not exist.

        Raises:
            InvalidInput: if the file cannot be read, or has more than ``most`` bytes.
        """
        file = join(self.base, name)
        if is_remote(file):
            return Storage(self.settings.storage).read(file, most)
        with refused(f"data.root: {file}"):
            return small_file(file, most) if os.path.isfile(file) else None


def _member(file: pathlib.Path, offset: int, size: int = 0) -> tuple[tarfile.TarInfo, bytes]:
    """Return the header before an offset of a tar, and ``size`` bytes from the offset on."""
    with open(file, "rb", buffering=0) as opened:
        content = os.pread(opened.fileno(), BLOCKSIZE + size, max(0, offset - BLOCKSIZE))
    return tarfile.TarInfo.frombuf(content[:BLOCKSIZE], "utf-8", "surrogateescape"), content[BLOCKSIZE:]


def _key(member: tuple[str, int, int]) -> str:
    """Return a member's name up to the first dot after its folder."""
    folder, base = os.path.split(member[0])
    return os.path.join(folder, base.partition(".")[0])


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
    """A tar member; refuses sparse files, large headers and many headers."""

    def _proc_member(self, tar: _Tar) -> tarfile.TarInfo:
        """Check a header before tarfile reads the bytes that follow."""
        is_extended = self.type in _EXTENDED
        tar.headers = tar.headers + 1 if is_extended else 0
        if self.size < 0 or (is_extended and self.size > _MOST_OF_A_HEADER):
            raise tarfile.ReadError(f"a header says that {self.size:,} bytes follow")
        if tar.headers > _MOST_HEADERS or len(tar.pax_headers) > _MOST_GLOBAL:
            raise tarfile.ReadError("too many headers before a member")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a member is a sparse file; run tar without --sparse")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


def _members(opened: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first byte and the size of each regular file in a tar, in order."""
    end, whole = -1, os.fstat(opened.fileno()).st_size
    with _Tar.open(fileobj=opened, mode="r:", tarinfo=_Member) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # or tarfile keeps all members in memory
            is_inside = 0 <= member.size <= whole - member.offset_data
            if member.isfile() and not is_inside:
                raise tarfile.ReadError("unexpected end of data")
            if tar.offset <= end:
                raise tarfile.ReadError("its members overlap")
            end = tar.offset
            if member.isfile():
                yield member.name, member.offset_data, member.size
    opened.seek(tar.offset)
    if opened.read(BLOCKSIZE).strip(b"\0"):  # tarfile ends there without an error
        raise tarfile.ReadError(f"no header at byte {tar.offset:,}")

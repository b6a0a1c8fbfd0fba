"""What is in a dataset's tar shards: one entry an image, kept in a file beside them or read out of them.

The file ``index.npz`` is numpy's: ``about``, JSON in UTF-8 with the classes and the shards of each part, and
for each part an array of ``ENTRY`` in the order of the shards.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from classify.images.sources.encoded import Shard
from classify.images.sources.files import EXTENSIONS
from harness.errors import InvalidInput, one_line

FILE = "index.npz"
FORMAT = 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("position", "<u4")])
_MEND = "write the shards anew by shards.py, or remove the index, so that it is read out of them"
_KEYS = ("class", "class_name", "cls", "label")  # of a member KEY.json


@dataclass(frozen=True)
class Part:
    """The images of one part.

    Attributes:
        shards: in the order of their images; the URLs are names in the dataset's folder, if the index was
            written beside them.
        entries: ``ENTRY`` (N,) in the order of the shards: where an image begins in its shard, its bytes, its
            label, and its index in the dataset.
    """

    shards: Sequence[Shard]
    entries: np.ndarray


@dataclass(frozen=True)
class Index:
    """All parts of a dataset.

    Attributes:
        classes: the class names, in the order of the labels.
        parts: by name.
        source: what it was read out of, if it was not written with the shards.
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Part]
    source: str = ""

    def save(self, target: pathlib.Path) -> None:
        """Writes the index: it is there whole, or not at all. The same index makes the same bytes."""
        parts = {name: [asdict(shard) for shard in part.shards] for name, part in self.parts.items()}
        about = {"format": FORMAT, "source": self.source, "classes": self.classes, "parts": parts}
        text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        arrays = {f"part-{name}": part.entries for name, part in self.parts.items()}
        partial = target.with_name(f"{target.name}.partial")
        with open(partial, "wb") as file:
            np.savez(file, about=text, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)

    @classmethod
    def read(cls, content: bytes, name: str) -> Index:
        """Reads and checks what ``save`` has written.

        Raises:
            InvalidInput: if it contradicts itself or is another file.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                if about["format"] != FORMAT:
                    raise ValueError(f"its format is {about['format']}, not {FORMAT}")
                classes = tuple(map(str, about["classes"]))
                parts = {
                    part: Part([Shard(**shard) for shard in shards], file[f"part-{part}"])
                    for part, shards in about["parts"].items()
                }
            for part in parts.values():
                _check(part, len(classes))
        except Exception as error:  # a file of any kind fails in any way
            raise InvalidInput(f"{name}: is no index of these shards ({one_line(error)}); {_MEND}") from error
        return cls(classes, parts, about["source"])


def _check(part: Part, classes: int) -> None:
    entries, count, stop = part.entries, len(part.entries), 0
    if entries.dtype != ENTRY or not count:
        raise ValueError("it has no entries of images")
    if entries["label"].max() >= classes:
        raise ValueError(f"it has the label {entries['label'].max()}, but {classes} classes")
    if (np.bincount(entries["position"], minlength=count) != 1).any():
        raise ValueError("its positions are not those of all images, each once")
    for shard in part.shards:
        own = entries[shard.start : shard.stop]
        if shard.start != stop or not len(own):
            raise ValueError(f"the counts of images are wrong at {shard.url}")
        if (own["offset"] + own["size"]).max() > shard.size:
            raise ValueError(f"it has an image beyond the end of {shard.url}")
        stop = shard.stop
    if stop != count:
        raise ValueError(f"its shards have {stop:,} images, its entries {count:,}")


class Scanned:
    """The images of one tar, as its headers tell.

    Args:
        file: the local tar.
        name: what to call it in an error line.

    Attributes:
        texts: the labels that occur, as they are written: numbers or names.
        entries: ``ENTRY``, the label being the index in ``texts``.

    Raises:
        InvalidInput: if it is no whole tar, or a member has no label or no image.
    """

    def __init__(self, file: pathlib.Path, name: str) -> None:
        self.name, self.texts = name, dict[str, int]()
        rows: list[np.ndarray] = []
        key, image, text = None, None, None
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # or it keeps them all
                    folder, _, base = member.name.rpartition("/")
                    stem, _, ending = base.partition(".")
                    if not member.isfile() or not stem:
                        continue
                    if (folder, stem) != key:
                        self._add(rows, key, image, text)
                        key, image, text = (folder, stem), None, None
                    ending = ending.rpartition(".")[2].lower()
                    if f".{ending}" in EXTENSIONS:
                        image = (member.offset_data, member.size)
                    elif ending in ("cls", "json"):
                        opened = tar.extractfile(member)
                        text = _label(opened.read() if opened else b"", ending) or text
                self._add(rows, key, image, text)
                end = tar.offset
            if end > file.stat().st_size:
                raise tarfile.ReadError("unexpected end of data")
        except (tarfile.TarError, OSError, EOFError) as error:
            mend = "is it whole? write or fetch it again"
            raise InvalidInput(f"{name}: not a readable tar ({one_line(error)}); {mend}") from error
        self.entries = np.concatenate(rows) if rows else np.zeros(0, ENTRY)

    def _add(
        self,
        rows: list[np.ndarray],
        key: tuple[str, str] | None,
        image: tuple[int, int] | None,
        text: str | None,
    ) -> None:
        if key is None:
            return
        shown = f"{self.name}: the member {'/'.join(filter(None, key))}"
        if image is None:
            raise InvalidInput(f"{shown} has no image ({' '.join(EXTENSIONS)}); add it, or remove the rest")
        if text is None:
            mend = "add KEY.cls with its class, or KEY.json with the key label"
            raise InvalidInput(f"{shown} has no label; {mend}")
        code = self.texts.setdefault(text, len(self.texts))
        rows.append(np.array([(*image, code, 0)], ENTRY))


def _label(content: bytes, ending: str) -> str | None:
    """A label as it is written, or None."""
    text = content.decode(errors="replace").strip()
    if ending == "cls":
        return text or None
    try:
        about: Any = json.loads(text)
    except ValueError:
        return None
    found = [about[key] for key in _KEYS if key in about] if isinstance(about, dict) else []
    return str(found[0]) if found else None


def classes_of(scanned: Sequence[Scanned], given: Sequence[str] | None) -> tuple[str, ...]:
    """The class names: those that are given; names that occur, sorted; or numbers from 0.

    Raises:
        InvalidInput: for a label that is not among them, or if names and numbers are mixed.
    """
    texts = {text: each.name for each in scanned for text in each.texts}
    numbers = [int(text) for text in texts if text.isdecimal()]
    if given is None and len(numbers) == len(texts):
        most = max(numbers, default=0)
        return tuple(map(str, range(most + 1)))
    names = tuple(given or sorted(text for text in texts if not text.isdecimal()))
    for text, name in texts.items():
        if text not in names and not (given and text.isdecimal() and int(text) < len(names)):
            what = f"classes.txt has {len(names)} classes" if given else "other labels are names"
            raise InvalidInput(f"{name}: the label {text!r} is no class: {what}; mend one of them")
    return names


def join(pairs: Sequence[tuple[Scanned, Shard]], classes: Sequence[str]) -> Part:
    """Puts the tars of a part together, the images in their order."""
    place, own, entries = 0, [], []
    index = {name: label for label, name in enumerate(classes)}
    for each, shard in pairs:
        if not len(each.entries):
            raise InvalidInput(f"{each.name}: holds no image; remove it")
        labels = np.array([index[t] if t in index else int(t) for t in each.texts], np.uint32)
        found = each.entries.copy()
        found["label"] = labels[found["label"]]
        entries.append(found)
        own.append(Shard(shard.url, shard.size, place, place + len(found), shard.sha256))
        place += len(found)
    whole = np.concatenate(entries)
    whole["position"] = np.arange(len(whole))
    return Part(own, whole)

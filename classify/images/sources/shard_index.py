"""What is in a dataset's shards: one entry an image, kept in a file beside them or read out of them.

The file ``index.npz`` is numpy's: ``about``, JSON in UTF-8 with the classes and the shards of each part, and
for each part an array of ``ENTRY`` in the order of the shards.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.lib import format as npy

from classify.images.sources.encoded import MOST_OF_AN_IMAGE, Shard
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.input_files import parsed

FILE = "index.npz"
FORMAT = 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("position", "<u4")])
_MEND = "write the shards anew by shards.py, or remove the index, so that it is read out of them"
MOST_CLASSES = 1_000_000
MOST_OF_A_LABEL = 255  # characters, as of a folder's name
MOST_TEXT = 2**25  # bytes of ``about``
_PARTS = {"train", "val", "test", "all"}
_TYPES = {"url": str, "size": int, "start": int, "stop": int, "sha256": str, "version": str}  # of a shard


@dataclass(frozen=True)
class Part:
    """The images of one part.

    Attributes:
        shards: in the order of their images; the URLs are names in the dataset's folder, if the index was
            written beside them.
        entries: ``ENTRY`` (N,) in the order of the shards: the byte or row at which an image begins in its
            shard, its bytes if they are known, its label, and its index in the dataset.
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
        """Read and check the bytes that ``save`` has written.

        Nothing is read before its size is known to be one that ``save`` writes, and nothing is unpickled.

        Raises:
            InvalidInput: if it contradicts itself or is another file.
        """
        with parsed(f"{name}: is no index of these shards", _MEND):
            if content.lstrip()[:1] == b"<":
                raise ValueError("it is a web page; does its server ask to log in?")
            if content.count(b"PK\1\2") > 100:  # entries of the list of files, for each an object
                raise ValueError("it holds too many files")
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                text = _array(file, "about", np.dtype(np.uint8))
                if len(text) > MOST_TEXT:
                    raise ValueError(f"its list of shards has {len(text):,} bytes, more than {MOST_TEXT:,}")
                about = json.loads(text.tobytes())
                if not isinstance(about, dict) or about.get("format") != FORMAT:
                    raise ValueError(f"its format is not {FORMAT}")
                classes, source, parts = about["classes"], about["source"], about["parts"]
                if not isinstance(source, str) or not parts or not parts.keys() <= _PARTS:
                    raise ValueError(f"it has no parts of {', '.join(sorted(_PARTS))}")
                if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
                    raise ValueError("it has no list of class names")
                if not 1 <= len(classes) <= MOST_CLASSES:
                    raise ValueError(f"it has {len(classes):,} classes")
                held = {
                    part: Part([_shard(shard) for shard in shards], _array(file, f"part-{part}", ENTRY))
                    for part, shards in parts.items()
                }
            for part in held.values():
                _check(part, len(classes))
        return cls(tuple(classes), held, source)


def _array(file: zipfile.ZipFile, name: str, kind: np.dtype) -> np.ndarray:
    """Read an array of one dimension, as long as the bytes that are there, which must not be compressed."""
    try:
        about = file.getinfo(f"{name}.npy")
        if about.compress_type == zipfile.ZIP_STORED and about.file_size == about.compress_size:
            with file.open(about) as opened:
                if npy.read_magic(opened) == (1, 0):
                    shape, _, found = npy.read_array_header_1_0(opened)
                    content = opened.read()
                    if found == kind and shape == (len(content) // kind.itemsize,):
                        return np.frombuffer(content, kind)
    except ValueError:  # numpy advises to trust the file
        pass
    raise ValueError(f"its {name} is no array that shards.py writes")


def _shard(about: Mapping[str, object]) -> Shard:
    """Return a shard whose fields have their types."""
    if not isinstance(about, dict) or not about.keys() <= _TYPES.keys():
        raise ValueError("it names a shard that is none")
    if not all(type(value) is _TYPES[key] for key, value in about.items()):
        raise ValueError("it names a shard with fields of other types")
    return Shard(**about)


def _check(part: Part, classes: int) -> None:
    entries, count, stop = part.entries, len(part.entries), 0
    if not count:
        raise ValueError("it has no entries of images")
    if entries["label"].max() >= classes:
        raise ValueError(f"it has the label {entries['label'].max()}, but {classes} classes")
    if entries["size"].max() > MOST_OF_AN_IMAGE:
        raise ValueError(f"it has an image of {entries['size'].max():,} bytes")
    positions = entries["position"]
    if positions.max() >= count or (np.bincount(positions, minlength=count) != 1).any():
        raise ValueError("its positions are not those of all images, each once")
    for shard in part.shards:
        own = entries[max(0, shard.start) : max(0, shard.stop)]
        if shard.start != stop or not len(own):
            raise ValueError(f"the counts of images are wrong at {shard.url}")
        if shard.size < 1:
            raise ValueError(f"it has the size {shard.size:,} at {shard.url}")
        if (own["offset"] > shard.size).any() or (own["size"] > shard.size - own["offset"]).any():
            raise ValueError(f"it has an image beyond the end of {shard.url}")
        stop = shard.stop
    if stop != count:
        raise ValueError(f"its shards have {stop:,} images, its entries {count:,}")


@dataclass(frozen=True)
class Scanned:
    """What one shard holds, read out of itself.

    Attributes:
        name: what to call it in an error line.
        texts: the labels that occur, as they are written, numbers or names, with a number for each.
        entries: ``ENTRY``, in which a label is its number in ``texts``.
    """

    name: str
    texts: Mapping[str, int]
    entries: np.ndarray


def classes_of(texts: Mapping[str, str], given: Sequence[str] | None = None) -> tuple[str, ...]:
    """The class names: those that are given; names that occur, sorted; or numbers from 0.

    Args:
        texts: the labels that occur, as they are written, and where each does.
        given: the names that the dataset gives its numbers.

    Raises:
        InvalidInput: for a label that is not among them, or if names and numbers are mixed.
    """
    for text in texts.keys() - set(given or ()):
        _check_label(text, texts[text])
    numbers = [text for text in texts if text.isdecimal()]
    names = tuple(given or sorted(texts.keys() - set(numbers)))
    if not names:
        most = max(numbers, key=_number)
        if _number(most) >= MOST_CLASSES:
            mend = f"must be less than {MOST_CLASSES:,}; mend it"
            raise InvalidInput(f"{texts[most]}: the label {most}: {mend}")
        names = tuple(map(str, range(_number(most) + 1)))
    known = set(names)
    for text, where in texts.items():
        if text not in known and not (given and text.isdecimal() and _number(text) < len(names)):
            what = f"the dataset names {len(names)} classes" if given else "other labels are names"
            raise InvalidInput(f"{where}: the label {text!r} is no class: {what}; mend one of them")
    if len(names) < 2:
        raise InvalidInput(
            f"{next(iter(texts.values()))}: there is only the class {names[0]!r}; give two or more"
        )
    return names


def check_length(text: str, where: str) -> None:
    """Refuse a label that is too long for the name of a class."""
    if len(text) > MOST_OF_A_LABEL:
        what = f"has {len(text):,} characters, more than {MOST_OF_A_LABEL}"
        raise InvalidInput(f"{where}: the label {text[:20]!r}... {what}; give a shorter one")


def _check_label(text: str, where: str) -> None:
    """Refuse a label that can be the name or the number of no class."""
    check_length(text, where)
    if re.fullmatch(r"[-+]\d+", text):
        remedy = "give a number from 0 on or a name, or remove the row"
        raise InvalidInput(f"{where}: the label {text}: is the number of no class; {remedy}")
    if text != text.encode(errors="replace").decode():
        raise InvalidInput(f"{where}: the label {text!r}: is no text in UTF-8; give another")


def _number(text: str) -> int:
    """Return the number that decimal digits say; of too many to be a class ``MOST_CLASSES``."""
    return int(text) if len(text) < 20 else MOST_CLASSES


def label_of(text: str, index: Mapping[str, int]) -> int:
    """The label of a class, by its name or its number."""
    return index[text] if text in index else int(text)


def join(pairs: Sequence[tuple[Scanned, Shard]], classes: Sequence[str]) -> Part:
    """Puts the tars of a part together, the images in their order."""
    place, own, entries = 0, [], []
    index = {name: label for label, name in enumerate(classes)}
    for each, shard in pairs:
        if not len(each.entries):
            raise InvalidInput(f"{each.name}: holds no image; remove it")
        labels = np.array([label_of(text, index) for text in each.texts], np.uint32)
        found = each.entries.copy()
        found["label"] = labels[found["label"]]
        entries.append(found)
        own.append(replace(shard, start=place, stop=place + len(found)))
        place += len(found)
    whole = np.concatenate(entries)
    whole["position"] = np.arange(len(whole))
    return Part(own, whole)

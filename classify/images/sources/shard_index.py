"""What is in a dataset's shards: one entry an image, kept in a file beside them or read out of them.

The file ``index.npz`` is numpy's: ``about``, JSON in UTF-8 with the classes and the shards of each part, and
for each part an array of ``ENTRY`` in the order of the shards.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from classify.images.sources.encoded import Shard
from harness.errors import InvalidInput, one_line

FILE = "index.npz"
FORMAT = 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("position", "<u4")])
_MEND = "write the shards anew by shards.py, or remove the index, so that it is read out of them"
MOST_CLASSES = 1_000_000


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
    names = tuple(given or sorted(text for text in texts if not text.isdecimal()))
    if not names:
        most = max((int(text), where) for text, where in texts.items())
        if most[0] >= MOST_CLASSES:
            mend = f"must be less than {MOST_CLASSES:,}; mend it"
            raise InvalidInput(f"{most[1]}: the label {most[0]}: {mend}")
        names = tuple(map(str, range(most[0] + 1)))
    for text, where in texts.items():
        if text not in names and not (given and text.isdecimal() and int(text) < len(names)):
            what = f"the dataset names {len(names)} classes" if given else "other labels are names"
            raise InvalidInput(f"{where}: the label {text!r} is no class: {what}; mend one of them")
    if len(names) < 2:
        raise InvalidInput(
            f"{next(iter(texts.values()))}: there is only the class {names[0]!r}; give two or more"
        )
    return names


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
        own.append(Shard(shard.url, shard.size, place, place + len(found), shard.sha256))
        place += len(found)
    whole = np.concatenate(entries)
    whole["position"] = np.arange(len(whole))
    return Part(own, whole)

"""The index of a dataset's shards, with an entry for each image; read from a file or built from the shards.

The file ``index.npz`` is in numpy's format. Its array ``about`` is JSON in UTF-8 with the classes and each
part's shards. For each part it has an array of ``ENTRY``, in the order of the shards.
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.lib import format as npy

from classify.images.decode import MOST_BYTES
from classify.images.listing import PARTS, WHOLE, Shard
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.input_files import parsed
from deepspeed_trial.output_files import replacing

FILE = "index.npz"
FORMAT = 1
ENTRY = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("position", "<u4")])
_REMEDY = "write the shards again with shards.py, or remove the index, so that a scan replaces it"
MOST_CLASSES = 1_000_000
MOST_OF_A_LABEL = 255  # characters, the maximum for a folder's name
MOST_TEXT = 2**25  # the maximum bytes of ``about``


@dataclass(frozen=True)
class Part:
    """The images of one part.

    Attributes:
        shards: the shards, in the order of their images; an index of ``shards.py`` has file names as URLs.
        entries: ``ENTRY`` (N,) in the order of the shards. ``offset`` is the image's first byte or its row in
            its shard, ``size`` its bytes if known, ``position`` its index in the dataset.
    """

    shards: Sequence[Shard]
    entries: np.ndarray


@dataclass(frozen=True)
class Index:
    """All parts of a dataset.

    Attributes:
        classes: the class names, in the order of the labels.
        parts: the parts by name.
        source: digest of the scanned files; empty if ``shards.py`` wrote the index with the shards.
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Part]
    source: str = ""

    def save(self, target: pathlib.Path) -> None:
        """Write the index atomically; equal indices give equal bytes."""
        parts = {name: [asdict(shard) for shard in part.shards] for name, part in self.parts.items()}
        about = {"format": FORMAT, "source": self.source, "classes": self.classes, "parts": parts}
        text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        arrays = {f"part-{name}": part.entries for name, part in self.parts.items()}
        with replacing(target, flush=True) as partial, open(partial, "xb") as file:
            np.savez(file, about=text, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read(cls, content: bytes, name: str) -> Index:
        """Parse and check the bytes that ``save`` wrote.

        The size of every item is checked before it is read. Nothing is unpickled.

        Raises:
            InvalidInput: if the index is inconsistent, or the bytes are not an index.
        """
        with parsed(f"{name}: is not an index of these shards", _REMEDY):
            if content.lstrip()[:1] == b"<":
                raise ValueError("it is a web page; does its server ask to log in?")
            if content.count(b"PK\1\2") > 100:  # files in the archive; zipfile makes an object of each
                raise ValueError("it has too many files")
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                text = _array(file, "about", np.dtype(np.uint8))
                if len(text) > MOST_TEXT:
                    raise ValueError(f"its list of shards has {len(text):,} bytes, more than {MOST_TEXT:,}")
                about = json.loads(text.tobytes())
                if about["format"] != FORMAT:
                    raise ValueError(f"its format is not {FORMAT}")
                classes, source, parts = about["classes"], about["source"], about["parts"]
                if not parts or not parts.keys() <= {*PARTS, WHOLE}:
                    raise ValueError(f"it has no parts of {', '.join(sorted((*PARTS, WHOLE)))}")
                if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
                    raise ValueError("it has no list of class names")
                if not 1 <= len(classes) <= MOST_CLASSES:
                    raise ValueError(f"it has {len(classes):,} classes")
                checked = {
                    part: Part([_shard(shard) for shard in shards], _array(file, f"part-{part}", ENTRY))
                    for part, shards in parts.items()
                }
            for part in checked.values():
                _check(part, len(classes))
        return cls(tuple(classes), checked, source)


def _array(file: zipfile.ZipFile, name: str, kind: np.dtype) -> np.ndarray:
    """Read a one-dimensional array of a dtype; it must be uncompressed, and its shape must match its data."""
    try:
        about = file.getinfo(f"{name}.npy")
        if about.compress_type == zipfile.ZIP_STORED and about.file_size == about.compress_size:
            with file.open(about) as opened:
                if npy.read_magic(opened) == (1, 0):
                    shape, _, dtype = npy.read_array_header_1_0(opened)
                    content = opened.read()
                    if dtype == kind and shape == (len(content) // kind.itemsize,):
                        return np.frombuffer(content, kind)
    except ValueError:  # numpy's message advises to trust the file
        pass
    raise ValueError(f"its {name} is not an array that shards.py writes")


def _shard(about: Mapping[str, object]) -> Shard:
    """Return a shard from JSON; raise ``ValueError`` for a field of the wrong type."""
    types = {key: type(value).__name__ for key, value in about.items()}
    if not types.items() <= Shard.__annotations__.items():
        raise ValueError("the fields of a shard have the wrong types")
    return Shard(**about)  # type: ignore[arg-type]


def _check(part: Part, classes: int) -> None:
    entries, count, stop = part.entries, len(part.entries), 0
    if entries["label"].max() >= classes:
        raise ValueError(f"it has the label {entries['label'].max()}, but {classes} classes")
    if entries["size"].max() > MOST_BYTES:
        raise ValueError(f"it lists an image of {entries['size'].max():,} bytes; the limit is {MOST_BYTES:,}")
    positions = entries["position"]
    if positions.max() >= count or (np.bincount(positions, minlength=count) != 1).any():
        raise ValueError("its positions do not name every image once")
    for shard in part.shards:
        if not stop == shard.start < shard.stop:
            raise ValueError(f"the counts of images are wrong at {shard.url}")
        inside, stop = entries[stop : shard.stop], shard.stop
        begins_inside = shard.size > 0 and (inside["offset"] <= shard.size).all()
        if not begins_inside or (inside["size"] > shard.size - inside["offset"]).any():
            raise ValueError(f"it has an image beyond the end of {shard.url}")
    if stop != count:
        raise ValueError(f"its shards have {stop:,} images, its entries {count:,}")


@dataclass(frozen=True)
class Scanned:
    """The contents of one shard, found by a scan.

    Attributes:
        texts: the distinct labels in the shard, as written (numbers or names), each with an index from 0.
        entries: ``ENTRY`` (N,), with these indices as labels.
        classes: the class names that the shard lists; None if it lists none.
    """

    texts: Mapping[str, int]
    entries: np.ndarray
    classes: Sequence[str] | None = None


def classes_of(texts: Mapping[str, str], given: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the class names: the given names, or the sorted labels, or numbers from 0.

    Args:
        texts: the labels, as written, each with its location for error lines.
        given: the dataset's class names, if it has any.

    Raises:
        InvalidInput: for a label that is not a class, or if names and numbers are mixed.
    """
    listed = set(given or ())
    for text, where in texts.items():
        if text not in listed:
            _check_label(text, where)
    names = tuple(given or sorted(text for text in texts if not text.isdecimal()))
    if not names:
        most = max(texts, key=int)
        if int(most) >= MOST_CLASSES:
            must = f"must be less than {MOST_CLASSES:,}; correct it"
            raise InvalidInput(f"{texts[most]}: the label {most}: {must}")
        names = tuple(map(str, range(int(most) + 1)))
    known = set(names)
    for text, where in texts.items():
        if text not in known and not (given and text.isdecimal() and int(text) < len(names)):
            what = f"the dataset names {len(names)} classes" if given else "other labels are names"
            remedy = "correct the label or the class names"
            raise InvalidInput(f"{where}: the label {text!r} is not a class: {what}; {remedy}")
    if len(names) < 2:
        where = next(iter(texts.values()))
        raise InvalidInput(f"{where}: there is only the class {names[0]!r}; give two or more")
    return names


def number_of(text: str, texts: dict[str, int], where: str) -> int:
    """Return the index of a label among the distinct labels of a shard; a new label gets the next index.

    Raises:
        InvalidInput: for a label that is too long for a class name, or for too many labels.
    """
    check_length(text, where)
    if len(texts) > MOST_CLASSES:
        raise InvalidInput(f"{where}: has more than {MOST_CLASSES:,} classes; use fewer")
    return texts.setdefault(text, len(texts))


def check_length(text: str, where: str) -> None:
    """Raise ``InvalidInput`` for a label that is too long for a class name."""
    if len(text) > MOST_OF_A_LABEL:
        what = f"has {len(text):,} characters, more than {MOST_OF_A_LABEL}"
        raise InvalidInput(f"{where}: the label {text[:20]!r}... {what}; give a shorter one")


def _check_label(text: str, where: str) -> None:
    """Raise ``InvalidInput`` for a label that no class can have."""
    check_length(text, where)
    if re.fullmatch(r"[-+]\d+", text):
        remedy = "give a number from 0 on or a name, or remove the row"
        raise InvalidInput(f"{where}: the label {text}: is not the number of a class; {remedy}")
    if text != text.encode(errors="replace").decode():
        raise InvalidInput(f"{where}: the label {text!r}: is not text in UTF-8; give another label")


def label_of(text: str, index: Mapping[str, int]) -> int:
    """Return the label of a class, by its name or its number."""
    return index[text] if text in index else int(text)


def join(pairs: Sequence[tuple[Scanned, Shard]], classes: Sequence[str]) -> Part:
    """Combine scanned shards to a part, in the given order."""
    start, shards = 0, list[Shard]()
    entries = np.concatenate([scanned.entries for scanned, _ in pairs])
    entries["position"] = np.arange(len(entries))
    index = {name: label for label, name in enumerate(classes)}
    for scanned, shard in pairs:
        shards.append(replace(shard, start=start, stop=start + len(scanned.entries)))
        labels = np.array([label_of(text, index) for text in scanned.texts], np.uint32)
        of_shard = entries["label"][start : shards[-1].stop]
        of_shard[:] = labels[of_shard]
        start = shards[-1].stop
    return Part(shards, entries)

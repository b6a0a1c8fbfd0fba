"""Parquet files as Hugging Face ``datasets`` write them: a column of encoded images, and one of labels.

Source: https://huggingface.co/docs/hub/datasets-image#parquet-format
"""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import threading
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from classify.images.sources.encoded import Shard
from classify.images.sources.shard_index import ENTRY, Scanned
from classify.images.sources.shard_source import ShardImages, ShardSource
from harness.errors import InvalidInput, one_line

KEPT = 2**28  # bytes of the row groups that a process keeps, at least one
_IMAGES, _LABELS = ("image", "img"), ("label", "labels", "class", "fine_label")  # columns, where no type says
_MEND = "is it whole, and of images? write or fetch it again"
_lock = threading.Lock()
_groups: collections.OrderedDict[tuple[str, int], pyarrow.ChunkedArray] = collections.OrderedDict()


class ParquetImages(ShardImages):
    """The images of one part, in Parquet files.

    Images are read a row group at a time, of which a process keeps some, so reading in order is fast.
    """

    def name(self, index: int) -> str:
        """The file and the row, from 0."""
        shard, place = self.find(index)
        return f"{shard.url}, row {place - shard.start:,}"

    def read_one(self, shard: Shard, place: int, file: pathlib.Path) -> bytes:
        """Reads the image in a row."""
        row = place - shard.start
        try:
            content = _content(file, row)
        except (OSError, pyarrow.ArrowException, IndexError) as error:
            raise InvalidInput(
                f"{shard.url}: row {row:,} cannot be read ({one_line(error)}); {_MEND}"
            ) from error
        if not content:
            mend = "write the images themselves into the file"
            raise InvalidInput(f"{shard.url}: row {row:,} holds no image, or only its path; {mend}")
        return content


class ParquetShards(ShardSource):
    """A dataset in Parquet files."""

    ending = ".parquet"
    images = ParquetImages
    scan = staticmethod(lambda file, name: scan(file, name))

    def names(self, file: pathlib.Path | None = None) -> list[str] | None:
        """The class names in a file's schema, where there are some."""
        return None if file is None else _features(pyarrow.parquet.read_schema(file))[2]


def scan(file: pathlib.Path, name: str) -> Scanned:
    """Reads the labels of a file; raises ``InvalidInput``."""
    try:
        schema = pyarrow.parquet.read_schema(file)
        image, label, _ = _features(schema)
        missing = [
            f"{kind} ({' or '.join(usual)})"
            for kind, usual, found in (("images", _IMAGES, image), ("labels", _LABELS, label))
            if found is None
        ]
        if missing:
            what = f"has no column of {' nor of '.join(missing)}; it has {', '.join(schema.names)}"
            raise InvalidInput(f"{name}: {what}; rename them")
        column = pyarrow.parquet.read_table(file, columns=[label])[label].combine_chunks().dictionary_encode()
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInput(f"{name}: not a readable Parquet file ({one_line(error)}); {_MEND}") from error
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidInput(f"{name}: row {row:,} has no label; add it, or remove the row")
    entries = np.zeros(len(column), ENTRY)
    entries["offset"], entries["label"] = np.arange(len(column)), column.indices.to_numpy()
    return Scanned(
        name, {str(each): code for code, each in enumerate(column.dictionary.to_pylist())}, entries
    )


def _features(schema: pyarrow.Schema) -> tuple[str | None, str | None, list[str] | None]:
    """The columns of images and of labels, and the class names, as the file's metadata or names tell."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds: dict[str, Any] = {key: value for key, value in about.items() if isinstance(value, dict)}
    except (KeyError, TypeError, ValueError):
        kinds = {}

    def column(kind: str, usual: tuple[str, ...]) -> str | None:
        typed = [key for key, value in kinds.items() if value.get("_type") == kind]
        return next((name for name in (*usual, *typed) if name in schema.names), None)

    label = column("ClassLabel", _LABELS)
    names = kinds.get(str(label), {}).get("names")
    return column("Image", _IMAGES), label, [str(each) for each in names] if names else None


@functools.lru_cache(16)
def _opened(file: pathlib.Path) -> tuple[pyarrow.parquet.ParquetFile, str, np.ndarray]:
    """A file, its column of images, and the row after each row group."""
    opened = pyarrow.parquet.ParquetFile(file)
    rows = [opened.metadata.row_group(each).num_rows for each in range(opened.num_row_groups)]
    return opened, str(_features(opened.schema_arrow)[0]), np.cumsum(rows)


def _content(file: pathlib.Path, row: int) -> bytes | None:
    """The bytes in a row of the column of images."""
    with _lock:
        opened, column, ends = _opened(file)
        group = int(np.searchsorted(ends, row, side="right"))
        key = (str(file), group)
        if key not in _groups:
            _groups[key] = opened.read_row_group(group, columns=[column])[column]
            while len(_groups) > 1 and sum(each.nbytes for each in _groups.values()) > KEPT:
                _groups.popitem(last=False)
        _groups.move_to_end(key)
        value = _groups[key][row - (int(ends[group - 1]) if group else 0)].as_py()
    return value.get("bytes") if isinstance(value, dict) else value

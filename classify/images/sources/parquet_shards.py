"""Parquet files of Hugging Face ``datasets``: a column of encoded images, and a column of labels.

Source: https://huggingface.co/docs/hub/datasets-image#parquet-format
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from classify.images.sources.shard_index import ENTRY, Scanned, number_of
from classify.images.sources.shards import ShardSource
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.input_files import parsed

MOST_OF_A_GROUP = 2**30  # bytes of the images in a row group
_ROWS = 2**16  # labels read at a time
_IMAGES_READ = 16  # images read at a time
_IMAGES, _LABELS = ("image", "img"), ("label", "labels", "class", "fine_label")  # names of untyped columns
_REMEDY = "it may be incomplete, or have no images; write or fetch it again"


class ParquetShards(ShardSource):
    """A dataset in Parquet files.

    Reading an image reads its row group; a process caches the last four groups. Reading in order is fast. In
    a random order, most images need another group; tar shards are faster then.
    """

    ending = ".parquet"

    @staticmethod
    def scan(file: pathlib.Path, url: str) -> Scanned:
        """Read the labels in a file; an image's offset in the index is its row."""
        damaged = f"{url}: not a readable Parquet file"
        with parsed(damaged, _REMEDY), pyarrow.parquet.ParquetFile(file) as opened:
            schema, count = opened.schema_arrow, opened.metadata.num_rows
            image, label, classes = _features(schema)
            missing = [
                f"{kind} ({' or '.join(usual)})"
                for kind, usual, column in (("images", _IMAGES, image), ("labels", _LABELS, label))
                if column is None
            ]
            if missing:
                what = f"has no column of {' nor of '.join(missing)}; it has {', '.join(schema.names)}"
                raise InvalidInput(f"{url}: {what}; rename the columns")
            twice = [each for each in (image, label) if schema.names.count(each) > 1]
            if twice:
                raise InvalidInput(f"{url}: has the column {twice[0]!r} more than once; rename one of them")
            if count > (size := file.stat().st_size):  # an image has at least one byte
                raise ValueError(f"{count:,} rows in {size:,} bytes")
            codes, texts = _labels(file, str(label), url, count)
        entries = np.zeros(count, ENTRY)
        entries["offset"], entries["label"] = np.arange(count), codes
        return Scanned(texts, entries, classes)

    @staticmethod
    def read(file: pathlib.Path, url: str, offset: int, size: int) -> bytes:
        """Return the image in a row."""
        with parsed(f"{url}: row {offset:,} cannot be read", _REMEDY):
            content = _content(file, offset)
        if not content or not isinstance(content, bytes):
            remedy = "write the images themselves into the file"
            raise InvalidInput(f"{url}: row {offset:,} holds no image, or only its path; {remedy}")
        return content

    @staticmethod
    def name(file: pathlib.Path, url: str, offset: int) -> str:
        """Return an image's file and its row, from 0."""
        return f"{url}, row {offset:,}"


def _labels(file: pathlib.Path, column: str, name: str, count: int) -> tuple[np.ndarray, dict[str, int]]:
    """Read the labels in chunks; return each row's label number, uint32 (N,), and the numbers by label."""
    codes, texts = np.empty(count, np.uint32), dict[str, int]()
    start = 0
    # In a dictionary array, the label of many rows is in memory once
    with pyarrow.parquet.ParquetFile(file, read_dictionary=[column]) as opened:
        for batch in opened.iter_batches(_ROWS, columns=[column], use_threads=False):
            values = batch.column(0)
            if values.null_count:
                row = start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
                raise InvalidInput(f"{name}: row {row:,} has no label; add it, or remove the row")
            if not isinstance(values, pyarrow.DictionaryArray):
                values = values.dictionary_encode()
            numbers = [number_of(str(value.as_py()), texts, name) for value in values.dictionary]
            codes[start : start + len(values)] = np.array(numbers, np.uint32)[values.indices.to_numpy()]
            start += len(values)
    if start != count:
        raise ValueError(f"{start:,} rows, but its metadata says {count:,}")
    return codes, texts


def _features(schema: pyarrow.Schema) -> tuple[str | None, str | None, list[str] | None]:
    """Return the columns of images and of labels, and the class names; each is None if it is missing.

    Common column names take precedence over the types in the metadata.
    """
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds: dict[str, Any] = {key: value for key, value in about.items() if isinstance(value, dict)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        kinds = {}

    def column(kind: str, usual: tuple[str, ...]) -> str | None:
        typed = [key for key, value in kinds.items() if value.get("_type") == kind]
        return next((name for name in (*usual, *typed) if name in schema.names), None)

    label = column("ClassLabel", _LABELS)
    names = kinds.get(str(label), {}).get("names")
    if names and not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
        raise ValueError(f"the class names of {label!r} are not a list of strings")
    return column("Image", _IMAGES), label, names or None


_Version = tuple[int, int, int]


@functools.lru_cache(16)
def _about(file: pathlib.Path, version: _Version) -> tuple[pyarrow.parquet.FileMetaData, str, np.ndarray]:
    """Return a file's metadata, its column of images, and the first row of each row group."""
    metadata = pyarrow.parquet.read_metadata(file)
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return metadata, str(_features(metadata.schema.to_arrow_schema())[0]), np.cumsum([0, *rows])


def _content(file: pathlib.Path, row: int) -> Any:
    """Return the bytes in a row of the column of images."""
    status = file.stat()
    version = (status.st_ino, status.st_mtime_ns, status.st_size)  # a replaced file is read again
    _, _, starts = _about(file, version)
    group = int(np.searchsorted(starts, row, side="right")) - 1
    value = _group(file, version, group)[row - int(starts[group])].as_py()
    return value.get("bytes") if isinstance(value, dict) else value


@functools.lru_cache(4)
def _group(file: pathlib.Path, version: _Version, group: int) -> pyarrow.ChunkedArray:
    """Return the images of a row group. The file is closed, so that evicting the shard frees its room."""
    metadata, column, _ = _about(file, version)
    paths = [metadata.schema.column(number).path for number in range(len(metadata.schema))]
    dictionaries = [path for path in paths if path.partition(".")[0] == column]
    batches, size = [], 0
    with pyarrow.parquet.ParquetFile(file, metadata=metadata, read_dictionary=dictionaries) as opened:
        for batch in opened.iter_batches(_IMAGES_READ, [group], columns=[column], use_threads=False):
            size += batch.nbytes
            if size > MOST_OF_A_GROUP:
                raise ValueError(f"its row group has more than {MOST_OF_A_GROUP:,} bytes of images")
            batches.append(batch.column(0))
    return pyarrow.chunked_array(batches)

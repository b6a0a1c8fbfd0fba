"""Image files named one by one: in a table (CSV or JSON lines), or by a user's function."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import pathlib
import runpy
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from classify.images.listing import PARTS, WHOLE, FileListing, ListedSource, is_remote
from classify.images.settings import DataSettings
from classify.images.sources.shard_index import classes_of, label_of
from deepspeed_trial.errors import InvalidInput, nearest, one_line, printable
from deepspeed_trial.input_files import parsed, refused

_PATHS, _LABELS = ("path", "file_name", "image", "url"), ("label", "class")  # columns
_NO_URL = "download the images, or write them as shards (shards.py)"
_TABLES = ("{}.csv", "{}.jsonl", "{}/metadata.csv", "{}/metadata.jsonl")
_Numbered = tuple[int, Mapping[str, Any]]  # the line of a row in a table, and the row


class Row(NamedTuple):
    """A row of a table. It describes one image.

    Attributes:
        path: the path of the image's file.
        labels: the image's classes as written: one class, or any number with ``data.several_labels``.
        where: the row's file and line, for error lines.
        group: the row's value in the column of ``data.group``; empty without such a column.
    """

    path: str
    labels: tuple[str, ...]
    where: str
    group: str = ""


class NamedFiles(ListedSource):
    """Image files named one by one.

    Args:
        settings: the settings of the dataset.
        rows: the rows of each part.
    """

    def __init__(self, settings: DataSettings, rows: Mapping[str, list[Row]]) -> None:
        super().__init__(settings)
        if set(rows) == {"train"}:
            rows = {WHOLE: rows["train"]}
        self._rows = rows

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The class names: the columns that ``data.several_labels`` lists; else the sorted labels.

        If the labels are numbers, the class names are the numbers from 0.
        """
        several = self.settings.several_labels
        if isinstance(several, tuple):
            return several
        parts = list(self._rows.values())
        texts = {label: row.where for rows in parts for row in rows for label in row.labels}
        learned = {label for row in parts[0] for label in row.labels}
        if several and not learned:
            raise InvalidInput(f"{parts[0][0].where}: no image has a label; add labels to the table")
        for label in texts if several else ():
            if label not in learned:
                remedy = f"no training image has it; {nearest(label, learned)}"
                raise InvalidInput(f"{texts[label]}: the label {label!r}: {remedy}")
        return classes_of(texts)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: ``train`` with ``test``, ``val`` or both; or only ``all``."""
        return tuple(self._rows)

    def list_part(self, part: str) -> FileListing:
        """List the files of a part, in the order of the table's rows."""
        rows, index = self._rows[part], {name: label for label, name in enumerate(self.classes)}
        labels: Any = [[label_of(label, index) for label in row.labels] for row in rows]
        if self.settings.several_labels:
            of_images, labels = labels, np.zeros((len(rows), len(index)), np.uint8)
            for indicators, of_image in zip(labels, of_images, strict=True):
                indicators[of_image] = 1
        else:
            labels = [label for (label,) in labels]
        listing = FileListing([row.path for row in rows], labels, self.classes, self.settings.root)
        if any(row.group for row in rows):
            listing.column = [row.group for row in rows]
        return listing


def table(settings: DataSettings) -> NamedFiles:
    """Open the dataset of a table ``train.csv`` or ``train.jsonl``, and perhaps tables ``val`` and ``test``.

    Paths in a table are relative to its folder.

    Raises:
        InvalidInput: if there is no table, a table cannot be parsed, or a row has no path or label.
    """
    root = settings.root
    if is_remote(root):
        raise InvalidInput(f"data.root: {root}: a table must be in a folder; {_NO_URL}")
    rows: dict[str, list[Row]] = {}
    for part in (*PARTS, WHOLE):
        files = [os.path.join(root, form.format(part)) for form in _TABLES]
        if file := next(filter(os.path.isfile, files), None):
            with refused(f"data.root: {file}"):
                content = pathlib.Path(file).read_bytes()
            with parsed(f"{file}: not a readable table", "write CSV in UTF-8, or JSON lines"):
                rows[part] = _rows(content, file, settings)
    if "train" not in rows and set(rows) != {WHOLE}:
        needs = "it needs train.csv or train.jsonl, and may have such files for val and test"
        raise InvalidInput(f"data.root: {root}: holds no table of training images; {needs}")
    return NamedFiles(settings, rows)


def _rows(content: bytes, file: str, settings: DataSettings) -> list[Row]:
    """Return the images of a table; raise ``InvalidInput`` with the first bad row."""
    text = io.StringIO(content.decode("utf-8-sig", errors="replace"), newline="")
    several = settings.several_labels
    columns = [(name,) for name in several] if isinstance(several, tuple) else [_LABELS]
    numbered = _csv_rows(text, file, columns) if file.endswith(".csv") else _json_rows(text, file)
    folder = os.path.dirname(file)
    rows = [_row(row, f"{file}, line {number}", folder, settings) for number, row in numbered]
    if not rows:
        raise InvalidInput(f"{file}: has no rows; add some, or remove it")
    return rows


def _row(row: Mapping[str, Any], where: str, folder: str, settings: DataSettings) -> Row:
    path, several = _value(row, "path", _PATHS, where), settings.several_labels
    if isinstance(several, tuple):
        labels = tuple(name for name in several if _is_one(row, name, where))
    elif several is not None:
        labels = _separated(row, several, where)
    else:
        labels = (_value(row, "label", _LABELS, where),)
    if is_remote(path):
        raise InvalidInput(f"{where}: {path}: is a URL; {_NO_URL}")
    group = "" if settings.group_column is None else _value(row, "group", (settings.group_column,), where)
    return Row(os.path.join(folder, path), labels, where, group)


def _separated(row: Mapping[str, Any], separator: str, where: str) -> tuple[str, ...]:
    """Return the labels of a row: of a text with separators, or of a list of JSON."""
    name = next((name for name in _LABELS if name in row), "label")
    value = row.get(name)
    if value is None:
        raise InvalidInput(f"{where}: has no field {' or '.join(_LABELS)}; add the field, which may be empty")
    parts = value if isinstance(value, list) else str(value).split(separator) if value != "" else []
    labels = tuple(str(part).strip() for part in parts)
    shown = f"{where}: {name}: {str(value)[:50]!r}"
    if not all(isinstance(part, (str, int)) for part in parts) or isinstance(value, dict):
        raise InvalidInput(f"{shown}: must be labels separated by {separator!r}, or a list of labels")
    if not all(labels):
        raise InvalidInput(f"{shown}: has an empty label; remove the extra {separator!r}")
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise InvalidInput(f"{shown}: has the label {twice!r} twice; remove one of them")
    return labels


def _is_one(row: Mapping[str, Any], name: str, where: str) -> bool:
    """Return whether an image has the label of a column; an empty cell is no label."""
    value = row.get(name)
    if value is None:
        raise InvalidInput(f"{where}: has no {name}; add 0 or 1")
    if str(value) not in ("0", "1", ""):
        raise InvalidInput(f"{where}: {name}: {str(value)[:50]!r}: must be 0, 1 or empty; correct it")
    return str(value) == "1"


def _csv_rows(text: io.StringIO, file: str, label_columns: Sequence[tuple[str, ...]]) -> Iterator[_Numbered]:
    """Yield the line number of each row, and its values by their columns."""
    rows = csv.DictReader(text)
    columns = list(rows.fieldnames or ())
    for names in (_PATHS, *label_columns):
        named = [column for column in columns if column in names]
        if columns and not named:
            shown = ", ".join(column[:50] for column in columns[:20])
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            reason = f"names {shown}, but no column {names[0]}{others}"
            raise InvalidInput(f"{file}, line 1: {reason}; line 1 must name the columns")
        if len(set(named)) < len(named):
            raise InvalidInput(f"{file}, line 1: names the column {named[0]} twice; remove one of them")
    for row in rows:
        yield rows.line_num, row


def _json_rows(text: io.StringIO, file: str) -> Iterator[_Numbered]:
    for number, line in enumerate(text, 1):
        if line.strip():
            with parsed(f"{file}, line {number}: is not JSON", "write an object with path and label"):
                row = json.loads(line)
            yield number, row if isinstance(row, dict) else {}


def _value(row: Mapping[str, Any], kind: str, names: tuple[str, ...], where: str) -> str:
    """Return the path or the label of a row."""
    name = next((name for name in names if name in row), kind)
    value = row.get(name)
    if value is None or value == "":
        raise InvalidInput(
            f"{where}: has no {kind} in the field {' or '.join(names)}; add one, or remove the row"
        )
    if not isinstance(value, (str, int)):
        raise InvalidInput(f"{where}: {name}: {str(value)[:50]}: must be a text or a whole number")
    return str(value)


def own_source(settings: DataSettings) -> Any:
    """Return the source that a user's file defines: the result of its function ``source(root)``.

    The result is {part: [(path, class), ...]}, a ``ListedSource``, or an object with the members of
    ``DecodedSource``.

    Raises:
        InvalidInput: if the file cannot be run, or returns anything else.
    """
    file = settings.dataset
    key = f"data.dataset: {file}"
    path = pathlib.Path(file).absolute()
    if not path.is_file():
        raise InvalidInput(f"{key}: no such file; paths are relative to the working directory")
    try:
        make = runpy.run_path(str(path), run_name=f"own_source_{path.stem}").get("source")
        if not callable(make):
            raise InvalidInput(f"{key}: has no source; define source(root)")
        result = make(settings.root)
        if not isinstance(result, Mapping):
            return _checked(result, key)
        rows = {
            part: [Row(os.fsdecode(path), (str(label),), f"{file}, {part}") for path, label in pairs]
            for part, pairs in result.items()
        }
    except InvalidInput:
        raise
    except Exception as error:  # the user's code
        frames = traceback.extract_tb(error.__traceback__)
        lines = [each.lineno for each in frames if each.filename == str(path)]
        place = f" in line {lines[-1]}" if lines else ""
        reason = f"fails{place} ({type(error).__name__}: {one_line(error)}); correct it"
        raise InvalidInput(f"{key}: {reason}") from error
    urls = [row.path for named in rows.values() for row in named if is_remote(row.path)]
    if urls:
        raise InvalidInput(f"{key}: source(root) returns the URL {urls[0]}; {_NO_URL}")
    known = (*PARTS, WHOLE)
    if not rows or not set(rows) <= set(known) or not all(rows.values()) or not {"train", "all"} & set(rows):
        shown = ", ".join(f"{len(images)} images of {part}" for part, images in rows.items())
        needs = "return images of train and of val or test, or images of all only"
        raise InvalidInput(f"{key}: source(root) returns {shown or 'nothing'}; {needs}")
    return NamedFiles(settings, rows)


def _checked(source: Any, key: str) -> Any:
    images = "listing" if isinstance(source, ListedSource) else "load"
    members = ("classes", "parts", "count", "class_counts", images)
    missing = [name for name in members if not hasattr(source, name)]
    if missing:
        reason = f"source(root) returns {printable(type(source).__name__)} without {', '.join(missing)}"
        needs = "return {part: [(path, class), ...]}, or an object with the members of DecodedSource"
        raise InvalidInput(f"{key}: {reason}; {needs}")
    return source

"""Images that are named one by one: in a table, CSV or JSON lines, or by a function of one's own."""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import json
import os
import pathlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from classify.images.sources import shard_files
from classify.images.sources.encoded import Location
from classify.images.sources.encoded_source import EncodedSource
from classify.images.sources.files import FileImages
from classify.images.sources.remote import Storage, is_remote
from classify.images.sources.shard_index import classes_of, label_of
from deepspeed_trial.errors import InvalidInput, one_line, printable
from deepspeed_trial.input_files import parsed, refused

_PATHS, _LABELS = ("path", "file_name", "image", "url"), ("label", "class")  # columns
_TABLES = ("{}.csv", "{}.jsonl", "{}/metadata.csv", "{}/metadata.jsonl")
Row = tuple[str, str, str]  # path or URL, class as it is written, and where that stands


class Listed(EncodedSource):
    """Images that are named one by one.

    Args:
        location: of the dataset.
        rows: of each part.
    """

    def __init__(self, location: Location, rows: Mapping[str, list[Row]]) -> None:
        super().__init__(location)
        if set(rows) == {"train"}:
            rows = {shard_files.WHOLE: rows["train"]}
        self._rows = rows
        self._encoded: dict[str, FileImages] = {}

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The class names: sorted, or numbers from 0."""
        return classes_of({text: where for rows in self._rows.values() for _, text, where in rows})

    @property
    def parts(self) -> tuple[str, ...]:
        """``train`` with ``test``, ``val`` or both, or ``all`` alone."""
        return tuple(self._rows)

    def encoded(self, part: str) -> FileImages:
        """The files of a part, in the order in which they are named."""
        if part not in self._encoded:
            index = {name: label for label, name in enumerate(self.classes)}
            rows = self._rows[part]
            labels = [label_of(text, index) for _, text, _ in rows]
            storage = Storage(self.location.storage)
            paths = [path for path, _, _ in rows]
            self._encoded[part] = FileImages(paths, labels, self.classes, self.location.root, storage)
        return self._encoded[part]


def table(location: Location) -> Listed:
    """The dataset of tables ``train.csv`` or ``train.jsonl``, and of ``val`` and ``test``.

    Paths count from the folder of their table. A table on a server names images of that server alone: its
    author might otherwise have this machine ask any server that it reaches.

    Raises:
        InvalidInput: if there is none, or it cannot be parsed, or a row has no path or no label.
    """
    root, storage = location.root, Storage(location.storage)
    rows: dict[str, list[Row]] = {}
    for part in (*shard_files.PARTS, shard_files.WHOLE):
        for form in _TABLES:
            url = shard_files.join(root, form.format(part))
            if part in rows:
                break
            if is_remote(url):
                content = storage.read_if_there(url)
            else:
                with refused(f"data.root: {url}"):
                    content = pathlib.Path(url).read_bytes() if os.path.isfile(url) else None
            if content is not None:
                with parsed(f"{url}: not a readable table", "write CSV in UTF-8, or JSON lines"):
                    rows[part] = list(_rows(content, url))
    if "train" not in rows and set(rows) != {shard_files.WHOLE}:
        needs = "it needs train.csv or train.jsonl, and may have the same of val and test"
        raise InvalidInput(f"data.root: {root}: holds no table of training images; {needs}")
    return Listed(location, rows)


def _rows(content: bytes, url: str) -> Iterator[Row]:
    folder = url.rpartition("/")[0]
    text = io.StringIO(content.decode("utf-8-sig", errors="replace"), newline="")
    where = ""
    for number, row in _csv_rows(text, url) if url.endswith(".csv") else _json_rows(text, url):
        where = f"{url}, line {number}"
        path, label = _value(row, "path", _PATHS, where), _value(row, "label", _LABELS, where)
        if not is_remote(path):
            path = shard_files.join(folder, path)
        elif is_remote(url) and _server(path) != _server(url):
            what = "is on another server than its table"
            raise InvalidInput(f"{where}: {path}: {what}; download the table, and give its folder")
        yield path, label, where
    if not where:
        raise InvalidInput(f"{url}: has no rows; add some, or remove it")


def _csv_rows(text: io.StringIO, url: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the number of each row's line, and the row's values by their columns."""
    rows = csv.DictReader(text)
    columns = list(rows.fieldnames or ())
    for names in (_PATHS, _LABELS):
        found = [column for column in columns if column in names]
        if columns and not found:
            shown = ", ".join(column[:50] for column in columns[:20])
            what = f"has no column {names[0]} (or {', '.join(names[1:])}), but {shown}"
            raise InvalidInput(f"{url}, line 1: {what}; name the columns there")
        if len(set(found)) < len(found):
            raise InvalidInput(f"{url}, line 1: names the column {found[0]} twice; remove one of them")
    for row in rows:
        yield rows.line_num, row


def _json_rows(text: io.StringIO, url: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            with parsed(f"{url}, line {number}: is no JSON", "write an object a line, with path and label"):
                row = json.loads(line)
            yield number, row


def _value(row: Any, kind: str, names: tuple[str, ...], where: str) -> str:
    """Return the path or the label of a row."""
    name = next((name for name in names if isinstance(row, dict) and name in row), kind)
    value = row.get(name) if isinstance(row, dict) else None
    if value is None or value == "":
        raise InvalidInput(f"{where}: has no {kind} ({', '.join(names)}); add it, or remove the row")
    if not isinstance(value, (str, int)):
        raise InvalidInput(f"{where}: {name}: {str(value)[:50]}: must be a text or a whole number")
    return str(value)


def _server(url: str) -> tuple[str, str]:
    return urlsplit(url)[:2]


def own(file: str, location: Location) -> Any:
    """The source that a file of one's own gives: its ``source(root)``.

    That gives for each part the (path or URL, class) of every image, or an object with what
    ``sources.Source`` asks for.

    Raises:
        InvalidInput: if the file cannot be run, or gives anything else.
    """
    key = f"data.dataset: {file}"
    path = pathlib.Path(file)
    if not path.is_file():
        raise InvalidInput(f"{key}: no such file; it counts from the folder in which the training starts")
    specification = importlib.util.spec_from_file_location(f"own_source_{path.stem}", path)
    assert specification and specification.loader  # as it ends in .py
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
        if not callable(make := getattr(module, "source", None)):
            raise InvalidInput(f"{key}: has no source; define source(root)")
        made = make(location.root)
        if not isinstance(made, Mapping):
            return _checked(made, key)
        rows = {
            part: [(os.fsdecode(path), str(label), f"{file}, {part}") for path, label in pairs]
            for part, pairs in made.items()
        }
    except InvalidInput:
        raise
    except Exception as error:  # of somebody else's code
        frames = traceback.extract_tb(error.__traceback__)
        lines = [each.lineno for each in frames if each.filename == specification.origin]
        place = f" in line {lines[-1]}" if lines else ""
        what = f"fails{place} ({type(error).__name__}: {one_line(error)}); mend it"
        raise InvalidInput(f"{key}: {what}") from error
    known = (*shard_files.PARTS, shard_files.WHOLE)
    if not rows or not set(rows) <= set(known) or not all(rows.values()) or not {"train", "all"} & set(rows):
        shown = ", ".join(f"{part} ({len(each)})" for part, each in rows.items())
        needs = "must give images of train, and of val or test, or of all"
        raise InvalidInput(f"{key}: source(root) gives {shown or 'nothing'}; {needs}")
    return Listed(location, rows)


def _checked(made: Any, key: str) -> Any:
    members = ("classes", "parts", "count", "class_counts", "load", "encoded")
    missing = [name for name in members if not hasattr(made, name)]
    if missing:
        what = f"source(root) gives {printable(type(made).__name__)} without {', '.join(missing)}"
        needs = "give {part: [(path, class), ...]}, or what sources.Source asks for"
        raise InvalidInput(f"{key}: {what}; {needs}")
    return made

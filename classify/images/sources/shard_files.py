"""The files of a dataset in shards: found by folder, prefix or pattern, and which part each is of."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator

from classify.images.sources.encoded import Location, Shard
from classify.images.sources.remote import Storage, is_remote
from deepspeed_trial.errors import InvalidInput
from deepspeed_trial.input_files import refused, regular_file

PARTS = ("train", "val", "test")
WHOLE = "all"
_SAME = {"training": "train", "validation": "val", "valid": "val", "testing": "test"}
_PART = re.compile(r"(train|val|test|all|training|validation|valid|testing)(?=[-_./\d])", re.I)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def find(location: Location, ending: str) -> dict[str, list[Shard]]:
    """The files of each part, in the order of their names; ``start`` and ``stop`` are 0.

    A file is of the part whose name its own begins with, or the name of its folder. If none has such a name,
    or all are of ``train``, they are of ``all``.

    Args:
        location: a folder, a prefix, or file names with ``{000..099}``, ``{a,b}`` and ``*``.
        ending: of the files' names.

    Raises:
        InvalidInput: if there are none, or no training images among them.
    """
    root = location.root
    found = dict(sorted(_files(location, ending).items()))
    if not found:
        needs = f"holds no *{ending}; give their folder, or their names, such as train-{{000..099}}{ending}"
        raise InvalidInput(f"data.root: {root}: {needs}")
    parts: dict[str, list[Shard]] = {}
    for url, (size, version) in found.items():
        if not size and not version and is_remote(url):
            what = (
                "its server tells neither its size nor its ETag nor its time, so a change would pass unseen"
            )
            raise InvalidInput(f"{url}: {what}; use a server that does, or a folder")
        shard = Shard(url, size, 0, 0, version=version)
        parts.setdefault(_part(url, location), []).append(shard)
    if len(parts) == 1 and parts.keys() <= {"train", WHOLE}:
        return {WHOLE: next(iter(parts.values()))}
    if "train" not in parts or WHOLE in parts:
        shown = ", ".join(shards[0].url.rpartition("/")[2] for shards in parts.values())
        needs = f"*{ending} must be named train-*, and val-* or test-*, or lie in such folders"
        raise InvalidInput(f"data.root: {root}: {needs}; it holds {shown}")
    return {part: parts[part] for part in PARTS if part in parts}


def join(root: str, name: str) -> str:
    """The path or URL of a file in a folder or below a prefix."""
    return f"{root.rstrip('/')}/{name}" if is_remote(root) else os.path.join(root, name)


def expand(pattern: str) -> Iterator[str]:
    """Writes ``{000..099}`` and ``{a,b}`` out."""
    if not (braces := _BRACES.search(pattern)):
        yield pattern
        return
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = numbers.groups()
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = braces[1].split(",")
    for choice in choices:
        yield from expand(pattern[: braces.start()] + choice + pattern[braces.end() :])


def _files(location: Location, ending: str) -> dict[str, tuple[int, str]]:
    """Return the size and the version of each file."""
    root, storage = location.root, Storage(location.storage)
    if location.is_pattern:
        names = list(expand(root))
        if not is_remote(root):
            held = itertools.chain.from_iterable(glob.glob(name) or [name] for name in names)
            with refused(f"data.root: {root}", "give the names of files that are there"):
                return {name: (regular_file(name).stat().st_size, "") for name in held}
        if "*" in root:
            files = storage.filesystem(root)
            names = [files.unstrip_protocol(each) for name in names for each in files.glob(name)]
        return storage.about_all(names)
    if root.startswith(("http://", "https://")):
        mend = f"give their names, such as {join(root, 'train-{000..099}' + ending)}"
        mend += ", or put there what shards.py writes" if ending == ".tar" else ""
        raise InvalidInput(f"data.root: {root}: a web server does not list its files; {mend}")
    if is_remote(root):
        return {url: about for url, about in storage.find(root).items() if url.endswith(ending)}
    with refused(f"data.root: {root}"):
        folders = [root, *sorted(entry.path for entry in os.scandir(root) if entry.is_dir())]
        entries = (entry for folder in folders for entry in os.scandir(folder))
        return {
            entry.path: (entry.stat().st_size, "")
            for entry in entries
            if entry.name.endswith(ending) and not entry.name.startswith(".") and entry.is_file()
        }


def _part(url: str, location: Location) -> str:
    """The part that a file's name begins with, or that of the folder in which it lies."""
    folder, _, name = url.rpartition("/")
    within = (
        folder.rpartition("/")[2] if location.is_pattern else folder.removeprefix(location.root.rstrip("/"))
    )
    for text in (name, within.strip("/") + "/"):
        if found := _PART.match(text):
            return _SAME.get(found[1].lower(), found[1].lower())
    return WHOLE

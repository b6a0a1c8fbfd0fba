"""Folders of image files: ``ROOT/<part>/<class>/*``, or ``ROOT/<class>/*``, in any common format."""

from __future__ import annotations

import collections
import errno
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

from classify.images.listing import EXTENSIONS, PARTS, WHOLE, FileListing, ListedSource
from classify.images.settings import DataSettings
from deepspeed_trial.errors import ErrorList, InvalidInput
from deepspeed_trial.input_files import refused

_LIKE_PARTS = ("train", "training", "test", "testing", "val", "valid", "validation")
_NEEDS = "it needs train/<class>/* with test/<class>/* or val/<class>/*, or only <class>/*"


class ImageFolder(ListedSource):
    """An image folder, listed once.

    Args:
        settings: ``root`` is a folder with the folder ``train``, and ``val``, ``test`` or both; or with a
            folder for each class.
    """

    def __init__(self, settings: DataSettings) -> None:
        super().__init__(settings)
        self.root = pathlib.Path(settings.root)
        self._passed_over: dict[str, collections.Counter[str]] = {}

    @functools.cached_property
    def classes(self) -> tuple[str, ...]:
        """The class names; all parts must have the same classes."""
        with refused(f"data.root: {self.root}"):
            return tuple(_find_classes({part: self.folder_of(part) for part in self.parts}, self.root))

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: ``train`` with ``test``, ``val`` or both; or only ``all``."""
        with refused(f"data.root: {self.root}"):
            return _find_parts(self.root)

    def list_part(self, part: str) -> FileListing:
        """List the files of a part, sorted by their paths.

        Raises:
            InvalidInput: if a folder is missing or empty, or the parts' classes differ.
        """
        folder = self.folder_of(part)
        with refused(f"data.root: {self.root}"):
            files, self._passed_over[part] = _find_files(folder, self.classes)
        return FileListing(list(files), list(files.values()), self.classes, str(folder))

    @property
    def passed_over(self) -> Mapping[str, int]:
        """The number of ignored files (not images of a class) in the folder, by extension."""
        for part in self.parts:
            self.listing(part)
        with refused(f"data.root: {self.root}"):
            beside = _others_in(self.root) if WHOLE not in self.parts else collections.Counter()
        return dict(sum(self._passed_over.values(), beside))

    def folder_of(self, part: str) -> pathlib.Path:
        """Return the folder that contains a part's class folders."""
        return self.root if part == WHOLE else self.root / part


def find_images(paths: Iterable[pathlib.Path]) -> tuple[list[pathlib.Path], collections.Counter[str]]:
    """Find image files: the paths that are files, and all images in the paths that are folders.

    Returns:
        The image files, and the number of the folders' other files by extension.

    Raises:
        InvalidInput: with a line for each path that does not exist, cannot be read, or is a folder without
            images.
    """
    files, others = list[pathlib.Path](), collections.Counter[str]()
    errors = ErrorList()
    remedy = "give image files or folders of them"
    for path in paths:
        with errors.collecting(), refused(str(path), remedy):
            if not path.exists():
                raise InvalidInput(f"{path}: no such file or folder; {remedy}")
            found = _images_in(path, others) if path.is_dir() else [path]
            images = sorted(map(pathlib.Path, found))
            if not images:
                raise InvalidInput(f"{path}: holds no image ({' '.join(EXTENSIONS)}); give another folder")
            files += images
    errors.raise_any()
    return files, others


def _images_in(folder: str | os.PathLike[str], others: collections.Counter[str]) -> Iterator[str]:
    """Yield the images in a folder, at any depth, except hidden ones.

    Args:
        folder: the folder.
        others: the counter of the other files, by extension.

    Raises:
        OSError: if the folder cannot be read, or contains a link to one of its parents.
    """

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(link := os.path.join(place, name)) and _is_circular(link, folder):
                raise OSError(errno.ELOOP, "a circular link", link)
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(tuple(EXTENSIONS)):
                yield os.path.join(place, name)
            else:
                others[_extension_of(name)] += 1


def _others_in(folder: pathlib.Path) -> collections.Counter[str]:
    """Count the files directly in a folder, except hidden files, by extension; images there have no class."""
    names = [entry.name for entry in os.scandir(folder) if not entry.is_dir()]
    return collections.Counter(_extension_of(name) for name in names if not name.startswith("."))


def _extension_of(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_circular(link: str, folder: str | os.PathLike[str]) -> bool:
    """Return whether a link in a folder points to a folder that contains it, perhaps through other links."""
    path = pathlib.Path(link)
    target, inside = path.resolve(), (each for each in path.parents if each.is_relative_to(folder))
    return any(parent.resolve().is_relative_to(target) for parent in inside)


def _find_parts(root: pathlib.Path) -> tuple[str, ...]:
    if not root.is_dir():
        raise InvalidInput(f"data.root: {root}: no such folder; {_NEEDS}")
    folders = _subfolders(root)
    parts = tuple(part for part in PARTS if part in folders)
    if "train" in parts and len(parts) > 1:
        return parts
    if not parts and folders:
        like = [name for name in folders if name.lower() in _LIKE_PARTS]
        if like:
            reason = f"holds the folder {like[0]!r}; rename it to train, val or test"
            raise InvalidInput(f"data.root: {root}: {reason}, or, if it is a class, to another name")
        return (WHOLE,)
    lacks = "'test' nor 'val'" if "train" in parts else "'train'"
    raise InvalidInput(f"data.root: {root}: has no folder {lacks}; {_NEEDS}")


def _find_classes(folders: dict[str, pathlib.Path], root: pathlib.Path) -> list[str]:
    (first, folder), *others = folders.items()
    classes = _subfolders(folder)
    for name in classes:
        if name != name.encode(errors="replace").decode():
            raise InvalidInput(f"data.root: {folder}: the folder {name!r} is not named in UTF-8; rename it")
    if len(classes) < 2:
        shown = f"only the class {classes[0]!r}" if classes else "no class folder"
        needs = "it needs a folder for each class, and at least two classes"
        raise InvalidInput(f"data.root: {folder}: holds {shown}; {needs}")
    for part, other in others:
        here, there = set(classes), set(_subfolders(other))
        if here != there:
            only = {first: sorted(here - there), part: sorted(there - here)}
            shown = "; ".join(f"only in {name}: {', '.join(some) or 'none'}" for name, some in only.items())
            reason = f"{part} and {first} have different classes ({shown})"
            raise InvalidInput(f"data.root: {root}: {reason}; make them the same")
    return classes


def _subfolders(folder: pathlib.Path) -> list[str]:
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def _find_files(
    folder: pathlib.Path, classes: Iterable[str]
) -> tuple[dict[str, int], collections.Counter[str]]:
    """Return the label of each image by its path, sorted, and the number of other files by extension."""
    others, labels = _others_in(folder), dict[str, int]()
    for label, name in enumerate(classes):
        images = dict.fromkeys(_images_in(folder / name, others), label)
        if not images:
            reason = f"holds no image ({' '.join(EXTENSIONS)}); add some or remove the folder"
            raise InvalidInput(f"data.root: {folder / name}: {reason}")
        labels |= images
    return dict(sorted(labels.items())), others

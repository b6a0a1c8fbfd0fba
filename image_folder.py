"""Folders of image files, decoded once in parallel and kept in a cache file.

``ROOT/train/<class>/*`` and ``ROOT/test/<class>/*``, in any common format, size and mode.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import multiprocessing
import os
import pathlib
import stat
import sys
import warnings
from collections.abc import Callable, Iterable

import joblib
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.datasets.folder import make_dataset
from tqdm import tqdm

import image_cache
from errors import InvalidInput, one_line
from host_lock import host_lock

SPLITS = ("train", "test")
_CACHE_FORMAT = 3
_CHUNK = 64  # files a worker decodes at a time
_SHOWN = 20  # files that are named where more cannot be read
_EXTENSIONS = ".jpg .jpeg .jpe .jfif .png .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .tga .jp2 .avif".split()


def load(
    root: pathlib.Path, split: str, image_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """Reads one split of an image folder, from the cache where that is still true to the folder.

    Args:
        root: the folder with ``train`` and ``test`` in it.
        split: ``train`` or ``test``.
        image_size: height and width to scale to, in pixels; other shapes are cropped in the middle.

    Returns:
        Images (N, 3, H, W) uint8, labels (N,) int64 and the class names.

    Raises:
        InvalidInput: if a folder is missing or empty, the splits' classes differ, or a file is not readable.
    """
    classes = classes_of(root)
    files = _files(root, split, classes)
    fingerprint = _fingerprint(root / split, files, classes, image_size)
    with host_lock(root, "images") as folder:
        cache = folder / f".images-{split}-{image_size[0]}x{image_size[1]}.pt"
        kept = image_cache.read(cache, fingerprint)
        if kept is None:
            labels = torch.tensor([label for _, label in files])
            shape = (len(files), 3, *image_size)
            fill = functools.partial(_decode, files, image_size, split)
            kept = image_cache.write(cache, fingerprint, shape, labels, classes, fill)
    return kept["images"], kept["labels"], tuple(kept["classes"])


def files_of(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The image files that paths name: a file by itself, a folder by all it holds.

    Raises:
        InvalidInput: if a path does not exist or a folder holds no image.
    """
    files: list[pathlib.Path] = []
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"{path}: no such file or folder; give image files or folders of them")
        if not path.is_dir():
            files.append(path)
            continue
        held = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in _EXTENSIONS and each.is_file()]
        held = [each for each in held if not _is_hidden(f"{os.sep}{each.relative_to(path)}")]
        if not held:
            raise InvalidInput(f"{path}: holds no image ({' '.join(_EXTENSIONS)}); give another folder")
        files += held
    return files


def count(root: pathlib.Path, split: str) -> int:
    """How many image files a split has; raises as ``load`` does."""
    return len(_files(root, split, classes_of(root)))


def _subfolders(folder: pathlib.Path) -> list[str]:
    return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def classes_of(root: pathlib.Path) -> list[str]:
    """The class names, which must be the same in both splits; raises as ``load`` does."""
    for split in SPLITS:
        if not (root / split).is_dir():
            raise InvalidInput(
                f"data.root: {root}: has no folder {split!r}; it needs train/<class>/* and test/<class>/*"
            )
    train, test = (_subfolders(root / split) for split in SPLITS)
    for name in train:
        if name != name.encode(errors="replace").decode():
            raise InvalidInput(f"data.root: {root / 'train'}: holds the folder {name!r}, no UTF-8 name; rename it")
    if len(train) < 2:
        found = f"only the class {train[0]!r}" if train else "no class folder"
        raise InvalidInput(
            f"data.root: {root / 'train'}: holds {found}; it needs a folder each for two classes or more"
        )
    if train != test:
        here, there = sorted(set(train) - set(test)), sorted(set(test) - set(train))
        raise InvalidInput(
            f"data.root: {root}: the classes of test differ from those of train (only in train: "
            f"{', '.join(here) or 'none'}; only in test: {', '.join(there) or 'none'}); make them the same"
        )
    return train


def _is_hidden(path: str) -> bool:
    """Whether a part of a path that begins with a separator begins with a dot."""
    return f"{os.sep}." in path


def _files(root: pathlib.Path, split: str, classes: list[str]) -> list[tuple[str, int]]:
    """The (path, label) of every image file, in a fixed order."""
    index = {name: label for label, name in enumerate(classes)}
    found = make_dataset(str(root / split), index, extensions=tuple(_EXTENSIONS), allow_empty=True)
    start = len(str(root / split))
    files = sorted((path, label) for path, label in found if not _is_hidden(path[start:]))
    held = {label for _, label in files}
    empty = [name for name, label in index.items() if label not in held]
    if empty:
        raise InvalidInput(
            f"data.root: {root / split / empty[0]}: holds no image ({' '.join(_EXTENSIONS)});"
            " add some or remove the folder"
        )
    return files


def _fingerprint(
    folder: pathlib.Path, files: list[tuple[str, int]], classes: list[str], image_size: tuple[int, int]
) -> str:
    """Changes whenever a file is added, removed, renamed or written, or the cache would be made in another way."""
    digest = hashlib.sha256(repr((_CACHE_FORMAT, image_size, classes)).encode())
    start = len(str(folder))
    for path, label in files:
        try:
            status = os.stat(path)
        except OSError as error:  # such as a link to nowhere
            raise InvalidInput(f"data.root: {path}: {one_line(error)}; mend or remove it") from error
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"data.root: {path}: is no file; remove it")
        digest.update(repr((path[start:], label, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode())
    return digest.hexdigest()


def _decode(
    files: list[tuple[str, int]],
    image_size: tuple[int, int],
    split: str,
    target: pathlib.Path,
    start: int,
    done: Callable[[int], None],
) -> None:
    """Decodes the files from ``start`` on into ``target`` on all cores, with a progress bar.

    Raises:
        InvalidInput: with a line for each file that cannot be read, once all have been tried.
    """
    paths = [path for path, _ in files]
    begins = range(start, len(paths), _CHUNK)
    chunks = [paths[begin : begin + _CHUNK] for begin in begins]
    if not chunks:
        return  # an interrupted attempt had decoded them all
    # The workers touch Pillow and numpy only, so forking, which costs nothing, is safe whatever threads there are.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers = min(joblib.cpu_count(), len(chunks))
    decode = functools.partial(_decode_chunk, target, image_size)
    bar = tqdm(
        total=len(paths), initial=start, desc=f"decoding {split}", unit=" images", disable=not sys.stderr.isatty()
    )
    with bar, concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        unreadable: list[str] = []
        try:
            for end, faults in pool.map(decode, chunks, begins):
                bar.update(end - bar.n)
                unreadable += faults
                if not unreadable:
                    done(end)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(unreadable) > _SHOWN:
        more = f"data.root: {len(unreadable) - _SHOWN:,} more files are not readable; mend or remove these first"
        unreadable = [*unreadable[:_SHOWN], more]
    if unreadable:
        raise InvalidInput(unreadable)


def _decode_chunk(
    target: pathlib.Path, image_size: tuple[int, int], paths: list[str], begin: int
) -> tuple[int, list[str]]:
    """Writes images to their places in the file; gives the number of the one after them, and what is not readable."""
    pixels = np.zeros((len(paths), 3, *image_size), dtype=np.uint8)
    faults = []
    for index, path in enumerate(paths):
        try:
            pixels[index] = decode_image(path, image_size)
        except InvalidInput as error:
            faults += error.faults
    with open(target, "rb+") as file:
        file.seek(begin * pixels[0].nbytes)
        file.write(pixels.data)
    return begin + len(paths), faults


def decode_image(path: str | os.PathLike[str], image_size: tuple[int, int]) -> np.ndarray:
    """Reads an image file upright and in RGB, scaled and cropped in the middle: uint8 (3, H, W).

    Raises:
        InvalidInput: if the file cannot be read as an image.
    """
    try:
        with Image.open(path) as image:
            image.load()
            upright: Image.Image = image
            with contextlib.suppress(Exception):  # damaged EXIF leaves the pixels readable
                upright = ImageOps.exif_transpose(image)
            if upright.mode == "F" or (upright.mode == "I" and np.asarray(upright).max() > 0xFFFF):
                raise ValueError(f"pixels of mode {upright.mode}, which have no fixed range")
            if upright.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            elif upright.mode == "P":  # a palette may hold transparency, which only RGBA can take over
                upright = upright.convert("RGBA")
            rgb = upright.convert("RGB")
        size = image_size[1], image_size[0]
        if rgb.size != size:
            rgb = ImageOps.fit(rgb, size, Image.Resampling.BILINEAR)
        return np.asarray(rgb).transpose(2, 0, 1)
    except Exception as error:  # Pillow's formats each raise errors of their own
        raise InvalidInput(
            f"{os.fspath(path)}: not a readable image ({one_line(error)}); mend or remove the file"
        ) from error

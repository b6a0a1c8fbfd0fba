"""Image files -> pixels, in parallel on all cores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence

import joblib
import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from harness.errors import InvalidInput, one_line
from harness.input_files import regular_file

CHUNK = 64  # files a worker decodes at a time
SHOWN = 20  # files that are named where more cannot be read


def decode_files(paths: Sequence[str], size: tuple[int, int], split: str, target: pathlib.Path) -> None:
    """Decodes files into ``target``, one after the other, with a progress bar.

    Args:
        paths: the files.
        size: height and width to scale to, in pixels.
        split: what to call them.
        target: a file that is there and empty.

    Raises:
        InvalidInput: with a line for each file that cannot be read, once all have been tried.
    """
    begins = range(0, len(paths), CHUNK)
    chunks = [paths[begin : begin + CHUNK] for begin in begins]
    # The workers touch Pillow and numpy only, so forking, which costs nothing, is safe beside any threads.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers = min(joblib.cpu_count(), len(chunks))
    bar = tqdm(total=len(paths), desc=f"decoding {split}", unit=" images", disable=not sys.stderr.isatty())
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    errors: list[str] = []
    with bar, pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        try:
            for found in pool.map(functools.partial(_decode_chunk, target, size), chunks, begins):
                bar.update(min(CHUNK, len(paths) - bar.n))
                errors += found
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(errors) > SHOWN:
        more = f"{len(errors) - SHOWN:,} more files are not readable; mend or remove these first"
        errors = [*errors[:SHOWN], f"data.root: {more}"]
    if errors:
        raise InvalidInput(errors)


def _decode_chunk(target: pathlib.Path, size: tuple[int, int], paths: Sequence[str], begin: int) -> list[str]:
    """Writes images to their places in the file; gives an error for each that cannot be read."""
    pixels = np.zeros((len(paths), 3, *size), dtype=np.uint8)
    errors = []
    for index, path in enumerate(paths):
        try:
            pixels[index] = decode_image(path, size)
        except InvalidInput as error:
            errors += error.errors
    with open(target, "rb+") as file:
        file.seek(begin * pixels[0].nbytes)
        file.write(pixels.data)
    return errors


def decode_image(path: str | os.PathLike[str], size: tuple[int, int]) -> np.ndarray:
    """Reads an image file upright and in RGB, scaled and cropped in the middle: uint8 (3, H, W).

    Raises:
        InvalidInput: if the file cannot be read as an image.
    """
    try:
        with Image.open(regular_file(path)) as image:
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
        if rgb.size != (size[1], size[0]):
            rgb = ImageOps.fit(rgb, (size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(rgb).transpose(2, 0, 1)
    except Exception as error:  # Pillow's formats each raise errors of their own
        reason = f"not a readable image ({one_line(error)}); mend or remove the file"
        raise InvalidInput(f"{os.fspath(path)}: {reason}") from error

"""Image files -> pixels."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from harness.errors import InvalidInput, one_line
from harness.input_files import regular_file


def content_of(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file; raises ``InvalidInput`` if it cannot be read."""
    try:
        return regular_file(path).read_bytes()
    except (OSError, ValueError) as error:
        raise _unreadable(os.fspath(path), error) from error


def decode_image(path: str | os.PathLike[str], size: tuple[int, int]) -> np.ndarray:
    """Decodes an image file as ``decode`` does."""
    return decode(content_of(path), size, os.fspath(path))


def decode(content: bytes, size: tuple[int, int], name: str | Callable[[], str]) -> np.ndarray:
    """Decodes an image file upright and in RGB, scaled and cropped in the middle: uint8 (3, H, W).

    Args:
        content: the file's bytes.
        size: height and width, in pixels.
        name: what to call it in an error line, or what gives that.

    Raises:
        InvalidInput: if it cannot be read as an image.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
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
    except UnidentifiedImageError as error:  # which would name a buffer
        raise _unreadable(name, ValueError("cannot identify image file")) from error
    except Exception as error:  # Pillow's formats each raise errors of their own
        raise _unreadable(name, error) from error


def _unreadable(name: str | Callable[[], str], error: Exception) -> InvalidInput:
    name = name if isinstance(name, str) else name()
    return InvalidInput(f"{name}: not a readable image ({one_line(error)}); mend or remove the file")

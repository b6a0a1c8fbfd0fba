"""Image files -> pixels."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.nn import functional as F

from harness.errors import InvalidInput, one_line
from harness.input_files import regular_file

_JPEG, _EXIF = b"\xff\xd8\xff", b"Exif\0\0"


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

    Scaling is bilinear, with antialiasing, and gives the same bits on any x86 CPU. A JPEG at least twice as
    large as that is made smaller by its decoder first (by a half, a quarter or an eighth).

    Args:
        content: the file's bytes.
        size: height and width, in pixels.
        name: what to call it in an error line, or what gives that.

    Raises:
        InvalidInput: if it cannot be read as an image.
    """
    try:
        pixels = _decode_jpeg(content, size)
        if pixels is None:
            with Image.open(io.BytesIO(content)) as image:
                pixels = _decode_any(image)
        return _fit(pixels, size)
    except UnidentifiedImageError as error:  # which would name a buffer
        raise _unreadable(name, ValueError("cannot identify image file")) from error
    except Exception as error:  # Pillow's formats each raise errors of their own
        raise _unreadable(name, error) from error


def _decode_jpeg(content: bytes, size: tuple[int, int]) -> np.ndarray | None:
    """The pixels (h, w, 3) of a plain JPEG, the same as Pillow's in less time; None of any other image."""
    if not content.startswith(_JPEG) or _EXIF in content:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in ("YCbCr", "Gray") or height * width > (Image.MAX_IMAGE_PIXELS or 0):
            return None
        scale = max(size[0] / height, size[1] / width)
        least = {"min_height": math.ceil(height * scale), "min_width": math.ceil(width * scale)}
        return simplejpeg.decode_jpeg(content, colorspace="RGB", min_factor=2, **least)
    except ValueError:  # damaged: Pillow says in which way, or reads it all the same
        return None


def _decode_any(image: Image.Image) -> np.ndarray:
    """The pixels (h, w, 3) of an image that Pillow has opened."""
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
    return np.array(upright.convert("RGB"))


def _fit(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an image (h, w, 3) with the sides' ratio of ``size``, scaled to it: (3, H, W)."""
    height, width = pixels.shape[:2]
    if (height, width) != size:
        scale = max(size[0] / height, size[1] / width)
        tall, wide = (max(1, round(side / scale)) for side in size)
        top, left = round((height - tall) / 2), round((width - wide) / 2)  # as torchvision's center_crop
        cropped = torch.from_numpy(pixels[top : top + tall, left : left + wide]).permute(2, 0, 1)
        scaled = F.interpolate(cropped[None], size, mode="bilinear", align_corners=False, antialias=True)
        return scaled[0].contiguous().numpy()
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _unreadable(name: str | Callable[[], str], error: Exception) -> InvalidInput:
    name = name if isinstance(name, str) else name()
    return InvalidInput(f"{name}: not a readable image ({one_line(error)}); mend or remove the file")

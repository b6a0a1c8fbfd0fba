"""Decodes image files to pixels."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
from collections.abc import Callable

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.nn import functional as F

from classify.config.rules import CROP, PAD
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import regular_file
from deepspeed_trial.out_of_memory import is_out_of_memory

# The formats of ``listing.EXTENSIONS``; Pillow can open more, and starts Ghostscript for EPS
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF")
MOST_BYTES = 2**28  # the maximum size of an image file
_GREY = 128  # the value of the border that ``PAD`` adds
_JPEG, _EXIF = b"\xff\xd8\xff", b"Exif\0\0"
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1")  # brands, ISO/IEC 23008-12
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values that swap width and height


class UnreadableImage(InvalidInput):
    """An image whose bytes cannot be decoded; another attempt or machine would not help."""


class MissingPackage(InvalidInput):
    """The package for an image format is not installed; the image itself may be intact."""


def open_image(file: io.BytesIO) -> Image.Image:
    """Open an image in one of ``FORMATS`` without decoding its pixels.

    Raises:
        MissingPackage: for HEIC without pillow-heif.
        Exception: any error of Pillow.
    """
    if not _is_heic(file.getvalue()[:64]):
        return Image.open(file, formats=FORMATS)
    _register_heic()
    return Image.open(file, formats=["HEIF"])


def _is_heic(start: bytes) -> bool:
    """Return whether a file starts like HEIC; AVIF has the same container."""
    brands = start[8 : int.from_bytes(start[:4], "big")]
    return start[4:8] == b"ftyp" and b"avi" not in brands and any(brand in brands for brand in _HEIC)


@functools.cache
def _register_heic() -> None:
    """Let Pillow open HEIC with pillow-heif, which also rotates images upright."""
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingPackage("image: is HEIC, which needs pillow-heif; pip install pillow-heif") from error
    pillow_heif.register_heif_opener()


def content_of(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file.

    Raises:
        InvalidInput: if the file cannot be read; ``UnreadableImage`` if it is too large for an image.
    """
    try:
        file = regular_file(path)
        if (size := file.stat().st_size) <= MOST_BYTES:
            return file.read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidInput(_not_readable(os.fspath(path), one_line(error))) from error
    raise UnreadableImage(_not_readable(os.fspath(path), f"has {size:,} bytes, more than {MOST_BYTES:,}"))


def decode_image(path: str | os.PathLike[str], size: tuple[int, int], fit: str = CROP) -> np.ndarray:
    """Decode an image file; see ``decode``."""
    return decode(content_of(path), size, os.fspath(path), fit)


def decode(
    content: bytes, size: tuple[int, int], name: str | Callable[[], str], fit: str = CROP
) -> np.ndarray:
    """Return the image in a file, upright, in RGB, fitted to a size: uint8 (3, H, W).

    Scaling is bilinear, with antialiasing, and gives the same bits on any x86 CPU. A JPEG at least
    twice as large as ``size`` is decoded at a half, a quarter or an eighth of its size. The image is then
    rotated by its EXIF orientation.

    Args:
        content: the file's bytes.
        size: height and width, in pixels.
        name: the image's name in error lines, or a function that returns it.
        fit: the treatment of an image with another aspect ratio: ``CROP`` uses the middle, ``PAD`` adds a
            grey border, ``STRETCH`` distorts the image.

    Raises:
        UnreadableImage: if the bytes are not an image.
        MissingPackage: for HEIC without pillow-heif.
        InvalidInput: if the image does not fit in memory.
    """
    try:
        pixels = _decode_jpeg(content, size)
        if pixels is None:
            with open_image(io.BytesIO(content)) as image:
                pixels = _decode_any(image)
        return _fit(pixels, size, fit)
    except Exception as error:  # Pillow's formats raise different classes
        shown = name if isinstance(name, str) else name()
        if isinstance(error, MissingPackage):
            raise MissingPackage(f"{shown}: {error.errors[0].removeprefix('image: ')}") from error
        if is_out_of_memory(error):  # the image itself may be intact
            line = f"{shown}: no memory left to decode it; free memory, or remove the file"
            raise InvalidInput(line) from error
        is_unknown = isinstance(error, UnidentifiedImageError)  # Pillow's text names a buffer
        reason = "cannot identify image file" if is_unknown else one_line(error)
        raise UnreadableImage(_not_readable(shown, reason)) from error


def _decode_jpeg(content: bytes, size: tuple[int, int]) -> np.ndarray | None:
    """Return the pixels (h, w, 3) of a JPEG, faster than Pillow; None if Pillow must decode the file."""
    if not content.startswith(_JPEG):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        if colours not in ("YCbCr", "Gray") or height * width > (Image.MAX_IMAGE_PIXELS or 0):
            return None
        orientation = _orientation_of(content)
        tall, wide = size[::-1] if orientation in _ON_ITS_SIDE else size
        scale = max(tall / height, wide / width)
        least = {"min_height": math.ceil(height * scale), "min_width": math.ceil(width * scale)}
        pixels = simplejpeg.decode_jpeg(content, colorspace="RGB", min_factor=2, **least)
    except ValueError:  # the file is damaged: Pillow names the damage, or can still read it
        return None
    if orientation == 1:
        return pixels
    image = Image.fromarray(pixels)
    image.getexif()[_ORIENTATION] = orientation
    return np.array(_upright(image))


def _orientation_of(content: bytes) -> int:
    """Return the EXIF orientation of a JPEG; 1 (upright) if its EXIF data is damaged or missing."""
    if _EXIF in content:
        with contextlib.suppress(Exception), open_image(io.BytesIO(content)) as image:
            return image.getexif().get(_ORIENTATION, 1)
    return 1


def _upright(image: Image.Image) -> Image.Image:
    """Rotate an image upright, by its EXIF orientation."""
    with contextlib.suppress(Exception):  # damaged EXIF leaves the pixels readable
        return ImageOps.exif_transpose(image)
    return image


def _decode_any(image: Image.Image) -> np.ndarray:
    """Return the pixels (h, w, 3) of an image that Pillow has opened."""
    image.load()
    upright = _upright(image)
    if upright.mode == "F" or (upright.mode == "I" and np.asarray(upright).max() > 0xFFFF):
        raise ValueError(f"pixels of mode {upright.mode}, which have no fixed range")
    if upright.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    elif upright.mode == "P":  # a palette may have transparency, which only RGBA preserves
        upright = upright.convert("RGBA")
    return np.array(upright.convert("RGB"))


def _fit(pixels: np.ndarray, size: tuple[int, int], fit: str) -> np.ndarray:
    """Fit an image (h, w, 3) to a size (H, W); return it as (3, H, W). See ``decode``."""
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if fit == CROP:
        scale = max(size[0] / height, size[1] / width)
        tall, wide = (max(1, round(side / scale)) for side in size)
        top, left = round((height - tall) / 2), round((width - wide) / 2)  # like torchvision's center_crop
        pixels = pixels[top : top + tall, left : left + wide]
    inner = size
    if fit == PAD:
        scale = min(size[0] / height, size[1] / width)
        inner = max(1, round(height * scale)), max(1, round(width * scale))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    scaled = F.interpolate(image, inner, mode="bilinear", align_corners=False, antialias=True)[0]
    if inner == size:
        return scaled.contiguous().numpy()
    padded = np.full((3, *size), _GREY, np.uint8)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    padded[:, top : top + inner[0], left : left + inner[1]] = scaled
    return padded


def _not_readable(name: str, reason: str) -> str:
    return f"{name}: not a readable image ({reason}); repair or remove the file"

"""The images of ``benchmarks.streaming``: JPEG files of noise, and tar shards."""

from __future__ import annotations

import io
import pathlib
import sys
import tarfile

import numpy as np
from PIL import Image

import shards

WIDTH, HEIGHT, SIDE, BATCH, WORKERS = 500, 375, 224, 32, 2


def make_photos(root: pathlib.Path, count: int) -> None:
    """Writes JPEG files of smooth noise with some grain, in four classes to train and as many to test."""
    random = np.random.default_rng(0)
    for number in range(count + 8):
        part = "train" if number < count else "test"
        target = root / part / f"class {number % 4}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.normal(0, 8, (HEIGHT, WIDTH, 1))
        for side in (4, 8, 16, 32, 64, 128):
            small = random.integers(0, 256, (side * 3 // 4 + 1, side, 3), dtype=np.uint8)
            large = Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            pixels = pixels + np.asarray(large, np.float32) / side**0.5
        low, high = pixels.min(), pixels.max()
        Image.fromarray(((pixels - low) / (high - low) * 255).astype(np.uint8)).save(target, quality=90)


def write_shards(folder: pathlib.Path, target: pathlib.Path, size: str) -> None:
    """Writes a folder as tar shards."""
    if shards.main(["write", str(folder), str(target), "--size-limit", size]):
        sys.exit("benchmarks: the shards could not be written")


def make_padded(root: pathlib.Path, count: int, size: int) -> None:
    """Writes JPEG files of 8x8 pixels, filled up to ``size`` bytes, in two classes to train and to test."""
    content = _tiny()
    for number in range(count + 2):
        part = "train" if number < count else "test"
        target = root / part / f"class {number % 2}" / f"{number:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.ljust(size, b"\0"))


def make_small(target: pathlib.Path, count: int) -> None:
    """Writes tar shards of 10,000 JPEG files of 8x8 pixels each, without an index."""
    target.mkdir()
    (target / "classes.txt").write_text("a\nb\n")
    content = _tiny()
    for part, images in (("train", count), ("test", 8)):
        for shard, first in enumerate(range(0, images, 10_000)):
            with tarfile.open(target / f"{part}-{shard:06d}.tar", "w") as tar:
                for number in range(first, min(images, first + 10_000)):
                    for ending, held in (("jpg", content), ("cls", b"%d" % (number % 2))):
                        member = tarfile.TarInfo(f"{number:08d}.{ending}")
                        member.size = len(held)
                        tar.addfile(member, io.BytesIO(held))


def _tiny() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (8, 8)).save(encoded, "jpeg")
    return encoded.getvalue()

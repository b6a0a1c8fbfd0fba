"""Plant near-duplicates and wrong labels among labelled images, and count the faults that the audit finds.

    python3 -m benchmarks.audit IMAGES [--net net.pt] [--images 2000] [--seeds 3]

IMAGES has a folder of images for each class. The benchmark uses the same number of images of each class, a
fifth of them in ``test``. It plants 20 copies of training images in ``test`` (as JPEG, mirrored, or cropped
by 5 %), and 30 images in the folder of another class. It counts these in the first 60 rows of ``audit.csv``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

import checkpoint

COPIES, WRONG, ROWS = 20, 30, 60


@dataclass(frozen=True)
class Planted:
    """The paths of the planted faults, relative to the folder.

    Attributes:
        copies: the copies in ``test``.
        wrong: the images with a wrong label.
    """

    copies: frozenset[str]
    wrong: frozenset[str]


def plant(
    source: pathlib.Path,
    target: pathlib.Path,
    images: int,
    seed: int,
    copies: int = COPIES,
    wrong: int = WRONG,
) -> Planted:
    """Write ``target/train/<class>/*`` and ``target/test/<class>/*`` with planted faults.

    Args:
        source: a folder with a folder of images for each class.
        target: a folder to create.
        images: the number of images, including the copies.
        seed: the seed that chooses the images.
        copies: the number of near-duplicates of training images to plant in ``test``.
        wrong: the number of images to put into the folder of another class.
    """
    random = np.random.default_rng(seed)
    classes = sorted(folder.name for folder in source.iterdir() if folder.is_dir())
    places: list[tuple[str, pathlib.Path]] = []  # the split and the original of each image
    for name in classes:
        files = sorted((source / name).iterdir())
        chosen = random.permutation(len(files))[: (images - copies) // len(classes)]
        parts = ["test" if number < len(chosen) // 5 else "train" for number in range(len(chosen))]
        places += [(part, files[index]) for part, index in zip(parts, chosen.tolist(), strict=True)]
    order = random.permutation(len(places)).tolist()
    mislabelled, others = set(order[:wrong]), order[wrong:]
    copied = [index for index in others if places[index][0] == "train"][:copies]
    wrongly, duplicates = set(), set()
    for index, (part, file) in enumerate(places):
        label = file.parent.name
        if index in mislabelled:
            label = str(random.choice([name for name in classes if name != label]))
        path = pathlib.Path(part, label, f"{classes.index(file.parent.name)}-{file.name}")
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / path)
        if index in mislabelled:
            wrongly.add(str(path))
    for number, index in enumerate(copied):
        file = places[index][1]
        path = pathlib.Path("test", file.parent.name, f"copy-{number:03}.{'png' if number % 3 else 'jpg'}")
        _change(Image.open(file).convert("RGB"), number % 3).save(target / path)
        duplicates.add(str(path))
    return Planted(frozenset(duplicates), frozenset(wrongly))


def _change(image: Image.Image, kind: int) -> Image.Image:
    """Return the image unchanged (``plant`` saves it as JPEG), mirrored, or cropped by 2.5 % at each edge."""
    if kind == 0:
        return image
    if kind == 1:
        return ImageOps.mirror(image)
    left, top = round(0.025 * image.width), round(0.025 * image.height)
    return image.crop((left, top, image.width - left, image.height - top))


def found(planted: Planted, table: pathlib.Path, rows: int = ROWS) -> tuple[int, int]:
    """Return the numbers of planted copies and of planted wrong labels in the first rows of ``audit.csv``."""
    with open(table, newline="") as file:
        first = list(csv.DictReader(file))[:rows]
    pairs = {name for row in first if row["kind"] == "leak" for name in (row["image"], row["other image"])}
    labels = {row["image"] for row in first if row["kind"] == "label"}
    return len(pairs & planted.copies), len(labels & planted.wrong)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each seed; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="IMAGES", type=pathlib.Path)
    parser.add_argument("--net", metavar="NET", help="the network for the features")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=32, help="side of the images, in pixels")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    print(f"| seed | copies of {COPIES} | wrong labels of {WRONG} | seconds |\n|---|---|---|---|")
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as scratch:
            folder, output = pathlib.Path(scratch, "images"), pathlib.Path(scratch, "audit")
            planted = plant(args.source, folder, args.images, seed)
            net = ["--net", args.net] if args.net else []
            size = ["--set", f"data.image_size={args.size}"]
            start, said = time.monotonic(), io.StringIO()
            with contextlib.redirect_stdout(said):
                code = checkpoint.main(["audit", str(folder), *net, *size, "--output", str(output)])
            if code:
                return code
            copies, wrong = found(planted, output / "audit.csv")
            print(f"| {seed} | {copies} | {wrong} | {time.monotonic() - start:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

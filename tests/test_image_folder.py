"""Image folders on disk: which files count, how they are decoded, the cache, and folders that cannot be used."""

import itertools
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import torch
from conftest import all_at_once, fault
from PIL import Image

import data
import host_lock
import image_cache
import image_folder
from data import DataConfig, ImageSet
from errors import InvalidInput
from image_folder import SPLITS

LEFT, RIGHT = (200, 40, 30), (240, 230, 90)
TRAIN = [(10, 0), (20, 0), (30, 1), (40, 1)]


def table(arguments: str, **rows):
    """Parametrises a test by name=(value, ...)."""
    return pytest.mark.parametrize(arguments, [pytest.param(*row, id=name) for name, row in rows.items()])


def save(path: pathlib.Path, image: Image.Image | int, **options) -> pathlib.Path:
    """Writes an image, or one of a single grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.new("L", (32, 32), image) if isinstance(image, int) else image).save(path, **options)
    return path


def read(root: pathlib.Path, split: str = "train") -> ImageSet:
    return data.load(DataConfig("imagefolder", str(root)), split)


def greys(kept: ImageSet) -> list[tuple[int, int]]:
    """A (grey, label) for each image of a single grey."""
    assert (kept.images == kept.images[:, :1, :1, :1]).all()
    return list(zip(kept.images[:, 0, 0, 0].tolist(), kept.labels.tolist(), strict=True))


def caches(place: pathlib.Path) -> dict[str, tuple[int, int]]:
    """When and as which file each cache was written."""
    assert [path for path in place.rglob(".*") if path.suffix in (".partial", ".progress", ".sidecar")] == []
    found = {str(path): path.stat() for path in place.rglob("*.pt")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Classes a and b: greys 10, 20 and 30, 40 to train, 50 and 60 to test."""
    root = tmp_path / "folder"
    for grey, path in enumerate(["train/a/1", "train/a/2", "train/b/1", "train/b/2", "test/a/1", "test/b/1"], start=1):
        save(root / f"{path}.bmp", grey * 10)
    return root


# ------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("file", "mode", "size"),
    [
        ("0.JPG", "RGB", (64, 64)),
        ("0.jpg", "CMYK", (64, 64)),
        ("0.jpeg", "L", (20, 50)),
        ("0.png", "RGB", (50, 20)),
        ("0.png", "P transparent", (32, 32)),
        ("0.PNG", "RGBA", (20, 50)),
        ("0.webp", "RGB", (64, 64)),
        ("0.bmp", "RGB", (20, 50)),
        ("0.gif", "P", (64, 64)),
        ("0.tif", "1", (32, 32)),
        ("0.tiff", "CMYK", (64, 64)),
        ("0.ppm", "RGB", (20, 50)),
        ("0.pgm", "L", (64, 64)),
    ],
)
def test_formats_modes_and_sizes(folder, file, mode, size):
    options: dict = {"quality": 95} if file.endswith(("jpg", "JPG", "jpeg", "webp")) else {}
    image = Image.new("RGB", size, LEFT)
    image.paste(RIGHT, (size[0] // 2, 0, *size))
    if mode == "1":
        image = image.convert("1", dither=Image.Dither.NONE)
    elif mode.startswith("P"):
        image = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
        options |= {"transparency": 0} if mode == "P transparent" else {}
    else:
        image = image.convert(mode)
    save(folder / "train/a" / file, image, **options)
    kept = read(folder)
    assert (kept.images.shape, kept.images.dtype) == ((5, 3, 32, 32), torch.uint8)
    assert kept.labels.tolist() == [0, 0, 0, 1, 1]
    colours = {"L": [(87,) * 3, (217,) * 3], "1": [(0,) * 3, (255,) * 3]}.get(mode, [LEFT, RIGHT])
    for colour, columns in zip(colours, (slice(0, 14), slice(18, 32)), strict=True):
        wanted = torch.tensor(colour)[:, None, None]
        assert (kept.images[0, :, :, columns].int() - wanted).abs().max() <= 10


def test_32_by_32_pixels_are_kept(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    save(folder / "train/a/0.png", Image.fromarray(pixels))
    assert np.array_equal(read(folder).images[0].permute(1, 2, 0), pixels)


@pytest.mark.parametrize("extension", ["png", "tiff"])
def test_16_bits_a_pixel(folder, extension):
    values = np.repeat(np.array([0, 0x0100, 0x8000, 0xFFFF], np.uint16), 256).reshape(32, 32)
    save(folder / f"train/a/0.{extension}", Image.fromarray(values))
    assert read(folder).images[0, :, ::8, 5].tolist() == [[0, 1, 128, 255]] * 3


@pytest.mark.parametrize(
    ("file", "orientation", "stored"),
    [
        ("0.jpg", 2, Image.Transpose.FLIP_LEFT_RIGHT),
        ("0.jpg", 3, Image.Transpose.ROTATE_180),
        ("0.jpg", 6, Image.Transpose.ROTATE_90),
        ("0.webp", 8, Image.Transpose.ROTATE_270),
    ],
)
def test_upright(folder, file, orientation, stored):
    upright = Image.new("RGB", (64, 96), LEFT)
    upright.paste(RIGHT, (0, 0, 32, 48))
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(folder / "train/a" / file, upright.transpose(stored), exif=exif, quality=95)
    image = read(folder).images[0].int()
    for row, column, colour in [(4, 4, RIGHT), (4, 27, LEFT), (27, 4, LEFT), (27, 27, LEFT)]:
        assert (image[:, row, column] - torch.tensor(colour)).abs().max() <= 10


def test_damaged_exif_is_no_damaged_image(folder):
    save(folder / "train/a/0.png", Image.new("L", (32, 32), 77), exif=b"no EXIF at all")
    assert greys(read(folder)) == [(77, 0), *TRAIN]


def test_ignored(folder):
    for path in ["train/.hidden/1.bmp", "train/a/.ipynb_checkpoints/1.bmp", "train/a/._1.bmp"]:
        save(folder / path, 99)
    for path in ["train/a/notes.txt", "train/a/.DS_Store", "train/notes.bmp"]:
        (folder / path).write_bytes(b"no image")
    kept = read(folder)
    assert kept.classes == ("a", "b")
    assert greys(kept) == TRAIN


def test_classes_and_files_in_sorted_order_whichever_worker_decodes_them(tmp_path):
    classes = ["zebra", "Cat 2", "ant"]
    for split, count in [("test", 1), ("train", 53)]:
        for number, name in itertools.product(reversed(range(count)), classes):
            side = 1500 if name == "Cat 2" and number < 8 else 8  # the first chunk is the last to be done
            image = Image.new("RGB", (side, side), (sorted(classes).index(name), number, 200))
            save(tmp_path / split / name / f"{number:03}.png", image)
    kept = read(tmp_path)
    assert kept.classes == ("Cat 2", "ant", "zebra")
    wanted = [[label, number, 200] for label in range(3) for number in range(53)]
    assert kept.images[:, :, 0, 0].tolist() == wanted
    assert (kept.images == kept.images[:, :, :1, :1]).all()
    assert (kept.labels.dtype, kept.labels.tolist()) == (torch.int64, [label for label, _, _ in wanted])
    assert read(tmp_path, "test").labels.tolist() == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------- cache


def test_counted_without_decoding(folder):
    config = DataConfig("imagefolder", str(folder))
    assert [data.count(config, split) for split in SPLITS] == [4, 2]
    assert caches(folder) == {}


def test_decoded_once(folder):
    for split, wanted in [("train", TRAIN), ("test", [(50, 0), (60, 1)])]:
        assert greys(read(folder, split)) == wanted
    before = caches(folder)
    assert len(before) == 2
    assert greys(read(folder, "test")) == [(50, 0), (60, 1)]
    assert greys(read(folder)) == TRAIN
    assert caches(folder) == before


def test_decoded_by_one_of_many_processes(folder):
    def work():
        assert greys(read(folder)) == TRAIN

    all_at_once(work, work, work)
    assert len(caches(folder)) == 1


@table(
    "change, wanted",
    rewritten=(lambda root: save(root / "train/a/1.bmp", 99), [(99, 0), *TRAIN[1:]]),
    added=(lambda root: save(root / "train/a/3.bmp", 99), [*TRAIN[:2], (99, 0), *TRAIN[2:]]),
    removed=(lambda root: (root / "train/a/1.bmp").unlink(), TRAIN[1:]),
    moved=(lambda root: (root / "train/a/2.bmp").rename(root / "train/b/0.bmp"), [(10, 0), (20, 1), *TRAIN[2:]]),
    new_class=(
        lambda root: [save(root / split / "Z/1.bmp", 99) for split in SPLITS],
        [(99, 0), *((grey, label + 1) for grey, label in TRAIN)],
    ),
)
def test_change_is_noticed(folder, change, wanted):
    assert greys(read(folder)) == TRAIN
    change(folder)
    assert greys(read(folder)) == wanted
    assert len(caches(folder)) == 1


@table(
    "damage",
    half=(lambda cache: os.truncate(cache, cache.stat().st_size // 2),),
    empty=(lambda cache: cache.write_bytes(b""),),
    garbage=(lambda cache: cache.write_bytes(b"garbage" * 1000),),
    no_fingerprint=(lambda cache: torch.save({"images": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4)}, cache),),
    no_cache=(lambda cache: torch.save([1, 2], cache),),
    half_of_the_pixels=(lambda cache: os.truncate(cache.with_suffix(".raw"), 100),),
    no_pixels=(lambda cache: cache.with_suffix(".raw").unlink(),),
)
def test_damaged_cache_is_mended(folder, damage):
    read(folder)
    (cache,) = folder.glob(".*.pt")
    damage(cache)
    assert greys(read(folder)) == TRAIN
    mended = caches(folder)
    assert greys(read(folder)) == TRAIN
    assert caches(folder) == mended


def test_read_only_root(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    save(other / "train/a/1.bmp", 99)
    before, kept = sorted(folder.rglob("*")), []
    for _ in range(2):
        assert greys(read(folder)) == TRAIN
        assert greys(read(other)) == [(99, 0), *TRAIN[1:]]
        kept.append(caches(tmp_path / "cache"))
    assert sorted(folder.rglob("*")) == before
    assert len(kept[0]) == 2
    assert kept[1] == kept[0]


def test_decoding_goes_on_where_it_was_interrupted(folder, monkeypatch):
    for index in range(200):
        save(folder / f"train/a/more{index}.bmp", 99)
    monkeypatch.setattr(image_folder, "_CHUNK", 10)
    noted = []

    class Noting(image_cache._Progress):
        def __call__(self, done):
            self._noted = 0.0  # every time
            super().__call__(done)
            noted.append(done)
            if done >= 100:
                raise KeyboardInterrupt

    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(image_cache, "_Progress", Noting)
        read(folder)
    decode, begun = image_folder._decode, []

    def resumed(files, size, split, target, start, done):
        begun.append(start)
        decode(files, size, split, target, start, done)

    monkeypatch.setattr(image_folder, "_decode", resumed)
    assert sorted(greys(read(folder))) == sorted([*TRAIN, *[(99, 0)] * 200])
    assert begun == [100]
    assert len(caches(folder)) == 1


def test_decoding_goes_on_where_all_but_the_labels_were_written(folder, monkeypatch):
    monkeypatch.setattr(image_cache.time, "monotonic", itertools.count(step=2).__next__)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(image_cache.torch, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        read(folder)
    (progress,) = folder.rglob("*.progress")
    assert json.loads(progress.read_text())["done"] == len(TRAIN)
    assert sorted(greys(read(folder))) == sorted(TRAIN)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10_000))
    line = fault(read, folder)
    assert "4 images of 32x32 need" in line and "only 0.0 MiB are free" in line and "make room" in line
    assert caches(folder) == {} and list(folder.rglob("*.raw")) == []


# ---------------------------------------------------------------------------------------------- bad folders


def gone(*paths: str):
    def damage(root):
        for path in paths:
            shutil.rmtree(root / path)

    return damage


def cut(path: pathlib.Path) -> None:
    save(path, Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)))
    path.write_bytes(path.read_bytes()[:-1500])


def test_every_file_that_cannot_be_read_is_named_at_once(folder):
    for index in range(image_folder._SHOWN + 3):
        (folder / f"train/b/bad{index:02}.png").write_text("no image")
    with pytest.raises(InvalidInput) as caught:
        read(folder)
    *named, more = caught.value.faults
    assert [line.split(": ")[0][-9:] for line in named] == [f"bad{index:02}.png" for index in range(len(named))]
    assert len(named) == image_folder._SHOWN and "3 more files are not readable" in more
    assert caches(folder) == {}


def test_a_folder_in_the_caches_place_is_named(folder):
    (folder / ".images-train-32x32.raw").mkdir()
    assert fault(read, folder).startswith(f"{folder}/.images-train-32x32.raw: is a folder")


@table(
    "damage, parts",
    no_root=(gone(""), ["data.root: {}:", "'train'"]),
    no_test=(gone("test"), ["data.root: {}:", "'test'"]),
    no_class=(gone("train/a", "train/b"), ["{}/train:", "no class"]),
    one_class=(gone("train/b"), ["{}/train:", "only the class 'a'"]),
    empty_class=(lambda root: [path.unlink() for path in root.glob("train/b/*")], ["{}/train/b:", "no image"]),
    class_not_in_test=(gone("test/b"), ["data.root: {}:", "only in train: b;", "only in test: none"]),
    class_not_in_train=(lambda root: save(root / "test/c/1.png", 1), ["only in train: none;", "only in test: c"]),
    truncated=(lambda root: cut(root / "train/b/0.jpg"), ["{}/train/b/0.jpg:", "not a readable image", "truncated"]),
    link=(lambda root: (root / "train/b/0.png").symlink_to("nowhere"), ["{}/train/b/0.png:", "No such file"]),
    pipe=(lambda root: os.mkfifo(root / "train/b/0.png"), ["{}/train/b/0.png:", "is no file"]),
    name=(lambda root: os.mkdir(os.fsencode(root / "train") + b"/\xff"), ["{}/train:", "no UTF-8 name"]),
    text=(lambda root: (root / "train/b/0.png").write_text("a\nb"), ["{}/train/b/0.png:", "not a readable image"]),
)
def test_bad_folder(folder, damage, parts):
    damage(folder)
    there = folder.exists()
    line = fault(read, folder)
    assert [part for part in parts if part.format(folder) not in line] == []
    assert folder.exists() == there
    assert caches(folder) == {}

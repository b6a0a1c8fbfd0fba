"""The image files of a folder, and how they are decoded."""

import io
import itertools
import unittest.mock

import numpy as np
import pytest
import torch
from folders import LEFT, RIGHT, TRAIN, greys, read, save
from PIL import EpsImagePlugin, Image
from support import error_line

from classify.images import decode as decoder
from classify.images.decode import FORMATS, UnreadableImage, decode
from classify.images.listing import EXTENSIONS
from deepspeed_trial.errors import InvalidInput


@pytest.mark.parametrize(
    "file, mode, size",
    [
        ("0.JPG", "RGB", (64, 64)), ("0.jpg", "CMYK", (64, 64)), ("0.jpeg", "L", (20, 50)), ("0.png", "RGB", (50, 20)),
        ("0.png", "P transparent", (32, 32)), ("0.PNG", "RGBA", (20, 50)), ("0.webp", "RGB", (64, 64)),
        ("0.bmp", "RGB", (20, 50)), ("0.gif", "P", (64, 64)), ("0.tif", "1", (32, 32)), ("0.tiff", "CMYK", (64, 64)),
        ("0.ppm", "RGB", (20, 50)), ("0.pgm", "L", (64, 64)),
    ],
)  # fmt: skip
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


def test_pixels_keep_their_values_and_of_16_bits_the_high_ones(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    save(folder / "train/a/0.png", Image.fromarray(pixels))
    assert np.array_equal(read(folder).images[0].permute(1, 2, 0), pixels)
    values = np.repeat(np.array([0, 0x0100, 0x8000, 0xFFFF], np.uint16), 256).reshape(32, 32)
    for number, extension in enumerate(("png", "tiff")):
        save(folder / f"train/a/0{number}.{extension}", Image.fromarray(values))
        assert read(folder).images[1 + number, :, ::8, 5].tolist() == [[0, 1, 128, 255]] * 3


def test_exif_turns_a_webp_upright(folder):
    upright = Image.new("RGB", (64, 96), LEFT)
    upright.paste(RIGHT, (0, 0, 32, 48))
    exif = Image.Exif()
    exif[0x0112] = 8
    save(folder / "train/a/0.webp", upright.transpose(Image.Transpose.ROTATE_270), exif=exif, quality=95)
    image = read(folder).images[0].int()
    for row, column, colour in [(4, 4, RIGHT), (4, 27, LEFT), (27, 4, LEFT), (27, 27, LEFT)]:
        assert (image[:, row, column] - torch.tensor(colour)).abs().max() <= 10


def test_hidden_and_other_files_are_no_images_but_damaged_exif_is_no_damage(folder):
    for path in ["train/.hidden/1.bmp", "train/a/.ipynb_checkpoints/1.bmp", "train/a/._1.bmp"]:
        save(folder / path, 99)
    for path in ["train/a/notes.txt", "train/a/.DS_Store", "train/notes.bmp"]:
        (folder / path).write_bytes(b"no image")
    save(folder / "train/a/0.png", Image.new("L", (32, 32), 77), exif=b"no EXIF at all")
    kept = read(folder)
    assert kept.classes == ("a", "b")
    assert greys(kept) == [(77, 0), *TRAIN]


def test_classes_and_files_are_sorted_whichever_worker_decodes_them(tmp_path):
    classes = ["zebra", "Cat 2", "ant"]
    for split, count in [("test", 1), ("train", 53)]:
        for number, name in itertools.product(reversed(range(count)), classes):
            side = 1500 if name == "Cat 2" and number < 8 else 8  # the first chunk is done last
            image = Image.new("RGB", (side, side), (sorted(classes).index(name), number, 200))
            save(tmp_path / split / name / f"{number:03}.png", image)
    kept = read(tmp_path)
    assert kept.classes == ("Cat 2", "ant", "zebra")
    wanted = [[label, number, 200] for label in range(3) for number in range(53)]
    assert kept.images[:, :, 0, 0].tolist() == wanted
    assert (kept.images == kept.images[:, :, :1, :1]).all()
    assert (kept.labels.dtype, kept.labels.tolist()) == (torch.int64, [label for label, _, _ in wanted])
    assert read(tmp_path, "test").labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_has_the_pixels_that_pillow_decodes(mode):
    random = np.random.default_rng(0)
    for height, width, options in ((40, 31, {"quality": 75}), (64, 48, {"quality": 95, "progressive": True})):
        written = io.BytesIO()
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(written, "jpeg", **options)
        wanted = np.asarray(Image.open(written).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(decode(written.getvalue(), (height, width), "x"), wanted)


def test_a_large_jpeg_is_made_smaller_while_it_is_decoded():
    rows, columns = np.mgrid[0:400, 0:600]
    photo = Image.fromarray(np.stack([rows // 2, columns // 3, rows // 4 + 50], 2).astype(np.uint8))
    written, plain = io.BytesIO(), io.BytesIO()
    photo.save(written, "jpeg", quality=95)
    photo.save(plain, "png")
    small, wanted = (decode(each.getvalue(), (50, 50), "x").astype(int) for each in (written, plain))
    assert np.abs(small - wanted).max() <= 3


@pytest.mark.parametrize("orientation", [1, 2, 3, 6, 8, "damaged"])
def test_a_jpeg_with_exif_is_decoded_as_one_without_and_then_turned(orientation):
    rows, columns = np.mgrid[0:400, 0:600]
    photo = Image.fromarray(np.stack([rows // 2, columns // 3, rows * columns % 251], 2).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation if isinstance(orientation, int) else 1
    marked = exif.tobytes() if isinstance(orientation, int) else b"Exif\0\0no EXIF at all"
    plain, turned = io.BytesIO(), io.BytesIO()
    photo.save(plain, "jpeg", quality=95)
    photo.save(turned, "jpeg", quality=95, exif=marked)
    turn = {
        2: lambda pixels: pixels[:, :, ::-1],
        3: lambda pixels: pixels[:, ::-1, ::-1],
        6: lambda pixels: pixels.transpose(0, 2, 1)[:, :, ::-1],
        8: lambda pixels: pixels.transpose(0, 2, 1)[:, ::-1],
    }.get(orientation, lambda pixels: pixels)
    size = (40, 60)  # a tenth: the decoder shrinks them to an eighth first
    wanted = turn(decode(plain.getvalue(), size, "x")).astype(int)
    found = decode(turned.getvalue(), wanted.shape[1:], "x")
    # Scaling rounds after the rows and again after the columns, which a turn on the side swaps
    assert np.abs(found - wanted).max() <= (orientation in (6, 8))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(x) print\n%%EOF\n"


def test_no_format_that_runs_a_program_is_opened(monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **_: started.append(arguments))
    line = error_line(decode, EPS, (32, 32), "evil.jpg")
    assert line.startswith("evil.jpg: not a readable image (cannot identify image file)") and not started
    decoder._register_heic()
    known = Image.registered_extensions()
    assert {known[extension] for extension in EXTENSIONS} == {*FORMATS, "HEIF"}


def test_a_lack_of_memory_is_no_fault_of_the_image(monkeypatch):
    written = io.BytesIO()
    Image.new("RGB", (32, 32)).save(written, "png")
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(decoder, "_fit", unittest.mock.Mock(side_effect=error))
        with pytest.raises(InvalidInput, match="no memory left to decode it") as caught:
            decode(written.getvalue(), (32, 32), "x")
        assert not isinstance(caught.value, UnreadableImage)

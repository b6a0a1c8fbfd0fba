"""Photos of phones and of people: HEIC, files of other kinds, names in any language."""

import io
import sys

import numpy as np
import pillow_heif
import pytest
import torch
from folders import LEFT, RIGHT, save
from PIL import Image
from sources import opened
from support import error_line, overrides

import train as program
from classify.config.rules import FITS
from classify.images import decode as decoder
from classify.images.decode import MissingPackage, decode, decode_image
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.reports.overview import describe_passed_over
from workbench.publish import serve

BATCH = overrides(hyperparameters__overwrite_deepspeed_args__train_batch_size=2)
NET = overrides(hyperparameters__net="airbench", hyperparameters__net_args="{width: 2}")


def halves(width: int = 64, height: int = 48) -> Image.Image:
    """An image of two colours, the left and the right half."""
    image = Image.new("RGB", (width, height), LEFT)
    image.paste(RIGHT, (width // 2, 0, width, height))
    return image


def heic(image: Image.Image, **options) -> bytes:
    written = io.BytesIO()
    pillow_heif.from_pillow(image).save(written, quality=95, **options)
    return written.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Three classes as people leave them."""
    root = tmp_path / "Größe"
    for name in ("Bär", "Katze", "Öl"):
        for number in range(5):
            save(root / name / f"{number} schön.jpg", halves())
    (root / "Bär/IMG_1.HEIC").write_bytes(heic(halves()))
    save(root / "Öl/0.avif", halves(), quality=95)
    save(root / "Öl/0.jpg", halves().convert("CMYK"), quality=95)
    save(root / "Öl/16.png", Image.fromarray(np.full((32, 32), 0x8000, np.uint16)))
    for stray in ("Bär/notes.txt", "Öl/clip.MOV", "liesmich.txt", "lose.jpg", "Öl/README", "Öl/.DS_Store"):
        (root / stray).write_bytes(b"no image")
    return root


def plan(root, **section) -> DataPlan:
    return opened(root, **{"image_size": 32, "decode": "once", **section})


def test_a_folder_of_photos_is_read_and_the_other_files_are_counted(photos, capsys):
    opened = plan(photos)
    assert opened.classes == ("Bär", "Katze", "Öl")
    assert [opened.count(split) for split in ("train", "test")] == [15, 4]
    assert (
        describe_passed_over(opened.passed_over)
        == "passed over: 2 .txt, 1 without an extension, 1 .jpg, 1 .mov"
    )
    images = opened.load("train").images
    assert images.shape == (19, 3, 32, 32)
    listing = opened.listing("train")
    assert listing is not None
    (first,) = (index for index in range(19) if listing.name(index).endswith("HEIC"))
    for colour, column in ((LEFT, 4), (RIGHT, 28)):
        assert np.abs(images[first, :, 16, column].numpy().astype(int) - colour).max() < 12
    assert describe_passed_over(plan(photos, unreadable="skip").passed_over).startswith("passed over: 2 .txt")
    data = overrides(data__dataset="imagefolder", data__root=photos, data__image_size=32)
    assert program.main(["--config", "experiments/digits.yaml", *NET, *BATCH, *data, "--check"]) == 0
    assert "train.py: files passed over: 2 .txt, 1 with" in capsys.readouterr().err


def test_files_beside_parts_are_counted_and_kinds_are_limited(folder):
    for path in (
        "notes.md",
        "train/list.csv",
        "test/a/x.csv",
        *(f"train/b/x.{kind}x" for kind in "abcdefghi"),
    ):
        (folder / path).write_bytes(b"no image")
    shown = describe_passed_over(DataPlan.resolve(DataSettings("imagefolder", str(folder))).passed_over)
    assert shown.startswith("passed over: 2 .csv, 1 .ax, ") and shown.endswith("1 .gx, 3 others")


def test_heic_is_upright_and_of_ten_bits_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = halves().transpose(Image.Transpose.ROTATE_90)
    for content in (heic(halves()), heic(turned, exif=exif.tobytes())):
        pixels = decode(content, (48, 64), "x").astype(int)
        assert np.abs(pixels[:, 24, 4] - LEFT).max() < 12 and np.abs(pixels[:, 24, 60] - RIGHT).max() < 12
    deep = pillow_heif.from_bytes("RGB;16", (64, 48), np.full((48, 64, 3), 0x8000, "<u2").tobytes())
    written = io.BytesIO()
    deep.save(written, quality=-1)
    assert np.abs(decode(written.getvalue(), (32, 32), "x").astype(int) - 128).max() <= 2
    assert "x: not a readable image" in error_line(decode, heic(halves())[:200], (32, 32), "x")


def test_heic_without_its_package_is_one_line_that_names_the_package(photos, monkeypatch):
    for number in range(3):
        (photos / f"Katze/{number}.heic").write_bytes(heic(halves()))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    decoder._register_heic.cache_clear()
    line = "is HEIC, which needs pillow-heif; pip install pillow-heif"
    for section in ({}, {"unreadable": "skip"}):
        with pytest.raises(MissingPackage) as caught:
            plan(photos, **section).load("train")
        (error,) = caught.value.errors
        assert error.startswith(f"{photos}/") and error.endswith(f": {line}")
    assert error_line(serve.answer, None, heic(halves())) == f"image: {line}"


def test_an_image_of_another_shape_is_cropped_padded_or_stretched(tmp_path):
    written = io.BytesIO()
    halves(90, 30).save(written, "png")
    found = {fit: decode(written.getvalue(), (40, 60), "x", fit).astype(int) for fit in FITS}
    assert np.array_equal(found["crop"], decode(written.getvalue(), (40, 60), "x"))
    seen, border = slice(11, 29), [*range(10), *range(30, 40)]  # 20 rows: two thirds of 30
    for fit, rows in (("crop", slice(40)), ("pad", seen), ("stretch", slice(40))):
        for columns, colour in ((slice(28), LEFT), (slice(32, 60), RIGHT)):
            assert np.abs(found[fit][:, rows, columns] - np.array(colour)[:, None, None]).max() <= 1, fit
    assert (found["pad"][:, border] == 128).all()
    marked = Image.new("RGB", (90, 30), LEFT)
    marked.paste(RIGHT, (0, 0, 10, 30))  # at the border, which a crop loses
    marked.save(written := io.BytesIO(), "jpeg", quality=95)
    ends = {fit: decode(written.getvalue(), (40, 60), "x", fit)[:, 20, 2].astype(int) for fit in FITS}
    assert [np.abs(end - RIGHT).max() < 12 for end in ends.values()] == [False, True, True]


@pytest.mark.parametrize("state", ["once", "stream"])
def test_runs_with_another_fit_have_other_files_of_decoded_images(photos, state):
    for fit in FITS:
        opened = plan(photos, decode=state, fit=fit, image_size=[32, 24])
        images, listing = opened.load("train"), opened.listing("train")
        assert images.rows is not None and listing is not None
        names = map(listing.name, images.rows.tolist())
        wanted = np.stack([decode_image(name, (32, 24), fit) for name in names])
        assert np.array_equal(images.select(torch.arange(len(images))), wanted)


def test_a_fit_is_of_image_files_alone():
    settings = DataSettings.parse({"dataset": "digits", "fit": "pad"})
    assert error_line(DataPlan.resolve, settings) == "data.fit: 'pad': digits has no image files; remove it"

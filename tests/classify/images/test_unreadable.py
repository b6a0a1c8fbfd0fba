"""``data.unreadable: skip``: training without the images that cannot be decoded."""

import pathlib

import numpy as np
import pytest
import torch
from folders import TRAIN, greys, save, table
from sources import copied, everything, load, opened
from support import all_at_once, error_line, overrides

import checkpoint
import shards
import train as program
from classify.images import pixels
from classify.images.plan import UNREADABLE, DataPlan
from classify.images.settings import DataSettings
from classify.images.sources import left_out

SKIP = {"unreadable": "skip"}


@pytest.fixture
def spoilt(folder) -> pathlib.Path:
    """The folder with three more files that are no images."""
    for path in ("train/a/0.png", "train/b/3.jpg", "test/b/0.webp"):
        (folder / path).write_bytes(b"")
    return folder


@pytest.fixture
def scanned(monkeypatch) -> list[str]:
    """The parts whose images were tried."""
    parts: list[str] = []
    try_all = left_out.try_all

    def noted(images, size, split, *more):
        parts.append(split.split()[0])
        return try_all(images, size, split, *more)

    monkeypatch.setattr(left_out, "try_all", noted)
    monkeypatch.setattr(pixels, "try_all", noted)
    return parts


@pytest.mark.parametrize("decode", ["once", "stream"])
def test_images_are_left_out_counted_and_named(spoilt, scanned, decode):
    for _ in range(2):
        splits = opened(spoilt, decode=decode, **SKIP)
        assert [splits.count(split) for split in splits.names] == [4, 2]
        names = [line.partition(": not a readable image (")[0] for line in splits.left_out]
        assert names == [f"{spoilt}/{path}" for path in ("train/a/0.png", "train/b/3.jpg", "test/b/0.webp")]
        kept = load("imagefolder", spoilt, decode=decode, **SKIP)
        assert list(zip(everything(kept)[:, 0, 0, 0].tolist(), kept.labels.tolist(), strict=True)) == TRAIN
    assert scanned == ["train", "test"]  # once


def test_one_of_many_processes_looks_and_a_changed_folder_is_looked_at_again(spoilt, scanned, capsys):
    def work():
        assert len(opened(spoilt, **SKIP).left_out) == 3

    all_at_once(work, work, work)
    before = opened(spoilt, **SKIP)
    assert not scanned and str(before.left_out_identity).startswith("left out: 3, digest ")
    save(spoilt / "train/a/0.png", 5)
    after = opened(spoilt, **SKIP)
    assert greys(load("imagefolder", spoilt, **SKIP)) == [(5, 0), *TRAIN]
    assert len(after.left_out) == 2 and after.left_out_identity != before.left_out_identity
    (spoilt / ".images-train-32x32.unreadable").write_text('{"fingerprint": 1')
    assert opened(spoilt, **SKIP).left_out == after.left_out
    assert checkpoint.main(["caches", str(spoilt), "--clear"]) == 0
    assert not list(spoilt.glob(".*.unreadable"))
    for path in (spoilt / "train/b/3.jpg", spoilt / "test/b/0.webp"):
        path.unlink()
    assert opened(spoilt, **SKIP).left_out_identity is None


def test_shards_lose_images_and_windows_the_shards_that_have_none_left(photos, tmp_path):
    root = copied(photos, tmp_path / "photos")
    files = sorted(path for path in (root / "train").rglob("*.*") if path.is_file())
    spoilt = [file for file in files if file.name in ("1.png", "2.webp")]
    for file in spoilt:
        file.write_bytes(b"no image" * 1000)
    target = tmp_path / "shards"
    assert shards.main(["write", str(root), str(target), "--size-limit", "20KB"]) == 0
    wanted = load("imagefolder", root, **SKIP)
    for decode in ("once", "stream"):
        found = load("webdataset", target, decode=decode, **SKIP)
        assert len(found) == len(files) - len(spoilt) and torch.equal(found.labels, wanted.labels)
        assert torch.equal(everything(found), everything(wanted))
    settings = DataSettings.parse(
        {"dataset": "webdataset", "root": str(target), "window": 2, "decode": "stream", **SKIP}
    )
    splits = DataPlan.resolve(settings)
    assert splits.window == 2
    windows = splits.windows("train")
    assert windows is not None
    order, _ = windows.order(np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(len(wanted)))
    listing = splits.listing("train")
    assert listing
    kept = listing.shards_with(splits.kept["train"])
    assert len(kept) < len(listing.shards) and set(windows.shards.tolist()) == set(range(len(kept)))
    assert all(line.startswith(f"{target}/train-") for line in splits.left_out)


@table(
    "change, said",
    class_is_empty=(lambda root: [file.write_bytes(b"") for file in (root / "train/b").iterdir()], "data.unreadable: 'skip': none of the 3 images of the class 'b' in 'train' can be read; replace some"),
    missing=(lambda root: (root / "train/b/5.png").symlink_to("nowhere"), "/train/b/5.png: cannot be used ([Errno 2] No such file"),
)  # fmt: skip
def test_faults_of_more_than_an_image_still_end_the_run(spoilt, change, said):
    change(spoilt)
    assert said in error_line(lambda: opened(spoilt, **SKIP).count("train"))


def test_a_dataset_without_image_files_skips_none():
    settings = DataSettings.parse({"dataset": "digits", **SKIP})
    line = "data.unreadable: 'skip': digits has no image files; remove it"
    assert error_line(DataPlan.resolve, settings) == line


def test_the_check_opens_every_image_if_asked(spoilt, capsys):
    net = overrides(hyperparameters__net="airbench", hyperparameters__net_args="{width: 2}")
    section = overrides(data__dataset="imagefolder", data__root=spoilt, data__image_size=32)
    batch = overrides(hyperparameters__overwrite_deepspeed_args__train_batch_size=2)
    arguments = ["--config", "experiments/digits.yaml", *net, *section, *batch]
    assert program.main([*arguments, "--check"]) == 0
    capsys.readouterr()
    assert program.main([*arguments, "--check", "images"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if ": not a readable image (" in line]) == 3
    skip = overrides(data__unreadable="skip")
    assert program.main([*arguments, *skip, "--check", "images"]) == 0
    assert "4 to train, 2 to validate, 3 unreadable and left out, 2 classes" in capsys.readouterr().err


def test_a_run_names_what_it_leaves_out_and_a_resume_with_another_set_is_refused(
    image_folder, tmp_path, train
):
    root = copied(image_folder, tmp_path / "photos")
    spoilt = [root / "train/digit 1/003.png", root / "train/digit 2/007.png"]
    content = [file.read_bytes() for file in spoilt]
    for file in spoilt:
        file.write_bytes(b"no image")
    net = overrides(hyperparameters__net="airbench", hyperparameters__net_args="{width: 2}")
    section = overrides(
        data__dataset="imagefolder", data__root=root, data__image_size=32, data__unreadable="skip"
    )
    arguments = ["--config", "experiments/digits.yaml", *net, *section]
    two = overrides(hyperparameters__max_length="{batches: 2}")
    first = train(*arguments, *two)
    assert first.code == 0, first.stderr
    assert "158 to train" in first.stdout and "2 unreadable and left out" in first.stdout
    listed = (first.output / UNREADABLE).read_text()
    assert [line.split(": ")[0] for line in listed.splitlines()] == [str(file) for file in spoilt]
    both = train(*arguments, *two, processes=2)
    assert both.code == 0, both.stderr
    assert (both.output / UNREADABLE).read_text() == listed
    spoilt[0].write_bytes(content[0])
    more = overrides(hyperparameters__max_length="{batches: 3}")
    again = train(*arguments, *more, "--resume", "latest", output=first.output)
    assert again.code == 2
    line = "data.unreadable: 'left out: 1, digest "
    assert any(
        line in each and "was made with 'left out: 2, digest " in each for each in again.stderr.splitlines()
    )

"""The cache of an image folder, and invalid folders."""

import contextlib
import errno
import faulthandler
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
import torch
from folders import TRAIN, caches, failing, greys, read, save, table
from PIL import Image
from support import all_at_once, error_line, fork

import checkpoint
from classify.images import listing, pixel_files, pixels
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.images.sources.image_folder import find_images
from deepspeed_trial import host_lock
from deepspeed_trial.errors import InvalidInput, TrainingStopped


@pytest.fixture
def read_only(tmp_path, monkeypatch) -> pathlib.Path:
    """No folder can be written to: the place of the caches instead."""
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_images_are_counted_without_and_decoded_with_a_cache(folder):
    source = DataPlan.resolve(DataSettings("imagefolder", str(folder)))
    assert [source.count(split) for split in ("train", "test")] == [4, 2]
    assert caches(folder) == {}
    for _ in range(2):
        for split, wanted in [("train", TRAIN), ("test", [(50, 0), (60, 1)])]:
            assert greys(read(folder, split)) == wanted
        before = caches(folder)
    assert len(before) == 2
    assert caches(folder) == before


def test_one_of_many_processes_decodes(folder):
    def work():
        assert greys(read(folder)) == TRAIN

    all_at_once(work, work, work)
    assert len(caches(folder)) == 1


@pytest.mark.parametrize("place", ["the folder", "another place"])
def test_a_process_waits_only_for_its_own_images(folder, request, place):
    if place == "another place":
        request.getfixturevalue("read_only")
    read(folder, "test")
    with contextlib.ExitStack() as held:  # other processes decode the training images and the test images
        for name in ("images-train-32x32", "images-test-32x32"):
            held.enter_context(host_lock.host_lock(folder, name, "data.root"))
        larger = DataSettings("imagefolder", str(folder), image_size=64)
        all_at_once(lambda: DataPlan.resolve(larger).load("train"), lambda: read(folder, "test"))
        (waiting,) = fork(lambda: read(folder))
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(300)
    assert waiting.exitcode == 0


@pytest.mark.parametrize("fit", ["pad", "stretch"])
def test_caches_of_every_fit_are_listed_and_cleared(folder, fit, capsys):
    DataPlan.resolve(DataSettings("imagefolder", str(folder), fit=fit)).load("train")
    assert checkpoint.main(["caches", str(folder), "--clear"]) == 0
    assert f"/.images-train-{fit}-32x32.raw" in capsys.readouterr().out
    assert not list(folder.glob(".images-*.raw"))


def test_the_place_of_a_cache_is_shown_listed_and_cleared(folder, tmp_path, monkeypatch, capsys):
    read(folder)
    said = capsys.readouterr().err
    raw = folder / ".images-train-32x32.raw"
    clear = f"python3 checkpoint.py caches {folder} --clear"
    assert said == f"4 images of 32x32 are stored decoded in {raw} (0.0 MiB); to remove this file: {clear}\n"
    kept = read(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(host_lock.os, "access", lambda *_: False)
        read(folder, "test")
    stand_in = host_lock.stand_in(folder) / ".images-test-32x32.raw"
    (folder / ".images-other.pt").write_text("another's")
    capsys.readouterr()
    assert checkpoint.main(["caches", str(folder)]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[2] for line in listed.splitlines()[:2]] == [str(raw), str(stand_in)]
    assert listed.splitlines()[2] == "0.0 MiB of decoded images are stored"
    assert len(caches(folder)) + len(caches(tmp_path / "cache")) == 3
    with host_lock.host_lock(folder, "images-train-32x32", "data.root"):
        assert checkpoint.main(["caches", str(folder), "--clear"]) == 0
    assert "a process is writing it; not removed" in capsys.readouterr().out
    assert raw.exists() and not stand_in.exists()
    assert checkpoint.main(["caches", str(folder), "--clear"]) == 0
    assert "0.0 MiB of decoded images are stored, 0.0 MiB removed" in capsys.readouterr().out
    assert greys(kept) == TRAIN  # a training has the file open
    left = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert left == {"train", "test", ".images-other.pt"}


@table(
    "change, wanted",
    rewritten=(lambda root: save(root / "train/a/1.bmp", 99), [(99, 0), *TRAIN[1:]]),
    added=(lambda root: save(root / "train/a/3.bmp", 99), [*TRAIN[:2], (99, 0), *TRAIN[2:]]),
    removed=(lambda root: (root / "train/a/1.bmp").unlink(), TRAIN[1:]),
    moved=(lambda root: (root / "train/a/2.bmp").rename(root / "train/b/0.bmp"), [(10, 0), (20, 1), *TRAIN[2:]]),
    new_class=(lambda root: [save(root / f"{split}/Z/1.bmp", 99) for split in ("train", "test")], [(99, 0), *((grey, label + 1) for grey, label in TRAIN)]),
)  # fmt: skip
def test_a_change_of_the_folder_is_noticed(folder, change, wanted):
    assert greys(read(folder)) == TRAIN
    change(folder)
    assert greys(read(folder)) == wanted
    assert len(caches(folder)) == 1


def changed(cache, **values):
    torch.save({**torch.load(cache, weights_only=True), **values}, cache)


DAMAGE = {
    "half": lambda cache: os.truncate(cache, cache.stat().st_size // 2),
    "empty": lambda cache: cache.write_bytes(b""),
    "garbage": lambda cache: cache.write_bytes(b"garbage" * 1000),
    "no fingerprint": lambda c: torch.save(
        {"images": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4)}, c
    ),
    "no cache": lambda cache: torch.save([1, 2], cache),
    "half of the pixels": lambda cache: os.truncate(cache.with_suffix(".raw"), 100),
    "no pixels": lambda cache: cache.with_suffix(".raw").unlink(),
    "other labels": lambda cache: changed(cache, labels=torch.tensor([1, 1, 0, 0])),
    "labels of no class": lambda cache: changed(cache, labels=torch.full((4,), 9)),
    "fewer labels": lambda cache: changed(cache, labels=torch.tensor([1])),
    "another shape": lambda cache: changed(cache, shape=[8, 3, 16, 32]),
    "a pipe": lambda cache: [make(cache) for make in (os.unlink, os.mkfifo)],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_replaced(folder, damage):
    read(folder)
    (cache,) = folder.glob(".*.pt")
    DAMAGE[damage](cache)
    assert greys(read(folder)) == TRAIN
    after = caches(folder)
    assert greys(read(folder)) == TRAIN
    assert caches(folder) == after


def test_caches_of_read_only_folders_are_kept_elsewhere(folder, tmp_path, read_only):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    save(other / "train/a/1.bmp", 99)
    before, kept = sorted(folder.rglob("*")), []
    for _ in range(2):
        assert greys(read(folder)) == TRAIN
        assert greys(read(other)) == [(99, 0), *TRAIN[1:]]
        kept.append(caches(read_only))
    assert sorted(folder.rglob("*")) == before
    assert len(kept[0]) == 2
    assert kept[1] == kept[0]


def test_a_small_disk_is_refused_before_a_file_is_written(folder, monkeypatch):
    monkeypatch.setattr(
        pixel_files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10_000)
    )
    line = error_line(read, folder)
    assert "4 images of 32x32 need" in line and "has only 0.0 MiB free" in line and "make room" in line
    assert caches(folder) == {} and list(folder.rglob("*.raw")) == []


def test_all_unreadable_files_are_named_at_once(folder):
    for index in range(listing.SHOWN + 3):
        (folder / f"train/b/bad{index:02}.png").write_text("no image")
    with pytest.raises(InvalidInput) as caught:
        read(folder)
    *named, more = caught.value.errors
    assert [line.split(": ")[0][-9:] for line in named] == [f"bad{each:02}.png" for each in range(len(named))]
    assert len(named) == listing.SHOWN and "3 more files are not readable" in more
    assert caches(folder) == {}


def test_missing_files_are_named_at_once(folder):
    for name in ("x", "y"):
        (folder / f"train/b/{name}.png").symlink_to("nowhere")
    with pytest.raises(InvalidInput) as caught:
        read(folder)
    assert [line.split(": ")[1][-5:] for line in caught.value.errors] == ["x.png", "y.png"]


@table(
    "number, remedy",
    full=(errno.ENOSPC, "free some disk space"),
    quota=(errno.EDQUOT, "free some disk space"),
    owner=(errno.EACCES, "make the folder writable"),
    read_only=(errno.EROFS, "make the folder writable"),
    processes=(errno.EAGAIN, "free memory, or end other processes"),
    broken=(errno.EIO, "check the disk"),
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_each_error_of_the_cache_has_its_own_remedy(folder, monkeypatch, call, number, remedy):
    monkeypatch.setattr(pixel_files.os, call, failing(number))
    line = error_line(read, folder)
    assert line.startswith(f"{folder}/.images-train-32x32.pt: ")
    assert line.endswith(f" could not be written ([Errno {number}] {os.strerror(number)}); {remedy}")
    assert not [*folder.glob(".*.raw"), *folder.glob(".*.partial"), *folder.glob(".*.sidecar")]


@pytest.mark.parametrize(
    "number, said",
    [(signal.SIGKILL, "was killed, as the system does when memory runs out; give"), (signal.SIGSEGV, "crashed (SIGSEGV); an image may")],
)  # fmt: skip
def test_a_decoder_that_the_system_ends_is_named(folder, monkeypatch, number, said):
    def die(*_):
        faulthandler.disable()  # pytest's would print the stack
        os.kill(os.getpid(), number)

    monkeypatch.setattr(pixels, "decode", die)
    with pytest.raises(TrainingStopped) as caught:
        read(folder)
    assert f"data.root: a process that decoded the images of train {said}" in str(caught.value)
    assert caches(folder) == {}


def test_a_folder_or_a_link_in_place_of_the_cache(folder, tmp_path):
    for ending in ("raw", "sidecar"):
        file = folder / f".images-train-32x32.{ending}"
        file.mkdir()
        assert error_line(read, folder).startswith(f"{file}: is a folder")
        file.rmdir()
    other = tmp_path / "other"
    other.write_text("kept")
    (folder / ".images-train-32x32.sidecar").symlink_to(other)
    assert greys(read(folder)) == TRAIN
    assert other.read_text() == "kept"


def gone(*paths: str):
    def remove(root: pathlib.Path) -> None:
        for path in paths:
            shutil.rmtree(root / path)

    return remove


def endless(path: pathlib.Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def cut(path: pathlib.Path) -> None:
    save(path, Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)))
    path.write_bytes(path.read_bytes()[:-1500])


@table(
    "damage, parts",
    no_root=(gone(""), ["data.root: {}:", "no such folder; it needs train/<class>"]),
    no_test=(gone("test"), ["data.root: {}:", "'test'"]),
    no_class=(gone("train/a", "train/b"), ["{}/train:", "no class"]),
    one_class=(gone("train/b"), ["{}/train:", "only the class 'a'"]),
    empty_class=(lambda root: [path.unlink() for path in root.glob("train/b/*")], ["{}/train/b:", "no image"]),
    class_not_in_test=(gone("test/b"), ["data.root: {}:", "only in train: b;", "only in test: none"]),
    class_not_in_train=(lambda root: save(root / "test/c/1.png", 1), ["only in train: none;", "only in test: c"]),
    truncated=(lambda root: cut(root / "train/b/0.jpg"), ["{}/train/b/0.jpg:", "not a readable image", "truncated"]),
    link=(lambda root: (root / "train/b/0.png").symlink_to("nowhere"), ["{}/train/b/0.png:", "No such file"]),
    pipe=(lambda root: os.mkfifo(root / "train/b/0.png"), ["{}/train/b/0.png:", "is not a file"]),
    endless=(lambda root: endless(root / "train/b/0.png"), ["{}/train/b/0.png:", "not a readable image (has 1,099,511,627,776 bytes, more than 268,435,456)"]),
    name=(lambda root: os.mkdir(os.fsencode(root / "train") + b"/\xff"), ["{}/train:", "is not named in UTF-8"]),
    loop=(lambda root: (root / "train/a/again").symlink_to(".."), ["data.root: {}:", "a circular link", "a/again"]),
    loops=(lambda root: [(root / "train/a" / name).symlink_to(".") for name in ("one", "two")], ["data.root: {}:", "a circular link"]),
    text=(lambda root: (root / "train/b/0.png").write_text("a\nb"), ["{}/train/b/0.png:", "not a readable image"]),
)  # fmt: skip
def test_an_invalid_folder_is_one_line(folder, damage, parts):
    damage(folder)
    there = folder.exists()
    line = error_line(read, folder)
    assert [part for part in parts if part.format(folder) not in line] == []
    assert folder.exists() == there
    assert caches(folder) == {}


def test_a_link_to_the_working_directory_is_followed(tmp_path, monkeypatch):
    """``.`` is among the parents of a relative path, but the folder does not lie in it."""
    save(tmp_path / "dogs/1.png", 1)
    (tmp_path / "photos/dog").mkdir(parents=True)
    (tmp_path / "photos/dog/more").symlink_to(tmp_path / "dogs")
    monkeypatch.chdir(tmp_path / "dogs")
    found, _ = find_images([pathlib.Path("../photos/dog")])
    assert found == [pathlib.Path("../photos/dog/more/1.png")]

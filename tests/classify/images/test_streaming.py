"""Images that a step decodes: the same ones, with and without caches, after a kill and with a full disk."""

import errno
import os
import pathlib
import resource
import signal
from typing import Any

import numpy as np
import pytest
import torch
from folders import caches, failing, table
from sources import copied, everything, load, refused
from support import fork

import checkpoint
from classify.images import pixel_files, pixels, plan
from classify.images.pixels import ImageSet
from deepspeed_trial.errors import UnreadableData


def stream(dataset: str, root: object, split: str = "train", **section: Any) -> ImageSet:
    return load(dataset, root, split, **{"decode": "stream", **section})


def select(images: ImageSet, *indices: int) -> torch.Tensor:
    return images.select(torch.tensor(indices))


@pytest.fixture
def root(photos, tmp_path) -> pathlib.Path:
    """A folder without caches."""
    return copied(photos, tmp_path / "f")


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the decoded images."""
    names: list[str] = []
    decode = pixels.decode

    def noted(content, size, name, fit):
        names.append(name())
        return decode(content, size, name, fit)

    monkeypatch.setattr(pixels, "decode", noted)
    return names


def test_a_split_is_streamed_alike(photos, root, tmp_path):
    section: dict[str, Any] = {"image_size": 24, "validation": 0.3}
    other = copied(photos, tmp_path / "once")
    for split in ("train", "val", "test"):
        found = stream("imagefolder", root, split, **section)
        once = load("imagefolder", other, split, **section, decode="once")
        assert found.is_streamed and not once.is_streamed and torch.equal(found.labels, once.labels)
        assert torch.equal(select(found, 3, 0, 1), select(once, 3, 0, 1))


def test_each_image_is_decoded_once_and_the_last_one_completes_the_cache(root, decoded):
    first, other = stream("imagefolder", root), stream("imagefolder", root)
    half = select(first, *range(0, len(first), 2))
    assert torch.equal(select(other, *range(0, len(first), 2)), half)
    assert len(decoded) == len(half)
    assert not list(root.glob(".images-train*.raw"))
    whole = everything(other)
    assert len(decoded) == len(set(decoded)) == len(first)
    assert {file.suffix for file in root.glob(".images-train*")} == {".lock", ".pt", ".raw"}
    for later in (stream("imagefolder", root), load("imagefolder", root)):
        assert not later.is_streamed and torch.equal(later.images, whole)
    assert len(caches(root)) == 1
    assert torch.equal(everything(first), whole)  # it has the file open
    assert len(decoded) == len(first)


def test_decoded_images_survive_a_kill_but_no_boot_and_no_damage(root, decoded, monkeypatch):
    def killed():
        select(stream("imagefolder", root), 1, 2, 3)
        os.kill(os.getpid(), signal.SIGKILL)

    (process,) = fork(killed)
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    select(stream("imagefolder", root), 0, 1, 2, 3)
    assert len(decoded) == 1
    monkeypatch.setattr(pixel_files, "_boot", lambda: "another")
    select(stream("imagefolder", root), 0, 1, 2, 3)
    assert len(decoded) == 5
    (root / ".images-train-32x32.filled").write_bytes(b"{}")
    select(stream("imagefolder", root), 0)
    assert len(decoded) == 6
    os.truncate(root / ".images-train-32x32.growing", 100)
    select(stream("imagefolder", root), 0)
    assert len(decoded) == 7
    next((root / "train/cat").glob("1.*")).touch()
    select(stream("imagefolder", root), 0, 1)
    assert len(decoded) == 9


def test_a_full_disk_ends_only_the_cache(photos, root, tmp_path, capfd):
    wanted = everything(load("imagefolder", copied(photos, tmp_path / "g")))

    def full():
        images = stream("imagefolder", root)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 3 * 32 * 32, resource.RLIM_INFINITY))
        for _ in range(2):
            assert torch.equal(everything(images), wanted)

    (process,) = fork(full)
    process.join(300)
    assert process.exitcode == 0
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "growing" in each]
    assert "cannot store more decoded images (" in line and "each epoch decodes the others again" in line


def test_no_room_for_a_cache_is_told_as_that(root, monkeypatch):
    monkeypatch.setattr(pixel_files.os, "truncate", failing(errno.ENOSPC))
    line = refused("imagefolder", root, decode="stream")
    assert line.endswith(
        ".growing: cannot be used ([Errno 28] No space left on device); free some disk space"
    )


def test_a_cache_that_cannot_be_completed_ends_only_the_cache(root, monkeypatch, capfd):
    monkeypatch.setattr(pixel_files.os, "fsync", failing(errno.EIO))
    images = stream("imagefolder", root)
    assert torch.equal(everything(images), everything(images))
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "growing" in each]
    assert "cannot store more decoded images ([Errno 5] Input/output error)" in line


def test_an_unreadable_image_is_named_when_a_step_selects_it(root):
    images = stream("imagefolder", root)
    spoilt = sorted((root / "train/dog").rglob("*.*"), key=str)[0]
    spoilt.write_bytes(b"no image")
    at = int(np.flatnonzero(images.labels.numpy() == 1)[0])
    assert len(select(images, at - 1))
    with pytest.raises(UnreadableData) as caught:
        select(images, at - 1, at)
    (line,) = caught.value.errors
    assert line.startswith(str(spoilt)) and "not a readable image (cannot identify" in line


@table(
    "section, said",
    no_files=({"dataset": "digits", "decode": "stream"}, "data.decode: 'stream': digits has no image files; use once"),
    no_shards=({"window": 3}, "data.window: 3: the dataset has no shards; remove it"),
    classes=({"dataset": "webdataset", "window": 2, "sampling": "balanced"}, "data.sampling: 'balanced': takes images of all shards at any time; set data.window: all"),
    once=({"decode": "once", "cache": {"limit": "10KB"}}, "data.cache.limit: '10KB': the decoded images need 0.1 MiB; raise the limit, or set data.decode: stream"),
)  # fmt: skip
def test_settings_that_contradict_the_dataset_are_refused(photos, written, section, said):
    root = written if section.get("dataset") == "webdataset" else photos
    assert refused(**{"dataset": "imagefolder", "root": root, **section}) == said


def test_large_datasets_are_streamed(root, monkeypatch):
    assert load("imagefolder", root, cache={"limit": "60KB"}).is_streamed  # all images would fill it
    monkeypatch.setattr(plan, "LARGE", 60_000)
    assert load("imagefolder", root).is_streamed
    monkeypatch.undo()
    assert not load("imagefolder", root).is_streamed
    assert not load("imagefolder", root, cache={"limit": "60KB"}).is_streamed  # they are decoded now


def test_the_program_clears_half_filled_caches(root, capsys):
    select(stream("imagefolder", root), 1)
    assert checkpoint.main(["caches", str(root), "--clear"]) == 0
    assert "images-train-32x32" in capsys.readouterr().out
    assert not [file for file in root.glob(".images*") if file.suffix != ".lock"]

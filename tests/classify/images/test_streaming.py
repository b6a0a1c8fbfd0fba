"""Images that are decoded when a step needs them: the same ones, whatever is kept of them, killed or not."""

import os
import pathlib
import resource
import signal
from typing import Any

import numpy as np
import pytest
import torch
from folders import caches, table
from sources import OWN, copied, load, refused, write_parquet, write_table
from support import fork

from classify.images import growing_cache, streamed, streaming
from classify.images.image_set import ImageSet
from harness.errors import UnreadableData


def stream(dataset: str, root: object, split: str = "train", **section: Any) -> ImageSet:
    return load(dataset, root, split, **{"decode": "stream", **section})


def select(images: ImageSet, *indices: int) -> torch.Tensor:
    return images.select(torch.tensor(indices))


def everything(images: ImageSet) -> torch.Tensor:
    return images.select(torch.arange(len(images)))


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the images that are decoded."""
    names: list[str] = []
    decode = streamed.decode

    def noted(content, size, name):
        names.append(name())
        return decode(content, size, name)

    monkeypatch.setattr(streamed, "decode", noted)
    return names


@pytest.mark.parametrize("kind", ["imagefolder", "webdataset", "parquet", "table", "own"])
def test_the_same_images_as_decoded_at_once(photos, written, tmp_path, kind):
    (tmp_path / "mine.py").write_text(OWN)
    dataset, root = {
        "imagefolder": lambda: ("imagefolder", copied(photos, tmp_path / "f")),
        "webdataset": lambda: ("webdataset", copied(written, tmp_path / "s")),
        "parquet": lambda: ("parquet", write_parquet(photos, tmp_path / "p")),
        "table": lambda: ("table", write_table(photos, tmp_path, "csv")),
        "own": lambda: (str(tmp_path / "mine.py"), copied(photos, tmp_path / "f")),
    }[kind]()
    section: dict[str, Any] = {"image_size": 24, "validation": 0.3}
    full = {"limit": "1KB"}  # so that nothing decoded is kept
    splits = ("train", "val", "test")
    plain = {split: stream(dataset, root, split, **section, cache=full) for split in splits}
    kept = {split: stream(dataset, root, split, **section) for split in splits}
    assert not list(root.rglob(".images*.raw"))
    wanted = {split: load(dataset, root, split, **section, decode="once") for split in splits}
    for found in (plain, kept):
        for split, each in found.items():
            assert each.is_streamed and not wanted[split].is_streamed
            assert torch.equal(each.labels, wanted[split].labels)
            assert torch.equal(select(each, 3, 0, 1), select(wanted[split], 3, 0, 1))
            assert torch.equal(everything(each), everything(wanted[split]))


def test_each_image_is_decoded_once_and_the_last_one_makes_the_cache(photos, tmp_path, decoded):
    root = copied(photos, tmp_path / "f")
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
    assert torch.equal(everything(first), whole)  # by the file that it has open
    assert len(decoded) == len(first)


def test_what_was_decoded_survives_a_kill_but_not_the_machines_end(photos, tmp_path, decoded, monkeypatch):
    root = copied(photos, tmp_path / "f")

    def killed():
        select(stream("imagefolder", root), 1, 2, 3)
        os.kill(os.getpid(), signal.SIGKILL)

    (process,) = fork(killed)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    select(stream("imagefolder", root), 0, 1, 2, 3)
    assert len(decoded) == 1
    monkeypatch.setattr(growing_cache, "_boot", lambda: "another")
    select(stream("imagefolder", root), 0, 1, 2, 3)
    assert len(decoded) == 5
    (root / ".images-train-32x32.filled").write_bytes(b"{}")
    select(stream("imagefolder", root), 0)
    assert len(decoded) == 6


def test_a_change_of_the_images_begins_anew(photos, tmp_path, decoded):
    root = copied(photos, tmp_path / "f")
    select(stream("imagefolder", root), 0, 1)
    next((root / "train/cat").glob("1.*")).touch()
    select(stream("imagefolder", root), 0, 1)
    assert len(decoded) == 4


def test_a_full_disk_ends_the_keeping_alone(photos, tmp_path, capfd):
    root = copied(photos, tmp_path / "f")
    wanted = everything(load("imagefolder", copied(photos, tmp_path / "g")))

    def full():
        images = stream("imagefolder", root)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 3 * 32 * 32, resource.RLIM_INFINITY))
        for _ in range(2):
            assert torch.equal(everything(images), wanted)

    (process,) = fork(full)
    process.join(60)
    assert process.exitcode == 0
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "growing" in each]
    assert "no more decoded images are kept (" in line and "each epoch decodes those anew" in line


def test_what_cannot_be_decoded_is_named_when_it_is_asked_for(photos, tmp_path):
    root = copied(photos, tmp_path / "f")
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
    classes=({"dataset": "webdataset", "window": 2, "sampling": "balanced"}, "data.sampling: 'balanced': takes images of all shards at any time; set data.window to all"),
    once=({"decode": "once", "cache": {"limit": "10KB"}}, "data.cache.limit: 0.0 MiB: the decoded images need 0.1 MiB; raise it, or set data.decode to stream"),
)  # fmt: skip
def test_what_does_not_go_with_the_dataset_is_one_line(photos, written, tmp_path, section, said):
    root = written if section.get("dataset") == "webdataset" else photos
    assert refused(section.pop("dataset", "imagefolder"), root, **section) == said


def test_images_are_streamed_where_they_are_many(photos, tmp_path, monkeypatch):
    root = copied(photos, tmp_path / "f")
    assert load("imagefolder", root, cache={"limit": "60KB"}).is_streamed  # which they would fill
    monkeypatch.setattr(streaming, "LARGE", 60_000)
    assert load("imagefolder", root).is_streamed
    monkeypatch.undo()
    assert not load("imagefolder", root).is_streamed
    assert not load("imagefolder", root, cache={"limit": "60KB"}).is_streamed  # for they are decoded now


def test_caches_lists_and_clears_what_is_half_filled(photos, tmp_path, capsys):
    import checkpoint

    root: pathlib.Path = copied(photos, tmp_path / "f")
    select(stream("imagefolder", root), 1)
    assert checkpoint.main(["caches", str(root), "--clear"]) == 0
    assert "images-train-32x32" in capsys.readouterr().out
    assert not [file for file in root.glob(".images*") if file.suffix != ".lock"]

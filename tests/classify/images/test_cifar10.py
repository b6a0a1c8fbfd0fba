"""CIFAR-10 from a real web server: the archive, its download, its repair and the lock around them."""

import hashlib
import io
import os
import pathlib
import pickle
import signal
import socket
import tarfile
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torchvision
from sources import served
from support import all_at_once, error_line, fork

from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings
from classify.images.sources.cifar10 import Cifar10
from deepspeed_trial import host_lock

ARCHIVE = "cifar-10-python.tar.gz"
A_DOWNLOAD = 2  # requests: torchvision first asks for redirects


class Cifar:
    """A miniature CIFAR-10 in its real format."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root, self.unpacked, self.archive = root, root / "cifar-10-batches-py", root / ARCHIVE
        self.splits: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        random, buffer, contents = np.random.default_rng(0), io.BytesIO(), {}
        for split, batches in [("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])]:
            pixels = random.integers(0, 256, (len(batches), 4, 3072), dtype=np.uint8)
            labels = random.integers(0, 10, (len(batches), 4))
            images = torch.from_numpy(pixels.reshape(-1, 3, 32, 32))
            self.splits[split] = images, torch.from_numpy(labels.reshape(-1))
            for name, rows, row_labels in zip(batches, pixels, labels, strict=True):
                contents[name] = {"batch_label": name, "data": rows, "labels": row_labels.tolist()}
        meta = {"num_cases_per_batch": 4, "label_names": [*Cifar10.classes], "num_vis": 3072}
        contents["batches.meta"] = meta
        files = {name: pickle.dumps(content, protocol=2) for name, content in contents.items()}
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        self.archive_bytes = buffer.getvalue()
        self.md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}

    @property
    def names(self) -> set[str]:
        """The files of the root without locks and caches."""
        return {path.name for path in self.root.iterdir() if path.suffix not in (".lock", ".pt", ".raw")}

    def load(self, split: str = "train", download: bool = True) -> ImageSet:
        return DataPlan.resolve(DataSettings("cifar10", str(self.root), download)).load(split)

    def check(self, split: str = "train", download: bool = True) -> None:
        kept, (images, labels) = self.load(split, download), self.splits[split]
        assert kept.images.is_contiguous()
        assert torch.equal(kept.images, images)
        assert torch.equal(kept.labels, labels)
        assert kept.classes == Cifar10.classes


@pytest.fixture
def cifar(tmp_path) -> Cifar:
    (tmp_path / "cifar").mkdir()
    return Cifar(tmp_path / "cifar")


@pytest.fixture
def server(cifar, tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / ARCHIVE).write_bytes(cifar.archive_bytes)
    batches = sorted(cifar.md5.items())
    with served(tmp_path / "served") as (server, url):
        for name, value in {
            "url": f"{url}/{ARCHIVE}",
            "tgz_md5": hashlib.md5(cifar.archive_bytes).hexdigest(),
            "train_list": [list(item) for item in batches if item[0].startswith("data")],
            "test_list": [["test_batch", cifar.md5["test_batch"]]],
            "meta": {"filename": "batches.meta", "key": "label_names", "md5": cifar.md5["batches.meta"]},
        }.items():
            monkeypatch.setattr(torchvision.datasets.CIFAR10, name, value)
        monkeypatch.setenv("no_proxy", "*")
        yield server


@pytest.fixture
def no_server(server, monkeypatch):
    with socket.socket() as deaf:  # it never listens
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/{ARCHIVE}"
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", url)
        yield


def test_processes_share_one_download(cifar, server):
    all_at_once(*[lambda split=split: cifar.check(split) for split in [*cifar.splits] * 2])
    assert cifar.names == {cifar.unpacked.name}
    for split in cifar.splits:
        cifar.check(split, download=False)
        cifar.check(split)
    assert len(server.asked) == A_DOWNLOAD
    assert cifar.names == {cifar.unpacked.name}


@pytest.mark.parametrize(("file", "truncated"), [("data_batch_3", 1), ("test_batch", 0), ("batches.meta", 1)])
def test_one_download_repairs_a_damaged_file(cifar, server, file, truncated):
    cifar.check()
    path = cifar.unpacked / file
    content = path.read_bytes()
    path.unlink()
    if truncated:
        path.write_bytes(content[:-7])
    assert f"{cifar.unpacked} is damaged" in error_line(cifar.load, "train", False)
    for split in cifar.splits:
        cifar.check(split)
    assert len(server.asked) == 2 * A_DOWNLOAD
    assert cifar.names == {cifar.unpacked.name}


@pytest.mark.parametrize("link", [None, "../shared.tar.gz"])
def test_a_whole_archive_is_unpacked_without_a_request(cifar, server, link):
    if link:
        cifar.archive.symlink_to(link)
    cifar.archive.write_bytes(cifar.archive_bytes)
    for split in cifar.splits:
        cifar.check(split, download=False)
    assert server.asked == []
    assert cifar.names == {cifar.unpacked.name, ARCHIVE}
    assert cifar.archive.read_bytes() == cifar.archive_bytes


def test_a_download_replaces_a_truncated_archive(cifar, server):
    cifar.archive.write_bytes(cifar.archive_bytes[:-100])
    server.faults = {ARCHIVE: ("404", 1)}
    for download in (False, True):
        assert f"{cifar.archive} is truncated" in error_line(cifar.load, "train", download)
        assert cifar.archive.read_bytes() == cifar.archive_bytes[:-100]
        assert cifar.names == {ARCHIVE}
    assert len(server.asked) == 1
    server.asked.clear()
    cifar.check()
    assert len(server.asked) == A_DOWNLOAD
    assert cifar.names == {cifar.unpacked.name, ARCHIVE}


def test_missing_images_are_one_line(cifar, server, no_server):
    line = error_line(cifar.load, "train", False)
    for part in (f"data.root: {cifar.root}:", f"{cifar.unpacked} is missing", "data.download is false"):
        assert part in line
    line = error_line(cifar.load)
    assert f"data.root: {cifar.root}:" in line and "refused" in line
    assert server.asked == [] and cifar.names == set()
    cifar.root.rename(cifar.root.with_name("elsewhere"))
    cifar.root.write_text("x")
    assert f"data.root: {cifar.root}:" in error_line(cifar.load)


@pytest.mark.parametrize("fault", ["dies", "dies in a chunk", "alters", "404", "garbage"])
def test_a_bad_server_is_one_line(cifar, server, fault):
    server.faults = {ARCHIVE: (fault, 99)}
    assert f"data.root: {cifar.root}:" in error_line(cifar.load)
    assert cifar.names == set()
    server.faults = {}
    cifar.check()


def test_a_read_only_root_is_read(cifar, server, tmp_path, monkeypatch):
    cifar.check()
    for path in cifar.root.glob(".*.lock"):
        path.unlink()
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = {path.name for path in cifar.root.iterdir()}
    cifar.check("test")
    assert {path.name for path in cifar.root.iterdir()} == before
    assert before == {cifar.unpacked.name, ".cifar10-train-32x32.pt", ".cifar10-train-32x32.raw"}


def test_a_killed_holder_of_the_lock_blocks_nobody(cifar, server):
    held = get_context("fork").Event()

    def hold():
        with host_lock.host_lock(cifar.root, "cifar10", "data.root"):
            half = cifar.root / ".cifar10-partial" / cifar.unpacked.name
            half.mkdir(parents=True)
            (half / "data_batch_1").write_bytes(b"half")
            held.set()
            signal.pause()

    (holder,) = fork(hold)
    assert held.wait(300)
    (waiting,) = fork(cifar.check)
    waiting.join(0.5)
    assert waiting.is_alive()
    assert server.asked == []
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(300)
    assert waiting.exitcode == 0
    holder.join(300)
    assert len(server.asked) == A_DOWNLOAD
    assert cifar.names == {cifar.unpacked.name}

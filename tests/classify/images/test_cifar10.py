"""CIFAR-10 from a real web server: the archive, its download, its mending and the lock around them."""

import hashlib
import http.server
import io
import os
import pathlib
import pickle
import signal
import tarfile
import threading
import time
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torchvision
from support import all_at_once, error_line, fork, free_port

import data
from classify.images.image_set import ImageSet
from classify.images.settings import DataSettings
from classify.images.sources.cifar10 import Cifar10
from harness import host_lock


class Cifar:
    """A miniature CIFAR-10 in its real format and the web server that has it."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.mishap = ""  # how the server misbehaves
        self.requests = self.downloads = 0
        self.splits: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.classes = Cifar10.classes
        random, buffer, contents = np.random.default_rng(0), io.BytesIO(), {}
        for split, batches in [("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])]:
            pixels = random.integers(0, 256, (len(batches), 4, 3072), dtype=np.uint8)
            labels = random.integers(0, 10, (len(batches), 4))
            self.splits[split] = (
                torch.from_numpy(pixels.reshape(-1, 3, 32, 32)),
                torch.from_numpy(labels.reshape(-1)),
            )
            for name, rows, row_labels in zip(batches, pixels, labels, strict=True):
                contents[name] = {"batch_label": name, "data": rows, "labels": row_labels.tolist()}
        contents["batches.meta"] = {
            "num_cases_per_batch": 4,
            "label_names": list(self.classes),
            "num_vis": 3072,
        }
        files = {name: pickle.dumps(content, protocol=2) for name, content in contents.items()}
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        self.archive_bytes = buffer.getvalue()
        self.md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
        self.unpacked = root / "cifar-10-batches-py"
        self.archive = root / "cifar-10-python.tar.gz"

    @property
    def names(self) -> set[str]:
        """What is in the root, but for locks and caches."""
        return {path.name for path in self.root.iterdir() if path.suffix not in (".lock", ".pt", ".raw")}

    def load(self, split: str = "train", download: bool = True) -> ImageSet:
        return data.load(DataSettings("cifar10", str(self.root), download), split)

    def check(self, split: str = "train", download: bool = True) -> None:
        kept, (images, labels) = self.load(split, download), self.splits[split]
        assert kept.images.is_contiguous()
        assert torch.equal(kept.images, images)
        assert torch.equal(kept.labels, labels)
        assert kept.classes == self.classes

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.requests += 1
        body = b"<html>moved</html>" if self.mishap == "another file" else self.archive_bytes
        if self.mishap == "not HTTP":
            request.wfile.write(b"garbage\r\n\r\n")
        elif self.mishap == "not found":
            request.send_error(404)
        elif self.mishap == "cut in chunks":
            request.send_response(200)
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            request.wfile.write(b"%x\r\n%b\r\n" % (len(body), body[: len(body) // 2]))
        else:
            request.send_response(200)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            if request.headers["Method"] == "HEAD":  # torchvision only asks where redirects lead
                return
            self.downloads += 1
            time.sleep(0.2)
            request.wfile.write(body[: len(body) // 2] if self.mishap == "cut" else body)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    cifar = Cifar(tmp_path / "cifar")
    cifar.root.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            cifar.answer(self)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    batches = sorted(cifar.md5.items())
    for name, value in {
        "url": f"http://127.0.0.1:{server.server_port}/{cifar.archive.name}",
        "tgz_md5": hashlib.md5(cifar.archive_bytes).hexdigest(),
        "train_list": [list(item) for item in batches if item[0].startswith("data")],
        "test_list": [["test_batch", cifar.md5["test_batch"]]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": cifar.md5["batches.meta"]},
    }.items():
        monkeypatch.setattr(torchvision.datasets.CIFAR10, name, value)
    monkeypatch.setenv("no_proxy", "*")
    yield cifar
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_server(monkeypatch):
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", f"http://127.0.0.1:{free_port()}/x.tar.gz")


def test_one_download_for_all_processes(cifar):
    all_at_once(*[lambda split=split: cifar.check(split) for split in [*cifar.splits] * 2])
    assert cifar.downloads == 1
    assert cifar.names == {cifar.unpacked.name}
    before = cifar.requests
    for split in cifar.splits:
        cifar.check(split, download=False)
        cifar.check(split)
    assert cifar.requests == before
    assert cifar.names == {cifar.unpacked.name}


@pytest.mark.parametrize(
    ("file", "damage"),
    [("data_batch_3", "truncated"), ("test_batch", "removed"), ("batches.meta", "truncated")],
)
def test_damaged_file_is_mended_by_one_download(cifar, file, damage):
    cifar.check()
    path = cifar.unpacked / file
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    assert f"{cifar.unpacked} is damaged" in error_line(cifar.load, "train", False)
    for split in cifar.splits:
        cifar.check(split)
    assert cifar.downloads == 2
    assert cifar.names == {cifar.unpacked.name}


@pytest.mark.parametrize("link", [None, "../shared.tar.gz"])
def test_whole_archive_is_unpacked_without_a_request(cifar, link):
    if link:
        cifar.archive.symlink_to(link)
    cifar.archive.write_bytes(cifar.archive_bytes)
    for split in cifar.splits:
        cifar.check(split, download=False)
    assert cifar.requests == 0
    assert cifar.names == {cifar.unpacked.name, cifar.archive.name}
    assert cifar.archive.read_bytes() == cifar.archive_bytes


def test_truncated_archive_without_a_server(cifar, no_server):
    cifar.archive.write_bytes(cifar.archive_bytes[:-100])
    for download in (True, False):
        assert f"{cifar.archive} is truncated" in error_line(cifar.load, "train", download)
        assert cifar.archive.read_bytes() == cifar.archive_bytes[:-100]
        assert cifar.names == {cifar.archive.name}


def test_truncated_archive_with_a_server(cifar):
    cifar.archive.write_bytes(cifar.archive_bytes[:-100])
    error_line(cifar.load, "train", False)
    assert cifar.requests == 0
    cifar.check()
    assert cifar.downloads == 1
    assert cifar.names == {cifar.unpacked.name, cifar.archive.name}


def test_no_download_allowed(cifar):
    line = error_line(cifar.load, "train", False)
    assert f"data.root: {cifar.root}:" in line
    assert f"{cifar.unpacked} is missing" in line
    assert "data.download is false" in line
    assert cifar.requests == 0
    assert cifar.names == set()


def test_unreachable_server(cifar, no_server):
    line = error_line(cifar.load)
    assert f"data.root: {cifar.root}:" in line
    assert "refused" in line
    assert cifar.names == set()


@pytest.mark.parametrize("how", ["cut", "cut in chunks", "another file", "not found", "not HTTP"])
def test_bad_server(cifar, how):
    cifar.mishap = how
    assert f"data.root: {cifar.root}:" in error_line(cifar.load)
    assert cifar.names == set()
    cifar.mishap = ""
    cifar.check()


def test_root_is_a_file(cifar):
    cifar.root.rmdir()
    cifar.root.write_text("x")
    assert f"data.root: {cifar.root}:" in error_line(cifar.load)


def test_read_only_root(cifar, tmp_path, monkeypatch):
    cifar.check()
    for path in cifar.root.glob(".*.lock"):
        path.unlink()
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cifar.check("test")
    assert {path.name for path in cifar.root.iterdir()} == {
        cifar.unpacked.name,
        ".cifar10-train-32x32.pt",
        ".cifar10-train-32x32.raw",
    }


def test_killed_holder_of_the_lock_blocks_nobody(cifar):
    held = get_context("fork").Event()

    def hold():
        with host_lock.host_lock(cifar.root, "cifar10", "data.root"):
            half = cifar.root / ".cifar10-partial" / cifar.unpacked.name
            half.mkdir(parents=True)
            (half / "data_batch_1").write_bytes(b"half")
            held.set()
            time.sleep(30)

    (holder,) = fork(hold)
    assert held.wait(30)
    (waiting,) = fork(cifar.check)
    waiting.join(0.5)
    assert waiting.is_alive()
    assert cifar.requests == 0
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(30)
    assert waiting.exitcode == 0
    holder.join(30)
    assert cifar.downloads == 1
    assert cifar.names == {cifar.unpacked.name}

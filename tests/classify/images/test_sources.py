"""Shards, Parquet files, tables and sources of one's own: the same images as in a folder, and their faults."""

import contextlib
import csv
import functools
import http.server
import json
import os
import pathlib
import re
import shutil
import tarfile
import threading
import time
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from folders import save, table
from PIL import Image
from support import error_line

import data
import shards
from classify.images.image_set import ImageSet
from classify.images.settings import DataSettings
from classify.images.sources import remote

CLASSES = ("cat", "dog", "eel")
NAMES = ("1.png", "2.JPG", "a.b.png", "ü 50%.png", "deep/er/4.png", "2.webp")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> pathlib.Path:
    """Images of noise, with names of all kinds, in three classes, to train and to test."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for part, each in (("train", NAMES), ("test", NAMES[:2])):
        for label in CLASSES:
            for name in each:
                image = Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8))
                save(root / part / label / name, image)
    return root


@pytest.fixture(scope="module")
def written(photos, tmp_path_factory) -> pathlib.Path:
    """The same images in shards of a few each."""
    target = tmp_path_factory.mktemp("shards")
    assert shards.main(["write", str(photos), str(target), "--size-limit", "40KB"]) == 0
    assert len(list(target.glob("train-*.tar"))) > 2
    return target


def load(dataset: str, root: object, split: str = "train", **section: object) -> ImageSet:
    return data.load(DataSettings.parse({"dataset": dataset, "root": str(root), **section}), split)


def refused(dataset: str, root: object, **section: object) -> str:
    return error_line(lambda: load(dataset, root, **section))


def assert_same(found: ImageSet, wanted: ImageSet) -> None:
    assert found.classes == wanted.classes
    assert torch.equal(found.labels, wanted.labels)
    assert torch.equal(found.images, wanted.images)


def copied(root: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    hidden = shutil.ignore_patterns(".*")
    return pathlib.Path(shutil.copytree(root, target, ignore=hidden))


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def plain(folder: pathlib.Path) -> dict[str, bytes]:
    return {name: content for name, content in files_in(folder).items() if not name.startswith(".")}


def pictures(root: pathlib.Path, part: str) -> list[tuple[bytes, int, str]]:
    """The images of a part as a folder has them in order: bytes, label, path."""
    return [
        (path.read_bytes(), label, str(path))
        for label, name in enumerate(CLASSES)
        for path in sorted((root / part / name).rglob("*"), key=str)
        if path.is_file()
    ]


def write_parquet(root: pathlib.Path, target: pathlib.Path, rows: int = 4) -> pathlib.Path:
    """Files as ``datasets`` write them, with row groups of two images."""
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", kind), ("label", pyarrow.int64())], metadata=about)
    (target / "data").mkdir(parents=True)
    for part in ("train", "test"):
        images = pictures(root, part)
        count = -(-len(images) // rows)
        for number in range(count):
            own = images[number * rows : (number + 1) * rows]
            columns = [
                [{"bytes": content, "path": path} for content, _, path in own],
                [label for _, label, _ in own],
            ]
            file = target / "data" / f"{part}-{number:05d}-of-{count:05d}.parquet"
            arrays = [pyarrow.array(each, field.type) for each, field in zip(columns, schema, strict=True)]
            pyarrow.parquet.write_table(
                pyarrow.Table.from_arrays(arrays, schema=schema), file, row_group_size=2
            )
    return target


def write_table(root: pathlib.Path, target: pathlib.Path, ending: str) -> pathlib.Path:
    target.mkdir(exist_ok=True)
    for part in ("train", "test"):
        rows = [(os.path.relpath(path, target), CLASSES[label]) for _, label, path in pictures(root, part)]
        with open(target / f"{part}.{ending}", "w", newline="") as file:
            if ending == "csv":
                csv.writer(file).writerows([("path", "label"), *rows])
            else:
                file.writelines(json.dumps({"file_name": path, "class": name}) + "\n" for path, name in rows)
    return target


OWN = """
import pathlib

def source(root):
    parts = {}
    for part in ("train", "test"):
        files = sorted(pathlib.Path(root, part).rglob("*.*"), key=str)
        parts[part] = [(file, file.relative_to(root).parts[1]) for file in files]
    return parts
"""


def test_shards_hold_the_folder_to_the_byte_and_all_classes(photos, written, tmp_path, capsys):
    assert shards.main(["read", str(written), str(tmp_path / "back")]) == 0
    assert files_in(tmp_path / "back") == {
        k: v for k, v in files_in(photos).items() if "/" in k and k[0] != "."
    }
    again = tmp_path / "again"
    assert shards.main(["write", str(photos), str(again), "--size-limit", "40KB"]) == 0
    assert files_in(again) == plain(written)
    with tarfile.open(next(iter(sorted(written.glob("train-*.tar"))))) as tar:
        keys = [name.partition(".") for name in (re.sub("^.*/", "", each) for each in tar.getnames())]
        assert [each[0] for each in keys[::2]] == [each[0] for each in keys[1::2]]
        assert {each[2] for each in keys[1::2]} == {"cls"}
    other = tmp_path / "other"
    assert shards.main(["write", str(photos), str(other), "--size-limit", "40KB", "--seed", "1"]) == 0
    assert files_in(other) != plain(written)
    capsys.readouterr()
    assert shards.main(["write", str(photos / "train"), str(other)]) == 2
    assert "which is not of" in capsys.readouterr().err


def test_writing_goes_on_where_it_was_interrupted(photos, written, tmp_path, capsys):
    target = tmp_path / "shards"
    (target / "classes.txt").mkdir(parents=True)  # at which it fails, after all shards
    arguments = ["write", str(photos), str(target), "--size-limit", "40KB"]
    assert shards.main(arguments) == 2
    files = sorted(target.glob("*.tar"))
    before = {file.name: file.stat().st_ino for file in files}
    (target / "classes.txt").rmdir()
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    files[2].unlink()
    capsys.readouterr()
    assert shards.main(arguments) == 0
    assert f"({len(files) - 2} were there already)" in capsys.readouterr().out
    changed = [file.name for file in files if file.stat().st_ino != before[file.name]]
    assert set(changed) <= {files[1].name, files[2].name}
    assert files_in(target) == plain(written)


@pytest.mark.parametrize("kind", ["webdataset", "a pattern", "no index", "parquet", "csv", "jsonl", "own"])
def test_every_source_has_the_folders_images(photos, written, tmp_path, kind):
    dataset, root = {
        "webdataset": lambda: ("webdataset", copied(written, tmp_path / "s")),
        "a pattern": lambda: ("webdataset", f"{copied(written, tmp_path / 's')}/{{train,test}}-*.tar"),
        "no index": lambda: ("webdataset", copied(written, tmp_path / "s")),
        "parquet": lambda: ("parquet", write_parquet(photos, tmp_path / "p")),
        "csv": lambda: ("table", write_table(photos, tmp_path, "csv")),
        "jsonl": lambda: ("table", write_table(photos, tmp_path, "jsonl")),
        "own": lambda: (str(tmp_path / "mine.py"), photos),
    }[kind]()
    (tmp_path / "mine.py").write_text(OWN)
    if kind == "no index":
        (root / "index.npz").unlink()
    for split in ("train", "test"):
        found, wanted = load(dataset, root, split), load("imagefolder", photos, split)
        if kind in ("no index", "a pattern"):  # in the order of the shards
            assert found.classes == wanted.classes
            assert not torch.equal(found.labels, wanted.labels)
            rows = [tuple(image.flatten().tolist()) for image in wanted.images]
            order = [rows.index(tuple(image.flatten().tolist())) for image in found.images]
            assert sorted(order) == list(range(len(wanted)))
            assert torch.equal(found.labels, wanted.labels[order])
        else:
            assert_same(found, wanted)


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with the faults of its server, by name: how often, and what is done instead."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        fault, times = self.server.faults.get(name, ("", 0))
        if times <= 0:
            return super().do_GET()
        self.server.faults[name] = fault, times - 1
        if fault == "slow":
            time.sleep(1)
            self.close_connection = True
        elif fault == "dies":
            content = pathlib.Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.send_error(int(fault))
        return None


@contextlib.contextmanager
def served(folder: pathlib.Path):
    """A web server of a folder."""
    handler = functools.partial(Server, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked, server.faults, server.daemon_threads = [], {}, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)


def test_shards_of_a_web_server_are_fetched_once(photos, written, tmp_path, hurried):
    kept: Any = {"cache": {"folder": str(tmp_path / "cache")}}
    with served(written) as (server, url):
        first = "train-000000.tar"
        server.faults = {first: ("500", 2), "train-000001.tar": ("dies", 1), "index.npz": ("slow", 1)}
        for split in ("train", "test"):
            assert_same(load("webdataset", url, split, **kept), load("imagefolder", photos, split))
        assert server.asked.count(first) == 3 and server.asked.count("train-000001.tar") == 2
        assert server.asked.count("train-000002.tar") == 1
        asked = len(server.asked)
        load("webdataset", url, image_size=16, **kept)
        assert server.asked[asked:] == ["index.npz"]
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("kind", ["tar", "parquet", "csv"])
def test_files_of_a_web_server_by_their_names(photos, written, tmp_path, hurried, kind):
    kept: Any = {"cache": {"folder": str(tmp_path / "cache")}}
    if kind == "csv":
        write_table(photos, photos, "csv")
        with served(photos) as (_, url):
            assert_same(load("table", url, **kept), load("imagefolder", photos))
        return
    root = written if kind == "tar" else write_parquet(photos, tmp_path / "p") / "data"
    dataset = "webdataset" if kind == "tar" else "parquet"
    count = len(list(root.glob("train-*"))) - 1
    names = f"train-{{000000..{count:06d}}}.tar"
    if kind == "parquet":
        names = f"train-{{00000..{count:05d}}}-of-{count + 1:05d}.parquet"
    with served(root) as (_, url):
        found = load(dataset, f"{url}/{names}", validation=0.2, **kept)
        assert "does not list its files; give their names" in refused(dataset, f"{url}/none", **kept)
    assert found.classes == CLASSES and len(found.images) == len(NAMES) * len(CLASSES)


@table(
    "fault, said",
    errors=(("500", 99), ["train-000000.tar: cannot be read in 5 attempts (500", "start again"]),
    slow=(("slow", 99), ["train-000000.tar: cannot be read in 5 attempts (", "start again"]),
    dies=(("dies", 99), ["train-000000.tar: cannot be read in 5 attempts (", "start again"]),
    missing=(("404", 99), ["train-000000.tar: no such file; mend data.root"]),
    forbidden=(("403", 1), ["train-000000.tar: cannot be read (403", "start again"]),
)
def test_a_server_that_fails_for_good_is_one_line(written, tmp_path, hurried, fault, said):
    with served(written) as (server, url):
        server.faults = {"train-000000.tar": fault}
        line = refused("webdataset", url, cache={"folder": str(tmp_path / "cache")})
    assert line.startswith(url) and all(each in line for each in said), line
    assert not list((tmp_path / "cache").rglob("*.raw"))

"""Images in every kind of source, and a web server with faults."""

import contextlib
import csv
import functools
import gzip
import http.server
import json
import os
import pathlib
import shutil
import threading
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from support import contents, error_line

from classify.images.pixels import ImageSet
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings

CLASSES = ("cat", "dog", "eel")
NAMES = ("1.png", "2.JPG", "a.b.png", "ü 50%.png", "deep/er/4.png", "2.webp")


def opened(root: object, **section: object) -> DataPlan:
    """The plan of a folder of images, or of another dataset."""
    return DataPlan.resolve(DataSettings.parse({"dataset": "imagefolder", "root": str(root), **section}))


def load(dataset: str, root: object, split: str = "train", **section: object) -> ImageSet:
    return opened(root, dataset=dataset, **section).load(split)


def refused(dataset: str, root: object, **section: Any) -> str:
    return error_line(lambda: load(dataset, root, **section))


def everything(images: ImageSet) -> torch.Tensor:
    return images.select(torch.arange(len(images)))


def assert_same(found: ImageSet, wanted: ImageSet) -> None:
    assert found.classes == wanted.classes
    assert torch.equal(found.labels, wanted.labels)
    assert torch.equal(everything(found), everything(wanted))


def copied(root: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(root, target, ignore=shutil.ignore_patterns(".*")))


def plain(folder: pathlib.Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if not name.startswith(".")}


def pictures(root: pathlib.Path, part: str) -> list[tuple[bytes, int, str]]:
    """The images of a part in the order of a folder: bytes, label, path."""
    return [
        (path.read_bytes(), label, str(path))
        for label, name in enumerate(CLASSES)
        for path in sorted((root / part / name).rglob("*"), key=str)
        if path.is_file()
    ]


def write_parquet(root: pathlib.Path, target: pathlib.Path, rows: int = 4) -> pathlib.Path:
    """Write the files of the library ``datasets``, with row groups of two images."""
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", kind), ("label", pyarrow.int64())], metadata=about)
    (target / "data").mkdir(parents=True)
    for part in ("train", "test"):
        images = pictures(root, part)
        count = -(-len(images) // rows)
        for number in range(count):
            held = [
                {"image": {"bytes": content, "path": path}, "label": label}
                for content, label, path in images[number * rows : (number + 1) * rows]
            ]
            file = target / "data" / f"{part}-{number:05d}-of-{count:05d}.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(held, schema), file, row_group_size=2)
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


KINDS = ("imagefolder", "webdataset", "pattern", "no index", "parquet", "csv", "jsonl", "own")


def made(kind: str, photos: pathlib.Path, written: pathlib.Path, folder: pathlib.Path) -> tuple[str, object]:
    """Write the photos, or their shards, as a source of a kind: its ``data.dataset`` and its root."""
    if kind in ("webdataset", "pattern", "no index"):
        root = copied(written, folder / "shards")
        if kind == "no index":
            (root / "index.npz").unlink()
        return "webdataset", f"{root}/{{train,test}}-*.tar" if kind == "pattern" else root
    if kind == "parquet":
        return "parquet", write_parquet(photos, folder / "parquet")
    if kind in ("csv", "jsonl"):
        return "table", write_table(photos, folder, kind)
    (folder / "own.py").write_text(OWN)
    root = copied(photos, folder / "photos")
    return (kind if kind == "imagefolder" else str(folder / "own.py")), root


class Faulty(http.server.ThreadingHTTPServer):
    """A web server of a folder; ``faults`` has by the name of a file its fault and the number of times."""

    daemon_threads = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.folder, self.asked, self.encodings = folder, list[str](), set[str | None]()
        self.sent = 0  # bytes of an endless answer
        self.about: dict[str, str] | None = None  # headers for a tar, instead of the usual ones with its size
        self.faults: dict[str, tuple[str, int]] = {}
        self.ended = threading.Event()

    def tars(self) -> list[str]:
        return sorted(name for name in self.asked if name.endswith(".tar"))

    def handle_error(self, *_) -> None:
        """Clients may leave early."""


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faulty

    def log_message(self, *_):
        pass

    def send_head(self):
        if self.server.about is None or not self.path.endswith(".tar"):
            return super().send_head()
        self.send_response(200)
        for key, value in {**self.server.about, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        return open(self.translate_path(self.path), "rb")

    def send_endlessly(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(OSError):  # the client has left
            while not self.server.ended.is_set():
                self.server.sent += self.wfile.write(bytes(2**16))

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        self.server.encodings.add(self.headers["Accept-Encoding"])
        fault, times = self.server.faults.get(name, ("", 0))
        if times <= 0:
            return super().do_GET()
        self.server.faults[name] = fault, times - 1
        self.close_connection = True
        content = pathlib.Path(self.translate_path(self.path)).read_bytes()
        size, half = len(content), content[: len(content) // 2]
        begun = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + half
        chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size + half
        packed = gzip.compress(content, mtime=0)  # equal bytes at any second
        zipped = (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
        )
        answers = {
            "zips": zipped,
            "dies": begun,
            "dies in a chunk": chunk,
            "alters": begun + bytes(size - len(half)),
        }
        if fault == "silent":
            self.server.ended.wait(60)
        elif fault == "endless":
            self.send_endlessly()
        elif fault.isdigit():
            self.send_error(int(fault))
        else:
            self.wfile.write(answers.get(fault, b"garbage\r\n\r\n"))
        return None


@contextlib.contextmanager
def served(folder: pathlib.Path):
    """Serve a folder: (server, URL)."""
    server = Faulty(folder)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()

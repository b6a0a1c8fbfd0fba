"""Images in every kind of source, and a web server of them that fails as it is told."""

import contextlib
import csv
import functools
import http.server
import json
import os
import pathlib
import shutil
import threading
import time
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from support import error_line

import data
from classify.images.image_set import ImageSet
from classify.images.settings import DataSettings

CLASSES = ("cat", "dog", "eel")
NAMES = ("1.png", "2.JPG", "a.b.png", "ü 50%.png", "deep/er/4.png", "2.webp")


def load(dataset: str, root: object, split: str = "train", **section: object) -> ImageSet:
    return data.load(DataSettings.parse({"dataset": dataset, "root": str(root), **section}), split)


def refused(dataset: str, root: object, **section: Any) -> str:
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


class Faulty(http.server.ThreadingHTTPServer):
    """A server that fails by name: what it does instead of sending a file, and how often."""

    daemon_threads = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked, self.faults = [], {}


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faulty

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
        elif fault in ("dies", "alters"):
            content = pathlib.Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(
                content[:half] if fault == "dies" else content[:half] + bytes(len(content) - half)
            )
            self.close_connection = True
        else:
            self.send_error(int(fault))
        return None


@contextlib.contextmanager
def served(folder: pathlib.Path):
    """A web server of a folder."""
    server = Faulty(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()

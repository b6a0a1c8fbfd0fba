"""Shards, Parquet files, tables and source files of users: the same images as in a folder, and their faults."""

import io
import itertools
import json
import os
import pathlib
import re
import tarfile
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from folders import save, table
from PIL import Image
from sources import (
    CLASSES,
    KINDS,
    NAMES,
    assert_same,
    copied,
    everything,
    files_in,
    load,
    made,
    plain,
    refused,
    served,
    write_parquet,
    write_table,
)

import shards
from classify.images.sources import remote
from classify.images.sources.shard_files import expand


def test_shards_hold_the_files_of_the_folder_and_their_classes(photos, written, tmp_path, capsys):
    assert shards.main(["read", str(written), str(tmp_path / "back")]) == 0
    wanted = {name: content for name, content in plain(photos).items() if "/" in name}
    assert files_in(tmp_path / "back") == wanted
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


def test_interrupted_writing_continues(photos, written, tmp_path, capsys):
    target = tmp_path / "shards"
    (target / "classes.txt").mkdir(parents=True)  # writing fails at it, after all shards
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
    changed = {file.name for file in files if file.stat().st_ino != before[file.name]}
    assert changed <= {files[1].name, files[2].name}
    assert files_in(target) == plain(written)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_source_has_the_images_of_the_folder(photos, written, tmp_path, kind):
    """Decode in each step without and with a cache, and at once."""
    dataset, root = made(kind, photos, written, tmp_path)
    hows: list[dict[str, Any]] = [{"decode": "stream", "cache": {"limit": "1KB"}}, {"decode": "stream"}, {}]
    for split, how in itertools.product(("train", "test"), hows):
        found, wanted = load(dataset, root, split, **how), load("imagefolder", photos, split)
        assert found.is_streamed == bool(how)
        if kind in ("no index", "pattern"):  # the shards give the order
            assert found.classes == wanted.classes
            assert not torch.equal(found.labels, wanted.labels)
            rows, own = ([image.flatten().tolist() for image in everything(each)] for each in (wanted, found))
            order = [rows.index(row) for row in own]
            assert sorted(order) == list(range(len(wanted)))
            assert torch.equal(found.labels, wanted.labels[order])
        else:
            assert_same(found, wanted)


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)


@pytest.fixture
def kept(tmp_path) -> Any:
    """Settings of a cache for remote files."""
    return {"cache": {"folder": str(tmp_path / "cache")}}


def test_shards_of_a_web_server_are_fetched_once(photos, written, tmp_path, hurried, kept):
    with served(written) as (server, url):
        server.faults = {"train-000000.tar": ("500", 2), "train-000001.tar": ("dies", 1)}
        for split in ("train", "test"):
            assert_same(load("webdataset", url, split, **kept), load("imagefolder", photos, split))
        assert [server.asked.count(f"train-00000{number}.tar") for number in range(3)] == [3, 2, 1]
        asked = len(server.asked)
        load("webdataset", url, image_size=16, **kept)
        assert server.asked[asked:] == ["index.npz"]
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_web_server_has_files_by_their_names(photos, written, tmp_path, hurried, kept, kind):
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


def test_a_web_server_has_a_table(photos, tmp_path, kept):
    folder = copied(photos, tmp_path / "p")
    with served(write_table(folder, folder, "csv")) as (_, url):
        assert_same(load("table", url, **kept), load("imagefolder", photos))


def test_braces_are_ranges_and_choices():
    assert list(expand("s-{08..10}.tar")) == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert list(expand("{a,b}/{0..1}")) == ["a/0", "a/1", "b/0", "b/1"]


FIRST = "train-000000.tar"
ATTEMPTS = f"{FIRST}: cannot be read in 5 attempts ("


@table(
    "fault, said",
    errors=(("500", 99), [f"{ATTEMPTS}500", "start again"]),
    silent=(("silent", 99), [f"{ATTEMPTS}not a byte in 0.5 s", "start again"]),
    dies=(("dies", 99), [ATTEMPTS, "start again"]),
    alters=(("alters", 99), [f"{ATTEMPTS}its bytes differ", "start again"]),
    missing=(("404", 99), [f"{FIRST}: no such file; mend data.root"]),
    forbidden=(("403", 1), [f"{FIRST}: cannot be read (403", "start again"]),
)
def test_a_server_without_an_answer_is_one_line(written, tmp_path, monkeypatch, hurried, kept, fault, said):
    if fault[0] == "silent":
        monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    with served(written) as (server, url):
        server.faults = {FIRST: fault}
        line = refused("webdataset", url, **kept)
    assert line.startswith(url) and all(each in line for each in said), line
    assert not list((tmp_path / "cache").rglob("*.raw"))


def rewrite_index(root: pathlib.Path, change) -> None:
    with np.load(root / "index.npz") as file:
        about, arrays = json.loads(file["about"].tobytes()), {k: file[k] for k in file.files if k != "about"}
    change(about, arrays)
    np.savez(root / "index.npz", about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)


def add(file: pathlib.Path, **members: bytes) -> None:
    """Append cat/new.ENDING."""
    with tarfile.open(file, "a") as tar:
        for ending, content in members.items():
            member = tarfile.TarInfo(f"cat/new.{ending}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def spoil_image(root: pathlib.Path) -> None:
    with np.load(root / "index.npz") as file:
        entry = file["part-train"][0]
    with open(root / FIRST, "rb+") as tar:
        tar.seek(int(entry["offset"]))
        tar.write(b"no image")


def without_index(change, names=True):
    def both(root: pathlib.Path) -> None:
        (root / "index.npz").unlink()
        if not names:
            (root / "classes.txt").unlink()
        change(root / FIRST)

    return both


@table(
    "change, said",
    truncated=(lambda root: os.truncate(root / "train-000001.tar", 5000), ["train-000001.tar: has 5,000 bytes, but its index", "write or fetch both anew"]),
    lost=(lambda root: (root / "train-000001.tar").unlink(), ["data.root: ", "train-000001.tar: cannot be used (", "put it there"]),
    bad_image=(spoil_image, ["train-000000.tar, member ", ": not a readable image (cannot identify image file); mend or remove"]),
    other_index=(lambda root: (root / "index.npz").write_bytes(b"x"), ["index.npz: is no index of these shards (", "; write the shards anew"]),
    offsets=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["offset"][1:2].__isub__(512)), ["train-000000.tar: no image of ", "the shard and its index differ"]),
    sizes=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["size"][:1].__isub__(1)), ["train-000000.tar: no image of ", "the shard and its index differ"]),
    beyond=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["size"].__iadd__(10**6)), ["index.npz: ", "beyond the end of train-000000.tar"]),
    labels=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["label"].__iadd__(7)), ["index.npz: ", "it has the label 9, but 3 classes"]),
    counts=(lambda root: rewrite_index(root, lambda about, _: about["parts"]["train"][0].update(stop=1)), ["index.npz: ", "the counts of images are wrong at train-000001.tar"]),
    positions=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["position"].__ixor__(1)[:1].fill(0)), ["index.npz: ", "its positions are not those of all images"]),
    cut_tar=(without_index(lambda tar: os.truncate(tar, 5000)), ["train-000000.tar: not a readable tar (unexpected end of data); is it whole?"]),
    no_tar=(without_index(lambda tar: tar.write_bytes(b"x" * 2000)), ["train-000000.tar: not a readable tar ("]),
    no_label=(without_index(lambda tar: add(tar, png=b"x")), ["train-000000.tar: the member cat/new has no label; add KEY.cls"]),
    no_image=(without_index(lambda tar: add(tar, json=b'{"label": 1}')), ["train-000000.tar: the member cat/new has no image (.jpg"]),
    number=(without_index(lambda tar: add(tar, png=b"x", cls=b"3")), ["train-000000.tar: the label '3' is no class: the dataset names 3 classes"]),
    unnamed=(without_index(lambda tar: add(tar, png=b"x", json=b'{"class": "cow"}'), names=False), ["the label ", " is no class: other labels are names"]),
    empty=(lambda root: [each.unlink() for each in root.glob("*")], ["data.root: ", "holds no *.tar; give their folder"]),
)  # fmt: skip
def test_damaged_shards_are_one_line(written, tmp_path, change, said):
    root = copied(written, tmp_path / "shards")
    change(root)
    line = refused("webdataset", root)
    assert all(each in line for each in said), line
    assert not list(root.glob(".images*.raw"))


GREY = io.BytesIO()
Image.new("L", (8, 8)).save(GREY, "png")
GOOD = [GREY.getvalue()] * 3


def parquet(folder: pathlib.Path, label=(0, 0, 1, 1), **columns) -> None:
    folder.mkdir()
    columns["label"] = list(label)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")


@table(
    "dataset, change, said",
    parquet=("parquet", lambda root: parquet(root, image=[*GOOD, b"x"]), ["train.parquet, row 3: not a readable image (cannot identify"]),
    no_column=("parquet", lambda root: parquet(root, picture=[*GOOD, b"x"]), ["train.parquet: has no column of images (image or img); it has picture, label"]),
    no_value=("parquet", lambda root: parquet(root, image=[b"x", b"y"], label=[0, None]), ["train.parquet: row 1 has no label"]),
    no_bytes=("parquet", lambda root: parquet(root, image=[*({"bytes": each, "path": "a"} for each in (*GOOD, None))]), ["train.parquet: row 3 holds no image, or only its path"]),
    one_class=("parquet", lambda root: parquet(root, [0] * 3, image=GOOD), ["train.parquet: there is only the class '0'"]),
    no_parquet=("parquet", lambda root: save(root / "x.png", 1).rename(root / "train.parquet"), ["train.parquet: not a readable Parquet file ("]),
    no_table=("table", lambda root: root.mkdir(), ["data.root: ", "holds no table of training images; it needs train.csv"]),
    no_path=("table", lambda root: save(root / "a.png", 1).with_name("train.csv").write_text("label\n1\n"), ["train.csv, line 2: has no path (path, file_name"]),
    no_json=("table", lambda root: save(root / "a.png", 1).with_name("train.jsonl").write_text("{\n"), ["train.jsonl, line 1: has no path"]),
    mixed=("table", lambda root: save(root / "a.png", 1).with_name("train.csv").write_text("path,label\na.png,1\na.png,cat\n"), ["train.csv, line 2: the label '1' is no class: other labels are names"]),
    no_file=("table", lambda root: save(root / "a.png", 1).with_name("train.csv").write_text("path,label\na.png,1\na.png,1\na.png,0\nb.png,0\n"), ["b.png: ", "No such file"]),
    own_missing=("own.py", None, ["data.dataset: own.py: no such file"]),
    own_fails=("own.py", "def source(root):\n    return 1 / 0\n", ["data.dataset: own.py: fails in line 2 (ZeroDivisionError: division by zero); mend it"]),
    own_empty=("own.py", "def source(root):\n    return {'train': []}\n", ["data.dataset: own.py: source(root) gives train (0); must give images"]),
    own_other=("own.py", "def source(root):\n    return 5\n", ["data.dataset: own.py: source(root) gives int without classes, parts"]),
    own_none=("own.py", "def sauce(root):\n    return 5\n", ["data.dataset: own.py: has no source; define source(root)"]),
    unknown=("tfrecord", None, ["data.dataset: 'tfrecord': unknown dataset; use one of cifar10, digits, imagefolder, webdataset, parquet, table, or a file FILE.py of your own"]),
    library=("webdataset", "az://box/set", ["az://box/set/index.npz: az:// needs adlfs; pip install adlfs"]),
    protocol=("webdataset", "nfs9://box/set", ["nfs9://box/set/index.npz: cannot be opened (Protocol not known: nfs9"]),
)  # fmt: skip
def test_an_invalid_source_is_one_line(tmp_path, monkeypatch, dataset, change, said):
    monkeypatch.chdir(tmp_path)
    root: Any = tmp_path / "root"
    if callable(change):
        change(root)
    elif dataset == "own.py" and change:
        pathlib.Path(dataset).write_text(change)
    elif change:
        root = change
    line = refused(dataset, root, test=0.5)
    assert all(each in line for each in said), line


@pytest.fixture
def store(written):
    """An object store asks for credentials and has the shards with and without their index."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    account = {"region_name": "us-east-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = boto3.client("s3", endpoint_url=url, **account)
    client.create_bucket(Bucket="box")
    for name, content in plain(written).items():
        client.put_object(Bucket="box", Key=f"photos/{name}", Body=content)
        if name != "index.npz":
            client.put_object(Bucket="box", Key=f"bare/{name}", Body=content)
    yield url
    server.stop()


def test_an_object_store_has_shards_and_asks_for_credentials(
    photos, store, tmp_path, kept, monkeypatch, hurried
):
    section: Any = {"storage": {"endpoint_url": store}, **kept}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a")
    wanted = load("imagefolder", photos)
    assert_same(load("webdataset", "s3://box/photos", **section), wanted)
    found = load("webdataset", "s3://box/bare", **section)
    assert found.labels.bincount().tolist() == wanted.labels.bincount().tolist()
    assert "s3://box/none: holds no *.tar" in refused("webdataset", "s3://box/none", **section)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    line = refused("webdataset", "s3://box/photos", storage={"endpoint_url": f"{store}/"}, **kept)
    assert line.startswith("s3://box/photos/index.npz: is refused (")
    assert "credentials in the environment" in line

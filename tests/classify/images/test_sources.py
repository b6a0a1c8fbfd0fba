"""Shards, Parquet files, tables and source files of users: the same images as in a folder, and their faults."""

import io
import itertools
import json
import os
import pathlib
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
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
    load,
    made,
    opened,
    plain,
    refused,
    served,
    write_parquet,
)
from support import contents

import shards
from classify.images.listing import ListedSource
from classify.images.settings import DATASETS, CacheSettings, DataSettings
from classify.images.sources import SOURCES, open_source, remote
from classify.images.sources.shards import expand


def images_in(folder: pathlib.Path) -> Iterator[bytes]:
    for file in folder.glob("*.tar"):
        with tarfile.open(file) as tar:
            for member in tar:
                if not member.name.endswith(".cls"):
                    content = tar.extractfile(member)
                    assert content
                    yield content.read()


def test_shards_hold_the_files_of_the_folder_and_their_classes(photos, written, tmp_path, capsys):
    wanted = [content for name, content in plain(photos).items() if "/" in name]
    assert sorted(images_in(written)) == sorted(wanted)
    again = tmp_path / "again"
    assert shards.main(["write", str(photos), str(again), "--size-limit", "40KB"]) == 0
    assert contents(again) == plain(written)
    with tarfile.open(next(iter(sorted(written.glob("train-*.tar"))))) as tar:
        keys = [name.partition(".") for name in (re.sub("^.*/", "", each) for each in tar.getnames())]
        assert [each[0] for each in keys[::2]] == [each[0] for each in keys[1::2]]
        assert {each[2] for each in keys[1::2]} == {"cls"}
    other = tmp_path / "other"
    assert shards.main(["write", str(photos), str(other), "--size-limit", "40KB", "--seed", "1"]) == 0
    assert contents(other) != plain(written)
    capsys.readouterr()
    assert shards.main(["write", str(photos), str(other), "--seed=-1"]) == 2
    assert capsys.readouterr().err == "shards.py: --seed: -1: must be 0 or more\n"
    assert shards.main(["write", str(photos / "train"), str(other)]) == 2
    assert "which is not a shard of" in capsys.readouterr().err


def test_an_image_in_a_tar_is_named_by_its_member_before_it_is_read(written):
    names = opened(written, dataset="webdataset").file_names("train", range(18))
    assert all(
        re.fullmatch(rf"{written}/train-\d+\.tar, member (cat|dog|eel)/.+", str(name)) for name in names
    )
    assert len(set(names)) == 18


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
    assert contents(target) == plain(written)


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
        assert "does not list its files; give the names" in refused(dataset, f"{url}/none", **kept)
    assert found.classes == CLASSES and len(found.images) == len(NAMES) * len(CLASSES)


def test_no_table_names_a_url(tmp_path):
    save(tmp_path / "a.png", 1)
    url = "https://host/a.png"
    (tmp_path / "train.csv").write_text(f"path,label\na.png,0\n{url},1\n")
    remedy = "download the images, or write them as shards (shards.py)"
    assert refused("table", tmp_path) == f"{tmp_path}/train.csv, line 3: {url}: is a URL; {remedy}"
    assert (
        refused("table", "https://host") == f"data.root: https://host: a table must be in a folder; {remedy}"
    )
    (tmp_path / "own.py").write_text(f"def source(root):\n    return {{'all': [('{url}', 1)]}}\n")
    line = refused(str(tmp_path / "own.py"), tmp_path)
    assert line == f"data.dataset: {tmp_path}/own.py: source(root) returns the URL {url}; {remedy}"


def test_braces_are_ranges_and_choices():
    assert list(expand("s-{08..10}.tar")) == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert list(expand("{a,b}/{0..1}")) == ["a/0", "a/1", "b/0", "b/1"]


FIRST = "train-000000.tar"
ATTEMPTS = f"{FIRST}: cannot be read in 5 attempts ("


@table(
    "fault, said",
    errors=(("500", 99), [f"{ATTEMPTS}500", "start again"]),
    silent=(("silent", 99), [f"{ATTEMPTS}no byte arrived in 0.5 s", "start again"]),
    dies=(("dies", 99), [ATTEMPTS, "start again"]),
    alters=(("alters", 99), [f"{ATTEMPTS}its bytes differ", "start again"]),
    missing=(("404", 99), [f"{FIRST}: no such file; correct data.root"]),
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


def overwrite(file: pathlib.Path, start: int, new: bytes) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:start] + new + content[start + len(new) :])


def rewrite_index(root: pathlib.Path, change) -> None:
    with np.load(root / "index.npz") as file:
        about, arrays = json.loads(file["about"].tobytes()), {k: file[k] for k in file.files if k != "about"}
    change(about, arrays)
    np.savez(root / "index.npz", about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)


def add(
    file: pathlib.Path, name: str = "cat/new", pax: dict[str, str] | None = None, **members: bytes
) -> None:
    """Append NAME.ENDING."""
    with tarfile.open(file, "a", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as tar:
        for ending, content in members.items():
            member = tarfile.TarInfo(f"{name}.{ending}")
            member.size, member.pax_headers = len(content), pax or {}
            tar.addfile(member, io.BytesIO(content))


def headers(file: pathlib.Path, kind: bytes, count: int = 1, size: int = 0) -> None:
    """Append headers of a type, which announce a size."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    with tarfile.open(file, "a") as tar:
        tar.fileobj.seek(tar.offset)
        tar.fileobj.write(header.tobuf(tarfile.GNU_FORMAT) * count + bytes(1024))


def spoil_image(root: pathlib.Path) -> None:
    with np.load(root / "index.npz") as file:
        entry = file["part-train"][0]
    with open(root / FIRST, "rb+") as tar:
        tar.seek(int(entry["offset"]))
        tar.write(b"no image")


def rewrite_array(name: str, content: bytes, kind: int = zipfile.ZIP_STORED):
    """Put other bytes in the place of an array."""

    def write(root: pathlib.Path) -> None:
        with zipfile.ZipFile(root / "index.npz") as file:
            held = {each: file.read(each) for each in file.namelist()}
        with zipfile.ZipFile(root / "index.npz", "w", kind) as file:
            for each, before in {**held, f"{name}.npy": content}.items():
                file.writestr(each, before)

    return write


def array(shape: tuple[int, ...], kind: str, content: bytes = b"") -> bytes:
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": kind, "fortran_order": False, "shape": shape})
    return made.getvalue() + content


def without_index(change, names=True):
    def both(root: pathlib.Path) -> None:
        (root / "index.npz").unlink()
        if not names:
            (root / "classes.txt").unlink()
        change(root / FIRST)

    return both


@table(
    "change, said",
    truncated=(lambda root: os.truncate(root / "train-000001.tar", 5000), ["train-000001.tar: has 5,000 bytes, but its index", "write or fetch both again"]),
    lost=(lambda root: (root / "train-000001.tar").unlink(), ["data.root: ", "train-000001.tar: cannot be used (", "put it there"]),
    bad_image=(spoil_image, ["train-000000.tar, member ", ": not a readable image (cannot identify image file); repair or remove"]),
    other_index=(lambda root: (root / "index.npz").write_bytes(b"x"), ["index.npz: is not an index of these shards (", "; write the shards again"]),
    offsets=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["offset"][1:2].__isub__(512)), ["train-000000.tar: no image of ", "the shard and its index differ"]),
    sizes=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["size"][:1].__isub__(1)), ["train-000000.tar: no image of ", "the shard and its index differ"]),
    beyond=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["size"].__iadd__(10**6)), ["index.npz: ", "beyond the end of train-000000.tar"]),
    labels=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["label"].__iadd__(7)), ["index.npz: ", "it has the label 9, but 3 classes"]),
    counts=(lambda root: rewrite_index(root, lambda about, _: about["parts"]["train"][0].update(stop=1)), ["index.npz: ", "the counts of images are wrong at train-000001.tar"]),
    positions=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["position"].__ixor__(1)[:1].fill(0)), ["index.npz: ", "its positions do not name every image once"]),
    cut_tar=(without_index(lambda tar: os.truncate(tar, 5000)), ["train-000000.tar: not a readable tar (unexpected end of data); it may be incomplete"]),
    no_tar=(without_index(lambda tar: tar.write_bytes(b"x" * 2000)), ["train-000000.tar: not a readable tar ("]),
    no_label=(without_index(lambda tar: add(tar, png=b"x")), ["train-000000.tar: the sample cat/new has no label; add KEY.cls"]),
    no_image=(without_index(lambda tar: add(tar, json=b'{"label": 1}')), ["train-000000.tar: the sample cat/new has no image (.jpg"]),
    number=(without_index(lambda tar: add(tar, png=b"x", cls=b"3")), ["train-000000.tar: the label '3' is not a class: the dataset names 3 classes"]),
    unnamed=(without_index(lambda tar: add(tar, png=b"x", json=b'{"class": "cow"}'), names=False), ["the label ", " is not a class: other labels are names"]),
    page=(lambda root: (root / "index.npz").write_text("<!DOCTYPE html><title>Log in</title>"), ["index.npz: is not an index of these shards (it is a web page; does its server ask to log in?)"]),
    objects=(rewrite_array("part-train", array((2,), "|O", b"x")), ["index.npz: is not an index of these shards (its part-train is not an array that shards.py writes)"]),
    zeros=(rewrite_array("part-train", array((10**12,), "<u8")), ["its part-train is not an array that shards.py writes"]),
    packed=(rewrite_array("part-train", array((10**8,), "|u1", bytes(10**8)), zipfile.ZIP_DEFLATED), ["its about is not an array that shards.py writes"]),
    many=(lambda root: (root / "index.npz").write_bytes(b"PK\1\2" * 10**6), ["it has too many files"]),
    far=(lambda root: rewrite_index(root, lambda _, arrays: arrays["part-train"]["position"][:1].__ior__(2**31)), ["its positions do not name every image once"]),
    elsewhere=(lambda root: rewrite_index(root, lambda about, _: about["parts"]["train"][0].update(url="../x.tar")), ["index.npz: names the shard '../x.tar', which is not in its folder"]),
    field=(lambda root: rewrite_index(root, lambda about, _: about["parts"]["train"][0].update(size="9")), ["the fields of a shard have the wrong types"]),
    part=(lambda root: rewrite_index(root, lambda about, _: about["parts"].update({"../x": []})), ["it has no parts of all, test, train, val"]),
    long_name_of_array=(lambda root: overwrite(root / "index.npz", 26, b"\xff\xff"), ["index.npz: is not an index of these shards (File name in directory 'about.npy' and header"]),
    nested_index=(rewrite_array("about", array((10**5,), "|u1", b"[" * 10**5)), ["index.npz: is not an index of these shards (maximum recursion depth exceeded"]),
    sparse=(without_index(lambda tar: headers(tar, tarfile.GNUTYPE_SPARSE)), ["train-000000.tar: not a readable tar (a member is a sparse file"]),
    pax_sparse=(without_index(lambda tar: add(tar, pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, png=b"x")), ["train-000000.tar: not a readable tar (a member is a sparse file"]),
    pax_map=(without_index(lambda tar: add(tar, pax={"GNU.sparse.map": "x"}, png=b"x")), ["train-000000.tar: not a readable tar (a member is a sparse file"]),
    pax_size=(without_index(lambda tar: headers(tar, tarfile.XHDTYPE, size=2**33)), ["train-000000.tar: not a readable tar (a header says that 8,589,934,592 bytes follow)"]),
    pax_back=(without_index(lambda tar: add(tar, pax={"size": "-4096"}, png=b"x", cls=b"0")), ["train-000000.tar: not a readable tar ("]),
    pax_chain=(without_index(lambda tar: headers(tar, tarfile.XHDTYPE, 2000)), ["train-000000.tar: not a readable tar (too many headers before a member)"]),
    long_name=(without_index(lambda tar: headers(tar, tarfile.GNUTYPE_LONGNAME, size=2**20)), ["train-000000.tar: not a readable tar (a header says that 1,048,576 bytes follow)"]),
    middle=(without_index(lambda tar: tar.write_bytes(b"x" * 512 + tar.read_bytes()[512:])), ["train-000000.tar: not a readable tar ("]),
    later=(without_index(lambda tar: tar.write_bytes(tar.read_bytes().rstrip(b"\0") + bytes(600) + b"x" * 5000)), ["train-000000.tar: not a readable tar (no header at byte "]),
    digits=(without_index(lambda tar: add(tar, png=b"x", cls=b"9" * 5000), names=False), ["train-000000.tar: the sample cat/new: the label '99999999999999999999'... has 5,000 characters"]),
    nested=(without_index(lambda tar: add(tar, png=b"x", json=b"[" * 50_000)), ["train-000000.tar: the sample cat/new has no label"]),
    long_label=(without_index(lambda tar: add(tar, png=b"x", cls=bytes(10**6))), ["train-000000.tar: the member cat/new.cls has 1,000,000 bytes, more than 65,536"]),
    negative=(without_index(lambda tar: add(tar, png=b"x", cls=b"-1"), names=False), ["train-000000.tar: the label -1: is not the number of a class"]),
    empty=(lambda root: [each.unlink() for each in root.glob("*")], ["data.root: ", "holds no *.tar; give the folder of such files"]),
)  # fmt: skip
def test_damaged_shards_are_one_line(written, tmp_path, change, said):
    root = copied(written, tmp_path / "shards")
    change(root)
    line = refused("webdataset", root)
    assert all(each in line for each in said) and len(line) < 1_000, line
    assert not list(root.glob(".images*.raw"))


GREY = io.BytesIO()
Image.new("L", (8, 8)).save(GREY, "png")
GOOD = [GREY.getvalue()] * 3


def parquet(folder: pathlib.Path, label=(0, 0, 1, 1), **columns) -> None:
    folder.mkdir()
    columns["label"] = list(label)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")


def test_every_dataset_has_a_source():
    assert (*SOURCES,) == DATASETS


def test_a_replaced_parquet_file_is_read_again(tmp_path):
    settings = DataSettings("parquet", str(tmp_path / "p"), cache=CacheSettings(str(tmp_path / "cache")))
    for images in ([b"a", b"b", b"c", b"d"], [b"e", b"f", b"g", b"h"]):
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
        parquet(tmp_path / "p", image=images)
        opened = open_source(settings)
        assert isinstance(opened, ListedSource)
        assert [opened.listing("all").read(index) for index in range(4)] == images


def parquet_of(folder: pathlib.Path, columns: list[str], values: list[Any], names: object = None) -> None:
    """Write columns of any names, with the class names of the label."""
    folder.mkdir()
    features = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
    about = "[" * 100_000 if names == "[" else json.dumps(features)
    made = pyarrow.Table.from_arrays([pyarrow.array(each) for each in values], columns)
    made = made.replace_schema_metadata({b"huggingface": about.encode()})
    pyarrow.parquet.write_table(made, folder / "train.parquet")


def rows(text: str | bytes, name: str = "train.csv"):
    """Write an image ``a.png`` and a table into the same folder."""

    def write(root: pathlib.Path) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        save(root / "a.png", 1).with_name(name).write_bytes(content)

    return write


@table(
    "dataset, change, said",
    parquet=("parquet", lambda root: parquet(root, image=[*GOOD, b"x"]), ["train.parquet, row 3: not a readable image (cannot identify"]),
    no_column=("parquet", lambda root: parquet(root, picture=[*GOOD, b"x"]), ["train.parquet: has no column of images (image or img); it has picture, label"]),
    no_value=("parquet", lambda root: parquet(root, image=[b"x", b"y"], label=[0, None]), ["train.parquet: row 1 has no label"]),
    no_bytes=("parquet", lambda root: parquet(root, image=[*({"bytes": each, "path": "a"} for each in (*GOOD, None))]), ["train.parquet: row 3 holds no image, or only its path"]),
    one_class=("parquet", lambda root: parquet(root, [0] * 3, image=GOOD), ["train.parquet: there is only the class '0'"]),
    no_rows=("parquet", lambda root: parquet(root, [], image=pyarrow.array([], pyarrow.binary())), ["train.parquet: holds no image; remove it"]),
    many_rows=("parquet", lambda root: parquet(root, [0, 1] * 10_000, image=[b"x"] * 20_000), ["train.parquet: not a readable Parquet file (20,000 rows in "]),
    column_twice=("parquet", lambda root: parquet_of(root, ["image", "label", "label"], [GOOD, [0, 1, 0], [0, 1, 0]]), ["train.parquet: has the column 'label' more than once"]),
    names_of_numbers=("parquet", lambda root: parquet_of(root, ["image", "label"], [GOOD, [0, 1, 0]], names=5), ["train.parquet: not a readable Parquet file (the class names of 'label' are not a list of strings)"]),
    nested_names=("parquet", lambda root: parquet_of(root, ["image", "picture"], [GOOD, [0, 1, 0]], names="["), ["train.parquet: has no column of labels"]),
    label_lists=("parquet", lambda root: parquet_of(root, ["image", "label"], [GOOD, [[0], [1], [0]]]), ["train.parquet: not a readable Parquet file ("]),
    label_digits=("parquet", lambda root: parquet_of(root, ["image", "label"], [GOOD, ["0", "1", "9" * 5000]]), ["train.parquet: the label '99999999999999999999'... has 5,000 characters"]),
    no_parquet=("parquet", lambda root: save(root / "x.png", 1).rename(root / "train.parquet"), ["train.parquet: not a readable Parquet file ("]),
    no_table=("table", lambda root: root.mkdir(), ["data.root: ", "holds no table of training images; it needs train.csv"]),
    no_path=("table", rows("label\n1\n"), ["train.csv, line 1: names label, but no column path (or file_name, image, url); line 1 must name the columns"]),
    no_head=("table", rows("a.png,1\na.png,2\n"), ["train.csv, line 1: names a.png, 1, but no column path (or file_name, image, url); line 1 must"]),
    other_code=("table", rows("path,label\na.png,1\n".encode("utf-16")), ["train.csv, line 1: names ", "but no column path (or file_name"]),
    twice=("table", rows("path,label,label\na.png,1,2\n"), ["train.csv, line 1: names the column label twice; remove one of them"]),
    short_row=("table", rows('path,label\n"a\n.png",1\na.png\n'), ["train.csv, line 4: has no label in the field label or class; add one, or remove the row"]),
    long_field=("table", rows("path,label\n" + "a" * 200_000 + ",1\n"), ["train.csv: not a readable table (field larger than field limit (131072)); write CSV in UTF-8, or JSON lines"]),
    long_label=("table", rows("path,label\na.png,1\na.png," + "9" * 5000 + "\n"), ["train.csv, line 3: the label '99999999999999999999'... has 5,000 characters, more than 255; give a shorter one"]),
    negative=("table", rows("path,label\na.png,0\na.png,1\na.png,-1\n"), ["train.csv, line 4: the label -1: is not the number of a class; give a number from 0 on or a name, or remove the row"]),
    zero_byte=("table", rows('{"path": "a\\u0000.png", "label": 0}\n{"path": "a.png", "label": 0}\n' + '{"path": "a.png", "label": 1}\n' * 2, "train.jsonl"), ["a\\x00.png: cannot be used (", "null byte"]),
    half_letter=("table", rows('{"path": "a.png", "label": "\\ud800"}\n{"path": "a.png", "label": "b"}\n', "train.jsonl"), ["train.jsonl, line 1: the label '\\ud800': is not text in UTF-8"]),
    nested=("table", rows("[" * 100_000, "train.jsonl"), ["train.jsonl, line 1: is not JSON (maximum recursion depth exceeded", "; write an object with path"]),
    digits=("table", rows('{"path": "a.png", "label": ' + "9" * 5000 + "}", "train.jsonl"), ["train.jsonl, line 1: is not JSON (Exceeds the limit", "; write an object with path"]),
    list_label=("table", rows('{"path": "a.png", "label": [1]}', "train.jsonl"), ["train.jsonl, line 1: label: [1]: must be a text or a whole number"]),
    no_object=("table", rows("[1]\n", "train.jsonl"), ["train.jsonl, line 1: has no path in the field path or file_name"]),
    no_json=("table", rows("{\n", "train.jsonl"), ["train.jsonl, line 1: is not JSON (Expecting property name", "; write an object with path and label"]),
    mixed=("table", rows("path,label\na.png,1\na.png,cat\n"), ["train.csv, line 2: the label '1' is not a class: other labels are names"]),
    no_file=("table", rows("path,label\na.png,1\na.png,1\na.png,0\nb.png,0\n"), ["b.png: ", "No such file"]),
    own_missing=("own.py", None, ["data.dataset: own.py: no such file"]),
    own_fails=("own.py", "def source(root):\n    return 1 / 0\n", ["data.dataset: own.py: fails in line 2 (ZeroDivisionError: division by zero); correct it"]),
    own_empty=("own.py", "def source(root):\n    return {'train': []}\n", ["data.dataset: own.py: source(root) returns 0 images of train; return images"]),
    own_other=("own.py", "def source(root):\n    return 5\n", ["data.dataset: own.py: source(root) returns int without classes, parts"]),
    own_none=("own.py", "def sauce(root):\n    return 5\n", ["data.dataset: own.py: has no source; define source(root)"]),
    unknown=("tfrecord", None, ["data.dataset: 'tfrecord': must be one of cifar10, digits, ", ", or a file FILE.py of yours"]),
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

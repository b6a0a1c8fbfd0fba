"""Readers of foreign files end in ``InvalidInput`` or succeed, whatever bytes they get, in a bounded memory."""

import gc
import io
import json
import os
import pathlib
import resource
import shutil
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support import fork

from classify.images.listing import ListedSource
from classify.images.settings import CacheSettings, DataSettings
from classify.images.sources import open_source
from classify.images.sources.shard_index import ENTRY
from deepspeed_trial.errors import InvalidInput

SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))
MEMORY = 2**30  # bytes that a reader may take
DISK = 2**26  # bytes of a file that a reader may write

NUMBERS = st.sampled_from(
    [0, 1, 2, 7, 511, 512, 513, 2**16, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 10**30, -1, -512]
)
NAMES = st.one_of(
    st.sampled_from(
        ["a.png", "a.cls", "b.json", "a/../c.png", "../../x.png", "/tmp/x.png", "..", ".", "", "\0.png"]
    ),
    st.text(max_size=12),
)
SCALARS = st.one_of(NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=8), st.just("9" * 5000))
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3), max_leaves=6
)  # fmt: skip
NESTED = st.builds(
    lambda count, part: part * count, st.sampled_from([10, 10_000, 200_000]), st.sampled_from(["[", '{"a":'])
)


@st.composite
def edited(draw, content: st.SearchStrategy[bytes], most: int = 4) -> bytes:
    """Bytes with some places overwritten, cut out, put in twice or cut off."""
    made = bytearray(draw(content))
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(made)))
        stop = min(len(made), start + draw(st.sampled_from([1, 2, 4, 8, 100, 512, 5000])))
        kind = draw(st.sampled_from(["write", "cut", "twice", "end", "number"]))
        if kind == "write":
            new = draw(st.binary(min_size=1, max_size=8))
            made[start : start + len(new)] = new
        elif kind == "number":
            made[start : start + 8] = struct.pack("<Q", draw(NUMBERS) % 2**64)
        elif kind == "cut":
            del made[start:stop]
        elif kind == "twice":
            made[start:start] = made[start:stop]
        else:
            del made[start:]
    return bytes(made)


# ----------------------------------------------------------------------------------------------- kinds of files

PAX = st.dictionaries(
    st.sampled_from(
        "path size mtime uid linkpath hdrcharset GNU.sparse.map GNU.sparse.size GNU.sparse.major GNU.sparse.minor"
        " GNU.sparse.name GNU.sparse.realsize comment".split()
    ),
    st.one_of(NUMBERS.map(str), st.text(max_size=8), st.sampled_from(["1", "0", "BINARY", "0,512", "9" * 5000, "x" * 40_000])),
    max_size=4,
)  # fmt: skip
TYPES = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE,
         tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"Z", b"\0"]  # fmt: skip


def record(key: str, value: str) -> bytes:
    """One record of a pax header."""
    text = f" {key}={value}\n".encode(errors="replace")
    length = len(text) + len(str(len(text)))
    return str(length + (len(str(length)) > len(str(len(text))))).encode() + text


CONTENTS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"0", b"1", b"cat", b"9" * 5000, b'{"label": 1}', b"1\n0\n512\n", b"9" * 9 + b"\n"]),
    NESTED.map(str.encode),
    VALUES.map(lambda each: json.dumps({"label": each}).encode()),
    PAX.map(lambda each: b"".join(record(*pair) for pair in each.items())),
)


@st.composite
def members(draw) -> bytes:
    """One or many members alike: a header with a right checksum, and content that may have another length."""
    content = draw(edited(CONTENTS, 1))
    about = tarfile.TarInfo(draw(NAMES))
    about.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + TYPES))
    about.size = draw(st.just(len(content)) | NUMBERS.map(lambda each: max(0, each) % 2**60))
    about.linkname = draw(st.sampled_from(["", "/tmp", "../..", "a"]))
    head = bytearray(about.tobuf(tarfile.GNU_FORMAT, errors="replace")[-512:])
    if draw(st.integers(0, 9)) == 0:  # any field
        start = draw(st.integers(0, 511))
        new = draw(st.binary(min_size=1, max_size=12))[: 512 - start]
        head[start : start + len(new)] = new
        head[148:156] = b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * ord(" "))
    made = bytes(head) + content + bytes(-len(content) % 512)
    return made * min(draw(st.sampled_from([1] * 8 + [2, 500])), 1 + 2**20 // len(made))


def good_members() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in (("a.png", b"x"), ("a.cls", b"0"), ("b.png", b"y"), ("b.json", b'{"label": 1}')):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    return made.getvalue().rstrip(b"\0").ljust(8 * 512, b"\0")


GOOD_TAR = good_members()
tars = edited(st.lists(members(), max_size=6).map(lambda each: GOOD_TAR + b"".join(each) + bytes(1024)), 1)


@st.composite
def arrays(draw, array: np.ndarray) -> bytes:
    """An array's file, whose head may announce any type and shape."""
    held = io.BytesIO()
    if draw(st.integers(0, 5)):
        np.save(held, array)
        return held.getvalue()
    kind = draw(st.sampled_from(["|O", "<u8", "|u1", "|V1000000", [("a", "|O")]]))
    shape = draw(st.sampled_from([(), (2,), (-1,), (10**12,), (2, 10**9), (2**63,)]))
    np.lib.format.write_array_header_1_0(held, {"descr": kind, "fortran_order": False, "shape": shape})
    return held.getvalue() + array.tobytes()


@st.composite
def indices(draw) -> bytes:
    """A zip of arrays, whose JSON and whose heads may say anything."""
    shard = {
        "url": "train-000000.tar",
        "size": len(GOOD_TAR) + 1024,
        "start": 0,
        "stop": 2,
        "sha256": "",
        "version": "",
    }
    about: dict[str, Any] = {"format": 1, "source": "", "classes": ["a", "b"], "parts": {"all": [shard]}}
    entries = np.array([(512, 1, 0, 0), (2560, 1, 1, 1)], ENTRY)
    if draw(st.booleans()):
        place = draw(st.sampled_from([about, shard]))
        place[draw(st.sampled_from(sorted(place)))] = draw(VALUES)
    else:
        for field in draw(st.sets(st.sampled_from(sorted(ENTRY.fields or ())))):
            entries[field][draw(st.integers(0, 1))] = draw(NUMBERS) % 2**32
    text = draw(st.one_of(*[st.just(json.dumps(about))] * 9, NESTED)).encode()
    made = io.BytesIO()
    kind = draw(st.sampled_from([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(made, "w", kind) as file:
        for name, array in (("about", np.frombuffer(text, np.uint8)), ("part-all", entries)):
            file.writestr(f"{name}.npy", draw(arrays(array)))
    return draw(edited(st.just(made.getvalue()), 2))


@st.composite
def parquets(draw) -> bytes:
    """A table with columns of several types and names, in pages of several encodings."""
    rows = draw(st.integers(0, 5))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns: list[tuple[str, pyarrow.Array]] = []
    for name in draw(
        st.lists(st.sampled_from(["image", "img", "label", "image", "label", "class"]), max_size=4)
    ) or ["image", "label"]:
        values = draw(
            st.sampled_from(
                [
                    pyarrow.array([{"bytes": b"x", "path": "a"}] * rows, kind),
                    pyarrow.array([b"x"] * rows, pyarrow.binary()),
                    pyarrow.array([None] * rows),
                    pyarrow.array([each % 2 for each in range(rows)], pyarrow.int64()),
                    pyarrow.array([f"c{each % 2}" for each in range(rows)], pyarrow.string()),
                    pyarrow.array([[each] for each in range(rows)], pyarrow.list_(pyarrow.int64())),
                    pyarrow.array([0.5] * rows, pyarrow.float64()),
                    pyarrow.array(["9" * 5000] * rows),
                    pyarrow.array(["a", "b", "a", "b", "a"][:rows]).dictionary_encode(),
                ]
            )
        )
        columns.append((name, values))
    names = draw(st.one_of(st.just(["a", "b"]), VALUES))
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    about = draw(
        st.one_of(st.just(json.dumps({"info": {"features": features}})), NESTED, VALUES.map(json.dumps))
    )
    table = pyarrow.Table.from_arrays([each for _, each in columns], [name for name, _ in columns])
    made = io.BytesIO()
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({b"huggingface": about.encode()}),
        made,
        row_group_size=draw(st.sampled_from([1, 2, 100])),
        compression=draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
        use_dictionary=draw(st.booleans()),
    )
    return draw(edited(st.just(made.getvalue())))


CELLS = st.one_of(SCALARS.map(str), NAMES, st.just("x" * 200_000), st.sampled_from(['"', "\r", "\n", "\0"]))
LINES = st.lists(st.lists(CELLS, max_size=3).map(",".join), max_size=4)
csvs = edited(
    LINES.map(
        lambda each: "\n".join(["path,label", "a.png,0", "b.png,1", *each]).encode(errors="surrogatepass")
    )
)
OBJECTS = st.one_of(
    st.dictionaries(st.sampled_from(["path", "url", "label", "class"]), VALUES).map(json.dumps), NESTED, VALUES.map(json.dumps)
)  # fmt: skip
ROWS = ['{"path": "a.png", "label": 0}', '{"path": "b.png", "label": 1}']
jsons = edited(
    st.lists(OBJECTS, max_size=4).map(lambda each: "\n".join([*ROWS, *each]).encode(errors="surrogatepass"))
)

READERS = {
    "tar": ("webdataset", "train-000000.tar", tars),
    "index": ("webdataset", "index.npz", indices()),
    "parquet": ("parquet", "train-000000.parquet", parquets()),
    "csv": ("table", "train.csv", csvs),
    "jsonl": ("table", "train.jsonl", jsons),
}


# --------------------------------------------------------------------------------------------------- the oracle


def read_all(dataset: str, root: pathlib.Path) -> None:
    """Read all images of a dataset."""
    settings = DataSettings(dataset, str(root), cache=CacheSettings(str(root / "cache")))
    try:
        source = open_source(settings)
        for part in source.parts:
            assert isinstance(source, ListedSource)
            images = source.listing(part)
            assert images.fingerprint and len(source.class_counts(part)) == len(source.classes)
            for index in range(len(images.labels)):
                assert isinstance(images.name(index), str)
                images.read(index)
    except InvalidInput as error:
        assert all(error.errors) and not any("\n" in line or "pickle" in line for line in error.errors)
        assert max(map(len, error.errors)) < 20_000


def fuzz(reader: str, folder: pathlib.Path) -> None:
    """Feed a reader for ``SECONDS``; the last file stays in the folder."""
    dataset, name, contents = READERS[reader]
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the usual one reserves 1 GiB at once
    # Of written memory: threads reserve addresses that they never use
    limit = psutil.Process().memory_info().data + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK, DISK))
    root, end, rounds = folder / "root", time.monotonic() + SECONDS, 0
    outcome: Callable[[], None]

    def one(content: bytes) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        if reader == "index":
            (root / "train-000000.tar").write_bytes(GOOD_TAR + bytes(1024))
        (folder / name).write_bytes(content)
        shutil.copy(folder / name, root / name)
        read_all(dataset, root)

    while time.monotonic() < end:
        rounds += 1
        check = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
        limits = settings(max_examples=100, database=None, deadline=None, suppress_health_check=check)
        outcome = seed(time.time_ns())(limits(given(contents)(one)))
        outcome()
        gc.collect()
    print(f"{reader}: {rounds} rounds")


@pytest.mark.soak
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_ends_in_a_line_for_any_bytes(reader, tmp_path):
    (process,) = fork(lambda: fuzz(reader, tmp_path))
    process.join(SECONDS + 300)
    assert process.exitcode == 0, f"{tmp_path} has the bytes"

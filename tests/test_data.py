"""Datasets, the decode cache, CIFAR-10's download and the loaders, on real files and a real web server."""

import hashlib
import http.server
import io
import itertools
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import tarfile
import threading
import time

import numpy as np
import pytest
import torch
import torchvision
from conftest import free_port
from PIL import Image
from sklearn.datasets import load_digits

import data
import host_lock
from data import Batches, DataConfig, ImageSet, MicroBatchSampler
from errors import InvalidInput

SPLITS = ("train", "test")
LEFT, RIGHT = (200, 40, 30), (240, 230, 90)
TRAIN = [(10, 0), (20, 0), (30, 1), (40, 1)]


def fault(call, *arguments) -> str:
    """The one line of the InvalidInput that a call must raise."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    (line,) = caught.value.faults
    assert "\n" not in line
    return line


def table(arguments: str, **rows):
    """Parametrises a test by name=(value, ...)."""
    return pytest.mark.parametrize(arguments, [pytest.param(*row, id=name) for name, row in rows.items()])


def names(folder: pathlib.Path) -> set[str]:
    """What is in a folder, but for locks."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def start(context, work, *arguments):
    """Starts work in a forked process; its exit code is 1 if it raises."""

    def run():
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        work(*arguments)

    process = context.Process(target=run)
    process.start()
    return process


def all_at_once(works) -> None:
    """Runs each in a process of its own, all starting at the same moment."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(works))

    def run(work):
        barrier.wait(30)
        work()

    processes = [start(context, run, work) for work in works]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(works)


@pytest.fixture(scope="module")
def digits():
    return {split: data.load(DataConfig("digits"), split) for split in SPLITS}


@pytest.fixture(scope="module")
def all_values():
    """Images in which every channel takes all 256 values."""
    values = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (7, 3, 4)), axis=2)
    return ImageSet(torch.from_numpy(values.reshape(7, 3, 32, 32)), torch.arange(7) * 11, ("a",))


def micro_batches(sampler) -> list[list[int]]:
    return [micro_batch.tolist() for micro_batch in sampler]


def steps(sampler) -> list[list[list[int]]]:
    dealt = micro_batches(sampler)
    return [dealt[i : i + sampler.parts] for i in range(0, len(dealt), sampler.parts)]


def dealt(micro_batches=None, size=91, batch_size=24, parts=6, **how) -> list[list[int]]:
    """The images that Determined's loader deals out; each one's pixels and label are its number."""
    numbers = torch.arange(size)
    source = ImageSet(numbers.to(torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32), numbers, ("a",))
    loader = data.data_loader(source, MicroBatchSampler(size, batch_size, parts, seed=2)).get_data_loader(**how)
    given = []
    for inputs, labels in itertools.islice(loader, micro_batches):
        assert torch.equal(((inputs + 1) * 127.5).round().long(), labels[:, None, None, None].expand(-1, 3, 32, 32))
        given.append(labels.tolist())
    return given


def save(path: pathlib.Path, image: Image.Image | int, **options) -> pathlib.Path:
    """Writes an image, or one of a single grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.new("L", (32, 32), image) if isinstance(image, int) else image).save(path, **options)
    return path


def halves(size) -> Image.Image:
    """LEFT beside RIGHT."""
    image = Image.new("RGB", size, LEFT)
    image.paste(RIGHT, (size[0] // 2, 0, *size))
    return image


def read(root: pathlib.Path, split: str = "train") -> ImageSet:
    return data.load(DataConfig("imagefolder", str(root)), split)


def greys(kept: ImageSet) -> list[tuple[int, int]]:
    """A (grey, label) for each image of a single grey."""
    assert (kept.images == kept.images[:, :1, :1, :1]).all()
    return list(zip(kept.images[:, 0, 0, 0].tolist(), kept.labels.tolist(), strict=True))


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Classes a and b: greys 10, 20 and 30, 40 to train, 50 and 60 to test."""
    root = tmp_path / "folder"
    for grey, path in enumerate(["train/a/1", "train/a/2", "train/b/1", "train/b/2", "test/a/1", "test/b/1"], start=1):
        save(root / f"{path}.bmp", grey * 10)
    return root


def caches(place: pathlib.Path) -> dict[str, tuple[int, int]]:
    """When and as which file each cache was written."""
    assert list(place.rglob("*.partial")) == []
    found = {str(path): path.stat() for path in place.rglob("*.pt")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def gone(*paths: str):
    def damage(root):
        for path in paths:
            shutil.rmtree(root / path)

    return damage


def cut(path: pathlib.Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    save(path, Image.fromarray(noise))
    path.write_bytes(path.read_bytes()[:-1500])


class Cifar:
    """A miniature CIFAR-10 in its real format and the web server that has it."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.mishap = ""  # how the server misbehaves
        self.requests = self.downloads = 0
        self.splits: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.classes = tuple(f"class {label}" for label in range(10))
        random, buffer, contents = np.random.default_rng(0), io.BytesIO(), {}
        for split, batches in [("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])]:
            pixels = random.integers(0, 256, (len(batches), 4, 3072), dtype=np.uint8)
            labels = random.integers(0, 10, (len(batches), 4))
            self.splits[split] = torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.reshape(-1))
            for name, rows, row_labels in zip(batches, pixels, labels, strict=True):
                contents[name] = {"batch_label": name, "data": rows, "labels": row_labels.tolist()}
        contents["batches.meta"] = {"num_cases_per_batch": 4, "label_names": list(self.classes), "num_vis": 3072}
        files = {name: pickle.dumps(content, protocol=2) for name, content in contents.items()}
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        self.archive_bytes = buffer.getvalue()
        self.md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}

    @property
    def unpacked(self) -> pathlib.Path:
        return self.root / "cifar-10-batches-py"

    @property
    def archive(self) -> pathlib.Path:
        return self.root / "cifar-10-python.tar.gz"

    def load(self, split: str = "train", download: bool = True) -> ImageSet:
        return data.load(DataConfig("cifar10", str(self.root), download), split)

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


# --------------------------------------------------------------------------------------------------- config


def test_config():
    assert DataConfig.parse(None) == DataConfig.parse({}) == DataConfig("cifar10", "data", True, 32)
    section = {"dataset": "imagefolder", "root": "/x", "download": False, "image_size": 32}
    assert DataConfig.parse(section) == DataConfig("imagefolder", "/x", False, 32)


@pytest.mark.parametrize(
    ("section", "lines"),
    [
        ({"dataset": "mnist"}, [("data.dataset", "'mnist'", "cifar10", "digits", "imagefolder")]),
        ({"dataset": None}, [("data.dataset", "None")]),
        ({"dataset": 5}, [("data.dataset", "5")]),
        ({"dataset": ["digits"]}, [("data.dataset", "['digits']")]),
        ({"dataset": {}}, [("data.dataset", "{}")]),
        ({"datset": "digits"}, [("data.datset", "'digits'", "did you mean 'dataset'")]),
        ({"colour": 1}, [("data.colour", "dataset, download, image_size, root")]),
        ({7: 1}, [("data.7", "unknown key")]),
        ({"root": 5}, [("data.root", "5")]),
        ({"root": None}, [("data.root", "None")]),
        ({"root": ""}, [("data.root", "''")]),
        ({"download": "yes"}, [("data.download", "'yes'", "true or false")]),
        ({"download": 1}, [("data.download", "1")]),
        ({"image_size": 64}, [("data.image_size", "64", "use 32")]),
        ({"image_size": "32"}, [("data.image_size", "'32'")]),
        ({"image_size": 32.0}, [("data.image_size", "32.0")]),
        (["digits"], [("data: ['digits']", "mapping")]),
        ("digits", [("data: 'digits'", "mapping")]),
        (
            {"rot": "x", "dataset": "mnist", "root": 5, "download": "no", "image_size": 28},
            [("data.rot", "'root'"), ("data.dataset",), ("data.root",), ("data.download",), ("data.image_size",)],
        ),
    ],
    ids=str,
)
def test_bad_config(section, lines):
    with pytest.raises(InvalidInput) as caught:
        DataConfig.parse(section)
    assert len(caught.value.faults) == len(lines)
    for line, parts in zip(caught.value.faults, lines, strict=True):
        assert "\n" not in line
        assert [part for part in parts if part not in line] == []


# --------------------------------------------------------------------------------------------------- digits


@pytest.mark.parametrize(("split", "size"), [("train", 1437), ("test", 360)])
def test_digits(digits, split, size):
    kept = digits[split]
    assert len(kept) == data.count(DataConfig("digits"), split) == size
    assert (kept.images.shape, kept.images.dtype) == ((size, 3, 32, 32), torch.uint8)
    assert (kept.labels.shape, kept.labels.dtype) == ((size,), torch.int64)
    assert kept.classes == tuple("0123456789")
    assert (kept.images.min(), kept.images.max()) == (0, 255)
    assert (kept.images == kept.images[:, :1]).all()
    proportions = np.bincount(load_digits().target) * size / 1797
    assert np.abs(np.bincount(kept.labels) - proportions).max() <= 1


def test_digits_splits_partition_the_source(digits):
    source = load_digits()
    images = torch.cat([digits[split].images[:, 0].float() for split in SPLITS])
    small = (images[:, 1::4, 1::4] + images[:, 2::4, 2::4]) / 2
    distances = torch.cdist(small.flatten(1), torch.from_numpy(source.data).float() * (255 / 16))
    origin = distances.argmin(dim=1)
    assert origin.sort().values.tolist() == list(range(1797))
    labels = torch.cat([digits[split].labels for split in SPLITS])
    assert torch.equal(labels, torch.from_numpy(source.target)[origin])


def test_digits_split_is_always_the_same(digits):
    np.random.seed(5)
    torch.manual_seed(5)
    for split in SPLITS:
        again = data.load(DataConfig("digits"), split)
        assert torch.equal(again.images, digits[split].images)
        assert torch.equal(again.labels, digits[split].labels)


# -------------------------------------------------------------------------------------------------- batches


def test_batches_are_torchvisions_bit_for_bit(all_values):
    to_tensor, normalize = torchvision.transforms.ToTensor(), torchvision.transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    transform = torchvision.transforms.Compose([to_tensor, normalize])
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in all_values.images]
    wanted = torch.stack([transform(picture) for picture in pictures])
    batches, before = Batches(all_values), all_values.images.clone()
    chosen = torch.tensor([4, 0, 6])
    inputs, labels = batches.__getitems__(chosen)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, wanted[chosen])
    assert torch.equal(labels, torch.tensor([44, 0, 66]))
    assert torch.equal(batches[5][0], wanted[5])
    assert batches[5][1] == 55
    assert torch.equal(all_values.images, before)


def test_a_whole_micro_batch_a_fetch(all_values, monkeypatch):
    monkeypatch.delattr(Batches, "__getitem__")
    loader = data.data_loader(all_values, MicroBatchSampler(7, 4, 1)).get_data_loader()
    fetched = [(inputs.shape, inputs.dtype, labels.shape, labels.dtype) for inputs, labels in loader]
    assert fetched == [((n, 3, 32, 32), torch.float32, (n,), torch.int64) for n in (4, 3)]


# -------------------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize(
    ("size", "batch_size", "parts"),
    [
        (1437, 16, 1),
        (1437, 32, 4),
        (100, 16, 4),
        (1437, 48, 3),
        (50000, 256, 2),
        (17, 8, 4),
        (33, 16, 8),
        (360, 2, 1),
        (360, 4, 4),
        (7, 16, 4),
        (4, 16, 4),
    ],
)
def test_cut(size, batch_size, parts):
    sampler = MicroBatchSampler(size, batch_size, parts, seed=3)
    for _ in range(3):
        epoch = steps(sampler)
        assert len(sampler) == len(epoch) * parts
        assert sorted(image for step in epoch for part in step for image in part) == list(range(size))
        for step in epoch:
            lengths = [len(part) for part in step]
            assert len(lengths) == parts
            assert min(lengths) >= 1
            assert max(lengths) - min(lengths) <= 1
            assert max(lengths) <= batch_size // parts
        left = size % batch_size
        shared = 0 < left < parts  # too few for a step of their own
        full = [sum(len(part) for part in step) for step in epoch[: size // batch_size - shared]]
        assert full == [batch_size] * len(full)
        assert len(epoch) == -(-size // batch_size)


@pytest.mark.parametrize(("size", "batch_size", "parts"), [(5, 2, 2), (9, 4, 4), (11, 4, 4)])
def test_images_too_few_for_micro_batches_of_one_rest(size, batch_size, parts):
    sampler = MicroBatchSampler(size, batch_size, parts, seed=0)
    seen: set[int] = set()
    for _ in range(20):
        epoch = [image for part in micro_batches(sampler) for image in part]
        assert len(set(epoch)) == len(epoch)
        assert 0 < size - len(epoch) < parts
        seen.update(epoch)
    assert seen == set(range(size))


@pytest.mark.parametrize(("size", "parts"), [(3, 4), (0, 1)])
def test_fewer_images_than_micro_batches(size, parts):
    line = fault(MicroBatchSampler, size, 8, parts)
    assert "train_batch_size: 8" in line
    assert f"{parts} micro-batches" in line
    assert f"only {size} images" in line


def test_order_is_a_function_of_seed_and_epoch():
    def epochs(seed, count=4):
        sampler = MicroBatchSampler(100, 16, 2, seed)
        torch.manual_seed(count)
        np.random.seed(count)
        return [micro_batches(sampler) for _ in range(count)]

    first = epochs(7)
    assert epochs(7, 5)[:4] == first
    assert all(a != b for a, b in itertools.combinations([*first, *epochs(8)], 2))
    later = MicroBatchSampler(100, 16, 2, 7)
    later.set_epoch(3)
    assert micro_batches(later) == first[3]
    in_order = list(range(100))
    assert [[image for part in epoch for image in part] for epoch in epochs(None, 2)] == [in_order, in_order]


@pytest.mark.parametrize(("size", "batch_size"), [(1437, 16), (1437, 32), (100, 16), (64, 8)])
def test_steps_are_the_same_for_any_parts(size, batch_size):
    def images(parts):
        sampler = MicroBatchSampler(size, batch_size, parts, seed=1)
        return [[sorted(image for part in step for image in part) for step in steps(sampler)] for _ in range(2)]

    assert images(1) == images(2) == images(4)


# --------------------------------------------------------------------------------------------------- loader


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_share_an_epoch(replicas):
    shards = [dealt(num_replicas=replicas, rank=rank) for rank in range(replicas)]
    assert {len(shard) for shard in shards} == {4 * 6 // replicas}
    assert sorted(image for shard in shards for part in shard for image in part) == list(range(91))
    accumulated = 6 // replicas
    for step, wanted in enumerate(steps(MicroBatchSampler(91, 24, 6, seed=2))):
        mine = [part for shard in shards for part in shard[step * accumulated : (step + 1) * accumulated]]
        assert sorted(mine) == sorted(wanted)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_skip_resumes_at_that_micro_batch(replicas):
    epoch = 4 * 6 // replicas
    for rank in range(replicas):
        how = {"repeat": True, "num_replicas": replicas, "rank": rank}
        whole = dealt(3 * epoch, **how)
        assert len(whole) == 3 * epoch
        assert whole[:epoch] != whole[epoch : 2 * epoch] != whole[2 * epoch :]
        for skip in (1, epoch - 1, epoch, epoch + 2):
            assert dealt(len(whole) - skip, skip=skip, **how) == whole[skip:]


# --------------------------------------------------------------------------------------------- image folders


@pytest.mark.parametrize(
    ("file", "mode", "size"),
    [
        ("x.jpg", "RGB", (64, 64)),
        ("x.JPG", "RGB", (64, 64)),
        ("x.jpeg", "L", (20, 50)),
        ("x.jpg", "CMYK", (64, 64)),
        ("x.png", "RGB", (20, 50)),
        ("x.png", "RGB", (50, 20)),
        ("x.png", "L", (32, 32)),
        ("x.png", "1", (64, 64)),
        ("x.png", "P", (64, 64)),
        ("x.png", "P transparent", (32, 32)),
        ("x.PNG", "RGBA", (20, 50)),
        ("x.webp", "RGB", (64, 64)),
        ("x.webp", "RGBA", (32, 32)),
        ("x.bmp", "RGB", (20, 50)),
        ("x.gif", "P", (64, 64)),
        ("x.tiff", "RGB", (64, 64)),
        ("x.tif", "1", (32, 32)),
        ("x.tiff", "CMYK", (64, 64)),
        ("x.ppm", "RGB", (20, 50)),
        ("x.pgm", "L", (64, 64)),
    ],
)
def test_formats_modes_and_sizes(folder, file, mode, size):
    options: dict = {"quality": 95} if file.endswith(("jpg", "JPG", "jpeg", "webp")) else {}
    image = halves(size)
    if mode == "1":
        image = image.convert("1", dither=Image.Dither.NONE)
    elif mode.startswith("P"):
        image = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
        options |= {"transparency": 0} if mode == "P transparent" else {}
    else:
        image = image.convert(mode)
    save(folder / "train/a/0" / file, image, **options)
    kept = read(folder)
    assert (kept.images.shape, kept.images.dtype) == ((5, 3, 32, 32), torch.uint8)
    assert kept.labels.tolist() == [0, 0, 0, 1, 1]
    colours = {"L": [(87,) * 3, (217,) * 3], "1": [(0,) * 3, (255,) * 3]}.get(mode, [LEFT, RIGHT])
    for colour, columns in zip(colours, (slice(0, 14), slice(18, 32)), strict=True):
        wanted = torch.tensor(colour)[:, None, None]
        assert (kept.images[0, :, :, columns].int() - wanted).abs().max() <= 10


def test_32_by_32_pixels_are_kept(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    save(folder / "train/a/0.png", Image.fromarray(pixels))
    assert np.array_equal(read(folder).images[0].permute(1, 2, 0), pixels)


@pytest.mark.parametrize("extension", ["png", "tiff"])
def test_16_bits_a_pixel(folder, extension):
    values = np.repeat(np.array([0, 0x0100, 0x8000, 0xFFFF], np.uint16), 256).reshape(32, 32)
    save(folder / f"train/a/0.{extension}", Image.fromarray(values))
    assert read(folder).images[0, :, ::8, 5].tolist() == [[0, 1, 128, 255]] * 3


@pytest.mark.parametrize(
    ("file", "orientation", "stored"),
    [
        ("0.jpg", 6, Image.Transpose.ROTATE_90),
        ("0.jpg", 3, Image.Transpose.ROTATE_180),
        ("0.jpg", 8, Image.Transpose.ROTATE_270),
        ("0.jpg", 2, Image.Transpose.FLIP_LEFT_RIGHT),
        ("0.webp", 6, Image.Transpose.ROTATE_90),
    ],
)
def test_upright(folder, file, orientation, stored):
    upright = Image.new("RGB", (64, 96), LEFT)
    upright.paste(RIGHT, (0, 0, 32, 48))
    exif = Image.Exif()
    exif[0x0112] = orientation
    save(folder / "train/a" / file, upright.transpose(stored), exif=exif, quality=95)
    image = read(folder).images[0].int()
    for row, column, colour in [(4, 4, RIGHT), (4, 27, LEFT), (27, 4, LEFT), (27, 27, LEFT)]:
        assert (image[:, row, column] - torch.tensor(colour)).abs().max() <= 10


def test_damaged_exif_is_no_damaged_image(folder):
    save(folder / "train/a/0.png", Image.new("L", (32, 32), 77), exif=b"no EXIF at all")
    assert greys(read(folder)) == [(77, 0), *TRAIN]


@pytest.mark.parametrize(
    "path",
    [
        "train/a/notes.txt",
        "train/a/.DS_Store",
        "train/notes.bmp",
        "train/.hidden/1.bmp",
        "train/a/.ipynb_checkpoints/1.bmp",
        "train/a/._1.bmp",
    ],
)
def test_ignored(folder, path):
    if "/1.bmp" in path:
        save(folder / path, 99)
    else:
        (folder / path).write_bytes(b"no image")
    kept = read(folder)
    assert kept.classes == ("a", "b")
    assert greys(kept) == TRAIN


def test_classes_and_files_in_sorted_order_whichever_worker_decodes_them(tmp_path):
    classes = ["zebra", "Cat 2", "ant"]
    for split, count in [("test", 1), ("train", 53)]:
        for number, name in itertools.product(reversed(range(count)), classes):
            side = 1500 if name == "Cat 2" and number < 8 else 8  # the first chunk is the last to be done
            image = Image.new("RGB", (side, side), (sorted(classes).index(name), number, 200))
            save(tmp_path / split / name / f"{number:03}.png", image)
    kept = read(tmp_path)
    assert kept.classes == ("Cat 2", "ant", "zebra")
    wanted = [[label, number, 200] for label in range(3) for number in range(53)]
    assert kept.images[:, :, 0, 0].tolist() == wanted
    assert (kept.images == kept.images[:, :, :1, :1]).all()
    assert (kept.labels.dtype, kept.labels.tolist()) == (torch.int64, [label for label, _, _ in wanted])
    assert read(tmp_path, "test").labels.tolist() == [0, 1, 2]


# ---------------------------------------------------------------------------------------------------- cache


def test_counted_without_decoding(folder):
    config = DataConfig("imagefolder", str(folder))
    assert [data.count(config, split) for split in SPLITS] == [4, 2]
    assert caches(folder) == {}


def test_decoded_once(folder):
    for split, wanted in [("train", TRAIN), ("test", [(50, 0), (60, 1)])]:
        assert greys(read(folder, split)) == wanted
    before = caches(folder)
    assert len(before) == 2
    assert greys(read(folder, "test")) == [(50, 0), (60, 1)]
    assert greys(read(folder)) == TRAIN
    assert caches(folder) == before


def test_decoded_by_one_of_many_processes(folder):
    def work():
        assert greys(read(folder)) == TRAIN

    all_at_once([work] * 3)
    assert len(caches(folder)) == 1


@table(
    "change, wanted",
    rewritten=(lambda root: save(root / "train/a/1.bmp", 99), [(99, 0), *TRAIN[1:]]),
    added=(lambda root: save(root / "train/a/3.bmp", 99), [*TRAIN[:2], (99, 0), *TRAIN[2:]]),
    removed=(lambda root: (root / "train/a/1.bmp").unlink(), TRAIN[1:]),
    moved=(lambda root: (root / "train/a/2.bmp").rename(root / "train/b/0.bmp"), [(10, 0), (20, 1), *TRAIN[2:]]),
    new_class=(
        lambda root: [save(root / split / "Z/1.bmp", 99) for split in SPLITS],
        [(99, 0), *((grey, label + 1) for grey, label in TRAIN)],
    ),
)
def test_change_is_noticed(folder, change, wanted):
    assert greys(read(folder)) == TRAIN
    change(folder)
    assert greys(read(folder)) == wanted
    assert len(caches(folder)) == 1


@table(
    "damage",
    half=(lambda whole: whole[: len(whole) // 2],),
    cut_at_the_end=(lambda whole: whole[:-10],),
    empty=(lambda whole: b"",),
    garbage=(lambda whole: b"garbage" * 1000,),
    no_fingerprint=(lambda whole: saved({"images": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4)}),),
    no_cache=(lambda whole: saved([1, 2]),),
)
def test_damaged_cache_is_mended(folder, damage):
    read(folder)
    (cache,) = folder.glob(".*.pt")
    whole = cache.read_bytes()
    cache.unlink()
    cache.write_bytes(damage(whole))
    assert greys(read(folder)) == TRAIN
    mended = caches(folder)
    assert greys(read(folder)) == TRAIN
    assert caches(folder) == mended


def test_read_only_root(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    save(other / "train/a/1.bmp", 99)
    before, kept = sorted(folder.rglob("*")), []
    for _ in range(2):
        assert greys(read(folder)) == TRAIN
        assert greys(read(other)) == [(99, 0), *TRAIN[1:]]
        kept.append(caches(tmp_path / "cache"))
    assert sorted(folder.rglob("*")) == before
    assert len(kept[0]) == 2
    assert kept[1] == kept[0]


@table(
    "damage, parts",
    no_root=(gone(""), ["data.root: {}:", "'train'"]),
    no_test=(gone("test"), ["data.root: {}:", "'test'"]),
    no_class=(gone("train/a", "train/b"), ["{}/train:", "no class"]),
    one_class=(gone("train/b"), ["{}/train:", "only the class 'a'"]),
    empty_class=(lambda root: [path.unlink() for path in root.glob("train/b/*")], ["{}/train/b:", "no image"]),
    class_not_in_test=(gone("test/b"), ["data.root: {}:", "only in train: b;", "only in test: none"]),
    class_not_in_train=(lambda root: save(root / "test/c/1.png", 1), ["only in train: none;", "only in test: c"]),
    truncated_jpg=(lambda root: cut(root / "train/b/0.jpg"), ["{}/train/b/0.jpg:", "truncated"]),
    truncated_png=(lambda root: cut(root / "train/b/0.png"), ["{}/train/b/0.png:", "not a readable image"]),
    text=(lambda root: (root / "train/b/0.png").write_text("a\nb"), ["{}/train/b/0.png:", "not a readable image"]),
    empty_file=(lambda root: (root / "train/a/0.gif").touch(), ["{}/train/a/0.gif:", "not a readable image"]),
)
def test_bad_folder(folder, damage, parts):
    damage(folder)
    there = folder.exists()
    line = fault(read, folder)
    assert [part for part in parts if part.format(folder) not in line] == []
    assert folder.exists() == there
    assert caches(folder) == {}


# -------------------------------------------------------------------------------------------------- CIFAR-10


def test_one_download_for_all_processes(cifar):
    all_at_once([lambda split=split: cifar.check(split) for split in SPLITS * 2])
    assert cifar.downloads == 1
    assert names(cifar.root) == {cifar.unpacked.name}
    before = cifar.requests
    for split in SPLITS:
        cifar.check(split, download=False)
        cifar.check(split)
    assert cifar.requests == before
    assert names(cifar.root) == {cifar.unpacked.name}


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
@table(
    "damage",
    truncated=(lambda path: path.write_bytes(path.read_bytes()[:-7]),),
    removed=(lambda path: path.unlink(),),
)
def test_damaged_file_is_mended_by_one_download(cifar, file, damage):
    cifar.check()
    damage(cifar.unpacked / file)
    line = fault(cifar.load, "train", False)
    assert f"{cifar.unpacked} is damaged" in line
    for split in SPLITS:
        cifar.check(split)
    assert cifar.downloads == 2
    assert names(cifar.root) == {cifar.unpacked.name}


@pytest.mark.parametrize("link", [None, "../shared.tar.gz"])
def test_whole_archive_is_unpacked_without_a_request(cifar, link):
    if link:
        cifar.archive.symlink_to(link)
    cifar.archive.write_bytes(cifar.archive_bytes)
    for split in SPLITS:
        cifar.check(split, download=False)
    assert cifar.requests == 0
    assert names(cifar.root) == {cifar.unpacked.name, cifar.archive.name}
    assert cifar.archive.read_bytes() == cifar.archive_bytes


def test_truncated_archive_without_a_server(cifar, no_server):
    cifar.archive.write_bytes(cifar.archive_bytes[:-100])
    for download in (True, False):
        line = fault(cifar.load, "train", download)
        assert f"{cifar.archive} is truncated" in line
        assert cifar.archive.read_bytes() == cifar.archive_bytes[:-100]
        assert names(cifar.root) == {cifar.archive.name}


def test_truncated_archive_with_a_server(cifar):
    cifar.archive.write_bytes(cifar.archive_bytes[:-100])
    fault(cifar.load, "train", False)
    assert cifar.requests == 0
    cifar.check()
    assert cifar.downloads == 1
    assert names(cifar.root) == {cifar.unpacked.name, cifar.archive.name}


def test_no_download_allowed(cifar):
    line = fault(cifar.load, "train", False)
    assert f"data.root: {cifar.root}:" in line
    assert f"{cifar.unpacked} is missing" in line
    assert "data.download is false" in line
    assert cifar.requests == 0
    assert names(cifar.root) == set()


def test_unreachable_server(cifar, no_server):
    line = fault(cifar.load)
    assert f"data.root: {cifar.root}:" in line
    assert "refused" in line
    assert names(cifar.root) == set()


@pytest.mark.parametrize("how", ["cut", "cut in chunks", "another file", "not found", "not HTTP"])
def test_bad_server(cifar, how):
    cifar.mishap = how
    assert f"data.root: {cifar.root}:" in fault(cifar.load)
    assert names(cifar.root) == set()
    cifar.mishap = ""
    cifar.check()


def test_root_is_a_file(cifar):
    cifar.root.rmdir()
    cifar.root.write_text("x")
    assert f"data.root: {cifar.root}:" in fault(cifar.load)


def test_read_only_cifar(cifar, tmp_path, monkeypatch):
    cifar.check()
    for path in cifar.root.glob(".*.lock"):
        path.unlink()
    monkeypatch.setattr(host_lock.os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cifar.check("test")
    assert os.listdir(cifar.root) == [cifar.unpacked.name]


def test_killed_holder_of_the_lock_blocks_nobody(cifar):
    context = multiprocessing.get_context("fork")
    held = context.Event()

    def hold():
        with host_lock.host_lock(cifar.root, "cifar10"):
            half = cifar.root / ".cifar10-partial" / cifar.unpacked.name
            half.mkdir(parents=True)
            (half / "data_batch_1").write_bytes(b"half")
            held.set()
            time.sleep(30)

    holder = start(context, hold)
    assert held.wait(30)
    waiting = start(context, cifar.check)
    waiting.join(0.5)
    assert waiting.is_alive()
    assert cifar.requests == 0
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(30)
    assert waiting.exitcode == 0
    holder.join(30)
    assert cifar.downloads == 1
    assert names(cifar.root) == {cifar.unpacked.name}

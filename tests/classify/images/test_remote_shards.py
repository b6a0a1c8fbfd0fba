"""A training fetches shards in windows while it reads others: the cache, its limit, and lost servers."""

import gc
import gzip
import io
import itertools
import os
import pathlib
import random
import resource
import shutil
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matrix import ROWS, Runs, train
from sources import copied, everything, load, refused, served, write_parquet
from support import DIGITS, all_at_once, error_line, fork, losses, overrides, run, wait_until

import checkpoint
from classify.images.listing import Shard
from classify.images.loader import MicroBatchLoader
from classify.images.order import Order, Windows
from classify.images.pixels import ImageSet, Streamed
from classify.images.settings import DataSettings
from classify.images.sources import remote as remote_files
from classify.images.sources.parquet_shards import ParquetShards
from classify.images.sources.remote import ShardCache, ShardsAhead
from deepspeed_trial.host_lock import lock_of


def in_windows(count: int = 60, shards: int = 10, size: int = 3) -> Windows:
    """The shards hold the images in another order than the indices."""
    places = np.random.default_rng(0).permutation(count)
    return Windows(places, places * shards // count, size, are_remote=True)


def test_an_order_is_a_function_of_seed_and_epoch_and_mixes_a_few_shards_at_a_time():
    windows = in_windows()
    for parts in (1, 2, 3):
        cut = Order(60, 12, parts, seed=5, windows=windows)
        for epoch in (0, 1):
            order = torch.cat([each.indices for each in cut.micro_batches(epoch)])
            assert order.tolist() == Order(60, 60, 1, 5, windows=windows).rows(epoch).tolist()
            assert sorted(order.tolist()) == list(range(60))
            groups = [set(windows.shards[part].tolist()) for part in order.split(18)]  # 3 shards of 6 images
            assert [len(each) for each in groups] == [3, 3, 3, 1]
            assert set.union(*groups) == set(range(10))
            within = windows.shards[order[:18]]
            assert (np.diff(within) != 0).sum() > 6  # without mixing it would be 2
    places = ((5, 0), (5, 1), (6, 0))
    drawn = [Order(60, 12, 1, seed, windows=windows).rows(epoch) for seed, epoch in places]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))
    in_order = Order(60, 12, 1, windows=windows).rows(0)
    assert windows.places[in_order].tolist() == list(range(60))
    assert windows.first().tolist() == in_order[:18].tolist()


def test_a_window_and_the_next_one_are_fetched_before_they_are_read():
    windows = in_windows()
    asked: list[tuple[int, ...]] = []
    order = Order(60, 7, 1, seed=5, windows=windows)
    for each in itertools.islice(order.share(0, 1, repeats=True), 2 * len(order)):
        asked += [each.ahead] * bool(each.ahead)
        assert set(windows.shards[each.indices].tolist()) <= {
            shard for ahead in asked[-2:] for shard in ahead
        }
        assert len(asked[-1]) <= 6
    assert [len(each) for each in asked] == [6, 6, 4, 4, 6, 6, 4, 4]
    following = order.rows(1)[:18]
    assert set(asked[3][1:]) == set(windows.shards[following].tolist())


def test_looking_at_an_epoch_fetches_no_shard():
    """A validation asks for its images in their order before it begins."""
    asked: list[Sequence[int]] = []

    class Asked(ImageSet):
        def fetch(self, shards: Sequence[int]) -> None:
            asked.append(shards)

    images = Asked(torch.zeros(60, 3, 2, 2, dtype=torch.uint8), torch.arange(60), ("a",))
    loader = MicroBatchLoader(images, Order(60, 6, 2, windows=in_windows()))
    seen = loader.seen_by(1, 2)
    assert not asked
    dealt = loader.get_data_loader(repeat=False, skip=0, num_replicas=2, rank=1)
    assert seen.tolist() == torch.cat([labels for _, labels in dealt]).tolist()
    assert [len(each) for each in asked] == [6, 6, 4, 4]


@pytest.mark.parametrize("skip", [0, 1, 7, 23])
def test_a_rank_that_resumes_fetches_the_shards_of_its_window(skip):
    windows = in_windows()
    for rank in (0, 1):
        order = Order(60, 6, 2, seed=5, windows=windows)
        first = next(order.share(rank, 2, skip, repeats=True))
        assert set(windows.shards[first.indices].tolist()) <= set(first.ahead)


def grey(value: int) -> bytes:
    return b"P5 8 8 255\n" + bytes([value]) * 64


SHARDS = [Shard(f"http://host/{number}", 100 + number, 0, 1) for number in range(12)]
LIMIT = 450


def write(shard: Shard, target: pathlib.Path) -> None:
    target.write_bytes(bytes([shard.size % 256]) * shard.size)


def sized(count: int):
    def write(_: Shard, target: pathlib.Path) -> None:
        target.write_bytes(bytes(count))

    return write


def held(folder: pathlib.Path) -> list[int]:
    return sorted(each.stat().st_size for each in folder.iterdir() if not each.name.startswith("."))


def test_the_cache_keeps_the_shards_read_last(tmp_path):
    fetched = []

    def fetch(shard: Shard, target: pathlib.Path) -> None:
        fetched.append(shard.size)
        write(shard, target)

    kept = ShardCache(tmp_path, fetch, LIMIT)
    for number in (0, 1, 2, 3, 0, 4, 0, 5, 0):
        assert kept.file(SHARDS[number]).stat().st_size == SHARDS[number].size
        time.sleep(0.01)  # clocks of file systems are coarse
    assert fetched == [100, 101, 102, 103, 104, 105]
    assert held(tmp_path) == [100, 103, 104, 105]
    (tmp_path / f"{'0' * 24}.400.partial").touch()  # of a killed process
    kept.file(SHARDS[6])
    assert held(tmp_path) == [100, 104, 105, 106]


def test_processes_share_shards_under_the_limit(tmp_path):
    def read_many(seed: int):
        def read() -> None:
            def fetch(shard: Shard, target: pathlib.Path) -> None:
                time.sleep(0.002)
                write(shard, target)
                with kept._room():
                    assert sum(held(tmp_path)) <= LIMIT

            choose, kept = random.Random(seed), ShardCache(tmp_path, fetch, LIMIT)
            for _ in range(60):
                shard = choose.choice(SHARDS)
                try:
                    content = kept.file(shard).read_bytes()
                except FileNotFoundError:  # the other process has removed it
                    continue
                assert content == bytes([shard.size % 256]) * shard.size

        return read

    all_at_once(read_many(1), read_many(2))


def test_a_shard_waits_for_the_room_of_shards_in_transfer(tmp_path):
    """They cannot be removed; the loaders of training and validation may fetch at the same time."""
    begun, may_go = threading.Event(), threading.Event()

    def slowly(shard: Shard, target: pathlib.Path) -> None:
        begun.set()
        assert may_go.wait(300)
        write(shard, target)

    large = Shard("http://host/large", LIMIT, 0, 1)
    threads = [
        threading.Thread(target=ShardCache(tmp_path, fetch, LIMIT).file, args=(shard,))
        for shard, fetch in ((large, slowly), (SHARDS[0], write))
    ]
    threads[0].start()
    assert begun.wait(300)
    threads[1].start()
    time.sleep(0.3)
    assert held(tmp_path) == [0]  # the large one, in transfer
    may_go.set()
    for thread in threads:
        thread.join(300)
    assert held(tmp_path) == [SHARDS[0].size]


def test_the_newest_request_is_fetched_first():
    fetched, begun, may_go, done = [], threading.Event(), threading.Event(), threading.Event()

    def local_file(shard: Shard) -> pathlib.Path:
        begun.set()
        may_go.wait(300)
        fetched.append(shard)
        if shard is SHARDS[9]:
            done.set()
        if shard is SHARDS[7]:
            raise ValueError("the reader will raise it")
        return pathlib.Path()

    ahead = ShardsAhead(local_file, 1)
    ahead.fetch(SHARDS[:4])
    assert begun.wait(300)
    ahead.fetch(SHARDS[7:10])
    may_go.set()
    assert done.wait(300)
    assert fetched == [SHARDS[0], *SHARDS[7:10]]


def test_decoded_images_need_no_shard(written, tmp_path):
    """All images but those of the last shard have been decoded, and the cache has lost the shards."""
    cache = tmp_path / "cache"
    with served(written) as (server, url):
        images = load("webdataset", url, decode="stream", cache={"folder": str(cache)})
        assert isinstance(images.pixels, Streamed)
        listing = images.pixels.listing
        shards, of_each = listing.shards, listing.shards_of(listing.places_of(np.arange(len(images))))
        in_last = torch.from_numpy(of_each == len(shards) - 1)
        images.select(torch.arange(len(images))[~in_last])
        remote_files.clear_fetched(cache / "shards")
        server.asked.clear()
        images.fetch(range(len(shards)))
        wait_until(server.tars)
        images.select(torch.arange(len(images))[in_last])
        images.fetch(range(len(shards)))
        assert not load("webdataset", url, decode="stream", cache={"folder": str(cache)}).is_streamed
    assert server.tars() == [shards[-1].url.rpartition("/")[2]]


def test_a_limit_has_to_hold_two_windows(written, tmp_path):
    folder = {"folder": str(tmp_path / "cache")}
    sizes = sorted(each.stat().st_size for each in written.glob("*.tar"))
    section: dict[str, Any] = {"decode": "stream", "window": 1}
    with served(written) as (_, url):
        line = refused("webdataset", url, **section, cache={**folder, "limit": sizes[-1]})
        assert line.startswith(f"data.cache.limit: {sizes[-1]}: ")
        assert "must be in the cache at a time; raise the limit" in line
        assert DataSettings.parse({"cache": {"limit": sum(sizes)}}).cache_limit == sum(sizes)
        assert load("webdataset", url, **section, cache={**folder, "limit": sum(sizes)}).is_streamed


def test_a_full_disk_of_the_cache_is_one_line_and_leaves_no_shard(written, tmp_path):
    cache = tmp_path / "cache"

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        line = refused("webdataset", url, cache={"folder": str(cache)})
        assert line.startswith(f"data.cache.folder: {cache}/shards: no room for {url}/t")
        assert line.endswith("; free some disk space, set data.cache.limit, or give another folder")

    with served(written) as (_, url):
        (process,) = fork(full)
        process.join(300)
    assert process.exitcode == 0
    assert {each.suffix for each in (cache / "shards").iterdir() if each.name[0] != "."} <= {".partial"}


def test_a_shard_of_unknown_size_counts_once_it_is_there(tmp_path):
    for shard in SHARDS[:4]:
        ShardCache(tmp_path, write, LIMIT).file(shard)
    unknown = Shard("http://host/unknown", 0, 0, 1, version="1")
    ShardCache(tmp_path, sized(300), LIMIT).file(unknown)
    assert held(tmp_path) == [103, 300]
    line = error_line(ShardCache(tmp_path, sized(500), LIMIT).file, replace(unknown, version="2"))
    assert line == "data.cache.limit: 0.0 MiB: http://host/unknown has 0.0 MiB; raise the limit"
    assert held(tmp_path) == []


def test_shards_leave_a_tenth_of_the_disk_where_no_limit_is_given(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)

    def usage(_):
        return disk._replace(free=500 - sum(held(tmp_path)))

    monkeypatch.setattr(remote_files.shutil, "disk_usage", usage)
    kept = ShardCache(tmp_path, write)
    for shard in SHARDS[:6]:
        kept.file(shard)
        time.sleep(0.01)  # clocks of file systems are coarse
    assert held(tmp_path) == [102, 103, 104, 105]  # 414 of 450
    line = error_line(kept.file, Shard("http://host/large", 451, 0, 1))
    assert line.startswith(
        f"data.cache.folder: {tmp_path}: has room for 0.0 MiB of shards, but http://host/large has 0.0 MiB"
    )


def test_the_program_lists_and_clears_fetched_shards(tmp_path, capsys):
    kept = ShardCache(tmp_path / "shards", write)
    for shard in SHARDS[:3]:
        kept.file(shard)
    (tmp_path / "shards" / ("0" * 24)).with_suffix(".txt").write_text("another's")
    (tmp_path / ("0" * 24)).write_text("another's")
    assert checkpoint.main(["caches", str(tmp_path)]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split(maxsplit=2)[2] == f"{tmp_path}/shards: 3 fetched shards"
    with kept._room(), lock_of(kept.folder, "1" * 24):
        (kept.folder / f"{'1' * 24}.400.partial").touch()  # another process fetches it
    with lock_of(kept.folder, "1" * 24):
        assert checkpoint.main(["caches", str(tmp_path), "--clear"]) == 0
    assert "removed, except shards in transfer" in capsys.readouterr().out
    left = sorted(each.name for each in tmp_path.rglob("*") if each.is_file() and each.suffix != ".lock")
    assert left == ["0" * 24, f"{'0' * 24}.txt", f"{'1' * 24}.400.partial"]


# ------------------------------------------------------------------------------------------- servers that lie

WORTH = 2**24  # bytes that are on the way


def test_a_file_ends_where_it_should(written, tmp_path):
    with served(copied(written, tmp_path / "served")) as (server, url):
        server.faults = {"index.npz": ("endless", 9)}
        line = error_line(remote_files.Storage().read, f"{url}/index.npz", 10_000)
        assert (
            line == f"{url}/index.npz: the server sends more than 10,000 bytes; check the file on the server"
        )
        assert server.sent < WORTH
        packed = gzip.compress((written / "classes.txt").read_bytes(), mtime=0)
        server.faults = {"classes.txt": ("zips", 1)}
        assert remote_files.Storage().read(f"{url}/classes.txt") == packed  # as it came
    assert server.encodings == {"identity"}


def test_a_fork_leaves_connections_alone(written):
    with served(written) as (server, url):
        assert remote_files.Storage().read(f"{url}/classes.txt")
        all_at_once(gc.collect)
        assert remote_files.Storage().about(f"{url}/train-000000.tar")[0] > 0
        assert server.asked == ["classes.txt"]  # HEAD had an answer


@pytest.mark.parametrize("about", [None, {"ETag": "1"}])
def test_a_shard_ends_where_its_index_or_the_server_says(written, tmp_path, monkeypatch, about):
    monkeypatch.setattr(remote_files, "MOST_OF_A_SHARD", 100_000)
    size = (written / "train-000000.tar").stat().st_size
    cache = tmp_path / "cache"
    with served(copied(written, tmp_path / "served")) as (server, url):
        server.about = about
        server.faults = {"train-000000.tar": ("endless", 9)}
        root = url if about is None else f"{url}/{{train,test}}-000000.tar"
        line = refused("webdataset", root, cache={"folder": str(cache)})
    most = size if about is None else 100_000
    assert (
        line
        == f"{url}/train-000000.tar: the server sends more than {most:,} bytes; check the file on the server"
    )
    assert server.sent < WORTH
    assert not [each for each in cache.rglob("*") if each.is_file() and each.stat().st_size >= 10_000_000]


@pytest.mark.parametrize("about", [None, {"ETag": "1"}, {"Last-Modified": "1"}, {}])
def test_a_changed_shard_is_noticed(photos, tmp_path, about):
    """Change shards and keep their sizes, with servers that say a size and servers that do not."""
    section: dict[str, Any] = {"cache": {"folder": str(tmp_path / "cache")}, "test": 0.5}
    (folder := tmp_path / "served").mkdir()

    def put(first: int) -> None:
        for name in ("train-000000.tar", "train-000001.tar"):
            with tarfile.open(folder / name, "w") as tar:
                for number in range(4):
                    for ending, content in (("ppm", grey(first + number)), ("cls", b"%d" % (number % 2))):
                        about = tarfile.TarInfo(f"{number}.{ending}")
                        about.size = len(content)
                        tar.addfile(about, io.BytesIO(content))
            os.utime(folder / name, (first, first))

    put(10)
    with served(folder) as (server, url):
        server.about = about
        root = f"{url}/train-{{000000..000001}}.tar"
        if about == {}:
            line = refused("webdataset", root, **section)
            assert (
                "the server reports no size, ETag or modification time, so a change would go unnoticed"
                in line
            )
            return
        before = everything(load("webdataset", root, **section))
        asked = 0 if about is None else 2  # for a size, which HEAD did not say
        assert len(server.tars()) == 2 + asked
        assert torch.equal(everything(load("webdataset", root, **section)), before)
        assert len(server.tars()) == 2 + 2 * asked
        put(100)
        if about:
            server.about = dict.fromkeys(about, "2")
        assert (everything(load("webdataset", root, **section)) - before == 90).all()
        assert len(server.tars()) == 4 + 3 * asked


def test_parquet_files_are_closed_after_each_row_group(photos, tmp_path):
    root = write_parquet(photos, tmp_path / "p")
    shards = ParquetShards(DataSettings("parquet", str(root)))
    images = shards.listing("train")
    assert len([images.read(index) for index in range(len(images.labels))]) == 18
    opened = [
        os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{each}")
    ]
    assert not [each for each in opened if each.endswith(".parquet")]


# ------------------------------------------------------------------------------------------------- trainings


@pytest.fixture
def remote(runs: Runs, tmp_path):
    """(server, images and cache for rows of the matrix, limit that holds two windows)."""
    shards = copied(runs.files["shards"], tmp_path / "served")
    limit = sum(sorted(each.stat().st_size for each in shards.glob("*.tar"))[-8:])
    with served(shards) as (server, url):
        files: dict[str, Any] = {**runs.files, "shards": url, "cache": tmp_path / "cache"}
        yield server, files, overrides(data__cache__limit=limit), limit


def test_ranks_train_on_shards_of_a_server_as_on_the_folder(runs: Runs, remote, tmp_path):
    server, files, _, _ = remote
    made = train(ROWS["shards"], 2, tmp_path / "run", files, tuple(overrides(data__window="all")))
    assert made.code == 0, made.stderr
    assert losses(made) == pytest.approx(losses(runs.straight("folder", 1)), rel=1e-5)
    assert server.tars() == sorted(each.name for each in runs.files["shards"].glob("*.tar"))
    assert list((tmp_path / "cache").rglob("*.raw"))
    assert "decoded when they are needed, then stored" in made.stdout


def test_a_limited_cache_and_no_workers_train_to_the_same_bits(runs: Runs, remote, tmp_path):
    server, files, limited, limit = remote
    row = ROWS["windows"]
    made = train(row, 1, tmp_path / "run", files, (*limited, *overrides(data__workers=0)))
    assert made.code == 0, made.stderr
    assert made.summary["weights_sha256"] == runs.straight("windows", 1).summary["weights_sha256"]
    assert losses(made) != losses(runs.straight("shards", 1))
    shards = tmp_path / "cache/shards"
    assert 0 < sum(each.stat().st_size for each in shards.iterdir()) <= limit
    assert len(server.tars()) > len(set(server.tars()))
    assert not list((tmp_path / "cache").rglob("*.raw"))
    assert "shuffled 1 shard at a time" in made.stdout


def test_ranks_end_with_one_line_for_a_lost_shard_or_a_missing_table(remote, tmp_path):
    server, files, limited, _ = remote
    lost = sorted(each.name for each in server.folder.glob("train-*.tar"))[-1]
    server.faults = {lost: ("404", 99)}
    failed = train(ROWS["windows"], 2, tmp_path / "run", files, tuple(limited))
    assert failed.code == 2
    line = f"train.py: {files['shards']}/{lost}: no such file; correct data.root, or put the file there"
    assert line in failed.stderr.splitlines(), failed.stderr
    table = overrides(data__dataset="table", data__root=files["shards"], data__cache__folder=files["cache"])
    refusal = run(["train.py", *DIGITS, *table], tmp_path, processes=2)
    assert refusal.code == 2
    (line,) = [each for each in refusal.stderr.splitlines() if each.startswith("train.py: data.root: ")]
    assert f"{files['shards']}: a table must be in a folder; download the images" in line

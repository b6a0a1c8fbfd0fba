"""Shards that are fetched while a training goes on: windows of them, the cache and its limit, faults on the way."""

import json
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from sources import copied, load, refused, served
from support import (
    DIGITS,
    LATEST,
    PROJECT,
    TIME_LIMIT,
    execute,
    fork,
    launcher,
    overrides,
    train_many,
    wait_for_checkpoint,
)

from classify.images.sampler import MicroBatchSampler
from classify.images.settings import DataSettings
from classify.images.sources.encoded import Shard
from classify.images.sources.shard_cache import ShardCache, ShardsAhead
from classify.images.windows import Windows


def in_windows(count: int = 60, shards: int = 10, size: int = 3) -> Windows:
    """Images that lie in their shards in another order than that of their indices."""
    places = np.random.default_rng(0).permutation(count)
    return Windows(places, places * shards // count, size)


def test_an_order_is_a_function_of_seed_and_epoch_and_mixes_a_few_shards_at_a_time():
    windows = in_windows()
    for parts in (1, 2, 3):
        sampler = MicroBatchSampler(60, 12, parts, seed=5, windows=windows)
        for epoch in (0, 1):
            order = torch.cat(list(sampler))
            assert order.tolist() == MicroBatchSampler(60, 60, 1, 5, windows=windows).order(epoch).tolist()
            assert sorted(order.tolist()) == list(range(60))
            groups = [set(windows.shards[part].tolist()) for part in order.split(18)]  # 3 shards of 6 images
            assert [len(each) for each in groups] == [3, 3, 3, 1]
            assert set.union(*groups) == set(range(10))
            within = windows.shards[order[:18]]
            assert (np.diff(within) != 0).sum() > 6  # one shard after the other would be 2
    first, second = (MicroBatchSampler(60, 12, 1, 5, windows=windows).order(epoch) for epoch in (0, 1))
    assert not torch.equal(first, second)
    other = MicroBatchSampler(60, 12, 1, 6, windows=windows).order(0)
    assert not torch.equal(first, other)
    in_order = MicroBatchSampler(60, 12, 1, windows=windows).order(0)
    assert windows.places[in_order].tolist() == list(range(60))
    assert windows.first().tolist() == in_order[:18].tolist()


def test_a_window_and_the_next_one_are_fetched_before_they_are_read():
    windows = in_windows()
    asked: list[list[int]] = []
    sampler = MicroBatchSampler(60, 7, 1, seed=5, windows=windows, ahead=asked.append)
    for _ in range(2):
        seen: set[int] = set()
        for indices in sampler:
            seen |= set(windows.shards[indices].tolist())
            assert set(windows.shards[indices].tolist()) <= {each for every in asked[-2:] for each in every}
            assert len(asked[-1]) <= 6
    assert [len(each) for each in asked] == [6, 6, 4, 4, 6, 6, 4, 4]
    following = MicroBatchSampler(60, 7, 1, seed=5, windows=windows).order(1)[:18]
    assert set(asked[3][1:]) == set(windows.shards[following].tolist())


SHARDS = [Shard(f"http://host/{number}", 100 + number, 0, 1) for number in range(12)]
LIMIT = 450


def write(shard: Shard, target: pathlib.Path) -> None:
    target.write_bytes(bytes([shard.size % 256]) * shard.size)


def held(folder: pathlib.Path) -> list[int]:
    return sorted(each.stat().st_size for each in folder.iterdir() if not each.name.startswith("."))


def test_the_shards_read_last_stay(tmp_path):
    kept, fetched = ShardCache(tmp_path, LIMIT), []

    def fetch(shard: Shard, target: pathlib.Path) -> None:
        fetched.append(shard.size)
        write(shard, target)

    for number in (0, 1, 2, 3, 0, 4, 0, 5, 0):
        assert kept.file(SHARDS[number], fetch).stat().st_size == SHARDS[number].size
        time.sleep(0.01)  # of which file systems' clocks may know no parts
    assert fetched == [100, 101, 102, 103, 104, 105]
    assert held(tmp_path) == [100, 103, 104, 105]
    (tmp_path / f"{'0' * 24}.400.partial").touch()  # of a process that was killed
    kept.file(SHARDS[6], fetch)
    assert held(tmp_path) == [100, 104, 105, 106]


def test_processes_share_shards_under_the_limit(tmp_path):
    def read_many(seed: int):
        def read() -> None:
            choose, kept = random.Random(seed), ShardCache(tmp_path, LIMIT)

            def fetch(shard: Shard, target: pathlib.Path) -> None:
                time.sleep(0.002)
                write(shard, target)
                with kept._room():
                    assert sum(held(tmp_path)) <= LIMIT

            for _ in range(60):
                shard = choose.choice(SHARDS)
                try:
                    content = kept.file(shard, fetch).read_bytes()
                except FileNotFoundError:  # the other one has made room of it
                    continue
                assert content == bytes([shard.size % 256]) * shard.size

        return read

    processes = fork(read_many(1), read_many(2))
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def test_what_is_wanted_last_is_fetched_first():
    fetched, may_go, done = [], threading.Event(), threading.Event()

    def fetch(shard: Shard) -> None:
        may_go.wait(30)
        fetched.append(shard)
        if shard is SHARDS[9]:
            done.set()
        if shard is SHARDS[7]:
            raise ValueError("which the reader will say")

    ahead = ShardsAhead(fetch, 1)
    ahead.want(SHARDS[:4])
    while ahead._wanted and len(ahead._wanted) == 4:
        time.sleep(0.001)
    ahead.want(SHARDS[7:10])
    may_go.set()
    assert done.wait(30)
    assert fetched == [SHARDS[0], *SHARDS[7:10]]


def test_a_limit_has_to_hold_two_windows(written, tmp_path):
    cache = {"folder": str(tmp_path / "cache")}
    sizes = sorted(each.stat().st_size for each in written.glob("*.tar"))
    with served(written) as (_, url):
        section: dict[str, Any] = {"decode": "stream", "window": 1}
        line = refused("webdataset", url, **section, cache={**cache, "limit": sizes[-1]})
        assert (
            line.startswith("data.cache.limit: 0.0 MiB: ") and "have to be there at a time; raise it" in line
        )
        assert DataSettings.parse({"cache": {"limit": sum(sizes)}}).cache_limit == sum(sizes)
        assert load("webdataset", url, **section, cache={**cache, "limit": sum(sizes)}).is_streamed


def test_a_full_disk_of_the_cache_is_one_line_and_leaves_no_shard(written, tmp_path):
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        line = refused("webdataset", url, cache={"folder": str(tmp_path / "cache")})
        assert line.startswith(f"data.cache.folder: {tmp_path / 'cache'}/shards: no room for {url}/t")
        assert line.endswith("; free some, set data.cache.limit, or give another folder")

    with served(written) as (_, url):
        (process,) = fork(full)
        process.join(60)
    assert process.exitcode == 0
    assert all(
        each.suffix == ".partial" for each in (tmp_path / "cache/shards").iterdir() if each.name[0] != "."
    )


def rows_of(places: dict[str, dict[str, Any]], **more: Any) -> dict[str, list[str]]:
    """Trainings of the digits' network on images in shards."""
    deepspeed = "hyperparameters__overwrite_deepspeed_args__"
    common: dict[str, Any] = {"dataset": "webdataset", "image_size": 32, "augment": {"flip": True}}
    return {
        name: [
            *DIGITS,
            *overrides(
                data=json.dumps({**common, **section}),
                **{"hyperparameters__max_length": "{epochs: 3}", f"{deepspeed}train_batch_size": 6, **more},
            ),
        ]
        for name, section in places.items()
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_trains_to_the_bits_of_the_folder_in_the_same_order(photos, written, tmp_path, processes):
    """From a server, with all shards kept, with room for a few, and with a change of the number of workers."""
    with served(copied(written, tmp_path / "served")) as (server, url):
        sizes = sorted(each.stat().st_size for each in written.glob("*.tar"))
        limit = sum(sizes[-8:])
        remote: dict[str, Any] = {"root": url, "decode": "stream"}
        every = {"window": "all", "cache": {"folder": str(tmp_path / "a")}}
        few = {"window": 1, "cache": {"folder": str(tmp_path / "b"), "limit": limit}}
        runs = train_many(
            tmp_path,
            rows_of(
                {
                    "folder": {"dataset": "imagefolder", "root": str(copied(photos, tmp_path / "f"))},
                    "all": {**remote, **every},
                    "again": {**remote, **every},  # from what the run before has decoded
                    "windows": {"root": str(copied(written, tmp_path / "s")), "window": 1},
                    "few": {**remote, **few},
                    "alone": {**remote, **few, "workers": 0},
                }
            ),
            processes,
        )
        fetched = len([name for name in server.asked if name.endswith(".tar")])
    assert all(run.code == 0 for run in runs.values()), [run.stderr for run in runs.values()]
    weights = {name: run.summary["weights_sha256"] for name, run in runs.items()}
    assert weights["folder"] == weights["all"] == weights["again"]
    assert weights["windows"] == weights["few"] == weights["alone"] != weights["all"]
    assert sum(each.stat().st_size for each in (tmp_path / "b/shards").iterdir()) <= limit
    assert fetched >= len(sizes) * 2
    assert not list((tmp_path / "b").rglob("*.raw")) and list((tmp_path / "a").rglob("*.raw"))
    assert "shuffled 1 shard at a time" in runs["few"].stdout
    assert "decoded when they are needed, then kept" in runs["all"].stdout


def train(output: pathlib.Path, row: list[str], *more: str):
    command = [*launcher("torchrun", 2), "train.py", *row, "--output", str(output), *more]
    return execute(command, output)


def test_neither_a_lost_server_nor_a_kill_costs_more_than_a_resume(written, tmp_path):
    """A line that names the shard, from whichever rank needs it; then on to the same bits, killed once more."""
    sizes, output = [each.stat().st_size for each in written.glob("*.tar")], tmp_path / "run"
    lost = sorted(each.name for each in written.glob("train-*.tar"))[-1]
    with served(copied(written, tmp_path / "served")) as (server, url):
        cache = {"folder": str(tmp_path / "cache"), "limit": sum(sorted(sizes)[-8:])}
        section = {"root": url, "decode": "stream", "window": 1, "cache": cache}
        long = {"hyperparameters__max_length": "{epochs: 12}", "min_checkpoint_period": "{batches: 1}"}
        (row,) = rows_of({"run": section}, **long).values()
        server.faults = {lost: ("404", 99)}
        failed = train(output, row)
        lines = [each for each in failed.stderr.splitlines() if each.startswith("train.py: ")]
        assert f"train.py: {url}/{lost}: no such file; mend data.root, or put it there" in lines, (
            failed.stderr
        )
        assert failed.code == 1 and "exitcode  : 2" in failed.stderr  # that of torchrun, and of the rank
        server.faults = {}
        shutil.rmtree(tmp_path / "cache")
        resume = LATEST if list(output.glob("checkpoints/*/metadata.json")) else []
        command = [*launcher("torchrun", 2), "train.py", *row, "--output", str(output), *resume]
        process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE)
        for each in wait_for_checkpoint(process, output):
            each.send_signal(signal.SIGKILL)
        assert process.wait(TIME_LIMIT) != 0
        last, straight = train(output, row, *LATEST), train(tmp_path / "straight", row)
    assert last.code == straight.code == 0, last.stderr
    assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]

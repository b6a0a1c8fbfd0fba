"""A training fetches shards in windows while it reads others: the cache, its limit, and lost servers."""

import itertools
import pathlib
import random
import resource
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from matrix import ROWS, Runs, train
from sources import copied, load, refused, served
from support import DIGITS, LATEST, all_at_once, checkpoints, fork, losses, overrides, run

from classify.images.sampler import MicroBatchSampler
from classify.images.settings import DataSettings
from classify.images.sources.encoded import Shard
from classify.images.sources.shard_cache import ShardCache, ShardsAhead
from classify.images.windows import Windows


def in_windows(count: int = 60, shards: int = 10, size: int = 3) -> Windows:
    """The shards hold the images in another order than the indices."""
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
            assert (np.diff(within) != 0).sum() > 6  # without mixing it would be 2
    places = ((5, 0), (5, 1), (6, 0))
    drawn = [MicroBatchSampler(60, 12, 1, seed, windows=windows).order(epoch) for seed, epoch in places]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))
    in_order = MicroBatchSampler(60, 12, 1, windows=windows).order(0)
    assert windows.places[in_order].tolist() == list(range(60))
    assert windows.first().tolist() == in_order[:18].tolist()


def test_a_window_and_the_next_one_are_fetched_before_they_are_read():
    windows = in_windows()
    asked: list[list[int]] = []
    sampler = MicroBatchSampler(60, 7, 1, seed=5, windows=windows, ahead=asked.append)
    for _ in range(2):
        for indices in sampler:
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


def test_the_cache_keeps_the_shards_read_last(tmp_path):
    kept, fetched = ShardCache(tmp_path, LIMIT), []

    def fetch(shard: Shard, target: pathlib.Path) -> None:
        fetched.append(shard.size)
        write(shard, target)

    for number in (0, 1, 2, 3, 0, 4, 0, 5, 0):
        assert kept.file(SHARDS[number], fetch).stat().st_size == SHARDS[number].size
        time.sleep(0.01)  # clocks of file systems are coarse
    assert fetched == [100, 101, 102, 103, 104, 105]
    assert held(tmp_path) == [100, 103, 104, 105]
    (tmp_path / f"{'0' * 24}.400.partial").touch()  # of a killed process
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
                except FileNotFoundError:  # the other process has removed it
                    continue
                assert content == bytes([shard.size % 256]) * shard.size

        return read

    all_at_once(read_many(1), read_many(2))


def test_the_newest_request_is_fetched_first():
    fetched, begun, may_go, done = [], threading.Event(), threading.Event(), threading.Event()

    def fetch(shard: Shard) -> None:
        begun.set()
        may_go.wait(60)
        fetched.append(shard)
        if shard is SHARDS[9]:
            done.set()
        if shard is SHARDS[7]:
            raise ValueError("the reader will raise it")

    ahead = ShardsAhead(fetch, 1)
    ahead.want(SHARDS[:4])
    assert begun.wait(60)
    ahead.want(SHARDS[7:10])
    may_go.set()
    assert done.wait(60)
    assert fetched == [SHARDS[0], *SHARDS[7:10]]


def test_a_limit_has_to_hold_two_windows(written, tmp_path):
    folder = {"folder": str(tmp_path / "cache")}
    sizes = sorted(each.stat().st_size for each in written.glob("*.tar"))
    section: dict[str, Any] = {"decode": "stream", "window": 1}
    with served(written) as (_, url):
        line = refused("webdataset", url, **section, cache={**folder, "limit": sizes[-1]})
        assert line.startswith("data.cache.limit: 0.0 MiB: ")
        assert "have to be there at a time; raise it" in line
        assert DataSettings.parse({"cache": {"limit": sum(sizes)}}).cache_limit == sum(sizes)
        assert load("webdataset", url, **section, cache={**folder, "limit": sum(sizes)}).is_streamed


def test_a_full_disk_of_the_cache_is_one_line_and_leaves_no_shard(written, tmp_path):
    cache = tmp_path / "cache"

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        line = refused("webdataset", url, cache={"folder": str(cache)})
        assert line.startswith(f"data.cache.folder: {cache}/shards: no room for {url}/t")
        assert line.endswith("; free some, set data.cache.limit, or give another folder")

    with served(written) as (_, url):
        (process,) = fork(full)
        process.join(60)
    assert process.exitcode == 0
    assert {each.suffix for each in (cache / "shards").iterdir() if each.name[0] != "."} <= {".partial"}


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
    assert "decoded when they are needed, then kept" in made.stdout


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
    line = f"train.py: {files['shards']}/{lost}: no such file; mend data.root, or put it there"
    assert line in failed.stderr.splitlines(), failed.stderr
    table = overrides(data__dataset="table", data__root=files["shards"], data__cache__folder=files["cache"])
    refusal = run(["train.py", *DIGITS, *table], tmp_path, processes=2)
    assert refusal.code == 2
    (line,) = [each for each in refusal.stderr.splitlines() if each.startswith("train.py: data.root: ")]
    assert f"{files['shards']}: holds no table of training images; it needs train.csv or train.jsonl" in line


@pytest.mark.soak
@pytest.mark.parametrize("step", [2, 6])
def test_a_kill_of_ranks_that_read_from_a_server_costs_no_more_than_a_resume(
    runs: Runs, remote, tmp_path, step
):
    _, files, limited, _ = remote
    more = (*limited, *overrides(min_checkpoint_period="{batches: 1}"))
    fault = {"FAULT": "SIGKILL", "RANK_AT_FAULT": "1", "STEP": str(step)}
    killed = train(ROWS["windows"], 2, tmp_path / "run", files, more, **fault)
    assert killed.code != 0 and checkpoints(killed)
    last = train(ROWS["windows"], 2, tmp_path / "run", files, (*limited, *LATEST))
    assert last.code == 0, last.stderr
    assert last.summary["weights_sha256"] == runs.straight("windows", 2).summary["weights_sha256"]

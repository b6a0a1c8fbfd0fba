"""All images of a part -> pixels in one file, in parallel on all cores."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool

import joblib
import numpy as np
import torch
from tqdm import tqdm

from classify.images.decode import decode
from classify.images.sources.encoded import EncodedImages, ShardFile
from classify.images.sources.files import NOT_READABLE, raise_some
from deepspeed_trial.errors import InvalidInput, TrainingStopped

CHUNK = 64  # images a worker decodes at a time
AHEAD = 4  # shards that are fetched at the same time, before they are decoded
_Errors = list[tuple[int, InvalidInput]]  # of images, by their indices
_Work = tuple[EncodedImages, pathlib.Path | None, tuple[int, int]]
_work: _Work  # of a worker


def decode_all(
    images: EncodedImages, shard_file: ShardFile, size: tuple[int, int], split: str, target: pathlib.Path
) -> None:
    """Decode images into ``target``, one after the other, with a progress bar.

    Args:
        images: all of them are decoded.
        shard_file: gives the local file of a shard.
        size: height and width to scale to, in pixels.
        split: what to call them.
        target: a file that is there and empty.

    Raises:
        InvalidInput: with a line for each file that cannot be read, once all have been tried.
        TrainingStopped: if the system kills a process that decodes.
    """
    errors = try_all(images, shard_file, size, split, target)
    raise_some([line for error in errors.values() for line in error.errors], NOT_READABLE)


def try_all(
    images: EncodedImages,
    shard_file: ShardFile,
    size: tuple[int, int],
    split: str,
    target: pathlib.Path | None = None,
) -> dict[int, InvalidInput]:
    """Decode images as ``decode_all`` does, or into no file; return the errors by index."""
    count = len(images.labels)
    order = np.arange(count) if images.places is None else images.places.argsort().numpy()
    # The workers compute with one thread each, so forking, which costs nothing, is safe beside any threads.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers = min(joblib.cpu_count(), -(-count // CHUNK))
    bar = tqdm(total=count, desc=f"decoding {split}", unit=" images", disable=not sys.stderr.isatty())
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _begin, ((images, target, size),))
    errors: dict[int, InvalidInput] = {}
    running: collections.deque[concurrent.futures.Future[_Errors]] = collections.deque()

    def finish(left: int) -> None:
        while len(running) > left:
            errors.update(running.popleft().result())
            bar.update(min(CHUNK, count - bar.n))

    with bar, pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        pool.submit(int).result()  # all workers begin here, before any thread fetches
        processes = multiprocessing.active_children()
        try:
            for file, start, stop in _files(images, shard_file):
                before = len(running)
                for begin in range(start, stop, CHUNK):
                    chosen = order[begin : min(begin + CHUNK, stop)]
                    running.append(pool.submit(_decode_chunk, chosen, file))
                finish(len(running) - before)  # so that few shards have to be there at a time
            finish(0)
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise TrainingStopped(_why_broken(processes, split)) from error
            raise
    return errors


def _why_broken(processes: Iterable[multiprocessing.process.BaseProcess], split: str) -> str:
    """Say why a pool of processes that decode has lost one, by the signal that ended it."""
    signals = {-(each.exitcode or 0) for each in processes}
    if signal.SIGKILL in signals:
        what = "was killed, as the system does when memory runs out"
        remedy = "give the machine or the container more memory, or end other programs"
    else:
        named = [each.name for each in signal.Signals if each in signals - {signal.SIGTERM}]  # of the pool
        what = f"crashed ({', '.join(named) or 'without a signal'})"
        remedy = "an image may make its decoder crash; look at images of unknown origin first"
    return f"data.root: a process that decoded the images of {split} {what}; {remedy}"


def _files(images: EncodedImages, shard_file: ShardFile) -> Iterator[tuple[pathlib.Path, int, int]]:
    """The local file of each shard, fetched ahead, and the places of its images."""
    if not images.shards:
        yield pathlib.Path(), 0, len(images.labels)
        return
    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:
        fetched = collections.deque(pool.submit(shard_file, shard) for shard in images.shards[:AHEAD])
        for index, shard in enumerate(images.shards):
            file = fetched.popleft().result()
            fetched.extend(pool.submit(shard_file, each) for each in images.shards[index + AHEAD :][:1])
            yield file, shard.start, shard.stop


def _begin(work: _Work) -> None:
    """Keeps what all chunks of a worker have in common, which a fork takes over without a copy."""
    global _work
    _work = work
    torch.set_num_threads(1)


def _decode_chunk(indices: np.ndarray, file: pathlib.Path) -> _Errors:
    """Write images to their places in the file, or none; return an error for each unreadable image."""
    images, target, size = _work
    errors: _Errors = []
    with open(target or os.devnull, "rb+") as written:
        for index in indices.tolist():
            pixels = np.zeros((3, *size), dtype=np.uint8)
            try:
                (content,) = images.read([index], lambda _: file)
                pixels = decode(content, size, functools.partial(images.name, index))
            except InvalidInput as error:
                errors.append((index, error))
            written.seek(index * pixels.nbytes)
            written.write(pixels.data)
    return errors

"""All images of a part -> pixels in one file, in parallel on all cores."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import multiprocessing
import pathlib
import sys
import warnings
from collections.abc import Iterator

import joblib
import numpy as np
import torch
from tqdm import tqdm

from classify.images.decode import decode
from classify.images.sources.encoded import EncodedImages, ShardFile
from harness.errors import InvalidInput

CHUNK = 64  # images a worker decodes at a time
AHEAD = 4  # shards that are fetched at the same time, before they are decoded
SHOWN = 20  # files that are named where more cannot be read
_Work = tuple[EncodedImages, pathlib.Path, tuple[int, int]]
_work: _Work  # of a worker


def decode_all(
    images: EncodedImages, shard_file: ShardFile, size: tuple[int, int], split: str, target: pathlib.Path
) -> None:
    """Decodes images into ``target``, one after the other, with a progress bar.

    Args:
        images: all of them are decoded.
        shard_file: gives the local file of a shard.
        size: height and width to scale to, in pixels.
        split: what to call them.
        target: a file that is there and empty.

    Raises:
        InvalidInput: with a line for each file that cannot be read, once all have been tried.
    """
    count = len(images.labels)
    order = np.arange(count) if images.places is None else images.places.argsort().numpy()
    # The workers compute with one thread each, so forking, which costs nothing, is safe beside any threads.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    workers = min(joblib.cpu_count(), -(-count // CHUNK))
    bar = tqdm(total=count, desc=f"decoding {split}", unit=" images", disable=not sys.stderr.isatty())
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, _begin, ((images, target, size),))
    errors: list[str] = []
    running: collections.deque[concurrent.futures.Future[list[str]]] = collections.deque()

    def finish(left: int) -> None:
        while len(running) > left:
            errors.extend(running.popleft().result())
            bar.update(min(CHUNK, count - bar.n))

    with bar, pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        pool.submit(int).result()  # all workers begin here, before any thread fetches
        try:
            for file, start, stop in _files(images, shard_file):
                before = len(running)
                for begin in range(start, stop, CHUNK):
                    chosen = order[begin : min(begin + CHUNK, stop)]
                    running.append(pool.submit(_decode_chunk, chosen, file))
                finish(len(running) - before)  # so that few shards have to be there at a time
            finish(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(errors) > SHOWN:
        more = f"{len(errors) - SHOWN:,} more files are not readable; mend or remove these first"
        errors = [*errors[:SHOWN], f"data.root: {more}"]
    if errors:
        raise InvalidInput(errors)


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


def _decode_chunk(indices: np.ndarray, file: pathlib.Path) -> list[str]:
    """Writes images to their places in the file; gives an error for each that cannot be read."""
    images, target, size = _work
    errors = []
    with open(target, "rb+") as written:
        for index in indices.tolist():
            pixels = np.zeros((3, *size), dtype=np.uint8)
            try:
                (content,) = images.read([index], lambda _: file)
                pixels = decode(content, size, functools.partial(images.name, index))
            except InvalidInput as error:
                errors += error.errors
            written.seek(index * pixels.nbytes)
            written.write(pixels.data)
    return errors

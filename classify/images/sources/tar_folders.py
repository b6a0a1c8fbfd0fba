"""Writes a folder of images as tar shards with their index."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import io
import math
import multiprocessing
import os
import pathlib
import sys
import tarfile
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import joblib
import numpy as np
from tqdm import tqdm

from classify.images.listing import Location, Shard
from classify.images.sources import shard_index
from classify.images.sources.image_folder import ImageFolder
from classify.images.sources.remote import digest
from classify.images.sources.tar_shards import scan
from deepspeed_trial.errors import InvalidInput, one_line, printable

_SAFE = "".join(chr(each) for each in range(33, 127) if chr(each) not in "%./\\")
_BLOCK = 512  # bytes; a member has a block as its header, then blocks with its content
_END = 10240  # bytes; zeros fill a tar up to a multiple of this


@dataclass(frozen=True)
class _Job:
    """A shard to write: its images in their order, with their positions in the part."""

    target: pathlib.Path
    paths: Sequence[str]
    keys: Sequence[str]
    labels: Sequence[int]
    positions: np.ndarray


def write(folder: pathlib.Path, target: pathlib.Path, limit: int, seed: int) -> None:
    """Write a folder of images as shards.

    Args:
        folder: an image folder, as for ``ImageFolder``.
        target: the folder for the shards; created if missing; must not have tar files of other data.
        limit: maximum bytes of a shard; a larger image gets a shard of its own.
        seed: determines the order of the images in the shards.

    Raises:
        InvalidInput: if the folder cannot be used, or one of its files changes during the writing.
    """
    source = ImageFolder(Location(str(folder)))
    jobs = {part: list(_jobs(source, part, target, limit, seed)) for part in source.parts}
    target.mkdir(parents=True, exist_ok=True)
    names = {job.target.name for each in jobs.values() for job in each}
    others = sorted(each.name for each in target.glob("*.tar") if each.name not in names)
    if others:
        raise InvalidInput(f"{target}: holds {others[0]}, which is not of {folder}; give an empty folder")
    every = [job for each in jobs.values() for job in each]
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = concurrent.futures.ProcessPoolExecutor(min(joblib.cpu_count(), len(every)), context)
    bar = tqdm(total=len(every), desc="writing", unit=" shards", disable=not sys.stderr.isatty())
    written: dict[str, tuple[np.ndarray, int, str, bool]] = {}
    with bar, pool:
        try:
            for job, result in zip(every, pool.map(_write_shard, every), strict=True):
                written[job.target.name] = result
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    parts = {}
    for part, each in jobs.items():
        shards: list[Shard] = []
        for job in each:
            entries, size, sha256, _ = written[job.target.name]
            start = shards[-1].stop if shards else 0
            shards.append(Shard(job.target.name, size, start, start + len(entries), sha256))
        parts[part] = shard_index.Part(shards, np.concatenate([written[job.target.name][0] for job in each]))
    _save(target / "classes.txt", "".join(f"{name}\n" for name in source.classes).encode(errors="replace"))
    index = shard_index.Index(source.classes, parts)
    index.save(target / shard_index.FILE)
    for job in every:
        _stamp(job.target).unlink(missing_ok=True)
    kept, size = sum(each[3] for each in written.values()), sum(each[1] for each in written.values())
    counts = ", ".join(f"{part} {len(each.entries):,}" for part, each in parts.items())
    kept_text = f" ({kept} were there already)" if kept else ""
    print(f"{printable(target)}: {counts} images in {len(written)} shards{kept_text}, {size / 1e6:,.1f} MB")


def _jobs(source: ImageFolder, part: str, target: pathlib.Path, limit: int, seed: int) -> Iterator[_Job]:
    """Split a part, in a random order by the seed, into shards of at most ``limit`` bytes."""
    images = source.listing(part)
    folder = source.folder_of(part)
    keys = _keys([os.path.relpath(path, folder) for path in images.paths])
    order = np.random.default_rng((seed, len(part))).permutation(len(keys))
    labels, size, number = images.labels.tolist(), _END, 0
    chosen: list[int] = []
    for index in [*order.tolist(), -1]:
        needed = 0 if index < 0 else _room(os.stat(images.paths[index]).st_size) + 2 * _BLOCK
        if chosen and (index < 0 or size + needed > limit):
            paths, names = ([values[i] for i in chosen] for values in (images.paths, keys))
            file, classes = target / f"{part}-{number:06d}.tar", [labels[i] for i in chosen]
            yield _Job(file, paths, names, classes, np.array(chosen))
            chosen, size, number = [], _END, number + 1
        chosen.append(index)
        size += needed


def _room(size: int) -> int:
    return _BLOCK + math.ceil(size / _BLOCK) * _BLOCK


def _keys(names: Sequence[str]) -> list[str]:
    """Return the tar members' names: the files' names, if they differ before the first dot.

    Otherwise the names are quoted as in a URL, and the ending is appended again.
    """
    plain = [_stem(name) for name in names]
    often = collections.Counter(plain)
    keys = []
    for name, stem in zip(names, plain, strict=True):
        base, ending = os.path.basename(name), name.rpartition(".")[2]
        is_plain = (
            often[stem] == 1
            and base.count(".") == 1
            and _quoted(name.replace(".", "")) == name.replace(".", "")
        )
        keys.append(name if is_plain else f"{_quoted(name)}.{_quoted(ending).lower()}")
    return keys


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _quoted(name: str) -> str:
    """Return a path without dots and characters beyond ASCII."""
    return "/".join(
        urllib.parse.quote(os.fsencode(each), safe=_SAFE).replace(".", "%2E") for each in name.split("/")
    )


def _write_shard(job: _Job) -> tuple[np.ndarray, int, str, bool]:
    """Write a shard if it does not exist; return its entries, size, digest, and whether it existed."""
    files = [(status.st_size, status.st_mtime_ns) for path in job.paths for status in [os.stat(path)]]
    wanted = hashlib.sha256(repr((job.keys, job.labels, files)).encode(errors="replace")).hexdigest()
    stamp = _stamp(job.target)
    with contextlib.suppress(OSError, InvalidInput):
        sha256 = digest(job.target)
        if stamp.read_text() == f"{wanted} {sha256}":
            entries = scan(job.target, str(job.target)).entries
            entries["label"], entries["position"] = job.labels, job.positions
            return entries, job.target.stat().st_size, sha256, True
    partial = job.target.with_name(f"{job.target.name}.partial")
    rows = []
    try:
        with open(partial, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for path, key, label, position in zip(
                    job.paths, job.keys, job.labels, job.positions.tolist(), strict=True
                ):
                    content = pathlib.Path(path).read_bytes()
                    _add(tar, key, content)
                    end = tar.offset
                    rows.append(
                        (end - math.ceil(len(content) / _BLOCK) * _BLOCK, len(content), label, position)
                    )
                    _add(tar, f"{_stem(key)}.cls", str(label).encode())
            file.flush()
            os.fsync(file.fileno())
        sha256 = digest(partial)
        os.replace(partial, job.target)
    except (OSError, tarfile.TarError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise InvalidInput(f"{job.target}: could not be written ({one_line(error)}); correct that") from error
    _save(stamp, f"{wanted} {sha256}".encode())
    return np.array(rows, shard_index.ENTRY), job.target.stat().st_size, sha256, False


def _stamp(shard: pathlib.Path) -> pathlib.Path:
    """Return the file that describes a finished shard until all shards are finished."""
    return shard.with_name(f".{shard.name}.done")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # no owner, time 1970: the bytes depend on the folder alone
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def _save(target: pathlib.Path, content: bytes) -> None:
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link
    with open(partial, "xb") as file:
        file.write(content)
    os.replace(partial, target)

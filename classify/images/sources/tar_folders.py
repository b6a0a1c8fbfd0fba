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
import string
import sys
import tarfile
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from tarfile import BLOCKSIZE, RECORDSIZE

import joblib
import numpy as np
from tqdm import tqdm

from classify.images.listing import Shard
from classify.images.settings import DataSettings
from classify.images.sources.image_folder import ImageFolder
from classify.images.sources.shard_index import FILE, Index, Part
from classify.images.sources.tar_shards import TarShards
from deepspeed_trial.checkpoints.files import sha256
from deepspeed_trial.errors import InvalidInput, one_line, printable
from deepspeed_trial.output_files import replacing

_SAFE = string.punctuation.replace("%", "").replace("\\", "")


@dataclass(frozen=True)
class _Job:
    """A shard to write: its images in order, and their positions in the part."""

    target: pathlib.Path
    start: int  # the number of images in the previous shards
    paths: Sequence[str]
    keys: Sequence[str]
    labels: Sequence[int]
    positions: Sequence[int]


def write(folder: pathlib.Path, target: pathlib.Path, limit: int, seed: int) -> None:
    """Write a folder of images as shards.

    Args:
        folder: an image folder; see ``ImageFolder``.
        target: the folder for the shards, without tar files of other data; created if it is missing.
        limit: the maximum bytes of a shard; a larger image is alone in a shard.
        seed: the seed of the order of the images in the shards.

    Raises:
        InvalidInput: if the folder cannot be used, or one of its files changes during the writing.
    """
    source = ImageFolder(DataSettings("imagefolder", str(folder)))
    jobs = {part: _jobs(source, part, target, limit, seed) for part in source.parts}
    every = [job for of_part in jobs.values() for job in of_part]
    target.mkdir(parents=True, exist_ok=True)
    others = {file.name for file in target.glob("*.tar")} - {job.target.name for job in every}
    if others:
        what = f"holds {min(others)}, which is not a shard of {folder}"
        raise InvalidInput(f"{target}: {what}; give an empty folder")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with concurrent.futures.ProcessPoolExecutor(min(joblib.cpu_count(), len(every)), context) as pool:
        results = pool.map(_write_shard, every)
        bar = tqdm(results, "writing", len(every), unit=" shards", disable=not sys.stderr.isatty())
        written = {job.target: result for job, result in zip(every, bar, strict=True)}
    parts = {}
    for part, of_part in jobs.items():
        shards, entries, _ = zip(*[written[job.target] for job in of_part], strict=True)
        parts[part] = Part(shards, np.concatenate(entries))
    with replacing(target / "classes.txt", flush=True) as partial:
        partial.write_bytes("".join(f"{name}\n" for name in source.classes).encode(errors="replace"))
    Index(source.classes, parts).save(target / FILE)
    for job in every:
        _stamp(job.target).unlink(missing_ok=True)
    kept = sum(existed for _, _, existed in written.values())
    size = sum(shard.size for shard, _, _ in written.values())
    counts = ", ".join(f"{part} {len(each.entries):,}" for part, each in parts.items())
    kept_text = f" ({kept} were there already)" if kept else ""
    print(f"{printable(target)}: {counts} images in {len(written)} shards{kept_text}, {size / 1e6:,.1f} MB")


def _jobs(source: ImageFolder, part: str, target: pathlib.Path, limit: int, seed: int) -> list[_Job]:
    """Shuffle a part with a seed, and split it into shards of at most ``limit`` bytes."""
    images, folder = source.list_part(part), source.folder_of(part)
    keys = _keys([os.path.relpath(path, folder) for path in images.paths])
    chosen, size = list[list[int]]([[]]), RECORDSIZE  # zeros fill a tar up to a multiple of this
    for index in np.random.default_rng((seed, len(part))).permutation(len(keys)).tolist():
        blocks = math.ceil(os.stat(images.paths[index]).st_size / BLOCKSIZE)
        needed = (blocks + 3) * BLOCKSIZE  # the image, its header, the label's header and the label
        if chosen[-1] and size + needed > limit:
            chosen.append([])
            size = RECORDSIZE
        chosen[-1].append(index)
        size += needed
    jobs, start = list[_Job](), 0
    for number, rows in enumerate(chosen):
        paths, names = ([values[row] for row in rows] for values in (images.paths, keys))
        file = target / f"{part}-{number:06d}.tar"
        jobs.append(_Job(file, start, paths, names, images.labels[rows].tolist(), rows))
        start += len(rows)
    return jobs


def _keys(names: Sequence[str]) -> list[str]:
    """Return the tar members' names: each file's name, if its part before the first dot is unique.

    Any other name is percent-encoded like a URL, with its dots, and the extension is appended.
    """
    often = collections.Counter(os.path.splitext(name)[0] for name in names)
    keys = []
    for name in names:
        stem, ending = os.path.splitext(name)
        quoted = urllib.parse.quote(os.fsencode(name), safe=_SAFE)
        is_plain = often[stem] == 1 and "." not in os.path.basename(stem) and quoted == name
        keys.append(name if is_plain else quoted.replace(".", "%2E") + ending.lower())
    return keys


def _write_shard(job: _Job) -> tuple[Shard, np.ndarray, bool]:
    """Write a shard if it does not exist; return the shard, its entries, and whether it existed."""
    files = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, job.paths)]
    wanted = hashlib.sha256(repr((job.keys, job.labels, files)).encode(errors="replace")).hexdigest()
    stamp, existed = _stamp(job.target), False
    with contextlib.suppress(OSError):
        digest = sha256(job.target)
        existed = stamp.read_text() == f"{wanted} {digest}"
    if not existed:
        try:
            _write_tar(job)
            digest = sha256(job.target)
        except (OSError, tarfile.TarError, ValueError) as error:
            raise InvalidInput(
                f"{job.target}: could not be written ({one_line(error)}); remove the cause"
            ) from error
        with replacing(stamp, flush=True) as partial:
            partial.write_bytes(f"{wanted} {digest}".encode())
    entries = TarShards.scan(job.target, str(job.target)).entries
    entries["label"], entries["position"] = job.labels, job.positions
    size, stop = job.target.stat().st_size, job.start + len(entries)
    return Shard(job.target.name, size, job.start, stop, digest), entries, existed


def _write_tar(job: _Job) -> None:
    with (
        replacing(job.target, flush=True) as partial,
        tarfile.open(partial, "x", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path, key, label in zip(job.paths, job.keys, job.labels, strict=True):
            label_key = f"{os.path.splitext(key)[0]}.cls"
            for name, content in ((key, pathlib.Path(path).read_bytes()), (label_key, str(label).encode())):
                member = tarfile.TarInfo(name)  # no owner, time 1970: the bytes depend only on the images
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))


def _stamp(shard: pathlib.Path) -> pathlib.Path:
    """Return the file that marks a shard as finished, until all shards are finished."""
    return shard.with_name(f".{shard.name}.done")

"""The checkpoints of a run off a cluster: seen only when whole, checked before use, the best and the latest kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from determined import core

import reports
from errors import InvalidInput, TrainingStopped, one_line
from experiment import Experiment

_PARTIAL = ".partial-"  # what a checkpoint's folder is called until it is whole, and again while it is removed
_METADATA = "metadata.json"


class LocalCheckpoints:
    """Stands for Determined's checkpoint storage where there is no cluster.

    A checkpoint is written in a hidden folder, with the size and SHA-256 of every file in its ``metadata.json``, and
    renamed when it is whole. Only then are older ones removed.

    Args:
        folder: holds one folder a checkpoint, named by its UUID; all ranks see it.
        distributed: the ranks.
        keep_best: how many of the best to keep (``checkpoint_storage.save_trial_best``).
        keep_latest: how many of the latest to keep, at least one (``checkpoint_storage.save_trial_latest``).
        score: gives a validation's score by its step, the higher the better; None where there was no validation.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        distributed: core.DistributedContext,
        keep_best: int,
        keep_latest: int,
        score: Callable[[int], float | None],
    ) -> None:
        self.folder = folder
        self.keep_best, self.keep_latest = keep_best, max(1, keep_latest)
        self._dist, self._score = distributed, score
        if self._dist.rank == 0:
            for partial in folder.glob(f"{_PARTIAL}*"):  # of a run that was killed
                shutil.rmtree(partial, ignore_errors=True)

    @contextlib.contextmanager
    def store_path(self, metadata: dict[str, Any], *, shard: bool = False) -> Iterator[tuple[pathlib.Path, str]]:
        """Gives the folder into which all ranks write a new checkpoint, and its UUID.

        Raises:
            TrainingStopped: if it cannot be written; the checkpoints before it stay as they are.
        """
        name = self._dist.broadcast(str(uuid.uuid4()))
        partial = self.folder / f"{_PARTIAL}{name}"
        try:
            partial.mkdir(parents=True, exist_ok=True)
            yield partial, name
            self._dist.allgather(None)
            if self._dist.rank == 0:
                described = {**metadata, "time": time.time_ns(), "files": _describe(partial)}
                _write(partial / _METADATA, json.dumps(described, indent=2))
                os.rename(partial, self.folder / name)
                self._prune()
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's for a failed write
            free = shutil.disk_usage(self.folder).free / 2**20
            shutil.rmtree(partial, ignore_errors=True)
            raise TrainingStopped(
                f"{self.folder}: the checkpoint of step {metadata['steps_completed']} cannot be written"
                f" ({one_line(error)}; {free:,.0f} MiB are free there); {self._whole()}"
            ) from error
        self._dist.broadcast(None)  # nobody goes on before it is whole

    @contextlib.contextmanager
    def restore_path(self, storage_id: str, *args: Any, **kwargs: Any) -> Iterator[pathlib.Path]:
        """Gives the folder of a checkpoint."""
        yield self.folder / storage_id

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """What was written about a checkpoint, ``steps_completed`` among it."""
        return _metadata(self.folder / storage_id)

    def find(self, which: str) -> str:
        """Gives the UUID of a checkpoint whose files are all as they were written.

        Args:
            which: ``latest`` or a UUID.

        Raises:
            InvalidInput: if there is none such; the line offers the last one that is whole.
        """
        known, unreadable = _known(self.folder), _unreadable(self.folder)
        written = {**{name: each["time"] for name, each in known.items()}, **unreadable}
        name = max(written, key=lambda each: written[each], default=None) if which == "latest" else which
        if name is None or name not in written:
            found = f"it holds {', '.join(known)}" if known else "it holds no checkpoint"
            raise InvalidInput(f"--resume: {which}: not found in {self.folder}; {found}")
        damage = _damage(self.folder / name)
        if damage is None:
            return name
        whole = next((other for other in known if _damage(self.folder / other) is None), None)
        step = known[whole]["steps_completed"] if whole else 0
        mend = f"the last whole one is --resume {whole} (step {step})" if whole else "there is no other whole one"
        raise InvalidInput(f"--resume: {which}: {self.folder / name / damage}; {mend}")

    def _prune(self) -> None:
        known = _known(self.folder)
        scores = {name: self._score(metadata["steps_completed"]) for name, metadata in known.items()}
        judged = [name for name in reversed(known) if scores[name] is not None]  # of equals, the earlier is kept
        best = sorted(judged, key=lambda name: scores[name] or 0, reverse=True)
        kept = {*list(known)[: self.keep_latest], *best[: self.keep_best]}
        for name in known.keys() - kept:
            partial = self.folder / f"{_PARTIAL}{name}"
            os.rename(self.folder / name, partial)
            shutil.rmtree(partial, ignore_errors=True)

    def _whole(self) -> str:
        known = _known(self.folder)
        if not known:
            return "no checkpoint was saved before"
        name, metadata = next(iter(known.items()))
        return f"the last whole one is {name} (step {metadata['steps_completed']})"


def locate(source: pathlib.Path, which: str = "latest") -> pathlib.Path:
    """Gives the folder of a whole checkpoint.

    Args:
        source: a run's folder, or a checkpoint's own, which may have been downloaded from a cluster.
        which: of a run: ``latest``, ``best`` (by the metric of its experiment) or a UUID.

    Raises:
        InvalidInput: if there is none, or a file of it is missing, damaged or does not belong to it.
    """
    if (source / _METADATA).exists() and (source / "net.pt").exists():
        folder = source
    elif (source / "checkpoints").is_dir():
        known = _known(source / "checkpoints")
        name = _best(source, known) if which == "best" else next(iter(known), None) if which == "latest" else which
        if name not in known and name not in _unreadable(source / "checkpoints"):
            found = f"it holds {', '.join(known)}" if known else "it holds no checkpoint"
            raise InvalidInput(f"--checkpoint: {which}: not found in {source}; {found}")
        folder = source / "checkpoints" / str(name)
    else:
        mend = "give the folder of a run of train.py or of a checkpoint"
        raise InvalidInput(f"{source}: {'holds no checkpoint' if source.is_dir() else 'no such folder'}; {mend}")
    if damage := _damage(folder):
        raise InvalidInput(f"{folder / damage}; export another checkpoint")
    return folder


def _best(run: pathlib.Path, known: dict[str, dict[str, Any]]) -> str | None:
    """The checkpoint of the best validation; of equals, the earlier."""
    try:
        experiment = Experiment(json.loads((run / "run.json").read_text())["config"], {})
        metric, sign = experiment.metric, -1 if experiment.smaller_is_better else 1
        entries = reports.read(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"--checkpoint: best: {run}: its validations cannot be read ({one_line(error)})") from error
    judged_by = [each for each in entries if each["group"] == "validation" and metric in each]
    scores = {each["steps_completed"]: sign * each[metric] for each in judged_by}
    judged = [name for name in reversed(known) if known[name]["steps_completed"] in scores]
    return max(judged, key=lambda name: scores[known[name]["steps_completed"]], default=None)


def _known(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The metadata of every checkpoint in a folder of them, the latest first."""
    found = {}
    for path in _folders(folder):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found[path.name] = _metadata(path)
    return dict(sorted(found.items(), key=lambda item: item[1]["time"], reverse=True))


def _unreadable(folder: pathlib.Path) -> dict[str, int]:
    """When those checkpoints were written of which nothing is known, for their metadata are missing or damaged."""
    known = _known(folder)
    return {path.name: path.stat().st_mtime_ns for path in _folders(folder) if path.name not in known}


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.glob("[!.]*") if path.is_dir()]


def _metadata(checkpoint: pathlib.Path) -> dict[str, Any]:
    """What was written about a checkpoint; raises ``OSError`` or ``ValueError`` where that is none."""
    metadata = json.loads((checkpoint / _METADATA).read_text())
    files = metadata.get("files", {}) if isinstance(metadata, dict) else None
    if not isinstance(files, dict) or not all(map(_is_described, files.values())):
        raise ValueError("not what describes a checkpoint")
    if type(metadata.get("steps_completed")) is not int:
        raise ValueError("steps_completed is missing")
    if not isinstance(metadata.get("time"), int):
        metadata["time"] = (checkpoint / _METADATA).stat().st_mtime_ns
    return metadata


def _is_described(file: Any) -> bool:
    return isinstance(file, list) and len(file) == 2 and isinstance(file[0], int)


def _damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a checkpoint, beginning with the file's name; None if nothing is."""
    try:
        wanted = _metadata(folder).get("files")
    except FileNotFoundError:
        return f"{_METADATA}: is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{_METADATA}: cannot be read ({one_line(error)})"
    if wanted is None:  # downloaded from a cluster, which keeps no digests
        return None
    held = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {_METADATA}
    for file in sorted(held | wanted.keys()):
        if file not in held:
            return f"{file}: is missing"
        if file not in wanted:
            return f"{file}: does not belong to this checkpoint"
        size, digest = wanted[file]
        if (folder / file).stat().st_size < size:
            return f"{file}: is truncated"
        if _sha256(folder / file) != digest:
            return f"{file}: is not what was written"
    return None


def _describe(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, _sha256(path, flush=True)) for path in files}


def _sha256(path: pathlib.Path, flush: bool = False) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        if flush:  # to the disk, before an older checkpoint is removed
            os.fsync(file.fileno())
    return digest.hexdigest()


def _write(path: pathlib.Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

"""A checkpoint's folder on disk: its metadata, the digests of its files, and the check for damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.input_files import parsed, regular_file
from deepspeed_trial.local import metrics_log
from deepspeed_trial.output_files import sync

METADATA = "metadata.json"
NUMBER, OWN_DIGEST = "number", "sha256"  # keys in metadata.json


def write_metadata(folder: pathlib.Path, metadata: dict[str, Any]) -> None:
    """Write ``metadata.json`` of a new checkpoint, and flush the whole checkpoint to the disk.

    The file has ``metadata``, the checkpoint's number in the run, the size and SHA-256 of every other file,
    and the SHA-256 of these values. The number orders checkpoints, because a clock may be set back.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {str(path.relative_to(folder)): (path.stat().st_size, sha256(path)) for path in files}
    number = 1 + max((each[NUMBER] for each in known(folder.parent).values()), default=0)
    described = {**metadata, NUMBER: number, "files": digests}
    text = json.dumps({**described, OWN_DIGEST: _digest_of(described)}, indent=2)
    (folder / METADATA).write_text(text)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for each in (*files, folder / METADATA, *folders):
        sync(each)  # before an older checkpoint is removed


def read_metadata(checkpoint: pathlib.Path) -> dict[str, Any]:
    """Return the content of a checkpoint's ``metadata.json``.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file does not describe a checkpoint, or has changed.
    """
    metadata = json.loads(regular_file(checkpoint / METADATA).read_text())
    files = metadata.get("files", {}) if isinstance(metadata, dict) else None
    if not isinstance(files, dict) or not all(map(_is_described, files.values())):
        raise ValueError("not the description of a checkpoint")
    if type(metadata.get("steps_completed")) is not int:
        raise ValueError("steps_completed is missing")
    # Determined on a cluster and earlier versions of this package write no digest
    if metadata.pop(OWN_DIGEST, None) not in (None, _digest_of(metadata)):
        raise ValueError("it has changed since it was written")
    if type(metadata.setdefault(NUMBER, 0)) is not int:
        raise ValueError(f"{NUMBER} is not a whole number")
    return metadata


def _digest_of(metadata: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _is_described(file: Any) -> bool:
    return isinstance(file, list) and len(file) == 2 and isinstance(file[0], int)


def known(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the metadata of each checkpoint in a folder by the checkpoint's name, the latest first.

    Checkpoints without readable metadata are left out; ``unreadable`` returns them.
    """
    found = {}
    for path in _folders(folder):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found[path.name] = read_metadata(path)
    order = sorted(
        found, key=lambda name: (found[name][NUMBER], found[name]["steps_completed"]), reverse=True
    )
    return {name: found[name] for name in order}


def unreadable(folder: pathlib.Path) -> list[str]:
    """Return the names of checkpoints without readable metadata, the last modified folder first."""
    readable = known(folder)
    paths = [path for path in _folders(folder) if path.name not in readable]
    return [path.name for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.glob("[!.]*") if path.is_dir()]


def damage(folder: pathlib.Path) -> str | None:
    """Return a checkpoint's first fault as ``FILE: fault``; None without a fault."""
    try:
        wanted = read_metadata(folder).get("files")
    except FileNotFoundError:
        return f"{METADATA}: is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{METADATA}: cannot be read ({one_line(error)})"
    if wanted is None:  # downloaded from a cluster, which keeps no digests
        return None
    held = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {METADATA}
    for file in sorted(held | wanted.keys()):
        if file not in held:
            return f"{file}: is missing"
        if file not in wanted:
            return f"{file}: does not belong to this checkpoint"
        size, digest = wanted[file]
        if (folder / file).stat().st_size < size:
            return f"{file}: is truncated"
        if sha256(folder / file) != digest:
            return f"{file}: has changed since it was written"
    return None


def sha256(path: pathlib.Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def locate(source: pathlib.Path, which: str = "final") -> pathlib.Path:
    """Return the folder of an undamaged checkpoint.

    Args:
        source: the folder of a run, or of a checkpoint, e.g. one downloaded from a cluster.
        which: the checkpoint of a run: ``final`` (the weights that the run tested and reported; during the
            run the latest), ``latest``, ``best`` (by ``searcher.metric``) or a UUID.

    Raises:
        InvalidInput: if there is no such checkpoint, or if ``damage`` finds a fault in it.
    """
    checkpoints = source / "checkpoints"
    if (source / METADATA).exists():
        folder = source
    elif checkpoints.is_dir():
        found = known(checkpoints)
        choose: dict[str, Callable[[], str | None]] = {
            "final": lambda: _final(source) or next(iter(found), None),
            "best": lambda: _best(source, found),
            "latest": lambda: next(iter(found), None),
        }
        name = choose.get(which, lambda: which)()
        if name not in found and name not in unreadable(checkpoints):
            raise InvalidInput(f"--checkpoint: {which}: not found in {source}; {in_words(found)}")
        folder = checkpoints / str(name)
    else:
        fault = "holds no checkpoint" if source.is_dir() else "no such folder"
        raise InvalidInput(f"{source}: {fault}; give the folder of a run or of a checkpoint")
    if wrong := damage(folder):
        raise InvalidInput(f"{folder / wrong}; use another checkpoint")
    return folder


def in_words(found: dict[str, dict[str, Any]]) -> str:
    """Return the remedy of an error line: the checkpoints to choose from."""
    return f"it holds {', '.join(found)}" if found else "it holds no checkpoint"


def _final(run: pathlib.Path) -> str | None:
    """Return the checkpoint of a run's final weights; None before the end of the run."""
    file = run / "summary.json"
    with parsed(f"--checkpoint: final: {file} cannot be read", "give latest, best or a UUID"):
        name = json.loads(file.read_text())["checkpoint"] if file.exists() else None
        return None if name is None else str(name)


def _best(run: pathlib.Path, found: dict[str, dict[str, Any]]) -> str | None:
    """Return the checkpoint of the best validation; in a tie, the earliest one."""
    with parsed(f"--checkpoint: best: {run}: its validations cannot be read", "give latest or a UUID"):
        experiment = Experiment(json.loads((run / "run.json").read_text())["config"], {})
        metric, sign = experiment.metric, -1 if experiment.smaller_is_better else 1
        entries = metrics_log.read(run)
    judged_by = [each for each in entries if each["group"] == "validation" and metric in each]
    scores = {each["steps_completed"]: sign * each[metric] for each in judged_by}
    return next(iter(ranked(found, scores.get)), None)


def ranked(found: dict[str, dict[str, Any]], score: Callable[[int], float | None]) -> list[str]:
    """Return the names of ``known`` checkpoints with a score, best first; in a tie, the earliest first."""
    scores = {name: score(found[name]["steps_completed"]) for name in reversed(found)}
    judged = {name: value for name, value in scores.items() if value is not None}
    return sorted(judged, key=judged.__getitem__, reverse=True)

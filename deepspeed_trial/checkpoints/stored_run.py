"""A run's folder in ``checkpoint_storage``, with the layout of a local run's folder.

Others may write to the storage, so downloads check the names and sizes of files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deepspeed_trial import redaction
from deepspeed_trial.checkpoints import files
from deepspeed_trial.checkpoints.storage import OFF, SECTION, Storage, storage_of
from deepspeed_trial.errors import DISK_FULL, InvalidInput, one_line
from deepspeed_trial.local import metrics_log
from deepspeed_trial.output_files import replacing, sync

MOST_METADATA = 2**26  # bytes of a checkpoint's metadata.json
MOST_METRICS = 2**30  # bytes of metrics.jsonl
MOST_CHECKPOINTS = 1000
_BLOCK = 2**22  # bytes


class StoredRun:
    """A run's complete checkpoints, metrics and results.

    A checkpoint is complete if it has ``metadata.json``: uploads write it last, removals delete it first.

    Args:
        storage: the file system and its root folder.
        name: the run's folder in the root folder.

    Attributes:
        url: the folder as log lines show it.
        complete: names of the complete checkpoints that ``prepare`` has found.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self.complete = storage, set[str]()
        self._is_disk = storage.kind in ("shared_fs", "directory")
        self._base, self._root = storage.base, f"{storage.root}/{name}"
        self.url = f"{storage.url}/{name}"

    @functools.cached_property
    def _files(self) -> Any:
        return self._storage.open()

    def at(self, *parts: str) -> str:
        """Return the path of a file in the run's folder."""
        return "/".join([self._root, *parts])

    def names(self) -> list[str]:
        """Return the names of the checkpoints' folders, complete or not."""
        try:
            found = self._files.ls(self.at("checkpoints"), detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return [name for name in names if is_uuid(name)][:MOST_CHECKPOINTS]

    # --------------------------------------------------------------------------------------------- write

    def upload(self, checkpoint: pathlib.Path, name: str) -> None:
        """Upload a complete checkpoint, compare the stored sizes, and then mark it as complete.

        Raises:
            OSError: if a stored file has the wrong size.
        """
        described = files.read_metadata(checkpoint)["files"]
        folder = self.at("checkpoints", name)
        for file in described:
            self.put(checkpoint / file, f"checkpoints/{name}/{file}")
        held = self._files.find(folder, detail=True)
        for file, (size, _) in described.items():
            there = held.get(f"{folder}/{file}", {}).get("size")
            if there != size:
                raise OSError(f"{file}: {there} bytes arrived, expected {size}")
        self.put(checkpoint / files.METADATA, f"checkpoints/{name}/{files.METADATA}")

    def put(self, file: pathlib.Path, name: str) -> None:
        """Upload a file atomically: on a disk, rename it once it is complete."""
        if not self._is_disk:
            self._files.put_file(str(file), self.at(name))
            return
        target = pathlib.Path(self.at(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, flush=True) as partial:
            shutil.copyfile(file, partial)

    def remove(self, name: str) -> None:
        """Remove a checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self.at("checkpoints", name, files.METADATA))
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self.at("checkpoints", name), recursive=True)

    # ---------------------------------------------------------------------------------------------- read

    def prepare(self, output: pathlib.Path, resumes: bool | None) -> bool:
        """Download the run's checkpoints and metrics, and remove incomplete checkpoints from the store.

        Args:
            output: the run's local folder.
            resumes: whether to continue the stored run; None to continue it if it has a checkpoint.

        Returns:
            Whether the store holds a run to continue.

        Raises:
            InvalidInput: if the store cannot be read, or a new run would replace a stored run.
        """
        with _refused(self.url), tempfile.TemporaryDirectory() as folder:
            if not self._files.exists(self._base):
                raise FileNotFoundError(f"{self._base} does not exist")
            complete = self._complete(pathlib.Path(folder))
            if complete and resumes is False:
                remedy = "give another folder, or add --resume latest to continue it"
                raise InvalidInput(f"--output: {output}: {self.url} holds a run of this name; {remedy}")
            self.complete = set(complete)
            self._bring(complete, pathlib.Path(folder), output)
        return bool(complete)

    def _complete(self, folder: pathlib.Path) -> dict[str, dict[str, Any]]:
        """Download the metadata of all complete checkpoints into a folder; return it, the latest first."""
        for name in self.names():
            (folder / name).mkdir()
            try:
                self._get(self.at("checkpoints", name, files.METADATA), folder / name, MOST_METADATA)
            except FileNotFoundError:  # of a run that was killed
                self.remove(name)
                continue
            try:
                described = files.read_metadata(folder / name).get("files")
                _check_names(described, folder / name)
            except (OSError, ValueError, RecursionError) as error:
                file = f"{self.url}/checkpoints/{name}/{files.METADATA}"
                _tell(f"{file}: cannot be read ({one_line(error)}); the run ignores this checkpoint")
                shutil.rmtree(folder / name)
        return files.known(folder)

    def _bring(self, complete: dict[str, dict[str, Any]], folder: pathlib.Path, output: pathlib.Path) -> None:
        """Download the checkpoints that the run's folder lacks; with a newer checkpoint, also the metrics."""
        checkpoints = output / "checkpoints"
        here = files.known(checkpoints)
        for number, (name, metadata) in enumerate(complete.items()):
            if name in here:
                continue
            partial = checkpoints / f".partial-{name}"
            self._download(name, metadata["files"], folder / name / files.METADATA, partial)
            damage = files.damage(partial)
            if damage and number:  # `LocalCheckpoints.find` reports damage of the latest checkpoint
                _tell(f"{self.url}/checkpoints/{name}/{damage}; the run ignores this checkpoint")
                shutil.rmtree(partial)
                continue
            os.rename(partial, checkpoints / name)
            sync(checkpoints)
            print(f"storage  {self.url}: step {metadata['steps_completed']:,} downloaded", flush=True)
        latest = next(iter(files.known(checkpoints)), None)
        if latest and latest not in here:
            with contextlib.suppress(FileNotFoundError):
                self._get(self.at(metrics_log.FILE), output, MOST_METRICS)

    def _download(
        self, name: str, described: dict[str, Any], metadata: pathlib.Path, partial: pathlib.Path
    ) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        needed = sum(size for size, _ in described.values())
        free = shutil.disk_usage(partial).free
        if needed > free:
            what = f"the checkpoint has {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free"
            raise InvalidInput(f"--output: {partial.parent.parent}: {what}; free some disk space")
        for file, (size, _) in described.items():
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # `files.damage` reports it
                self._get(self.at("checkpoints", name, file), (partial / file).parent, size)
        shutil.copyfile(metadata, partial / files.METADATA)

    def _get(self, path: str, folder: pathlib.Path, most: int) -> None:
        """Download a file of at most ``most`` bytes into a folder."""
        target = folder / path.rpartition("/")[2]
        with self._files.open(path, "rb", block_size=_BLOCK) as there, open(target, "wb") as here:
            for block in _blocks(there, most):
                here.write(block)


def stored_run(section: Mapping[str, Any], output: pathlib.Path) -> StoredRun | None:
    """Return the folder of a run in ``checkpoint_storage``; None if the section names no storage.

    Args:
        section: ``checkpoint_storage`` of the experiment.
        output: the local folder of the run. The stored folder has its path below the working directory; for a
            folder elsewhere, only its name.

    Raises:
        InvalidInput: with a line for each wrong field.
    """
    storage, here = storage_of(section), pathlib.Path.cwd()
    if storage is None:
        return None
    is_below = output != here and output.is_relative_to(here)
    name = output.relative_to(here) if is_below else pathlib.Path(output.name)
    return StoredRun(storage, name.as_posix())


def _blocks(file: Any, most: int) -> Iterator[bytes]:
    while most >= 0 and (block := file.read(min(_BLOCK, most + 1))):
        most -= len(block)
        if most < 0:
            raise OSError("has more bytes than expected")
        yield block


def _check_names(described: Any, folder: pathlib.Path) -> None:
    """Raise ``ValueError`` unless a checkpoint lists files in its folder, each with a valid size."""
    names: Iterable[str] = described or ()
    for name in names:
        inside = (folder / name).resolve().is_relative_to(folder.resolve())
        parts = name.split("/")
        if not inside or name == files.METADATA or {"", ".", ".."} & {*parts} or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
        if not 0 <= described[name][0] < 2**50:
            raise ValueError(f"{name!r} has {described[name][0]} bytes")
    if not described:
        raise ValueError("it describes no files")


def is_uuid(name: str) -> bool:
    """Return whether a text is a UUID in canonical form, as the names of checkpoints are."""
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


def _tell(line: str) -> None:
    print(f"{SECTION}: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _refused(url: str) -> Iterator[None]:
    """Turn every error of the store into ``InvalidInput``; the libraries raise different exceptions."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        reason = redaction.text(one_line(error))
        remedy = f"correct the fields or the credentials, check that the server answers, or {OFF}"
        raise InvalidInput(f"{SECTION}: {url}: cannot be read ({reason}); {remedy}") from error

"""The folder of a run: its name and its lock."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import filelock
from determined import core

from deepspeed_trial.checkpoints.stored_run import StoredRun
from deepspeed_trial.errors import InvalidInput, one_line
from deepspeed_trial.input_files import refused
from deepspeed_trial.local import metrics_log

FILES = ("run.json", metrics_log.FILE, "profile.txt", "summary.json", "tracked.json")
FOLDERS = ("checkpoints",)
LOCK = ".lock"  # of the process that writes the folder
T = TypeVar("T")


def default_output(name: str) -> pathlib.Path:
    """Return a new folder for a run: ``runs/<name>-<time>``; ``name`` may be the path of a file."""
    first = pathlib.Path(f"runs/{pathlib.Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    # Path.exists fails for a name that is too long
    return next(folder for folder in itertools.chain([first], others) if not os.path.exists(folder))


def shown(path: pathlib.Path) -> str:
    """Return a path for display: relative to the working directory if it is inside."""
    path = path.resolve()
    return str(path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path)


def why_unusable(output: pathlib.Path, resumes: bool, writes: Sequence[str] = ()) -> str | None:
    """Return the reason why a run cannot use a folder; None if it can.

    Args:
        output: the folder.
        resumes: whether the run continues the run in the folder.
        writes: more files that the run writes.
    """
    for name in (*FILES, *writes, *FOLDERS):
        path, is_file = output / name, name not in FOLDERS
        if os.path.lexists(path) and not (path.is_file() if is_file else path.is_dir()):
            what = "not a file" if is_file else "not a folder"
            return f"--output: {path}: is {what}; move it, or give another folder"
        if path.exists() and not os.access(path, os.W_OK if is_file else os.R_OK | os.W_OK | os.X_OK):
            return f"--output: {path}: is not writable; change its permissions, or give another folder"
    if not resumes and ((output / "summary.json").exists() or has_checkpoints(output)):
        remedy = "give another folder, or add --resume latest to continue it"
        return f"--output: {output}: holds a run; {remedy}"
    return None


def has_checkpoints(output: pathlib.Path) -> bool:
    """Return whether the folder of a run has a complete checkpoint."""
    return any(output.glob("checkpoints/[!.]*/"))


@contextlib.contextmanager
def locked_folder(output: pathlib.Path, writer: str) -> Iterator[None]:
    """Create a folder, and lock it during the block; at the end, remove it if it is new and still empty.

    Args:
        output: the folder.
        writer: the word for the writer in an error line, e.g. ``run``.

    Raises:
        InvalidInput: if the folder cannot be created, or another process has locked it.
    """
    lock = filelock.FileLock(output / LOCK)
    if str(output).encode(errors="replace") != os.fsencode(output):
        raise InvalidInput(f"--output: {str(output)!r}: is not UTF-8; give another folder")
    is_new = not os.path.lexists(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        remedy = "wait for its end or give another folder"
        raise InvalidInput(f"--output: {output}: another {writer} is writing there; {remedy}") from None
    except OSError as error:
        raise InvalidInput(
            f"--output: {output}: cannot be made ({one_line(error)}); give another folder"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_new and os.listdir(output) == [LOCK]:
                shutil.rmtree(output)
        lock.release()


@contextlib.contextmanager
def own_folder(
    output: pathlib.Path,
    distributed: core.DistributedContext,
    resumes: bool | None,
    writes: Sequence[str] = (),
    stored: StoredRun | None = None,
) -> Iterator[bool]:
    """Create a run's folder, and let the chief lock it during the block.

    Yields whether this run continues a run in the folder.

    Args:
        output: the folder.
        distributed: the ranks.
        resumes: as in ``why_unusable``; None to continue if the folder has a checkpoint.
        writes: as in ``why_unusable``.
        stored: the run's folder in ``checkpoint_storage``; its checkpoints are downloaded into the local
            folder.

    Raises:
        InvalidInput: on every rank, if the folder cannot be used.
    """
    with contextlib.ExitStack() as lock:

        def take() -> bool:
            lock.enter_context(locked_folder(output, "run"))
            with refused(f"--output: {output}"):
                continues = has_checkpoints(output) if resumes is None else resumes
                reason = why_unusable(output, continues, writes)
            if reason:
                raise InvalidInput(reason)
            if stored:
                continues = stored.prepare(output, resumes) or continues
            return continues

        yield on_chief(take, distributed)


def on_chief(work: Callable[[], T], distributed: core.DistributedContext) -> T:
    """Call a function on rank 0; return its result, or raise its ``InvalidInput``, on every rank."""
    done: tuple[T | None, list[str]] = None, []
    if distributed.rank == 0:
        try:
            done = work(), []
        except InvalidInput as error:
            done = None, error.errors
    result, errors = distributed.broadcast(done)
    if errors:
        raise InvalidInput(errors)
    return result

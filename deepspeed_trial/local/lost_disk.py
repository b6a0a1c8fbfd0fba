"""Errors of a run whose disk is full or no longer accessible."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator

from deepspeed_trial.errors import DISK_FULL, TrainingStopped, one_line
from deepspeed_trial.local.folder import has_checkpoints, shown

# Errors of a shared folder whose server is gone, or of a disk that is read-only after an error
GONE = (errno.EIO, errno.ENOTCONN, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)

RESUME = "--resume latest continues"


@contextlib.contextmanager
def explain_lost_disk(output: pathlib.Path) -> Iterator[None]:
    """Turn an error that the ``with`` block raises on a full or lost disk into one line with the remedy.

    Args:
        output: folder of the run.

    Raises:
        TrainingStopped: if the disk is full, or the folder is no longer writable.
    """
    with _writers_errors_once():
        try:
            yield
        except (OSError, RuntimeError) as error:
            is_full = is_full_disk(error)
            if isinstance(error, TrainingStopped) or not (is_full or is_gone(error, output)):
                raise
            remedy = how_to_go_on(output) if is_full else f"bring the folder back, then {RESUME}"
            raise TrainingStopped(f"{shown(output)}: {one_line(error)}; {remedy}") from error


def is_gone(error: BaseException, output: pathlib.Path) -> bool:
    """Return whether an error means that a file in the folder is no longer accessible."""
    if isinstance(error, shutil.Error):  # copytree's error has only the text
        return os.strerror(errno.ENOENT) in str(error)
    if not isinstance(error, OSError):
        return False
    return error.errno in GONE or (
        error.errno == errno.ENOENT and os.path.realpath(str(error.filename)).startswith(str(output))
    )


def how_to_go_on(output: pathlib.Path) -> str:
    """Return the remedy for a full disk."""
    return f"make room, then {RESUME if has_checkpoints(output) else 'start again'}"


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error means that a disk is full."""
    if isinstance(error, shutil.Error):  # copytree's error has only the text
        return any(os.strerror(number) in str(error) for number in DISK_FULL)
    if isinstance(error, OSError):
        return error.errno in DISK_FULL
    return "inline_container.cc" in str(error)  # torch.save cannot write


@contextlib.contextmanager
def _writers_errors_once() -> Iterator[None]:
    """Keep TensorBoard's writer thread from printing an error that the writer's next call raises again."""
    hook = threading.excepthook

    def show(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            hook(arguments)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = hook

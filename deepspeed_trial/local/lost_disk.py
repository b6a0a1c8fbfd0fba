"""What is said where the disk of a run's folder is full, or gone."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator

from deepspeed_trial.errors import DISK_FULL, TrainingStopped, one_line
from deepspeed_trial.local.folder import shown

# Of a shared folder whose server is gone, or that is read-only since an error
GONE = (errno.EIO, errno.ENOTCONN, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)


@contextlib.contextmanager
def explain_lost_disk(output: pathlib.Path) -> Iterator[None]:
    """Ends what runs inside, where there is no room for its files, or no folder, with how to go on.

    Args:
        output: the run's folder.

    Raises:
        TrainingStopped: if the disk is full, or the folder cannot be written to any more.
    """
    with _writers_errors_once():
        try:
            yield
        except (OSError, RuntimeError) as error:
            is_full = is_full_disk(error)
            if isinstance(error, TrainingStopped) or not (is_full or is_gone(error, output)):
                raise
            mend = how_to_go_on(output) if is_full else "bring the folder back, then --resume latest goes on"
            raise TrainingStopped(f"{shown(output)}: {one_line(error)}; {mend}") from error


def is_gone(error: BaseException, output: pathlib.Path) -> bool:
    """Whether a file of the folder cannot be written or read, though it could."""
    if isinstance(error, shutil.Error):  # of a folder's copy, with the text alone
        return os.strerror(errno.ENOENT) in str(error)
    if not isinstance(error, OSError):
        return False
    return error.errno in GONE or (
        error.errno == errno.ENOENT and os.path.realpath(str(error.filename)).startswith(str(output))
    )


def how_to_go_on(output: pathlib.Path) -> str:
    """What to do once a run's disk was full."""
    has_checkpoints = any(output.glob("checkpoints/[!.]*/"))
    return f"make room, then {'--resume latest goes on' if has_checkpoints else 'start again'}"


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that a disk is full."""
    if isinstance(error, shutil.Error):  # of a folder's copy, with the text alone
        return any(os.strerror(number) in str(error) for number in DISK_FULL)
    if isinstance(error, OSError):
        return error.errno in DISK_FULL
    return "inline_container.cc" in str(error)  # where torch.save cannot write


@contextlib.contextmanager
def _writers_errors_once() -> Iterator[None]:
    """Keeps TensorBoard's writing thread from printing what its next caller is going to raise."""
    hook = threading.excepthook

    def show(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            hook(arguments)

    threading.excepthook = show
    try:
        yield
    finally:
        threading.excepthook = hook

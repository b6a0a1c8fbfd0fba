"""What is said where a disk is full."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator

from harness.errors import DISK_FULL, TrainingStopped, one_line
from harness.local.folder import shown


@contextlib.contextmanager
def explain_full_disk(output: pathlib.Path) -> Iterator[None]:
    """Ends what runs inside, where there is no room for its files, with how to go on.

    Args:
        output: the run's folder.

    Raises:
        TrainingStopped: if the disk is full.
    """
    with _writers_errors_once():
        try:
            yield
        except (OSError, RuntimeError) as error:
            if isinstance(error, TrainingStopped) or not is_full_disk(error):
                raise
            raise TrainingStopped(f"{shown(output)}: {one_line(error)}; {how_to_go_on(output)}") from error


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

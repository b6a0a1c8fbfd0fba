"""Detects the end of the launchers of this process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator

import psutil

from deepspeed_trial.machine import is_alive


def launchers() -> list[int]:
    """Return the ids of the ``torchrun`` or ``deepspeed`` processes that started this process."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return [parent.pid]
        if "deepspeed.launcher.launch" in parent.cmdline():  # on one host, `deepspeed` starts it
            above = parent.parent()
            is_runner = above and any("deepspeed" in pathlib.Path(word).name for word in above.cmdline()[:3])
            return [parent.pid, above.pid] if above and is_runner else [parent.pid]
    return []


@contextlib.contextmanager
def at_the_end_of(pids: Iterable[int], call: Callable[[], None]) -> Iterator[None]:
    """Check other processes once a second during the block; at the end of each, a thread calls ``call``."""
    done, left = threading.Event(), {_find(pid) for pid in pids}

    def watch() -> None:
        while not done.wait(1):
            for process in [process for process in left if not is_alive(process)]:
                left.remove(process)
                call()

    if left:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _find(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None

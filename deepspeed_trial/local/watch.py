"""The processes that started this one, and what is to be done when one of them ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil

from deepspeed_trial.machine import is_alive


def launchers() -> list[int]:
    """The ids of the processes of ``torchrun`` or ``deepspeed`` that started this one; none without them."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return [parent.pid]
        if "deepspeed.launcher.launch" in parent.cmdline():  # which on one host another has started
            above = parent.parent()
            is_runner = above and any("deepspeed" in pathlib.Path(each).name for each in above.cmdline()[:3])
            return [parent.pid, above.pid] if above and is_runner else [parent.pid]
    return []


@contextlib.contextmanager
def at_the_end_of(processes: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Looks once a second, while the block runs, whether other processes still do.

    Args:
        processes: what to call at the end of each, by its id, if the block still runs.
    """
    done, left = threading.Event(), {_find(pid): call for pid, call in processes.items()}

    def watch() -> None:
        while not done.wait(1):
            for process in [each for each in left if not is_alive(each)]:
                left.pop(process)()

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

"""Other processes of this host, and what is to be done when one of them ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil
from determined import core

from harness.errors import TrainingStopped

GO_ON = "--resume latest goes on from the last checkpoint"
DELAY = 3  # seconds that torch's collectives have to say themselves that a rank is gone


def peers_on_this_host(distributed: core.DistributedContext) -> dict[int, int]:
    """The ranks of the other processes on this host, by process id; every rank has to call it."""
    host = socket.gethostname()
    everyone = distributed.allgather((distributed.rank, host, os.getpid()))
    return {pid: rank for rank, where, pid in everyone if where == host and pid != os.getpid()}


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
def explain_lost_rank() -> Iterator[None]:
    """Ends what runs inside in one line where gloo says that another rank is gone, which has said why.

    Raises:
        TrainingStopped: if it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingStopped(f"another rank is gone; {GO_ON}") from error


def is_lost_rank(error: Exception) -> bool:
    """Whether an error is gloo's that it has lost the connection to another rank."""
    return "gloo" in str(error) and "onnect" in str(error) and not isinstance(error, TrainingStopped)


@contextlib.contextmanager
def at_the_end_of(processes: Mapping[int, Callable[[], None]], delay: float = 0.0) -> Iterator[None]:
    """Looks once a second, while the block runs, whether other processes still do.

    Args:
        processes: what to call at the end of each, by its id, if the block still runs.
        delay: seconds to wait before that.
    """
    done, left = threading.Event(), {_find(pid): call for pid, call in processes.items()}

    def watch() -> None:
        while not done.wait(1):
            for process in [each for each in left if not is_alive(each)]:
                if not done.wait(delay):
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


def is_alive(process: psutil.Process | None) -> bool:
    """Whether a process runs, and is no zombie, nor another that has got its id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

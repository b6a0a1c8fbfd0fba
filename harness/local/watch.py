"""Other processes of this host, and what is to be done when one of them ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil
from determined import core

DELAY = 3  # seconds that torch's collectives have to say themselves that a rank is gone


def peers_on_this_host(distributed: core.DistributedContext) -> dict[int, int]:
    """The ranks of the other processes on this host, by process id; every rank has to call it."""
    host = socket.gethostname()
    everyone = distributed.allgather((distributed.rank, host, os.getpid()))
    return {pid: rank for rank, where, pid in everyone if where == host and pid != os.getpid()}


@contextlib.contextmanager
def at_the_end_of(processes: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    """Looks once a second, while the block runs, whether other processes still do.

    Args:
        processes: what to call some seconds after the end of each, by its id, if the block still runs.
    """
    done, left = threading.Event(), dict(processes)

    def watch() -> None:
        while not done.wait(1):
            for pid in [pid for pid in left if not is_alive(pid)]:
                if not done.wait(DELAY):
                    left.pop(pid)()

    if left:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

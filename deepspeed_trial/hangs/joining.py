"""Ranks that wait for each other before there is anything by which they could say where they are."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

REPORTED_AFTER = 20.0  # seconds, or a third of what ends the run


def reported_after(hang_after: float) -> float:
    """Seconds without a move after which it is said, where a run ends after ``hang_after``."""
    return min(REPORTED_AFTER, hang_after / 3)


@contextlib.contextmanager
def joining(hang_after: float) -> Iterator[None]:
    """Says for whom this rank waits while it joins the others, and ends it where they do not come.

    Args:
        hang_after: seconds after which it ends.
    """
    done = threading.Event()
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    me = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
    whom = f"the other {int(size) - 1}" if rank == "0" else "rank 0"
    mend = (
        "all ranks have to be started, with the same MASTER_ADDR and MASTER_PORT, which no firewall may close"
    )

    def watch() -> None:
        first = reported_after(hang_after)
        if done.wait(first):
            return
        print(f"{me} waits for {whom} at {address} for {first:.0f} s: {mend}", file=sys.stderr, flush=True)
        if not done.wait(hang_after - first):
            print(
                f"{me} has waited for {whom} for {hang_after:g} s; so this ends", file=sys.stderr, flush=True
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="deepspeed_trial.joining").start()
    try:
        yield
    finally:
        done.set()

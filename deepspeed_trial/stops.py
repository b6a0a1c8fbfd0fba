"""Early stops of a training: by a signal, by a cluster's master, or by the end of the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from determined import core

from deepspeed_trial.local.watch import at_the_end_of, launchers
from deepspeed_trial.meeting import meet_in_chief

STOPPING = b"\nstopping: this step, then a checkpoint; a second signal ends the run at once\n"
LOOK = 0.1  # seconds between two looks for another rank's request
AHEAD = 2  # steps from rank 0's decision to the last step; at least 1
STOP_WITH_PID = "STOP_WITH_PID"  # environment variable: the training stops when this process ends
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Vote:
    """Agreement of all ranks on the last step, after one of them has requested a stop.

    Ranks agree through a store in rank 0's process. A thread of each rank polls the store for a request, so a
    step without a request costs nothing. After a request, each rank acknowledges it in the store, and checks
    the store after every step. When all ranks have acknowledged, rank 0 writes the last step. No rank waits
    for another outside of the collectives of a step.
    """

    def __init__(self, distributed: core.DistributedContext) -> None:
        self.rank, self.size = distributed.rank, distributed.size
        self._distributed = distributed
        self._is_asked, self._is_closed = threading.Event(), threading.Event()
        self._has_told = False
        self._last: int | None = None
        if self.size > 1:
            self._store = meet_in_chief("vote", self.rank == 0)
            threading.Thread(target=self._look, name="vote", daemon=True).start()

    def ask(self) -> None:
        """Ask all ranks to stop."""
        if self.size > 1 and not self._is_asked.is_set():
            self._store.set("asked", "")
        self._is_asked.set()

    def is_last(self, step: int, meets: bool) -> bool:
        """Return whether a step was the last one. Every rank calls it after each step.

        Args:
            step: optimizer steps done.
            meets: whether the ranks wait for each other after this step anyway, e.g. for a report.
        """
        if self.size == 1:
            return self._is_asked.is_set()
        if meets:
            return any(self._distributed.allgather(self._is_asked.is_set()))
        if not self._is_asked.is_set():
            return False
        get_accelerator().synchronize()  # a GPU's host may be many steps ahead of the other ranks
        if not self._has_told:
            self._has_told = True
            self._store.set(f"knows/{self.rank}", "")
        if self._last is None:
            if self.rank == 0 and self._store.check([f"knows/{rank}" for rank in range(self.size)]):
                self._store.set("last", f"{step + AHEAD}")
            if self._store.check(["last"]):
                self._last = int(self._store.get("last"))
        return self._last is not None and step >= self._last

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()

    def _look(self) -> None:
        with contextlib.suppress(torch.distributed.DistError):  # rank 0 has ended
            while not (self._is_closed.wait(LOOK) or self._is_asked.is_set()):
                if self._store.check(["asked"]):
                    self._is_asked.set()


class Signals:
    """Signals of a local run; inside ``gracefully`` they request a stop, otherwise they end the process.

    The signals are SIGINT, SIGTERM and SIGUSR1, which SLURM sends before a job's time limit. A second SIGINT
    or SIGTERM ends the process at once. It has no effect within a second, because launchers repeat signals.
    The end of the launcher, or of the process ``STOP_WITH_PID``, has the effect of a SIGTERM.

    Args:
        is_chief: whether this rank prints that it stops.
    """

    def __init__(self, is_chief: bool) -> None:
        self.is_chief = is_chief
        self.requested = False
        self._urged_at: float | None = None  # by SIGINT or SIGTERM

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Turn signals into ``KeyboardInterrupt`` and watch the launcher, inside the block."""
        programs = launchers()
        if program := int(os.environ.get(STOP_WITH_PID, 0)):
            programs.append(program)
        _handle(_interrupt)
        try:
            with at_the_end_of(programs, self._stop_with_launcher):
                yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)

    @contextlib.contextmanager
    def gracefully(self) -> Iterator[None]:
        """Let a signal request a stop inside the block."""
        _handle(self._request)
        try:
            yield
        finally:
            _handle(_interrupt)

    def _stop_with_launcher(self) -> None:
        if not self.requested:  # a second signal would end the process at once
            if self.is_chief:
                print("the launcher of this process has ended; stopping", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)

    def _request(self, number: int, frame: object) -> None:
        if not self.requested and self.is_chief:
            os.write(2, STOPPING)  # a handler may not print: it may have interrupted print
        self.requested = True
        if number == signal.SIGUSR1:
            return
        now = time.monotonic()
        self._urged_at = self._urged_at or now
        if now - self._urged_at > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _handle(handler: Callable[[int, Any], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

"""What a signal does to a run off a cluster: it ends with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from determined import core
from typing_extensions import override

from deepspeed_trial.local.watch import at_the_end_of, launchers

STOPPING = b"\nstopping: this step, then a checkpoint; a second signal ends the run at once\n"
ASKED_EVERY = 1.0  # seconds
STOP_WITH_PID = "STOP_WITH_PID"  # environment variable: the process at whose end the training stops, too


class LocalPreempt(core.DummyPreemptContext):
    """Stops the training as a cluster would: a signal lets it finish a step and save a checkpoint.

    SIGINT, SIGTERM, and SIGUSR1, by which SLURM tells that a job's time is nearly over.

    A second SIGINT or SIGTERM, a second or more after the first, ends the process at once; launchers pass one
    on several times. The end of the launcher, or of the process that ``STOP_WITH_PID`` names, works as a
    SIGTERM.

    Determined's loop asks ``should_preempt`` after every report, saves the checkpoint and ends;
    ``train.py`` gives exit code 130. Before and after training a signal ends the process without a
    checkpoint.

    All ranks have to stop after the same step. They agree at every report, by a message. Reports may be a
    minute apart, and a launcher kills sooner. On the CPUs of one host, ranks are at most a step apart:
    the rank that got the signal writes the last step into a file, and all ranks look for it after each step.
    Elsewhere all ranks ask each other about once a second.

    Args:
        distributed: the ranks.
        output: the run's folder.

    Attributes:
        requested: whether a signal to any rank stops the training, once all know.
    """

    def __init__(self, distributed: core.DistributedContext, output: pathlib.Path) -> None:
        super().__init__(distributed)
        self.requested = False
        self._stop_file = output / ".stop"
        self._signalled = False  # this rank
        self._urged_at: float | None = None  # by SIGINT or SIGTERM
        self._next_question, self._asked_at = 1, (0, time.monotonic())  # steps, and when
        self._has_told = False
        self._last_step: int | None = None
        self._watch = contextlib.ExitStack()
        # On several hosts they may not share a disk; on a GPU, a step's collectives do not wait for the host.
        one_host = distributed.local_size == distributed.size
        self._agrees_by_file = one_host and not torch.cuda.is_available()
        if distributed.rank == 0:
            self._stop_file.unlink(missing_ok=True)

    @override
    def start(self) -> LocalPreempt:
        super().start()
        self._handle(self._raise_interrupt)
        above = launchers()
        if program := int(os.environ.get(STOP_WITH_PID, 0)):
            above.append(program)
        self._watch.enter_context(at_the_end_of(dict.fromkeys(above, self._stop_with_launcher)))
        return self

    @contextlib.contextmanager
    def gracefully(self) -> Iterator[None]:
        """Lets a signal end the training with a checkpoint; before and after, it ends the process."""
        self._handle(self._request_stop)
        try:
            yield
        finally:
            self._handle(self._raise_interrupt)

    @override
    def close(self) -> None:
        self._watch.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if self._dist.rank == 0:
            self._stop_file.unlink(missing_ok=True)

    def is_due(self, step: int) -> bool:
        """Whether all ranks are to stop after this step."""
        if self._dist.size == 1:
            return self._signalled
        if not self._agrees_by_file:
            return self._ask(step)
        if self._signalled and not self._has_told:
            self._tell(step + 1)  # which no other rank can have finished
        if self._last_step is None and self._stop_file.exists():
            number, is_whole, _ = self._stop_file.read_text().partition("\n")
            self._last_step = int(number) if is_whole else None
        return self._last_step is not None and step >= self._last_step

    @override
    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.requested = any(self._dist.allgather(self._signalled))
        return self.requested

    def _ask(self, step: int) -> bool:
        """Whether any rank got a signal; the chief's clock says after how many steps to ask again."""
        if step < self._next_question:
            return False
        steps, seconds = step - self._asked_at[0], time.monotonic() - self._asked_at[1]
        self._asked_at = step, time.monotonic()
        pause = max(1, min(2 * steps, round(steps * ASKED_EVERY / max(seconds, 1e-3))))
        told = self._dist.allgather((self._signalled, pause))
        self._next_question = step + told[0][1]
        return any(signalled for signalled, _ in told)

    def _tell(self, step: int) -> None:
        """Write the last step, and an end of line when it is whole; the first rank to write decides."""
        self._has_told = True
        with contextlib.suppress(FileExistsError), self._stop_file.open("x") as file:
            print(step, file=file)

    def _stop_with_launcher(self) -> None:
        if not self._signalled:  # a second signal would end it at once
            if self._dist.rank == 0:
                print("the program that started this one is gone; so this ends", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, handler: Callable[[int, Any], None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handler)

    def _raise_interrupt(self, number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def _request_stop(self, number: int, frame: object) -> None:
        if not self._signalled and self._dist.rank == 0:
            os.write(2, STOPPING)  # a handler may not print: it may have interrupted print
        self._signalled = True
        if number == signal.SIGUSR1:
            return
        now = time.monotonic()
        self._urged_at = self._urged_at or now
        if now - self._urged_at > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

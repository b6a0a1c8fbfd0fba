"""Whether this rank itself moves, computes, or reads and writes; and where it stands still."""

from __future__ import annotations

import contextlib
import os
import time

import psutil
import torch

from deepspeed_trial import machine
from deepspeed_trial.hangs import stacks
from deepspeed_trial.hangs.place import Place

BUSY = 0.05  # share of a core that a thread at work uses at least
READS = 2**16  # bytes a second that a rank at work reads or writes at least


class Activity:
    """What a rank does, looked at once a second.

    Args:
        place: where it is.
        process: this one.
        shown_after: seconds for which it is idle before its stack is taken.

    Attributes:
        moved_at: when it last did anything (seconds, ``time.monotonic``).
        stack: the Python threads, and the collective in which the main one waits, once it is idle.
    """

    def __init__(self, place: Place, process: psutil.Process, shown_after: float) -> None:
        self._place, self._process, self._shown_after = place, process, shown_after
        self.moved_at, self.stack = time.monotonic(), ("", "")
        self._position, self._where = (0, 0), list[tuple[str, int | None]]()
        self._used = self._use()
        self._children_used: tuple[float, int] | None = None  # while this process itself does nothing

    def note(self, seconds: float) -> None:
        """Takes the time if this rank has moved, computed, read or written since; or its stack."""
        frames, position = stacks.frames_of_training(), (self._place.begun, self._place.moves)
        where = [(each.filename, each.lineno) for each in frames]
        computed, transferred = (now - then for now, then in zip(self._use(), self._used, strict=True))
        # A GPU is waited for by computing, at one line
        computes = computed > BUSY * seconds and (where != self._where or not _has_gpu())
        works = computes or transferred > READS * seconds or position != self._position
        if not works and not stacks.is_excused(frames):
            works = self._children_work(seconds)
        else:
            works, self._children_used = True, None
        if works:
            self.moved_at, self.stack = time.monotonic(), ("", "")
        elif time.monotonic() - self.moved_at > self._shown_after:
            self.stack = stacks.all_stacks(), stacks.collective(frames)
        self._where, self._position = where, position
        self._used = self._use()  # without what the stacks' source lines took

    def _use(self) -> tuple[float, int]:
        """Seconds that this process has computed, or had no core, and bytes that it has read and written."""
        seconds, transferred = _use_of(self._process)
        return seconds + machine.waited_for_cores(str(os.getpid())), transferred

    def _children_work(self, seconds: float) -> bool:
        """Whether processes that this one has started do, such as those that decode images, or compile."""
        uses = [_use_of(each) for each in self._process.children(recursive=True)]
        before, self._children_used = self._children_used, (sum(u[0] for u in uses), sum(u[1] for u in uses))
        if before is None:
            return False
        computed, transferred = (now - then for now, then in zip(self._children_used, before, strict=True))
        return computed > BUSY * seconds or transferred > READS * seconds


def _has_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def _use_of(process: psutil.Process) -> tuple[float, int]:
    """Seconds that a process has computed, and bytes that it has read and written; none if it has ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        files = process.io_counters() if hasattr(process, "io_counters") else None  # not on macOS
        return times.user + times.system, files.read_chars + files.write_chars if files else 0
    return 0.0, 0

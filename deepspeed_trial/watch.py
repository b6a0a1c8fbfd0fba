"""Watch the ranks: name the rank that hangs or is lost, and end the run.

Determined's collectives have no time limit. Torch's collectives fail after minutes, and their error names no
rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psutil
import torch
from determined import core

from deepspeed_trial.errors import LostRank, printable
from deepspeed_trial.heartbeat import (
    DONE,
    FAILED,
    GONE,
    MISSING,
    SILENT,
    SILENT_AFTER,
    TICK,
    Activity,
    Beat,
    Heartbeats,
)
from deepspeed_trial.place import CHECKPOINT, END, REPORT, TEST, TRAINING, VALIDATION, Place

REPORTED_AFTER = 20.0  # seconds without progress until the report, at most a third of ``hang_after``
GRACE = 4.0  # seconds from the end of a reporting rank to the end of its host's other ranks
TOGETHER = (TRAINING, REPORT, VALIDATION, CHECKPOINT, TEST)  # phases that need every rank
RESUME = "--resume latest continues from the last checkpoint"
JOIN = "start all ranks, with the same MASTER_ADDR and MASTER_PORT, and let no firewall close that port"
CAUSES = "docs/hangs.md lists causes"
NCCL = ", and shows how to make torch's flight recorder write the last collectives of every rank"


def reported_after(hang_after: float) -> float:
    """Return the seconds without progress until the report; the run ends after ``hang_after`` seconds."""
    return min(REPORTED_AFTER, hang_after / 3)


@contextlib.contextmanager
def joining(hang_after: float) -> Iterator[None]:
    """Name the ranks that have not joined inside the block; end the process after ``hang_after`` seconds."""
    rank, done, first = os.environ.get("RANK", "0"), threading.Event(), reported_after(hang_after)
    me = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
    count = int(os.environ.get("WORLD_SIZE", 1)) - 1
    others = "rank 0" if rank != "0" else f"{count} other rank{'s' if count > 1 else ''}"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"

    def limit() -> None:
        if not done.wait(first):
            _say(f"{me} has waited {first:.0f} s for {others} at {address}: {JOIN}")
        if not done.wait(hang_after - first):
            _say(f"{me} has waited {hang_after:g} s for {others}, so the run ends")
            os._exit(1)

    threading.Thread(target=limit, daemon=True, name="deepspeed_trial.joining").start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def watching(distributed: core.DistributedContext, place: Place, hang_after: float) -> Iterator[None]:
    """Watch the ranks inside the block.

    Args:
        distributed: the ranks.
        place: this rank's place.
        hang_after: the run ends after this many seconds without progress of any rank.

    Raises:
        LostRank: if a collective has failed because another rank is gone; the message names that rank.
    """
    watch = _Watch(distributed, place, hang_after)
    try:
        yield
    except BaseException as error:
        watch.is_leaving = True
        if isinstance(error, RuntimeError) and _has_lost_rank(error):
            raise LostRank(f"{watch.find_lost()}; {RESUME}") from error
        if not isinstance(error, SystemExit) or error.code:
            watch.mine.ended = FAILED
        raise
    finally:
        watch.close()


class _Watch:
    """Look at the ranks once a second, in a thread."""

    def __init__(self, distributed: core.DistributedContext, place: Place, hang_after: float) -> None:
        self.mine, self._size, self._place = Beat(distributed.rank, place), distributed.size, place
        self._heartbeats, self._activity = Heartbeats(distributed, self.mine), Activity(self.mine)
        self._hang_after, self._done = hang_after, threading.Event()
        self._stuck, self._missed, self._reports = 0.0, 0.0, False
        self.is_leaving = False  # an error ends the training
        threading.Thread(target=self._run, daemon=True, name="deepspeed_trial.watch").start()

    def close(self) -> None:
        """Tell the others that this rank has ended."""
        self.mine.ended = self.mine.ended or DONE
        self._done.set()
        self._heartbeats.close()

    def find_lost(self) -> str:
        """Wait until it is known which rank has made a collective fail, and return a line about that rank."""
        if self._stuck:
            return "no rank has moved, and another rank has ended the run"
        deadline = time.monotonic() + SILENT_AFTER + 2 * TICK
        ranks = list(self._heartbeats.ranks)
        with contextlib.suppress(KeyboardInterrupt):  # a launcher ends all ranks after one fails
            while time.monotonic() < deadline and not any(beat.missing == GONE for beat in ranks):
                time.sleep(TICK / 4)
                ranks = list(self._heartbeats.ranks)
        is_found = any(beat.missing for beat in ranks)
        return self._first_line(ranks) if is_found else f"another rank is gone, in {self._place}"

    def _run(self) -> None:
        while not self._done.wait(TICK):
            with contextlib.suppress(Exception):  # e.g. about a process that has just ended
                self._activity.tick()
                self._heartbeats.tick()
                if not self.is_leaving:
                    ranks = list(self._heartbeats.ranks)
                    self._end_if_missed(ranks)
                    self._end_if_stuck(ranks)

    def _end_if_missed(self, ranks: list[Beat]) -> None:
        """End this process, which may wait in vain, some seconds after another rank has died or failed.

        Most collectives fail within those seconds, and ``watching`` raises the error.
        """
        missing = {beat.missing for beat in ranks}
        # In set-up all ranks may find the same errors
        is_missed = GONE in missing or (FAILED in missing and self._place.phase in TOGETHER)
        self._missed = self._missed + TICK if is_missed and self._place.phase != END else 0.0
        if self._missed > SILENT_AFTER:
            self._end(f"{self._first_line(ranks)}; {RESUME}")

    def _end_if_stuck(self, ranks: list[Beat]) -> None:
        """Report a hang, or its end; end the process at the limit."""
        before, still = self._stuck, min(beat.still for beat in ranks)
        is_stuck = still >= reported_after(self._hang_after) and len(ranks) == self._size
        self._stuck = still if is_stuck else 0.0
        if not is_stuck:
            if before and self._reports:
                _say(f"the ranks move again after {before:.0f} s: slow, but not stuck")
            return
        behind, moved = find_behind(ranks), f"no rank has moved for {still:.0f} s"
        if not before:
            able = [beat for beat in ranks if not beat.missing and beat.host == self.mine.host]
            self._reports = able[0] is self.mine
            if self._reports:
                limit = f"at {self._hang_after:g} s the run ends (hyperparameters.hang_after)"
                causes = CAUSES + (NCCL if torch.cuda.is_available() else "")
                ordered = sorted(ranks, key=lambda beat: beat not in behind)
                lines = [f"{moved}; {limit}; {causes}", *(self._line(beat, behind) for beat in ordered)]
                _say("\n  ".join(lines))
            if self._reports or self.mine in behind[:1]:
                _say(f"stack of rank {self.mine.rank}:\n{_stacks()}")
        if still >= self._hang_after + (0 if self._reports else GRACE):
            processes = self._heartbeats.processes.items()
            silent = [process for rank, process in processes if ranks[rank].missing == SILENT]
            line = f"{moved}: {self._first_line(ranks)}; the run ends; {RESUME}"
            self._end(line if self._reports else "", silent)

    def _first_line(self, ranks: list[Beat]) -> str:
        behind = find_behind(ranks)
        return self._line((behind or ranks)[0], behind)

    def _line(self, beat: Beat, behind: list[Beat]) -> str:
        """Describe a rank by its state and place."""
        state = beat.missing or ("is behind" if beat in behind and self._size > 1 else "waits")
        # This rank may have moved since a missing rank's last heartbeat
        place = max(beat.place, self._place, key=lambda place: place.step) if beat.missing else beat.place
        collective = f", in {beat.waits_in}" if beat.waits_in else ""
        name = f"rank {beat.rank} (host {beat.host}, process {beat.pid})"
        return f"{name} {state}, in {place} for {beat.still:.0f} s{collective}"

    def _end(self, line: str, others: Sequence[psutil.Process] = ()) -> NoReturn:
        """Log a line, and end this process, its children, and the given other processes."""
        _say(line)
        with contextlib.suppress(Exception):
            for process in [*others, *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        os._exit(1)


def find_behind(ranks: list[Beat]) -> list[Beat]:
    """Find the ranks that the others wait for; none if all are at the same place.

    Missing ranks come first, then the ranks with the least progress. Of ranks at the same place, the ranks
    outside of a collective are behind.
    """
    for reason in MISSING:
        if missing := [beat for beat in ranks if beat.missing == reason]:
            return missing
    is_training = {beat.place.phase for beat in ranks} == {TRAINING}  # elsewhere one rank may work alone
    places = [(beat.place.step, beat.place.begun, is_training * beat.place.moves) for beat in ranks]
    last = [beat for beat, place in zip(ranks, places, strict=True) if place < max(places)]
    free = [beat for beat in ranks if not beat.waits_in]
    return last or (free if len(free) < len(ranks) else [])


def _stacks() -> str:
    """Return the stacks of the main thread and of all busy threads, innermost call first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        *others, main = file.read().split("\n\n")
    waiting = re.compile(r"\n.*(threading|watch)\.py")  # innermost frame of a waiting thread, or of this one
    busy = [stack for stack in others if not waiting.search(stack.partition(" in ")[0])]
    return "\n\n".join([*busy, main])


def _has_lost_rank(error: RuntimeError) -> bool:
    """Return whether gloo or the store has lost another rank, or its wait for a rank has timed out."""
    is_gloo = "gloo" in str(error) and re.search("onnect|Timed out", str(error))
    return bool(is_gloo) or isinstance(error, torch.distributed.DistNetworkError)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print("\n".join(map(printable, text.splitlines())), file=sys.stderr, flush=True)

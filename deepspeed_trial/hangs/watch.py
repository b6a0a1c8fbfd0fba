"""Watches whether any rank moves: says which is behind when none does, and ends what has hung.

Determined's own collectives have no time limit, torch's one of minutes, and neither names the missing rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psutil
import torch
from determined import core

from deepspeed_trial.errors import LostRank, TrainingStopped
from deepspeed_trial.hangs import report
from deepspeed_trial.hangs.activity import Activity
from deepspeed_trial.hangs.exchange import TICK, Beat, Exchange
from deepspeed_trial.hangs.joining import reported_after
from deepspeed_trial.hangs.place import CHECKPOINT, END, REPORT, TEST, TRAINING, VALIDATION, Place
from deepspeed_trial.machine import is_alive

GO_ON = "--resume latest goes on from the last checkpoint"
SILENT = 3.0  # seconds without a beat after which a rank is not thought to answer
GRACE = 4.0  # seconds that the rank which says so may end before the others
STOPPED = 5.0  # seconds between two ticks: this process itself was stopped
TOGETHER = (TRAINING, REPORT, VALIDATION, CHECKPOINT, TEST)  # works that need every rank


class Watch:
    """Watches the ranks from a thread, from ``watching`` on.

    Args:
        distributed: the ranks.
        place: where this one is.
        hang_after: seconds without a move of any rank after which the run ends.
    """

    def __init__(self, distributed: core.DistributedContext, place: Place, hang_after: float) -> None:
        self.rank, self.size, self.place = distributed.rank, distributed.size, place
        self.hang_after, self.reported_after = hang_after, reported_after(hang_after)
        self._host, self._space, self._process = socket.gethostname(), _process_space(), psutil.Process()
        self._count = 0
        self._activity = Activity(place, self._process, self.reported_after / 2)
        self._has_ended, self._is_ending, self._lost = False, False, ""
        self.has_failed = False
        self._reported_at: float | None = None
        self._reports = False  # or another rank does
        self._siblings: dict[int, psutil.Process] = {}  # other ranks on this host
        self._gone_since: dict[int, float] = {}
        self._exchange: Exchange | None = None
        if self.size > 1 and torch.distributed.is_initialized():
            told = distributed.allgather(
                (f"deepspeed-trial-{uuid.uuid4()}", dataclasses.asdict(self._beat()))
            )
            beats = [Beat(**beat) for _, beat in told]
            self._exchange = Exchange(self.rank, told[0][0], beats, self._beat)
            for beat in beats:
                if beat.space == self._space and beat.rank != self.rank:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._siblings[beat.rank] = psutil.Process(beat.pid)
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="deepspeed_trial.watch").start()

    def close(self) -> None:
        """Tells the others that this rank has ended."""
        self._has_ended = True
        self._done.set()
        if self._exchange:
            self._exchange.close()

    def find_lost(self) -> str:
        """Which rank is gone, where a collective has just failed; waits for seconds until it is known."""
        self._is_ending = True
        if self._reported_at:
            return "no rank has moved, and another has ended the run"
        deadline = time.monotonic() + SILENT + 2 * TICK
        while not self._lost and time.monotonic() < deadline:
            self._lost = self._found_lost()
            self._pause(0.2)
        lost = self._lost = self._lost or f"another rank is gone, in {report.place_of(self._beat())}"
        self._pause(2 * TICK if self._exchange else 0)  # until the others have heard it
        return lost

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # a launcher ends all ranks at the end of the first
            time.sleep(seconds)

    # ------------------------------------------------------------------------------------------ this rank

    def _beat(self) -> Beat:
        place, stack, waits_in = self.place, *self._activity.stack
        self._count += 1
        return Beat(
            self.rank,
            self._host,
            self._space,
            os.getpid(),
            self._count,
            place.step,
            place.work,
            place.part,
            place.begun,
            place.moves,
            time.monotonic() - self._activity.moved_at,
            stack,
            waits_in,
            self._has_ended,
            self.has_failed,
            self._lost,
        )

    # ------------------------------------------------------------------------------------------ all ranks

    def _watch(self) -> None:
        ticked = time.monotonic()
        while not self._done.wait(TICK):
            before, ticked = ticked, time.monotonic()
            # Such as of a process that has just ended: the watch goes on
            with contextlib.suppress(Exception):
                if ticked - before > STOPPED:
                    self._activity.moved_at = ticked
                    if self._exchange:
                        self._exchange.restart_clocks()
                self._activity.note(ticked - before)
                if not self._is_ending and not self.place.is_leaving:
                    self._end_without_lost()
                    self._look()

    def _ranks(self) -> list[report.Rank]:
        """Every rank that was heard, this one included."""
        now, others = time.monotonic(), dict(self._exchange.heard) if self._exchange else {}
        ranks = {self.rank: report.Rank(self._beat(), 0.0, False)}
        for rank, (beat, heard_at) in others.items():
            unheard = now - heard_at if now - heard_at > SILENT else 0.0
            # Where the store does not answer, its host, which is rank 0's, is all that is known of
            is_silent = unheard > 0 and (self._store_answers() or rank == 0)
            ranks.setdefault(rank, report.Rank(beat, unheard, is_silent))
        return [ranks[rank] for rank in sorted(ranks)]

    def _store_answers(self) -> bool:
        return self._exchange is None or time.monotonic() - self._exchange.answered_at < SILENT

    def _look(self) -> None:
        ranks = self._ranks()
        if len(ranks) < self.size:
            return  # those that cannot be heard may be at work
        still = min(each.still for each in ranks)
        if still < self.reported_after:
            if self._reported_at and self._reports:
                seconds = time.monotonic() - self._reported_at + self.reported_after
                _say(f"the ranks move again after {seconds:.0f} s: slow, but not stuck")
            self._reported_at = None
            return
        if self._reported_at is None:
            self._reported_at, self._reports = time.monotonic(), self._is_first(ranks)
            if self._reports:
                _say(report.write(ranks, self.place.in_step, still, self.hang_after))
        if still >= self.hang_after + (0 if self._reports else GRACE):
            self._end(ranks, still)

    def _is_first(self, ranks: list[report.Rank]) -> bool:
        """Whether this rank is the first of those that can tell; one of each host, if they cannot agree."""
        if self._store_answers():
            return self.rank == min(
                each.beat.rank for each in ranks if not each.silent and not each.beat.has_ended
            )
        return self.rank == min({self.rank, *self._siblings} - {0}, default=0)

    def _end(self, ranks: list[report.Rank], still: float) -> None:
        """Ends this process, and on its host those that do not answer; the others end themselves."""
        if self._reports:
            behind = report.name_behind(ranks, self.place.in_step)
            _say(f"no rank has moved for {still:.0f} s: {behind}; so this ends; {GO_ON}")
        silent = [self._siblings.get(each.beat.rank) for each in ranks if each.silent]
        self._leave([each for each in silent if each])

    def _leave(self, others: Sequence[psutil.Process] = ()) -> NoReturn:
        """Ends this process, those that it has started, and others."""
        with contextlib.suppress(Exception):
            for each in [*others, *self._process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        os._exit(1)

    # --------------------------------------------------------------------------------------- lost ranks

    def _gone(self) -> list[int]:
        """Return the ranks that ended before their work was done.

        In set-up a rank that says that it has failed is none of them: all ranks may find the same errors.
        """
        beats = [beat for beat, _ in list(self._exchange.heard.values())] if self._exchange else []
        failed = [beat.rank for beat in beats if beat.has_failed and beat.rank != self.rank]
        ended = [beat.rank for beat in beats if beat.has_ended]
        dead = [rank for rank, process in self._siblings.items() if not is_alive(process)]
        gone = [rank for rank in dead if rank not in ended]
        if self.place.work in TOGETHER:
            gone = failed + gone
        return gone or self._gone_with_store(ended)

    def _gone_with_store(self, done: list[int]) -> list[int]:
        is_lost = self._exchange is not None and self._exchange.is_lost
        return [0] if is_lost and self.rank and 0 not in (*done, *self._siblings) else []

    def _end_without_lost(self) -> None:
        """Ends this process where another is gone, for a collective would wait for it.

        Torch's collectives have some seconds to say so first. torchrun's SIGTERM is taken as a request to
        stop after the step: without this, torchrun kills the rank after 30 s.
        """
        now = time.monotonic()
        for rank in self._gone() if self.place.work != END else []:
            if now - self._gone_since.setdefault(rank, now) > SILENT and not self._lost:
                self._lost = self._found_lost()
                _say(f"{self._lost}; {GO_ON}")
                self._leave()

    def _found_lost(self) -> str:
        heard = self._ranks()
        told = [each.beat.lost for each in heard if each.beat.lost]
        if told:
            return told[0]
        gone, mine = self._gone(), self._beat()
        lost = [
            each.beat
            for each in heard
            if each.beat.rank != self.rank and (each.beat.rank in gone or each.silent or each.beat.has_ended)
        ]
        return report.name_lost(lost, mine) if lost else ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)


def _process_space() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")  # on Linux
    spaces = [os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "net")] if boot.exists() else []
    return " ".join([boot.read_text().strip(), *spaces]) if spaces else socket.gethostname()


@contextlib.contextmanager
def watching(distributed: core.DistributedContext, place: Place, hang_after: float) -> Iterator[Watch]:
    """Watches the ranks while the block runs, and names the one that is lost where gloo says that one is.

    Raises:
        LostRank: if it is.
    """
    watch = Watch(distributed, place, hang_after)
    try:
        yield watch
    except BaseException as error:
        if isinstance(error, RuntimeError) and is_lost_rank(error):
            raise LostRank(f"{watch.find_lost()}; {GO_ON}") from error
        watch.has_failed = not isinstance(error, SystemExit) or bool(error.code)
        raise
    finally:
        watch.close()


def is_lost_rank(error: Exception) -> bool:
    """Whether an error says that gloo or the store has lost another rank, or waited for it in vain."""
    text = str(error)
    return isinstance(error, torch.distributed.DistNetworkError) or (
        "gloo" in text
        and ("onnect" in text or "Timed out" in text)
        and not isinstance(error, TrainingStopped)
    )

"""Heartbeats: once a second every rank writes its state to torch's store and reads the other states."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from determined import core

from deepspeed_trial.machine import is_alive
from deepspeed_trial.place import Place

TICK = 1.0  # seconds between two heartbeats
SILENT_AFTER = 3.0  # seconds without a heartbeat after which a rank counts as silent
WORK = 0.05  # processor seconds plus MiB read and written, per second; a process with less is idle
# Why other ranks wait for a rank in vain; an earlier reason may be the cause of a later one on another rank
MISSING = GONE, SILENT, FAILED, DONE = "is gone", "does not answer", "has failed", "has ended"
COLLECTIVES = {"distributed_c10d.py": "", "messages.py": "Determined's "}  # from file to prefix of the name
# Code that may wait without a hang: debuggers, and Determined's requests, repeated for up to half an hour
PATIENT = ("pdb.py", "bdb.py", "pydevd.py", "debugpy", "determined/common/api/_session.py")


@dataclass
class Beat:
    """Heartbeat of a rank."""

    rank: int
    place: Place
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    created: float = field(default_factory=lambda: psutil.Process().create_time())  # Unix time
    count: int = 0  # number of this heartbeat
    idle: float = 0.0  # seconds since the rank last moved or worked
    waits_in: str = ""  # collective that the rank waits in
    ended: str = ""  # FAILED or DONE once the rank has left the training
    unheard: float = 0.0  # seconds since this heartbeat came; the reader counts them
    missing: str = ""  # one of MISSING, set by the reader

    @property
    def still(self) -> float:
        """Seconds since the rank's last progress."""
        return self.idle + (self.unheard if self.unheard > SILENT_AFTER else 0.0)


def _beat(place: dict[str, Any], **fields: Any) -> Beat:
    return Beat(place=Place(**place), **fields)


def parsed(content: bytes, rank: int) -> Beat:
    """Parse a rank's heartbeat.

    Raises:
        ValueError: if the text is not a heartbeat of that rank; any program on the network can write to the
            store.
        TypeError: if a value has the wrong type.
        RecursionError: if the text is nested too deeply.
    """
    beat = _beat(**json.loads(content))
    for each, kinds in (beat, _kinds(Beat)), (beat.place, _kinds(Place)):
        for name, kind in kinds.items():
            value = getattr(each, name)
            is_kind = type(value) in ((int, float) if kind is float else (kind,))
            if not is_kind or (kind is not str and not abs(value) <= sys.maxsize):  # refuses NaN, too
                raise ValueError(f"{name}: {value!r}: must be a {kind.__name__}")
    if beat.rank != rank or beat.ended not in ("", FAILED, DONE):
        raise ValueError(f"no heartbeat of rank {rank}")
    return beat


def _kinds(form: type) -> dict[str, type]:
    return {name: kind for name, kind in get_type_hints(form).items() if kind is not Place}


class Heartbeats:
    """Send and read heartbeats in a thread, because torch's key-value store may block.

    Args:
        distributed: the ranks.
        mine: this rank's heartbeat; each message contains its current values.

    Attributes:
        ranks: last heartbeat of every rank; only this rank's if torch has no process group.
        processes: the processes of the ranks on this host.
    """

    def __init__(self, distributed: core.DistributedContext, mine: Beat) -> None:
        self.ranks, self._mine, self._unanswered = [mine], mine, 0.0
        self.processes, self._done = dict[int, psutil.Process](), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="deepspeed_trial.heartbeats")
        if distributed.size > 1 and torch.distributed.is_initialized():
            told = distributed.allgather((f"watch-{uuid.uuid4()}", dataclasses.asdict(mine)))
            self._keys = [f"{told[0][0]}/{rank}" for rank in range(distributed.size)]
            self.ranks = [_beat(**fields) for _, fields in told]
            self.ranks[mine.rank] = mine
            self._thread.start()
        for beat in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(beat.pid)
                if beat.host == mine.host and process.create_time() == beat.created:
                    self.processes[beat.rank] = process

    def tick(self) -> None:
        """Count another second of silence, and detect missing ranks."""
        self._unanswered += TICK
        for beat in self.ranks:
            if beat is not self._mine:
                beat.unheard += TICK
                # If the store does not answer, only rank 0 counts as silent: the store is on rank 0's host
                is_silent = beat.unheard - (self._unanswered if beat.rank else 0.0) > SILENT_AFTER
                is_dead = beat.rank in self.processes and not is_alive(self.processes[beat.rank])
                beat.missing = beat.ended or (GONE if is_dead else SILENT if is_silent else "")

    def close(self) -> None:
        """Send the last heartbeat, if the store answers within a second."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(TICK)

    def _run(self) -> None:
        while not self._done.is_set():
            # The store does not answer, or its connection broke
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                self._talk()
            self._done.wait(TICK)

    def _talk(self) -> None:
        address, limit = os.environ["MASTER_ADDR"], datetime.timedelta(seconds=60)
        # A new connection, because the training's connection may be waiting for an answer
        store = torch.distributed.TCPStore(
            address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit
        )
        present = set[int]()
        while not self._done.wait(TICK):
            self._send(store)
            present |= {rank for rank, key in enumerate(self._keys) if rank in present or store.check([key])}
            contents = store.multi_get([self._keys[rank] for rank in present])
            for rank, content in zip(present, contents, strict=True):
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    beat = parsed(content, rank)
                    if rank != self._mine.rank and beat.count != self.ranks[rank].count:
                        self.ranks[rank] = beat
            self._unanswered = 0.0
        self._send(store)

    def _send(self, store: torch.distributed.Store) -> None:
        self._mine.count += 1
        store.set(self._keys[self._mine.rank], json.dumps(dataclasses.asdict(self._mine)))


class Activity:
    """Measure whether this process makes progress or computes, and record it in its heartbeat."""

    def __init__(self, mine: Beat) -> None:
        self._mine, self._process = mine, psutil.Process()
        self._place, self._frames = mine.place, list[tuple[str, int, str]]()
        self._work, self._work_of_children, self._ticked = 0.0, 0.0, time.monotonic()

    def tick(self) -> None:
        """Measure once a second."""
        ticked, self._ticked = self._ticked, time.monotonic()
        least = WORK * (self._ticked - ticked)
        innermost = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.walk_stack(innermost)
        frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
        place, works = dataclasses.replace(self._mine.place), True
        if place == self._place and not any(name in file for file, _, _ in frames for name in PATIENT):
            # A process that waits for a GPU uses the processor, but stays at one line
            is_polling = frames == self._frames and get_accelerator().device_name() == "cuda"
            work = _work(self._process, not is_polling)
            # Child processes may decode images or compile
            children = sum(map(_work, self._process.children(recursive=True)))
            works = max(work - self._work, abs(children - self._work_of_children)) > least
            # Measured again, because the search for children reads much
            self._work, self._work_of_children = _work(self._process, not is_polling), children
        self._mine.idle = 0.0 if works else self._mine.idle + TICK
        self._mine.waits_in = "" if works else _collective(frames)
        self._place, self._frames = place, frames


def _work(process: psutil.Process, has_processor: bool = True) -> float:
    """Return the MiB that a process has read and written, plus its processor seconds if ``has_processor``."""
    work = 0.0
    with contextlib.suppress(psutil.Error):  # it has just ended
        if has_processor:
            work += sum(process.cpu_times()[:2])
        if hasattr(process, "io_counters"):  # not on macOS
            counters = process.io_counters()
            work += (counters.read_chars + counters.write_chars) / 2**20
    return work


def _collective(frames: list[tuple[str, int, str]]) -> str:
    """Return the name of the collective (torch, DeepSpeed or Determined) in a stack; empty without one."""
    for file, _, function in frames:
        owner = COLLECTIVES.get(pathlib.Path(file).name)
        if owner is not None and not function.startswith("_"):
            return owner + function
        if function == "wait" and "/deepspeed/" in file:
            return "a collective"
    return ""

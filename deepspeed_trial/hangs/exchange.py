"""What each rank tells the others once a second, through the store by which torch has joined them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TICK = 1.0  # seconds


@dataclass(frozen=True)
class Beat:
    """What a rank tells.

    Attributes:
        rank: which it is.
        host: its host's name.
        space: what tells the processes of its host from another's, for hosts may have the same name.
        pid: its process.
        count: of beats so far; one that stays the same is of a process that is stopped or lost.
        step: as of its ``Place``.
        work: the same.
        part: the same.
        begun: the same.
        moves: the same.
        idle: seconds since it last moved or used the processor.
        stack: where its Python threads are, once it has been idle for long.
        waits_in: the collective that it is in, by that stack.
        has_ended: whether it has left the training, for whatever reason.
        has_failed: whether that was an error.
        lost: which other rank it has found to be lost, in words.
    """

    rank: int
    host: str
    space: str
    pid: int
    count: int
    step: int
    work: str
    part: str
    begun: int
    moves: int
    idle: float
    stack: str = ""
    waits_in: str = ""
    has_ended: bool = False
    has_failed: bool = False
    lost: str = ""


class Exchange:
    """Tells this rank's beat and hears the others', in a thread that nothing waits for.

    Args:
        rank: this one.
        run: what tells this run from others that have used the same store.
        first: every rank's first beat, told before there was a store.
        mine: gives this rank's beat.

    Attributes:
        heard: the last beat of every rank, and when its count was last seen to change (seconds,
            ``time.monotonic``); empty where there is no store.
        answered_at: when the store last answered; nothing is heard where it does not.
        is_lost: whether rank 0, in whose process it was, is gone.
    """

    def __init__(self, rank: int, run: str, first: Sequence[Beat], mine: Callable[[], Beat]) -> None:
        self.answered_at = time.monotonic()
        self.heard = {each.rank: (each, self.answered_at) for each in first}
        self.is_lost, self._has_met = False, False
        self._mine, self._rank = mine, rank
        self._keys = [f"{run}/{each}" for each in range(len(first))]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="deepspeed_trial.exchange")
        self._thread.start()

    def restart_clocks(self) -> None:
        """Forgets for how long nothing was heard, as this process was stopped itself."""
        now = time.monotonic()
        self.answered_at = now
        self.heard = {rank: (beat, now) for rank, (beat, _) in self.heard.items()}

    def close(self) -> None:
        """Tells the last beat, if the store answers within a second."""
        self._done.set()
        self._thread.join(TICK)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._talk()
                return
            except (KeyError, ValueError):  # there is no such address
                self.heard = {}
                return
            except RuntimeError:  # torch's of a store that does not answer, or whose connection was broken
                self.is_lost = self._has_met and self._is_refused()
                self._done.wait(TICK)

    def _talk(self) -> None:
        limit = datetime.timedelta(seconds=60)
        # A connection of its own: the training's may wait for an answer
        store = torch.distributed.TCPStore(*_address(), is_master=False, timeout=limit)
        there: list[int] = []
        self.is_lost, self._has_met = False, True
        while not self._done.wait(TICK):
            self._tell(store)
            missing = set(range(len(self._keys))) - set(there)
            there += [each for each in missing if store.check([self._keys[each]])]
            values = store.multi_get([self._keys[each] for each in there])
            self._hear({each: Beat(**json.loads(value)) for each, value in zip(there, values, strict=True)})
        self._tell(store)

    def _is_refused(self) -> bool:
        """Whether rank 0's host is there, but no longer what held the store; torchrun's is not rank 0's."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return False
        try:
            socket.create_connection(_address(), timeout=2).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def _tell(self, store: torch.distributed.Store) -> None:
        store.set(self._keys[self._rank], json.dumps(dataclasses.asdict(self._mine())))

    def _hear(self, beats: dict[int, Beat]) -> None:
        now = self.answered_at = time.monotonic()
        for rank, beat in beats.items():
            before, heard_at = self.heard[rank]
            self.heard[rank] = (beat, now if before != beat else heard_at)


def _address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

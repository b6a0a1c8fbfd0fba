"""A few steps of a trial, tried in processes of their own: what runs out of memory there ends nothing else.

Each is the real trial in the real trainer: the same engine, ranks, images and hooks. Nothing of it stays,
and no cluster hears of it. Without a GPU the processes are forked: what is imported is there once.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pathlib
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import determined as det
import torch
from deepspeed.accelerator import get_accelerator
from determined import pytorch

from deepspeed_trial import machine, processes
from deepspeed_trial.context import locally
from deepspeed_trial.errors import InvalidInput, TrainingStopped, one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.out_of_memory import is_out_of_memory
from deepspeed_trial.stops import STOP_WITH_PID
from deepspeed_trial.trainer import Trainer
from deepspeed_trial.watch import watching

SECONDS, MOST_STEPS = 1.0, 50  # that are measured, after a step that is not
LONG = 5.0  # seconds of a first step that is measured itself, for it would take long to repeat
AWAY = 10_000  # from the launcher's port to the one by which tried ranks find each other
MOST_PORT = 2**16
HANG = 120.0  # seconds without a move of any rank after which a try ends, if a run would not before
LIMIT = 0.97  # of the memory that is free: what other programs may need meanwhile
NO_MEMORY = "no memory left"


@dataclass(frozen=True)
class Attempt:
    """How a few steps went: the same on all ranks.

    Attributes:
        micro_batch_seconds: of a micro-batch after which the optimizer does not step; 0 where each is a step.
        last_seconds: of the micro-batch that ends an optimizer step, with the step.
        peak_memory: MiB of the rank that had most.
        reason: why there are no figures; empty where there are.
        errors: the lines of an ``InvalidInput`` among the reasons.
    """

    micro_batch_seconds: float = 0.0
    last_seconds: float = 0.0
    peak_memory: float = 0.0
    reason: str = ""
    errors: tuple[str, ...] = ()

    def step_seconds(self, micro_batches: int) -> float:
        """The seconds of an optimizer step of so many micro-batches a rank."""
        return (micro_batches - 1) * self.micro_batch_seconds + self.last_seconds


def beside(number: int) -> list[dict[str, str]]:
    """The rank that this process is, in an attempt of all ranks, which find each other at another port.

    Args:
        number: of the attempt, the same on all ranks.
    """
    port = int(os.environ.get("MASTER_PORT") or 0)
    away = port + AWAY + number
    moved = {"MASTER_PORT": str(away if away < MOST_PORT else away - 2 * AWAY)} if port else {}
    return [{**moved, "TORCHELASTIC_USE_AGENT_STORE": "False"}]


def local_ranks(count: int) -> list[dict[str, str]]:
    """All ranks of an attempt on this host, where no launcher has started any."""
    if count == 1:
        return [{}]
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [{**sizes, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Has this process compute with one thread: those that OpenMP has begun would be missing in a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attempt(
    trial_class: Callable[..., Any],
    experiment: Experiment,
    ranks: Sequence[Mapping[str, str]],
    threads: int,
    needs: int = 0,
) -> Attempt:
    """Trains a few steps in a process for each rank, waits for them, and says how it went.

    Args:
        trial_class: the ``DeepSpeedTrial``.
        experiment: what the trial is given.
        ranks: variables of the environment of each, beside those of this process.
        threads: with which each computes.
        needs: bytes that each will need; if fewer are free, nothing is tried.
    """
    is_new = not torch.cuda.is_available() and not torch.distributed.is_initialized()
    forks = sys.platform == "linux" and is_new and _fork_has_gradients()
    start: Any = multiprocessing.get_context("fork" if forks else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for rank, more in enumerate(ranks):
                mine, theirs = start.Pipe(duplex=False)
                environment = {**os.environ, **more, STOP_WITH_PID: str(os.getpid())}
                scratch = pathlib.Path(folder, str(rank))
                arguments = (theirs, trial_class, experiment, environment, threads, needs, scratch)
                child = start.Process(target=_rank, args=arguments)
                child.start()
                theirs.close()
                started.append((child, mine))
            return _answer(started)
        finally:
            for child, mine in started:
                child.kill()
                child.join()
                mine.close()


def _fork_has_gradients() -> bool:
    """Whether torch computes gradients in a fork of this process: not where it has threads for a GPU.

    It begins these without a GPU, too, if the process's first backward pass is one on fake tensors.
    """
    child = os.fork()
    if child == 0:
        failed = True
        with contextlib.suppress(BaseException):
            torch.ones((), requires_grad=True).backward()
            failed = False
        os._exit(failed)
    return os.waitpid(child, 0)[1] == 0


def _answer(started: Sequence[tuple[Any, Connection]]) -> Attempt:
    """The answer of all ranks; that of the first one that fails where one does."""
    answer, left = Attempt(reason="no process"), {child.sentinel: (child, mine) for child, mine in started}
    while left:
        for sentinel in wait(list(left)):
            child, mine = left.pop(sentinel)
            child.join()
            try:
                answer = mine.recv()
            except EOFError:  # nothing was sent
                answer = Attempt(reason=_why(child.exitcode))
            if answer.reason:
                return answer
    return answer


def _why(code: int) -> str:
    if code == -signal.SIGKILL:  # as Linux ends a process where memory is short
        return f"{NO_MEMORY} (killed)"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ----------------------------------------------------------------------------------- in the process of a rank


class _Enough(Exception):
    """All that is to be measured has been."""


def _rank(
    answer: Connection,
    trial_class: Callable[..., Any],
    experiment: Experiment,
    environment: Mapping[str, str],
    threads: int,
    needs: int,
    scratch: pathlib.Path,
) -> None:
    """Tries the steps as one of the ranks, and sends an ``Attempt``."""
    scratch.mkdir()
    log = os.open(scratch / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    det.get_cluster_info = lambda: None  # the steps are no trial of the cluster
    torch.set_num_threads(threads)
    try:
        answer.send(_steps(trial_class, experiment, scratch / "run", needs))
    except InvalidInput as error:
        answer.send(Attempt(reason="; ".join(error.errors), errors=tuple(error.errors)))
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, TrainingStopped) and error.__cause__ else error
        answer.send(Attempt(reason=NO_MEMORY if is_out_of_memory(cause) else one_line(cause)))
        raise


def _steps(
    trial_class: Callable[..., Any], experiment: Experiment, output: pathlib.Path, needs: int
) -> Attempt:
    hang_after = min(experiment.hang_after, HANG)
    ranks = processes.join_local_processes(hang_after)
    ranks.allgather(None)  # each has joined
    output.mkdir()
    with (
        contextlib.ExitStack() as stack,
        locally(experiment, ranks, output, resumes=False, logs_tensorboard=False) as context,
        watching(ranks, context.place, hang_after),
    ):
        ranks.allgather(None)  # no rank has begun
        free = int(min(ranks.allgather(machine.free_memory())) * LIMIT / ranks.local_size)
        if needs > free:
            return Attempt(
                reason=f"{NO_MEMORY} ({needs / 2**20:,.0f} MiB by forecast, {free / 2**20:,.0f} free)"
            )
        stack.enter_context(machine.limited_memory(free))
        trial = trial_class(context)
        clock = _Clock(context)
        train_batch = trial.train_batch

        def timed(*arguments: Any) -> Any:
            clock.tick()
            return train_batch(*arguments)

        trial.train_batch = timed
        with contextlib.suppress(_Enough):
            Trainer(trial, context).fit(pytorch.Batch(MOST_STEPS + 3), checkpoint_policy="none")
        peak = max(ranks.allgather(machine.peak_memory()))
        return Attempt(*clock.medians, peak_memory=peak)


class _Clock:
    """Times micro-batches, from the begin of one to that of the next, on the chief."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.begins: list[float] = []
        self.last: int | None = None  # the micro-batch at whose begin it is enough
        self.medians = 0.0, 0.0
        whole_steps = context.use_pipeline_parallel or not context.accumulates
        self.calls = 1 if whole_steps else context.get_num_micro_batches_per_slot()  # of a step

    def tick(self) -> None:
        """Called at the begin of every micro-batch.

        Raises:
            _Enough: after so many steps as the first one says; where that is long, after a micro-batch more.
        """
        get_accelerator().synchronize()
        self.begins.append(time.perf_counter())
        calls, done = self.calls, len(self.begins) - 1
        if done == calls:
            step = self.begins[-1] - self.begins[0]
            steps = math.ceil(SECONDS / step) if step < LONG else 0
            self.last = done + max(1, calls * min(MOST_STEPS, self.context.distributed.broadcast(steps)))
        if done == self.last:
            self.medians = self.context.distributed.broadcast(self._medians())
            raise _Enough

    def _medians(self) -> tuple[float, float]:
        calls = self.calls
        seconds = [after - before for before, after in zip(self.begins, self.begins[1:], strict=False)]
        ends, others = seconds[calls - 1 :: calls], [s for at, s in enumerate(seconds) if (at + 1) % calls]
        # The first step has much to make; of a long one that is little
        return statistics.median(others[calls - 1 :] or [0.0]), statistics.median(ends[1:] or ends)

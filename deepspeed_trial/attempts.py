"""Try a few steps of a trial in separate processes, which may run out of memory without ending this process.

An attempt runs the real trial in the real trainer: the same engine, ranks, images and hooks. It leaves no
files and reports nothing to a cluster. On Linux without a GPU the processes are forks and share the imported
modules.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pathlib
import signal
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
from torch.distributed import TCPStore

from deepspeed_trial import machine, processes
from deepspeed_trial.context import locally
from deepspeed_trial.errors import InvalidInput, TrainingStopped, one_line
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.meeting import meet, meet_in_chief, serve
from deepspeed_trial.out_of_memory import is_out_of_memory
from deepspeed_trial.stops import STOP_WITH_PID
from deepspeed_trial.trainer import Trainer
from deepspeed_trial.watch import watching

SECONDS = 1.0  # of steps to measure, after a first step that does not count
MOST_STEPS = 50  # to measure
LONG = 5.0  # seconds; if the first step takes longer, only one more micro-batch is measured
HANG = 120.0  # seconds; the greatest ``hang_after`` of an attempt
LIMIT = 0.9  # share of the free memory to use; other programs, the validation and the report need the rest
NO_MEMORY = "no memory left"


@dataclass(frozen=True)
class Attempt:
    """The result of an attempt. If the steps succeed, the result is the same on all ranks.

    Attributes:
        micro_batch_seconds: duration of a micro-batch without an optimizer step, in seconds; 0 if every
            micro-batch has an optimizer step.
        last_seconds: duration of a micro-batch with the optimizer step, in seconds.
        peak_memory: the most memory that any rank used, in MiB.
        reason: why the steps failed; empty if they succeeded.
        errors: lines of the ``InvalidInput`` that made the steps fail; empty after an error of another class.
    """

    micro_batch_seconds: float = 0.0
    last_seconds: float = 0.0
    peak_memory: float = 0.0
    reason: str = ""
    errors: tuple[str, ...] = ()

    def step_seconds(self, micro_batches: int) -> float:
        """Return the duration of an optimizer step with ``micro_batches`` per rank, in seconds."""
        return (micro_batches - 1) * self.micro_batch_seconds + self.last_seconds


@dataclass(frozen=True)
class Group:
    """The ranks that this process starts for an attempt.

    Attributes:
        environments: environment variables of each rank, in addition to this process's variables.
        store: the ranks' store; its server runs in this process or in rank 0's process. None for one rank.
    """

    environments: Sequence[Mapping[str, str]]
    store: TCPStore | None = None


def rank_of_all() -> Group:
    """Return the rank that this process starts, for an attempt in which every rank starts one."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return Group([{}])
    meet()
    store = meet_in_chief("attempt", os.environ["RANK"] == "0")
    return Group([_meeting_in(store)], store)


def local_ranks(count: int) -> Group:
    """Return all ranks of an attempt on this host, without a launcher."""
    if count == 1:
        return Group([{}])
    store = serve(0)
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    where = {**sizes, **_meeting_in(store)}
    return Group([{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)], store)


def _meeting_in(store: TCPStore) -> dict[str, str]:
    """Return the variables that let ranks meet in an open store, as torchrun's ranks do."""
    return {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Limit this process to one thread in the block: a fork would not have OpenMP's other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def attempt(
    trial_class: Callable[..., Any], experiment: Experiment, group: Group, threads: int, needs: int = 0
) -> Attempt:
    """Train a few steps in one process per rank, and return the result.

    Args:
        trial_class: the ``DeepSpeedTrial``.
        experiment: configuration of the trial.
        group: the ranks to start.
        threads: threads of each rank.
        needs: bytes of memory that each rank needs; with less free memory no step is tried.
    """
    is_new = not torch.cuda.is_available() and not torch.distributed.is_initialized()
    forks = sys.platform == "linux" and is_new and _fork_has_gradients()
    start: Any = multiprocessing.get_context("fork" if forks else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for rank, more in enumerate(group.environments):
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
    """Return whether torch can compute gradients in a fork: False if this process has GPU autograd threads.

    Torch also starts these threads on a machine without a GPU, if the first backward pass is on fake tensors.
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
    """Return the first failing rank's answer; if no rank fails, the answer of the rank that ends last."""
    answer, left = Attempt(reason="no process"), {child.sentinel: (child, mine) for child, mine in started}
    while left:
        for sentinel in wait(list(left)):
            child, mine = left.pop(sentinel)
            child.join()
            try:
                answer = mine.recv()
            except EOFError:  # the rank sent nothing
                answer = Attempt(reason=_why(child.exitcode))
            if answer.reason:
                return answer
    return answer


def _why(code: int) -> str:
    if code == -signal.SIGKILL:  # Linux sends it if memory runs out
        return f"{NO_MEMORY} (killed)"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ----------------------------------------------------------------------------------- in the process of a rank


class _MeasurementDone(Exception):
    """The measurement is complete."""


def _rank(
    answer: Connection,
    trial_class: Callable[..., Any],
    experiment: Experiment,
    environment: Mapping[str, str],
    threads: int,
    needs: int,
    scratch: pathlib.Path,
) -> None:
    """Run the steps as one of the ranks, and send an ``Attempt``."""
    scratch.mkdir()
    log = os.open(scratch / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    det.get_cluster_info = lambda: None  # so that the trainer reports nothing to the cluster
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
    ranks.allgather(None)  # wait until each rank has joined
    output.mkdir()
    with (
        contextlib.ExitStack() as stack,
        locally(experiment, ranks, output, resumes=False, logs_tensorboard=False) as context,
        watching(ranks, context.place, hang_after),
    ):
        ranks.allgather(None)  # no rank has allocated memory yet
        free = int(min(ranks.allgather(machine.free_memory())) * LIMIT / ranks.local_size)
        if needs > free:
            sizes = f"{needs / 2**20:,.0f} MiB by estimate, {free / 2**20:,.0f} free"
            return Attempt(reason=f"{NO_MEMORY} ({sizes})")
        stack.enter_context(machine.limited_memory(free))
        trial = trial_class(context)
        clock = _Clock(context)
        train_batch = trial.train_batch

        def timed(*arguments: Any) -> Any:
            clock.tick()
            return train_batch(*arguments)

        trial.train_batch = timed
        with contextlib.suppress(_MeasurementDone):
            Trainer(trial, context).fit(pytorch.Batch(MOST_STEPS + 3), checkpoint_policy="none")
        peak = max(ranks.allgather(machine.peak_memory()))
        return Attempt(*clock.medians, peak_memory=peak)


class _Clock:
    """Measure, on the chief, the time from the start of a micro-batch to the start of the next."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.begins: list[float] = []
        self.last: int | None = None  # micro-batch whose start ends the measurement
        self.medians = 0.0, 0.0
        whole_steps = context.use_pipeline_parallel or not context.accumulates
        self.calls = 1 if whole_steps else context.get_num_micro_batches_per_slot()  # of a step

    def tick(self) -> None:
        """Record the start of a micro-batch.

        Raises:
            _MeasurementDone: after enough steps; their number depends on the duration of the first step.
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
            raise _MeasurementDone

    def _medians(self) -> tuple[float, float]:
        calls = self.calls
        seconds = [after - before for before, after in zip(self.begins, self.begins[1:], strict=False)]
        ends, others = seconds[calls - 1 :: calls], [s for at, s in enumerate(seconds) if (at + 1) % calls]
        # Leave out the first step, which also allocates and compiles, if there are others
        return statistics.median(others[calls - 1 :] or [0.0]), statistics.median(ends[1:] or ends)

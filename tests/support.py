"""Programs that tests run, and what several tests ask of their runs."""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from warm import Started, Warm

from deepspeed_trial.errors import InvalidInput

PROJECT = pathlib.Path(__file__).resolve().parent.parent
JOINED = "RANK WORLD_SIZE LOCAL_RANK GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME".split()  # variables of a rank
# With one thread a process, processes do not wait for each other's cores
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


@functools.cache
def warm() -> Warm:
    """Start this worker's warm interpreter at the first program."""
    interpreter = Warm()
    atexit.register(interpreter.close)
    return interpreter


def time_limit() -> float:
    """Seconds that a program may take: more on a machine that is slow now, by the time its imports took."""
    return max(200, 30 * warm().seconds)


@dataclass
class Run:
    """A finished run: its exit code, output and folder."""

    code: int
    stdout: str
    stderr: str
    output: pathlib.Path

    @property
    def summary(self) -> dict:
        return json.loads((self.output / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    @property
    def validated_at(self) -> list[int]:
        return [entry["steps_completed"] for entry in self.metrics if entry["group"] == "validation"]


def free_port() -> int:
    """Find a free port below the range that Linux assigns from; no other process gets it by chance."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def launcher(name: str, processes: int) -> list[str]:
    """The command before the script: python, torchrun or deepspeed of this environment."""
    if name == "python":
        return [sys.executable]
    module = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}[name]
    count = {"torchrun": "--nproc-per-node", "deepspeed": "--num_gpus"}[name]
    return [sys.executable, "-m", module, f"{count}={processes}", f"--master_port={free_port()}"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a new process, without the rank that a trial has set in this process."""
    return {key: value for key, value in os.environ.items() if key not in JOINED} | more


@contextlib.contextmanager
def started(
    arguments: list[str], *, processes: int = 0, cwd: pathlib.Path = PROJECT, **env: Any
) -> Iterator[Started]:
    """Start ``python3 ARGUMENTS`` in a fork, or ``processes`` ranks of it; kill all remaining processes at the end."""
    program = warm().start(arguments, processes=processes, cwd=cwd, environment=environment(**env))
    try:
        yield program
    finally:
        program.end()


def run(
    arguments: list[str], output: pathlib.Path, *, processes: int = 0, cwd: pathlib.Path = PROJECT, **env: Any
) -> Run:
    """Run ``python3 ARGUMENTS`` to its end in a fork, or ``processes`` ranks as ``torchrun`` does."""
    with started(arguments, processes=processes, cwd=cwd, **env) as program:
        code = program.wait(time_limit())
        return Run(code, program.stdout, program.stderr, output)


def wait_until(holds: Callable[[], Any], *programs: Started) -> None:
    """Wait for an event in programs that still run."""
    deadline = time.monotonic() + time_limit()
    while not holds():
        said = [f"{program.stdout}\n{program.stderr}" for program in programs]
        assert time.monotonic() < deadline and all(program.poll() is None for program in programs), said
        time.sleep(0.01)


def execute(command: list[str], output: pathlib.Path, *, cwd: pathlib.Path = PROJECT, **env: str) -> Run:
    """Run a command in a new process; after the time limit, kill it and its children and print their output."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=2 * time_limit())
    except subprocess.TimeoutExpired as error:
        print(*(text.decode(errors="replace") for text in (error.stdout, error.stderr) if text), sep="\n")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Run(process.returncode, stdout, stderr, output)


def train_many(
    folder: pathlib.Path,
    rows: dict[str, list[str]],
    processes: int = 0,
    sigterm_at: int = 0,
    environment: dict[str, Any] | None = None,
) -> dict[str, Run]:
    """Run train.py with each row's arguments; with ``sigterm_at`` the last rank gets a SIGTERM in that step."""
    processes = processes if processes > 1 else 0
    fault: Any = {"FAULT": "SIGTERM", "RANK_AT_FAULT": str(max(processes - 1, 0)), "STEP": str(sigterm_at)}
    program = "tests/faulty.py" if sigterm_at else "train.py"
    return {
        name: run(
            [program, *row, "--output", str(folder / name)],
            folder / name,
            processes=processes,
            **(fault if sigterm_at else {}),
            **(environment or {}),
        )
        for name, row in rows.items()
    }


def losses(run: Run) -> list[float]:
    """Return the loss of each report; with ``scheduling_unit: 1`` of each step."""
    return [entry["loss"] for entry in run.metrics if entry["group"] == "training"]


def rates(run: Run) -> list[float]:
    """Return the learning rate of each report."""
    return [entry["learning_rate"] for entry in run.metrics if entry["group"] == "training"]


def overrides(**values: object) -> list[str]:
    """``--set`` arguments; two underscores stand for a dot."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


DIGITS = ["--config", "experiments/digits.yaml"]


def error_line(call, *arguments) -> str:
    """The one line of the InvalidInput that a call must raise."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    (line,) = caught.value.errors
    assert "\n" not in line
    return line


def fork(*works):
    """Start all functions at the same moment, one forked process each; an exception gives exit code 1."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(works))

    def run(work):
        barrier.wait(300)
        work()

    processes = [context.Process(target=run, args=(work,)) for work in works]
    for process in processes:
        process.start()
    return processes


def all_at_once(*works) -> None:
    """Run all functions to their end, one process each."""
    processes = fork(*works)
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(works)


LATEST = ["--resume", "latest"]
MODEL = "model0/shard-00001-model-00001-of-00001.safetensors"  # of a checkpoint


def checkpoints(run) -> dict[int, pathlib.Path]:
    """The folders of a run's checkpoints by their steps."""
    files = (run.output / "checkpoints").glob("*/metadata.json")
    return {json.loads(file.read_text())["steps_completed"]: file.parent for file in files}


def wait_for_checkpoint(program: Started, output: pathlib.Path) -> list[psutil.Process]:
    """Wait for a checkpoint that was not there before; return the ranks."""
    before = set(output.glob("checkpoints/*/metadata.json"))
    wait_until(lambda: set(output.glob("checkpoints/*/metadata.json")) - before, program)
    return psutil.Process(program.pid).children()


def truncate_model(folder):
    os.truncate(folder / MODEL, 1000)


TWO = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 4}", min_checkpoint_period="{batches: 2}")]
TWO += overrides(hyperparameters__overwrite_deepspeed_args__scheduler__params__warmup_num_steps=2)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every byte of a folder, by file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}

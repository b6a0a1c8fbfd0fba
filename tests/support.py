"""Real runs in processes of their own, and what several tests ask of them."""

import contextlib
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
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

from harness.errors import InvalidInput

PROJECT = pathlib.Path(__file__).resolve().parent.parent


JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
TIME_LIMIT = 500  # seconds a run may take


# One thread a process, of the tests' own and of those they start: those of several would wait for each other's cores.
os.environ["OMP_NUM_THREADS"] = "1"


torch.set_num_threads(1)


@dataclass
class Run:
    """A finished run: its exit code, what it printed and its folder."""

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
    """A port below those that Linux gives out, lest another process has been given it before it is used."""
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
    """That of a new process: without what a trial sets that ran in this one, which would be a launcher's."""
    return {key: value for key, value in os.environ.items() if key not in JOINED} | more


def execute(command: list[str], output: pathlib.Path, *, cwd: pathlib.Path = PROJECT, **env: str) -> Run:
    """Runs a command to its end; kills it and all its children when the time is up, and shows what they said."""
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
        stdout, stderr = process.communicate(timeout=TIME_LIMIT)
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
    processes: int = 1,
    sigterm_at: int = 0,
    environment: dict[str, Any] | None = None,
) -> dict[str, Run]:
    """Runs train.py's ``main`` with each row's arguments, all in one launch: starting DeepSpeed takes seconds.

    With ``sigterm_at`` the last rank gets a SIGTERM in that step of every run.
    """
    table = folder / "rows.json"
    table.write_text(json.dumps({name: [*row, "--output", str(folder / name)] for name, row in rows.items()}))
    command = [*launcher("python" if processes == 1 else "torchrun", processes), "tests/many.py", str(table)]
    launch = execute(
        command, folder, PYTHONPATH=str(PROJECT), SIGTERM_AT=str(sigterm_at), **(environment or {})
    )
    done = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.done.json")}
    runs = {}
    for name in rows:
        result = done.get(f"{name}.done", {"code": None, "stdout": launch.stdout, "stderr": launch.stderr})
        runs[name] = Run(result["code"], result["stdout"], result["stderr"], folder / name)
    return runs


def overrides(**values: object) -> list[str]:
    """``--set`` arguments; two underscores stand for a dot."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


DIGITS = ["--config", "experiments/digits.yaml"]


# One machine computes as CPUs of other kinds do: by what torch, oneDNN and MKL ask of it.
INSTRUCTIONS: dict[str, dict[str, Any]] = {
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}


def error_line(call, *arguments) -> str:
    """The one line of the InvalidInput that a call must raise."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    (line,) = caught.value.errors
    assert "\n" not in line
    return line


def fork(*works):
    """Starts each in a forked process, all at the same moment; one that raises exits with 1."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(works))

    def run(work):
        barrier.wait(30)
        work()

    processes = [context.Process(target=run, args=(work,)) for work in works]
    for process in processes:
        process.start()
    return processes


def all_at_once(*works) -> None:
    """Runs each to its end in a process of its own."""
    processes = fork(*works)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(works)


LATEST = ["--resume", "latest"]
MODEL = "model0/mp_rank_00_model_states.pt"  # of a checkpoint


def checkpoints(run) -> dict[int, pathlib.Path]:
    """The folders of a run's checkpoints by their steps."""
    files = (run.output / "checkpoints").glob("*/metadata.json")
    return {json.loads(file.read_text())["steps_completed"]: file.parent for file in files}


def wait_for_checkpoint(process, output):
    """The two ranks, once they are training, i.e. when there is a checkpoint that was not there before."""
    before = set(output.glob("checkpoints/*/metadata.json"))
    deadline = time.monotonic() + TIME_LIMIT
    while set(output.glob("checkpoints/*/metadata.json")) <= before:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(process.pid).children()


def truncate_model(folder):
    os.truncate(folder / MODEL, 1000)


TWO = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 4}", min_checkpoint_period="{batches: 2}")]
TWO += overrides(hyperparameters__overwrite_deepspeed_args__scheduler__params__warmup_num_steps=2)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every byte of a folder, by file."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }

"""Real runs in processes of their own, and small real image folders."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from errors import InvalidInput

PROJECT = pathlib.Path(__file__).resolve().parent.parent
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps in one worker the tests of a file, and those that share a launch: see --dist in pyproject.toml."""
    for item in items:
        launched = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        modes, nets = launched.get("mode_runs"), launched.get("straight", "")
        item.add_marker(pytest.mark.xdist_group(f"modes {modes}" if modes else f"{item.path.stem} {nets}"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launcher(name: str, processes: int) -> list[str]:
    """The command before the script: python, torchrun or deepspeed of this environment."""
    if name == "python":
        return [sys.executable]
    module = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}[name]
    count = {"torchrun": "--nproc-per-node", "deepspeed": "--num_gpus"}[name]
    return [sys.executable, "-m", module, f"{count}={processes}", f"--master_port={free_port()}"]


def execute(command: list[str], output: pathlib.Path, *, cwd: pathlib.Path = PROJECT, **env: str) -> Run:
    """Runs a command to its end; kills it and all its children when the time is up."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIME_LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Run(process.returncode, stdout, stderr, output)


@pytest.fixture
def train(tmp_path):
    """Runs train.py: ``train("--config", FILE, processes=2)``."""
    runs = iter(range(100))

    def run(*arguments: str, processes: int = 1, by: str | None = None, output=None, **env: Any) -> Run:
        output = output or tmp_path / f"run{next(runs)}"
        command = launcher(by or ("python" if processes == 1 else "torchrun"), processes)
        return execute([*command, "train.py", *arguments, "--output", str(output)], output, **env)

    return run


def train_many(
    folder: pathlib.Path, rows: dict[str, list[str]], processes: int = 1, sigterm_at: int = 0
) -> dict[str, Run]:
    """Runs train.py's ``main`` with each row's arguments, all in one launch: starting DeepSpeed takes seconds.

    With ``sigterm_at`` the last rank gets a SIGTERM in that step of every run.
    """
    table = folder / "rows.json"
    table.write_text(json.dumps({name: [*row, "--output", str(folder / name)] for name, row in rows.items()}))
    command = [*launcher("python" if processes == 1 else "torchrun", processes), "tests/many.py", str(table)]
    launch = execute(command, folder, PYTHONPATH=str(PROJECT), SIGTERM_AT=str(sigterm_at))
    done = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.done.json")}
    runs = {}
    for name in rows:
        result = done.get(f"{name}.done", {"code": None, "stdout": launch.stdout, "stderr": launch.stderr})
        runs[name] = Run(result["code"], result["stdout"], result["stderr"], folder / name)
    return runs


def overrides(**values: object) -> list[str]:
    """``--set`` arguments; two underscores stand for a dot."""
    return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.fixture(scope="session", params=[1, 2])
def mode_runs(request, tmp_path_factory):
    """A short run in every mode with 1 and with 2 processes: (processes, folder, runs by mode)."""
    from modes import mode_rows

    folder = tmp_path_factory.mktemp(f"modes{request.param}")
    return request.param, folder, train_many(folder, mode_rows(request.param), request.param)


DIGITS = ["--config", "experiments/digits.yaml"]


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> pathlib.Path:
    """A real image folder: digits 0 to 3 as PNG files, 40 a class to train and 13 to test."""
    root = tmp_path_factory.mktemp("images")
    digits = load_digits()
    for label in range(4):
        images = digits.images[digits.target == label]
        for index, image in enumerate(images[:53]):
            folder = root / ("train" if index < 40 else "test") / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).resize((48, 40)).save(folder / f"{index:03}.png")
    return root


def fault(call, *arguments) -> str:
    """The one line of the InvalidInput that a call must raise."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    (line,) = caught.value.faults
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

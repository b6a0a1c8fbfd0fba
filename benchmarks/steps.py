"""Times optimizer steps of the contenders, which run in separate processes and take turns."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import joblib
import torch

from classify.config import experiment_file
from classify.config.project import PROJECT
from classify.images.plan import DataPlan
from classify.images.settings import DataSettings

CONTENDERS = {
    "pytorch": "bare PyTorch loop, float tensors in memory",
    "engine": "bare DeepSpeed loop, float tensors in memory",
    "trial": "this trial",
    "example": "Determined's example style: PIL dataset, 2 workers",
}
PEERS = tuple(name for name in CONTENDERS if name != "trial")


def measure_all(config: str, overrides: Sequence[str], quick: bool, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the result of ``measure`` for each number of processes, ZeRO stage and micro-batch."""
    micro_batches, stages, processes = ((16, 256), (0,), (1,)) if quick else ((16, 256, 1024), (0, 2), (1, 2))
    section = experiment_file.load(config, overrides).config.get("data")
    images = DataPlan.resolve(DataSettings.parse(section)).count("train")
    for count, stage, micro_batch in itertools.product(processes, stages, micro_batches):
        if count <= most_processes() and count * micro_batch <= images:
            yield measure(
                config, overrides, count, stage, micro_batch, 3 if quick else 3 * repeats, seconds=0.4
            )


def most_processes() -> int:
    """Return the largest number of processes in the comparison: two, or one on a machine with one GPU."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def measure(
    config: str,
    overrides: Sequence[str],
    processes: int,
    stage: int,
    micro_batch: int,
    repeats: int,
    seconds: float,
) -> dict[str, Any]:
    """Time every contender at one number of processes, one ZeRO stage and one micro-batch.

    Returns:
        These three and the ``steps`` of a segment; the ``rates`` of each contender in images a second, for
        each repeat; their medians (``images_per_second``) and ``spread``.
    """
    deepspeed = "hyperparameters.overwrite_deepspeed_args."
    overrides = [
        *overrides,
        f"{deepspeed}train_batch_size={micro_batch * processes}",
        f"{deepspeed}train_micro_batch_size_per_gpu={micro_batch}",
        f"{deepspeed}gradient_accumulation_steps=1",
        f"{deepspeed}zero_optimization.stage={stage}",
    ]
    steps = max(5, int(seconds * 3000 / (micro_batch + 10)))  # a segment takes about ``seconds`` on two cores
    period = experiment_file.load(config, overrides).scheduling_unit
    if steps > period / 4:
        steps = period  # small steps take no longer than a report: report at the trial's period
    row: dict[str, Any] = {"processes": processes, "stage": stage, "micro_batch": micro_batch, "steps": steps}
    request = {"config": config, "overrides": overrides, "steps": steps}
    row["rates"] = take_turns({name: (name, request) for name in CONTENDERS}, processes, repeats)
    row["images_per_second"] = {name: statistics.median(rates) for name, rates in row["rates"].items()}
    row["spread"] = {name: spread(rates) for name, rates in row["rates"].items()}
    return row


def take_turns(
    contenders: dict[str, tuple[str, dict[str, Any]]], processes: int, repeats: int
) -> dict[str, list[float]]:
    """Return each contender's images a second in each repeat, after a repeat that warms up.

    Args:
        contenders: by label, one of ``CONTENDERS`` and the request to the worker that runs it.
        processes: the number of processes of each contender.
        repeats: the number of repeats.
    """
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(contender(*each, processes)) for name, each in contenders.items()
        }
        for repeat in range(repeats + 1):
            for name, segment in workers.items():
                images, taken = segment()
                if repeat:
                    rates[name].append(images / taken)
    return rates


@contextlib.contextmanager
def contender(
    name: str, request: dict[str, Any], processes: int
) -> Iterator[Callable[[], tuple[int, float]]]:
    """Start a contender; yield a function that trains a segment and returns its images and seconds.

    Args:
        name: one of ``CONTENDERS``.
        request: the request of ``benchmarks.worker``.
        processes: the number of processes.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        asked = pathlib.Path(folder, "request.json")
        asked.write_text(json.dumps(request))
        command, variables = launched(["benchmarks.worker", name, str(asked)], processes)
        pipe = subprocess.PIPE
        worker = subprocess.Popen(
            command, cwd=PROJECT, env=variables, stdin=pipe, stdout=pipe, stderr=errors, text=True, bufsize=1
        )
        assert worker.stdin and worker.stdout
        turns, lines = worker.stdin, worker.stdout

        def segment() -> tuple[int, float]:
            with contextlib.suppress(BrokenPipeError):
                turns.write("\n")
            for line in lines:
                if line.startswith("trained "):
                    images, seconds = line.split()[1:]
                    return int(images), float(seconds)
            errors.seek(0)
            sys.exit(f"benchmarks: {name} failed:\n{errors.read()[-3000:]}")

        try:
            yield segment
        finally:
            with contextlib.suppress(BrokenPipeError):
                turns.close()
            for _ in lines:  # read the worker's last lines: a full pipe could block its exit
                pass
            worker.wait()


def launched(module: Sequence[str], processes: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment for a module, its arguments and a number of processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, joblib.cpu_count() // processes))
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", *module]
    return command, {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(PROJECT)}


def run(
    module: Sequence[str],
    request: dict[str, Any],
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a module in one or more processes and return its answer.

    Args:
        module: the module's name and arguments; the files of the request and the answer are appended.
        request: the measurement, as JSON values.
        processes: the number of processes.
        environment: more environment variables for the processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = pathlib.Path(folder, "request.json"), pathlib.Path(folder, "answer.json")
        asked.write_text(json.dumps(request))
        command, variables = launched([*module, str(asked), str(answer)], processes)
        variables.update(environment or {})
        done = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"benchmarks: {' '.join(module)} failed:\n{done.stderr[-3000:]}")
        return json.loads(answer.read_text())


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range divided by the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Return the ratio of the trial's speed to each peer's speed, the median over the repeats."""
    rates = row["rates"]
    pairs = {peer: zip(rates["trial"], rates[peer], strict=True) for peer in PEERS}
    return {peer: statistics.median(a / b for a, b in each) for peer, each in pairs.items()}


def line(row: dict[str, Any]) -> str:
    """Describe one row of the table in a line."""
    rates = "  ".join(f"{name} {rate:,.0f}" for name, rate in row["images_per_second"].items())
    what = f"{row['processes']} processes, ZeRO {row['stage']}, micro-batch {row['micro_batch']}"
    return f"{what}: images/s {rates}; " + ", ".join(
        f"trial/{peer} {ratio:.3f}" for peer, ratio in ratios(row).items()
    )

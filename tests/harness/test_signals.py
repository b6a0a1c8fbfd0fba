"""Signals and the end of a launcher: a run saves a checkpoint and ends."""

import subprocess

import psutil
import pytest
from matrix import ROWS
from matrix import train as train_row
from support import (
    DIGITS,
    LATEST,
    PROJECT,
    Run,
    checkpoints,
    execute,
    launcher,
    overrides,
    run,
    started,
    time_limit,
    wait_for_checkpoint,
    wait_until,
)

from harness.machine import is_alive

ENDLESS = [*DIGITS, *overrides(scheduling_unit=10, hyperparameters__max_length="{batches: 100000}")]


@pytest.mark.parametrize("signal", ["SIGINT", "SIGUSR1"])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, signal):
    """SLURM sends a SIGUSR1; the matrix stops every mode by a SIGTERM."""
    stopped = train_row(ROWS["line plain"], 1, tmp_path, {}, FAULT=signal, RANK_AT_FAULT="0", STEP="9")
    assert stopped.code == 130 and max(checkpoints(stopped)) == 9, stopped.stderr


TWO_SIGNALS = """
import os, signal, sys, types
from line_trial import *
from harness.local import signals
times = iter(map(float, sys.argv[2:]))

class Trial(LineTrial):
    def train_batch(self, *arguments):
        if len(self.places) == 4:  # the first micro-batch of step 3
            signals.time = types.SimpleNamespace(monotonic=times.__next__)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_batch(*arguments)

_, done = fit(pathlib.Path(sys.argv[1]), Trial)
sys.exit(0 if done.interrupted and done.steps == 3 else 1)
"""


@pytest.mark.parametrize(("second", "code"), [(5.9, 0), (6.1, -15)])
def test_a_second_signal_ends_a_run_at_once_a_second_later(tmp_path, second, code):
    """A launcher may pass one signal on several times."""
    done = run(["-c", TWO_SIGNALS, str(tmp_path), "5", str(second)], tmp_path)
    assert done.code == code, done.stderr
    assert len(checkpoints(done)) == (code == 0)


def test_a_folder_has_one_run(tmp_path):
    command = [
        "train.py",
        *ENDLESS,
        *overrides(min_checkpoint_period="{batches: 4}"),
        "--output",
        str(tmp_path),
    ]
    with started(command) as first:
        wait_for_checkpoint(first, tmp_path)
        second = run([*command, *LATEST], tmp_path)
        assert second.code == 2 and "another run is writing there" in second.stderr
        assert first.poll() is None


def end_of_launcher(launcher, said, output):
    """Kill a launcher, wait for the end of its ranks, and return the steps of the checkpoint."""
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    psutil.Process(launcher.pid).kill()
    wait_until(lambda: not any(map(is_alive, ranks)))
    assert said().count("is gone") == 1 and "Traceback" not in said()
    (steps,) = checkpoints(Run(0, "", "", output))
    return steps


def test_ranks_end_with_a_checkpoint_after_the_death_of_their_launcher(tmp_path):
    with started(["train.py", *ENDLESS, "--output", str(tmp_path)], processes=2) as program:
        wait_until(lambda: "step 10/" in program.stdout, program)
        assert end_of_launcher(program, lambda: program.stderr, tmp_path) >= 10


@pytest.mark.soak
@pytest.mark.parametrize("by", ["torchrun", "deepspeed"])
def test_the_command_of_a_dead_launcher_resumes(tmp_path, by):
    """The launcher's port is free again."""
    row = [*launcher(by, 2), "train.py", *ENDLESS, "--output", str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(row, cwd=PROJECT, stdout=log, stderr=log)
    said = (tmp_path / "log").read_text
    wait_until(lambda: "step 10/" in said())
    steps = end_of_launcher(process, said, tmp_path) + 1
    process.wait(time_limit())
    more = overrides(hyperparameters__max_length=f"{{batches: {steps}}}")
    resumed = execute([*row, *more, *LATEST], tmp_path)
    assert resumed.code == 0, resumed.stderr
    assert resumed.summary["steps"] == steps

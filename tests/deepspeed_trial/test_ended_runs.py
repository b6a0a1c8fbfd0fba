"""Runs that end early: by a signal, with their launcher, by a kill, or by a loss that is not finite."""

import dataclasses
import json
import math
import random
import re
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest
import support
from matrix import DEEPSPEED, ROWS
from matrix import train as train_row
from support import (
    DIGITS,
    LATEST,
    Run,
    checkpoints,
    overrides,
    run,
    started,
    time_limit,
    wait_for_checkpoint,
    wait_until,
)

from classify.models import net_file
from deepspeed_trial.machine import is_alive

ENDLESS = [*DIGITS, *overrides(scheduling_unit=10, hyperparameters__max_length="{batches: 100000}")]


@pytest.mark.parametrize("signal", ["SIGINT", "SIGUSR1"])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, signal):
    """SLURM sends a SIGUSR1; the matrix stops every mode by a SIGTERM."""
    stopped = train_row(ROWS["line plain"], 1, tmp_path, {}, FAULT=signal, RANK_AT_FAULT="0", STEP="9")
    assert stopped.code == 130 and max(checkpoints(stopped)) == 9, stopped.stderr
    assert stopped.stderr.count("stopping: this step, then a checkpoint; a second signal") == 1


TWO_SIGNALS = """
import os, signal, sys, types
from line_trial import *
from deepspeed_trial import stops as signals
times = iter(map(float, sys.argv[3:]))

class Trial(LineTrial):
    def train_batch(self, *arguments):
        if len(self.places) == 4:  # the first micro-batch of step 3
            signals.time = types.SimpleNamespace(monotonic=times.__next__)
            os.kill(os.getpid(), signal.Signals[sys.argv.pop(2)])
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_batch(*arguments)

_, done = fit(pathlib.Path(sys.argv[1]), Trial)
sys.exit(0 if done.interrupted and done.steps == 3 else 1)
"""


@pytest.mark.parametrize(
    ("first", "second", "code"), [("SIGTERM", 5.9, 0), ("SIGTERM", 6.1, -15), ("SIGUSR1", 6.1, 0)]
)
def test_a_second_signal_ends_a_run_at_once_a_second_later(tmp_path, first, second, code):
    """A launcher may pass one signal on several times; SLURM sends a SIGTERM after its SIGUSR1."""
    times = [str(second)] if first == "SIGUSR1" else ["5", str(second)]
    done = run(["-c", TWO_SIGNALS, str(tmp_path), first, *times], tmp_path)
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
        wait_until(lambda: list(tmp_path.glob("checkpoints/*/metadata.json")), first)
        second = run([*command, *LATEST], tmp_path)
        assert second.code == 2 and "another run is writing there" in second.stderr
        assert first.poll() is None


def test_ranks_stop_long_before_the_next_report(tmp_path):
    arguments = [*ENDLESS, *overrides(scheduling_unit=10**6), "--output", str(tmp_path)]
    with started(["train.py", *arguments], processes=2) as program:
        wait_until(lambda: "  step " in program.stdout, program)
        rank = psutil.Process(program.pid).children()[-1]
        rank.send_signal(signal.SIGTERM)
        assert program.wait(time_limit()) == 130, program.stderr
    assert list(checkpoints(Run(0, "", "", tmp_path)))


def end_of_launcher(launcher, said, output):
    """Kill a launcher, wait for the end of its ranks, and return the steps of the checkpoint."""
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    psutil.Process(launcher.pid).kill()
    wait_until(lambda: not any(map(is_alive, ranks)))
    assert said().count("has ended; stopping") == 1 and "Traceback" not in said()
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
    row = [*support.launcher(by, 2), "train.py", *ENDLESS, "--output", str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(row, cwd=support.PROJECT, stdout=log, stderr=log)
    said = (tmp_path / "log").read_text
    wait_until(lambda: "step 10/" in said())
    steps = end_of_launcher(process, said, tmp_path) + 1
    process.wait(time_limit())
    more = overrides(hyperparameters__max_length=f"{{batches: {steps}}}")
    resumed = support.execute([*row, *more, *LATEST], tmp_path)
    assert resumed.code == 0, resumed.stderr
    assert resumed.summary["steps"] == steps


def test_a_killed_run_resumes_to_the_same_bits(runs, tmp_path):
    """A SIGKILL ends rank 1 in step 4; the resumed run dies as a whole within its next checkpoint."""
    row, period = ROWS["zero2"], overrides(min_checkpoint_period="{batches: 2}")
    row = dataclasses.replace(row, arguments=(*row.arguments, *period))
    killed = train_row(row, 2, tmp_path, {}, FAULT="SIGKILL", RANK_AT_FAULT="1", STEP="4")
    assert killed.code != 0
    assert re.search(r"^train.py: rank 1 \(.*--resume latest", killed.stderr, re.MULTILINE), killed.stderr
    assert list(checkpoints(killed)) == [2]
    command = ["tests/faulty.py", *row.arguments, *LATEST, "--output", str(tmp_path)]
    with started(command, processes=2, FAULT="save", RANK_AT_FAULT="0") as program:
        wait_until(lambda: list(tmp_path.glob("checkpoints/.partial*/identity.json")), program)
    assert list(checkpoints(killed)) == [2]
    resumed, straight = train_row(row, 2, tmp_path, {}, (*LATEST,)), runs.straight("zero2", 2)
    assert resumed.code == 0, resumed.stderr
    assert resumed.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert not list(tmp_path.glob("checkpoints/.partial*"))


KILLS = 12


@pytest.mark.soak
def test_sigkill_at_any_moment_loses_nothing(tmp_path):
    """One rank of two dies again and again, while a checkpoint is written or not; each rest resumes."""
    length = overrides(hyperparameters__max_length="{batches: 500}", min_checkpoint_period="{batches: 4}")
    row, output, choose = [*DIGITS, *length], tmp_path / "killed", random.Random(0)
    (straight,) = support.train_many(tmp_path, {"straight": row}, 2).values()
    assert straight.code == 0, straight.stderr
    command = ["train.py", *row, "--output", str(output), "--resume", "auto"]
    for _ in range(KILLS):
        with started(command, processes=2) as program:
            ranks = wait_for_checkpoint(program, output)
            time.sleep(choose.uniform(0, 0.4))
            victim = choose.choice(ranks)
            assert victim.is_running(), "the run ended before it could be killed; make it longer"
            victim.kill()
            assert program.wait(time_limit()) != 0
            _, alive = psutil.wait_procs(ranks, timeout=time_limit())
            assert not alive, "a rank hangs"
    last = run(command, output, processes=2)
    assert last.code == 0, last.stderr
    assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert not list(output.glob("checkpoints/.partial*"))


HOPELESS = json.dumps({"enabled": True, "hysteresis": 1, "initial_scale_power": 32, "min_loss_scale": 2**31})
BURST = {
    "hyperparameters__max_length": "{batches: 60}",
    "min_checkpoint_period": "{batches: 2}",
    f"{DEEPSPEED}optimizer": "{type: SGD, params: {lr: 9.0e+5, momentum: 0.99}}",
    f"{DEEPSPEED}scheduler": "{type: WarmupLR, params: {warmup_num_steps: 40, warmup_type: linear}}",
    f"{DEEPSPEED}gradient_clipping": 0,
}
CHANGES: dict[str, dict[str, Any]] = {
    "nan": BURST,
    "skips": {f"{DEEPSPEED}fp16": HOPELESS},
    "least": {f"{DEEPSPEED}fp16": HOPELESS, f"{DEEPSPEED}zero_optimization__stage": 1},
}


def test_a_loss_that_is_no_number_ends_the_training(tmp_path):
    """The line has the step, the learning rate and the checkpoint before; fp16 may skip 64 steps to scale down."""
    runs = support.train_many(
        tmp_path, {name: [*DIGITS, *overrides(**each)] for name, each in CHANGES.items()}
    )
    for ended in (
        *runs.values(),
        *support.train_many(tmp_path / "two", {"nan": [*DIGITS, *overrides(**BURST)]}, 2).values(),
    ):
        errors = [line for line in ended.stderr.splitlines() if ": note: " not in line]
        assert ended.code == 1 and len(errors) == 1, ended.stderr
    nan = runs["nan"]
    bad = [entry for entry in nan.metrics if not math.isfinite(entry["loss"])]
    ((good, folder),) = checkpoints(nan).items()
    step = int(
        re.findall(r"the loss has been (?:nan|inf) since step (\d+) \(learning rate \d+\)", nan.stderr)[0]
    )
    assert good in (step - 1, step - 2) and bad[0]["steps_completed"] >= step
    assert f"the last good checkpoint is {folder.name}" in nan.stderr
    assert net_file.of_checkpoint(folder)["fc3.weight"].isfinite().all()
    assert "no gradient has been finite since step 1 (learning rate 0" in runs["skips"].stderr
    assert "overflow at the minimum loss scale in step 2 (learning rate 0" in runs["least"].stderr
    assert "no checkpoint was saved" in runs["least"].stderr

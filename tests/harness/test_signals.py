"""Runs that are stopped by a signal, or at a length, and go on."""

import json
import signal
import subprocess
import time

import psutil
import pytest
from support import DIGITS, LATEST, PROJECT, TIME_LIMIT, execute, launcher, overrides

from harness.machine import is_alive

SHORT = overrides(hyperparameters__max_length="{epochs: 2}", min_validation_period="{epochs: 1}")


def test_resume_gives_the_same_weights(train):
    """Stopping after 20 of 90 steps and going on, with two micro-batches a step, changes no bit."""
    accumulate = overrides(hyperparameters__overwrite_deepspeed_args__gradient_accumulation_steps=2)
    straight = train(*DIGITS, *SHORT, *accumulate)
    part = train(*DIGITS, *accumulate, *overrides(hyperparameters__max_length="{batches: 20}"))
    assert part.code == 0, part.stderr
    rest = train(*DIGITS, *SHORT, *accumulate, "--resume", "latest", output=part.output)
    assert rest.code == 0, rest.stderr
    assert rest.summary["steps"] == 90
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert rest.summary["validation"] == straight.summary["validation"]


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_saves_a_checkpoint_to_go_on_from(tmp_path, processes, number):
    """The rank that gets the signal tells the others, and what is resumed ends on the straight run's weights."""
    long = [*DIGITS, *overrides(hyperparameters__max_length="{batches: 200}", scheduling_unit=10)]
    row = [*launcher("python" if processes == 1 else "torchrun", processes), "train.py", *long, "--output"]
    straight = execute([*row, str(tmp_path / "straight")], tmp_path / "straight")
    assert straight.code == 0, straight.stderr
    process = subprocess.Popen([*row, str(tmp_path / "run")], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 30/" in line:
            workers = psutil.Process(process.pid).children() if processes > 1 else [process]
            workers[-1].send_signal(number)
    code = process.wait(TIME_LIMIT)
    assert code == 130 if processes == 1 else code != 0
    metadata = [
        json.loads(path.read_text()) for path in (tmp_path / "run").glob("checkpoints/*/metadata.json")
    ]
    assert len(metadata) == 1 and 30 <= metadata[0]["steps_completed"] < 200
    rest = execute([*row, str(tmp_path / "run"), "--resume", "latest"], tmp_path / "run")
    assert rest.code == 0, rest.stderr
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]


@pytest.mark.parametrize("by", ["torchrun", "deepspeed"])
def test_ranks_whose_launcher_is_killed_stop_with_a_checkpoint(tmp_path, by):
    """All processes end, and the same command, with the same port, goes on."""
    row = [*launcher(by, 2), "train.py", *DIGITS, *overrides(scheduling_unit=10)]
    output = tmp_path / "run"
    long = [*row, *overrides(hyperparameters__max_length="{batches: 100000}"), "--output", str(output)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(long, cwd=PROJECT, stdout=log, stderr=log)
    begun = time.monotonic()
    while "step 10/" not in (tmp_path / "log").read_text():
        assert process.poll() is None and time.monotonic() - begun < TIME_LIMIT
        time.sleep(0.1)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    while any(is_alive(each) for each in ranks):
        assert time.monotonic() - begun < TIME_LIMIT
        time.sleep(0.1)
    shown = (tmp_path / "log").read_text()
    assert shown.count("is gone") == 1 and "Traceback" not in shown
    (metadata,) = output.glob("checkpoints/*/metadata.json")
    steps = json.loads(metadata.read_text())["steps_completed"] + 1
    rest = [*row, *overrides(hyperparameters__max_length=f"{{batches: {steps}}}"), "--output", str(output)]
    run = execute([*rest, *LATEST], output)
    assert run.code == 0, run.stderr
    assert run.summary["steps"] == steps

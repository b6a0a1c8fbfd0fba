"""What a run without a cluster shows while it trains."""

import io
import pathlib
import subprocess
import sys

import pytest
import torch
from support import PROJECT, TIME_LIMIT

from harness.experiment import Experiment
from harness.local import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_steps_have_epoch_and_loss_without_a_report(tmp_path, monkeypatch, terminal):
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    metrics = progress.LocalMetrics(tmp_path, Experiment({}, {}))
    metrics.begin(steps=90, steps_per_epoch=45, done=44)
    monkeypatch.setitem(progress.SHOWN_EVERY, terminal, 0.0)
    for step in (45, 46):
        metrics.step(step, {"loss": torch.tensor(step / 4), "learning_rate": 0.001})
    metrics.close()
    if terminal:
        assert out.getvalue() == ""
        shown = err.getvalue().split("\r")
        assert all(text.startswith("epoch ") for text in shown if text.strip())
        assert "epoch 1/2: " in shown[-3] and "45/90 steps" in shown[-3] and "loss=11.2500" in shown[-3]
        assert "epoch 2/2: " in shown[-1] and "46/90 steps" in shown[-1] and "loss=11.5000" in shown[-1]
    else:
        assert err.getvalue() == ""
        lines = [f"epoch {epoch}/2  step {step}/90  loss {loss}  lr 0.001\n" for epoch, step, loss in LINES]
        assert out.getvalue() == "".join(lines)


LINES = [(1, 45, "11.2500"), (2, 46, "11.5000")]


@pytest.mark.parametrize(("threads", "waited", "says"), [(2, 8.0, True), (2, 0.5, False), (1, 8.0, False)])
def test_threads_that_wait_for_cores_are_told_once(tmp_path, monkeypatch, capsys, threads, waited, says):
    """In 10 seconds of watching, twice."""
    metrics = progress.LocalMetrics(tmp_path, Experiment({}, {}))
    metrics.begin(steps=90, steps_per_epoch=45, done=0)
    monkeypatch.setattr(progress.torch, "get_num_threads", lambda: threads)
    for step in (1, 2):
        now, so_far = metrics._watched_since or (0.0, 0.0)
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now + 10)
        monkeypatch.setattr(progress.machine, "waited_for_cores", lambda so_far=so_far: so_far + waited)
        metrics.report_training_metrics(step, {"loss": 1.0})
    err = capsys.readouterr().err
    assert err.count("\n") == says and ("had no core for 40% of the time; OMP_NUM_THREADS=1" in err) == says


def test_a_thread_without_a_core_is_counted():
    """One process for each core and one more: some wait."""
    if not pathlib.Path("/proc/self/schedstat").exists():
        pytest.skip("not on Linux")
    script = (
        "import os, time; from harness.machine import waited_for_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); child = os.fork(); begun = time.monotonic()\n"
        "while time.monotonic() < begun + 1: pass\n"
        "if not child: os._exit(0)\n"
        "os.wait(); assert waited_for_cores() > 0.1, waited_for_cores()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, timeout=TIME_LIMIT)

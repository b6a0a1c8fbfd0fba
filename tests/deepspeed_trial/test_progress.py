"""The display of a training without a cluster."""

import io
import os
import pathlib
import sys
import time

import pytest
import torch
from support import all_at_once

from deepspeed_trial import machine
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.local import progress
from deepspeed_trial.plan import Plan
from deepspeed_trial.time_budget import TimeBudget, Work


class Terminal(io.StringIO):
    def isatty(self):
        return True


def begun(folder, done, **config):
    metrics = progress.LocalMetrics(folder, Experiment(config, {}))
    metrics.begin(90, 45, done, Work(validation_period=45, validation_steps=10.0, test_share=0.5))
    return metrics


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_steps_have_epoch_and_loss_without_a_report(tmp_path, monkeypatch, terminal):
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setitem(progress.SHOWN_EVERY, terminal, 0.0)
    metrics = begun(tmp_path, 44)
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
        first, second = out.getvalue().splitlines()
        assert first == "epoch 1/2  step 45/90  loss 11.2500  lr 0.001"
        assert second == "epoch 2/2  step 46/90  loss 11.5000  lr 0.001"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_chosen_metric_is_of_the_validation_alone(tmp_path, monkeypatch, terminal):
    """The bar names the validation; lines of the training lack the metric."""
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    chosen = {"metric": "accuracy/cat", "smaller_is_better": False}
    metrics = begun(tmp_path, 0, searcher=chosen)
    metrics.report_validation_metrics(
        1, {"loss": 1.0, "accuracy": 0.5, "accuracy/cat": 0.25, "accuracy/dog": 0.75}
    )
    metrics.report_training_metrics(2, {"loss": 0.5})
    metrics.close()
    validation, *rest = out.getvalue().splitlines()
    assert validation == "epoch 1/2  step 1/90  validation  accuracy/cat 0.25  loss 1.0000  accuracy 0.5000"
    assert rest == ([] if terminal else ["epoch 1/2  step 2/90  loss 0.5000"])
    assert ("loss=0.5000, validation accuracy/cat=0.25]" in err.getvalue()) == terminal


@pytest.mark.parametrize(("threads", "waited", "says"), [(2, 8.0, True), (2, 0.5, False), (1, 8.0, False)])
def test_a_note_says_once_that_threads_wait_for_cores(tmp_path, monkeypatch, capsys, threads, waited, says):
    """The progress watches the threads for 10 seconds, twice."""
    metrics = begun(tmp_path, 0)
    monkeypatch.setattr(progress.torch, "get_num_threads", lambda: threads)
    for step in (1, 2):
        now, so_far = metrics._watched_since or (0.0, 0.0)
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now + 10)
        monkeypatch.setattr(progress.machine, "waited_for_cores", lambda so_far=so_far: so_far + waited)
        metrics.report_training_metrics(step, {"loss": 1.0})
    err = capsys.readouterr().err
    assert err.count("\n") == says and ("had no core for 40% of the time; OMP_NUM_THREADS=1" in err) == says


def test_one_line_forecasts_the_time_left_by_the_steps_alone(tmp_path, monkeypatch, capsys):
    """The first step takes 60 s, the others 4 s; a validation takes 30 s, or as long as 10 steps if none has ended."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def forecasts(done, *events):
        metrics = begun(tmp_path, done)
        for seconds, event, step in events:
            metrics.set_status(event)
            now[0] += seconds
            if event != "checkpointing":
                getattr(metrics, f"report_{event}_metrics")(step, {"loss": 1.0})
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("time: ")]

    steps = [(60, "training", 1), (8, "training", 3), (4, "training", 4), (4, "training", 5)]
    # 86 steps, 2 validations and a test of half a validation: 444 s
    assert forecasts(0, *steps) == ["time: about 7 minutes left: 86 steps, 2 validations"]
    around = [(60, "training", 44), (4, "training", 45), (30, "validation", 45), (90, "checkpointing", 45)]
    around += [(8, "training", 47)]
    assert forecasts(43, *around) == ["time: about 4 minutes left: 43 steps, 1 validation"]
    assert not forecasts(0, *steps[:2])  # too few steps
    assert not forecasts(0, (1, "training", 1), (0.1, "training", 80))  # too little time


def test_a_length_in_minutes_needs_no_forecast(tmp_path, monkeypatch, capsys):
    metrics = progress.LocalMetrics(tmp_path, Experiment({}, {}))
    metrics.begin(90, 45, 0, Work(), TimeBudget(15, Plan()))
    for step in (1, 10, 20):
        now = progress.time.monotonic()
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: now + 100)
        metrics.report_training_metrics(step, {"loss": 1.0})
    assert "time: " not in capsys.readouterr().out


@pytest.mark.skipif(not pathlib.Path("/proc/self/schedstat").exists(), reason="not on Linux")
def test_a_thread_without_a_core_counts():
    """Two processes share one core for a second."""

    def compute():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        before, end = machine.waited_for_cores(), time.monotonic() + 1
        while time.monotonic() < end:
            pass
        assert machine.waited_for_cores() - before > 0.1

    all_at_once(compute, compute)

"""What a run without a cluster shows while it trains."""

import io
import sys

import pytest
import torch

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

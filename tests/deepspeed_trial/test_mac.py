"""A Mac's GPU, which ``tests/mac.py`` plays: the choice of the device, a training and its resume, refusals."""

import sys

import pytest
from support import DIGITS, LATEST, PROJECT, error_line, execute, overrides

from classify.config import experiment_file
from classify.engine.trial_config import TrialConfig
from deepspeed_trial import processes

DEVICE = """
import mac, deepspeed_trial.processes
from deepspeed.accelerator import get_accelerator
print(get_accelerator().device_name(), deepspeed_trial.processes.device_type())
"""
DEEPSPEED = "hyperparameters__overwrite_deepspeed_args__"


@pytest.fixture(autouse=True)
def has_no_other_gpu(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # this process chose the CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("variables", "device"),
    [({}, "mps"), ({"DS_ACCELERATOR": "cpu"}, "cpu"), ({"WORLD_SIZE": "2"}, "cpu")],
)
def test_a_mac_trains_on_its_gpu_in_one_process_unless_the_user_chose_the_cpu(tmp_path, variables, device):
    path = f"{PROJECT}:{PROJECT / 'tests'}"
    found = execute([sys.executable, "-c", DEVICE], tmp_path, PYTHONPATH=path, **variables)
    assert found.stdout.split() == [device, device], found.stderr


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), *(pytest.param(stage, "bf16", marks=pytest.mark.soak) for stage in range(4))],
)
def test_a_training_on_a_mac_s_gpu_resumes_without_a_tensor_in_the_wrong_place(tmp_path, stage, precision):
    output = tmp_path / "run"
    chosen = {f"{DEEPSPEED}zero_optimization__stage": stage, f"{DEEPSPEED}bf16__enabled": precision == "bf16"}
    for batches in (2, 3):
        settings = overrides(hyperparameters__max_length=f"{{batches: {batches}}}", **chosen)
        command = ["tests/mac.py", "train.py", *DIGITS, *settings, "--output", str(output)]
        done = execute([sys.executable, *command, *(LATEST if batches == 3 else [])], output)
        assert done.code == 0 and "1 process on mps" in done.stdout, done.stderr
        assert "random numbers will differ" not in done.stderr
    assert done.summary["steps"] == 3


def test_what_a_mac_s_gpu_cannot_do_is_one_line(monkeypatch):
    offload = "{stage: 2, offload_optimizer: {device: cpu}}"
    changes = overrides(**{f"{DEEPSPEED}zero_optimization": offload})[1::2]
    experiment = experiment_file.load("experiments/digits.yaml", changes)
    line = error_line(TrialConfig.resolve, experiment.hyperparameters, experiment.config, 1, "mps")
    assert line.startswith("zero_optimization.offload_optimizer: a Mac's GPU shares")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "device_type", lambda: "mps")
    line = error_line(processes._take_gpu)
    assert line == "--nproc-per-node: 2: a Mac's GPU trains in one process; use 1, or set DS_ACCELERATOR=cpu"

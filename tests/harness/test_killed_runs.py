"""Runs whose processes are killed, or whose loss is not finite: what is left is whole."""

import json
import math
import random
import re
import signal
import subprocess
import sys
import time

import psutil
import torch
from modes import DEEPSPEED, losses
from support import (
    DIGITS,
    LATEST,
    MODEL,
    PROJECT,
    TIME_LIMIT,
    checkpoints,
    execute,
    launcher,
    overrides,
    train_many,
    wait_for_checkpoint,
)

LONG = [
    *DIGITS,
    *overrides(hyperparameters__max_length="{batches: 160}", min_checkpoint_period="{batches: 4}"),
]


KILLS = 3


def test_sigkill_at_any_moment_loses_nothing(tmp_path):
    """One rank of two is killed again and again, checkpoints being written or not; what is left always goes on."""
    torchrun = [*launcher("torchrun", 2), "train.py", *LONG, "--output"]
    straight = execute([*torchrun, str(tmp_path / "straight")], tmp_path / "straight")
    assert straight.code == 0, straight.stderr
    output, choose = tmp_path / "killed", random.Random(0)
    killed = 0
    while killed < KILLS:
        resume = LATEST if list(output.glob("checkpoints/*/metadata.json")) else []
        command = [*launcher("torchrun", 2), "train.py", *LONG, "--output", str(output), *resume]
        process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE)
        family = wait_for_checkpoint(process, output)
        time.sleep(choose.uniform(0, 0.4))
        victim = choose.choice(family)
        assert victim.is_running(), "the run ended before it could be killed; make it longer"
        victim.kill()
        killed += 1
        assert process.wait(TIME_LIMIT) != 0
        _, alive = psutil.wait_procs(family, timeout=TIME_LIMIT)
        assert not alive, "a rank hangs"
    last = execute([*torchrun, str(output), *LATEST], output)
    assert last.code == 0, last.stderr
    assert last.summary["weights_sha256"] == straight.summary["weights_sha256"]
    assert not list(output.glob("checkpoints/.partial*"))


METADATA = "metadata.json"


def test_a_loss_that_is_no_number_ends_the_training(tmp_path):
    """It names the step, the learning rate and the checkpoint from before; fp16 may skip steps while it scales down."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    hopeless = {**fp16, "initial_scale_power": 32, "min_loss_scale": 2**31}
    burst = {
        f"{DEEPSPEED}optimizer": "{type: SGD, params: {lr: 9.0e+5, momentum: 0.99}}",
        f"{DEEPSPEED}scheduler": "{type: WarmupLR, params: {warmup_num_steps: 40, warmup_type: linear}}",
        f"{DEEPSPEED}gradient_clipping": 0,
    }
    short = overrides(hyperparameters__max_length="{batches: 60}", min_checkpoint_period="{batches: 2}")
    rows = {
        "nan": [*DIGITS, *short, *overrides(**burst)],
        "fp16": [*DIGITS, *short, *overrides(**{f"{DEEPSPEED}fp16": json.dumps(fp16)})],
        "skips": [*DIGITS, *overrides(**{f"{DEEPSPEED}fp16": json.dumps(hopeless)})],
        "least scale": [
            *DIGITS,
            *overrides(
                **{f"{DEEPSPEED}fp16": json.dumps(hopeless), f"{DEEPSPEED}zero_optimization__stage": 1}
            ),
        ],
    }
    runs = train_many(tmp_path, rows)
    assert runs["fp16"].code == 0, runs["fp16"].stderr
    assert losses(runs["fp16"])[-1] < 1  # as in fp32, once the first steps are skipped
    nan, skips, least = runs["nan"], runs["skips"], runs["least scale"]
    for run in (nan, skips, least):
        assert run.code == 1, run.stderr
        assert len(run.stderr.splitlines()) == 1, run.stderr
    bad = [entry for entry in nan.metrics if not math.isfinite(entry["loss"])]
    ((good, folder),) = checkpoints(nan).items()
    step = int(re.findall(r"the loss is (?:nan|inf) since step (\d+) \(learning rate \d+\)", nan.stderr)[0])
    assert good in (step - 1, step - 2) and bad[0]["steps_completed"] >= step
    assert f"the last good checkpoint is {folder.name}" in nan.stderr
    assert torch.load(folder / MODEL, weights_only=True)["module"]["fc3.weight"].isfinite().all()
    assert "no gradient is finite since step 1 (learning rate 0" in skips.stderr
    assert "overflow at the least loss scale in step 2 (learning rate 0" in least.stderr
    assert "no checkpoint was saved" in least.stderr


def test_a_run_keeps_others_out_of_its_folder(tmp_path):
    endless = overrides(hyperparameters__max_length="{epochs: 999}")
    command = [sys.executable, "train.py", *LONG, *endless, "--output", str(tmp_path / "run")]
    first = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE)
    wait_for_checkpoint(first, tmp_path / "run")
    second = execute(command, tmp_path / "run")
    first.send_signal(signal.SIGTERM)
    assert first.wait(TIME_LIMIT) == 130
    assert second.code == 2
    assert "another run is writing there" in second.stderr

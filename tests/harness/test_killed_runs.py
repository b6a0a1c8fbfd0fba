"""Runs that are killed, or whose loss is not finite: their last checkpoint is whole."""

import dataclasses
import json
import math
import random
import re
import time
from typing import Any

import psutil
import pytest
import torch
from matrix import DEEPSPEED, ROWS
from matrix import train as train_row
from support import (
    DIGITS,
    LATEST,
    MODEL,
    checkpoints,
    overrides,
    run,
    started,
    time_limit,
    train_many,
    wait_for_checkpoint,
    wait_until,
)


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


KILLS = 20


@pytest.mark.soak
def test_sigkill_at_any_moment_loses_nothing(tmp_path):
    """One rank of two dies again and again, while a checkpoint is written or not; each rest resumes."""
    length = overrides(hyperparameters__max_length="{batches: 500}", min_checkpoint_period="{batches: 4}")
    row, output, choose = [*DIGITS, *length], tmp_path / "killed", random.Random(0)
    (straight,) = train_many(tmp_path, {"straight": row}, 2).values()
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
    runs = train_many(tmp_path, {name: [*DIGITS, *overrides(**each)] for name, each in CHANGES.items()})
    for ended in runs.values():
        assert ended.code == 1 and len(ended.stderr.splitlines()) == 1, ended.stderr
    nan = runs["nan"]
    bad = [entry for entry in nan.metrics if not math.isfinite(entry["loss"])]
    ((good, folder),) = checkpoints(nan).items()
    step = int(re.findall(r"the loss is (?:nan|inf) since step (\d+) \(learning rate \d+\)", nan.stderr)[0])
    assert good in (step - 1, step - 2) and bad[0]["steps_completed"] >= step
    assert f"the last good checkpoint is {folder.name}" in nan.stderr
    assert torch.load(folder / MODEL, weights_only=True)["module"]["fc3.weight"].isfinite().all()
    assert "no gradient is finite since step 1 (learning rate 0" in runs["skips"].stderr
    assert "overflow at the least loss scale in step 2 (learning rate 0" in runs["least"].stderr
    assert "no checkpoint was saved" in runs["least"].stderr

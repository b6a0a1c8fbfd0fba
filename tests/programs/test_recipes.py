"""The recipes of ``experiments/`` against a bare PyTorch loop, and the tables of their results."""

import json
from typing import Any

import pytest
from matrix import DEEPSPEED
from support import losses, overrides, run

from benchmarks import recipes
from deepspeed_trial import machine

STEPS = 30
SMALL = ["--config", "experiments/cifar10-90.yaml"]
SMALL += overrides(
    data="{dataset: digits, image_size: 24, normalize: dataset, augment: {crop: 2, edge: reflection}}",
    hyperparameters__net_args__width=4,
    hyperparameters__max_length=f"{{batches: {STEPS}}}",
    hyperparameters__progressive_resizing="{scale: 0.75, until: 0.5}",
    scheduling_unit=1,
    **{
        f"{DEEPSPEED}train_batch_size": 64,
        f"{DEEPSPEED}torch_autocast": "null",
    },  # rounding would grow in bf16
)


def test_the_trial_has_the_losses_of_the_bare_loop(tmp_path):
    """Both have the same network, images, Muon and schedule. The matrix compares stages and processes."""
    trial = run(["train.py", *SMALL, "--output", str(tmp_path)], tmp_path)
    assert trial.code == 0, trial.stderr
    plain = run(["-m", "benchmarks.bare_recipe", *SMALL], tmp_path)
    assert plain.code == 0, plain.stderr
    bare = json.loads(plain.stdout)[:STEPS]
    assert len(bare) == STEPS and bare[-1] < 0.9 * bare[0]
    assert losses(trial) == pytest.approx(bare, rel=1e-6)


def test_the_table_has_every_measured_recipe(tmp_path):
    where = {"cores": 2, "processor": "P", "python": "3", **dict.fromkeys(machine.PACKAGES, "1")}
    for seed, accuracy in enumerate((0.5, 0.7)):
        validation = {"accuracy_tta": accuracy, "accuracy": accuracy - 0.1}
        run = {"seed": seed, "whole": 30, "seconds": 20, "validation": validation, "machine": where}
        (tmp_path / f"one-seed{seed}.json").write_text(json.dumps(run))
    speed: dict[str, Any] = {"trial": 200, "recipe": 190, "ratio": 1.05, "peak": 4e12}
    speed |= {"operations": 1e10, "what": "width 1"}
    (tmp_path / "one-speed.json").write_text(json.dumps(speed))
    (row,) = [line for line in recipes.lines(recipes.read(tmp_path)) if line.startswith("| `one.yaml`")]
    expected = "`one.yaml`: width 1 | 0 1 | 60.00% (50.00% to 70.00%) | 50.00% (40.00% to 60.00%) | 20 | 30"
    expected += " | 1.050 | 2000, 50% of a bf16 matrix product's"
    assert [cell.strip() for cell in row.split("|")[1:-1]] == expected.split(" | ")

"""The recipes of ``experiments/``: those of their bare PyTorch loop, at every ZeRO stage, in one process and two."""

import json
from typing import Any

import pytest
from modes import DEEPSPEED, losses
from support import INSTRUCTIONS, LATEST, Run, execute, launcher, overrides, train_many

from benchmarks import recipes, report
from harness import machine

RECIPE = ["--config", "experiments/cifar10-90.yaml"]
SMALL = overrides(
    data="{dataset: digits, image_size: 24, normalize: dataset, augment: {crop: 2, edge: reflection}}",
    hyperparameters__net_args__width=4,
    hyperparameters__max_length="{batches: 100}",
    hyperparameters__progressive_resizing="{scale: 0.75, until: 0.5}",
    scheduling_unit=1,
    **{f"{DEEPSPEED}train_batch_size": 64, f"{DEEPSPEED}torch_autocast": "null"},  # or rounding would grow
)
AUTOCAST = overrides(**{f"{DEEPSPEED}torch_autocast": "{enabled: true, dtype: bfloat16}"})
# Of the same net as airbench94 trains it: https://github.com/KellerJordan/cifar10-airbench
SGD = overrides(
    hyperparameters__parameter_groups="[{match: bias, lr_factor: 64, weight_decay: 0}]",
    hyperparameters__weight_decay_on="all",
    **{
        f"{DEEPSPEED}optimizer": "{type: SGD, params: {lr: 0.03, momentum: 0.85, nesterov: true, weight_decay: 0.001}}"
    },
)


@pytest.mark.parametrize("instructions", ["", "AVX2"])
def test_the_trial_gives_the_bare_loops_losses(tmp_path, instructions):
    """Of the same network, images, Muon and schedule."""
    environment = INSTRUCTIONS.get(instructions, {})
    run = train_many(tmp_path, {"trial": [*RECIPE, *SMALL]}, environment=environment)["trial"]
    assert run.code == 0, run.stderr
    command = [*launcher("python", 1), "-m", "benchmarks.bare_recipe", *RECIPE, *SMALL]
    plain = execute(command, tmp_path / "plain", **environment)
    bare = json.loads(plain.stdout)
    assert len(bare) == 100 and bare[-1] < 0.7 * bare[0]
    assert losses(run) == pytest.approx(bare, rel=1e-6)


@pytest.mark.parametrize("optimizer", [[], SGD], ids=["Muon", "SGD"])
def test_every_stage_and_number_of_processes_learns_alike(tmp_path, optimizer):
    """Two ranks normalise the micro-batches that one process accumulates."""
    length = overrides(hyperparameters__max_length="{batches: 30}")
    found: dict[str, Run] = {}
    for processes in (1, 2):
        rows = {
            f"zero{stage} in {processes}": [
                *RECIPE,
                *SMALL,
                *optimizer,
                *length,
                *overrides(
                    **{
                        f"{DEEPSPEED}zero_optimization__stage": stage,
                        f"{DEEPSPEED}gradient_accumulation_steps": 3 - processes,
                    }
                ),
            ]
            for stage in range(4)
        }
        found |= train_many(tmp_path, rows, processes)
    for name, run in found.items():
        assert run.code == 0, f"{name}: {run.stderr}"
        assert losses(run) == pytest.approx(losses(found["zero0 in 1"]), rel=1e-4), name
    assert losses(run)[-1] < losses(run)[0] - 0.1


def test_a_recipe_resumes_to_the_same_bits(tmp_path):
    """In bf16 by autocast, in the midst of the smaller images."""
    rows = {"recipe": [*RECIPE, *SMALL, *AUTOCAST, *overrides(hyperparameters__max_length="{batches: 30}")]}
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight = train_many(tmp_path / "straight", rows)["recipe"]
    stopped = train_many(tmp_path / "stopped", rows, sigterm_at=11)["recipe"]
    assert (straight.code, stopped.code) == (0, 130), straight.stderr
    resumed = train_many(tmp_path / "stopped", {"recipe": [*rows["recipe"], *LATEST]})["recipe"]
    assert resumed.code == 0, resumed.stderr
    assert losses(resumed) == losses(straight)
    assert resumed.summary["validation"] == straight.summary["validation"]
    assert resumed.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_the_table_has_every_recipe_that_was_ever_measured(tmp_path):
    where = {"cores": 2, "processor": "P", "python": "3", **dict.fromkeys(machine.PACKAGES, "1")}
    for seed, accuracy in enumerate((0.5, 0.7)):
        validation = {"accuracy_tta": accuracy, "accuracy": accuracy - 0.1}
        run = {"seed": seed, "whole": 30, "seconds": 20, "validation": validation, "machine": where}
        (tmp_path / f"one-seed{seed}.json").write_text(json.dumps(run))
    speed: dict[str, Any] = {"trial": 200, "recipe": 190, "full": 50, "ratio": 1.05, "peak": 4e12}
    speed |= {"operations": 1e10, "images": 500, "what": "width 1"}
    (tmp_path / "one-speed.json").write_text(json.dumps(speed))
    (row,) = [line for line in recipes.lines(recipes.read(tmp_path)) if line.startswith("| `one.yaml`")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == [
        "`one.yaml`: width 1",
        "0 1",
        "60.00% (50.00% to 70.00%)",
        "50.00% (40.00% to 60.00%)",
        "20",
        "30",
        "2.0 of 10 s",
        "1.050",
        "2000, 50% of an fp32 matrix product's",
    ]


def test_a_section_of_the_results_replaces_its_older_self_alone(tmp_path):
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n\nFirst.\n\n## One\n\n1\n\n## Two\n\n2\n")
    report.put_section(file, "One", "one\n")
    report.put_section(file, "Three", "3")
    assert file.read_text() == "# Results\n\nFirst.\n\n## One\n\none\n\n## Two\n\n2\n\n## Three\n\n3\n"

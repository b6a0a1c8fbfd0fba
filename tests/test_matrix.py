"""Promises of every training, tested on every row of the matrix."""

import contextlib
import io
import json
import math
import pathlib
from typing import Any

import pytest
import torch
from matrix import ROWS, Row, Runs
from support import DIGITS, PROJECT, Run, checkpoints, losses, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import checkpoint
from classify.models import state_dicts

TRAINED = {name: row for name, row in ROWS.items() if row.program == "train.py"}
OF_FILES = ("{photos}", "{shards}")
IMAGES = {name: (29, 48) if name == "photos" or "{table}" in str(row) else (48, None) if any(file in str(row) for file in OF_FILES) else (360, None)
          for name, row in TRAINED.items()}  # fmt: skip
# Lines on stderr: of a folder's cache, Determined's of uneven batches, and the advice of ZeRO 0 for one process
ADVICE = "train.py: note: zero_optimization.stage: "
NOTES = ("144 images of", "48 images of", "Validation batch size inconsistent", ADVICE)
SCALARS = {
    "loss/train", "loss/validation", "accuracy/validation", "learning_rate", "gradient_norm", "loss_scale", "images_per_second",
}  # fmt: skip


def each(rows: dict[str, Row], most: bool = False) -> pytest.MarkDecorator:
    """Parametrise by row and ranks, or by row and the most ranks."""
    pairs = [(name, ranks) for name, row in rows.items() for ranks in (row.ranks[-1:] if most else row.ranks)]
    return pytest.mark.parametrize(("name", "ranks"), [trained(name, ranks) for name, ranks in pairs])


def trained(name: str, *more: Any) -> Any:
    """Return a test's parameters: a row's name, and more; a row of the soak marks them so."""
    marks = [pytest.mark.soak] if ROWS[name].soak else []
    return pytest.param(name, *more, marks=marks, id="-".join(map(str, (name, *more))))


def scalars(run, name: str) -> list[float]:
    events = EventAccumulator(str(run.output), size_guidance={"scalars": 0}).Reload()
    return [event.value for event in events.Scalars(name)]


def of_group(run, group: str) -> list[dict]:
    """A run's entries without times and speeds."""
    timed = ("time", "images_per_second", "flops_per_second")
    entries = [entry for entry in run.metrics if entry["group"] == group]
    return [{key: value for key, value in entry.items() if key not in timed} for entry in entries]


def test_every_experiment_has_a_row():
    files = {file.stem for file in PROJECT.glob("experiments/*.yaml")}
    rows = {
        argument.split("/")[1][:-5]
        for row in ROWS.values()
        for argument in row.arguments
        if "experiments/" in argument
    }
    assert {name for name in files if not name.startswith(("search-", "cifar10-", "photos"))} < rows


@each(TRAINED)
def test_trains(runs: Runs, name, ranks):
    row, made = TRAINED[name], runs.straight(name, ranks)
    assert made.code == 0, made.stderr
    assert not [line for line in made.stderr.splitlines() if line and not line.startswith(NOTES)]
    summary = made.summary
    assert (summary["steps"], summary["world_size"]) == (row.steps, ranks)
    assert (summary["zero_stage"], summary["dtype"]) == (row.stage, row.dtype)
    validation, test = IMAGES[name]
    assert summary["validation"]["images"] == validation
    assert summary.get("test", {}).get("images") == test
    assert len(summary["validation"]["per_class_accuracy"]) == (10 if validation == 360 else 4)
    assert len(summary["peak_memory_mib"]) == ranks
    training = of_group(made, "training")
    assert [entry["steps_completed"] for entry in training] == list(range(1, row.steps + 1))
    assert all(math.isfinite(entry["loss"]) and "learning_rate" in entry for entry in training)
    assert ("load_balancing_loss" in training[0]) == ("moe" in name or "experts" in name)
    assert made.validated_at[-1] == row.steps
    assert min(losses(made)[-2:]) < losses(made)[0] or "mixup" in name or "augment" in name
    assert f"accuracy {summary['validation']['accuracy']:.4f}\n" in made.stdout


@each(ROWS)
def test_a_stopped_run_resumes_to_the_same_bits(runs: Runs, name, ranks):
    row, straight, stopped = ROWS[name], runs.straight(name, ranks), runs.stopped(name, ranks)
    assert stopped.code == 130, stopped.stderr
    step = max(checkpoints(stopped))
    assert step == row.stop if ranks == 1 else row.stop <= step <= row.stop + 1
    assert "continue with --resume latest" in stopped.stderr or row.program != "train.py"
    assert not (stopped.output / "summary.json").exists()
    resumed = runs.resumed(name, ranks)
    assert resumed.code == 0, resumed.stderr
    assert losses(resumed) == losses(straight)
    assert len(losses(straight)) == row.steps
    for group in ("training", "validation", "test"):
        assert of_group(resumed, group) == of_group(straight, group)
    for key in ("weights_sha256", "validation", "test", "parameter_groups", "steps", "epochs"):
        assert resumed.summary.get(key) == straight.summary.get(key), key


@each({name: row for name, row in ROWS.items() if row.like})
def test_losses_are_those_of_another_row(runs: Runs, name, ranks):
    """Stages, processes, accumulation, pipelines and averages change losses by rounding only."""
    row, others = ROWS[name], ROWS[ROWS[name].like].ranks
    reference = runs.straight(row.like, ranks if ranks in others else others[0])
    assert losses(runs.straight(name, ranks)) == pytest.approx(losses(reference), rel=row.tolerance)


EQUAL = {
    name: row
    for name, row in TRAINED.items()
    if row.ranks == (1, 2) and row.dtype == "float32" and not row.of_ranks
}


@each(EQUAL, most=True)
def test_two_ranks_have_the_losses_of_one(runs: Runs, name, ranks):
    one, two = (losses(runs.straight(name, number)) for number in (1, 2))
    assert two == pytest.approx(one, rel=ROWS[name].tolerance)


@pytest.mark.parametrize(
    ("name", "other", "ranks"),
    [trained(name, *onward) for name, row in ROWS.items() for onward in row.onward],
)
def test_a_stopped_run_goes_on_in_another_mode(runs: Runs, name, other, ranks):
    straight, onward = runs.straight(name, 2), runs.onward(name, other, ranks)
    assert onward.code == 0, onward.stderr
    assert onward.summary["world_size"] == ranks
    rough = {"bf16": 0.02, "fp16": 0.002, "moe": 0.002, "experts": 0.002}.get(name.split()[0])
    assert losses(onward) == pytest.approx(losses(straight), rel=None if rough else 1e-5, abs=rough)
    expected = straight.summary["validation"]["loss"]
    assert onward.summary["validation"]["loss"] == pytest.approx(
        expected, rel=None if rough else 1e-4, abs=rough
    )
    assert scalars(onward, "loss_scale")[-1] == scalars(straight, "loss_scale")[-1]


def evaluated(made: Run, name: str, folder: pathlib.Path) -> dict:
    """Export a run's network, and return the metrics of the exported file and its description."""
    exported, data = (
        str(folder / "net.pt"),
        [each for each in ROWS[name].arguments if each.startswith("data")],
    )
    sets = [part for argument in data for part in ("--set", argument)]
    commands = [
        ["export", str(made.output), exported],
        ["evaluate", exported, *DIGITS, *sets, "--json"],
    ]
    out = io.StringIO()
    for arguments in commands:
        if "moe" in name or "experts" in name:  # experts need a process group
            program = run(["checkpoint.py", *arguments], folder)
            assert program.code == 0, program.stderr
            out = io.StringIO(program.stdout)
        else:
            with contextlib.redirect_stdout(out := io.StringIO()):
                assert checkpoint.main(arguments) == 0
    return {**json.loads(out.getvalue()), **json.loads((folder / "net.json").read_text())["provenance"]}


@each(TRAINED, most=True)
def test_a_run_leaves_its_network_and_its_figures(runs: Runs, name, ranks, tmp_path):
    made = runs.straight(name, ranks)
    summary, lines = made.summary, made.stdout.splitlines()
    net = torch.load(made.output / "net.pt", weights_only=True)
    assert state_dicts.sha256(net) == summary["weights_sha256"]
    assert all(not weight.is_floating_point() or weight.dtype == torch.float32 for weight in net.values())
    assert f"folder   {made.output}" in lines
    assert any(line.startswith(f"engine   {ranks} process") for line in lines)
    assert any(line.startswith("network  ") for line in lines)
    if IMAGES[name][0] == 360:
        found, validation = evaluated(made, name, tmp_path), summary["validation"]
        # The run gathers its network; an export takes it from the checkpoint's parts
        assert found["checkpoint"] == summary["checkpoint"]
        assert found["weights_sha256"] == summary["weights_sha256"]
        # A file is evaluated without autocast, so images on the border of two classes change sides
        autocasts = "torch_autocast={" in str(TRAINED[name].arguments)
        per_class = pytest.approx(validation["per_class_accuracy"], abs=0.1 if autocasts else 0)
        assert found["per_class_accuracy"] == per_class
        tolerance = 1e-5 if summary["dtype"] == "float32" and not autocasts else 1e-2
        assert found["loss"] == pytest.approx(validation["loss"], rel=tolerance)
    events = EventAccumulator(str(made.output), size_guidance={"scalars": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= SCALARS
    accuracy = summary["validation"]["accuracy"]
    assert events.Scalars("accuracy/validation")[-1].value == pytest.approx(accuracy)
    assert [event.value for event in events.Scalars("loss/train")] == pytest.approx(losses(made))
    norms = [event.value for event in events.Scalars("gradient_norm")]
    assert len(norms) == len(losses(made)) and min(norms) > 0 and len(set(norms)) > 2

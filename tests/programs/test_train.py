"""train.py on the command line: summary, periods, notes and bad input."""

import gc
import json
import socket
import subprocess
import sys

import pytest
import torch
from folders import caches, table
from matrix import BATCH, EPOCH
from support import DIGITS, PROJECT, Run, execute, overrides, run, time_limit, train_many

import baseline
import search
import train
from classify.config import command_line
from net import Net

D = "hyperparameters__overwrite_deepspeed_args__"
LENGTH = "hyperparameters__max_length"
KEYS = {
    "steps", "epochs", "world_size", "zero_stage", "dtype", "seconds", "images_per_second", "validation",
    "weights_sha256", "checkpoint", "peak_memory_mib", "parameter_groups", "chosen_on",
    "flops_per_image", "flops_per_second",
}  # fmt: skip


def test_summary_lines_and_seeds(tmp_path):
    arguments = [
        "train.py",
        *DIGITS,
        *overrides(**{LENGTH: "{epochs: 2}"}, min_validation_period="{epochs: 1}"),
    ]
    output = tmp_path / "first"
    first = execute([sys.executable, *arguments, "--output", str(output)], output)
    rows = {"again": arguments[1:], "other": [*arguments[1:], *overrides(reproducibility__experiment_seed=1)]}
    again, other = train_many(tmp_path, rows).values()
    for made in (first, again, other):
        assert made.code == 0, made.stderr
    summary = first.summary
    assert set(summary) == KEYS
    assert (summary["steps"], summary["epochs"]) == (90, 2)
    validation = summary["validation"]
    assert validation["accuracy"] > 0.5
    # The classes have nearly equal sizes, so the mean over them is near the accuracy over the images.
    each = validation["per_class_accuracy"]
    assert list(each) == [str(digit) for digit in range(10)]
    assert sum(each.values()) / 10 == pytest.approx(validation["accuracy"], abs=0.01)
    lines = first.stdout.splitlines()
    assert [
        line.split()[0] for line in lines[:7]
    ] == "starting: images network engine batch length folder".split()
    assert "1,437 to train, 360 to validate, 10 classes, 32x32 pixels" in lines[1]
    assert lines[2].endswith("net: 62,006 parameters, 62,006 trainable, 1.3 MFLOP an image")
    assert lines[3].endswith("1 process on cpu, 1 thread, float32, ZeRO stage 0")
    assert lines[4].endswith("32 images = micro-batch 32 x accumulation 1 x 1 process")
    assert lines[5].endswith("90 steps: 2 epochs of 45")
    assert lines[6].endswith(str(output))
    assert lines[-2].endswith(f"report: python3 checkpoint.py report {output}")
    assert lines[-1] == f"accuracy {validation['accuracy']:.4f}"
    checkpoint = output / "checkpoints" / summary["checkpoint"]
    assert json.loads((checkpoint / "metadata.json").read_text())["steps_completed"] == 90
    assert again.summary["weights_sha256"] == summary["weights_sha256"] != other.summary["weights_sha256"]
    assert not [word for word in ("deprecated", "WARNING") if word in first.stdout + first.stderr]


def test_a_short_run_has_curves_of_50_points_with_the_rate_of_each_and_ends_with_the_chosen_metric(tmp_path):
    few = overrides(**{LENGTH: "{batches: 100}"}, searcher__metric="macro_f1")
    rows = {"few": [*DIGITS, *few], "all": [*DIGITS, *few, *overrides(scheduling_unit=1)]}
    few_reports, all_reports = train_many(tmp_path, rows).values()
    assert few_reports.code == all_reports.code == 0, few_reports.stderr
    rates, every = (
        {
            each["steps_completed"]: each["learning_rate"]
            for each in run.metrics
            if each["group"] == "training"
        }
        for run in (few_reports, all_reports)
    )
    assert 50 <= len(rates) < 60 and {step: every[step] for step in rates} == rates
    score = few_reports.summary["validation"]["macro_f1"]
    assert few_reports.stdout.splitlines()[-1] == f"macro_f1 {score:.4f}"


@pytest.mark.parametrize("program", [train, baseline])
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "x"}, "RANK: 'x': must be a whole number of at least 0"),
        ({"RANK": ""}, "RANK: '': must be a whole number of at least 0"),
        ({"RANK": "-1"}, "RANK: '-1': must be a whole number of at least 0"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: 'abc': must be a whole number of at least 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: '2': must be below WORLD_SIZE, which is 2"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http': must be a whole number"),
    ],
)
def test_a_rank_that_is_no_number_is_one_line(monkeypatch, capsys, program, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = program.main(DIGITS)
    said = capsys.readouterr().err.splitlines()
    if variables.get("RANK") == "2":  # another rank says it
        assert code == 2 and said == []
        return
    assert code == 2 and len(said) == 1
    assert said[0].startswith(f"{program.__name__}.py: {line}")


@table(
    "period, epochs, validated_at",
    one_and_a_half_epochs=(f"{{batches: {EPOCH + 2}}}", 2, [EPOCH + 2, 2 * EPOCH]),
    two_epochs=("{epochs: 2}", 3, [2 * EPOCH, 3 * EPOCH]),
    images=(f"{{records: {EPOCH * BATCH}}}", 3, [EPOCH, 2 * EPOCH, 3 * EPOCH]),
    never=("{epochs: 0}", 2, [2 * EPOCH]),
)
def test_validation_periods(tmp_path, period, epochs, validated_at):
    settings = {
        LENGTH: f"{{epochs: {epochs}}}",
        "min_validation_period": period,
        f"{D}train_batch_size": BATCH,
    }
    (made,) = train_many(tmp_path, {"run": [*DIGITS, *overrides(**settings)]}).values()
    assert made.code == 0, made.stderr
    assert made.validated_at == validated_at


def test_one_set_of_weights_has_one_accuracy(tmp_path, image_folder):
    """The initial weights judge 52 images in 1, 2 and 3 processes and in micro-batches of 3 to 30."""
    runs: list[Run] = []
    for processes, batch in ((1, 30), (2, 6), (3, 30)):
        settings = {f"{D}train_batch_size": batch, f"{D}optimizer__params__lr": 0, LENGTH: "{batches: 1}"}
        settings |= {"data__dataset": "imagefolder", "data__root": image_folder}
        runs += train_many(tmp_path, {str(processes): [*DIGITS, *overrides(**settings)]}, processes).values()
    for made in runs:
        assert made.code == 0, made.stderr
        validation, expected = made.summary["validation"], runs[0].summary["validation"]
        assert validation["images"] == 52
        assert list(validation["per_class_accuracy"]) == [f"digit {label}" for label in range(4)]
        assert validation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert validation["accuracy"] == expected["accuracy"]
        assert validation["per_class_accuracy"] == expected["per_class_accuracy"]


def test_imports_come_after_the_first_line_and_without_garbage_collection():
    script = "import sys, train; train.parse([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, timeout=time_limit())
    with pytest.raises(ImportError), command_line.importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_test_mode_takes_one_batch(tmp_path):
    made = run(["train.py", *DIGITS, "--test", "--output", str(tmp_path)], tmp_path)
    assert made.code == 0, made.stderr
    assert made.summary["steps"] == 1
    assert made.summary["validation"]["images"] == 360  # they are one batch
    assert (tmp_path / "checkpoints" / made.summary["checkpoint"] / "metadata.json").exists()
    assert "length   1 step: a test" in made.stdout.splitlines()
    note = "train.py: note: --test: the schedule begins with a learning rate of 0; the step changes no weight"
    assert made.stderr.splitlines() == [note]


def test_check_prints_the_configuration(tmp_path, capsys):
    files = [*PROJECT.glob("[!.]*.yaml"), *PROJECT.glob("experiments/*.yaml")]
    single = [
        file for file in files if not file.stem.startswith(("search-", "photos"))
    ]  # photos has no images
    assert {"const", "distributed", "digits"} <= {file.stem for file in single}
    for file in single:
        arguments = ["--config", str(file), "--check", "--slots", "2", "--output", str(tmp_path / "run")]
        assert train.main(arguments) == 0
        resolved = json.loads(capsys.readouterr().out)
        replicas = 1 if file.stem == "pipeline" else 2
        micro = resolved["train_micro_batch_size_per_gpu"]
        assert resolved["train_batch_size"] == replicas * micro * resolved["gradient_accumulation_steps"]
        assert not (tmp_path / "run").exists()


EPOCHS_1, TWO_EPOCHS = {LENGTH: "{epochs: 1}"}, {"min_validation_period": "{epochs: 2}"}


@table(
    "settings, expected",  # of 45 steps an epoch
    warm_up=(
        EPOCHS_1,
        "scheduler.params.warmup_num_steps: 90: the training has 45 steps, so the learning rate never reaches its"
        " peak; use less, e.g. 4, or train for longer",
    ),
    cycle=(
        {**EPOCHS_1, f"{D}scheduler": "{type: OneCycle, params: {cycle_first_step_size: 46}}"},
        "scheduler.params.cycle_first_step_size: 46: the training has 45 steps",
    ),
    decay=(
        {
            **EPOCHS_1,
            f"{D}scheduler": "{type: WarmupDecayLR, params: {total_num_steps: 99, warmup_num_steps: 46}}",
        },
        "scheduler.params.warmup_num_steps: 46: the training has 45 steps",
    ),
    end=(
        {LENGTH: "{batches: 93}", **TWO_EPOCHS},
        "hyperparameters.max_length: 93 steps: the last validation comes only 3 steps after the previous one; use 90 steps to avoid this",
    ),
    end_in_images=(
        {LENGTH: "{batches: 93}", "min_validation_period": "{records: 2880}"},
        "hyperparameters.max_length: 93 steps: the last validation comes only 3 steps after",
    ),
    none=({LENGTH: "{batches: 90}", "min_validation_period": "{epochs: 1}"}, None),
    none_at_half_a_period=({LENGTH: "{batches: 135}", **TWO_EPOCHS}, None),
    none_without_a_period=({LENGTH: "{batches: 93}", "min_validation_period": "{epochs: 0}"}, None),
)
def test_surprises_are_noted(settings, expected, capsys):
    assert train.main([*DIGITS, "--check", *overrides(**settings)]) == 0
    said = capsys.readouterr().err.splitlines()
    images, *notes = reversed([line for line in said if not line.startswith("train.py: memory ")])
    assert images.startswith("train.py: images digits: 1,437 to train, ")
    assert len(notes) == (expected is not None)
    assert all(note.startswith(f"train.py: note: {expected}") for note in notes)


def test_images_are_decoded_after_all_other_checks(tmp_path, folder, capsys):
    other, small = tmp_path / "other.pt", tmp_path / "small.pt"
    torch.save(Net(3).state_dict(), other)
    torch.save({"conv1.weight": torch.zeros(6, 3, 3, 3)}, small)
    images = [*DIGITS, *overrides(data__dataset="imagefolder", data__root=folder)]
    short = [*images, *overrides(**{LENGTH: "{batches: 1}"})]
    rows = {
        "weights out of reach": overrides(
            hyperparameters__net="resnet18", hyperparameters__weights="DEFAULT"
        ),
        "weights of another network": overrides(hyperparameters__moe="true", hyperparameters__weights=other),
        "run": [],
    }
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # without a listener
        env = {
            "TORCH_HOME": str(tmp_path),
            "https_proxy": f"http://127.0.0.1:{refusing.getsockname()[1]}",
            "no_proxy": "",
        }
        runs = train_many(tmp_path, {name: [*short, *row] for name, row in rows.items()}, environment=env)
    made = runs.pop("run")
    assert made.code == 0, made.stderr
    assert made.stderr.count("are stored decoded") == 2
    for refused in runs.values():
        assert refused.code == 2, refused.stderr
        assert refused.stderr.splitlines()[-1].startswith("train.py: hyperparameters.weights: ")
        assert "are stored decoded" not in refused.stderr
    before = caches(folder)
    larger = overrides(data__resize=40)
    resumed = train_many(tmp_path, {"run": [*short, *larger, "--resume=latest"]})["run"]
    (error,) = [line for line in resumed.stderr.splitlines() if "note: " not in line]
    assert resumed.code == 2
    assert "data.resize: [40, 40]: checkpoint" in error
    weights = ["--weights", str(small), "--output", str(tmp_path / "baseline")]
    assert baseline.main([*images, *larger, *weights]) == 2
    assert not (tmp_path / "baseline").exists()
    stage = overrides(**{f"{D}zero_optimization__stage": "{type: categorical, vals: [4]}"})
    grid = ["--config", "experiments/search-grid.yaml", *stage, "--output", str(tmp_path / "search")]
    assert search.main([*images, *grid, *larger]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert caches(folder) == before


@table(
    "arguments, parts",
    no_network=(["--set=data.dataset=cifar10", "--set=data.root={tmp}/none"], ["data.root", "{tmp}/none", "missing"]),
    no_folder=(["--set=data.dataset=imagefolder", "--set=data.root={tmp}/none"], ["data.root", "{tmp}/none"]),
    unknown_path=(["--set=dta.root=x"], ["dta", "'data'"]),
    path_through_a_value=(["--set=name.x=1"], ["name.x", "digits-deepspeed"]),
    no_value=(["--set=data.dataset"], ["--set", "PATH=VALUE"]),
    not_yaml=(["--set=name=[1"], ["--set name", "[1"]),
    no_such_file=(["--config", "nothing.yaml"], ["--config", "nothing.yaml"]),
    length=(overrides(**{LENGTH: "{epochs: -1}"}), ["hyperparameters.max_length.epochs", "-1"]),
    period=(["--set=min_validation_period={hours: 1}"], ["min_validation_period", "batches"]),
    seed=(["--set=reproducibility.experiment_seed=x"], ["reproducibility.experiment_seed", "'x'"]),
    slots_to_train_on=(["--slots", "4"], ["--slots", "4", "--check"]),
    no_checkpoint=(["--resume", "latest"], ["--resume", "latest", "no checkpoint"]),
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments, parts, tmp_path, capsys):
    arguments, parts = (
        [each.replace("{tmp}", str(tmp_path)) for each in those] for those in (arguments, parts)
    )
    assert train.main([*DIGITS, *arguments, "--output", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not [part for part in parts if part not in line]
    assert not list(tmp_path.glob("run/checkpoints/*"))

"""Whole runs of train.py: real processes, the real trainer and engine, real images."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from folders import caches
from support import DIGITS, PROJECT, TIME_LIMIT, Run, free_port, overrides, train_many

import baseline
import search
from classify.config import command_line
from net import Net

SHORT = overrides(hyperparameters__max_length="{epochs: 2}", min_validation_period="{epochs: 1}")


BATCH = "hyperparameters__overwrite_deepspeed_args__train_batch_size"


KEYS = {
    "steps", "epochs", "world_size", "zero_stage", "dtype", "seconds", "images_per_second", "validation",
    "weights_sha256", "checkpoint", "peak_memory_mib", "parameter_groups", "chosen_on",
    "flops_per_image", "flops_per_second", "peak_flops_per_second", "mfu",
}  # fmt: skip


START = ["starting:", "images", "network", "engine", "batch", "length", "folder"]


def test_summary_lines_and_seeds(train):
    first, again = train(*DIGITS, *SHORT), train(*DIGITS, *SHORT)
    other = train(*DIGITS, *SHORT, *overrides(reproducibility__experiment_seed=1))
    for run in (first, again, other):
        assert run.code == 0, run.stderr
    summary = first.summary
    assert set(summary) == KEYS
    assert (summary["steps"], summary["epochs"], summary["world_size"]) == (90, 2, 1)
    assert (summary["zero_stage"], summary["dtype"]) == (0, "float32")
    validation = summary["validation"]
    assert validation["images"] == 360
    assert validation["accuracy"] > 0.5
    # The classes are of about equal size, so the mean over them is near the accuracy over the images.
    assert list(validation["per_class_accuracy"]) == [str(digit) for digit in range(10)]
    assert sum(validation["per_class_accuracy"].values()) / 10 == pytest.approx(
        validation["accuracy"], abs=0.01
    )
    lines = first.stdout.splitlines()
    assert [line.split()[0] for line in lines[:7]] == START
    assert "1,437 to train, 360 to validate, 10 classes, 32x32 pixels" in lines[1]
    assert lines[2].endswith("net: 62,006 parameters, 62,006 trainable, 1.3 MFLOP an image")
    assert lines[3].endswith("1 process on cpu, 1 thread, float32, ZeRO stage 0")
    assert lines[4].endswith("32 images = micro-batch 32 x accumulation 1 x 1 process")
    assert lines[5].endswith("90 steps: 2 epochs of 45")
    assert lines[6].endswith(str(first.output))
    assert lines[-2].endswith(f"report: python3 checkpoint.py report {first.output}")
    assert lines[-1] == f"accuracy {validation['accuracy']:.4f}"
    checkpoint = first.output / "checkpoints" / summary["checkpoint"]
    assert json.loads((checkpoint / "metadata.json").read_text())["steps_completed"] == 90
    assert again.summary["weights_sha256"] == summary["weights_sha256"] != other.summary["weights_sha256"]
    assert "deprecated" not in first.stdout + first.stderr
    assert "WARNING" not in first.stdout + first.stderr


# A period and the steps at which it validates; there are 45 steps an epoch.
PERIODS = {
    "one and a half epochs": ("{batches: 67}", 2, [67, 90]),
    "two epochs": ("{epochs: 2}", 3, [90, 135]),
    "images": ("{records: 1440}", 3, [45, 90, 135]),
    "never": ("{epochs: 0}", 2, [90]),
}


def test_validation_periods(tmp_path):
    rows = {
        name: [
            *DIGITS,
            *overrides(hyperparameters__max_length=f"{{epochs: {epochs}}}", min_validation_period=period),
        ]
        for name, (period, epochs, _) in PERIODS.items()
    }
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        assert run.validated_at == PERIODS[name][2], name


def test_one_set_of_weights_has_one_accuracy(tmp_path, image_folder):
    """52 images, judged by the initial weights in 1, 2 and 3 processes and micro-batches of 2 to 30."""
    runs: list[Run] = []
    for processes in (1, 2, 3):
        rows = {}
        for batch in (6, 30):
            settings = overrides(
                data__dataset="imagefolder",
                data__root=image_folder,
                hyperparameters__max_length="{batches: 1}",
                hyperparameters__overwrite_deepspeed_args__optimizer__params__lr=0,
                **{BATCH: batch},
            )
            rows[f"{processes}-{batch}"] = [*DIGITS, *settings]
        runs += train_many(tmp_path, rows, processes).values()
    for run in runs:
        assert run.code == 0, run.stderr
        validation, expected = run.summary["validation"], runs[0].summary["validation"]
        assert validation["images"] == 52
        assert list(validation["per_class_accuracy"]) == [f"digit {label}" for label in range(4)]
        assert validation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert validation["accuracy"] == expected["accuracy"]
        assert validation["per_class_accuracy"] == expected["per_class_accuracy"]


def test_the_first_line_comes_before_the_slow_imports():
    script = "import sys, train; train.parse([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=True, timeout=TIME_LIMIT)


def test_garbage_is_collected_again_after_the_imports():
    with pytest.raises(ImportError), command_line.importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_test_mode_is_one_batch_of_everything(train):
    run = train(*DIGITS, "--test")
    assert run.code == 0, run.stderr
    assert (run.summary["steps"], run.summary["validation"]["images"]) == (
        1,
        360,
    )  # one batch of the validation's
    assert (run.output / "checkpoints" / run.summary["checkpoint"] / "metadata.json").exists()
    assert "length   1 step, for it is a test" in run.stdout.splitlines()
    note = "train.py: note: --test: the schedule begins with a learning rate of 0; the step changes no weight"
    assert run.stderr.splitlines() == [note]


def test_check_prints_the_configuration(tmp_path):
    files = [*PROJECT.glob("*.yaml"), *PROJECT.glob("experiments/*.yaml")]
    single = [file for file in files if not file.stem.startswith(("search-", "photos"))]  # photos needs some
    rows = {file.stem: ["--config", str(file), "--check", "--slots", "2"] for file in single}
    assert {"const", "distributed", "digits"} <= set(rows)
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        resolved = json.loads(run.stdout)
        replicas = 1 if name == "pipeline" else 2
        micro = resolved["train_micro_batch_size_per_gpu"]
        assert resolved["train_batch_size"] == replicas * micro * resolved["gradient_accumulation_steps"]
        assert not run.output.exists()


# What works but is not as it was meant, with 45 steps an epoch, and what the one line on stderr must name.
D = "hyperparameters__overwrite_deepspeed_args__"
LENGTH = "hyperparameters__max_length"
NOTES = {
    "warm-up": (
        {LENGTH: "{epochs: 1}"},
        "scheduler.params.warmup_num_steps: 90: the training has 45 steps, so the learning rate never gets to its"
        " peak; use less, e.g. 4, or train for longer",
    ),
    "cycle": (
        {LENGTH: "{epochs: 1}", f"{D}scheduler": "{type: OneCycle, params: {cycle_first_step_size: 46}}"},
        "scheduler.params.cycle_first_step_size: 46: the training has 45 steps",
    ),
    "decay": (
        {
            LENGTH: "{epochs: 1}",
            f"{D}scheduler": "{type: WarmupDecayLR, params: {total_num_steps: 99, warmup_num_steps: 46}}",
        },
        "scheduler.params.warmup_num_steps: 46: the training has 45 steps",
    ),
    "end": (
        {LENGTH: "{batches: 93}", "min_validation_period": "{epochs: 2}"},
        "hyperparameters.max_length: 93 steps: ends 3 steps after the validation of step 90, with another; 90 spare it",
    ),
    "end in images": (
        {LENGTH: "{batches: 93}", "min_validation_period": "{records: 2880}"},
        "hyperparameters.max_length: 93 steps: ends 3 steps after",
    ),
    "none": ({LENGTH: "{batches: 90}", "min_validation_period": "{epochs: 1}"}, None),
    "none at half a period": ({LENGTH: "{batches: 135}", "min_validation_period": "{epochs: 2}"}, None),
    "none without a period": ({LENGTH: "{batches: 93}", "min_validation_period": "{epochs: 0}"}, None),
}


def test_what_is_hardly_meant_is_noted(tmp_path):
    rows = {name: [*DIGITS, "--check", *overrides(**settings)] for name, (settings, _) in NOTES.items()}
    for name, run in train_many(tmp_path, rows).items():
        assert run.code == 0, run.stderr
        lines = [line for line in run.stderr.splitlines() if not line.startswith("train.py: memory ")]
        (images, *notes), expected = reversed(lines), NOTES[name][1]
        assert images.startswith("train.py: images digits: 1,437 to train, "), (name, images)
        assert len(notes) == (expected is not None), (name, notes)
        assert all(note.startswith(f"train.py: note: {expected}") for note in notes), (name, notes)


# What is wrong on the command line, and what the one line on stderr must name.
BAD = {
    "no network": (
        ["--set", "data.dataset=cifar10", "--set", "data.root={tmp}/none"],
        ["data.root", "{tmp}/none", "missing"],
    ),
    "no folder": (
        ["--set", "data.dataset=imagefolder", "--set", "data.root={tmp}/none"],
        ["data.root", "{tmp}/none"],
    ),
    "unknown dataset": (["--set", "data.dataset=mnist"], ["data.dataset", "'mnist'", "digits"]),
    "unknown data key": (["--set", "data.rot=x"], ["data.rot", "'root'"]),
    "unknown path": (["--set", "dta.root=x"], ["dta", "'data'"]),
    "path through a value": (["--set", "name.x=1"], ["name.x", "digits-deepspeed"]),
    "no value": (["--set", "data.dataset"], ["--set", "PATH=VALUE"]),
    "not YAML": (["--set", "name=[1"], ["--set name", "[1"]),
    "no such file": (["--config", "nothing.yaml"], ["--config", "nothing.yaml"]),
    "batch size": (
        ["--set", "hyperparameters.overwrite_deepspeed_args.train_batch_size=0"],
        ["train_batch_size", "0"],
    ),
    "length": (
        ["--set", "hyperparameters.max_length={epochs: -1}"],
        ["hyperparameters.max_length.epochs", "-1"],
    ),
    "period": (["--set", "min_validation_period={hours: 1}"], ["min_validation_period", "batches"]),
    "seed": (["--set", "reproducibility.experiment_seed=x"], ["reproducibility.experiment_seed", "'x'"]),
    "slots to train on": (["--slots", "4"], ["--slots", "4", "--check"]),
    "no checkpoint": (["--resume", "latest"], ["--resume", "latest", "no checkpoint"]),
}


def test_nothing_is_decoded_before_all_else_is_known_to_be_right(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "weights"))
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    torch.save(Net(3).state_dict(), tmp_path / "other.pt")
    images = overrides(data__dataset="imagefolder", data__root=folder)
    short = overrides(hyperparameters__max_length="{batches: 1}")
    rows = {
        "weights that cannot be had": ["hyperparameters.net=resnet18", "hyperparameters.weights=DEFAULT"],
        "experts' weights of another network": [
            "hyperparameters.moe=true",
            f"hyperparameters.weights={tmp_path}/other.pt",
        ],
    }
    runs = train_many(
        tmp_path,
        {name: [*DIGITS, *images, *short, *(f"--set={each}" for each in row)] for name, row in rows.items()}
        | {"run": [*DIGITS, *images, *short]},
    )
    assert runs["run"].code == 0, runs["run"].stderr
    for name in rows:
        assert runs[name].code == 2, runs[name].stderr
        assert runs[name].stderr.splitlines()[-1].startswith("train.py: hyperparameters.weights: ")
        assert "are kept decoded" not in runs[name].stderr
    assert runs["run"].stderr.count("are kept decoded") == 2
    before = caches(folder)
    resumed = train_many(
        tmp_path, {"run": [*DIGITS, *images, *short, "--set=data.resize=40", "--resume=latest"]}
    )
    errors = [line for line in resumed["run"].stderr.splitlines() if "note: " not in line]
    assert (resumed["run"].code, len(errors)) == (2, 1), resumed["run"].stderr
    assert "data.resize: [40, 40]: checkpoint" in resumed["run"].stderr
    larger = [*images, "--set", "data.resize=40"]
    weights = ["--weights", str(tmp_path / "other.pt"), "--output", str(tmp_path / "baseline")]
    torch.save({"conv1.weight": torch.zeros(6, 3, 3, 3)}, tmp_path / "other.pt")
    assert baseline.main([*DIGITS, *larger, *weights]) == 2
    assert not (tmp_path / "baseline").exists()
    stage = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage={type: categorical, vals: [4]}"
    grid = ["--config", "experiments/search-grid.yaml", "--set", stage, "--output", str(tmp_path / "search")]
    assert search.main([*grid, *larger]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert caches(folder) == before


def fill(texts, folder):
    return [text.replace("{tmp}", str(folder)) for text in texts]


@pytest.fixture(scope="module")
def bad_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    rows = {case: fill([*DIGITS, *arguments], folder) for case, (arguments, _) in BAD.items()}
    return folder, train_many(folder, rows)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(bad_runs, case):
    folder, runs = bad_runs
    run = runs[case]
    assert run.code == 2, run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    for name in fill(BAD[case][1], folder):
        assert name in run.stderr
    assert not list(run.output.glob("checkpoints/*"))

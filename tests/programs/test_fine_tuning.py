"""From a folder of photographs to a classifier: test images decide nothing, and short options suffice."""

import json
import math
import shutil
from typing import Any

import matrix
import numpy as np
import pytest
import torch
from folders import save, table
from matrix import DEEPSPEED, ROWS, row, write_photos
from PIL import Image
from sklearn.datasets import load_digits
from support import DIGITS, LATEST, checkpoints, overrides, train_many
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_matrix import of_group

import train


def chosen(run):
    """Everything that a run validates and decides, without the tests and the clock."""
    kept = [of_group(run, group) for group in ("training", "validation")]
    return kept, run.summary["weights_sha256"], run.summary["validation"], sorted(checkpoints(run))


def assert_tested_once(run):
    assert run.code == 0, run.stderr
    (test,) = [entry for entry in run.metrics if entry["group"] == "test"]
    assert test["steps_completed"] == run.summary["steps"]
    assert run.metrics[-1] == test and "images_per_second" not in test
    assert run.summary["chosen_on"] == "validation images"
    assert (run.summary["validation"]["images"], run.summary["test"]["images"]) == (29, 48)
    for key in ("accuracy", "accuracy_tta", "macro_f1", "calibration_error", "loss"):
        assert run.summary["test"][key] == test[key]
    assert f"test accuracy {test['accuracy']:.4f}" in run.stdout.splitlines()
    events = EventAccumulator(str(run.output)).Reload()
    assert events.Scalars("accuracy/test")[-1].value == pytest.approx(test["accuracy"])
    assert events.Scalars("accuracy/test_tta")[-1].value == pytest.approx(test["accuracy_tta"])
    confusion = json.loads((run.output / "classification.json").read_text())["confusion"]
    assert np.sum(confusion) == 29  # validation images


def test_test_images_decide_nothing(runs, tmp_path):
    """A run validates, keeps and stops alike with other test images; it sees them once, at its end."""
    files = runs.files
    more = overrides(
        hyperparameters__max_length="{batches: 24}",
        hyperparameters__early_stopping="{patience: 2}",
        min_validation_period="{batches: 2}",
    )
    write_photos(tmp_path / "photos")
    for file in tmp_path.glob("photos/test/*/*"):
        noise = np.random.default_rng(0).integers(0, 256, (33, 40), dtype=np.uint8)
        Image.fromarray(noise).save(file)
    one = matrix.train(ROWS["photos"], 2, tmp_path / "one", files, (*more,))
    other = matrix.train(
        ROWS["photos"], 2, tmp_path / "other", {**files, "photos": tmp_path / "photos"}, (*more,)
    )
    for run in (one, other):
        assert_tested_once(run)
    assert chosen(one) == chosen(other)
    assert one.summary["test"]["accuracy"] > other.summary["test"]["accuracy"]


# The first validation has the largest loss, and so the best weights
FIRST_IS_BEST: dict[str, Any] = {
    "searcher": {"name": "single", "metric": "loss", "smaller_is_better": False},
    "data": {"dataset": "digits", "validation": 0.2},
    "best_weights": True,
    "steps": 10,
}
EVERY_4 = overrides(min_validation_period="{batches: 4}")
MODES = {
    "zero3": row("digits", 3, weight_average={"decay": 0.5}, **FIRST_IS_BEST),
    "fp16": row("fp16", 2, **FIRST_IS_BEST),
    "muon": row("digits", 1, ds_optimizer=matrix.MUON, ds_gradient_clipping=0, **FIRST_IS_BEST),
    "pipeline": row("pipeline", 1, **FIRST_IS_BEST),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_best_weights_are_kept_and_tested(tmp_path, mode):
    """They are the weights of a run that ends there, and its validation and test."""
    long = [*MODES[mode].arguments, *EVERY_4]
    short = [*long, *overrides(hyperparameters__max_length="{batches: 4}")]
    runs = train_many(tmp_path, {"long": long, "short": short}, 2)
    for run in runs.values():
        assert run.code == 0, run.stderr
    kept, wanted = runs["long"].summary, runs["short"].summary
    assert (kept["steps"], wanted["steps"]) == (10, 4)
    for key in ("weights_sha256", "validation", "test"):
        assert kept[key] == wanted[key], key
    assert kept["checkpoint"] == checkpoints(runs["long"])[4].name
    assert "weights: of step 4, the best by loss" in runs["long"].stdout
    of_best = json.loads((runs["long"].output / "classification.json").read_text())
    assert of_best == json.loads((runs["short"].output / "classification.json").read_text())
    again = train_many(tmp_path, {"long": [*long, *LATEST]}, 2)["long"]
    assert again.code == 0 and again.summary["weights_sha256"] == wanted["weights_sha256"]


def test_better_weights_that_are_not_kept_are_named(tmp_path):
    line = "weights: of the last step; by loss step 4 is better; hyperparameters.best_weights: true uses its weights"
    values = {**FIRST_IS_BEST, "best_weights": False, "early_stopping": {"patience": 1}}
    run = train_many(tmp_path, {"run": [*row("digits", **values).arguments, *EVERY_4]})["run"]
    assert run.code == 0 and line in run.stdout.splitlines()
    stopped = "stopping early: 1 validations without an improvement of loss, "
    assert [text for text in run.stdout.splitlines() if text.startswith(stopped)] and run.summary[
        "steps"
    ] == 8


def test_a_finished_run_is_tested_again_to_the_same_numbers(runs, tmp_path):
    finished = runs.straight("photos", 1)
    output = shutil.copytree(finished.output, tmp_path / "run")
    again = matrix.train(ROWS["photos"], 1, output, runs.files, (*LATEST,))
    assert_tested_once(again)
    assert again.summary["test"] == finished.summary["test"]


FILE = {"deepspeed_config": "ds_config.json"}
ADAM = {"type": "Adam", "params": {"lr": 0.5}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
TO_HALF = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}}
CONST = {
    name: {"type": "const", "val": value} for name, value in {"optimizer": ADAM, "scheduler": WARMUP}.items()
}


@table(
    "form",
    file=(FILE,),
    overrides=(
        {**FILE, "overwrite_deepspeed_args": {"optimizer": {"params": {"lr": 0.5}}, "train_batch_size": 4}},
    ),
    inline=({"train_batch_size": 4, "optimizer": ADAM, "scheduler": TO_HALF},),
    constants=({"train_batch_size": 4, **CONST},),
)
def test_short_forms_reach_every_form_of_the_configuration(form, capsys):
    file = [*DIGITS, *overrides(hyperparameters=json.dumps({"max_length": {"batches": 3}, **form}))]
    short = ["--lr", "0.003", "--batch-size", "48", "--epochs", "5"]
    assert train.main([*file, *short, "--check"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["train_batch_size"] == 48
    assert config["optimizer"]["params"]["lr"] == 0.003
    assert config["scheduler"]["params"]["warmup_max_lr"] == 0.003
    experiment = train.load(train.parse([*file, *short, "--net", "resnet18"]))
    assert experiment.hyperparameters["max_length"] == {"epochs": 5}
    assert experiment.hyperparameters["net"] == "resnet18"


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--epochs", "0", "--epochs: 0: must be a whole number of at least 1"),
        ("--epochs", "many", "--epochs: many: must be a whole number of at least 1"),
        ("--lr", "fast", "--lr: fast: must be a number above 0, at most 1e6"),
        ("--lr", "[1", "--lr: [1: must be a number above 0, at most 1e6"),
        ("--batch-size", "2.5", "--batch-size: 2.5: must be a whole number of at least 1"),
        ("--net", "resnet19", "hyperparameters.net: 'resnet19': no such network; did you mean 'resnet18'?"),
        ("--net", "", "hyperparameters.net: None: no such network"),
        (
            "--epochs=3",
            "--set=hyperparameters.max_length={batches: 9}",
            "--epochs: 3: --set hyperparameters.max_length",
        ),
        (
            "--lr=1",
            f"--set={DEEPSPEED.replace('__', '.')}optimizer.params.lr=2",
            "--lr: 1: --set hyperparameters",
        ),
    ],
)
def test_a_wrong_short_form_is_one_line(option, value, line, capsys):
    assert train.main([*DIGITS, option, value, "--check"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"train.py: {line}")


def test_too_few_images_for_the_processes_are_refused_by_name(tmp_path, capsys):
    for index in range(12):
        save(tmp_path / str(index % 2) / f"{index}.png", Image.new("L", (32, 32), index))
    section = f"{{dataset: imagefolder, root: {tmp_path}, validation: 0.2}}"
    settings = overrides(data=section, **{f"{DEEPSPEED}train_batch_size": 4})
    short = [*DIGITS, *settings, "--check", "--slots", "4"]
    assert train.main(short) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" images")[2][:40] for line in lines] == [
        f" in {split}, fewer than the 4 micro-batches "[:40] for split in ("val", "test")
    ]
    assert train.main([*short[:-1], "2"]) == 0


def test_class_weights_and_balanced_sampling_lift_the_recall_of_a_skewed_folder(tmp_path):
    """Two classes have 50 times the images of the other two."""
    digits = load_digits()
    for label, size in enumerate((150, 150, 3, 3)):
        for index, picture in enumerate(digits.images[digits.target == label][: size + 25]):
            part = "train" if index < size else "test"
            grey = Image.fromarray((picture * 15.9).astype(np.uint8))
            save(tmp_path / "photos" / part / str(label) / f"{index}.png", grey.resize((32, 32)))
    plain = [*DIGITS, *overrides(
        data=f"{{dataset: imagefolder, root: {tmp_path / 'photos'}, image_size: 32}}",
        hyperparameters__max_length="{batches: 60}",
        **{f"{DEEPSPEED}train_batch_size": 32, f"{DEEPSPEED}scheduler": "null",
           f"{DEEPSPEED}optimizer__params__lr": 0.001},
    )]  # fmt: skip
    rows = {
        "plain": plain,
        "weights": [*plain, *overrides(hyperparameters__class_weights="balanced")],
        "sampling": [*plain, *overrides(data__sampling="balanced")],
    }
    runs = train_many(tmp_path, rows)
    recall = {name: run.summary["validation"]["macro_recall"] for name, run in runs.items()}
    assert all(math.isfinite(each) for each in recall.values())
    assert recall["weights"] > recall["plain"] + 0.1 and recall["sampling"] > recall["plain"] + 0.1, recall
    assert runs["plain"].summary["chosen_on"] == "test images" and "test" not in runs["plain"].summary
    keys = [torch.load(runs[name].output / "net.pt").keys() for name in ("plain", "weights")]
    assert keys[0] == keys[1]


def test_200_classes_of_three_grey_images_of_any_size_train_by_one_command(tmp_path):
    random = np.random.default_rng(0)
    for label in range(200):
        for index in range(3):
            pixels = random.integers(0, 256, tuple(random.integers(9, 60, 2)), dtype=np.uint8)
            save(tmp_path / "photos" / f"{label:03}" / f"{index}.png", Image.fromarray(pixels))
    small = overrides(
        data__image_size=32,
        data__resize=36,
        data__fit="pad",
        data__normalize="dataset",
        hyperparameters__weights="null",
        hyperparameters__layer_decay=0.7,
        hyperparameters__head_only="{batches: 2}",
    )
    row = ["--config", "experiments/photos.yaml", *overrides(data__root=tmp_path / "photos"), *small]
    run = train_many(tmp_path, {"run": [*row, "--net", "net", "--epochs", "1"]})["run"]
    assert run.code == 0, run.stderr
    assert "200 to train, 200 to validate, 200 to test at the end, 200 classes" in run.stdout
    for part in ("validation", "test"):
        assert run.summary[part]["images"] == 200 == len(run.summary[part]["per_class_precision"])
        assert 0 <= run.summary[part]["accuracy"] <= run.summary[part]["top5_accuracy"] < 0.2
    assert len(run.summary["parameter_groups"]) == 5
    seen = json.loads((run.output / "net.json").read_text())["input"]
    assert (seen["height"], seen["resize"], seen["fit"]) == (32, [36, 36], "pad")

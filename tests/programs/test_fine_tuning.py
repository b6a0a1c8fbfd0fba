"""From a folder of photographs to a classifier: nothing is chosen by the test images, in any form of the file."""

import json
import math

import numpy as np
import pytest
import torch
from folders import save
from modes import DEEPSPEED
from PIL import Image
from sklearn.datasets import load_digits
from support import LATEST, checkpoints, overrides, train_many
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train

STEPS = 24
FLAT = overrides(
    data="{dataset: imagefolder, root: FOLDER, image_size: 32, validation: 0.2, sampling: balanced}",
    hyperparameters__max_length=f"{{batches: {STEPS}}}",
    hyperparameters__early_stopping="{metric: macro_f1, patience: 3}",
    hyperparameters__test_time_augmentation="{mirror: true}",
    hyperparameters__weight_average="{decay: 0.9}",
    min_validation_period="{batches: 4}",
    searcher="{name: single, metric: macro_recall, smaller_is_better: false}",
    scheduling_unit=4,
    **{f"{DEEPSPEED}train_batch_size": 16, f"{DEEPSPEED}scheduler": "null"},
)
CONFIG = ["--config", "experiments/digits.yaml"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders that differ in their test images alone."""
    bunch, found = load_digits(), {}
    for name in ("one", "other"):
        root = found[name] = tmp_path_factory.mktemp("photos") / name
        for label in range(4):
            pictures = bunch.images[bunch.target == label]
            for index, picture in enumerate(pictures[: 60 if label else 12]):
                part = "test" if index % 4 == 3 else "train"
                if name == "other" and part == "test":
                    picture = np.random.default_rng(index).integers(0, 17, (8, 8))
                grey = Image.fromarray((picture * 15.9).astype(np.uint8))
                save(root / part / str(label) / f"{index}.png", grey.resize((40, 33)))
    return found


def row(folder):
    return [*CONFIG, *(each.replace("FOLDER", str(folder)) for each in FLAT)]


def chosen(run):
    """All that validations say and decide: the test and the clock left out."""
    entries = [entry for entry in run.metrics if entry["group"] != "test"]
    kept = [
        {key: value for key, value in each.items() if key not in ("time", "images_per_second")}
        for each in entries
    ]
    return kept, run.summary["weights_sha256"], run.summary["validation"], sorted(checkpoints(run))


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_chosen_by_the_test_images(folders, tmp_path, processes):
    """Whatever these are, a run validates, keeps and stops alike; they are judged once, at its end."""
    rows = {name: row(folder) for name, folder in folders.items()}
    runs = train_many(tmp_path, rows, processes)
    for run in runs.values():
        assert run.code == 0, run.stderr
        tests = [entry for entry in run.metrics if entry["group"] == "test"]
        assert len(tests) == 1 and tests[0]["steps_completed"] == run.summary["steps"]
        assert run.metrics[-1] == tests[0] and "images_per_second" not in tests[0]
        assert run.summary["chosen_on"] == "validation images"
        assert (run.summary["validation"]["images"], run.summary["test"]["images"]) == (29, 48)
        for key in ("accuracy", "accuracy_tta", "macro_f1", "calibration_error", "loss"):
            assert run.summary["test"][key] == tests[0][key]
        *_, tested, _, _ = run.stdout.splitlines()
        assert tested == f"test accuracy {tests[0]['accuracy']:.4f}"
        events = EventAccumulator(str(run.output)).Reload()
        assert events.Scalars("accuracy/test")[-1].value == pytest.approx(tests[0]["accuracy"])
        assert events.Scalars("accuracy/test_tta")[-1].value == pytest.approx(tests[0]["accuracy_tta"])
        confusion = json.loads((run.output / "classification.json").read_text())["confusion"]
        assert np.sum(confusion) == 29  # of the validation, not of the test
    one, other = runs["one"], runs["other"]
    assert chosen(one) == chosen(other)
    assert one.summary["test"]["accuracy"] > other.summary["test"]["accuracy"]
    # The same run stopped and gone on with is tested once more, to the same numbers
    (tmp_path / "stopped").mkdir()
    stopped = train_many(tmp_path / "stopped", {"one": rows["one"]}, processes, sigterm_at=9)["one"]
    assert stopped.code == 130 and not any(entry["group"] == "test" for entry in stopped.metrics)
    again = train_many(tmp_path / "stopped", {"one": [*rows["one"], *LATEST]}, processes)["one"]
    assert again.code == 0 and chosen(again)[1:3] == chosen(one)[1:3]
    assert again.summary["test"] == one.summary["test"]
    # And one that had ended
    ended = train_many(tmp_path, {"one": [*rows["one"], *LATEST]}, processes)["one"]
    assert ended.summary["test"] == one.summary["test"]
    assert [entry["group"] for entry in ended.metrics].count("test") == 1


FORMS: dict[str, dict] = {
    "file": {"deepspeed_config": "ds_config.json"},
    "overrides": {
        "deepspeed_config": "ds_config.json",
        "overwrite_deepspeed_args": {"optimizer": {"params": {"lr": 0.5}}, "train_batch_size": 4},
    },
    "inline": {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}},
    },
    "inline, for a cluster": {
        "train_batch_size": 4,
        "optimizer": {"type": "const", "val": {"type": "Adam", "params": {"lr": 0.5}}},
        "scheduler": {"type": "const", "val": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_short_forms_reach_every_form_of_the_configuration(form, capsys):
    hyperparameters = {"max_length": {"batches": 3}, **FORMS[form]}
    file = ["--config", "experiments/digits.yaml", "--set", f"hyperparameters={json.dumps(hyperparameters)}"]
    short = ["--lr", "0.003", "--batch-size", "48", "--epochs", "5", "--net", "resnet18"]
    assert train.main([*file, *short, "--check"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["train_batch_size"] == 48
    assert config["optimizer"]["params"]["lr"] == 0.003
    assert config["scheduler"]["params"]["warmup_max_lr"] == 0.003
    experiment = train.load(train.parse([*file, *short]))
    assert experiment.hyperparameters["max_length"] == {"epochs": 5}
    assert experiment.hyperparameters["net"] == "resnet18"


@pytest.mark.parametrize(
    ("short", "line"),
    [
        (["--epochs", "0"], "hyperparameters.max_length.epochs: 0: must be a whole number of at least 1"),
        (["--epochs", "many"], "hyperparameters.max_length.epochs: 'many': must be a whole number"),
        (["--lr", "fast"], "optimizer.params.lr: 'fast': must be"),
        (["--batch-size", "2.5"], "train_batch_size: 2.5: must be"),
        (["--net", "resnet19"], "hyperparameters.net: 'resnet19': no such network; did you mean 'resnet18'?"),
        (["--net", ""], "hyperparameters.net: None: no such network"),
        (
            ["--lr", "[1"],
            "--set hyperparameters.overwrite_deepspeed_args.optimizer.params.lr: '[1': not YAML",
        ),
    ],
)
def test_a_wrong_short_form_is_one_line(short, line, capsys):
    assert train.main([*CONFIG, *short, "--check"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"train.py: {line}")


def test_too_few_images_for_the_processes_are_refused_by_name(tmp_path, capsys):
    for index in range(12):
        save(tmp_path / str(index % 2) / f"{index}.png", Image.new("L", (32, 32), index))
    section = f"{{dataset: imagefolder, root: {tmp_path}, validation: 0.2}}"
    short = [
        *CONFIG,
        *overrides(data=section, **{f"{DEEPSPEED}train_batch_size": 4}),
        "--check",
        "--slots",
        "4",
    ]
    assert train.main(short) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" images")[2][:40] for line in lines] == [
        f" in {split}, fewer than the 4 micro-batches "[:40] for split in ("val", "test")
    ]
    assert train.main([*short[:-1], "2"]) == 0


def test_weights_of_classes_lift_the_recall_of_a_skewed_folder(tmp_path):
    """50 to 1: what weights, or balanced epochs, are for."""
    bunch = load_digits()
    for label, size in enumerate((150, 150, 3, 3)):
        pictures = bunch.images[bunch.target == label]
        for index, picture in enumerate(pictures[: size + 25]):
            part = "train" if index < size else "test"
            grey = Image.fromarray((picture * 15.9).astype(np.uint8))
            save(tmp_path / "photos" / part / str(label) / f"{index}.png", grey.resize((32, 32)))
    plain = [*CONFIG, *overrides(
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
    assert (
        torch.load(runs["plain"].output / "net.pt").keys()
        == torch.load(runs["weights"].output / "net.pt").keys()
    )


def test_three_grey_images_of_any_size_in_each_of_200_classes_train_by_one_command(tmp_path):
    random = np.random.default_rng(0)
    for label in range(200):
        for index in range(3):
            pixels = random.integers(0, 256, tuple(random.integers(9, 60, 2)), dtype=np.uint8)
            save(tmp_path / "photos" / f"{label:03}" / f"{index}.png", Image.fromarray(pixels))
    small = overrides(
        data__image_size=32,
        data__resize=36,
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

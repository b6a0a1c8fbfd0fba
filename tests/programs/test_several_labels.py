"""A network that gives an image several labels: predictions, exports, the report, and refusals."""

import contextlib
import csv
import io
import json
import pathlib

import pytest
from support import DIGITS, error_line, overrides

import checkpoint
import train
from classify.models import net_file
from workbench import notebook
from workbench.publish import forms, serve
from workbench.reports import html_report
from workbench.reports.recorded_run import RecordedRun

LABELS = [["curved", "even", "loop"], [], ["curved", "even", "prime"], ["curved", "prime"]]  # of the digits


def said(*arguments: object) -> str:
    with contextlib.redirect_stdout(out := io.StringIO()):
        assert checkpoint.main([str(each) for each in arguments]) == 0
    return out.getvalue()


def data(runs) -> list[str]:
    return overrides(
        data=json.dumps({"dataset": "table", "root": str(runs.files["table"]), "several_labels": ";"})
    )


@pytest.fixture
def trained(runs) -> pathlib.Path:
    made = runs.straight("labels", 1)
    assert made.code == 0, made.stderr
    return made.output


@pytest.mark.parametrize("form", ["net.pt", "net.safetensors", "net.onnx", "hub"])
def test_every_form_gives_the_same_labels(runs, trained, tmp_path, form):
    target = tmp_path / form
    said("export", trained, target, *(["--format", "hf"] if form == "hub" else []))
    summary = json.loads((trained / "summary.json").read_text())
    thresholds = net_file.read_description(target)["thresholds"]
    assert (
        thresholds == summary["validation"]["per_class_threshold"] == summary["test"]["per_class_threshold"]
    )
    assert set(thresholds.values()) != {0.5}
    photos = sorted((runs.files["photos"] / "test").rglob("*.png"))
    rows = json.loads(said("predict", target, *photos, "--json"))
    for row in rows:
        chances = row["probabilities"]
        assert sorted(row["labels"]) == sorted(name for name in chances if chances[name] >= thresholds[name])
        assert row["labels"] == sorted(row["labels"], key=lambda name: -chances[name])
    digits = [int(photo.parent.name[-1]) for photo in photos]
    right = sum(sorted(row["labels"]) == LABELS[digit] for row, digit in zip(rows, digits, strict=True))
    assert right / len(rows) == pytest.approx(summary["test"]["accuracy"])
    found = json.loads(said("evaluate", target, *DIGITS, *data(runs), "--json"))
    for name in ("accuracy", "mean_average_precision", "macro_f1", "loss"):
        assert found[name] == pytest.approx(summary["test"][name], rel=1e-4)
    if form == "hub":
        card = (target / "README.md").read_text()
        assert "any number of 4 labels" in card and "softmax" not in card


def test_a_table_a_page_and_python_show_the_labels(runs, trained, tmp_path):
    photo = runs.files["photos"] / "test" / "digit 0" / "3.png"
    classifier = forms.read(trained)
    (row,) = json.loads(said("predict", trained, photo, "--json"))
    shown = said("predict", trained, photo, "--csv", tmp_path / "answers.csv")
    (cells,) = csv.DictReader((tmp_path / "answers.csv").read_text().splitlines())
    assert (cells["file"], cells["labels"]) == (str(photo), ", ".join(row["labels"]))
    assert {name: float(cells[name]) for name in row["probabilities"]} == row["probabilities"]
    assert shown.splitlines()[1].split() == ["image", "labels", "next"]
    for name in row["labels"]:
        assert f"{name} {row['probabilities'][name]:.1%}" in shown
    answer = serve.answer(classifier, photo.read_bytes())
    assert (answer["labels"], answer["unknown"]) == (row["labels"], False)
    (prediction,) = notebook.load(trained).predict(photo)
    assert prediction.labels == row["labels"] and prediction.probabilities == row["probabilities"]


def test_the_report_has_a_table_of_labels_and_no_confusion_matrix(trained, tmp_path):
    html_report.write([trained], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'alt=""' not in page  # an augmented image without a label has a name, too
    assert "average precision</th>" in page and "Confusion matrix" not in page
    assert "mean average precision (mAP)" in page
    run = RecordedRun.read(trained)
    mistake = run.classified["mistakes"][0]
    assert mistake["predicted"] != mistake["label"]
    names = " + ".join(run.classification["classes"][label] for label in mistake["label"]) or "no label"
    assert f"labelled {names}, loss {mistake['loss']:.2f}" in page
    damaged = json.loads((trained / "classification.json").read_text())
    damaged["test"]["mistakes"][0]["label"] = [4]
    (tmp_path / "run").mkdir()
    for file in trained.glob("*.json*"):
        (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "run" / "classification.json").write_text(json.dumps(damaged))
    assert "test.mistakes: predicted and label must be numbers of classes" in error_line(
        RecordedRun.read, tmp_path / "run"
    )


def test_a_network_and_data_of_the_other_kind_are_refused(runs, trained, capsys):
    refusals = {
        (
            "predict",
            trained,
            trained,
            "--unknown",
        ): f"--unknown: {trained} already gives an image any number of labels",
        (
            "evaluate",
            trained,
            *DIGITS,
            *data(runs),
            "--tta",
            "mirror",
        ): "--tta: mirror: does not work with several",
        (
            "audit",
            *DIGITS,
            *data(runs),
        ): "data.several_labels: ';': audits and heads need one label for each image",
    }
    for arguments, line in refusals.items():
        assert checkpoint.main([str(each) for each in arguments]) == 2
        assert capsys.readouterr().err.startswith(f"checkpoint.py: {line}")
    more = overrides(
        hyperparameters__loss="cross_entropy",
        hyperparameters__teacher=trained / "net.pt",
        hyperparameters__test_time_augmentation="{mirror: true}",
        searcher__metric="top5_accuracy",
    )
    assert train.main([*DIGITS, *data(runs), *more, "--check"]) == 2
    lines = capsys.readouterr().err
    for line in (
        "hyperparameters.loss: 'cross_entropy': is for one label an image",
        f"hyperparameters.teacher: {trained / 'net.pt'}: does not work with data.several_labels; remove it",
        "hyperparameters.test_time_augmentation: mirror: does not work with data.several_labels",
        "searcher.metric: 'top5_accuracy': no validation reports it; it needs more than five classes, and one",
    ):
        assert f"train.py: {line}" in lines
    single = overrides(hyperparameters__teacher=trained / "net.pt", data__dataset="digits")
    assert train.main([*DIGITS, *single, "--check"]) == 2
    assert "gives an image several labels; give a network of one label" in capsys.readouterr().err


def test_damaged_thresholds_are_refused(trained, tmp_path):
    description = net_file.read_description(trained / "net.pt")
    for thresholds in ({"even": 0.5}, {**description["thresholds"], "even": 2}, [0.5] * 4):
        text = json.dumps({**description, "thresholds": thresholds})
        (tmp_path / "net.json").write_text(text)
        assert error_line(net_file.read_description, tmp_path / "net.pt").startswith(
            f"{tmp_path}/net.json: thresholds: "
        )

"""Reports of runs: TensorBoard with its figures, the profile, the overview and the page."""

import dataclasses
import errno
import json
import pathlib
import re
import shutil

import filelock
import pytest
import torch
from matrix import ROWS, Runs
from support import overrides
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from test_matrix import scalars

import checkpoint
from classify.reports import summary
from deepspeed_trial.local.folder import LOCK
from workbench.reports import html_report
from workbench.reports.recorded_run import RecordedRun

DIGITS = ROWS["zero0"].arguments


def test_a_run_writes_figures_and_a_profile(train):
    run = train(*DIGITS, *overrides(hyperparameters__max_length="{batches: 18}"), "--profile", FIGURES="1")
    assert run.code == 0, run.stderr
    events = EventAccumulator(str(run.output)).Reload()
    tags = events.Tags()
    assert set(tags["images"]) == {"confusion_matrix", "hardest_mistakes"}
    assert {event.step for name in tags["images"] for event in events.Images(name)} == {18}
    assert {f"accuracy_of_class/{digit}" for digit in range(10)} < set(tags["scalars"])
    assert events.Scalars("accuracy/validation")[-1].step == 18
    assert set(scalars(run, "loss_scale")) == {1.0}
    assert "aten::convolution_backward" in (run.output / "profile.txt").read_text()
    (trace,) = run.output.glob("*.pt.trace.json")
    assert "ProfilerStep#" in trace.read_text()


def test_the_gradient_norm_is_there_without_clipping_and_changes_no_weight(train, tmp_path):
    """No gradient reaches the limit of the second run."""
    clipping = "hyperparameters__overwrite_deepspeed_args__gradient_clipping"
    runs = [train(*DIGITS, "--profile", *overrides(**{clipping: limit})) for limit in (0, 10**9)]
    norms = [scalars(run, "gradient_norm") for run in runs]
    assert norms[0] == norms[1] and len(set(norms[0])) == 8
    assert len({run.summary["weights_sha256"] for run in runs}) == 1
    assert set(EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Runs()) == {"run0", "run1"}
    assert "no profile: a profile needs 17 steps, and the run had 8" in runs[0].stderr


def test_a_summary_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def write(path, text):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "summary.json").write_text("the old one")
    monkeypatch.setattr(pathlib.Path, "write_text", write)
    with pytest.raises(OSError, match="No space"):
        summary.write(tmp_path, {"steps": 1, "validation": {"accuracy": 1.0}})
    assert (tmp_path / "summary.json").read_text() == "the old one"
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    ("name", "ranks"), [("zero0", 1), ("zero3", 2), ("pipeline", 2), ("moe", 1), ("experts", 2)]
)
def test_the_overview_counts_the_parameters_of_the_whole_network(runs: Runs, name, ranks):
    run = runs.straight(name, ranks)
    lines = dict(line.split(maxsplit=1) for line in run.stdout.splitlines()[1:7])
    size = sum(each.numel() for each in torch.load(run.output / "net.pt").values())
    counted = "" if name in ("moe", "experts") else ", 1.3 MFLOP an image"
    assert lines["network"] == f"net: {size:,} parameters, {size:,} trainable{counted}"


def test_a_report_names_the_classes_of_each_mistake(runs: Runs, tmp_path):
    output = runs.straight("zero0", 1).output
    assert checkpoint.main(["report", str(output), "--output", str(tmp_path / "report.html")]) == 0
    kept = json.loads((output / "classification.json").read_text())
    page = (tmp_path / "report.html").read_text()
    tiles = r"<figcaption>(\S+) (\d+)%<small>labelled (\S+), loss [\d.]+</small><small>image (\d+)</small>"
    shown = re.findall(tiles, page)
    classes = kept["classes"]
    assert shown == [
        (
            classes[each["predicted"]],
            f"{100 * each['probability']:.0f}",
            classes[each["label"]],
            str(each["image"]),
        )
        for each in kept["mistakes"]
    ]
    assert len({label for _, _, label, _ in shown}) > 1
    pictures = len(kept["mistakes"]) * 2 + len(kept["unsure"]) + len(kept["augmented"])  # with heat maps
    assert page.count('src="data:image/png') == pictures


def finished_run(name, accuracies, **searcher):
    validations = [
        {
            "group": "validation",
            "steps_completed": 10 * i,
            "loss": 1 / i,
            "accuracy": accuracy,
            "accuracy/cat": 1 / i,
        }
        for i, accuracy in enumerate(accuracies, 1)
    ]
    training = [{"group": "training", "steps_completed": i, "loss": 1 / i} for i in range(1, 31)]
    last = {"accuracy": accuracies[-1], "loss": 1 / len(accuracies), "per_class_accuracy": {"cat": 0.25}}
    summary = {"steps": 10 * len(accuracies), "validation": last}
    return RecordedRun(name, summary, {"config": {"searcher": searcher}}, {}, [*training, *validations])


@pytest.mark.parametrize(
    ("searcher", "metric", "last", "best"),
    [
        ({"metric": "accuracy", "smaller_is_better": False}, "accuracy", "60.00 %", "70.00 % after 20 steps"),
        ({"metric": "loss", "smaller_is_better": True}, "loss", "0.2500", "0.2500 after 40 steps"),
        (
            {"metric": "accuracy/cat", "smaller_is_better": False},
            "accuracy/cat",
            "25.00 %",
            "100.00 % after 10 steps",
        ),
        ({"metric": "macro_f1"}, "accuracy", "60.00 %", "70.00 % after 20 steps"),  # which no validation has
    ],
)
def test_the_headline_is_the_metric_by_which_checkpoints_are_compared(searcher, metric, last, best):
    run = finished_run("a", [0.5, 0.7, 0.7, 0.6], **searcher)
    assert run.metric == metric
    assert html_report._score(run, *run.last) == (last, "after 40 steps")
    assert " ".join(html_report._score(run, *run.best)) == best


def test_the_page_has_the_headline(runs: Runs, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(runs.straight("zero0", 1).output, output)
    described = json.loads((output / "run.json").read_text())
    described["config"]["searcher"] = {"metric": "macro_f1", "smaller_is_better": False}
    (output / "run.json").write_text(json.dumps(described))
    assert checkpoint.main(["report", str(output), "--output", str(tmp_path / "report.html")]) == 0
    score = json.loads((output / "summary.json").read_text())["validation"]["macro_f1"]
    assert f"<b>{score:.4f}</b>\n<span>macro_f1 of 360 " in (tmp_path / "report.html").read_text()


def test_a_report_has_the_best_beside_the_last_and_a_legend():
    runs = [finished_run("a", [0.5, 0.7, 0.7, 0.6]), finished_run("b", [0.5, 0.9])]
    assert [run.best for run in runs] == [(0.7, 20), (0.9, 20)]
    for shown, labels in (
        (runs[:1], ["training", "validation"]),
        (runs, ["a, training", "a", "b, training", "b"]),
    ):
        names = [run.name for run in shown]
        loss = html_report._curves(shown, names)[0]
        assert [line["name"] for line in loss["lines"]] == labels
        assert [line["thin"] for line in loss["lines"]] == [True, False] * len(shown)
        assert len({(line["colour"], line["dashes"]) for line in loss["lines"]}) == len(shown)


def test_a_test_is_in_the_headline_and_the_validation_beside_it():
    run = finished_run("a", [0.5, 0.7, 0.6])
    run.summary["validation"]["images"] = 50
    run.summary.update(test={"accuracy": 0.58, "images": 99}, chosen_on="validation images")
    assert html_report._headline(run) == {
        "score": "58.00 %",
        "lines": [
            "accuracy on 99 held-out test images",
            "validation 60.00 % of 50 images after 30 steps; best 70.00 % after 20 steps",
        ],
    }


def test_a_page_of_a_run_that_trains_loads_again_until_the_run_ends(runs: Runs, tmp_path, monkeypatch):
    output, page = tmp_path / "run", tmp_path / "report.html"
    shutil.copytree(runs.straight("zero0", 1).output, output)
    score = json.loads((output / "summary.json").read_text())["validation"]["accuracy"]
    (output / "summary.json").unlink()
    pages = []

    def end_the_run(seconds):
        pages.append(page.read_text())
        lock.release()

    monkeypatch.setattr(html_report.time, "sleep", end_the_run)
    lock = filelock.FileLock(output / LOCK, is_singleton=False)
    lock.acquire()
    html_report.follow([output], page)
    (during,) = pages
    after = page.read_text()
    assert '<meta http-equiv="refresh" content="5">' in during and "http-equiv" not in after
    for text in (during, after):
        assert f"<b>{100 * score:.2f} %</b>" in text and ", so far" in text


def test_a_run_without_a_validation_has_a_page(runs: Runs, tmp_path):
    source, output = runs.straight("zero0", 1).output, tmp_path / "run"
    output.mkdir()
    shutil.copy(source / "run.json", output)
    lines = (source / "metrics.jsonl").read_text().splitlines()
    training = [line for line in lines if json.loads(line)["group"] == "training"]
    (output / "metrics.jsonl").write_text("\n".join(training))
    assert checkpoint.main(["report", str(output)]) == 0
    page = (output / "report.html").read_text()
    assert "no validation yet, after" in page and "training" in page and "Most certain mistakes" not in page


def test_runs_of_the_same_name_are_told_apart():
    folders = ["/x/a/net", "/x/b/net"]
    runs = [dataclasses.replace(finished_run("net", [0.5]), folder=pathlib.Path(each)) for each in folders]
    assert html_report._names(runs) == ["a/net", "b/net"]
    assert html_report._names(runs[:1] * 2) == ["x/a/net (1)", "x/a/net (2)"]

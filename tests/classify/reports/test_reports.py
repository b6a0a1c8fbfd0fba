"""What a run shows: TensorBoard's event files, and the profile."""

import numpy as np
import pytest
import torch
from support import PROJECT, overrides, train_many
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from classify.reports import html_report
from classify.reports.finished_run import FinishedRun

DIGITS = ["--config", str(PROJECT / "experiments/digits.yaml")]


SCALARS = {
    "loss/train", "loss/validation", "accuracy/validation", "accuracy_of_class/3", "learning_rate", "gradient_norm",
    "loss_scale", "images_per_second",
}  # fmt: skip


def scalars(run):
    return EventAccumulator(str(run.output), size_guidance={"scalars": 0}).Reload()


def test_event_files_hold_every_series(mode_runs):
    _, _, runs = mode_runs
    for mode, run in runs.items():
        events = scalars(run)
        tags = events.Tags()
        assert set(tags["scalars"]) >= SCALARS, mode
        assert set(tags["images"]) == {"confusion_matrix", "hardest_mistakes"}, mode
        assert tags["graph"] or mode.startswith(("moe", "experts")), mode
        last = events.Scalars("accuracy/validation")[-1]
        assert last.step == run.summary["steps"], mode
        assert last.value == pytest.approx(run.summary["validation"]["accuracy"]), mode
        norms = [event.value for event in events.Scalars("gradient_norm")]
        assert len(norms) == 40 and len(set(norms)) > 10 and max(norms) < np.inf, mode
        losses = [entry["loss"] for entry in run.metrics if entry["group"] == "training"]
        assert [event.value for event in events.Scalars("loss/train")] == pytest.approx(losses), mode
        if mode != "fp16":
            assert {event.value for event in events.Scalars("loss_scale")} == {1.0}, mode


def test_the_gradient_norm_is_there_without_clipping(tmp_path):
    """And changes no weight: as with a limit that no gradient reaches."""
    rows = {
        str(limit): [
            *DIGITS,
            *overrides(
                hyperparameters__max_length="{batches: 45}",
                scheduling_unit=1,
                hyperparameters__overwrite_deepspeed_args__gradient_clipping=limit,
            ),
        ]
        for limit in (0, 10**9)
    }
    runs = train_many(tmp_path, rows)
    norms = [[event.value for event in scalars(run).Scalars("gradient_norm")] for run in runs.values()]
    assert norms[0] == norms[1] and len(set(norms[0])) > 40
    assert len({run.summary["weights_sha256"] for run in runs.values()}) == 1
    files = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Runs()
    assert set(files) == set(rows)  # what TensorBoard calls them


def finished_run(name, accuracies):
    validations = [
        {"group": "validation", "steps_completed": 10 * i, "loss": 1 / i, "accuracy": accuracy}
        for i, accuracy in enumerate(accuracies, 1)
    ]
    training = [{"group": "training", "steps_completed": i, "loss": 1 / i} for i in range(1, 31)]
    summary = {"steps": 10 * len(accuracies), "validation": {"accuracy": accuracies[-1]}}
    return FinishedRun(name, summary, {}, {}, [*training, *validations])


def test_a_report_says_the_best_beside_the_last_and_which_line_is_which():
    runs = [finished_run("a", [0.5, 0.7, 0.7, 0.6]), finished_run("b", [0.5, 0.9])]
    assert [run.best for run in runs] == [(0.7, 20), (0.9, 20)]
    for shown, labels in (
        (runs[:1], ["training", "validation"]),
        (runs, ["a", "b", "training", "validation"]),
    ):
        (axes,) = html_report._curves(shown)["loss"].axes
        legend = axes.get_legend()
        assert legend and [text.get_text() for text in legend.get_texts()] == labels
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert lines["training"].get_marker() == "None" and lines["validation"].get_marker() == "o"


def test_every_mode_counts_the_whole_networks_parameters(mode_runs):
    processes, _, runs = mode_runs
    for mode, run in runs.items():
        lines = dict(line.split(maxsplit=1) for line in run.stdout.splitlines()[1:7])
        size = sum(each.numel() for each in torch.load(run.output / "net.pt").values())
        counted = "" if "experts" in mode or "moe" in mode else ", 1.3 MFLOP an image"
        assert lines["network"] == f"net: {size:,} parameters, {size:,} trainable{counted}", mode
        assert lines["engine"].startswith(f"{processes} process"), mode
        assert lines["folder"] == str(run.output), mode


def test_a_profile_is_recorded(train):
    run = train(*DIGITS, "--profile", *overrides(hyperparameters__max_length="{batches: 30}"))
    assert run.code == 0, run.stderr
    assert "aten::convolution_backward" in (run.output / "profile.txt").read_text()
    (trace,) = run.output.glob("*.pt.trace.json")
    assert "ProfilerStep#" in trace.read_text()
    short = train(*DIGITS, "--profile", *overrides(hyperparameters__max_length="{batches: 9}"))
    assert short.code == 0 and "no profile: its steps end with the 17th, and there were 9" in short.stderr

"""The harness runs trials that know nothing of it: what Determined promises holds on a CPU, and to the bit."""

import json
import pathlib
from typing import Any

import determined as det
import numpy as np
import pytest
import torch
from determined import pytorch
from line_trial import ACCUMULATION, MICRO_BATCH, POINTS, LineTrial, Points
from support import PROJECT, Run, checkpoints, error_line, execute, launcher, truncate_model

from harness.trainer import Trainer, init


def saved_in(output):
    return checkpoints(Run(0, "", "", output))


STEPS_AN_EPOCH = POINTS // (MICRO_BATCH * ACCUMULATION)
KEEP = {"checkpoint_storage": {"save_trial_latest": 99}, "reproducibility": {"experiment_seed": 3}}


def fit(output, trial_class=LineTrial, resumes=False, **arguments):
    """Trains in this process, and gives the trial and what the training has done."""
    hparams: dict[str, Any] = {
        key: arguments.pop(key) for key in ("form", "deepspeed_config") if key in arguments
    }
    with init(hparams, KEEP, output=output, resumes=resumes) as context:
        trial = trial_class(context)
        arguments = {"max_length": pytorch.Batch(20), "checkpoint_policy": "none", **arguments}
        return trial, Trainer(trial, context).fit(**arguments)


ROWS: dict[str, dict[str, Any]] = {
    "tensor": {"form": "tensor"},
    "two engines": {"form": "two engines"},
    "manual": {"form": "manual"},
    "pipeline": {"form": "pipeline"},
    "ZeRO 2": {"deepspeed_config": {"zero_optimization": {"stage": 2}}},
}


@pytest.mark.parametrize("row", ["plain", *ROWS])
def test_every_form_resumes_to_the_same_bits_in_the_middle_of_an_epoch(row, tmp_path):
    """From step 9 of 20, epochs being 6: weights, order, noise, dropout and metrics are as if never stopped."""
    periods = {"validation_period": pytorch.Batch(5), "checkpoint_period": pytorch.Batch(9)}
    straight, done = fit(tmp_path / "run", **periods, **ROWS.get(row, {}))
    assert (done.steps, done.epochs) == (20, 3)
    assert done.validation["error"] < 10
    at_9 = saved_in(tmp_path / "run")[9]
    torch.manual_seed(99)
    resumed, again = fit(tmp_path / "other", latest_checkpoint=str(at_9), **periods, **ROWS.get(row, {}))
    assert all(map(torch.equal, straight.weights(), resumed.weights()))
    assert again.validation == done.validation
    others, _ = fit(tmp_path / "rarely", **ROWS.get(row, {}))
    assert all(map(torch.equal, straight.weights(), others.weights()))  # however often it validates
    assert straight.places[-1] == resumed.places[-1] == (3, 19)
    if row != "pipeline":
        calls = 1 if row == "manual" else ACCUMULATION
        assert resumed.places[0] == straight.places[9 * calls] == (1, 9)
        assert all(map(torch.equal, straight.seen[9 * ACCUMULATION :], resumed.seen))
        for epoch in range(3):
            seen = torch.cat(straight.seen[epoch * 12 : epoch * 12 + 12])
            assert sorted(seen.tolist()) == list(range(POINTS))
        assert not torch.equal(torch.cat(straight.seen[:12]), torch.cat(straight.seen[12:24]))


def test_periods_epochs_and_callbacks(tmp_path):
    """Upstream's loop validates once where it should four times, always in epoch 0."""
    trial, _ = fit(tmp_path, validation_period=pytorch.Batch(5), form="own loader")
    calls = trial.calls
    assert calls.counts["validation_start"] == calls.counts["validation_end"] == 4
    assert calls.epochs == [0, 1, 2, 3]
    assert [batch for _, batch in trial.places] == [step for step in range(20) for _ in range(ACCUMULATION)]
    assert [epoch for epoch, _ in trial.places] == [step // STEPS_AN_EPOCH for _, step in trial.places]
    once = ("startup", "start", "written", "uploaded", "shutdown")
    assert all(calls.counts[name] == 1 for name in once)
    # A workload ends with an epoch, a validation or the training: after 5, 6, 10, 12, 15, 18 and 20 steps.
    assert calls.counts["workload_end"] == 7 and calls.counts["epoch_end"] == 3
    assert [len(batches) for _, batches in calls.workloads] == [10, 2, 8, 4, 6, 6, 4]
    trial, _ = fit(tmp_path / "epochs", max_length=pytorch.Epoch(4), validation_period=pytorch.Epoch(2))
    assert trial.calls.counts["validation_end"] == 2 and trial.calls.counts["workload_end"] == 4


class WithTestData(LineTrial):
    """Has test data: half of the points."""

    def build_test_data_loader(self):
        return pytorch.DataLoader(torch.utils.data.Subset(Points(), range(24)), MICRO_BATCH)


@pytest.mark.parametrize("form", ["plain", "pipeline"])
def test_test_data_are_evaluated_once_at_the_end_and_change_nothing(tmp_path, form):
    periods: dict[str, Any] = {"validation_period": pytorch.Batch(5), "form": form}
    plain, without = fit(tmp_path / "plain", **periods)
    trial, done = fit(tmp_path / "tested", trial_class=WithTestData, **periods)
    assert done.test.keys() >= {"error", "twice"} and not without.test
    assert done.validation == without.validation
    assert all(map(torch.equal, plain.weights(), trial.weights()))
    assert trial.calls.counts == plain.calls.counts  # as of validations, of which there is no other
    lines = [json.loads(line) for line in (tmp_path / "tested/metrics.jsonl").read_text().splitlines()]
    (tested,) = (line for line in lines if line["group"] == "test")
    assert tested["steps_completed"] == 20 and tested["error"] == done.test["error"] > 0
    assert tested["error"] != done.validation["error"]


def test_a_long_run_of_a_pipeline_repeats_itself(tmp_path):
    arguments = {
        "max_length": pytorch.Batch(1000),
        "validation_period": pytorch.Batch(500),
        "form": "pipeline",
    }
    first, _ = fit(tmp_path / "first", **arguments)
    second, _ = fit(tmp_path / "second", **arguments)
    assert first.calls.workloads == second.calls.workloads
    assert all(map(torch.equal, first.weights(), second.weights()))


def test_metrics_are_what_upstream_takes(tmp_path):
    """Scalars by one transfer a report, without their graphs; arrays as they are; a reducer over the validation."""

    class Trial(LineTrial):
        def train_batch(self, *args):
            metrics = super().train_batch(*args)
            self.held.add_(1)
            return {**metrics, "counted": self.held, "pair": torch.ones(2) * self.held, "odd": [1, "two"]}

        def __init__(self, context):
            super().__init__(context)
            self.held = torch.zeros(())

    trial, done = fit(tmp_path, Trial, reporting_period=pytorch.Batch(3), max_length=pytorch.Batch(6))
    averages, batches = trial.calls.workloads[-1]
    assert [each["counted"] for each in batches] == [7, 8, 9, 10, 11, 12]  # which the trial changes in place
    assert averages["counted"] == 9.5 and type(batches[0]["loss"]) is float
    assert batches[0]["pair"].tolist() == [7, 7] and batches[0]["odd"] == [1, "two"]
    assert done.validation["twice"] == pytest.approx(2 * done.validation["error"])


WRONG = {
    "no dictionary": (
        det.errors.InvalidExperimentException,
        "train_batch must return a dictionary",
        lambda self, *args: (0, 0),
    ),
    "too few micro-batches": (
        AssertionError,
        "did not train for gradient accumulation steps",
        lambda self, iterator, *args: LineTrial.train_batch(self, iterator, *args),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_a_trial_are_named_as_upstream_does(name, tmp_path):
    error, message, train_batch = WRONG[name]

    class Trial(LineTrial):
        def __init__(self, context):
            super().__init__(context)
            context.disable_auto_grad_accumulation()

    Trial.train_batch = train_batch  # type: ignore[method-assign]
    with pytest.raises(error, match=message):
        fit(tmp_path, Trial)


def test_checkpoints_that_do_not_fit_are_refused_in_one_line(tmp_path):
    """Damaged, or of a trial with another number of engines; as upstream, an AssertionError."""
    fit(tmp_path / "run", max_length=pytorch.Batch(2))
    (saved,) = saved_in(tmp_path / "run").values()

    def go_on(**arguments):
        fit(tmp_path / "other", resumes=True, latest_checkpoint=str(saved), **arguments)

    line = error_line(lambda: go_on(form="two engines"))
    assert "It holds 1 engines, and the trial has 2" in line
    with pytest.raises(AssertionError, match="Failed to load deepspeed checkpoint"):
        go_on(form="two engines")
    assert "optimizer.type: 'SGD'" in error_line(
        lambda: go_on(deepspeed_config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    )
    truncate_model(saved)
    assert "mp_rank_00_model_states.pt: cannot be loaded safely" in error_line(go_on)


def test_callbacks_keep_their_names_and_numpy_numbers(tmp_path):
    """One that is called monitor is called; a state of numpy's numbers is loaded; another kind is named."""

    class Trial(LineTrial):
        kept: Any = np.float64(0.5)

        def build_callbacks(self):
            self.calls.state_dict = lambda: {"kept": self.kept}
            self.calls.load_state_dict = lambda state: setattr(self, "loaded", state["kept"])
            return {"monitor": self.calls}

    class Other(Trial):
        kept = pathlib.PurePosixPath("x")

    short = {"max_length": pytorch.Batch(2)}
    trial, _ = fit(tmp_path / "run", Trial, **short)
    assert trial.calls.counts["start"] == 1
    (saved,) = saved_in(tmp_path / "run").values()
    more = {"resumes": True, "max_length": pytorch.Batch(3)}
    trial, _ = fit(tmp_path / "run", Trial, latest_checkpoint=str(saved), **more)
    assert trial.loaded == 0.5
    fit(tmp_path / "other", Other, **short)
    (saved,) = saved_in(tmp_path / "other").values()
    line = error_line(lambda: fit(tmp_path / "other", Other, latest_checkpoint=str(saved), **more))
    assert "allow it with torch.serialization.add_safe_globals" in line


def test_what_is_no_checkpoint_and_no_data_is_one_line(tmp_path):
    line = error_line(lambda: fit(tmp_path / "a", latest_checkpoint="nope"))
    assert line.startswith("latest_checkpoint: 'nope': not found, or damaged")

    class Empty(LineTrial):
        def build_validation_data_loader(self):
            return pytorch.DataLoader(Points(), POINTS + 1, drop_last=True)

    assert error_line(lambda: fit(tmp_path / "b", Empty)).startswith("validation data: holds no batch")


def test_too_little_data_for_a_step_is_one_line(tmp_path):
    line = error_line(lambda: fit(tmp_path, deepspeed_config={"gradient_accumulation_steps": 50}))
    assert line.startswith("training data: fewer than the 50 micro-batches of one optimizer step")


TWO_RANKS = """
import sys, pathlib
sys.path[:0] = sys.argv[2:4]
from line_trial import *
from harness.trainer import Trainer, init
from determined.pytorch.deepspeed import ModelParallelUnit
output, rank = pathlib.Path(sys.argv[1]), int(__import__("os").environ["RANK"])

class Trial(LineTrial):
    def __init__(self, context):
        super().__init__(context)
        torch.manual_seed(rank)  # as of dropout that differs by rank
        context.set_mpu(ModelParallelUnit(rank, 2, rank == 0, True))  # rank 1 reports nothing
    def train_batch(self, *args):
        metrics = super().train_batch(*args)
        return metrics if rank == 0 else None

with init(output=output) as context:
    trial = Trial(context)
    Trainer(trial, context).fit(max_length=pytorch.Epoch(2))
    seen = context.distributed.gather(torch.cat(trial.seen).tolist())
if rank == 0:
    for epoch in range(2):
        of_ranks = [each[epoch * POINTS // 2 : (epoch + 1) * POINTS // 2] for each in seen]
        assert sorted(sum(of_ranks, [])) == list(range(POINTS)), of_ranks
    assert len(trial.calls.workloads[-1][1]) == 3 * ACCUMULATION
"""


def test_ranks_shard_one_order_and_report_where_they_should(tmp_path):
    """Though the ranks' generators differ, every point is trained on once an epoch."""
    here = pathlib.Path(__file__).parent
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    command = [*launcher("torchrun", 2), str(script), str(tmp_path / "run"), str(here), str(PROJECT)]
    run = execute(command, tmp_path)
    assert run.code == 0, run.stderr


EXAMPLE = """
import hashlib, sys, pathlib
from examples.text import *
output, resumes = pathlib.Path(sys.argv[1]), sys.argv[2] == "resume"
config = YAML(typ="safe").load(pathlib.Path("examples/text.yaml").read_text())
config["checkpoint_storage"] = {"save_trial_latest": 9}
with init({**config["hyperparameters"], "width": 16}, config, output=output, resumes=resumes) as context:
    checkpoint = find_checkpoint(context, "latest") if resumes else None
    trial = TextTrial(context)
    length = 4 if sys.argv[2] == "part" else 8
    Trainer(trial, context).fit(max_length=pytorch.Batch(length), latest_checkpoint=checkpoint)
    weights = b"".join(each.detach().numpy().tobytes() for each in trial.engine.module.parameters())
    if context.distributed.rank == 0:
        print("weights", hashlib.sha256(weights).hexdigest())
"""


def test_the_example_resumes_to_the_same_bits_in_two_processes(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    told = {}
    for name, folder in {"whole": "a", "part": "b", "resume": "b"}.items():
        command = [*launcher("torchrun", 2), str(script), str(tmp_path / folder), name]
        run = execute(command, tmp_path, PYTHONPATH=str(PROJECT))
        assert run.code == 0, run.stderr
        told[name] = next(line for line in run.stdout.splitlines() if line.startswith("weights"))
    assert told["resume"] == told["whole"] != told["part"]

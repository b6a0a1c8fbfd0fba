"""A trial on a Determined cluster: real launch layer, real core context, and a stand-in for the master over HTTP."""

import json
import logging
import os
from typing import Any, cast

import determined as det
import mlflow
import pytest
from containers import SMALL, run_alone, run_container
from determined import _info, core
from master import Master
from support import DIGITS, overrides, train_many

import checkpoint
from classify.models import net_file, state_dicts
from deepspeed_trial import cluster
from deepspeed_trial.cluster import cluster_experiment, errors_end_the_trial, leaves_once_reported
from deepspeed_trial.errors import Diverged, InvalidInput, LostRank, TrainingStopped, UnreadableData
from deepspeed_trial.experiment import Experiment
from deepspeed_trial.trainer import find_checkpoint

HPARAMS = {"max_length": {"epochs": 3}, "deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": {}}
CONFIG = {
    "searcher": {"name": "adaptive_asha", "metric": "loss", "smaller_is_better": True},
    "reproducibility": {"experiment_seed": 5},
    "min_validation_period": {"epochs": 1},
    "scheduling_unit": 50,
    "registry_auth": None,  # as the master fills fields in
}


def test_everything_comes_from_the_cluster(monkeypatch):
    """From a real ClusterInfo, as Determined reads it from its files in a trial's container."""
    assert cluster_experiment() is None
    trial = _info.TrialInfo(1, 2, 7, HPARAMS, CONFIG, 0, 1, False, None)
    names: Any = dict.fromkeys("cluster_id agent_id task_id allocation_id session_token".split(), "name")
    ids = {**names, "slot_ids": [0], "task_type": "TRIAL", "trial_info": trial, "latest_checkpoint": "uuid"}
    monkeypatch.setattr(_info, "_info", det.ClusterInfo("http://localhost:8080", **ids))
    loaded = cluster_experiment()
    assert loaded is not None
    assert loaded.hyperparameters == HPARAMS
    assert (loaded.max_length, loaded.metric, loaded.smaller_is_better) == (("epochs", 3), "loss", True)
    assert (loaded.seed, loaded.scheduling_unit) == (5, 50)
    assert loaded.period("min_validation_period") == ("epochs", 1)
    assert find_checkpoint(cast(Any, None), None) == "uuid"


RETRIED = [LostRank("rank 1 is gone"), UnreadableData("the server is away"), OSError("disk")]


@pytest.mark.parametrize("error", [InvalidInput("batch"), TrainingStopped("the loss is nan"), *RETRIED])
def test_errors_that_a_restart_repeats_are_invalid_hyperparameters(monkeypatch, capsys, error):
    """The search continues after them; the cluster starts the trial again after other errors."""
    for on_cluster in False, True:
        monkeypatch.setattr(cluster, "on_cluster", lambda is_there=on_cluster: is_there)
        is_invalid = on_cluster and error not in RETRIED
        with pytest.raises(det.InvalidHP if is_invalid else type(error)), errors_end_the_trial():
            raise error
        assert (str(error) in capsys.readouterr().err) == is_invalid


def test_one_rank_says_what_every_rank_raises(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "on_cluster", lambda: True)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        said = {}
        for error in InvalidInput("batch"), Diverged("the loss is nan"), TrainingStopped("no memory left"):
            with pytest.raises(det.InvalidHP), errors_end_the_trial():
                raise error
            said[str(error)] = str(error) in capsys.readouterr().err
        assert list(said.values()) == ([True] * 3 if rank == "0" else [False, False, True])


def test_the_log_has_no_line_that_nobody_can_act_on(monkeypatch, caplog):
    cluster.log_from_chief(Experiment({}, {}), True)
    caplog.set_level(logging.INFO, "determined.pytorch")
    logging.getLogger("determined.pytorch").info("ModelParallelUnit(data_parallel_rank=0)")
    logging.getLogger("determined.common.storage.shared").warning("Ignoring partial checkpoint download")
    logging.getLogger("determined.pytorch").info("validated")
    assert [record.getMessage() for record in caplog.records] == ["validated"]


ENDS = [(det.InvalidHP("batch"), KeyboardInterrupt), (SystemExit(3), SystemExit), (OSError(), OSError)]


@pytest.mark.parametrize(("error", "end"), ENDS)
def test_nothing_follows_the_report_of_invalid_hyperparameters(monkeypatch, tmp_path, error, end):
    """The master kills a container that is still there 10 seconds later, and shows the trial as canceled."""

    def leave(code):
        assert code == 0
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(end), leaves_once_reported(), core.init(checkpoint_storage=str(tmp_path)):
        raise error


def off_the_cluster(folder, slots) -> dict[str, Any]:
    """The summary of the same training in the same number of processes."""
    row = [*DIGITS, *overrides(scheduling_unit=10, hyperparameters=json.dumps(SMALL))]
    return train_many(folder, {"here": row}, slots)["here"].summary


def weights_of(folder) -> str:
    return state_dicts.sha256(net_file.of_checkpoint(folder))


def test_a_trial_in_one_slot(tmp_path):
    """It reports, and ends on the weights of the same training without a cluster."""
    with Master() as master:
        trial = run_container(tmp_path / "trial", master, 1, SMALL)
    assert trial.code == 0, trial.stderr
    validations = master.metrics("validation")
    assert list(validations) == [40, 80, 90]
    assert validations[90]["images"] == 360 and validations[90]["accuracy"] > 0.5
    assert all(isinstance(value, (int, float)) for each in validations.values() for value in each.values())
    epoch = 45  # at whose end metrics are reported, too
    assert list(master.metrics("training")) == sorted([*range(10, 100, 10), epoch])
    progress = [body["progress"] if isinstance(body, dict) else body for body in master.bodies("/progress")]
    assert progress[-1] == 1 and progress == sorted(progress)
    saved = master.bodies("/checkpoints")[-1]
    assert saved["metadata"]["steps_completed"] == 90
    files = {"det_state_dict_rank0.pth", "trial_state.pkl", "model0/state.json", "net.json", "code/"}
    assert files <= set(saved["resources"])
    stored = tmp_path / "trial/shared/checkpoints" / saved["uuid"]  # as `det checkpoint download` gives it
    assert checkpoint.main(["export", str(stored), str(tmp_path / "net.pt")]) == 0
    assert json.loads((tmp_path / "net.json").read_text())["provenance"]["steps"] == 90
    assert any("tfevents" in str(path) for path in (tmp_path / "trial/shared").rglob("*"))
    assert "Reported checkpoint" in trial.stderr + trial.stdout
    assert weights_of(stored) == off_the_cluster(tmp_path, 1)["weights_sha256"]


def test_a_trial_in_two_slots_is_paused_and_resumed(tmp_path, monkeypatch):
    """It ends as if never paused, on the weights of a training without a cluster; MLflow has one run."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client, folder = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"), tmp_path / "trial"
    tracked = {**SMALL, "track": ["mlflow"]}
    with Master() as master:
        master.preempt_after_steps = 20
        paused = run_container(folder, master, 2, tracked)
    assert paused.code == 0, paused.stderr
    assert "[rank=1] INFO" not in paused.stderr + paused.stdout
    before = master.metrics("training")
    experiments = [each.experiment_id for each in client.search_experiments()]
    assert [run.info.status for run in client.search_runs(experiments)] == ["KILLED"]
    assert master.bodies("/signals/ack_preemption")
    saved = master.bodies("/checkpoints")[-1]
    steps = saved["metadata"]["steps_completed"]
    assert 20 <= steps < 90
    with Master() as master:
        rest = run_container(folder, master, 2, tracked, again=(saved["uuid"], steps))
    assert rest.code == 0, rest.stderr
    assert min(master.metrics("training")) > steps
    (run,) = client.search_runs(experiments)
    recorded = client.get_metric_history(run.info.run_id, "training/loss")
    assert run.info.status == "FINISHED"
    assert [each.step for each in recorded] == [*before, *master.metrics("training")]
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"net.pt", "net.json"}
    saved, here = master.bodies("/checkpoints")[-1], off_the_cluster(tmp_path, 2)
    assert {"det_state_dict_rank0.pth", "det_state_dict_rank1.pth"} <= set(saved["resources"])
    assert weights_of(folder / "shared/checkpoints" / saved["uuid"]) == here["weights_sha256"]
    assert master.metrics("validation")[90]["loss"] == here["validation"]["loss"]


RUN = {1: run_alone, 2: run_container}  # by the trial's slots
SLOTS = pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.soak)])


@SLOTS
def test_a_trial_that_its_search_stops(tmp_path, slots):
    """The master marks the trial and tells it nothing; the trial ends with a checkpoint, for good."""
    searcher = {"name": "adaptive_asha", "metric": "accuracy", "smaller_is_better": False, "max_trials": 4}
    with Master() as master:
        master.stop_after_steps = 80
        run = RUN[slots](tmp_path / "trial", master, slots, SMALL, config={"searcher": searcher})
    assert run.code == 0, run.stderr
    assert list(master.metrics("validation")) == [40, 80] and max(master.metrics("training")) == 80
    assert master.bodies("/checkpoints")[-1]["metadata"]["steps_completed"] == 80
    assert not master.bodies("/signals/ack_preemption") and not master.bodies("/early_exit")
    assert "the search has stopped this trial after step 80" in run.stderr


# The master lets these pass, by the trial's slots; the trial's log has the line
UNEVEN = "train_batch_size: 15: is not a multiple of 2 processes; use 14 or 16"
WRONG: dict[int, tuple[dict, str]] = {
    1: ({"max_length": None}, "hyperparameters.max_length: None: must be"),
    2: ({"overwrite_deepspeed_args": {"train_batch_size": 15}}, UNEVEN),
}


@SLOTS
def test_a_wrong_trial_ends_at_once_as_invalid(tmp_path, slots):
    """The master hears of it, and neither restarts the trial nor ends the search."""
    wrong, line = WRONG[slots]
    with Master() as master:
        run = RUN[slots](tmp_path / "trial", master, slots, {**SMALL, **wrong})
    assert line in run.stderr + run.stdout
    reasons = [body for path, body in master.posted if "early_exit" in path]
    assert reasons and "INVALID_HP" in json.dumps(reasons[0])
    assert not master.bodies("/checkpoints")


def test_the_test_at_the_end_is_reported_as_a_group(tmp_path):
    """The master judges by the held-out validation images; the test's images come once, as `test`."""
    hparams = {**SMALL, "max_length": {"batches": 50}}
    config = {"data": {"dataset": "digits", "validation": 0.2}}
    with Master() as master:
        run = run_alone(tmp_path, master, 1, hparams, config=config)
    assert run.code == 0, run.stderr
    validations, tests = master.metrics("validation"), master.metrics("test")
    assert [*validations] == [40, 50] and [*tests] == [50]
    assert {each["images"] for each in validations.values()} == {287} and tests[50]["images"] == 360
    assert 0 < tests[50]["accuracy"] < 1 and tests[50]["loss"] != validations[50]["loss"]
